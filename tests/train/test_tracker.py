"""TensorBoard and W&B show each number of metrics.jsonl once. A tracker that fails does not change the run."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from command import esmshard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esmshard.parallel.preemption import Preempted
from esmshard.recipe import recipe_file
from esmshard.train import finetune, loop, tracking
from esmshard.train.run_dir import is_step, metrics_of

KEY = "0123456789abcdef0123456789abcdef01234567"
BOTH = "track=[tensorboard, wandb]"
STEP = {
    *("epoch", "loss", "lr", "grad_norm", "records", "residues", "skipped", "step_s", "residues_per_s", "data_wait_s"),
    *("peak_memory_bytes", "allocation_retries"),
}
"""The numbers of a step on a CPU, which has no `mfu` and no `reserved_memory_bytes`."""


class WandbRun:
    """The part of a run at W&B that accelerate and esmshard use."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.rows, self.exit_code = options, list[tuple[int, dict[str, Any]]](), -1
        self.summary, self.config = dict[str, Any](), dict[str, Any]()

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))

    def update(self, values: dict[str, Any], **_: Any) -> None:
        self.config |= values

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def at_wandb(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """The runs at W&B, one for each attempt."""
    runs: list[WandbRun] = []

    def init(**options: Any) -> WandbRun:
        runs.append(WandbRun(options))
        monkeypatch.setattr(wandb, "config", runs[-1])
        return runs[-1]

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(wandb, "init", init)
    return runs


def steps(out: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: {k: line[k] for k in STEP} for line in metrics_of(out) if is_step(line)}


def check_tensorboard(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Each number of each step is shown once, in single precision. Return steps and values by name."""
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for name in STEP:
        assert found[name] == [(step, float(np.float32(line[name]))) for step, line in steps(out).items()], name
    valid = [(line["step"], line["loss"]) for line in metrics_of(out) if "split" in line]
    assert found["valid/loss"] == [(step, float(np.float32(value))) for step, value in valid]
    return found


def at_step(patch: pytest.MonkeyPatch, number: int, act: Any) -> None:
    """Call `act` before step `number`."""
    real, calls = loop.train_step, itertools.count(1)

    def step(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            act()
        return real(*arguments, **options)

    patch.setattr(loop, "train_step", step)


def run(recipe: Path, *overrides: str, resume: str | None = None) -> None:
    finetune.run(recipe_file.load(recipe, list(overrides)), resume)


def test_trackers_of_two_ranks_show_every_step(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}.items():
        monkeypatch.setenv(name, value)
    done = esmshard("finetune", tiny_recipe, BOTH, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "track:" not in done.stderr
    out = tiny_recipe.with_name("run")
    assert list(steps(out)) == [1, 2, 3, 4, 5, 6]
    tested = json.loads((out / "evaluation.json").read_text())["metrics"]["fine-tuned"]
    assert check_tensorboard(out)["test/AUPRC"] == [(6, float(np.float32(tested["AUPRC"]["value"])))]
    assert len(list((out / "tensorboard").glob("events.*"))) == 1, "one rank reports"
    (record,) = out.glob("wandb/offline-run-*/run-*.wandb")
    assert record.stem == f"run-{(out / 'wandb-id').read_text()}"
    for path in out.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), f"{path} holds the key"


def test_runs_that_go_on_show_each_step_once(
    tiny_recipe: Path, at_wandb: list[WandbRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tiny_recipe.with_name("seed-1")
    options = (BOTH, f"out={out}", "checkpoint.keep=9")
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted):
            run(tiny_recipe, *options)
    assert list(steps(out)) == [1, 2, 3]
    run(tiny_recipe, *options, resume="auto")
    check_tensorboard(out)
    rows = [(step, row) for attempt in at_wandb for step, row in attempt.rows if "loss" in row]
    assert [step for step, _ in rows] == list(steps(out)) == [1, 2, 3, 4, 5, 6]
    assert {step: {k: v for k, v in row.items() if k in STEP} for step, row in rows} == steps(out)
    # Back to step 4. TensorBoard replaces steps 5 and 6, and W&B keeps the earlier ones.
    before = steps(out)
    run(tiny_recipe, *options, resume=str(out / "checkpoints" / "step_000004"))
    assert steps(out)[5]["step_s"] != before[5]["step_s"]
    check_tensorboard(out)
    first, second, third = at_wandb
    assert third.rows == []
    assert len({attempt.options["id"] for attempt in at_wandb}) == 1
    expected = {"resume": "allow", "project": "esmshard", "name": "seed-1", "group": out.parent.name}
    assert first.options.items() >= expected.items()
    assert first.config["optim"]["lr"] == 3.0e-3
    assert (first.exit_code, first.summary["status"]) == (75, "preempted")
    assert (second.exit_code, second.summary["status"]) == (0, "done")
    assert any("valid/loss" in row for _, row in second.rows)
    assert any("test/AUPRC" in row for _, row in second.rows)


def test_a_tracker_that_fails_does_not_touch_the_run(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """W&B refuses to begin; TensorBoard's writer breaks in the middle of the run."""
    out, other = tiny_recipe.with_name("run"), tiny_recipe.with_name("untracked")
    run(tiny_recipe, "train.steps=2", f"out={other}")
    monkeypatch.setattr(wandb, "init", None)
    at_step(monkeypatch, 2, lambda: monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", None))
    run(tiny_recipe, "train.steps=2", BOTH)
    assert len({(o / "model" / "model.safetensors").read_bytes() for o in (out, other)}) == 1
    assert not any((other / name).exists() for name in tracking.TRACKED)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("track:")]
    assert [line.split()[1] for line in told] == ["wandb", "tensorboard"]
