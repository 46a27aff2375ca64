"""Clusters: tables of MMseqs2, runs of the program, and clusters by alignment."""

import gzip
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from esmshard.data.splits import clusters
from esmshard.data.splits.clusters import OPTIONS, align_clusters, read_clusters, run_mmseqs
from esmshard.data.splits.leakage import ComparedRecords
from esmshard.errors import InputError
from esmshard.vocab import encode_residues


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "x_cluster.tsv"


def test_each_record_has_the_cluster_of_its_line(table: Path) -> None:
    for text, ids, names, n_notices in (
        ("a\ta\na\tb\nc\tc\n", ["c", "b", "a"], ["c", "a", "a"], 0),
        ("d\td\nd\tb\na\ta\na\tb\nc\tc\nc\tc\n", ["a", "b", "c", "d"], ["a", "a", "c", "a"], 0),  # joined
        ("1\t2\n1\t3\n2\t1\n", ["1", "2", "3"], ["2", "1", "1"], 0),  # cluster 2 is not the cluster of record 2
        ("a\ta\na\tb\nc\tc\n", ["a"], ["a"], 1),
        # MMseqs2 shortens ids of UniProt
        ("P1\tP1\nP1\tQ9\nsp|O1|X\tsp|O1|X\n", ["tr|Q9|Q9_X", "sp|P1|A_B", "sp|O1|X"], ["P1", "P1", "sp|O1|X"], 0),
    ):
        for data in (text.encode(), gzip.compress(("\ufeff" + text.replace("\n", "\r\n")).encode())):
            table.write_bytes(data)
            found = read_clusters(table, ids)
            assert (found.names, found.source, len(found.notices)) == (names, str(table), n_notices)


def test_tables_that_cannot_be_used(table: Path) -> None:
    for text, token in (
        (b"a\ta\na\tb\n", "4 of 5 records are in no cluster (w, x, up|a|x, ...)"),
        (b"", "5 of 5 records are in no cluster"),
        *((f"a\ta\n{line}\n".encode(), ":2: ") for line in ("b", "a\tb\tc", "a\t", "\tb", "a b")),
        (b"a\ta\n\xff\xfe\ta\n", ":2: is not UTF-8"),
        (gzip.compress(b"a\ta\n" * 1000, mtime=0)[:-20], "cannot be read"),
    ):
        table.write_bytes(text)
        with pytest.raises(InputError) as error:
            read_clusters(table, ["w", "x", "a", "up|a|x", "z"])
        assert str(error.value).startswith(str(table))
        assert token in str(error.value)


def test_a_run_gets_the_options_and_its_clusters_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        if command[1] == "version":
            return SimpleNamespace(returncode=0, stdout="7.5-test\n")
        assert (command[1], *command[5:]) == ("easy-cluster", *OPTIONS, "-v", "1")
        if Path(command[2]).read_text() != ">0\nMKT\n>1\nAGV\n>2\nMKV\n":
            return SimpleNamespace(returncode=3, stdout="x", stderr="first line\nCannot fit databases into memory\n")
        Path(f"{command[3]}_cluster.tsv").write_text("0\t0\n0\t2\n1\t1\n")
        return SimpleNamespace(returncode=0, stdout="")

    assert OPTIONS == ("--min-seq-id", "0.3", "-c", "0.8", "--cov-mode", "0", "-s", "7.5")
    monkeypatch.setattr(clusters.subprocess, "run", run)
    found = run_mmseqs(["MKT", "AGV", "MKV"], ["sp|P1|A", "b", "c"], tmp_path)
    assert found.names == ["sp|P1|A", "b", "sp|P1|A"]
    assert found.source.startswith("MMseqs2 7.5-test, easy-cluster --min-seq-id 0.3")
    with pytest.raises(InputError, match=r"^mmseqs easy-cluster failed with code 3 \(Cannot fit databases into mem"):
        run_mmseqs(["MKT"], ["a"], tmp_path)
    assert list(tmp_path.iterdir()) == []


FIRST = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV"
SECOND = "MKTAYIAKQRQLSFVKSHFTRQLEERLGLIDVQAPILSKVGDGTQENLSGAEKAVQVRVKALPDAQYEVV"
STRANGER = "GSHMWCPLDEWRNHYFKTPGGADWMQCYHTNPEIFWKRDLNGSACVYHTQWEPMDFNRKCGISTYLHWPA"


def test_alignment_joins_relatives_over_most_of_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a fragment nor a common tag of strangers joins clusters."""
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
    found = run_mmseqs([FIRST, SECOND, STRANGER, "MKV", "X" * 30], ["sp|P12345|AATM_RABIT", *"bcde"], tmp_path)
    assert found.names[0] == found.names[1] in ("sp|P12345|AATM_RABIT", "b")
    assert found.names[2:] == ["c", "d", "e"]
