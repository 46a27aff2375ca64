"""Structure files that are packed, damaged, misnamed or something else."""

import bz2
import gzip
import lzma
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from packed import zstd
from structure_texts import OTHER, SEQ, chain, cif, nucleic, pdb, three, water, write

from esmshard.data.structures.chains import read_chains
from esmshard.errors import InputError
from esmshard.io.symbols import Edits

# Files


_ATOM = "ATOM      1  N   MET A   1       1.458   "


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.fasta", ">a\nMKT\n", "by its name"),
        ("x.pdb", "", "no atoms"),
        ("x.cif", " \n\n", "mmCIF"),
        ("x.pdb", "HEADER    NOTHING\nEND\n", "no atoms"),
        ("x.cif", "data_x\n_entry.id x\n", "no atoms"),
        ("x.pdb", f"{_ATOM}0.000   0.0\n", "too short"),
        ("x.pdb", f"\n{_ATOM}0.0x0   0.000\n", r"x\.pdb:2: .* no coordinate"),
        ("x.cif", cif(chain(SEQ), {"A": three(SEQ)}).replace("MET A 1 1 ?", "MET A 1 15 ?"), "outside its sequence"),
        ("x.cif", cif(chain(SEQ), {"A": three(SEQ)}).replace("1.458 0.000", "1e300 0.000"), "beyond"),
    ],
)
def test_what_is_no_structure(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read_chains(write(tmp_path / name, text))
    assert str(tmp_path / name) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.pdb: no such file"):
        read_chains(tmp_path / "x.pdb")
    (tmp_path / "d.pdb").mkdir()
    with pytest.raises(InputError, match=r"d\.pdb: is a directory"):
        read_chains(tmp_path / "d.pdb")


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files(tmp_path: Path, ending: str) -> None:
    for kind, text in (("PDB", pdb(chain(SEQ))), ("cif", cif(chain(SEQ), {"A": three(SEQ)}))):
        packed = PACKERS[ending](text.encode())
        path = tmp_path / f"Entry.1.{kind}.{ending}"
        path.write_bytes(packed)
        (found,) = read_chains(path)
        assert (found.id, found.sequence) == ("entry.1_A", SEQ)
        path.write_bytes(packed[: len(packed) // 2])
        with pytest.raises(InputError, match="cannot be read to its end"):
            read_chains(path)
        path.write_text(text)
        with pytest.raises(InputError, match="cannot be read to its end"):
            read_chains(path)


@pytest.mark.parametrize("name", ["a\nb.pdb", "a\x1b[31mb.pdb", "\udcff.pdb", ".pdb", ">a.pdb"])
def test_a_file_name_that_no_id_can_have(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, pdb(chain(SEQ)))
    with pytest.raises(InputError, match="the file name becomes the chains' id") as raised:
        read_chains(path)
    assert str(raised.value).isprintable()


def test_spaces_in_a_file_name(tmp_path: Path) -> None:
    (found,) = read_chains(write(tmp_path / "my best  Model.pdb", pdb(chain(SEQ))))
    assert found.id == "my_best__model_A"


# Damage of every kind

_WORDS = ("", "?", ".", "-1", "0", "99999", "1e9", "nan", "'", '"', ";", "#", "loop_", "data_x", "_a.b", "\xb5", "\t")


def damaged(text: str, rng: random.Random) -> bytes:
    lines = text.split("\n")
    for _ in range(rng.randint(1, 4)):
        k = rng.randrange(len(lines))
        line = lines[k]
        kind = rng.randrange(10)
        if kind == 0:
            lines[k] = line[: rng.randint(0, len(line))]
        elif kind == 1:
            del lines[k : k + rng.randint(1, 5)]
        elif kind == 2:
            lines.insert(rng.randrange(len(lines)), line)
        elif kind == 3:
            words = line.split(" ")
            rng.shuffle(words)
            lines[k] = " ".join(words)
        elif kind == 4:
            at = rng.randint(0, len(line))
            lines[k] = line[:at] + "".join(chr(rng.randrange(256)) for _ in range(rng.randint(1, 8))) + line[at + 3 :]
        elif kind == 5:
            words = line.split(" ")
            words[rng.randrange(len(words))] = rng.choice(_WORDS)
            lines[k] = " ".join(words)
        elif kind == 6:
            at = rng.randint(0, len(line))
            lines[k] = line[:at] + rng.choice(_WORDS) + line[at:]
        elif kind == 7:
            other = rng.randrange(len(lines))
            lines[k], lines[other] = lines[other], line
        elif kind == 8:
            lines = lines[: rng.randint(1, len(lines))]
        else:
            lines[k] = "".join(rng.choice("0123456789") if c.isdigit() and rng.random() < 0.5 else c for c in line)
        lines = lines or [""]
    return "\n".join(lines).encode("latin-1")


def test_damaged_files_give_one_sentence_or_a_whole_chain(tmp_path: Path) -> None:
    comps = [*three("MKTAY"), "MSE", *three("IAKQRGGLV")]
    lines = chain(comps, missing=[3]) + chain(OTHER, "B") + nucleic("C")[:12] + water("A", "D")
    lines = [y for x in lines for y in ((replace(x, alt="A"), replace(x, alt="B")) if x.seq == 9 else (x,))]
    sequences = {"A": comps, "B": three(OTHER), "C": ["DA", "DG", "DC", "DT"]}
    kinds = {"C": "polydeoxyribonucleotide"}
    as_pdb = [pdb(lines, sequences, {"SEP": "SER"}), pdb(lines), pdb(chain(SEQ) + chain(SEQ, model=2), {"A": comps})]
    one = [x for x in lines if x.chain != "B"]
    as_cif = [cif(one, {"A": comps, "C": sequences["C"]}, kinds, {"SEP": "SER"}, {"SEP": "SER"}), cif(chain(SEQ))]
    rng = random.Random(1)
    outcomes, messages = {"read": 0, "refused": 0}, list[str]()
    for k in range(600):
        name, texts = ("x.pdb", as_pdb) if k % 3 == 0 else ("x.cif", as_cif)
        (tmp_path / name).write_bytes(damaged(rng.choice(texts), rng))
        edits = Edits()
        try:
            found = read_chains(tmp_path / name, edits=edits)
        except InputError as error:
            outcomes["refused"] += 1
            messages.append(str(error))
            continue
        outcomes["read"] += 1
        for one in found:
            assert one.cb_L3.shape == (len(one.sequence), 3)
            assert set(one.sequence) <= set("ACDEFGHIKLMNPQRSTVWYXBUZO")
            assert (np.isnan(one.cb_L3).all(1) == np.isnan(one.cb_L3).any(1)).all()
        assert all(notice.isprintable() for notice in edits.notices())
    assert [m for m in messages if not m.isprintable() or len(m) > 700] == []
    assert min(outcomes.values()) > 60, outcomes
