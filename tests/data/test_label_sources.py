"""Where a recipe's labels are, and the `.npz` files that may hold them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import InMemory

from esmshard.data.labels.label_sources import label_source, read_npz
from esmshard.data.labels.protein_labels import protein_labels
from esmshard.data.labels.residue_labels import residue_labels
from esmshard.errors import InputError, UsageError
from esmshard.io.tables import Table
from esmshard.recipe.sections import DataSettings

STORE = InMemory("a MKT", "b AC")


def settings(**given: Any) -> DataSettings:
    return DataSettings(train="t", valid="v", test="e", **given)


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """With an `.npz` beside it, in another order, and of one chain more."""
    arrays = {
        "names": ["x", "b", "a"],
        "seqs": ["W", "AC", "MKT"],
        "dssp8": ["C", "EB", "HHT"],
        "rate": [0, np.nan, 2.5],
    }
    np.savez(tmp_path / "train.npz", **arrays, offsets=[0, 1, 3, 6], cb_dA=np.zeros((6, 3), np.uint16))
    return tmp_path / "train.fasta.gz"


def test_arrays_beside_a_fasta_file_are_labels_of_residues_or_proteins(fasta: Path) -> None:
    residues = residue_labels(STORE, fasta, "class", label_source(fasta, settings(target=["dssp8"])), column="dssp8")
    assert residues.names == "BEHT"
    assert [residues[n]["target"].tolist() for n in (0, 1)] == [[2, 2, 3], [1, 0]]
    assert residues.notices == []
    source = label_source(fasta, settings(target=["rate"]))
    proteins = protein_labels(STORE, fasta, "number", source, columns=["rate"], required=False)
    assert proteins.labelled_N.tolist() == [True, False]
    assert proteins[0]["target"].tolist() == [2.5]
    assert len(proteins.notices) == 1  # of b; nothing of x


def test_headers_are_read_where_no_file_has_the_labels(fasta: Path, tmp_path: Path) -> None:
    assert label_source(fasta, settings()) is None
    assert label_source(fasta, settings(target=["TARGET"])) is None
    assert label_source(tmp_path / "other.fasta", settings(target=["dssp8"])) is None


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
    tmp_path = fasta.parent
    np.savez(tmp_path / "x.npz", names=["a", "b"], dssp8=["HHT", "E"])
    with pytest.raises(InputError, match=r"x.npz:2: record 'b' has labels for 1 residues, but 2"):
        residue_labels(STORE, Path("x.fasta"), "class", read_npz(tmp_path / "x.npz"), column="dssp8")


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
        with pytest.raises(UsageError, match=f"data.id_column: .*{what} is no table; remove it"):
            label_source(fasta, settings(id_column="key", **given))
    assert label_source(fasta, settings(id_column="seqs", target=["dssp8"])) is not None
