"""Tables as programs and spreadsheets write them: what is read, and what is said about the rest."""

import bz2
import gzip
import lzma
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from packed import zstd
from pyarrow import parquet as pq

from esmshard.errors import InputError
from esmshard.io.tables import MISSING, Table, read_table, write_rows


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(data: str | bytes, name: str = "t.csv") -> Table:
    path = Path(name)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_table(path)


def refused(data: str | bytes, name: str = "t.csv") -> str:
    with pytest.raises(InputError) as error:
        table(data, name)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def test_one_table_in_many_dresses() -> None:
    for name, text in (
        ("t.csv", "mutant,score\nA24G,1.5\nWT,2\n"),
        ("t.txt", "mutant\tscore\nA24G\t1.5\nWT\t2"),
        ("t.csv", "mutant;score\nA24G;1.5\nWT;2\n"),
        ("t.csv", "mutant\tscore\nA24G\t1.5\nWT\t2\n"),
        ("t.tsv", "mutant,score\nA24G,1.5\nWT,2\n"),
        ("table", "mutant;score\nA24G;1.5\nWT;2\n"),
        ("t.csv", "\ufeffmutant,score\r\nA24G,1.5\r\nWT,2\r\n"),
        ("t.csv", "mutant,score\rA24G,1.5\rWT,2\r"),
        ("t.csv", '"mutant", "score"\n A24G ,\t1.5\n"WT","2"\n'),
        ("t.csv", "mutant,score,,\nA24G,1.5,,\nWT,2\n"),  # Excel leaves separators out below a block of rows
        ("t.csv", "mutant,score\nA24G,1.5,,\nWT,2,\n"),
        ("t.csv", "mutant,,score\nA24G,,1.5\nWT,,2\n"),
    ):
        read = table(text, name)
        assert read.columns == {"mutant": ["A24G", "WT"], "score": ["1.5", "2"]}, text
        assert list(read.columns) == ["mutant", "score"]
        assert (read.lines, len(read), read.path) == ([2, 3], 2, Path(name))


def test_compressed() -> None:
    text = "mutant,score;x\n" + "A24G,1;5\n" * 500
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd,
    }  # fmt: skip
    for ending, pack in packers.items():
        name = f"t.csv.{ending}"
        read = table(pack(text.encode()), name)
        assert list(read.columns) == ["mutant", "score;x"]  # the ending below .gz decides between , and ;
        assert len(read) == 500
        for data in (pack(text.encode())[:-9], b"no such format"):
            assert refused(data, name).startswith(f"{name}: cannot be read to its end (")


def test_lines_are_those_an_editor_shows() -> None:
    text = 'id,note\n\na,"one\ntwo"\n,\n\r\nb,"x\r\ny"\nc,"u\rv"\nd,\n'
    read = table(text)
    assert read.columns["id"] == ["a", "b", "c", "d"]
    assert read.columns["note"] == ["one\ntwo", "x\r\ny", "u\rv", ""]
    assert read.lines == [3, 7, 9, 11]
    assert read.where(1) == "t.csv:7"
    assert read.at(1) == "line 7"
    assert table("\n\n a , b \n1,2\n").lines == [4]
    assert table("\n\n a , b \n1,2\n").columns == {"a": ["1"], "b": ["2"]}
    # these end a line for str.splitlines, but for no editor
    assert table("a,b\nx\u2028y,1\nz\x0c,2\n").lines == [2, 3]


def test_the_separator_is_what_divides_the_lines() -> None:
    assert table('a,b\n"x, ""y""",1\n5" primer,2\n').columns == {"a": ['x, "y"', '5" primer'], "b": ["1", "2"]}
    for name, text, columns in (
        ("t.csv", "mutant;score (a, b)\nA24G;1.5\nWT;2\n", ["mutant", "score (a, b)"]),
        ("t.csv", "mutant,score (a; b)\nA24G,1\nWT,2\n", ["mutant", "score (a; b)"]),
        ("t.tsv", "mutant\tscore, a\nA24G\t1,5\nWT\t2,5\n", ["mutant", "score, a"]),
        ("t.csv", "a;b,c\n1;2,3\n", ["a;b", "c"]),  # both divide every line: the ending decides
        ("t.txt", "a\tb,c\n1\t2,3\n", ["a", "b,c"]),
        ("t.dat", "a;b,c\n1;2,3\n", ["a", "b,c"]),
        ("t.txt", 'a, "b; x, c"\n1, 2\n', ["a", "b; x, c"]),
        ("t.csv", "a\n1\n2\n", ["a"]),
        ("t.csv", "a,b;c\n1,2\n3;x,4\n", ["a", "b;c"]),
        ("t.csv", " \t\n\n;;\nmutant;score (a, b)\nA24G;1.5\n", ["mutant", "score (a, b)"]),
        ("t.csv", "mutant,1.5,2\nQ1,0.5,2\nQ2,1,3\n", ["mutant", "1.5", "2"]),
    ):
        assert list(table(text, name).columns) == columns, text


def test_a_column_without_a_name() -> None:
    assert table(",mutant,score\n0,A24G,1\n1,WT,2\n").columns == {
        "column 1": ["0", "1"],
        "mutant": ["A24G", "WT"],
        "score": ["1", "2"],
    }
    assert table("a,b,\n1,2,x\n3,4\n").columns == {"a": ["1", "3"], "b": ["2", "4"], "column 3": ["x", ""]}
    assert refused("a,,column 2\n1,2,3\n") == "t.csv: has two columns 'column 2'; rename one of them"


def test_what_is_no_table() -> None:
    for data, message in (
        ("", "t.csv: is empty"),
        (">a\nMKT\n", "t.csv: is a FASTA file"),
        ("\ufeff \n\n,,\n", "t.csv: is empty"),
        ("a,b\n,\n\n", "t.csv: has a header, but no rows"),
        ("a,b, a\n1,2,3\n", "t.csv: has two columns 'a'"),
        ("a,b\n1,2\n\n3\n", "t.csv:4: has 1 cell, but the header in line 1 has 2 (commas separate cells)"),
        ("\na;b;\n1;2\n3;4;5;6\n", "t.csv:4: has 4 cells, but the header in line 2 has 3"),
        ('a,b\n1,2\n"x,3\ny,4\n', "t.csv:3: cannot be read ("),
        ('a,b\n"x" y,3\n', "t.csv:2: cannot be read ("),
        ('a,b\n1,"' + "x\n" * 70_000 + '"\n', "t.csv:2: cannot be read ("),
        (b"a,b\r\n1,2\r\n1,\0\r\n", "t.csv:3: has a NUL byte"),
        (b"a,b\n1,2\n1,\xb5\n", "t.csv:3: is not UTF-8"),
        (b"\xef\xbb\xbfa,b\r1,\xb5\n", "t.csv:2: is not UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), "t.csv: is UTF-16 text"),
        (b"\xfe\xff" + "a,b\n1,2\n".encode("utf-16-be"), "t.csv: is UTF-16 text"),
        ("a,b\n1,2\n".encode("utf-16-le"), "t.csv: is UTF-16 text"),
        (b"PAR1....PAR1", "t.csv: is a Parquet file"),
        (b"PK\x03\x04", "t.csv: is an Excel workbook"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "t.csv: is an old Excel workbook"),
    ):
        assert refused(data).startswith(message)


def test_no_such_file() -> None:
    for name in ("t.csv", "t.parquet"):
        with pytest.raises(InputError, match=rf"^{name}: no such file$"):
            read_table(Path(name))
        Path(name).mkdir()
        with pytest.raises(InputError, match=rf"^{name}: is a directory"):
            read_table(Path(name))


def test_a_column_that_is_not_there() -> None:
    read = table("mutant,DMS_score\nA24G,1\n")
    assert read.column("mutant") == ["A24G"]
    with pytest.raises(InputError, match="'dms_scor'; did you mean 'DMS_score'"):
        read.column("dms_scor")
    with pytest.raises(InputError, match=r"its only column is 'a\|b'"):
        table("a|b\n1|2\n").column("a")
    many = table(",".join(f"c{k}" for k in range(30)) + "\n" + ",".join("1" * 30) + "\n")
    with pytest.raises(InputError, match=r"'c18', 'c19' and 10 more$"):
        many.column("else")


def test_numbers() -> None:
    cells = ["1", "-2.5", "+.5", "3.", "1e-3", "2E5", "\u22121.5", "", "NA", "NaN", "nan", "null", "None", "-", "n/a"]
    read = table("x\n" + "\n".join(cells[:7]) + "\n")
    np.testing.assert_array_equal(read.numbers("x"), [1, -2.5, 0.5, 3, 0.001, 2e5, -1.5])
    cells = [*cells[7:], "n.d.", "ND", "N/A", "#N/A", "n.a.", "#NA", "<NA>", "n.d", "N/D"]
    read = table("x,y\n" + "".join(f"{cell},1\n" for cell in cells))
    assert read.numbers("x").dtype == np.float64
    assert np.isnan(read.numbers("x")).tolist() == [True] * len(cells)
    assert read.numbers("y").tolist() == [1.0] * len(cells)
    assert table("x\n0.1234567890123456789\n").numbers("x")[0] == 0.12345678901234568


def test_the_documented_list_of_missing_values_is_the_one_that_is_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "labels.md").read_text(encoding="utf-8")
    sentence = text.split("Missing values are")[1].split("same list")[0]
    assert {cell.lower() for cell in re.findall("`([^`]+)`", sentence)} | {""} == MISSING


def test_decimal_commas() -> None:
    for cells, numbers in (
        ("1,5 -2 ,25 1,5e3", [1.5, -2.0, 0.25, 1500.0]),
        # not three digits, a leading zero or four digits before it: no comma of thousands, so none is
        ("1,234 2,5", [1.234, 2.5]),
        ("0,234 -2,534", [0.234, -2.534]),
        ("1234,567", [1234.567]),
    ):
        assert column(cells).numbers("x").tolist() == numbers


def test_what_is_no_number() -> None:
    words = "inf 1e999 1_000 \u0661 0x10 1.2.3 <5 12% #DIV/0! 1e e5 . 1,234 -12,345 1,234,567 1.234,5"
    for cells, row in (*((f"7 {word}", 1) for word in words.split()), ("1,5 7 1.5", 0), ("2.5 1,5 0,5", 1)):
        wrong = re.escape(repr(cells.split()[row]))
        with pytest.raises(InputError, match=rf"^t.csv:{row + 2}: column 'x' has {wrong}, .* such as 1.5"):
            column(cells).numbers("x")


def column(cells: str) -> Table:
    return table("m;x\n" + "".join(f"a;{cell}\n" for cell in cells.split()))


def parquet(columns: list[object], names: list[str]) -> Path:
    pq.write_table(pa.table(columns, names=names), "t.parquet")
    return Path("t.parquet")


def test_parquet() -> None:
    path = parquet(
        [
            pa.array([" A24G", "WT", None]),
            pa.array([0.1, 1 / 3, None]),
            pa.array([1, 2**60 + 1, None]),
            pa.array([0.1, float("nan"), -1e-7], pa.float32()),
            pa.array(["x", "y", "x"]).dictionary_encode(),
            pa.array([True, False, None]),
        ],
        ["mutant", " score ", "n", "single", "kind", "is wild"],
    )
    read = read_table(path)
    assert read.columns == {
        "mutant": ["A24G", "WT", ""],
        "score": ["0.1", "0.3333333333333333", ""],
        "n": ["1", "1152921504606846977", ""],
        "single": ["0.10000000149011612", "nan", "-1.0000000116860974e-07"],
        "kind": ["x", "y", "x"],
        "is wild": ["True", "False", ""],
    }
    assert read.lines == [1, 2, 3]
    assert (read.where(2), read.at(2)) == ("t.parquet:3", "row 3")
    assert read.numbers("score")[1] == 1 / 3
    assert np.isnan(read.numbers("single")[1])


def test_parquet_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet([pa.array([1, 2]), pa.array([3, 4])], ["a", "a"])
    with pytest.raises(InputError, match=r"^t\.parquet: has two columns 'a'; rename one of them$"):
        read_table(path)
    with pytest.raises(InputError, match="no rows"):
        read_table(parquet([pa.array([], pa.int64())], ["a"]))
    whole = parquet([pa.array(["x" * 50, "y"])], ["a"]).read_bytes()
    draw, messages = random.Random(0), []
    for _ in range(40):
        damaged = bytearray(whole[: draw.randrange(1, len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.randrange(1, 5)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        with suppress(InputError):
            read_table(path)
            continue
        messages.append(refused(bytes(damaged), "t.parquet"))
    assert len(messages) > 20
    assert all(message.startswith("t.parquet: ") for message in messages)
    assert refused(b"mutant,score\n", "t.parquet").startswith("t.parquet: cannot be read as Parquet (")
    for name in [name for name in sys.modules if name.startswith("pyarrow")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'esmshard[tables]'" in refused(whole, "t.parquet")


def test_rows_that_were_written_are_read_back() -> None:
    for cell in ("a\rb", "a\nb", '"', ",", "=1+1", "'"):
        with open("t.csv", "w", newline="") as file:
            write_rows(file, [["id", "text"], ["x", cell], ["y", "plain"]])
        assert Path("t.csv").read_bytes().endswith(b"\n")
        assert read_table(Path("t.csv")).columns == {"id": ["x", "y"], "text": [cell, "plain"]}
