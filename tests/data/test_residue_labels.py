"""Labels of residues from headers, label files, masks and tables, and the sources of labels."""

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import InMemory

from esmshard.data.labels.label_sources import label_source, read_npz
from esmshard.data.labels.protein_labels import protein_labels
from esmshard.data.labels.residue_labels import ResidueLabels, residue_labels
from esmshard.data.splits.assignment import TEST, TRAIN, VALID
from esmshard.data.splits.recipe_splits import given_splits
from esmshard.errors import InputError, UsageError
from esmshard.io.symbols import Edits
from esmshard.io.tables import Table, read_table
from esmshard.recipe.sections import DataSettings

FASTA = Path("x.fasta")
STORE = InMemory(">a MKTV", ">b MT", ">c MVV")
TWO = InMemory("a MKT", "b AC")
NAN = float("nan")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sampled.fasta"


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    return tmp_path / "mask.fasta"


def of(store: InMemory, kind: Any, *arguments: Any, **options: Any) -> ResidueLabels:
    labels = residue_labels(store, FASTA, kind, *arguments, **options)
    assert len(labels.values) == store.lengths.sum() == labels.offsets[-1]
    return labels


def refused(token: str, store: InMemory, kind: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(InputError) as error:
        residue_labels(store, FASTA, kind, *arguments, **options)
    assert token in str(error.value)


def targets(labels: ResidueLabels) -> list[Any]:
    return [labels[n]["target"].tolist() for n in range(len(labels.offsets) - 1)]


def test_classes_from_headers() -> None:
    labels = of(InMemory(">a TARGET=HECH SET=train MASK=1101 MKTV", ">b MASK=11 target=CH MT"), "class")
    assert (labels.kind, labels.names, labels.per_residue) == ("class", "CEH", True)
    assert targets(labels) == [[2, 1, -1, 2], [0, 2]]
    assert labels[0]["target"].dtype == np.int8
    assert labels.notices == ["lower-case keys were read as upper case in 1 record (b)"]
    with pytest.raises(ValueError, match="read-only"):
        labels[0]["target"][0] = 1
    labels = of(InMemory(">a TARGET=HEXH MASK=1101 MKTV", ">b TARGET=HX MASK=10 MT"), "class")
    assert (labels.names, targets(labels)) == ("EH", [[1, 0, -1, 1], [1, -1]])


def test_numbers_from_headers() -> None:
    store = InMemory(">a TARGET=0.5;-1e-2;nan;3 MKTV", ">b TARGET=1;2 MASK=01 MT", ">c TARGET=-;.5;NA MVV")
    labels = of(store, "number")
    assert labels[0]["target"].dtype == np.float32
    assert labels.names == ""
    np.testing.assert_array_equal(labels.values, np.float32([0.5, -0.01, NAN, 3, NAN, 2, NAN, 0.5, NAN]))
    assert [notice[:29] for notice in labels.notices] == ["2 records without MASK=, in w"]
    np.testing.assert_array_equal(of(InMemory(">a KD=1;2 MT"), "number", column="kd")[0]["target"], [1, 2])
    for text, token in (
        *(("0.5;0.3", "2 residues, but 3"), ("0.5;0.3;1;2", "4 residues, but 3"), ("0.5;;1", "value 2")),
        *(("0.5;1;", "value 3"), ("0.5;1;x", "'x'"), ("1e39;1;3", "'1e39'"), ("1;1_0;3", "'1_0'")),
        ("0.5,0.3,1", "value 1"),
    ):
        refused(token, InMemory(">a TARGET=1;2 MK", f">b TARGET={text} MTV"), "number")


def test_labels_that_do_not_fit_their_sequence() -> None:
    for header, token in (
        ("TARGET=HEC", "labels for 3 residues, but 4"),
        ("TARGET=HECHH", "labels for 5 residues, but 4"),
        ("TARGET=HECH MASK=111", "a mask for 3 residues, but 4"),
        ("TARGET=HECH MASK=1021", "'2' at position 3"),
        ("TARGET=HECH MASK=10\u06611", "'\u0661' at position 3"),
        ("TARGET=HE\u00e9H", "'\u00e9' at position 3"),
        ("TARGET=HE\x1bH", "'\\x1b' at position 3"),
        ("TARGET=HEC=", "'TARGET=HEC='"),
        ("TARGET=HECH MASK=0000", "no residue of any record"),
    ):
        refused(token, InMemory(f">a {header} MKTV"), "class")
    refused(
        "1 of 3 records have no TARGET= (b)", InMemory(">a TARGET=HECH MKTV", ">b MT", ">c TARGET=HHH MVV"), "class"
    )
    labels = of(InMemory(">a TARGET=HECH MKTV", ">c TARGET=HHH MASK=000 MVV"), "class")
    assert targets(labels) == [[2, 1, 0, 2], [-1, -1, -1]]
    assert labels.notices[0] == "no residue has a label in 1 record (c)"


def test_flip_files(path: Path, mask: Path) -> None:
    path.write_text(">c SET=test VALIDATION=False\nHH\nE\n>a SET=train VALIDATION=True\nHECH\n>b SET=train\nCC\n")
    mask.write_text(">a\n0111\n>b\n11\n>c\n110\n")
    labels = of(STORE, "class", path, mask=mask)
    assert labels.names == "CEH"
    assert targets(labels) == [[-1, 1, 0, 2], [0, 0], [2, 2, -1]]
    assert labels.notices == []
    assert given_splits(STORE, FASTA, path, Edits()).tolist() == [VALID, TRAIN, TEST]
    path.write_text(">c MASK=101\nHHE\n>a MASK=1110\nHECH\n>b\nCC\n")
    labels = of(STORE, "class", path)
    assert targets(labels) == [[2, 1, 0, -1], [0, 0], [2, -1, 1]]
    assert len(labels.notices) == 1
    refused(f"{path}:1: record 'c' has MASK=", STORE, "class", path, mask=mask)
    zipped = path.with_name("y.fasta.gz")
    zipped.write_bytes(gzip.compress(b">c\n1;2;3\n>a\n4;5;6;7\n>b\n8;\n9\n"))
    assert targets(of(STORE, "number", zipped)) == [[4, 5, 6, 7], [8, 9], [1, 2, 3]]


def test_given_classes_keep_their_order(path: Path) -> None:
    path.write_text("\n>a\nHECH\n\n>b\nHH\n>c\nHHG\n")
    labels = of(STORE, "class", path, classes="GHECX")
    assert labels.names == "GHECX"
    assert targets(labels) == [[1, 2, 3, 1], [1, 1], [1, 1, 0]]
    refused(f"{path}:7: record 'c' has the class 'G' at position 3", STORE, "class", path, classes="HEC")


def test_label_records_and_sequences_without_a_partner(path: Path, mask: Path) -> None:
    path.write_text(">x\nHEC\n>y\nCC\n")
    refused(f"no record (a, b, c) has a label in {path}, which has other ids (x, y)", STORE, "class", path)
    path.write_text(">c\nHHH\n>x\nHEC\n>a\nCCCC\n>b\nCC\n")
    mask.write_text(">c\n110\n>z\n1\n>a\n1111\n>b\n11\n")
    labels = of(STORE, "class", path, mask=mask)
    assert targets(labels) == [[0] * 4, [0] * 2, [1, 1, -1]]
    assert labels.notices == []
    for text, token in (
        (">a\n1111\n", ": has no mask for 2"),
        (">c\n111\n>a\n11111\n>b\n11\n", ":3: record 'a' has a mask for 5 residues, but 4"),
        (">c\n111\n>a\n1111\n>b\n1x\n", ":5: record 'b' has 'x' at position 2"),
    ):
        mask.write_text(text)
        refused(f"{mask}{token}", STORE, "class", path, mask=mask)
    path.write_text(">c\nHHH\n>a\nHEC\n>b\nCC\n")
    refused(f"{path}:3: record 'a'", STORE, "class", path)


def test_records_that_come_twice(path: Path, mask: Path) -> None:
    path.write_text(">c\nHHH\n>a\nHECC\n>b\nCC\n>a\nHE\nCC\n")
    labels = of(STORE, "class", path)
    assert labels.notices == ["a record that came twice with the same labels was read once in 1 record (a)"]
    path.write_text(">c\nHHH\n>a\nHECC\n>b\nCC\n>a\nHECH\n")
    refused(f"{path}:7: record 'a' has other labels than in line 3", STORE, "class", path)
    path.write_text(">c\nHHH\n>a\nHECC\n>b\nCC\n>a MASK=0111\nHECC\n")
    refused("has other labels than in line 3", STORE, "class", path)
    mask.write_text(">c\n111\n>a\n1111\n>b\n11\n>c\n111\n")
    path.write_text(">c\nHHH\n>a\nHECC\n>b\nCC\n")
    assert of(STORE, "class", path, mask=mask).names == "CEH"
    mask.write_text(">c\n111\n>a\n1111\n>b\n11\n>c\n110\n")
    refused(f"{mask}:7: record 'c' has another mask than in line 1", STORE, "class", path, mask=mask)


def test_labels_from_a_table(tmp_path: Path, mask: Path) -> None:
    path = tmp_path / "bind.csv"
    path.write_text("sequence,set,validation,target\nMVV,test,,010\nMKTV,train,True,0007\nMT,train,,40\n")
    labels = of(STORE, "class", read_table(path))
    assert labels.names == "0147"
    assert targets(labels) == [[0, 0, 0, 3], [2, 0], [0, 1, 0]]
    mask.write_text(">a\n1110\n>b\n11\n>c\n111\n")
    assert targets(of(STORE, "class", read_table(path), mask=mask)) == [[0, 0, 0, -1], [2, 0], [0, 1, 0]]
    for text, token, options in (
        ("id,scores,target\nc,1;2;3,x\na,1;2;3,x\nb,1;2,y\n", ":3: record 'a'", {"column": "scores"}),
        ("id,target\nc,HHH\na,\nb,H E\nc,HHE\n", "'c' has another label than in line 2", {}),
        ("id,target\nc,HHH\na,\nb,H E\n", "1 of 3 records have no label", {}),
        ("id,target\nc,HHH\na,HHHH\nb,H E\n", ":4: record 'b' has ' ' at position 2", {}),
        ("id,target\nc,HHH\na,HHHH\nb,HX\n", ":4: record 'b' has the class 'X'", {"classes": "H"}),
        ("id,score\nc,HHH\n", "data.target", {}),
    ):
        path.write_text(text)
        refused(token, STORE, "number" if "column" in options else "class", read_table(path), **options)


def test_damaged_label_files_are_refused_or_read_right(path: Path) -> None:
    draw = random.Random(3)
    lengths = dict(zip("abcdef", (3, 5, 2, 7, 4, 5), strict=True))
    store = InMemory(*(f">{name} {'M' * length}" for name, length in lengths.items()))
    read, refusals = 0, 0
    for _ in range(150):
        letters = {name: "".join(draw.choices("HEC", k=length)) for name, length in lengths.items()}
        given = [f">{name} SET=train\n{text}\n" for name, text in letters.items()]
        draw.shuffle(given)
        text = "".join(given)
        for _ in range(draw.randint(0, 2)):
            at, put = draw.randrange(len(text) + 1), draw.choice("\n\r >;=\tH0\x00\u00e9\ufeff")
            ends = (text[at + 1 :], put + text[at:], text[at:] + draw.choice(given), "")
            text = text[:at] + draw.choice(ends)
        path.write_text(text, newline="")
        try:
            labels = residue_labels(store, FASTA, "class", path, classes="HEC")
        except InputError:
            refusals += 1
            continue
        for n, name in enumerate(lengths):
            if f">{name} SET=train\n{letters[name]}\n" in text:
                assert labels[n]["target"].tolist() == ["HEC".index(letter) for letter in letters[name]]
                read += 1
    assert 30 < refusals < 110
    assert read > 200


def test_labels_of_several_chains_have_none_between_them(path: Path, mask: Path) -> None:
    store = InMemory(">a TARGET=HHE:CC MKT:GS", ">b TARGET=HHECC MKT:GS", ">c TARGET=HHE MKT")
    store.linker = 25
    path.write_text(">a\nHHE:CC\n>b\nHHECC\n>c\nHHE\n")
    mask.write_text(">a\n101:10\n>b\n10110\n>c\n111\n")
    for labels in (of(store, "class", classes="HEC"), of(store, "class", path, classes="HEC")):
        expected = [0, 0, 1, *[-1] * 25, 2, 2]
        assert targets(labels) == [expected, expected, [0, 0, 1]]
    hidden = [0, -1, 1, *[-1] * 25, 2, -1]
    assert targets(of(store, "class", path, mask=mask, classes="HEC")) == [hidden, hidden, [0, 0, 1]]
    numbers = InMemory(">a TARGET=1;2;3:4;5 MKT:GS", ">b TARGET=1;2;3;4;5 MKT:GS")
    numbers.linker = 25
    for found in targets(of(numbers, "number")):
        assert found[:3] + found[28:] == [1, 2, 3, 4, 5]
        assert np.isnan(found[3:28]).all()


def settings(**given: Any) -> DataSettings:
    return DataSettings(train="t", valid="v", test="e", **given)


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """A FASTA file with an `.npz` file that has another order and an additional chain."""
    arrays = {
        "names": ["x", "b", "a"],
        "seqs": ["W", "AC", "MKT"],
        "dssp8": ["C", "EB", "HHT"],
        "rate": [0, np.nan, 2.5],
    }
    np.savez(tmp_path / "train.npz", **arrays, offsets=[0, 1, 3, 6], cb_dA=np.zeros((6, 3), np.uint16))
    return tmp_path / "train.fasta.gz"


def test_arrays_beside_a_fasta_file_are_labels_of_residues_or_proteins(fasta: Path) -> None:
    residues = residue_labels(TWO, fasta, "class", label_source(fasta, settings(target=["dssp8"])), column="dssp8")
    assert residues.names == "BEHT"
    assert [residues[n]["target"].tolist() for n in (0, 1)] == [[2, 2, 3], [1, 0]]
    source = label_source(fasta, settings(target=["rate"]))
    proteins = protein_labels(TWO, fasta, "number", source, columns=["rate"], required=False)
    assert proteins.labelled_N.tolist() == [True, False]
    assert proteins[0]["target"].tolist() == [2.5]
    assert len(proteins.notices) == 1  # of b; nothing of x
    assert label_source(fasta, settings()) is None
    assert label_source(fasta, settings(target=["TARGET"])) is None
    assert label_source(fasta.with_name("other.fasta"), settings(target=["dssp8"])) is None


def test_the_file_that_is_named_goes_first(fasta: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,dssp8\na,CCC\nb,CC\n")
    table = label_source(fasta, settings(target=["dssp8"], labels=str(tmp_path / "x.csv")))
    assert isinstance(table, Table)
    assert table.columns["dssp8"] == ["CCC", "CC"]
    table = label_source(tmp_path / "y.fasta", settings(labels=str(tmp_path / "train.npz")))
    assert isinstance(table, Table)
    assert table.columns == {
        "id": ["x", "b", "a"],
        "sequence": ["W", "AC", "MKT"],
        "dssp8": ["C", "EB", "HHT"],
        "rate": ["0.0", "nan", "2.5"],
    }
    for name in ("labels.fasta", "labels.fa.gz"):
        assert label_source(fasta, settings(labels=name)) == Path(name)


def test_labels_of_another_sequence_are_refused(fasta: Path) -> None:
    other = InMemory("a MKT", "b AD")
    with pytest.raises(InputError, match=r"train.npz:2: 'b' has another sequence"):
        residue_labels(other, fasta, "class", label_source(fasta, settings(target=["dssp8"])), column="dssp8")


def test_npz_files_without_a_label_for_each_record_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with pytest.raises(InputError, match="no such file"):
        read_npz(path)
    for arrays, token in (
        ({"seqs": ["A"]}, "'names'"),
        ({"names": [1, 2]}, "'names'"),
        ({"names": []}, "'names'"),
        ({"names": [["a"]]}, "'names'"),
        ({"names": ["a", "b"], "seqs": ["A"]}, "do not fit each other"),
        ({"names": np.array(["a"], dtype=object)}, "cannot be read"),  # a pickle
    ):
        np.savez(path, **arrays)
        with pytest.raises(InputError, match=f"x.npz: .*{token}"):
            read_npz(path)
    path.write_bytes(b"id,label\n")
    with pytest.raises(InputError, match="cannot be read"):
        read_npz(path)


def test_an_id_column_needs_a_table(fasta: Path) -> None:
    for given, what in (({}, "train.fasta.gz"), ({"labels": "x.fasta"}, "x.fasta")):
        with pytest.raises(UsageError, match=f"data.id_column: .*{what} is no table; remove the key"):
            label_source(fasta, settings(id_column="key", **given))
    assert label_source(fasta, settings(id_column="seqs", target=["dssp8"])) is not None
