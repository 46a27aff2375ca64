"""Runs that go on: from a chosen or damaged checkpoint, beside another run, on a full disk, after a signal."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command import esmshard
from conftest import RECIPE, write_subset
from held_runs import Hold
from safetensors.torch import load_file

from esmshard.api import runs
from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError, UsageError
from esmshard.recipe import recipe_file
from esmshard.train import finetune
from esmshard.train.cross_validation import is_done
from esmshard.train.optim import schedule
from esmshard.train.run_dir import Lock, metrics_of

OPTIONS = ("checkpoint.keep_best=true", "train.eval_every=1")


def run(recipe: Path, *overrides: str, resume: str | None = "auto") -> None:
    finetune.run(recipe_file.load(recipe, [*OPTIONS, *overrides]), resume)


def losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics_of(out) if "lr" in line]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe and its run in one process, with all checkpoints."""
    directory = tmp_path_factory.mktemp("finished")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    (directory / "tiny.yaml").write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    run(directory / "tiny.yaml", "checkpoint.keep=9", "checkpoint.every=2", resume=None)
    return directory


def test_the_best_checkpoint_becomes_the_model(finished: Path) -> None:
    out = finished / "run"
    values = {line["step"]: line["long P@L"] for line in metrics_of(out) if line.get("split") == "valid"}
    assert sorted(values) == [1, 2, 3, 4, 5, 6]
    best = min(step for step in values if values[step] == max(values.values()))
    pointed = manifest.pointed(out / "checkpoints", "BEST")
    assert pointed is not None
    assert manifest.step_of(pointed) == best
    assert sharded.read_state(pointed)["best"] == {"step": best, "metric": "long P@L", "value": values[best]}
    assert json.loads((out / "model" / "esmshard.json").read_text())["step"] == best


def test_a_run_goes_on_from_a_chosen_or_a_damaged_checkpoint(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Later checkpoints are set aside, and the repeated steps give the same tensors and losses."""
    out, recipe = shutil.copytree(finished / "run", tmp_path / "run"), finished / "tiny.yaml"
    before = names(out)
    steps = sorted(int(name[5:]) for name in before if name.startswith("step"))
    options = ("checkpoint.keep=9", "checkpoint.every=2", f"out={out}")
    run(recipe, *options, resume=str(out / "checkpoints" / "step_000004"))
    assert "step_000006: set aside as step_000006.abandoned" in capfd.readouterr().err
    after = sorted([*before, *(f"step_{step:06d}.abandoned" for step in steps if step > 4)])
    assert names(out) == after
    assert losses(out) == losses(finished / "run")
    first, second = (
        out / "checkpoints" / n / "shard-00001-model-00001-of-00001.safetensors"
        for n in ("step_000006", "step_000006.abandoned")
    )
    repeated, earlier = load_file(first), load_file(second)  # the order in the headers differs
    assert repeated.keys() == earlier.keys()
    assert all(torch.equal(repeated[name], tensor) for name, tensor in earlier.items())

    first.write_bytes(first.read_bytes()[:-5])
    (out / "checkpoints" / ".tmp-step_000008").mkdir()
    run(recipe, *options)
    err, start = capfd.readouterr().err, steps[-2]
    assert f"{first}: truncated or altered" in err
    assert f"going on after step {start} of 6" in err
    assert names(out) == after, "the damaged checkpoint and the leftover are gone"
    assert losses(out) == losses(finished / "run")
    attempts = [line for line in metrics_of(out) if line.get("event") == "attempt"]
    starts = [(line["attempt"], line["from_step"], line["steps_lost"]) for line in attempts]
    assert starts == [(1, 0, 0), (2, 4, 2), (3, start, 6 - start)]
    assert f"3 attempts, {8 - start} steps lost" in err


def test_a_directory_that_another_run_holds_is_left_alone(finished: Path, tmp_path: Path) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "lock" not in path.name}

    out = shutil.copytree(finished / "run", tmp_path / "run")
    with Lock(out):
        before = content()
        with pytest.raises(InputError, match="which is still running"):
            run(finished / "tiny.yaml", f"out={out}")
        assert before == content()


def test_a_disk_without_room_for_a_checkpoint_is_told_before_training(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"a checkpoint takes 0\.\d\d MB, and 0\.01 MB are free"):
        run(finished / "tiny.yaml", f"out={tmp_path / 'run'}", resume=None)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "make room" in status["message"]
    assert not list((tmp_path / "run").glob("lock*"))


def test_sigterm_to_the_command_saves_and_leaves_with_75(finished: Path, tmp_path: Path) -> None:
    """Two processes continue the run, with the losses of an unbroken run, and prune checkpoints."""
    out = tmp_path / "run"
    arguments = ["finetune", str(finished / "tiny.yaml"), f"out={out}", "--no-report"]
    arguments += ["--resume", "auto", *OPTIONS, "checkpoint.async_save=true"]
    arguments += ["checkpoint.keep=1", "checkpoint.every=4"]
    command = [sys.executable, "-m", "esmshard", *arguments, "--nproc", "1"]
    held = Hold(tmp_path / "hold", 1)
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **held.environment})
    held.wait(lambda: started.poll() is not None)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        started.send_signal(number)
        time.sleep(0.05)
    held.go_when_asked(lambda: started.poll() is not None)
    said = started.communicate(timeout=600)[1]
    assert started.returncode == 75, said
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert re.search(rf"stopped by SIG(TERM|USR1) after step {status['step']} of 6", said), said
    assert manifest.newest_good(out / "checkpoints", print) == manifest.path_of(out / "checkpoints", status["step"])
    done = esmshard(*arguments, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert [loss for _, loss in losses(out)] == pytest.approx([loss for _, loss in losses(finished / "run")], abs=1e-4)
    assert "goodput " in done.stderr
    best = manifest.pointed(out / "checkpoints", "BEST")
    assert best is not None
    assert names(out) == sorted({"BEST", "LATEST", best.name, "step_000006"})


def test_a_finished_run_is_extended(tiny_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.finetune(tiny_recipe, report=False, train={"steps": 2, "eval_every": 2})
    first = json.loads((run.path / "model" / "esmshard.json").read_text())
    start = {"after": 0, "steps": 2, "device": "cpu"}
    assert first["history"] == [start]
    capsys.readouterr()
    runs.finetune(tiny_recipe, report=False, resume="auto", train={"steps": 5, "eval_every": 2})
    said = capsys.readouterr()
    optim = recipe_file.load(tiny_recipe).optim
    assert "train.steps was 2 and is 5" in said.out + said.err
    lines = [line for line in run.metrics if "loss" in line and "split" not in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    expected = [schedule(s, 2 if s < 2 else 5, optim.warmup, optim.schedule) * optim.lr for s in range(5)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    about = json.loads((run.path / "model" / "esmshard.json").read_text())
    change = [start, {"after": 2, "steps": 5, "device": "cpu"}]
    assert (about["step"], about["history"]) == (5, change)
    assert about["weights_sha256"] != first["weights_sha256"]
    assert json.loads((run.path / "versions.json").read_text())["history"] == change
    assert "5 of 5; planned as 2 until step 2" in (run.path / "model" / "README.md").read_text()
    assert (run.status, is_done(run.path, 5), is_done(run.path, 6)) == ("done", True, False)
    with pytest.raises(UsageError, match=r"train.steps \(4, was 5\); go on with the old values"):
        runs.finetune(tiny_recipe, report=False, resume="auto", train={"steps": 4, "eval_every": 2})
