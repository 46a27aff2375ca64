"""Attributes of FASTA headers, splits that files give, and the reader of label files."""

import bz2
import gzip
import math
import random
from pathlib import Path

import pytest
from in_memory import InMemory

from esmshard.data.labels.label_sources import LabelRecord, read_label_fasta
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


def test_headers_put_together_at_random_are_read_right_or_refused() -> None:
    """The test knows how each header was put together. Only pieces that are joined without a space may be refused."""
    draw, refused = random.Random(5), 0
    for _ in range(500):
        given = {key: draw.choice(["1", "train", "DVC", "0;1", "x"]) for key in draw.sample(ALL, draw.randint(0, 4))}
        pieces = [f"{draw.choice([key, key.lower()])}={value}" for key, value in given.items()]
        pieces += draw.sample(["OS=Homo", "sapiens", "OX=9", "(a=b)", "TARGET", "=", "DATASET=1"], draw.randint(0, 5))
        draw.shuffle(pieces)
        keyed = [k for k, piece in enumerate(pieces) if piece.split("=")[0].upper() in ALL and "=" in piece]
        damage = draw.choice(["", "", "glue", "twice", "empty"]) if keyed else ""
        header = " ".join(["id", *pieces])
        if not damage:
            assert attributes(header, ALL, "x") == given
            continue
        if damage == "twice":
            header += f" {draw.choice(list(given))}=9"
        elif damage == "empty":
            header = header.replace(pieces[keyed[0]], pieces[keyed[0]].split("=")[0] + "=")
        else:
            before = " ".join(["id", *pieces[: keyed[0]]])
            header = before + draw.choice([";", ",", "|", "0"]) + " ".join(pieces[keyed[0] :])
        refused += 1
        refusal(header)
    assert refused > 160
    labels = "DVC" * 100_000  # long words are searched in linear time
    for word in (f"X={labels} TARGET={labels}", "=" * 100_000):
        assert attributes(f"Seq1 {word} MASK=1", ("MASK",), "x.fasta") == {"MASK": "1"}


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


def splits(
    store: InMemory, source: Table | Path | None = None, edits: Edits | None = None, **options: object
) -> list[str]:
    number_N = given_splits(store, FASTA, source, edits or Edits(), **options)  # type: ignore[arg-type]
    return [[*SETS, "none"][number] for number in number_N]


def split_refusal(store: InMemory, source: Table | Path | None = None, **options: object) -> str:
    with pytest.raises(InputError) as error:
        splits(store, source, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def table(tmp_path: Path, text: str) -> Table:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read_table(path)


def test_splits_from_headers() -> None:
    heads = (">a TARGET=1 SET=train VALIDATION=False", ">b SET=train VALIDATION=True", ">c SET=val", ">d set=test")
    edits = Edits()
    assert splits(InMemory(*(f"{head} MK" for head in heads)), edits=edits) == ["train", "valid", "valid", "test"]
    assert edits.notices() == ["lower-case keys were read as upper case in 1 record (d)"]
    store = InMemory(">a SET=train M", *(f">{name} TARGET=1 M" for name in "bcde"), ">f VALIDATION=True M")
    assert split_refusal(store).startswith("x.fasta: 5 of 6 records have no SET= (b, c, d, ...)")
    edits = Edits()
    assert splits(store, required=False, edits=edits) == ["train"] + ["none"] * 5
    assert edits.notices() == ["5 records without SET= left out (b, c, d, ...)"]
    message = split_refusal(InMemory(">a M", ">b VALIDATION=True M"), required=False)
    assert message.startswith("x.fasta: no record (a, b) has a SET=")
    assert "x.fasta: record 'b': SET is 'dev'" in split_refusal(InMemory(">a SET=train M", ">b SET=dev M"))


def test_splits_from_tables(tmp_path: Path) -> None:
    store = InMemory(">a MK", ">b MT", ">c MV", ">d MW")
    flip = "sequence,target,set,validation\nMV,1,test,\nMK,2,train,\nMT,3,train,True\nmw*,,test,\n"
    assert splits(store, table(tmp_path, flip)) == ["train", "valid", "test", "test"]
    by_id = table(tmp_path, "id,Split\nd,train\nc,val\nb,test\na,train\n")
    assert splits(store, by_id) == ["train", "test", "valid", "train"]
    store, path = InMemory(">a MK", ">b MT"), tmp_path / "t.csv"
    for text, message in (
        ("id,set,split\na,train,x\n", f"{path}: columns 'set' and 'split' may both be meant"),
        ("id,set\na,train\nb,dev\n", f"{path}:3: SET is 'dev'"),
        ("id,set\na,train\nb,\n", f"x.fasta: 1 of 2 records have no split in {path} (b)"),
        ("id,set\na,train\nb,test\na,test\n", f"{path}:4: 'a' has another split than in line 2"),
        ("id,x\na,train\nb,test\n", f"{path}: has no column 'set' or 'split'"),
    ):
        assert split_refusal(store, table(tmp_path, text)).startswith(message)
    assert splits(store, table(tmp_path, "id,set\na,train\nb,\n"), required=False) == ["train", "none"]
    edits = Edits()
    assert splits(store, table(tmp_path, "id,set\na,train\nb,test\na,train\n"), edits=edits) == ["train", "test"]
    assert edits.notices() == ["a row that came twice with the same split was read once in 1 record (a)"]


def test_splits_from_label_files(tmp_path: Path) -> None:
    store, path = InMemory(">a MK", ">b MT", ">c MV"), tmp_path / "sampled.fasta"
    path.write_text(">c SET=test VALIDATION=False\nHH\n>a SET=train VALIDATION=True\nHE\n>b SET=train\nCC\n")
    assert splits(store, path) == ["valid", "train", "test"]
    path.write_text(">c SET=test\nHH\n>d SET=test\nHH\n>a SET=train\nHE\n")
    assert split_refusal(store, path).startswith(f"x.fasta: 1 of 3 records have no SET= here or in {path} (b)")
    edits = Edits()
    assert splits(store, path, required=False, edits=edits) == ["train", "none", "test"]
    assert edits.notices() == [
        "a split of an unknown record was ignored in 1 record (d)",
        f"1 record without SET= here or in {path} left out (b)",
    ]
    for text, message in (
        (">c SET=test\nHH\n>c SET=train\nHH\n", f"{path}:3: 'c' has another split than in line 1"),
        (">c\nHH\n\n>a SET=dev\nHH\n", f"{path}:4: record 'a': SET is 'dev'"),
        (">x SET=test\nHH\n", f"x.fasta: no record (a, b, c) has a SET= here or in {path}"),
    ):
        path.write_text(text)
        assert split_refusal(store, path, required=False).startswith(message)


def read(path: Path, data: bytes) -> list[LabelRecord]:
    path.write_bytes(data)
    return list(read_label_fasta(path))


def test_label_files_of_all_kinds(tmp_path: Path) -> None:
    plain = b">a SET=train\nHH-\nE\n>b\n0;1\n"
    for data in (
        plain,
        b"\xef\xbb\xbf>a SET=train\r\nHH-\r\nE\r\n>b\r\n0;1",
        b">a SET=train\rHH-\rE\r>b\r0;1\r",
        b">a SET=train \n HH\t-  E \n\n>b  \n\n 0;1 \n",
        gzip.compress(plain),
        bz2.compress(plain),
    ):
        records = read(tmp_path / "x.fasta", data)
        assert [(record.id, record.header, record.text) for record in records] == [
            ("a", "a SET=train", "HH-E"),
            ("b", "b", "0;1"),
        ]
    records = read(tmp_path / "x.fasta", b"\n\n>a\nH\nH\n\n>b\nE\n>c\nC\n")
    assert [record.line for record in records] == [3, 7, 9]


def test_label_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    whole = gzip.compress(b">a\n" + random.Random(0).randbytes(500).hex().encode())
    for data, message in (
        (None, ": no such file"),
        (b"\n \n", ": holds no record"),
        (b"HHH\n>a\nH\n", ":1: text before the first '>'"),
        (b"\nid,target\n", ":2: text before the first '>'"),
        (b">a\nH\n> \t\nH\n", ":3: a record without an id"),
        (b">a\n>b\nH\n", ":1: record 'a' has no labels"),
        (b">a\nH\n>b\n \n", ":3: record 'b' has no labels"),
        (b">a\nH\xff\n", ": is not UTF-8 text"),
        (b"\xff\xfe>\x00a\x00", ": is not UTF-8 text"),
        *((whole[:size], ": cannot be read to its end") for size in (5, 50, len(whole) - 3)),
    ):
        with pytest.raises(InputError) as error:
            read(path, data) if data is not None else list(read_label_fasta(path))
        assert str(error.value).startswith(f"{path}{message}")
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="is a directory"):
        list(read_label_fasta(tmp_path))
