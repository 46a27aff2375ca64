"""Attributes of FASTA headers, splits that files give, and the reader of label files."""

import gzip
import math
import re
from pathlib import Path

import pytest
from in_memory import InMemory

from esmshard.data.labels.label_sources import read_label_fasta
from esmshard.data.splits.assignment import SETS
from esmshard.data.splits.recipe_splits import given_splits
from esmshard.errors import InputError
from esmshard.io.headers import attributes, id_of, number, split_of
from esmshard.io.symbols import Edits
from esmshard.io.tables import Table, read_table

ALL = ("TARGET", "SET", "VALIDATION", "MASK")
FASTA = Path("x.fasta")


def refusal(header: str, keys: tuple[str, ...] = ALL) -> str:
    with pytest.raises(InputError) as error:
        attributes(header, keys, "x.fasta:3")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_attributes_are_words_of_their_own() -> None:
    edits = Edits()
    for header, found in (
        ("Seq1 MASK=1101\tSET=test   TARGET=DVCD", {"MASK": "1101", "SET": "test", "TARGET": "DVCD"}),
        ("", {}),
        ("Seq1 INTERACTOR=Seq2 TARGET=1", {"TARGET": "1"}),
        ("sp|P69905|HBA_HUMAN Hemoglobin OS=Homo sapiens OX=9606 GN=HBA1 TARGET=0.4", {"TARGET": "0.4"}),
        ("Seq1 DATASET=3 SUB_SET=4 dataset=5 Offset=1 SET=test", {"SET": "test"}),
        ("Seq1 DATASET=3 DATASET=3", {}),
        ("Seq1 TARGET = 3", {}),
        ("my-dataset=3 SET=test", {"SET": "test"}),
        ("Seq1 TARGET=a\N{NO-BREAK SPACE}b", {"TARGET": "a\N{NO-BREAK SPACE}b"}),  # only ASCII's blanks and letters
        ("Seq1 \N{LATIN SMALL LETTER LONG S}ET=train", {}),
    ):
        assert attributes(header, ALL, "x.fasta", edits) == found
    assert edits.notices() == []
    assert id_of("a\N{NO-BREAK SPACE}b c") == "a\N{NO-BREAK SPACE}b"
    header = "Seq1 TARGET=1 TARGET=2 SET= KD=3"
    assert attributes(header, ("KD",), "x.fasta") == {"KD": "3"}, "only what is asked for is looked at"
    assert "has TARGET= twice" in refusal(header, ("TARGET",))
    assert "has no value after 'SET='" in refusal(header, ("SET",))
    assert attributes("Seq1 A.B=1 AxB=2", ("A.B",), "x.fasta") == {"A.B": "1"}
    labels = "DVC" * 100_000  # long words are searched in linear time
    for word in (f"X={labels} TARGET={labels}", "=" * 100_000):
        assert attributes(f"Seq1 {word} MASK=1", ("MASK",), "x.fasta") == {"MASK": "1"}


def test_lower_case_keys_are_read_and_counted() -> None:
    edits = Edits()
    found = attributes("Seq1 target=0.1 Set=Train VALIDATION=False", ALL, "x.fasta", edits)
    assert found == {"TARGET": "0.1", "SET": "Train", "VALIDATION": "False"}
    assert attributes("Seq2 target=0.2", ALL, "x.fasta", edits) == {"TARGET": "0.2"}
    assert edits.notices() == ["lower-case keys were read as upper case in 3 records (Seq1, Seq1, Seq2)"]
    assert "has TARGET= twice" in refusal("Seq1 TARGET=1 target=1")


def test_a_missing_space_is_named() -> None:
    words = (
        "SET=trainTARGET=0.1", "SET=train;TARGET=0.1", "TARGET=DSET=train", "TARGET=a=b", "TARGET=0.1SET=train",
        "target=0.1,set=train", "KD=3;VALIDATION=True", "DATASET=3;SET=train", "trainSET=3", ";MASK=1101",
        "TARGET=1\xa0SET=train",
    )  # fmt: skip
    ids = ("Seq1;SET=train", "Seq1SET=train TARGET=1", "seqSET=train", "SET=train TARGET=1", " SET=train TARGET=1")
    for header in (*(f"Seq1 {word}" for word in words), *ids):
        word = next(word for word in header.split(" ") if "=" in word)
        assert refusal(header).startswith(f"x.fasta:3: record {id_of(header)!r} has {word!r} as one word; ")
    for word in ("TARGET=DSET=train", "TARGET=0.1SET=train", "KD=3;SET=train"):
        assert f"{word!r} as one word" in refusal(f"Seq1 {word}", ("SET",))


def test_set_and_validation_make_a_split() -> None:
    splits = {
        "train": ["train", "train False", "train 0.0"],
        "valid": ["train True", "Train true", "train 1", "val", "valid True", "validation"],
        "test": ["test", "TEST FALSE"],
    }
    for split, values in splits.items():
        for value in values:
            set_value, _, validation = value.partition(" ")
            assert split_of(set_value, validation, "x") == split, value
    for set_value, validation, token in (
        ("dev", "", "SET is 'dev'"),
        ("train", "maybe", "VALIDATION is 'maybe'"),
        ("test", "True", "SET is test and VALIDATION is True"),
        ("val", "False", "SET is val, but VALIDATION is False"),
    ):
        with pytest.raises(InputError, match=rf"^x\.fasta:4: {token}"):
            split_of(set_value, validation, "x.fasta:4")


def test_numbers_are_plain_and_finite() -> None:
    assert [number(text, lambda: "x") for text in ("1", "-.5", "+2e-3", "3.")] == [1.0, -0.5, 0.002, 3.0]
    assert all(math.isnan(number(text, lambda: "x")) for text in ("nan", "NA", "none", "-", ""))
    assert number("3.4028234e38", lambda: "x") == 3.4028234e38
    for text in ("1_000", "inf", "1e39", "-1e39", "0x1", "\u0663", "1,5", "1.2.3", "a"):
        with pytest.raises(InputError, match=r"^x: T is '.*', which is not a finite number; "):
            number(text, lambda: "x: T")


def splits(store: InMemory, source: Table | Path | None = None, required: bool = True) -> tuple[list[str], list[str]]:
    edits = Edits()
    numbers = given_splits(store, FASTA, source, edits, required=required)
    return [[*SETS, "none"][number] for number in numbers], edits.notices()


def test_splits_from_headers_tables_and_label_files(tmp_path: Path) -> None:
    def file(text: str) -> Table | Path:
        path = tmp_path / ("t.fasta" if ">" in text else "t.csv")
        path.write_text(text)
        return path if ">" in text else read_table(path)

    heads = (">a TARGET=1 SET=train VALIDATION=False", ">b SET=train VALIDATION=True", ">c SET=val", ">d set=test")
    lower = ["lower-case keys were read as upper case in 1 record (d)"]
    assert splits(InMemory(*(f"{head} MK" for head in heads))) == (["train", "valid", "valid", "test"], lower)
    few = InMemory(">a SET=train M", *(f">{name} TARGET=1 M" for name in "bcde"), ">f VALIDATION=True M")
    left_out = ["5 records without SET= left out (b, c, d, ...)"]
    assert splits(few, required=False) == (["train"] + ["none"] * 5, left_out)
    store, t = InMemory(">a MK", ">b MT", ">c MV"), str(tmp_path / "t")
    for text, expected, notices in (
        ("sequence,target,set,validation\nMV,1,test,\nMK,2,train,\nmt*,3,train,True\n", "train valid test", 0),
        ("id,Split\nc,val\nb,test\na,train\na,train\n", "train test valid", 1),
        ("id,set\nc,val\na,train\nb,\n", "train none valid", 1),
        (">c SET=test\nH\n>a SET=train VALIDATION=True\nH\n>b SET=train\nC\n", "valid train test", 0),
        (">c SET=test\nHH\n>d SET=test\nHH\n>a SET=train\nHE\n", "train none test", 2),
    ):
        names, told = splits(store, file(text), required=False)
        assert (names, len(told)) == (expected.split(), notices)
    for records, text, message in (
        (few, "", "x.fasta: 5 of 6 records have no SET= (b, c, d, ...)"),
        (InMemory(">a M", ">b VALIDATION=True M"), "", "x.fasta: no record (a, b) has a SET="),
        (InMemory(">a SET=train M", ">b SET=dev M"), "", "x.fasta: record 'b': SET is 'dev'"),
        (store, "id,set,split\na,train,x\n", f"{t}.csv: columns 'set' and 'split' may both be meant"),
        (store, "id,set\na,train\nb,dev\n", f"{t}.csv:3: SET is 'dev'"),
        (store, "id,set\na,train\nb,\nc,val\n", f"x.fasta: 1 of 3 records have no split in {t}.csv (b)"),
        (store, "id,set\na,train\nb,test\na,test\n", f"{t}.csv:4: 'a' has another split than in line 2"),
        (store, "id,x\na,train\nb,test\n", f"{t}.csv: has no column 'set' or 'split'"),
        (store, ">c SET=test\nH\n>a SET=train\nH\n", f"x.fasta: 1 of 3 records have no SET= here or in {t}.fasta (b)"),
        (store, ">c SET=test\nHH\n>c SET=train\nHH\n", f"{t}.fasta:3: 'c' has another split than in line 1"),
        (store, ">c\nHH\n\n>a SET=dev\nHH\n", f"{t}.fasta:4: record 'a': SET is 'dev'"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            splits(records, file(text) if text else None)
    with pytest.raises(InputError, match="no record"):
        splits(store, file(">x SET=test\nHH\n"), required=False)


def test_label_files_of_all_kinds(tmp_path: Path) -> None:
    path, plain = tmp_path / "x.fasta", b"\n>a SET=train\nHH-\nE\n\n>b\n0;1\n"
    spaces = b"\n>a SET=train \n HH\t-  E \n\n\n>b  \n\n 0;1 \n"
    packed = gzip.compress(plain)
    for data in (plain, b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"), plain.replace(b"\n", b"\r"), spaces, packed):
        path.write_bytes(data)
        records = [(record.id, record.header, record.text, record.line) for record in read_label_fasta(path)]
        assert records == [("a", "a SET=train", "HH-E", 2), ("b", "b", "0;1", 6)]
    for data, message in (
        (b"\n \n", ": holds no record"),
        (b"\nid,target\n", ":2: text before the first '>'"),
        (b">a\nH\n> \t\nH\n", ":3: a record without an id"),
        (b">a\n>b\nH\n", ":1: record 'a' has no labels"),
        (b">a\nH\n>b\n \n", ":3: record 'b' has no labels"),
        (b"\xff\xfe>\x00a\x00", ": is not UTF-8 text"),
        *((packed[:size], ": cannot be read to its end") for size in (5, 20, len(packed) - 3)),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"^{re.escape(f'{path}{message}')}"):
            list(read_label_fasta(path))
    path.unlink()
    for missing, token in ((path, "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(InputError, match=token):
            list(read_label_fasta(missing))
