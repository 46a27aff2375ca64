"""Clusters: MMseqs2's table as it is, with all that can be wrong with it, and runs of the program."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.splits import clusters
from esmshard.data.splits.clusters import OPTIONS, align_clusters, read_clusters, run_mmseqs
from esmshard.data.splits.leakage import ComparedRecords
from esmshard.errors import InputError
from esmshard.vocab import encode_residues

TABLE = "a\ta\na\tb\nc\tc\n"


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        act()
    return str(error.value)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "x_cluster.tsv"
    path.write_text(TABLE)
    return path


def test_each_record_has_the_cluster_of_its_line(table: Path) -> None:
    found = read_clusters(table, ["c", "b", "a"])
    assert found.names == ["c", "a", "a"]
    assert found.source == str(table)
    assert found.notices == []


@pytest.mark.parametrize("end", ["\r\n", "\n\n"])
def test_line_ends_blank_lines_and_compression(end: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tsv.gz"
    path.write_bytes(gzip.compress(("\ufeff" + TABLE.replace("\n", end)).encode()))
    assert read_clusters(path, ["a", "b", "c"]).names == ["a", "a", "c"]


def test_a_record_in_two_clusters_joins_them(table: Path) -> None:
    table.write_text("d\td\nd\tb\na\ta\na\tb\nc\tc\nc\tc\n")
    found = read_clusters(table, ["a", "b", "c", "d"])
    assert found.names == ["a", "a", "c", "a"]
    assert found.notices == [f"{table}: 1 in several clusters (b), which were joined"]


def test_names_of_clusters_are_no_ids(table: Path) -> None:
    """Cluster 2 is not the cluster of record 2."""
    table.write_text("1\t2\n1\t3\n2\t1\n")
    assert read_clusters(table, ["1", "2", "3"]).names == ["2", "1", "1"]


def test_more_than_the_records_is_passed_over_with_a_word(table: Path) -> None:
    found = read_clusters(table, ["a"])
    assert found.names == ["a"]
    assert found.notices == [f"{table}: 2 that are no records were passed over (b, c)"]


def test_records_in_no_cluster_are_named(table: Path) -> None:
    assert refusal(lambda: read_clusters(table, ["w", "x", "a", "y", "z"])) == (
        f"{table}: 4 of 5 records are in no cluster (w, x, y, ...); cluster the very file that is split"
    )


def test_uniprot_ids_are_found_as_mmseqs_shortens_them(table: Path) -> None:
    table.write_text("P12345\tP12345\nP12345\tQ9\nsp|O1|X\tsp|O1|X\n")
    ids = ["tr|Q9|Q9_HUMAN", "sp|P12345|AATM_RABIT", "sp|O1|X"]
    assert read_clusters(table, ids).names == ["P12345", "P12345", "sp|O1|X"]
    assert "in no cluster (up|P12345|X)" in refusal(lambda: read_clusters(table, ["up|P12345|X"]))


@pytest.mark.parametrize("line", ["b", "a\tb\tc", "a\t", "\tb", "a b"])
def test_a_line_that_is_no_pair(line: str, table: Path) -> None:
    table.write_text(f"a\ta\n{line}\n")
    assert refusal(lambda: read_clusters(table, ["a"])) == (
        f"{table}:2: is not 'representative<TAB>member'; give the _cluster.tsv of MMseqs2"
    )


def test_files_that_cannot_be_read(tmp_path: Path, table: Path) -> None:
    assert refusal(lambda: read_clusters(tmp_path / "no.tsv", ["a"])) == (f"{tmp_path / 'no.tsv'}: no such file")
    assert "is a directory; the _cluster.tsv of MMseqs2 is expected" in refusal(lambda: read_clusters(tmp_path, ["a"]))
    table.write_bytes(b"a\ta\n\xff\xfe\ta\n")
    assert "is not UTF-8" in refusal(lambda: read_clusters(table, ["a"]))
    cut = tmp_path / "cut.tsv.gz"
    cut.write_bytes(gzip.compress(TABLE.encode() * 1000)[:-20])
    assert f"{cut}: cannot be read" in refusal(lambda: read_clusters(cut, ["a"]))
    table.write_text("")
    assert "1 of 1 records are in no cluster (a)" in refusal(lambda: read_clusters(table, ["a"]))


STAND_IN = """#!/bin/sh
if [ "$1" = version ]; then echo "7.5-test"; exit 0; fi
echo "$@" > "{log}"
cat "$2" >> "{log}"
printf '0\\t0\\n0\\t2\\n1\\t1\\n' > "$3_cluster.tsv"
"""
FAILING = """#!/bin/sh
if [ "$1" = version ]; then echo x; exit 0; fi
echo "first line" >&2
echo "Cannot fit databases into memory" >&2
exit 3
"""


def stand_in(directory: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    program = directory / "bin" / "mmseqs"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_a_run_gets_the_options_and_its_clusters_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, STAND_IN.format(log=tmp_path / "log"), monkeypatch)
    work = tmp_path / "work"
    work.mkdir()
    found = run_mmseqs(["MKT", "AGV", "MKV"], ["sp|P1|A", "b", "c"], work)
    assert found.names == ["sp|P1|A", "b", "sp|P1|A"]
    assert found.source == "MMseqs2 7.5-test, easy-cluster --min-seq-id 0.3 -c 0.8 --cov-mode 0 -s 7.5"
    command, *fasta = (tmp_path / "log").read_text().splitlines()
    assert command.split()[0] == "easy-cluster"
    assert " --min-seq-id 0.3 -c 0.8 --cov-mode 0 -s 7.5 " in command
    assert fasta == [">0", "MKT", ">1", "AGV", ">2", "MKV"]
    assert list(work.iterdir()) == []


def test_a_failing_run_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, FAILING, monkeypatch)
    message = refusal(lambda: run_mmseqs(["MKT"], ["a"], tmp_path))
    assert message.startswith("mmseqs easy-cluster failed with code 3 (Cannot fit databases into memory); ")
    assert "--clusters FILE.tsv" in message
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


FIRST = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV"
SECOND = "MKTAYIAKQRQLSFVKSHFTRQLEERLGLIDVQAPILSKVGDGTQENLSGAEKAVQVRVKALPDAQYEVV"
STRANGER = "GSHMWCPLDEWRNHYFKTPGGADWMQCYHTNPEIFWKRDLNGSACVYHTQWEPMDFNRKCGISTYLHWPA"


def test_alignment_joins_relatives_over_most_of_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of relatives is one cluster; neither a fragment nor a common tag of strangers joins anything."""
    tag = "MGSSHHHHHHSSGLVPRGSH"
    third = SECOND[:40] + SECOND[40:].translate(str.maketrans("AVKLQ", "SIRMN")) + "U"
    texts = [FIRST, "MKV", third, SECOND, tag + STRANGER, tag + FIRST[::-1], FIRST[:35], "X" * 30]
    tokens = [np.frombuffer(encode_residues(text), np.uint8) for text in texts]
    records = ComparedRecords(len(tokens), tokens.__getitem__, "abcdefgh".__getitem__)
    found = align_clusters(records)
    assert found.names == [*"abaaefgh"]
    assert "40% identity" in found.notices[0]
    monkeypatch.setattr(clusters, "MOST_ALIGNED", 2)
    with pytest.raises(InputError, match="mmseqs2"):
        align_clusters(records)


@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2")
def test_the_program_itself(tmp_path: Path) -> None:
    """Two relatives at 90%, a stranger, a peptide and unknown residues: all have a cluster."""
    ids = ["sp|P12345|AATM_RABIT", "b", "c", "d", "e"]
    found = run_mmseqs([FIRST, SECOND, STRANGER, "MKV", "X" * 30], ids, tmp_path)
    assert found.names[0] == found.names[1]
    assert found.names[0] in ids[:2]
    assert found.names[2:] == ["c", "d", "e"]
    assert found.source.startswith("MMseqs2 ")
    assert " ".join(OPTIONS) in found.source


@pytest.mark.parametrize("byte", [12, 40, 300])
def test_a_damaged_gzip_file_is_one_sentence(tmp_path: Path, byte: int) -> None:
    data = bytearray(gzip.compress(b"".join(b"r%d\tm%d\n" % (k, 7 * k % 99) for k in range(500)), mtime=0))
    data[byte] ^= 0xFF
    path = tmp_path / "c.tsv.gz"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read_clusters(path, ["m1"])
    assert str(error.value).startswith(f"{path}")
    assert "\n" not in str(error.value)
