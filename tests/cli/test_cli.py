"""The whole program as a user runs it: what it leaves, what it says, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from command import esmshard, in_process
from conftest import RECIPE, write_subset
from family_runs import losses
from model_files import TINY, fair_esm, write_fair_esm

from esmshard.io.sequences import read_fasta
from esmshard.model.weights import load_model

SHARDS = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
RUN_FILES = {
    *("recipe.yaml", "versions.json", "metrics.jsonl", "status.json", "evaluation.json", "per_protein.csv"),
    *(f"checkpoints/step_00000{step}/{name}" for step in (4, 6) for name in (*SHARDS, "state.json", "MANIFEST.json")),
    *("checkpoints/LATEST", "baselines.npz", "report.html"),
    *(f"model/{name}" for name in ("model.safetensors", "config.json", "esmshard.json", "vocab.txt", "README.md")),
    *(f"model/{name}" for name in ("special_tokens_map.json", "tokenizer_config.json", "baselines.npz")),
}


def files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny recipe, after its run on two ranks."""
    directory = tmp_path_factory.mktemp("finished")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    (directory / "tiny.yaml").write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    done = esmshard("finetune", directory / "tiny.yaml", "--nproc", "2", "--report")
    assert done.returncode == 0, done.stderr
    return directory


def test_a_run_leaves_exactly_these_files(finished: Path) -> None:
    run = finished / "run"
    left = files(run)
    figures = {name for name in left if name.startswith("figures/")}
    assert left - figures == RUN_FILES
    assert 1 <= len(figures) <= 3
    assert (run / figures.pop()).read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "split" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line.get("split") == "valid"] == [3, 6]


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(finished: Path, tmp_path: Path) -> None:
    """Steps 5 and 6 again from the checkpoint of step 4, with the same bits."""
    out = shutil.copytree(finished / "run", tmp_path / "run")
    for removed in ("checkpoints/step_000006", "model"):
        shutil.rmtree(out / removed)
    (out / "checkpoints" / ".tmp-step_000006").mkdir()
    done = esmshard("finetune", finished / "tiny.yaml", f"out={out}", "--nproc", "2", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on after step 4 of 6" in done.stderr
    assert losses(out) == losses(finished / "run")
    first, second = (load_model(str(run / "model")).state_dict() for run in (finished / "run", out))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resuming_without_checkpoints_or_under_another_recipe_is_refused(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished / "run", tmp_path / "run")
    files = [out / name for name in ("status.json", "metrics.jsonl", "model/model.safetensors")]
    before = [file.read_bytes() for file in files]
    fasta, labels = (finished / f"train.{end}" for end in ("fasta", "npz"))
    data = fasta.read_bytes(), labels.read_bytes()
    for override, token in (
        ("optim.lr=1e-5", "optim.lr (1e-05, was 0.003)"),
        ("parallel.precision=bf16", "parallel.precision (bf16, was fp32)"),
        ("", "train.fasta holds other sequences or tracks"),
        ("", "holds a model but no checkpoint"),
    ):
        if token.startswith("train.fasta"):
            write_subset(finished, "train", "train", range(1, 25))
        if token.startswith("holds"):
            shutil.rmtree(out / "checkpoints")
        given = [override] if override else []
        done = in_process("finetune", finished / "tiny.yaml", f"out={out}", *given, "--resume", "auto")
        fasta.write_bytes(data[0])
        labels.write_bytes(data[1])
        assert done.returncode == 2
        assert token in done.stderr
        assert done.stderr.count("\n") == 1
        assert [file.read_bytes() for file in files] == before, "a refused command changes nothing"


@pytest.mark.slow
def test_the_code_of_every_card_runs_word_for_word(finished: Path, tmp_path: Path) -> None:
    """The blocks name MODEL, proteins.fasta, and a file beside the card, so that they run where these are."""
    run = finished / "run"
    shutil.copytree(run / "model", tmp_path / "MODEL")
    shutil.copy(finished / "valid.fasta", tmp_path / "proteins.fasta")
    done = in_process("consolidate", run, "-o", tmp_path / "esm2_tiny", "--to", "fair-esm")
    assert done.returncode == 0, done.stderr
    command = tmp_path / "bin" / "esmshard"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m esmshard "$@"\n')
    command.chmod(0o755)
    shell = ["env", f"PATH={command.parent}:{os.environ['PATH']}", "sh", "-ec"]
    for model, language, program, place in (
        (tmp_path / "MODEL", "", shell, tmp_path),
        (tmp_path / "esm2_tiny", "python", [sys.executable, "-c"], tmp_path / "esm2_tiny"),
    ):
        card = (model / "README.md").read_text()
        (code,) = re.findall(rf"## Use\n[^#]*?```{language}\n(.*?)\n```", card, re.DOTALL)
        done = subprocess.run([*program, code], cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert {"out.npz", "out.h5"} <= files(tmp_path)


def test_embed_predict_and_evaluate(finished: Path, tmp_path: Path) -> None:
    model, fasta = finished / "run" / "model", finished / "valid.fasta"
    records = list(read_fasta(fasta))

    done = in_process("embed", model, fasta, "-o", tmp_path / "x.h5")
    assert done.returncode == 0, done.stderr
    with h5py.File(tmp_path / "x.h5") as file:
        assert [file[r.id].shape for r in records] == [(len(r.sequence), 32) for r in records]
        means = np.stack([file[r.id][:].mean(0) for r in records])
    done = in_process("embed", model, fasta, "-o", tmp_path / "x.npy")
    assert done.returncode == 0, done.stderr
    assert np.allclose(np.load(tmp_path / "x.npy"), means, atol=1e-5)

    done = in_process("predict", model, fasta, "-o", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "x.npz") as maps:
        assert list(maps) == [r.id for r in records]
        for record in records:
            p = maps[record.id]
            assert (p.shape, p.dtype) == ((len(record.sequence),) * 2, np.float32)
            assert np.array_equal(p, p.T)
            assert 0 <= p.min() < p.max() <= 1

    done = in_process(
        "evaluate", model, "valid.fasta", "-o", tmp_path / "scores", "--png", tmp_path / "maps", cwd=finished
    )
    assert done.returncode == 0, done.stderr
    assert "predictions are above the diagonal, true contacts below it" in done.stderr
    assert len(list((tmp_path / "maps").glob("*.png"))) == len(records)
    again = json.loads((tmp_path / "scores" / "evaluation.json").read_text())["metrics"]
    first = json.loads((finished / "run" / "evaluation.json").read_text())["metrics"]
    assert again.keys() == first.keys()
    for name in ("base rate", "separation prior"):
        assert again[name] == first[name]
    for name in ("fine-tuned", "before fine-tuning"):  # another number of threads adds up in another order
        assert again[name]["AUPRC"]["value"] == pytest.approx(first[name]["AUPRC"]["value"], abs=1e-3)
    done = in_process("report", tmp_path / "scores", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "scores" / "report.html").read_text()
    assert "AUPRC" in page
    assert str(finished) not in page, "a page is shared, and where files lie is nobody's business"


def test_training_starts_from_the_weights_that_the_recipe_names(tiny_recipe: Path, tmp_path: Path) -> None:
    """With a learning rate of next to nothing the trunk ends as it began, tensor by tensor."""
    file = write_fair_esm(tmp_path / "esm2_tiny.pt", fair_esm(TINY))
    text = tiny_recipe.read_text().replace("name: nano", "name: esm2_tiny.pt").replace("init: random\n", "")
    tiny_recipe.write_text(text)
    expected = load_model(str(file)).state_dict()
    for out, init in (("run", "pretrained"), ("other", "random")):
        rates = ("optim.lr=1e-12", "optim.head_lr=1e-2", f"init={init}", f"out={tmp_path / out}")
        done = in_process("finetune", tiny_recipe, "train.steps=1", *rates)
        assert done.returncode == 0, done.stderr
        state = load_model(str(tmp_path / out / "model")).state_dict()
        close = [torch.allclose(state[name], expected[name], rtol=0, atol=1e-7) for name in expected]
        assert all(close) == (out == "run")
        assert state["layers.0.fc1.weight"].shape == expected["layers.0.fc1.weight"].shape
    assert len(state) > 40


# What a user gets wrong. Everything below fails before any process is started, so it runs in this one.


def shorten_labels(directory: Path) -> None:
    with np.load(directory / "train.npz") as file:
        arrays = dict(file)
    arrays["cb_dA"] = arrays["cb_dA"][1:]
    arrays["offsets"][1:] -= 1
    np.savez(directory / "train.npz", **arrays)


BAD_INPUT: list[tuple[Callable[[Path], object], list[str], int, str]] = [
    (lambda d: (d / "valid.npz").rename(d / "moved.npz"), [], 1, "valid.npz: no such file"),
    (lambda d: (d / "moved.npz").rename(d / "valid.npz"), ["--resume", "nowhere"], 2, "--resume nowhere"),
    (lambda d: None, ["model.name=esm2_t6_8M_UR50D", "init=pretrained"], 1, "esm2_t6_8M_UR50D: no such file"),
    (lambda d: (d / "run" / "x").mkdir(parents=True), [], 2, "run: exists already"),
    (lambda d: shutil.rmtree(d / "run"), ["batch.tokens_per_rank=30"], 1, "62 tokens"),
    (shorten_labels, [], 1, "residues in"),
    (
        lambda d: (d / "train.fasta").write_text(">a\nMKT\n\n>a\nMKV\n"),
        [],
        1,
        "train.fasta: id 'a' has two different sequences",
    ),
]


def test_bad_input_is_one_sentence_and_leaves_nothing(tiny_recipe: Path, tmp_path: Path) -> None:
    for spoil, arguments, expected, token in BAD_INPUT:
        spoil(tmp_path)
        before = files(tmp_path)
        done = in_process("finetune", tiny_recipe, *arguments)
        assert token in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert done.returncode == expected
        assert files(tmp_path) == before


def test_results_are_never_replaced_unasked(finished: Path, tmp_path: Path) -> None:
    model, fasta, taken = finished / "run" / "model", finished / "valid.fasta", tmp_path / "x.npz"
    taken.write_text("mine")
    for arguments in (
        ("finetune", finished / "tiny.yaml"),
        ("consolidate", finished / "run", "-o", model),
        ("embed", model, fasta, "-o", taken),
        ("predict", model, fasta, "-o", taken),
        ("evaluate", model, str(fasta), "-o", finished / "run"),
    ):
        done = in_process(*arguments)
        assert done.returncode == 2, arguments
        assert "exists already" in done.stderr
    assert taken.read_text() == "mine"


def test_help_imports_nothing_that_is_slow_to_import() -> None:
    """`benchmarks/embed.py --parts start` measures how long it takes."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "esmshard", "--help"], capture_output=True, text=True, check=True
    )
    assert "finetune" in done.stdout
    imported = [line.split("|")[-1].strip() for line in done.stderr.splitlines()]
    assert "typer" in imported
    slow = {"torch", "numpy", "scipy", "sklearn", "pydantic", "Bio", "safetensors", "transformers", "huggingface_hub"}
    assert not slow & {name.partition(".")[0] for name in imported}


def test_an_evaluation_says_what_it_leaves_out(tmp_path: Path) -> None:
    """The starter was made elsewhere from a model that its recipe names by a relative path, `mlm/model`."""
    write_subset(tmp_path, "two", "test", range(2))
    other = tmp_path / "mlm" / "model"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    done = in_process("evaluate", "starter", "two.fasta", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert "because starter comes without the model that it was fine-tuned from" in written["left_out"][0]
    assert written["left_out"][0] in done.stderr
    assert "mlm/model" not in done.stderr
    assert "starter was trained on 9381 records" in written["leakage"][0]
    assert "starter" in written["metrics"]
    assert "fine-tun" not in json.dumps([written["verdict"], [*written["metrics"]]]).lower()
