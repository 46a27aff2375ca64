"""The whole program as a user runs it: what it leaves, what it says, and what it refuses."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import esm
import h5py
import numpy as np
import pytest
import torch
import transformers
from command import esmshard
from conftest import write_subset
from model_files import TINY, fair_esm, write_fair_esm

from esmshard.batch import pack
from esmshard.cli import app
from esmshard.io.sequences import read_fasta
from esmshard.model.weights import load_model
from esmshard.vocab import encode

RUN_FILES = {
    *("recipe.yaml", "versions.json", "metrics.jsonl", "status.json", "evaluation.json", "per_protein.csv"),
    *(
        f"checkpoints/step_{step:06d}/{name}"
        for step in (4, 6)
        for name in (f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))
    ),
    *(f"checkpoints/step_{step:06d}/{name}" for step in (4, 6) for name in ("state.json", "MANIFEST.json")),
    "checkpoints/LATEST",
    *(f"model/{name}" for name in ("model.safetensors", "config.json", "esmshard.json", "vocab.txt")),
    *("model/README.md", "model/baselines.npz", "baselines.npz", "report.html"),
    *(f"model/{name}" for name in ("special_tokens_map.json", "tokenizer_config.json")),
}


def files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line and "split" not in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The tiny recipe on two ranks, to the end."""
    from conftest import RECIPE

    directory = tmp_path_factory.mktemp("finished")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    (directory / "tiny.yaml").write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    done = esmshard("finetune", directory / "tiny.yaml", "--nproc", "2", "--report")
    assert done.returncode == 0, done.stderr
    return directory, done


def test_a_run_leaves_exactly_these_files(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run = finished[0] / "run"
    left = files(run)
    figures = {name for name in left if name.startswith("figures/")}
    assert left - figures == RUN_FILES
    assert 1 <= len(figures) <= 3
    assert (run / figures.pop()).read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "split" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line.get("split") == "valid"] == [3, 6]
    first = next(line for line in lines if "event" not in line)
    assert {"loss", "lr", "grad_norm", "residues_per_s", "peak_memory_bytes"} <= first.keys()
    assert first["residues_per_s"] > 0


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Steps 5 and 6 again from the checkpoint of step 4: the same bits on two ranks, within 1e-4 on one."""
    directory, _ = finished
    whole = losses(directory / "run")
    for nproc, tolerance in (("2", 0.0), ("1", 1e-4)):
        out = tmp_path / f"run{nproc}"
        subprocess.run(["cp", "-r", directory / "run", out], check=True)
        subprocess.run(["rm", "-r", out / "checkpoints" / "step_000006", out / "model"], check=True)
        (out / "checkpoints" / ".tmp-step_000006").mkdir()
        done = esmshard("finetune", directory / "tiny.yaml", f"out={out}", "--nproc", nproc, "--resume", "auto")
        assert done.returncode == 0, done.stderr
        assert "going on after step 4 of 6" in done.stderr
        assert np.allclose(losses(out), whole, rtol=0, atol=tolerance)
        first, second = (load_model(str(r / "model")).state_dict() for r in (directory / "run", out))
        assert all(torch.allclose(first[k], second[k], rtol=0, atol=tolerance) for k in first)


def test_a_model_without_checkpoints_is_not_lost_to_resume_auto(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", finished[0] / "run", out], check=True)
    subprocess.run(["rm", "-r", out / "checkpoints"], check=True)
    done = esmshard("finetune", finished[0] / "tiny.yaml", f"out={out}", "--resume", "auto")
    assert done.returncode == 2
    assert "holds a model but no checkpoint" in done.stderr
    assert (out / "model" / "model.safetensors").exists()


def test_resuming_under_another_recipe_is_refused(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    directory, _ = finished
    files = [directory / "run" / name for name in ("status.json", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    done = esmshard("finetune", directory / "tiny.yaml", "optim.lr=1e-5", "--resume", "auto")
    assert [file.read_bytes() for file in files] == before, (
        "a finished run is no failed one because a command was refused"
    )
    assert done.returncode == 2
    assert "optim.lr (1e-05, was 0.003)" in done.stderr
    assert done.stderr.count("\n") == 1
    done = esmshard("finetune", directory / "tiny.yaml", "parallel.precision=bf16", "--resume", "auto")
    assert done.returncode == 2
    assert "parallel.precision (bf16, was fp32)" in done.stderr
    fasta, labels = (directory / f"train.{end}" for end in ("fasta", "npz"))
    before = fasta.read_bytes(), labels.read_bytes()
    write_subset(directory, "train", "train", range(1, 25))
    done = esmshard("finetune", directory / "tiny.yaml", "--resume", "auto")
    fasta.write_bytes(before[0])
    labels.write_bytes(before[1])
    assert done.returncode == 2
    assert "train.fasta holds other sequences or tracks than it did" in done.stderr


def test_the_model_loads_in_transformers_and_fair_esm(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory, _ = finished
    model_dir = directory / "run" / "model"
    sequence = "MKTAYIAKQRQISFVKSHFSRQ"
    ours = load_model(str(model_dir), torch.device("cpu"))
    batch = pack([encode(sequence)])
    with torch.no_grad():
        expected_TD = ours(batch).representations[2]

    theirs, info = transformers.EsmForMaskedLM.from_pretrained(model_dir, output_loading_info=True)
    # From random weights, and contacts taught it nothing of these.
    assert {key.removeprefix("esm.").split(".")[0] for key in info["missing_keys"]} == {"lm_head", "contact_head"}
    assert all(key.startswith("head.") for key in info["unexpected_keys"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer(sequence, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == batch.tokens_T.tolist()
    with torch.no_grad():
        hidden_1TD = theirs.eval()(**inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(hidden_1TD[0], expected_TD, rtol=0, atol=1e-5)

    done = esmshard("consolidate", directory / "run", "-o", tmp_path / "esm2_tiny", "--to", "fair-esm")
    assert done.returncode == 0, done.stderr
    assert {"esm2_tiny.pt", "esm2_tiny-contact-regression.pt"} <= files(tmp_path / "esm2_tiny")
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        oracle, alphabet = esm.pretrained.load_model_and_alphabet_local(tmp_path / "esm2_tiny" / "esm2_tiny.pt")
    _, _, tokens = alphabet.get_batch_converter()([("x", sequence)])
    with torch.no_grad():
        result = oracle.eval()(tokens, repr_layers=[2])
    assert torch.allclose(result["representations"][2][0], expected_TD, rtol=0, atol=1e-5)


def test_the_code_of_every_card_runs_word_for_word(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The blocks name MODEL, proteins.fasta, and a file beside the card, so that they run where these are."""
    run = finished[0] / "run"
    shutil.copytree(run / "model", tmp_path / "MODEL")
    shutil.copy(finished[0] / "valid.fasta", tmp_path / "proteins.fasta")
    done = esmshard("consolidate", run, "-o", tmp_path / "esm2_tiny", "--to", "fair-esm")
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


def test_embed_predict_and_evaluate(finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    directory, _ = finished
    model, fasta = directory / "run" / "model", directory / "valid.fasta"
    records = list(read_fasta(fasta))

    done = esmshard("embed", model, fasta, "-o", tmp_path / "x.h5")
    assert done.returncode == 0, done.stderr
    with h5py.File(tmp_path / "x.h5") as file:
        assert list(file) == [r.id for r in records]
        assert [file[r.id].shape for r in records] == [(len(r.sequence), 32) for r in records]
        means = np.stack([file[r.id][:].mean(0) for r in records])
    done = esmshard("embed", model, fasta, "-o", tmp_path / "x.npy")
    assert done.returncode == 0, done.stderr
    assert np.allclose(np.load(tmp_path / "x.npy"), means, atol=1e-5)
    assert (tmp_path / "x.ids.txt").read_text().splitlines() == [r.id for r in records]

    done = esmshard("predict", model, fasta, "-o", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "x.npz") as maps:
        assert list(maps) == [r.id for r in records]
        for record in records:
            p = maps[record.id]
            assert p.shape == (len(record.sequence),) * 2
            assert p.dtype == np.float32
            assert np.array_equal(p, p.T)
            assert 0 <= p.min() < p.max() <= 1

    done = esmshard("evaluate", model, fasta, "-o", tmp_path / "scores")
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "scores" / "evaluation.json").read_text())["metrics"]
    first = json.loads((directory / "run" / "evaluation.json").read_text())["metrics"]
    assert again.keys() == first.keys()
    for name in ("base rate", "separation prior"):
        assert again[name] == first[name]
    for name in ("fine-tuned", "before fine-tuning"):  # another number of threads adds up in another order
        assert again[name]["AUPRC"]["value"] == pytest.approx(first[name]["AUPRC"]["value"], abs=1e-3)


def test_training_starts_from_the_weights_that_the_recipe_names(tiny_recipe: Path, tmp_path: Path) -> None:
    """With a learning rate of next to nothing the trunk ends as it began, tensor by tensor, over two ranks."""
    base = fair_esm(TINY)
    file = write_fair_esm(tmp_path / "esm2_tiny.pt", base)
    text = tiny_recipe.read_text().replace("name: nano", "name: esm2_tiny.pt").replace("init: random\n", "")
    tiny_recipe.write_text(text)
    done = esmshard("finetune", tiny_recipe, "train.steps=2", "optim.lr=1e-12", "optim.head_lr=1e-2", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    state, expected = load_model(str(tmp_path / "run" / "model")).state_dict(), load_model(str(file)).state_dict()
    assert len(state) > 40
    assert all(torch.allclose(state[name], expected[name], rtol=0, atol=1e-7) for name in expected)
    again = esmshard("finetune", tiny_recipe, "train.steps=2", "init=random", f"out={tmp_path / 'other'}")
    assert again.returncode == 0, again.stderr
    other = load_model(str(tmp_path / "other" / "model")).state_dict()
    assert other["layers.0.fc1.weight"].shape == expected["layers.0.fc1.weight"].shape
    assert not torch.allclose(other["layers.0.fc1.weight"], expected["layers.0.fc1.weight"], atol=1e-3)


# What a user gets wrong. Everything below fails before any process is started, so it runs in this one.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and stderr of a command run in this process."""

    def call(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["esmshard", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            app.main()
        return int(end.value.code or 0), capsys.readouterr().err

    return call


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def shorten_labels(directory: Path) -> None:
    with np.load(directory / "train.npz") as file:
        arrays = dict(file)
    arrays["cb_dA"] = arrays["cb_dA"][1:]
    arrays["offsets"][1:] -= 1
    np.savez(directory / "train.npz", **arrays)


BAD_INPUT: dict[str, tuple[Callable[[Path], object], list[str], int, str]] = {
    "missing data file": (lambda d: (d / "train.fasta").unlink(), [], 1, "train.fasta: no such file"),
    "duplicate id": (
        lambda d: (d / "train.fasta").write_text(">a\nMKT\n\n>a\nMKV\n"),
        [],
        1,
        "train.fasta: 'a' comes twice with two sequences",
    ),
    "labels of another length": (shorten_labels, [], 1, "residues in"),
    "missing labels": (lambda d: (d / "valid.npz").unlink(), [], 1, "valid.npz: no such file"),
    "out is taken": (lambda d: (d / "run" / "x").mkdir(parents=True), [], 2, "run: exists already; pass --resume auto"),
    "no such checkpoint": (lambda d: None, ["--resume", "nowhere"], 2, "--resume nowhere: no such directory"),
    "weights that are not here": (
        lambda d: replace(d / "tiny.yaml", "init: random", "init: pretrained"),
        ["model.name=esm2_t6_8M_UR50D"],
        1,
        "esm2_t6_8M_UR50D: no such file or directory, in no cache",
    ),
    "a batch smaller than a record": (lambda d: None, ["batch.tokens_per_rank=30"], 1, "62 tokens"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    case: str, tiny_recipe: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    spoil, arguments, expected, sentence = BAD_INPUT[case]
    spoil(tmp_path)
    before = files(tmp_path)
    code, err = run("finetune", tiny_recipe, *arguments)
    assert sentence in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert code == expected
    assert files(tmp_path) == before


def test_a_truncated_checkpoint_is_one_sentence(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    copy = tmp_path / "step_000006"
    subprocess.run(["cp", "-r", finished[0] / "run" / "checkpoints" / "step_000006", copy], check=True)
    shard = copy / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    code, err = run("consolidate", copy, "-o", tmp_path / "model")
    assert code == 1
    assert "shard-00002-model-00001-of-00001.safetensors: truncated or altered (1000 bytes instead of" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_results_are_never_replaced_unasked(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    directory, _ = finished
    model, fasta = directory / "run" / "model", directory / "valid.fasta"
    for name in ("x.npy", "x.npz"):
        (tmp_path / name).write_text("mine")
    for arguments in (
        ("finetune", directory / "tiny.yaml"),
        ("consolidate", directory / "run", "-o", model),
        ("embed", model, fasta, "-o", tmp_path / "x.npy"),
        ("predict", model, fasta, "-o", tmp_path / "x.npz"),
        ("evaluate", model, str(fasta), "-o", directory / "run"),
    ):
        code, err = run(*arguments)
        assert code == 2, arguments
        assert "exists already" in err
    assert (tmp_path / "x.npy").read_text() == "mine"


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


def test_what_has_no_model_says_how_to_make_one(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    given = ""
    run = tmp_path / "a run"
    subprocess.run(["cp", "-r", finished[0] / "run", run], check=True)
    subprocess.run(["rm", "-r", run / "model"], check=True)
    done = esmshard("predict", run / given, finished[0] / "valid.fasta", "-o", tmp_path / "x.npz")
    assert done.returncode == 1
    said = re.search(r"make a model of it with `esmshard (.*)`, and give (.*)\n", done.stderr)
    assert said, done.stderr
    made = esmshard(*shlex.split(said[1]))
    assert made.returncode == 0, made.stderr
    done = esmshard("predict", said[2], finished[0] / "valid.fasta", "-o", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr


def test_an_evaluation_has_pictures_and_a_report(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    fasta, model = finished[0] / "valid.fasta", finished[0] / "run" / "model"
    done = esmshard(
        "evaluate", model, "valid.fasta", "-o", tmp_path / "out", "--png", tmp_path / "maps", cwd=fasta.parent
    )
    assert done.returncode == 0, done.stderr
    assert "predictions are above the diagonal, true contacts below it" in done.stderr
    assert len(list((tmp_path / "maps").glob("*.png"))) == len(list(read_fasta(fasta)))
    done = esmshard("report", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert "AUPRC" in page
    assert str(finished[0]) not in page, "a page is shared, and where files lie is nobody's business"


def test_an_evaluation_says_what_it_leaves_out(tmp_path: Path) -> None:
    """The starter was made elsewhere from a model that its recipe names by a relative path, `mlm/model`."""
    write_subset(tmp_path, "two", "test", range(2))
    other = tmp_path / "mlm" / "model"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    done = esmshard("evaluate", "starter", "two.fasta", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    left_out = (
        "baselines left out of the table: unsupervised head and before fine-tuning, because starter comes without the "
        "model that it was fine-tuned from"
    )
    assert left_out in done.stderr
    assert "mlm/model" not in done.stderr
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["left_out"] == [left_out]
    assert "starter was trained on 9381 records" in written["leakage"][0]
    assert "starter" in written["metrics"]
    assert "fine-tun" not in json.dumps([written["verdict"], [*written["metrics"]]]).lower()
