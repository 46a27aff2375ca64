"""Clusters: MMseqs2's table as it is, with all that can be wrong with it, and runs of the program."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.splits import split_files
from esmshard.data.splits.leakage import ComparedRecords
from esmshard.data.splits.recipe_splits import read_clusters
from esmshard.data.splits.split_files import OPTIONS, align_clusters, run_mmseqs
from esmshard.errors import InputError
from esmshard.vocab import encode_residues


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "x_cluster.tsv"


@pytest.mark.parametrize(
    ("text", "ids", "names", "notice"),
    [
        ("a\ta\na\tb\nc\tc\n", ["c", "b", "a"], ["c", "a", "a"], ""),
        (
            *("d\td\nd\tb\na\ta\na\tb\nc\tc\nc\tc\n", ["a", "b", "c", "d"], ["a", "a", "c", "a"]),
            "1 in several clusters (b), which were joined",
        ),
        ("1\t2\n1\t3\n2\t1\n", ["1", "2", "3"], ["2", "1", "1"], ""),  # cluster 2 is not the cluster of record 2
        ("a\ta\na\tb\nc\tc\n", ["a"], ["a"], "2 that are no records were passed over (b, c)"),
        # MMseqs2 shortens ids of UniProt
        ("P1\tP1\nP1\tQ9\nsp|O1|X\tsp|O1|X\n", ["tr|Q9|Q9_HUMAN", "sp|P1|A_B", "sp|O1|X"], ["P1", "P1", "sp|O1|X"], ""),
    ],
)
def test_each_record_has_the_cluster_of_its_line(
    text: str, ids: list[str], names: list[str], notice: str, table: Path
) -> None:
    table.write_text(text)
    found = read_clusters(table, ids)
    assert (found.names, found.source) == (names, str(table))
    assert found.notices == ([f"{table}: {notice}"] if notice else [])
    for end in ("\r\n", "\n\n"):
        table.write_bytes(gzip.compress(("\ufeff" + text.replace("\n", end)).encode()))
        assert read_clusters(table, ids).names == names


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a\ta\na\tb\n", ": 4 of 5 records are in no cluster (w, x, up|a|x, ...); cluster the very file that is split"),
        ("", ": 5 of 5 records are in no cluster"),
        *(
            (f"a\ta\n{line}\n", ":2: is not 'representative<TAB>member'")
            for line in ("b", "a\tb\tc", "a\t", "\tb", "a b")
        ),
        (b"a\ta\n\xff\xfe\ta\n", ":2: is not UTF-8"),
        (gzip.compress(b"a\ta\n" * 1000, mtime=0)[:-20], ": cannot be read"),
        (None, ": no such file"),
    ],
)
def test_tables_that_cannot_be_used(text: str | bytes | None, sentence: str, table: Path) -> None:
    if text is not None:
        table.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError) as error:
        read_clusters(table, ["w", "x", "a", "up|a|x", "z"])
    assert str(error.value).startswith(f"{table}{sentence}")
    assert "\n" not in str(error.value)


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
    with pytest.raises(
        InputError, match=r"^mmseqs easy-cluster failed with code 3 \(Cannot fit databases into memory\)"
    ):
        run_mmseqs(["MKT"], ["a"], tmp_path)
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
    monkeypatch.setattr(split_files, "MOST_ALIGNED", 2)
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
