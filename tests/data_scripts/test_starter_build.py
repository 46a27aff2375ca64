"""The parts of `data/starter/build.py` that run without `mmseqs`: the structure database, the choice, the tables."""

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from esmshard.data.labels.coordinates import CoordinateLabels
from esmshard.io.paths import shipped
from esmshard.io.store import ingest


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("starter_build", shipped("data") / "starter" / "build.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before  # the script adds the directory of rebuild.py
    return module


TEN = "ACDEFGHIKL"


def backbone(length: int, gap_after: int | None = None, bond: int = 133) -> np.ndarray:
    """N, CA, C and O in 0.01 A, there and back along x: CA 1.46 A after N, C 1.52 A after CA, the next N beside C."""
    atoms, y = np.zeros((length, 4, 3), np.uint16), 100
    for k in range(length):
        x = np.array([100, 246, 398, 398])
        atoms[k, :, 0] = x if k % 2 == 0 else 498 - x
        atoms[k, :, 1] = y
        atoms[k, 1, 2] = 50  # CA off the plane, so that Cb is defined
        y += bond if k == gap_after else 133
    return atoms


def database(path: Path, chains: list[tuple[str, str, str, np.ndarray]]) -> Path:
    """A structure database of (PDB code, chain name, sequence, atoms), with two rows of nobody's before each chain."""
    header, seq, atoms = b"\7" * 0x4D + struct.pack("<Q", len(chains)), b"", []
    for code, chain, sequence, atoms_L43 in chains:
        seq += b"WW"
        atoms.append(np.full((2, 4, 3), 9, np.uint16))
        header += struct.pack("<I", len(code)) + code.encode() + struct.pack("<I", len(chain)) + chain.encode()
        header += struct.pack("<IHh3f", len(seq), len(sequence), -3, 1.0, 2.0, 3.0)
        seq += sequence.encode()
        atoms.append(atoms_L43)
    n = len(seq)
    angles, access, depth, dssp = np.zeros((n, 2), "<i2"), np.zeros(n, "<u2"), np.zeros(n, "<u2"), b"H" * n
    others = (block.tobytes() for block in (angles, access, depth))
    blocks = [seq, np.concatenate(atoms).astype("<u2").tobytes(), *others, dssp]
    path.write_bytes(header + b"".join(struct.pack("<Q", n) + block for block in blocks))
    return path


def test_usable_chains_are_found_at_their_rows_and_written_in_the_format_of_the_project(build, tmp_path):
    good = TEN * 4
    broken = ("2DEF", "B", "MNPQRSTVWY" * 5, backbone(50, gap_after=20, bond=170))
    entries = [("1ABC", "A", good, backbone(40)), broken, ("3GHI", "XY", good + "MM", backbone(42))]
    file = database(tmp_path / "structure_db.dat", entries)
    chains = build.usable_chains(file)
    assert chains == {"1ABC_A": good, "3GHI_XY": good + "MM"}

    build.write_chains(tmp_path / "two.fasta", ["3GHI_XY", "1ABC_A"], chains, file)
    labels = CoordinateLabels(tmp_path / "two.fasta", ingest([tmp_path / "two.fasta"], tmp_path / "store"))
    cb_L3 = labels[1]["cb"]
    assert cb_L3.shape == (42, 3)
    # Ten residues on, everything is 13.3 A further along y. The sixth is a glycine, which has its CA; from there to the
    # Cb of the eighth it is 2.66 A along y, and from CA to Cb -0.5827 b x c + 0.5680 b - 0.5407 c = (-0.01, 0.87, 0.55)
    # with b = CA - N = (-1.46, 0, 0.5) and c = C - CA = (-1.52, 0, -0.5).
    assert np.abs(cb_L3[15] - cb_L3[5] - [0, 13.3, 0]).max() < 0.11
    assert np.abs(cb_L3[7] - cb_L3[5] - [-0.01, 2.66 + 0.87, 0.55]).max() < 0.11


def groups(sequences: list[str]) -> list[list[str]]:
    return [[s for s in sequences if s[0] == first] for first in {s[0] for s in sequences}]


BLAST = ((1, 70), (19, 44), (12, 30))
"""Code and number of residues of the sequences of a BLAST database."""


@pytest.mark.parametrize("seed", [0, 3])
def test_what_is_similar_to_the_sample_or_held_out_is_in_neither_training_file(
    build, monkeypatch, tmp_path, capsys, seed
):
    """The whole script over eight chains and six sequences; similar here means: begins with the same letter."""
    chain = {f"{k}XYZ_A": f + "MNPQRSTVWY" * (5 + k // 7) for k, f in enumerate("ACDEFGID")}
    entries = [(name[:4], "A", sequence, backbone(len(sequence))) for name, sequence in chain.items()]
    file = database(tmp_path / "structure_db.dat", [*entries, ("8BRK", "A", "M" * 51, backbone(51))])
    (tmp_path / "valid.fasta").write_text(">v\n" + "A" * 40 + "\n")
    (tmp_path / "test.fasta").write_text(">t\n" + "C" * 40 + "\n")
    # Chain 6 is not in the pool. Chain 7 is like chain 2, in another cluster.
    cluster = {f"{k}XYZ_A": f"c{c}" for k, c in {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 7: 7}.items()} | {"8BRK_A": "c9"}
    rows = "".join(f"{c}\t{name}\n" for name, c in cluster.items())
    (tmp_path / "pool.tsv").write_text("cluster\tchain\n" + rows)
    examples = {"family": "A" * 60, "same": chain["3XYZ_A"], "odd": "K*" * 40, "short": "L" * 39}  # A is in `valid`
    examples |= {"new": "HXU" * 20, "near": "HX" * 20}
    (tmp_path / "examples.fasta").write_text("".join(f">{name}\n{s}\n" for name, s in examples.items()))
    # In NCBIstdaa A is 1 and V 19: of a family in `valid`, new, and too short.
    (tmp_path / "few.psq").write_bytes(b"\0" + b"\0".join(bytes([code]) * n for code, n in BLAST) + b"\0")

    monkeypatch.setattr(build, "SAMPLE", tmp_path)
    monkeypatch.setattr(build, "similar", lambda ours, others: {s for s in ours if s[0] in {o[0] for o in others}})
    monkeypatch.setattr(build, "representatives", lambda ours, identity: {max(g, key=len) for g in groups(ours)})
    monkeypatch.setattr(build.shutil, "which", lambda name: "/bin/true")
    out = tmp_path / "out"
    options = ["--out", str(out), "--held-out", "1", "--seed", str(seed)]
    monkeypatch.setattr(
        sys, "argv", ["build.py", str(file), str(tmp_path / "few.psq"), str(tmp_path / "examples.fasta"), *options]
    )
    build.main()

    held_out, training = (dict(build.read_fasta(out / f"{name}.fasta")) for name in ("valid_chains", "chains"))
    assert {name: chain[name] for name in [*held_out, *training]} == held_out | training
    (held,) = (cluster[name] for name in held_out)
    clean = [(cluster[name], name) for name in chain if name in cluster and cluster[name] not in ("c0", "c1")]
    assert list(held_out) == build.one_per_cluster(clean, seed)[:1]
    expected = {"c2": ["c3", "c4"], "c7": ["c3", "c4"], "c3": ["c2", "c4", "c7"], "c4": ["c2", "c3", "c7"]}[held]
    assert sorted(cluster[name] for name in training) == expected

    sequences = dict(build.read_fasta(out / "sequences.fasta.gz"))
    left = {name: chain[name] for name in ("3XYZ_A", "4XYZ_A", "5XYZ_A", "7XYZ_A")}  # 7 stands for 2, which is shorter
    first = next(iter(held_out.values()))[0]
    new = {"new": examples["new"], "few_1": "V" * 44}
    assert sequences == {name: s for name, s in left.items() if s[0] != first} | new
    assert (out / "chains.npz").is_file()
    assert (out / "valid_chains.npz").is_file()
    # Seven of 51, the last of 61, less the one outside the pool; then 60 of a family, 60 new and 40 near that.
    assert "10 different sequences, 527 residues" in " ".join(capsys.readouterr().out.split())
