"""Embedding files against fair-esm, record by record, and what is refused without leaving anything behind."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from model_files import TINY, fair_esm, tokenise, write_fair_esm, write_transformers

from esmshard.errors import InputError, UsageError
from esmshard.infer.embed import embed
from esmshard.infer.writers import DEFAULT_POOL, WRITERS
from esmshard.vocab import RESIDUES

LENGTHS = (31, 1, 120, 7, 7, 64, 2, 300, 18, 45, 9, 77)
IDS = ("zeta", "sp|P12345|NAME_HUMAN", "a/b", "alpha", "a_b", "10", "2", "x/y/z", "lower", "..", "M", "last")


class Given(NamedTuple):
    model: str
    fasta: Path
    reference: FairEsm
    sequences: dict[str, str]
    out: Path
    """An empty directory."""

    def expected(self, layer: int = TINY.n_layers) -> Iterator[tuple[str, torch.Tensor]]:
        """[L, D] of each record by fair-esm, alone, `<cls>` and `<eos>` cut off."""
        for record_id, sequence in self.sequences.items():
            block, _ = tokenise([sequence])
            with torch.no_grad():
                yield record_id, self.reference(block, repr_layers=[layer])["representations"][layer][0, 1:-1]


@pytest.fixture(scope="module", params=["fair-esm", "transformers"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Given:
    directory = tmp_path_factory.mktemp("given")
    reference = fair_esm(TINY)
    if request.param == "fair-esm":
        model = write_fair_esm(directory / "esm2_tiny.pt", reference)
    else:
        model = write_transformers(directory / "model", reference, TINY)
    rng = np.random.default_rng(5)
    sequences = {i: "".join(rng.choice(list(RESIDUES), n)) for i, n in zip(IDS, LENGTHS, strict=True)}
    fasta = directory / "input.fasta"
    fasta.write_text(
        "".join(f">{i} some words\n{s.lower() if i == 'lower' else s}\n" for i, s in sequences.items()), newline="\n"
    )
    return Given(str(model), fasta, reference, sequences, directory)


@pytest.fixture
def given(files: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """Small windows and batches, so that records are sorted, batched and put back; scratch files in a known place."""
    monkeypatch.setattr("esmshard.infer.embed.WINDOW", 5)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "out").mkdir()
    return files._replace(out=tmp_path / "out")


def untouched(given: Given, *names: str) -> bool:
    """Only the named files are there, and nothing temporary, there or where temporary files go."""
    scratch = given.out.with_name("scratch")
    left = [p for p in scratch.iterdir() if not p.name.startswith("torchinductor_")]  # torch's, whenever it likes
    return sorted(p.name for p in given.out.iterdir()) == sorted(names) and not left


@pytest.mark.parametrize("tokens", [1, 80, 4096])
def test_npy_has_a_mean_per_record_in_input_order(given: Given, tokens: int) -> None:
    assert embed(given.model, given.fasta, given.out / "x.npy", tokens=tokens) == len(IDS)
    assert (given.out / "x.ids.txt").read_text().splitlines() == list(IDS)
    rows = np.load(given.out / "x.npy")
    assert (rows.dtype, rows.shape) == (np.float32, (len(IDS), TINY.dim))
    for row, (_, x_LD) in zip(rows, given.expected(), strict=True):
        assert np.abs(row - x_LD.mean(0).numpy()).max() <= 1e-5
    assert rows.std(0).min() > 1e-3
    assert untouched(given, "x.npy", "x.ids.txt")


@pytest.mark.parametrize("pool", ["residue", "mean"])
def test_h5_has_a_data_set_per_record_in_input_order(given: Given, pool: str) -> None:
    embed(given.model, given.fasta, given.out / "x.h5", pool=pool)
    with h5py.File(given.out / "x.h5") as file:
        keys = ["a_b_2" if i == "a_b" else "id_9" if i == ".." else i.replace("/", "_") for i in IDS]
        assert list(file) == keys
        assert [data.attrs["original_id"] for data in file.values()] == list(IDS)
        assert file.attrs["layer"] == TINY.n_layers
        assert (file.attrs["model"], file.attrs["pool"]) == (given.model, pool)
        assert (file.attrs["records"], file.attrs["dim"]) == (len(IDS), TINY.dim)
        for data, (_, x_LD) in zip(file.values(), given.expected(), strict=True):
            expected = (x_LD.mean(0) if pool == "mean" else x_LD).numpy()
            assert (data.dtype, data.shape) == (np.float32, expected.shape)
            assert np.abs(data[()] - expected).max() <= 1e-5
    assert untouched(given, "x.h5")


def test_h5_holds_residues_unless_told_otherwise(given: Given) -> None:
    embed(given.model, given.fasta, given.out / "x.h5")
    with h5py.File(given.out / "x.h5") as file:
        assert tuple(data.shape[0] for data in file.values()) == LENGTHS


@pytest.mark.parametrize("layer", range(TINY.n_layers + 1))
def test_any_layer_can_be_asked_for(given: Given, layer: int) -> None:
    embed(given.model, given.fasta, given.out / "x.npy", layer=layer)
    for row, (_, x_LD) in zip(np.load(given.out / "x.npy"), given.expected(layer), strict=True):
        assert np.abs(row - x_LD.mean(0).numpy()).max() <= 1e-5


@pytest.mark.parametrize("layer", [-1, TINY.n_layers + 1])
def test_a_layer_that_is_not_there_is_refused(given: Given, layer: int) -> None:
    with pytest.raises(UsageError, match="layers 0 to 2"):
        embed(given.model, given.fasta, given.out / "x.npy", layer=layer)
    assert untouched(given)


def test_the_format_may_be_named(given: Given) -> None:
    embed(given.model, given.fasta, given.out / "x.dat", fmt="h5", pool="mean")
    with h5py.File(given.out / "x.dat") as file:
        assert len(file) == len(IDS)


def test_an_existing_file_is_replaced_only_when_told(given: Given) -> None:
    out = given.out / "x.npy"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        embed(given.model, given.fasta, out)
    assert out.read_text() == "mine"
    assert untouched(given, "x.npy")
    embed(given.model, given.fasta, out, overwrite=True)
    assert np.load(out).shape == (len(IDS), TINY.dim)
    with pytest.raises(InputError, match="is a directory"):
        embed(given.model, given.fasta, given.out, fmt="npy", overwrite=True)


def test_an_existing_list_of_ids_is_not_lost(given: Given) -> None:
    (given.out / "x.ids.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        embed(given.model, given.fasta, given.out / "x.npy")
    assert (given.out / "x.ids.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("x.csv", {}, "no format 'csv'"),
        ("x", {}, "no format ''"),
        ("x.npy", {"fmt": "parquet"}, "no format 'parquet'"),
        ("x.npy", {"pool": "residue"}, "cannot hold every residue"),
    ],
)
def test_what_no_writer_can_do_is_refused(given: Given, name: str, options: dict, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        embed(given.model, given.fasta, given.out / name, **options)
    assert untouched(given)


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "holds no record"), (">a\nMKT\n>b\nMK1\n", "'b' has '1' at position 3"), (">a\nMKT\n>b\n", "no residues")],
)
def test_a_bad_fasta_leaves_nothing_behind(given: Given, ending: str, text: str, reason: str) -> None:
    assert WRITERS.keys() == DEFAULT_POOL.keys()
    fasta = given.out.with_name("bad.fasta")
    fasta.write_text(text)
    with pytest.raises(InputError, match=reason) as caught:
        embed(given.model, fasta, given.out / f"x.{ending}")
    assert str(caught.value).startswith(str(fasta))
    assert untouched(given)


def test_a_model_that_is_not_there_leaves_nothing_behind(given: Given) -> None:
    with pytest.raises(InputError, match="no such file"):
        embed("nowhere.pt", given.fasta, given.out / "x.npy")
    assert untouched(given)


@pytest.mark.parametrize("ending", WRITERS)
def test_an_interrupted_writer_leaves_what_was_there(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"x.{ending}"
    out.write_text("mine")
    writer = WRITERS[ending](out, 2, 3, {})

    def work() -> None:
        with writer:
            writer.add("a", np.ones(3, dtype=np.float32))
            assert len(list(tmp_path.iterdir())) == 2, "the work is in a file of its own"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
    assert out.read_text() == "mine"
