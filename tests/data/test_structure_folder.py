"""A folder of structures as a split: what is written, what is said, what is refused, and what the cache keeps."""

import gzip
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structure_texts import THREE, backbone, chain, cif, pdb, place

from esmshard.data.labels.coordinates import UNRESOLVED, CoordinateLabels
from esmshard.data.structures import structure_folder
from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices, to_split
from esmshard.errors import InputError, UsageError
from esmshard.io.store import ingest

SEQ, OTHER, THIRD = "MKTAYIAKQRGGLV", "GSHMLEDPVRWK", "AVILMFYWSTNQ"


def three(sequence: str) -> list[str]:
    return [THREE[x] for x in sequence]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three entries: one with a gap, two chains of which one is a copy, one compressed."""
    path = tmp_path / "set"
    path.mkdir()
    (path / "2abc.pdb").write_text(pdb(chain(SEQ, missing=[4]), {"A": three(SEQ)}))
    both = chain(OTHER, "A") + chain(OTHER, "B", shift=20) + chain(THIRD, "C", shift=-700)
    (path / "1ABC.cif").write_text(cif(both, {name: three(s) for name, s in zip("ABC", (OTHER, OTHER, THIRD))}))  # noqa: B905
    (path / "3abc.ent.gz").write_bytes(gzip.compress(pdb(chain(THIRD, "X", missing=[0, 11])).encode()))
    return path


def write(folder: Path, **options: object) -> tuple[Path, list[str]]:
    fasta = folder.parent / "out.fasta"
    return fasta, to_split(folder, fasta, fasta.with_suffix(".npz"), **options)  # type: ignore[arg-type]


def ids(fasta: Path) -> list[str]:
    return [line[1:] for line in fasta.read_text().splitlines() if line.startswith(">")]


def test_the_pair_of_files(folder: Path) -> None:
    fasta, notices = write(folder)
    assert fasta.read_text() == f">1abc_A\n{OTHER}\n>1abc_C\n{THIRD}\n>2abc_A\n{SEQ}\n>3abc_X\n{THIRD[1:-1]}\n"
    assert notices == [
        "1 chain left out with the sequence of another chain of the file (1abc_B)",
        "1 chain without SEQRES or _entity_poly_seq, read as the residues with atoms (3abc_X)",
    ]
    with np.load(fasta.with_suffix(".npz"), allow_pickle=False) as file:
        assert set(file.files) == {"names", "seqs", "offsets", "cb_dA"}
        names, seqs, offsets, cb_dA = (file[name] for name in ("names", "seqs", "offsets", "cb_dA"))
    assert names.tolist() == ["1abc_A", "1abc_C", "2abc_A", "3abc_X"]
    assert seqs.tolist() == [OTHER, THIRD, SEQ, THIRD[1:-1]]
    assert offsets.tolist() == [0, 12, 24, 38, 48]
    assert (offsets.dtype, cb_dA.dtype, cb_dA.shape) == (np.int32, np.uint16, (48, 3))
    assert (cb_dA[24 + 4] == UNRESOLVED).all()
    assert (cb_dA == UNRESOLVED).sum() == 3
    cb = np.array([place(c, n, ca, 1.522, 1.927, -2.143) for n, ca, c, _ in backbone(12)])
    for rows in (cb_dA[:12], cb_dA[12:24]):  # each chain from its own corner, wherever it lies
        np.testing.assert_allclose(rows / 10, cb - cb.min(0), atol=0.0501)
        assert rows.min(0).tolist() == [0, 0, 0]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["out.fasta", "out.npz", "set"]


def test_the_labels_are_read_as_any(folder: Path, tmp_path: Path) -> None:
    fasta, _ = write(folder)
    labels = CoordinateLabels(fasta, ingest([fasta], tmp_path / "store"))
    assert np.isnan(labels[2]["cb"][:, 0]).tolist() == [k == 4 for k in range(14)]
    first = labels[0]["cb"]
    expected = np.array([place(c, n, ca, 1.522, 1.927, -2.143) for n, ca, c, _ in backbone(12)])
    assert float(np.linalg.norm(first[0] - first[7])) == pytest.approx(
        float(np.linalg.norm(expected[0] - expected[7])), abs=0.2
    )


def test_what_is_no_structure_is_counted(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "9abc.pdb").write_text("not read")
    for name in ("README.md", "a.fasta", "._2abc.pdb", "list\x1b.txt"):
        (folder / name).write_text("x")
    _, notices = write(folder)
    assert notices[:2] == [
        "4 files not read, as the name is not that of a structure (._2abc.pdb, README.md, a.fasta, ...)",
        "1 inner folder not read (inner)",
    ]


def test_two_chains_of_one_id(folder: Path) -> None:
    (folder / "1abc.pdb").write_text(pdb(chain(SEQ, "A")))
    with pytest.raises(InputError, match=r"set/1abc\.pdb: chain '1abc_A' comes from .*set/1ABC\.cif too") as raised:
        write(folder)
    assert "\n" not in str(raised.value)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["set"]


@pytest.mark.parametrize(("wide", "fits"), [(6553.4, True), (6553.5, False)])
def test_a_chain_wider_than_can_be_stored(tmp_path: Path, wide: float, fits: bool) -> None:
    (tmp_path / "set").mkdir()
    lines, x_cb = chain(SEQ), [place(c, n, ca, 1.522, 1.927, -2.143)[0] for n, ca, c, _ in backbone(14)]
    far = wide - (x_cb[13] - min(x_cb[:13]))
    moved = [replace(x, xyz=(x.xyz[0] + far * (x.seq == 14), x.xyz[1], x.xyz[2])) for x in lines]
    (tmp_path / "set" / "x.cif").write_text(cif(moved, {"A": three(SEQ)}))
    if fits:
        fasta, _ = write(tmp_path / "set")
        with np.load(fasta.with_suffix(".npz")) as file:
            assert file["cb_dA"].max() == 65_534
        return
    with pytest.raises(InputError, match=r"x\.cif: chain 'x_A' is 6,55\d A wide, more than .* 6,553\.4 A that can be"):
        write(tmp_path / "set")


def test_nothing_to_write(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(InputError, match=r"set: has no structure file; names ending in \.pdb, \.ent"):
        write(tmp_path / "set")
    (tmp_path / "set" / "x.pdb").write_text(pdb(chain("MKTAY")))
    with pytest.raises(InputError, match=r"set: has no protein chain with 10 residues .*1 record left out with fewer"):
        write(tmp_path / "set")
    with pytest.raises(InputError, match="none: no such file or directory"):
        write(tmp_path / "none")
    (tmp_path / "set" / "y.pdb").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"y\.pdb: not a file, or a link that leads nowhere"):
        write(tmp_path / "set")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]


def test_a_file_without_a_chain_is_counted(folder: Path) -> None:
    (folder / "4abc.pdb").write_text(pdb(chain("MKTAY")))
    assert "1 file without a chain to take (4abc.pdb)" in write(folder)[1]


def test_nothing_is_written_over(folder: Path) -> None:
    for name in ("out.fasta", "out.npz"):
        (folder.parent / name).write_text("mine")
        with pytest.raises(UsageError, match=f"{name}: exists already"):
            write(folder)
        assert (folder.parent / name).read_text() == "mine"
        (folder.parent / name).unlink()


# The cache


@pytest.mark.parametrize(
    ("name", "means"),
    [("x.pdb", True), ("x.CIF.gz", True), ("x.fasta", False), ("x.cif.fasta", False), ("x.npz", False), ("pdb", False)],
)
def test_which_paths_mean_structures(tmp_path: Path, name: str, means: bool) -> None:
    assert holds_structures(tmp_path / name) is means
    assert holds_structures(tmp_path)


def test_a_token_store_is_no_folder_of_structures(folder: Path, tmp_path: Path) -> None:
    fasta, _ = write(folder)
    ingest([fasta], tmp_path / "store")
    assert not holds_structures(tmp_path / "store")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Sources that were read, one entry a time."""
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    done: list[Path] = []
    real = structure_folder.to_split

    def counted(source: Path, *rest: Path, complexes: str | None) -> list[str]:
        done.append(source)
        time.sleep(0.05)
        return real(source, *rest, complexes=complexes)

    monkeypatch.setattr(structure_folder, "to_split", counted)
    return done


def test_a_folder_is_read_once(folder: Path, reads: list[Path]) -> None:
    fasta = cached_split(folder)
    assert ids(fasta) == ["1abc_A", "1abc_C", "2abc_A", "3abc_X"]
    assert fasta.with_suffix(".npz").is_file()
    assert notices(fasta)[0] == "1 chain left out with the sequence of another chain of the file (1abc_B)"
    assert cached_split(folder) == fasta
    assert cached_split(Path(f"{folder}/../set")) == fasta
    assert len(reads) == 1
    assert not [p for p in fasta.parent.parent.iterdir() if p.name.startswith(".tmp")]


def test_a_changed_folder_is_read_anew(folder: Path, reads: list[Path]) -> None:
    seen = {cached_split(folder)}
    os.utime(folder / "2abc.pdb", ns=(1, 1))
    seen.add(cached_split(folder))
    (folder / "2abc.pdb").rename(folder / "4abc.pdb")
    seen.add(cached_split(folder))
    (folder / "4abc.pdb").unlink()
    seen.add(cached_split(folder))
    assert len(reads) == len(seen) == 4


def test_a_copy_of_the_same_names_sizes_and_times_is_another_folder(folder: Path, reads: list[Path]) -> None:
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert cached_split(folder) != cached_split(copy)
    assert reads == [folder, copy]


def test_one_file_alone(folder: Path, reads: list[Path]) -> None:
    assert ids(cached_split(folder / "2abc.pdb")) == ["2abc_A"]
    with pytest.raises(InputError, match="no such file or directory"):
        cached_split(folder / "9abc.pdb")


def test_processes_wait_for_the_one_that_reads(folder: Path, reads: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(cached_split(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(reads) == 1
