"""Labels of whole proteins, and how the rows of a table find their records."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import InMemory

from esmshard.data.labels.protein_labels import ProteinLabels, protein_labels
from esmshard.errors import InputError, UsageError
from esmshard.io.tables import Table, read_table

FASTA = Path("x.fasta")
STORE = InMemory(">a MK", ">b MT", ">c MV")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.csv"


def table(path: Path, text: str) -> Table:
    path.write_text(text)
    return read_table(path)


def of(store: InMemory, kind: Any, *arguments: Any, **options: Any) -> ProteinLabels:
    labels = protein_labels(store, FASTA, kind, *arguments, **options)
    assert len(labels.labelled_N) == len(store)
    return labels


def refused(token: str, store: InMemory, kind: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(InputError) as error:
        protein_labels(store, FASTA, kind, *arguments, **options)
    assert token in str(error.value)


def targets(labels: ProteinLabels) -> list[Any]:
    return [labels[n]["target"].tolist() if labels.labelled_N[n] else None for n in range(len(labels.labelled_N))]


def test_numbers_from_headers() -> None:
    labels = of(InMemory(">a TARGET=0.5 SET=train MK", ">b target=-1e2 MT"), "number")
    assert labels[0]["target"].dtype == np.float32
    assert (labels.names, targets(labels)) == (("TARGET",), [[0.5], [-100.0]])
    assert labels.notices == ["lower-case keys were read as upper case in 1 record (b)"]
    store = InMemory(">a KD=1 TM=2 MK", ">b TM=3 MT", ">c KD=nan TM=4 MV")
    labels = of(store, "number", columns=["kd", "TM"])
    assert labels.names == ("KD", "TM")
    np.testing.assert_array_equal(labels.values, [[1, 2], [np.nan, 3], [np.nan, 4]])
    assert labels.labelled_N.all()


def test_headers_without_a_label() -> None:
    store = InMemory(">a TARGET=1 MK", ">b TARGET=nan MT", ">c MV")
    refused("2 of 3 records have no TARGET= (b, c)", store, "number")
    labels = of(store, "number", required=False)
    assert labels.labelled_N.tolist() == [True, False, False]
    assert np.isnan(labels.values[1:]).all()
    with pytest.raises(KeyError):
        labels[1]
    assert labels.notices == ["2 records without TARGET= left out (b, c)"]
    refused("no record (a, b, c) has a KD=", store, "number", columns=["KD"], required=False)
    two = InMemory(">a KD=1 TM=2 MK", ">b KD=1 TM=2,5 MT")
    refused("record 'b': TM is '2,5'", two, "number", columns=["KD", "TM"])


def test_several_numbers_from_a_table(path: Path) -> None:
    given = table(path, "entry\ttm\tkd\tnote\nc\t3\t\tx\na\t1\tNA\ty\nb\t-\t7\tz\n")
    labels = of(STORE, "number", given, columns=["kd", "tm"])
    assert labels.names == ("kd", "tm")
    np.testing.assert_array_equal(labels.values, [[np.nan, 1], [7, np.nan], [np.nan, 3]])
    refused(f"2 of 3 records have no label in {path} (a, c)", STORE, "number", given, columns=["kd"])
    np.testing.assert_array_equal(
        of(STORE, "number", given, columns=["kd"], required=False).values, [[np.nan], [7], [np.nan]]
    )
    refused(f"{path}:3: column 'target'", STORE, "number", table(path, "id,target\na,1\nb,high\nc,3\n"))
    refused(f"{path}:4: column 'target' has '-1e39'", STORE, "number", table(path, "id,target\na,1\nb,2\nc,-1e39\n"))
    two = table(path, "id,u,target\na,0,1\nb,4e38,2\n")
    refused(f"{path}:3: column 'u' has '4e38'", STORE, "number", two, columns=["target", "u"])


def test_rows_and_records_without_a_partner(path: Path) -> None:
    store = InMemory(*(f">{name} MK" for name in "abcdefg"))
    given = table(path, "id,target\n" + "".join(f"{name},1\n" for name in "gcwxyz"))
    labels = of(store, "number", given, required=False)
    assert labels.labelled_N.tolist() == [False, False, True, False, False, False, True]
    assert labels.notices == [f"5 records without label in {path} left out (a, b, d, ...)"]
    other = table(path, "id,target\nu,1\nv,1\n")
    refused("which has other ids (u, v)", store, "number", other, required=False)


def test_rows_that_come_twice(path: Path) -> None:
    labels = of(STORE, "number", table(path, "id,target,u\na,1,x\nb,2,x\na,1.0,y\nc,3,x\n"))
    assert labels.values[:, 0].tolist() == [1, 2, 3]
    assert labels.notices == ["a row that came twice with the same label was read once in 1 record (a)"]
    refused(f"{path}:4: 'b' has another label", STORE, "number", table(path, "id,target\na,1\nb,2\nb,2.5\nc,3\n"))
    refused("'a' has another label", STORE, "class", table(path, "id,target\na,x\na,y\nb,x\nc,x\n"))
    labels = of(STORE, "multilabel", table(path, "id,target\na,x;y\nb,y\na,y; x\nc,x\n"))
    assert targets(labels) == [[1, 1], [0, 1], [1, 0]]
    refused("'a' has another label", STORE, "multilabel", table(path, "id,target\na,x;y\nb,y\na,y\nc,x\n"))
    flags = table(path, "id,u,v\na,0,0\nb,1,1\nc,1,1\na,,\n")
    refused("'a' has another label", STORE, "multilabel", flags, columns=["u", "v"])


def test_rows_find_records_by_sequence(path: Path) -> None:
    store = InMemory(">a MK", ">b MT", ">c MXV", ">d MK")
    labels = of(store, "number", table(path, "sequence,target,set\nmj-V*,3,train\nM K,1,test\nMT,2,train\n"))
    assert labels.values[:, 0].tolist() == [1, 2, 3, 1]
    wrong = table(path, "sequence,target\nMK,1\nMT,2\nM1,3\n")
    refused(f"{path}:4: column 'sequence': '1' at position 2", store, "number", wrong)
    other = table(path, "seq,target\nMKK,1\nMKTAYIAKQRQISFVKSHFSRQ,3\n")
    refused("other ids (MKK, MKTAYIAKQRQISFVKSHFS...)", store, "number", other)
    refused("line 2", store, "number", table(path, "sequence,target\nMK,1\nmk,3\n"))


def test_where_a_table_has_ids_and_sequences_they_must_agree(path: Path) -> None:
    assert of(STORE, "number", table(path, "id,sequence,target\na,mk,1\nb,,2\nc,MV,3\n")).notices == []
    wrong = table(path, "id,sequence,target\na,MK,1\nb,MV,2\nc,MT,3\n")
    refused(f"{path}:3: 'b' has another sequence in x.fasta", STORE, "number", wrong)
    two = table(path, "id,seq,mutated_sequence,target\na,MK,MV,1\nb,MK,MV,2\nc,MK,MV,3\n")
    assert of(STORE, "number", two).values[:, 0].tolist() == [1, 2, 3]


def test_uniprot_accessions_are_ids_too(path: Path) -> None:
    store = InMemory(">sp|P1|A_HUMAN x MK", ">tr|P2|B_HUMAN MT", ">sp|P3|C_HUMAN MV", ">xx|P1|D MW")
    given = table(path, "Entry\tEntry Name\ttarget\nP1\tA\t1\nP2\tB\t2\nsp|P3|C_HUMAN\tC\t3\nP4\tD\t4\n")
    refused("1 of 4 records have no label", store, "number", given)
    labels = of(store, "number", given, required=False)
    assert targets(labels) == [[1], [2], [3], None]
    assert labels.notices[0] == "the UniProt accession was taken for the id in 2 records (sp|P1|A_HUMAN, tr|P2|B_HUMAN)"


def test_columns_may_be_named_and_must_be_clear(path: Path) -> None:
    for text, options, token in (
        ("id,Name,target\na,x,1\n", {}, "'id' and 'Name' may both be meant; name the column of ids in data.id_column"),
        ("id,target,Label\na,x,1\n", {}, "'target' and 'Label' may both be meant; set data.target"),
        ("id,score\na,1\n", {}, "has no column 'target' or 'label'"),
        ("id,score\na,1\n", {"columns": ["helix"]}, "has no column 'helix'"),
        ("key,target\na,1\n", {}, "has no column named id or sequence"),
        ("id,target\na,1\n,2\n", {}, ":3: column 'id' is empty"),
    ):
        refused(token, STORE, "number", table(path, text), **options)
    assert of(STORE, "number", table(path, "id,Name,target\n1,a,1\n2,b,1\n3,c,1\n"), id_column="Name")
    with pytest.raises(UsageError, match="'KD', 'KD'"):
        of(STORE, "number", columns=["kd", "KD"])


def test_classes_are_sorted(path: Path) -> None:
    given = table(path, "id,label\nc,Nucleus\na,Cytoplasm\nb,Membrane\n")
    labels = of(STORE, "class", given)
    assert labels.names == ("Cytoplasm", "Membrane", "Nucleus")
    assert targets(labels) == [0, 1, 2]
    assert isinstance(labels[0]["target"], np.ndarray)
    assert (labels[0]["target"].dtype, labels[0]["target"].shape) == (np.int64, ())
    headers = InMemory(">a TARGET=b;c MK", ">b TARGET=a MT", ">c MV")
    labels = of(headers, "class", required=False)
    assert (labels.names, targets(labels), labels.values.tolist()) == (("a", "b;c"), [1, 0, None], [1, 0, -1])
    for name in ("NA", "nan", "None", "-", "null"):
        refused(f"{path}:3: '{name}'", STORE, "class", table(path, f"id,label\na,x\nb,{name}\nc,x\n"))
    given = table(path, "id,label\na,x\nb,\nc,y\n")
    refused("1 of 3 records have no label", STORE, "class", given)
    assert of(STORE, "class", given, required=False).values.tolist() == [0, -1, 1]


def test_several_classes_of_one_column(path: Path) -> None:
    given = table(path, "id,target\nc,GO:2; GO:1;\na,GO:3\nb,GO:1;GO:3;;GO:1\n")
    labels = of(STORE, "multilabel", given)
    assert labels.names == ("GO:1", "GO:2", "GO:3")
    assert targets(labels) == [[0, 0, 1], [1, 0, 1], [1, 1, 0]]
    assert labels.notices == ["a class that was named twice was taken once in 1 record (GO:1)"]
    store = InMemory(">a TARGET=y;x MK", ">b TARGET=x MT", ">c MV")
    labels = of(store, "multilabel", required=False)
    assert (targets(labels), labels.names) == ([[1, 1], [1, 0], None], ("x", "y"))
    refused("1 of 3 records", STORE, "multilabel", table(path, "id,target\na,x\nb,;\nc,x\n"))
    labels = of(STORE, "multilabel", table(path, "id,target\na,x\nb,\nother,x;y\n"), required=False)
    assert labels.values.toarray().tolist() == [[1, 0], [0, 0], [0, 0]]


def test_several_columns_of_zero_and_one(path: Path) -> None:
    given = table(path, "id,Nucleus,Golgi,Membrane\nc,1,0,1.0\na,False,0,0.0\nb,TRUE,1,1\n")
    labels = of(STORE, "multilabel", given, columns=["Nucleus", "Golgi", "Membrane"])
    assert labels.names == ("Nucleus", "Golgi", "Membrane")
    assert targets(labels) == [[0, 0, 0], [1, 1, 1], [1, 0, 1]]
    for cell in ("", "2", "x"):
        wrong = table(path, f"id,u,v\na,1,1\nb,{cell},1\nc,1,1\n")
        refused(f"{path}:3: 'u' is '{cell}'", STORE, "multilabel", wrong, columns=["v", "u"])
    gap = table(path, "id,u,v\na,1,0\nb,,\nc,1,1\n")
    refused("1 of 3 records have no label", STORE, "multilabel", gap, columns=["u", "v"])
    assert targets(of(STORE, "multilabel", gap, columns=["u", "v"], required=False)) == [[1, 0], None, [1, 1]]
    assert targets(of(InMemory(">a U=1 V=0 MK"), "multilabel", columns=["u", "v"])) == [[1, 0]]
