"""TensorBoard and W&B show what metrics.jsonl says, once; a tracker that fails does not touch the run."""

import hashlib
import json
import os
import signal
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from command import esmshard
from conftest import RECIPE, write_subset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from esmshard.parallel.preemption import Preempted
from esmshard.recipe import recipe_file
from esmshard.train import finetune, loop, tracking
from esmshard.train.run_dir import metrics_of

KEY = "0123456789abcdef0123456789abcdef01234567"
BOTH = "track=[tensorboard, wandb]"
STEP = {
    *("epoch", "loss", "lr", "grad_norm", "records", "residues", "skipped", "step_s", "residues_per_s", "data_wait_s"),
    *("peak_memory_bytes", "allocation_retries"),
}
"""Of a step on a CPU, which knows no `mfu` and no `reserved_memory_bytes`."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)


def write(directory: Path, out: str = "run") -> Path:
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    path = directory / "tiny.yaml"
    path.write_text(RECIPE.format(tokens_per_rank=130, out=directory / out))
    return path


def lines(out: Path) -> list[dict[str, Any]]:
    return list(metrics_of(out))


def steps(out: Path) -> dict[int, dict[str, float]]:
    """Numbers of metrics.jsonl by step."""
    found = {}
    for line in lines(out):
        if "event" not in line and "split" not in line:
            found[line["step"]] = {k: v for k, v in line.items() if k in STEP}
            assert found[line["step"]].keys() == STEP
    return found


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """By name: step and value of every event that TensorBoard shows."""
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def shown(out: Path) -> dict[int, dict[str, float]]:
    """Numbers of steps as W&B has them; each step in one row."""
    rows = [row for one in offline(out) for row in one.rows if "loss" in row]
    found = {row["_step"]: {k: v for k, v in row.items() if k in STEP} for row in rows}
    assert len(found) == len(rows), "a step twice"
    return found


def check_tensorboard(out: Path) -> None:
    """Every number of every step, once, in single precision."""
    wanted, found = steps(out), scalars(out)
    for name in STEP:
        assert found[name] == [(step, float(np.float32(line[name]))) for step, line in wanted.items()], name
    valid = [(line["step"], line["loss"]) for line in lines(out) if "split" in line]
    assert found["valid/loss"] == [(step, float(np.float32(value))) for step, value in valid]


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe on two ranks, with both trackers."""
    directory = tmp_path_factory.mktemp("tracked")
    recipe = write(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_API_KEY", KEY)
        done = esmshard("finetune", recipe, BOTH, "checkpoint.keep=9", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    return directory


def test_tensorboard_shows_every_step(tracked: Path) -> None:
    out = tracked / "run"
    assert list(steps(out)) == [1, 2, 3, 4, 5, 6]
    check_tensorboard(out)
    found, tested = scalars(out), json.loads((out / "evaluation.json").read_text())["metrics"]["fine-tuned"]
    assert found["test/AUPRC"] == [(6, float(np.float32(tested["AUPRC"]["value"])))]
    assert len(list((out / "tensorboard").glob("events.*"))) == 1, "one rank tells"


def test_wandb_has_every_step(tracked: Path) -> None:
    out = tracked / "run"
    assert shown(out) == steps(out)
    (run,) = offline(out)
    assert (run.project, run.name, run.group, run.exit_code) == ("esmshard", "run", "", 0)
    assert run.id == (out / "wandb-id").read_text()
    assert run.summary["status"] == "done"
    assert run.config["optim"]["lr"] == 3.0e-3
    assert run.config["batch"]["tokens_per_rank"] == 130
    valid = {row["_step"]: row["valid/loss"] for row in run.rows if "valid/loss" in row}
    assert valid == {line["step"]: line["loss"] for line in lines(out) if "split" in line}
    for path in out.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), f"{path} holds the key"


def test_what_is_done_again_is_shown_once(tracked: Path) -> None:
    """Back to step 4. TensorBoard hides steps 5 and 6 and has the new times of them; W&B keeps the first ones."""
    out = tracked / "run"
    before, known = steps(out), shown(out)
    run(tracked / "tiny.yaml", BOTH, resume=str(out / "checkpoints" / "step_000004"))
    assert steps(out)[5]["step_s"] != before[5]["step_s"]
    check_tensorboard(out)
    assert shown(out) == known


def at_step(patch: pytest.MonkeyPatch, number: int, act: Any) -> None:
    """Before a step, while the run goes on as it is."""
    real, calls = loop.train_step, []

    def step(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return real(*arguments, **options)

    patch.setattr(loop, "train_step", step)


def run(recipe: Path, *overrides: str, resume: str | None = None) -> None:
    finetune.run(recipe_file.load(recipe, list(overrides)), resume)


def test_a_preempted_run_goes_on_in_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = write(tmp_path, "seed-1"), tmp_path / "seed-1"
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted):
            run(recipe, BOTH)
    assert list(steps(out)) == [1, 2, 3]
    run(recipe, BOTH, resume="auto")
    assert list(steps(out)) == [1, 2, 3, 4, 5, 6]
    assert shown(out) == steps(out)
    check_tensorboard(out)
    first, second = offline(out)
    assert first.id == second.id
    assert first.group == tmp_path.name, "runs over seeds belong together"
    assert (first.exit_code, first.summary["status"]) == (75, "preempted")
    assert (second.exit_code, second.summary["status"]) == (0, "done")


def test_a_tracker_that_fails_does_not_touch_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """W&B has no key and nobody to ask; TensorBoard's writer breaks in the middle of the run."""
    recipe = write(tmp_path)
    run(recipe, "train.steps=3", f"out={tmp_path / 'untracked'}")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    wandb.teardown()  # which keeps the settings of earlier runs of this process
    at_step(monkeypatch, 2, lambda: monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", None))
    run(recipe, "train.steps=3", BOTH)
    assert digest(tmp_path / "run") == digest(tmp_path / "untracked")
    assert not any((tmp_path / "untracked" / name).exists() for name in tracking.TRACKED)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("track:")]
    assert [line.split()[1] for line in told] == ["wandb", "tensorboard"]


# What a run at W&B holds, read from its files by the format of their log: LevelDB's, with a header of its own.

BLOCK = 32768


@dataclass
class Offline:
    """Of one file `run-ID.wandb`."""

    id: str = ""
    project: str = ""
    name: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of what W&B adds, whose names begin with `_`, only the step."""
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def offline(out: Path) -> list[Offline]:
    """Every file of a run directory, in the order of their making."""
    return [read(path) for path in sorted(out.glob("wandb/offline-run-*/run-*.wandb"))]


def read(path: Path) -> Offline:
    found = Offline()
    for data in records_of(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.id, found.project = record.run.run_id, record.run.project
            found.name, found.group = record.run.display_name, record.run.run_group
            update(found.config, record.run.config.update)
        elif kind == "config":
            update(found.config, record.config.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            update(row, record.history.item)
            found.rows.append({k: v for k, v in row.items() if k == "_step" or not k.startswith("_")})
        elif kind == "summary":
            update(found.summary, record.summary.update)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def update(content: dict[str, Any], items: Any) -> None:
    for item in items:
        key = item.key or "/".join(item.nested_key)
        content[key] = json.loads(item.value_json)


def records_of(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B"
    place, found, parts = 7, [], b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # too short for a header: filled with zeros
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found
