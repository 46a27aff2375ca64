"""Tables as files of sequences: the columns that are known, the rows that are left out, and the labels beside them."""

import gzip
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from esmshard.data.labels.label_sources import label_source, rules_of
from esmshard.data.splits.recipe_splits import marked, open_split
from esmshard.errors import InputError, UsageError
from esmshard.io.sequences import STDIN, Record, is_plain, read_fasta
from esmshard.io.store import cached, ingest
from esmshard.io.symbols import Edits, Rules
from esmshard.io.tables import Table
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import DataSettings, Recipe
from esmshard.tasks.registry import new_task

FLIP = (
    "sequence,target,set,validation\nMKTAYIAK,0.1,train,True\nMKTAYLAK,0.7,test,\nMKTAYVAK,0.5,train,False\n"
    "MKTAYVAW,0.2,train,nan\n"
)
SAPROTHUB = "protein,label,stage\nMKTAYIAK,0.1,valid\nMKTAYLAK,0.7,test\nMKTAYVAK,0.5,train\nMKTAYVAW,0.2,train\n"
MARKS = {
    FLIP: ["row_2 SET=train VALIDATION=True", "row_3 SET=test", "row_4 SET=train VALIDATION=False", "row_5 SET=train"],
    SAPROTHUB: ["row_2 SET=valid", "row_3 SET=test", "row_4 SET=train", "row_5 SET=train"],
}


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))


def write(data: str | bytes, name: str = "x.csv") -> Path:
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Path(name)


def read(path: Path) -> tuple[list[Record], list[str]]:
    edits = Edits()
    return list(read_fasta(path, edits)), edits.notices()


def refusal(data: str | bytes, name: str = "x.csv") -> str:
    with pytest.raises(InputError) as caught:
        read(write(data, name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def recipe(task: str, more: str = "") -> Recipe:
    files = "train: x.csv, valid: x.csv, test: x.csv"
    Path("r.yaml").write_text(
        f"task: {task}\nmodel: {{name: starter}}\ndata: {{{files}, long: full{more}}}\nout: run\n"
    )
    return recipe_file.load(Path("r.yaml"))


def test_rows_are_records_of_any_text_table() -> None:
    text = "id,sequence,label\na,MKT AA,1\nb,mk-t*,2\n"
    tables = {
        "x.csv": text.encode(),
        "x.TSV": text.replace(",", "\t").encode(),
        "x.csv.gz": gzip.compress(text.encode()),
    }
    for name, data in tables.items():
        records, notices = read(write(data, name))
        assert records == [Record("a", "a", "MKTAA"), Record("b", "b", "MKT")]
        assert len(notices) == 3
        assert all(notice.endswith(" in 1 record (b)") for notice in notices)
        assert not is_plain(Path(name)), "bytes of a table are no ranges of records"
    assert read(write(">a\nMKT\n", "x.csv"))[0] == [Record("a", "a", "MKT")], "a FASTA file by its first byte"
    assert is_plain(Path("x.csv"))
    assert "the name of a table ends in .csv" in refusal("id,sequence\na,MKT\n", "x.fasta")
    write("id,sequence\na,MKT\n", "-")
    assert not is_plain(STDIN)


def test_rows_of_parquet_are_numbered_from_1() -> None:
    parquet.write_table(pa.table({"seq": ["MKT", None, "AAA"], "y": [1.5, 2, 3]}), "x.parquet")
    records, notices = read(Path("x.parquet"))
    assert [(record.id, record.sequence) for record in records] == [("row_1", "MKT"), ("row_3", "AAA")]
    assert notices == ["1 row without a sequence left out (row 2)"]
    Path("x.parquet").rename("x.fasta")
    with pytest.raises(InputError, match=r"x\.fasta"):
        read(Path("x.fasta"))


def test_published_tables_are_read_as_they_come() -> None:
    for text, headers in MARKS.items():
        records, notices = read(write(text))
        assert [record.description for record in records] == headers
        assert (records[0].sequence, notices) == ("MKTAYIAK", [])
    gym = write("mutant,mutated_sequence,DMS_score,DMS_score_bin\nM1A,AKT,1.5,1\nM1C,CKT,0.5,0\n")
    assert [(record.id, record.sequence) for record in read(gym)[0]] == [("row_2", "AKT"), ("row_3", "CKT")]
    uniprot = write("Entry\tReviewed\tEntry Name\tSequence\nP1\treviewed\tA_B\tMKT\n", "u.tsv")
    assert read(uniprot)[0] == [Record("P1", "P1", "MKT")]
    records, _ = read(write("id,sequence,stage\na,MKT,III\nb,MKV,train\n"))  # a stage that is no set
    assert [record.description for record in records] == ["a", "b"]


def test_rows_without_a_sequence_are_left_out_and_counted_with_their_lines() -> None:
    path = write("sequence,target\nMKT,1\n,2\nNA,3\n\nMKV,4\n")
    records, notices = read(path)
    assert [record.id for record in records] == ["row_2", "row_6"]
    assert notices == ["2 rows without a sequence left out (line 3, line 4)"]
    assert cached(path).notices == notices


def test_labels_and_sets_of_whole_proteins_are_in_the_same_table() -> None:
    write(FLIP + ",0.9,train,\n")
    of_numbers = recipe("{name: sequence, kind: number}")
    labels = new_task(of_numbers.task, {}).labels
    splits = {name: open_split(of_numbers, name, labels) for name in ("train", "valid", "test")}
    ids = {name: [split.id(n) for n in range(len(split))] for name, split in splits.items()}
    assert ids == {"train": ["row_4", "row_5"], "valid": ["row_2"], "test": ["row_3"]}
    assert splits["train"].get(0).labels["target"].tolist() == pytest.approx([0.5])
    assert splits["test"].notices[0] == "1 row without a sequence left out (line 6)"
    assert "its column of sets divides it: 1 of 4 records are of test" in splits["test"].notices
    assert marked(cached(Path("x.csv")))
    write("sequence,label,set\nMKT,1,train\nMKT,3,train\nMKA,2,val\nMKC,4,test\n")
    for more in ("", ", labels: x.csv"):  # equal sequences keep labels of their own
        train = open_split(recipe("{name: sequence, kind: number}", more), "train", labels)
        assert [train.get(n).labels["target"].tolist() for n in range(2)] == [[1.0], [3.0]]


def test_letters_of_residues_are_in_a_column() -> None:
    write("name,sequence,label,set\na,MKT,HHE,train\nb,MKV,EEE,val\nc,MK,HH,test\n")
    found = recipe("{name: residue}")
    train = open_split(found, "train", new_task(found.task, {}).labels)
    assert train.get(0).labels["target"].tolist() == [1, 1, 0]
    write("name,sequence,label,set\na,MKT,HHE,train\nb,MKV,EE,val\nc,MK,HH,test\n")
    with pytest.raises(InputError, match=r"x\.csv:3: record 'b' has labels for 2 residues, but 3 residues in .*x\.csv"):
        open_split(found, "train", new_task(found.task, {}).labels)


def test_the_cache_follows_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached(write("sequence\nMKT\n"))
    assert cached(Path("x.csv")).path == first.path
    monkeypatch.setattr("esmshard.io.store.CONVERSION", 0)
    assert cached(Path("x.csv")).path != first.path


def test_columns_of_other_names_are_read_by_their_names() -> None:
    path = write("key,my_seq,sequence,name,y,set\na,MKT,MMM,u,1,train\nb,MKV,MMM,v,2,train\n")
    rules = Rules(sequence_column="my_seq", id_column="key")
    assert [(record.id, record.sequence) for record in read_fasta(path, rules=rules)] == [("a", "MKT"), ("b", "MKV")]
    assert ingest([path], Path("x.store"), rules).id(1) == "b"
    assert cached(path).path != cached(path, rules).path
    for wrong in (Rules(sequence_column="my_sek"), Rules(id_column="my_sek")):
        with pytest.raises(InputError, match=r"has no column 'my_sek'; did you mean 'my_seq'.* 'key', "):
            list(read_fasta(path, rules=wrong))
    files = {"train": "x.csv", "valid": "x.csv", "test": "x.csv"}
    for column, names in (("key", ["a", "b"]), ("name", ["u", "v"])):
        data = DataSettings(**files, id_column=column)
        source = label_source(path, data)
        assert isinstance(source, Table)
        assert source.ids == column
        assert [cached(path, rules_of(path, data)).id(n) for n in range(2)] == names
    assert rules_of(path, DataSettings(**files, labels="others.csv", id_column="key")) == Rules()
    given = recipe("{name: sequence}", ", sequence_column: my_seq, id_column: key, target: y")
    train = open_split(given, "train", new_task(given.task, {}).labels)
    assert [train.id(n) for n in range(2)] == ["a", "b"]
    write(">a\nMKT\n", "x.fasta")
    for_fasta = given.model_copy(update={"data": given.data.model_copy(update={"train": "x.fasta"})})
    with pytest.raises(UsageError, match=r"data\.sequence_column: x\.fasta is no table; remove the key"):
        open_split(for_fasta, "train", None)


def test_bad_tables_are_refused_in_one_sentence() -> None:
    for text, message in (
        ("", "x.csv: is empty"),
        ("id,sequence\n", "x.csv: has a header, but no rows"),
        ("id,sequence\na,\n", "x.csv: column 'sequence' has only empty cells"),
        ("sequence,y\n12,1\n3.5,2\n", "x.csv:2: record 'row_2' has '1' at position 1"),
        ("id,fold\na,MKT\n", "x.csv: has no known sequence column; its columns are 'id', 'fold'"),
        ("sequence,mutated_sequence\nMKT,MKV\n", "x.csv: columns 'sequence' and 'mutated_sequence' may both"),
        ("id,sequence\na,MKT\n,MKV\n", "x.csv:3: column 'id' is empty"),
        ("name,accession,seq\na,b,MKT\n", "x.csv: columns 'name' and 'accession' may both be meant"),
        ("name,seq\nmy protein,MKT\n", "x.csv:2: column 'name' has 'my protein'"),
        ("id,seq\na,MKT\nb,\nc,M1T\n", "x.csv:4: record 'c' has '1' at position 2"),
        ("id,seq\na,MKT\nb,\na,MKV\n", "x.csv: id 'a' has two different"),
        ("id,seq\na,M>KT\n", "x.csv:2: record 'a' has '>' at position 2"),
        ("id,seq\na,MKT,1,2\n", "x.csv:2: has 4 cells, but the header in line 1 has 2"),
    ):
        assert refusal(text).startswith(message)


def workbook(*sheets: list[list[object]]) -> Path:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.remove(book.active)
    for rows in sheets:
        sheet = book.create_sheet()
        for row in rows:
            sheet.append(row)
    book.save("x.xlsx")
    return Path("x.xlsx")


def test_a_workbook_with_one_sheet_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["Sequence", "target", None], [" MKT", 0.1, None], [None, 2, None], [None], ["MKV", 3, None]]
    path = workbook(rows, [])
    assert [(record.id, record.sequence) for record in read(path)[0]] == [("row_2", "MKT"), ("row_5", "MKV")]
    assert read(path)[1] == ["1 row without a sequence left out (row 3)"]
    source = label_source(path, DataSettings(train="x.xlsx", valid="v", test="t"))
    assert isinstance(source, Table)
    assert source.numbers("target").tolist() == [0.1, 3.0]
    data = path.read_bytes()
    for size in (30, len(data) // 2, len(data) - 10):
        assert refusal(data[:size], "x.xlsx").startswith("x.xlsx: cannot be read as an Excel workbook (")
    with pytest.raises(InputError, match=r"x\.xlsx: has 2 sheets with cells \('Sheet', 'Sheet1'\)"):
        read(workbook([["sequence"], ["MKT"]], [["notes"]]))
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert "pip install openpyxl" in refusal(data, "x.xlsx")


def test_two_columns_of_chains_are_one_record() -> None:
    """The columns are found whatever their case; a column of sequences, or an id, is not taken for a chain."""
    for columns in ("Heavy,Light", "VH,VL", "chain_A,chain_B", "sequence_1,sequence_2"):
        found, notices = read(write(f"name,{columns},y\nab,mk t,MKV*,1\nnano,MKK,,2\nnone,,nan,3\n"))
        assert [(record.id, record.sequence) for record in found] == [("ab", "MKT:MKV"), ("nano", "MKK")]
        assert "1 row with only one of the two chains, read as one chain (line 3)" in notices
        assert "1 row without a sequence left out (line 4)" in notices
        assert "chains were joined by a linker of 25 in 1 record (ab)" in notices
    (found,), _ = read(write("sequence,heavy,light\nMKT,1.5,2\n"))
    assert found.sequence == "MKT"
    (found,), _ = read(write("protein,heavy,light\nP1,MKT,MKV\n"))
    assert (found.id, found.sequence) == ("P1", "MKT:MKV")
    assert "has several pairs of chain columns (heavy, light and chain_a, chain_b); rename the unwanted pairs" in (
        refusal("heavy,light,chain_a,chain_b\nM,K,M,K\n")
    )
    assert "has '2' at position 5" in refusal("heavy,light\nMKT,2\n")
    assert "has no known sequence column" in refusal("heavy,y\nMKT,2\n")
