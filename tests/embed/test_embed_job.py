"""Embedding files against fair-esm, the texts of `--dry-run`, and requests that are refused without a trace."""

import hashlib
import io
import json
import multiprocessing.util
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import embed_runs
import h5py
import numpy as np
import pytest
import torch
from command import in_process
from esm.model.esm2 import ESM2 as FairEsm
from model_files import SMALL, TINY, edit_tensors, fair_esm, tokenise, write_fair_esm, write_transformers
from safetensors import safe_open

import esmshard
from esmshard.embed import engines, parts
from esmshard.embed.engines import embed, forecast
from esmshard.embed.parts import EmbeddingStore, begin
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.model.families.family_registry import SIZES
from esmshard.vocab import RESIDUES, encode

LENGTHS = (31, 1, 120, 7, 7, 64, 2, 300, 18, 45, 9, 77)
IDS = ("zeta", "sp|P12345|NAME_HUMAN", "a/b", "alpha", "a_b", "10", "2", "x/y/z", "lower", "..", "M", "last")


class Given(NamedTuple):
    model: str
    fasta: Path
    reference: FairEsm
    sequences: dict[str, str]
    out: Path
    """An empty directory."""

    def embed(self, name: str, model: str | None = None, fasta: Path | None = None, **options: Any) -> dict[str, Any]:
        return embed_runs.embed(model or self.model, self.out / name, fasta or self.fasta, **options)

    def expected(self, layer: int = TINY.n_layers) -> Iterator[tuple[str, torch.Tensor]]:
        """[L + 2, D] of each record by fair-esm, alone."""
        for record_id, sequence in self.sequences.items():
            block, _ = tokenise([sequence])
            with torch.no_grad():
                yield record_id, self.reference(block, repr_layers=[layer])["representations"][layer][0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Given:
    directory = tmp_path_factory.mktemp("given")
    reference = fair_esm(TINY)
    model = write_fair_esm(directory / "esm2_tiny.pt", reference)
    rng = np.random.default_rng(5)
    sequences = {i: "".join(rng.choice(list(RESIDUES), n)) for i, n in zip(IDS, LENGTHS, strict=True)}
    fasta = directory / "input.fasta"
    fasta.write_text(
        "".join(f">{i} some words\n{s.lower() if i == 'lower' else s}\n" for i, s in sequences.items()), newline="\n"
    )
    return Given(str(model), fasta, reference, sequences, directory)


@pytest.fixture
def given(files: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """Scratch files go to a known place."""
    multiprocessing.util.get_temp_dir()  # Sockets of processes stay in the short path of before.
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "out").mkdir()
    return files._replace(out=tmp_path / "out")


def untouched(given: Given, *names: str) -> bool:
    """Whether `out` has only the named files, and no temporary file is left anywhere."""
    scratch = given.out.with_name("scratch")
    left = [p for p in scratch.iterdir() if not p.name.startswith("torchinductor_")]  # torch's, whenever it likes
    return sorted(p.name for p in given.out.iterdir()) == sorted(names) and not left


def test_npy_has_a_mean_per_record_in_input_order(given: Given) -> None:
    for n, (tokens, part_tokens) in enumerate(((1, 50), (80, 1), (None, None))):
        manifest = given.embed(f"{n}.npy", tokens=tokens, part_tokens=part_tokens)
        assert (manifest["records"], manifest["computed"], manifest["failed_records"]) == (len(IDS), len(IDS), 0)
        assert (given.out / f"{n}.ids.txt").read_text().splitlines() == list(IDS)
        rows = np.load(given.out / f"{n}.npy")
        assert (rows.dtype, rows.shape) == (np.float32, (len(IDS), TINY.dim))
        for row, (_, x_TD) in zip(rows, given.expected(), strict=True):
            assert np.abs(row - x_TD[1:-1].mean(0).numpy()).max() <= 1e-5
    assert rows.std(0).min() > 1e-3
    assert untouched(given, *(f"{n}{end}" for n in range(3) for end in (".npy", ".ids.txt", ".npy.json")))


def test_long_proteins_are_noted_and_unused_heads_are_not_missed(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_transformers(given.out.with_name("bare"), given.reference, TINY)
    edit_tensors(model, lambda state: [state.pop(key) for key in list(state) if "contact_head" in key])
    for name, window, count in (("usual", 0, 0), ("short", 40, sum(n > 40 for n in LENGTHS))):
        notices = given.embed(name, model=str(model), long=Long("full", window))["notices"]
        noted = [notice for notice in notices if notice.startswith(f"{count} records over 40 residues")]
        assert len(noted) == (count > 0)
        err = capsys.readouterr().err
        assert all(notice in err for notice in noted)
        assert "contact_head" not in err
    with pytest.raises(UsageError, match=r"--pool contacts: .* has no trained contact_head"):
        given.embed("x.h5", model=str(model), pools=["contacts"])


def test_biotrainer_files_have_sequences_of_the_input(given: Given) -> None:
    """Test a single run, a run after an interruption before the file was written, and rows of an earlier store."""
    fasta = given.out.with_name("twice.fasta")
    fasta.write_text("".join(f">{i}\n{s}\n" for i, s in [*given.sequences.items(), ("again", given.sequences["zeta"])]))
    given.embed("old", fasta=fasta)
    how: dict[str, Any] = {"fmt": "biotrainer-h5", "pools": ["mean"], "fasta": fasta}
    given.embed("x.h5", **how)
    assert given.embed("reused.h5", reuse=given.out / "old", **how)["computed"] == 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "write_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            given.embed("resumed.h5", **how)
    given.embed("resumed.h5", **how)
    with h5py.File(given.out / "x.h5") as file:
        assert [data.attrs["original_id"] for data in file.values()] == list(IDS)
        for key, sequence in zip(file, given.sequences.values(), strict=True):
            assert key == hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()
    for name in ("reused.h5", "resumed.h5"):
        assert (given.out / name).read_bytes() == (given.out / "x.h5").read_bytes()


def test_everything_at_once_is_what_fair_esm_says(given: Given) -> None:
    """Layers and pools in one pass, against fair-esm's forward pass of each record alone."""
    pools = ["mean", "max", "cls", "residue", "logits", "contacts"]
    given.embed("x", pools=pools, layers=[0, 1, -1], part_tokens=200)
    product = esmshard.open(given.out / "x")
    assert [one.name for one in product.outputs][:3] == ["mean_0", "mean_1", "mean_2"]
    for record_id, sequence in given.sequences.items():
        found: Any = product[record_id]
        block, _ = tokenise([sequence])
        with torch.no_grad():
            theirs = given.reference(block, repr_layers=[0, 1, 2], return_contacts=True)
        for layer, x_1TD in theirs["representations"].items():
            x_LD = x_1TD[0, 1:-1]
            wanted = {"mean": x_LD.mean(0), "max": x_LD.amax(0), "cls": x_1TD[0, 0], "residue": x_LD}
            for pool, values in wanted.items():
                assert np.abs(found[f"{pool}_{layer}"] - values.numpy()).max() <= 1e-5, (record_id, pool, layer)
        assert np.abs(found["logits"] - theirs["logits"][0, 1:-1].numpy()).max() <= 1e-5
        assert np.abs(found["contacts"] - theirs["contacts"][0].numpy()).max() <= 1e-5


def test_attention_maps_are_those_of_fair_esm(given: Given) -> None:
    """Layer n is fair-esm's map n - 1, without the rows and columns of `<cls>` and `<eos>`."""
    given.embed("every", pools=["attentions"], layers=[1, -1], part_tokens=200)
    given.embed("x.dat", fmt="h5", pools=["attentions"], layers=[1], heads=[2, 0])
    assert untouched(given, "every", "x.dat", "x.dat.json")
    product = esmshard.open(given.out / "every")
    assert product.attributes["heads"] == "0,1,2,3"
    with h5py.File(given.out / "x.dat") as file:
        expected = {"model": Path(given.model).name, "pool": "attentions", "layer": 1, "heads": "2,0", "long": "full"}
        expected |= {"dtype": "float32", "compute": "fp32", "records": len(IDS), "dim": TINY.dim}
        assert expected.items() <= dict(file.attrs).items()
        assert len(file.attrs["model_hash"]) == 64
        assert len(file) == len(IDS)
        chosen = {data.attrs["original_id"]: data[()] for data in file.values()}
    for record_id, sequence in given.sequences.items():
        block, _ = tokenise([sequence])
        with torch.no_grad():
            theirs = given.reference(block, need_head_weights=True)["attentions"][0, :, :, 1:-1, 1:-1].numpy()
        found: Any = product[record_id]
        assert list(found) == ["attentions_1", "attentions_2"]
        for layer in (1, 2):
            assert found[f"attentions_{layer}"].shape == (TINY.n_heads, len(sequence), len(sequence))
            assert np.abs(found[f"attentions_{layer}"] - theirs[layer - 1]).max() <= 1e-5
        assert np.abs(chosen[record_id] - theirs[0][[2, 0]]).max() <= 1e-5
        assert found["attentions_1"].sum(-1).max() < 1
    assert np.abs(theirs[0] - theirs[1]).max() > 1e-3, "layers that are alike would compare nothing"


def test_the_command_takes_layers_and_heads(given: Given) -> None:
    ask = ("embed", given.model, str(given.fasta), "-o", "x.safetensors", "--pool", "attentions")
    for option, wrong in (("--layers", "1;2"), ("--heads", "0,x")):
        refused = in_process(*ask, option, wrong, cwd=given.out)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: {option} {wrong}: whole numbers")
    done = in_process(*ask, "--layers", "1", "--heads", "3,1", cwd=given.out)
    line = "x.safetensors: 12 records; 12 sequences computed, 0 duplicates, 0 reused\n"
    assert (done.returncode, done.stdout) == (0, line)
    with safe_open(given.out / "x.safetensors", "np") as file:
        assert file.get_tensor("zeta").shape == (2, 31, 31)


def test_half_precision_is_near_and_recorded_and_a_model_on_disk_the_same(given: Given) -> None:
    given.embed("full", pools=["residue"])
    given.embed("offloaded", pools=["residue"], offload=True)
    full, offloaded = EmbeddingStore(given.out / "full"), EmbeddingStore(given.out / "offloaded")
    assert all(np.allclose(full[record_id], offloaded[record_id], rtol=0, atol=1e-6) for record_id in IDS)
    for name, how, close in (
        ("fp16", {"dtype": "fp16"}, 2e-3),
        ("bf16", {"dtype": "bf16"}, 2e-2),
        ("compute", {"precision": "bf16"}, 0.1),
    ):
        given.embed(name, pools=["residue"], **how)
        half = EmbeddingStore(given.out / name)
        assert half.attributes["compute"] == ("bf16" if name == "compute" else "fp32")
        for record_id in IDS:
            a, b = full[record_id], half[record_id]
            assert b.dtype == (np.float16 if name == "fp16" else np.float32)
            assert 0 < np.abs(a - b).max() <= close * np.abs(a).max()


def test_what_cannot_be_done_is_refused(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("x.tsv", {}, "no format 'tsv'"),
        ("x.npy", {"fmt": "hdf"}, "no format 'hdf'"),
        ("x.npy", {"pools": ["residue"]}, "npy can store mean, max, cls, but not residue"),
        ("x.npy", {"pools": ["median"]}, "--pool median"),
        ("x.npy", {"layers": [-4]}, "layers 0 to 2"),
        ("x.npy", {"layers": [3]}, "layers 0 to 2"),
        ("x.h5", {"pools": ["contacts"], "layers": [1]}, "leave --layers out"),
        ("x.h5", {"pools": ["attentions"], "layers": [-3]}, "--layers 0: layers 1 to 2 have attentions"),
        ("x.h5", {"pools": ["attentions"], "heads": [-1]}, "--heads -1: .* has heads 0 to 3"),
        ("x.h5", {"pools": ["contacts"], "heads": [1]}, "leave --heads out"),
        ("x.npy", {"long": Long("crop")}, "full, window or truncate"),  # type: ignore[arg-type]
        ("x.npy", {"long": Long("window", 100, 100)}, "--window 100 --overlap 100"),
        ("x.npy", {"worker": "0/2"}, "--worker is for --engine array"),
        ("x.npy", {"engine": "array", "overwrite": True}, "--overwrite"),
        ("x.npy", {"offload": True, "nproc": 2}, "leave --nproc and --engine out"),
    ]
    for name, options, token in cases:
        with pytest.raises(UsageError, match=token):
            given.embed(name, **options)
    fasta = given.out.with_name("bad.fasta")
    for text, token in (("", "holds no record"), (">a\nMKT\n>b\nMK1\n", "'b' has '1' at position 3")):
        fasta.write_text(text)
        for fmt in ("h5", "parts"):
            with pytest.raises(InputError, match=f"{fasta}:.*{token}"):
                given.embed("x", fmt=fmt, fasta=fasta)
    with pytest.raises(InputError, match="no such file"):
        given.embed("x.npy", model="nowhere.pt")
    model = str(write_fair_esm(given.out.with_name("esm1b.pt"), fair_esm(SMALL["ESM-1b"])))
    fasta.write_text(">short\nMKT\n>long\n" + "MKTAYIAKQR" * 110 + "\n")
    with pytest.raises(UsageError, match=r"'long' has 1,100 residues, .* --long window"):
        given.embed("x.npy", model=model, fasta=fasta)
    assert untouched(given)
    given.embed("x.npy", model=model, fasta=fasta, long=Long("window"))
    assert np.isfinite(np.load(given.out / "x.npy")).all()
    assert json.loads((given.out / "x.npy.json").read_text())["window"] == 1022


def test_a_record_may_fail_and_the_run_does_not(tmp_path: Path) -> None:
    """The embedding of tryptophan is beyond the range of fp16 here."""
    reference = fair_esm(TINY)
    with torch.no_grad():
        reference.embed_tokens.weight[encode("W")[1]] = 1e6
    write_transformers(tmp_path / "model", reference, TINY)
    (tmp_path / "in.fasta").write_text(">a\nMKTV\n>b\nMKW\n>c\nGGG\n>again\nMKW\n")
    asked = ("--layers", "0", "--dtype", "fp16")
    done = in_process("embed", "model", "in.fasta", "-o", "x.npy", *asked, cwd=tmp_path)
    line = "x.npy: 2 records; 3 sequences computed, 1 duplicate, 0 reused; 2 records failed, see x.npy.failed.tsv\n"
    assert (done.returncode, done.stdout) == (0, line)
    assert (tmp_path / "x.ids.txt").read_text() == "a\nc\n"
    assert np.isfinite(np.load(tmp_path / "x.npy")).all()
    reason = "mean_0 has values beyond the range of float16"
    assert (tmp_path / "x.npy.failed.tsv").read_text() == f"id\tlength\treason\nb\t3\t{reason}\nagain\t3\t{reason}\n"
    strict = in_process("embed", "model", "in.fasta", "-o", "x", *asked, "--strict", cwd=tmp_path)
    assert (strict.returncode, strict.stdout.split("see ")[1]) == (1, "x/failed.tsv\n")
    product = EmbeddingStore(tmp_path / "x")
    assert product.failed == {"b": reason, "again": reason}
    with pytest.raises(KeyError, match="'b' has no values: mean_0 has values beyond"):
        product["b"]
    again = in_process("embed", "model", "in.fasta", "-o", "x.npy", *asked, "--strict", cwd=tmp_path)
    assert "is finished already" in again.stderr
    assert (again.returncode, again.stdout) == (1, done.stdout)
    (tmp_path / "none.fasta").write_text(">b\nMKW\n>again\nMKW\n")
    for name in ("none.npy", "none"):
        failed = in_process("embed", "model", "none.fasta", "-o", name, *asked, cwd=tmp_path)
        assert failed.returncode == 1
        assert f"error: {name}: has no values" in failed.stderr
        assert "_0 has values beyond the range of float16" in failed.stderr


# --dry-run


def written(path: Path, lengths: Sequence[int], again: Sequence[int] = ()) -> Path:
    """Random sequences, and at the end some of them again."""
    rng = np.random.default_rng(5)
    sequences = ["".join(rng.choice(list("ADEG"), n)) for n in lengths]
    sequences += [sequences[n] for n in again]
    path.write_text("".join(f">record_{n}\n{text}\n" for n, text in enumerate(sequences)))
    return path


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("x.csv", {}),
        ("x.h5", {"pools": ["attentions"], "heads": [0, 5], "layers": [1, 6]}),
        ("parts", {"pools": ["residue", "mean"]}),
        ("x.npz", {"pools": ["residue"], "dtype": "fp16", "long": Long("truncate", 80, 20)}),
    ],
)
def test_a_dry_run_counts_what_the_run_writes(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    fasta = written(tmp_path / "in.fasta", [1100, 200, 31, 1023, 1, 150, 400, 90, 260], [2, 0])
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / name
    lines = dict(line.split(None, 1) for line in forecast(request("starter", out, **how), fasta).splitlines())
    assert not list(out.parent.iterdir())
    assert lines["records"] == "11 with 4,386 residues, longest 1,100"
    assert lines["sequences"] == "9 different: 9 to compute, 0 reused"
    long = how.get("long", Long("full", 1022))
    treated = {"full": "computed whole", "window": "in overlapping windows", "truncate": "cut"}[long.mode]
    assert lines["long"] == f"{3 if long.mode == 'full' else 8} records over {long.window:,} residues: {treated}"
    embed(request("starter", out, **how), fasta)
    size = out.stat().st_size if out.is_file() else sum(path.stat().st_size for path in (out / "parts").iterdir())
    number, unit = lines[how.get("fmt", name.removeprefix("x."))].removeprefix("about ").split(", ")[-1].split()
    expected = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
    assert 0.65 * expected < size < 1.03 * expected + 10_000


def test_a_dry_run_refuses_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fasta, half = written(tmp_path / "in.fasta", [300] * 8), written(tmp_path / "half.fasta", [300] * 5)
    embed(request("starter", tmp_path / "earlier"), half)
    asked = request("starter", tmp_path / "x.h5", pools=["residue"])
    with pytest.raises(UsageError, match="contains mean_6, and no residue_6"):
        forecast(asked, fasta, tmp_path / "earlier")
    lines = forecast(request("starter", tmp_path / "x"), fasta, tmp_path / "earlier")
    assert "8 different: 3 to compute, 5 reused" in lines
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(fasta.read_bytes())))
    assert forecast(request("starter", tmp_path / "x"), Path("-"), tmp_path / "earlier") == lines
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(InputError, match="are free; make room"):
        forecast(asked, fasta)
    assert not list(tmp_path.glob(".esmshard*"))


def test_parts_are_bounded_by_tokens_and_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fasta = written(tmp_path / "many.fasta", [98] * 600)
    bounds = begin(tmp_path / "tokens", fasta, request("starter", tmp_path / "x"))["bounds"]
    assert np.diff(bounds).tolist() == [164, 164, 164, 108], "of 16,384 tokens"
    monkeypatch.setattr(parts, "PART_BYTES", 98 * 192 * 4 * 30)
    bounds = begin(tmp_path / "bytes", fasta, request("starter", tmp_path / "y", pools=["residue"]))["bounds"]
    assert max(np.diff(bounds)) == 30
    for size, tokens in (("esm2_t6_8M_UR50D", 1 << 18), ("esm2_t12_35M_UR50D", 58_254), ("esm2_t36_3B_UR50D", 1 << 14)):
        assert parts._part_tokens(40_000_000, SIZES[size]) == tokens, "as long as those of the smallest model"
