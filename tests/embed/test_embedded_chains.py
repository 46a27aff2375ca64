"""Embeddings of records of several chains: those of the joined sequence, without the rows of linkers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
from command import esmshard as esmshard_command
from embed_runs import write_model

import esmshard
from esmshard.embed.compute import Computed, Embedder
from esmshard.embed.engines import embed
from esmshard.embed.parts import EmbeddingStore
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import Output
from esmshard.model import weights
from esmshard.vocab import Chains, encode

A, B, C = "MKTAYIAKQRQISFVKSHFSRQ", "GQISFVKSHFSRQLEERLGL", "MLW"
POOLS = ["residue", "mean", "max", "cls", "contacts", "logits", "attentions"]
ROWS = np.r_[0 : len(A), len(A) + 25 : len(A) + 25 + len(B)]
"""The residues of both chains in the joined sequence."""


class Written(NamedTuple):
    model: str
    directory: Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    found = tmp_path_factory.mktemp("chains")
    (found / "x.fasta").write_text(f">ab\n{A}:{B}\n>a\n{A}\n>abc\n{A}:{B}:{C}\n>again\n{A}:{B}\n")
    (found / "plain.fasta").write_text(f">ab\n{A}{'G' * 25}{B}\n>a\n{A}\n")
    return Written(str(write_model(found / "model")), found)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(written: Written, fasta: str, out: str, **how: Any) -> Path:
    asked = request(written.model, Path(out), **how)
    embed(asked, written.directory / fasta)
    return Path(out)


def cut(pool: str, plain: np.ndarray) -> np.ndarray:
    """What is left of an array of the joined sequence."""
    if pool in ("contacts", "attentions"):
        return plain[..., ROWS[:, None], ROWS]
    return plain if pool == "cls" else plain[ROWS]


def test_every_output_is_that_of_the_joined_sequence_without_the_linker(written: Written) -> None:
    with (
        h5py.File(run(written, "x.fasta", "x.h5", pools=POOLS)) as ours,
        h5py.File(run(written, "plain.fasta", "plain.h5", pools=POOLS)) as plain,
    ):
        for name, group in ours.items():
            whole, pool = plain[name], name.split("_")[0]
            np.testing.assert_allclose(group["a"][()], whole["a"][()], atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(group["ab"][()], group["again"][()])
            assert group["ab"].attrs["chain_lengths"].tolist() == [len(A), len(B)]
            assert "chain_lengths" not in group["a"].attrs
            if pool not in ("mean", "max"):
                np.testing.assert_allclose(group["ab"][()], cut(pool, whole["ab"][()]), atol=1e-6, err_msg=name)
        rows = plain["residue_2"]["ab"][()][ROWS]
        np.testing.assert_allclose(ours["mean_2"]["ab"][()], rows.mean(0), atol=1e-6)
        np.testing.assert_allclose(ours["max_2"]["ab"][()], rows.max(0), atol=1e-6)
        assert ours["residue_2"]["abc"].shape[0] == len(A + B + C)
        assert ours.attrs["join"] == "linker:25"
        assert "join" not in plain.attrs
    assert Path("x.h5.chains.tsv").read_text().splitlines() == [
        "id\tresidues\tjoin",
        f"ab\t{len(A)},{len(B)}\tlinker:25",
        f"abc\t{len(A)},{len(B)},3\tlinker:25",
        f"again\t{len(A)},{len(B)}\tlinker:25",
    ]
    assert not Path("plain.h5.chains.tsv").exists()
    notices = json.loads(Path("x.h5.json").read_text())["notices"]
    assert notices == ["chains were joined by a linker of 25 in 3 records (ab, abc, again)"]


def test_parts_know_where_chains_begin(written: Written) -> None:
    with_gap = EmbeddingStore(run(written, "x.fasta", "gap", pools=["residue"], join="linker:3,gap:512"))
    assert with_gap.chains == {
        "ab": [len(A), len(B)],
        "abc": [len(A), len(B), len(C)],
        "again": [len(A), len(B)],
    }
    assert with_gap.attributes["join"] == "linker:3,gap:512"
    assert with_gap.index.lengths.sum() == 3 * len(A + B) + len(A) + len(C)
    model = esmshard.load(written.model, join="linker:3,gap:512")
    np.testing.assert_allclose(with_gap["ab"], model.embed(f"{A}:{B}", "residue"), atol=1e-6)
    np.testing.assert_allclose(with_gap["a"], esmshard.load(written.model).embed(A, "residue"), atol=1e-6)
    usual = esmshard.load(written.model).embed([f"{A}:{B}"], "residue")[0]
    assert usual.shape == with_gap["ab"].shape
    assert np.abs(usual - with_gap["ab"]).max() > 1e-3
    with pytest.raises(UsageError, match=r"was made with another --join .linker:3,gap:512, and now linker:25"):
        embed(request(written.model, Path("gap"), pools=["residue"]), written.directory / "x.fasta")


@pytest.mark.parametrize(("window", "memory"), [(40, None), (0, 50)])
def test_windows_are_of_the_joined_sequence(
    written: Written, window: int, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asked for, and for lack of memory."""
    model = weights.load_model(written.model).eval()
    outputs = (Output("residue", 2), Output("mean", 2), Output("contacts", None))
    tokens = [encode(f"{A}:{B}"), encode(A + "G" * 25 + B)]
    if memory is not None:
        monkeypatch.setattr("esmshard.embed.compute.SMALLEST", 8)
        forward = model.forward

        def within_memory(batch: Any, *args: Any, **how: Any) -> Any:
            if batch.bounds[-1] > memory:
                raise MemoryError
            return forward(batch, *args, **how)

        monkeypatch.setattr(model, "forward", within_memory)
    long = Long("window", window, 10) if window else Long(overlap=10)
    found = dict(Embedder(model, outputs, long=long).compute(tokens))
    ours, plain = found[0], found[1]
    assert isinstance(ours, Computed)
    assert isinstance(plain, Computed)
    rows = torch.from_numpy(ROWS)
    torch.testing.assert_close(ours.values["residue_2"], plain.values["residue_2"][rows], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.values["mean_2"], plain.values["residue_2"][rows].mean(0), atol=1e-5, rtol=0)
    contacts = plain.values["contacts"][rows[:, None], rows]
    torch.testing.assert_close(ours.values["contacts"], contacts, atol=1e-5, rtol=0, equal_nan=True)


def test_what_does_not_go_together_is_refused(written: Written) -> None:
    fasta = written.directory / "x.fasta"
    done = esmshard_command("ingest", fasta, "-o", "x.store", "--join", "linker:3")
    assert done.returncode == 0, done.stderr
    done = esmshard_command("embed", written.model, "x.store", "-o", "x.npy")
    assert done.returncode == 2 - 1
    assert done.stderr.strip().endswith(
        "error: x.store: its chains were joined by a linker of 3, and a linker of 25 is asked for; make a store with "
        "`esmshard ingest FASTA -o STORE --join linker:25`, where FASTA is x.fasta, or ask for linker:3"
    )
    with pytest.raises(InputError, match="its chains were joined by a linker of 3, and a linker of 25"):
        esmshard.load(written.model).embed(Path("x.store"))
    with pytest.raises(UsageError, match=r"--join: .*model: linker:break is for models with a token of a chain break"):
        request(written.model, Path("x.npy"), join="linker:break")
    with pytest.raises(UsageError, match="--join 25: one of linker:25, gap:512, "):
        request(written.model, Path("x.npy"), join="25")
    with pytest.raises(
        UsageError, match=r"--long truncate would cut away chains of records with several \(3 records\)"
    ):
        run(written, "x.fasta", "x.npy", long=Long("truncate", 30))
    with pytest.raises(InputError, match=r"sequences\[1\] has no residues in chain 2 of 2; write one ':' between"):
        esmshard.load(written.model).embed([A, f"{A}:"])


def test_a_model_that_was_trained_with_a_gap_keeps_it(written: Written, tmp_path: Path) -> None:
    """The configuration beside the weights says how chains are joined."""
    config = json.loads((Path(written.model) / "config.json").read_text())
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(written.model).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "config.json").write_text(json.dumps(config | {"joined_chains": "linker:3,gap:512"}))
    assert request(str(copy), Path("x.npy")).spec.chains == Chains(3, 512)
    assert request(str(copy), Path("x.npy"), join="linker:4").spec.chains == Chains(4)
    expected = esmshard.load(written.model, join="linker:3,gap:512").embed(f"{A}:{B}")
    np.testing.assert_array_equal(esmshard.load(copy).embed(f"{A}:{B}"), expected)
    same = replace(request(str(copy), Path("x.npy"), join="linker:25").spec)
    assert same == request(written.model, Path("x.npy")).spec, "how chains are joined is no part of the weights"
    (copy / "config.json").write_text(json.dumps(config | {"joined_chains": "three"}))
    with pytest.raises(InputError, match="one of linker:25, gap:512, "):
        request(str(copy), Path("x.npy"))


def test_rows_are_reused_with_the_same_join_only(written: Written) -> None:
    earlier = run(written, "x.fasta", "earlier", join="gap:512")
    with pytest.raises(UsageError, match="gap:512"):
        embed(request(written.model, Path("other")), written.directory / "x.fasta", reuse=earlier)
    asked = request(written.model, Path("same"), join="gap:512")
    report = embed(asked, written.directory / "x.fasta", reuse=earlier)
    assert (report.reused, report.computed) == (3, 0)
