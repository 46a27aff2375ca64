"""Runs that go on: from where, over what is damaged, beside another one, on a full disk."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import esmshard
from held_runs import Hold
from safetensors.torch import load_file

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError
from esmshard.recipe import recipe_file
from esmshard.train import finetune
from esmshard.train.run_dir import Lock, metrics_of


def run(recipe: Path, *overrides: str, resume: str | None = "auto") -> None:
    finetune.run(recipe_file.load(recipe, list(overrides)), resume)


def lines(out: Path) -> list[dict[str, Any]]:
    return list(metrics_of(out))


def losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(out) if "lr" in line]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe in one process, with all its checkpoints and the best one marked."""
    from conftest import RECIPE, write_subset

    directory = tmp_path_factory.mktemp("finished")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    (directory / "tiny.yaml").write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    run(directory / "tiny.yaml", *OPTIONS, resume=None)
    return directory


OPTIONS = ("checkpoint.keep=1", "checkpoint.every=4", "checkpoint.keep_best=true", "train.eval_every=1")


def test_the_best_checkpoint_stays_and_becomes_the_model(finished: Path) -> None:
    out = finished / "run"
    values = {line["step"]: line["long P@L"] for line in lines(out) if line.get("split") == "valid"}
    assert sorted(values) == [1, 2, 3, 4, 5, 6]
    best = min(step for step in values if values[step] == max(values.values()))
    pointed = manifest.pointed(out / "checkpoints", "BEST")
    assert pointed is not None
    assert manifest.step_of(pointed) == best
    assert names(out) == sorted({"BEST", "LATEST", f"step_{best:06d}", "step_000006"})
    assert sharded.read_state(pointed)["best"] == {"step": best, "metric": "long P@L", "value": values[best]}
    assert json.loads((out / "model" / "esmshard.json").read_text())["step"] == best
    card = (out / "model" / "README.md").read_text()
    assert "fine-tuned" in card.split("## Metrics")[1], "written again when the model had been scored"


def test_a_run_goes_on_from_a_checkpoint_of_ones_choice(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of step 6 is set aside, and comes out again as it was."""
    out, recipe = tmp_path / "run", finished / "tiny.yaml"
    options = ("checkpoint.keep=9", "checkpoint.every=2", "train.eval_every=1", f"out={out}")
    run(recipe, *options, resume=None)
    assert losses(out) == losses(finished / "run")
    run(recipe, *options, resume=str(out / "checkpoints" / "step_000004"))
    assert "step_000006: set aside as step_000006.abandoned" in capfd.readouterr().err
    assert names(out) == ["LATEST", "step_000002", "step_000004", "step_000006", "step_000006.abandoned"]
    assert losses(out) == losses(finished / "run")
    first, second = (
        out / "checkpoints" / n / "shard-00001-model-00001-of-00001.safetensors"
        for n in ("step_000006", "step_000006.abandoned")
    )
    again, before = load_file(first), load_file(second)  # the order in the header is another one in each file
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())

    # And a damaged one is named, set aside, and gone after the next save.
    first.write_bytes(first.read_bytes()[:-5])
    (out / "checkpoints" / ".tmp-step_000008").mkdir()
    before = losses(out)
    run(recipe, *options)
    said = capfd.readouterr().err
    assert f"{first}: truncated or altered" in said
    assert "going on after step 4 of 6" in said
    assert names(out) == ["LATEST", "step_000002", "step_000004", "step_000006", "step_000006.abandoned"]
    assert losses(out) == before
    attempts = [line for line in lines(out) if line.get("event") == "attempt"]
    assert [(line["attempt"], line["from_step"], line["steps_lost"]) for line in attempts] == [
        (1, 0, 0),
        (2, 4, 2),
        (3, 4, 2),
    ]
    assert "3 attempts, 4 steps lost" in said


def test_a_directory_that_another_run_holds_is_left_alone(finished: Path, tmp_path: Path) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "lock" not in path.name}

    out = shutil.copytree(finished / "run", tmp_path / "run")
    with Lock(out):
        before = content()
        with pytest.raises(InputError, match="which is still running"):
            run(finished / "tiny.yaml", *OPTIONS, f"out={out}")
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
    """On two processes; then to the end, with the losses of an unbroken run."""
    out = tmp_path / "run"
    arguments = ["finetune", str(finished / "tiny.yaml"), f"out={out}", "--nproc", "2", "--no-report"]
    arguments += ["--resume", "auto", *OPTIONS, "checkpoint.async_save=true"]
    command = [sys.executable, "-m", "esmshard", *arguments]
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
    # Of signals that come while Python is in one call it hears the one of the lowest number first.
    assert re.search(rf"stopped by SIG(TERM|USR1) after step {status['step']} of 6", said), said
    assert manifest.newest_good(out / "checkpoints", print) == manifest.path_of(out / "checkpoints", status["step"])
    done = esmshard(*arguments)
    assert done.returncode == 0, done.stderr
    assert [loss for _, loss in losses(out)] == pytest.approx([loss for _, loss in losses(finished / "run")], abs=1e-4)
    assert "goodput " in done.stderr
