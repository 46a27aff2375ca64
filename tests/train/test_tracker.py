"""TensorBoard and W&B show what metrics.jsonl says, once; and nothing that befalls them touches the run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import esmshard
from conftest import RECIPE, write_subset
from machines import descendants
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import offline

from esmshard.errors import UsageError
from esmshard.launch.preemption import Preempted
from esmshard.recipe import recipe_file
from esmshard.train import finetune, loop
from esmshard.train.records import goodput, tracking

KEY = "0123456789abcdef0123456789abcdef01234567"
BOTH = "track=[tensorboard, wandb]"
STEP = {
    *("epoch", "loss", "lr", "grad_norm", "records", "residues", "skipped", "step_s", "residues_per_s", "data_wait_s"),
    *("communication_share", "peak_memory_bytes", "allocation_retries"),
}
"""Of a step on a CPU, which knows no `mfu` and no `reserved_memory_bytes`."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAIT_DONE", "WAIT_STOPPED", "FINISH"):
        monkeypatch.setattr(tracking, name, 600.0)


def write(directory: Path, out: str = "run") -> Path:
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    path = directory / "tiny.yaml"
    path.write_text(RECIPE.format(tokens_per_rank=130, out=directory / out))
    return path


def lines(out: Path) -> list[dict[str, Any]]:
    return goodput.parse((out / "metrics.jsonl").read_text())


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
    found = {row["step"]: {k: v for k, v in row.items() if k in STEP} for row in rows}
    assert len(found) == len(rows), "a step twice"
    return found


def check_tensorboard(out: Path) -> None:
    """Every number of every step, once, in single precision."""
    wanted, found = steps(out), scalars(out)
    for name in STEP:
        assert found[name] == [(step, float(np.float32(line[name]))) for step, line in wanted.items()], name
    valid = [(line["step"], line["loss"]) for line in lines(out) if "split" in line]
    assert found["valid/loss"] == [(step, float(np.float32(value))) for step, value in valid]


def books(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "tracking.json").read_text())
    return found


def settled(out: Path) -> None:
    """Wait until the tracker of a run is gone; on a busy machine a run does not wait long enough."""
    words = [b"esmshard.train.records.tracker", str(out).encode()]

    def gone() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().split(b"\0")[2:4] == words:
                    return False
            except OSError:  # gone meanwhile
                pass
        return True

    until(gone)


def until(condition: Any) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny recipe on two ranks, with both trackers."""
    directory = tmp_path_factory.mktemp("tracked")
    recipe = write(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_API_KEY", KEY)
        done = esmshard("finetune", recipe, BOTH, "checkpoint.keep=9", "--nproc", "2")
        assert done.returncode == 0, done.stderr
        settled(directory / "run")
        yield directory


def test_tensorboard_shows_every_step(tracked: Path) -> None:
    out = tracked / "run"
    assert list(steps(out)) == [1, 2, 3, 4, 5, 6]
    check_tensorboard(out)
    found, tested = scalars(out), json.loads((out / "evaluation.json").read_text())["metrics"]["fine-tuned"]
    assert found["test/AUPRC"] == [(6, float(np.float32(tested["AUPRC"]["value"])))]
    assert [step for step, _ in found["run/checkpoint_stall_s"]] == [2, 4, 6]
    assert found["run/attempt"] == [(0, 1.0)]
    assert len(list((out / "tensorboard").glob("events.*"))) == 1, "one rank tells"


def test_wandb_has_every_step(tracked: Path) -> None:
    out = tracked / "run"
    assert shown(out) == steps(out)
    (run,) = offline(out)
    assert (run.project, run.name, run.group, run.exit_code) == ("esmshard", "run", "", 0)
    assert run.id == books(out)["wandb"]["id"]
    assert run.summary["status"] == "done"
    assert run.config["optim"]["lr"] == 3.0e-3
    assert run.config["batch"]["tokens_per_rank"] == 130
    valid = {row["step"]: row["valid/loss"] for row in run.rows if "valid/loss" in row}
    assert valid == {line["step"]: line["loss"] for line in lines(out) if "split" in line}
    for path in out.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), f"{path} holds the key"


def test_what_is_done_again_is_shown_once(tracked: Path) -> None:
    """Back to step 4. TensorBoard forgets steps 5 and 6 and has the new times of them; W&B knows them already."""
    out = tracked / "run"
    before, known = steps(out), shown(out)
    again = esmshard("finetune", tracked / "tiny.yaml", BOTH, "--resume", out / "checkpoints" / "step_000004")
    assert again.returncode == 0, again.stderr
    settled(out)
    after = steps(out)
    assert [after[n]["loss"] for n in after] == pytest.approx([before[n]["loss"] for n in before], rel=1e-5)
    assert after[5]["step_s"] != before[5]["step_s"]
    check_tensorboard(out)
    assert shown(out) == known
    assert len(offline(out)) == 2
    assert len({run.id for run in offline(out)}) == 1
    assert [(step, value) for step, value in scalars(out)["run/attempt"]] == [(0, 1.0), (4, 2.0)]


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


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of trackers, as they are started."""
    found: list[int] = []
    real = tracking.Tracking.begin

    def begin(tracks: tracking.Tracking, done: int) -> None:
        real(tracks, done)
        if tracks._process is not None:
            found.append(tracks._process.pid)

    monkeypatch.setattr(tracking.Tracking, "begin", begin)
    return found


def test_a_scheduler_that_signals_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: list[int]
) -> None:
    """The last lines of a preempted run are shown, and the next attempt goes on with the same run."""
    recipe, out = write(tmp_path, "seed-1"), tmp_path / "seed-1"

    def preempt() -> None:
        until((out / "tracking.json").exists)
        until(lambda: [page["logged"].get("step") for page in books(out).values()] == [2, 2])
        for process in [processes[0], *descendants(processes[0])]:
            os.kill(process, signal.SIGUSR1)
            os.kill(process, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        at_step(patch, 3, preempt)
        with pytest.raises(Preempted):
            run(recipe, BOTH)
    settled(out)
    assert list(steps(out)) == [1, 2, 3]
    assert shown(out) == steps(out)
    run(recipe, BOTH, resume="auto")
    settled(out)
    assert list(steps(out)) == [1, 2, 3, 4, 5, 6]
    assert shown(out) == steps(out)
    check_tensorboard(out)
    found = offline(out)
    assert len({one.id for one in found}) == 1
    assert found[-1].group == tmp_path.name, "runs over seeds belong together"
    assert (found[-2].preempting, found[-1].exit_code) == (True, 0)
    assert [one.summary.get("status") for one in found[-2:]] == ["preempted", "done"]
    assert {row["step"] for one in found for row in one.rows if "valid/loss" in row} == {3, 6}


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe whose trackers fail below, without any."""
    directory = tmp_path_factory.mktemp("untracked")
    run(write(directory), *SHORT)
    assert not any((directory / "run" / name).exists() for name in tracking.TRACKED)
    return directory


SHORT = ("train.steps=3", "checkpoint.every=9")
FAULTS = {
    "raises": ("raise OSError('no such project')", "wandb has failed (OSError: no such project)"),
    "exits": ("import os; os._exit(3)", "ended with exit code 3"),
    "hangs": ("import time; time.sleep(600)", "wandb did not finish in time"),
    "killed": ("", "was ended by SIGKILL; the run goes on without"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_a_tracker_touches_the_run(
    fault: str,
    untracked: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    processes: list[int],
) -> None:
    """A `wandb` that fails as it begins; and one whose process is killed."""
    code, words = FAULTS[fault]
    if code:
        package = tmp_path / "stands_in" / "wandb"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"def init(**_):\n    {code}\n")
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
    if fault == "hangs":
        monkeypatch.setattr(tracking, "WAIT_DONE", 0.0)
        monkeypatch.setattr(tracking, "FINISH", 2.0)

    def act() -> None:
        if fault == "killed":
            os.kill(processes[0], signal.SIGKILL)
            until(lambda: all(thread.name != "tracking" for thread in threading.enumerate()))

    at_step(monkeypatch, 2, act)
    run(untracked / "tiny.yaml", *SHORT, "track=[wandb]", f"out={tmp_path / 'run'}")
    assert digest(tmp_path / "run") == digest(untracked / "run")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("track:")]
    assert len(told) == 1
    assert words in told[0]
    settled(tmp_path / "run")


def test_without_a_key_the_records_stay_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Online, and nobody is asked for the key."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    run(write(tmp_path), *SHORT, "track=[wandb]")
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("track:")]
    assert len(told) == 1
    settled(tmp_path / "run")
    assert f"wandb sync {tmp_path}/run/wandb/offline-run-*" in told[0]
    assert shown(tmp_path / "run") == steps(tmp_path / "run")


def test_a_new_start_is_a_new_run(tmp_path: Path) -> None:
    """`--overwrite` removes what trackers left; a start that had no checkpoint yet goes on with the same run."""
    from esmshard.launch.process_group import own_device
    from esmshard.train.resume import starting_point
    from esmshard.train.run_inputs import prepare

    job = prepare(recipe_file.load(write(tmp_path)), 1, 1, own_device(0, 1))
    for name in ("tensorboard", "wandb"):
        (job.out / name).mkdir(parents=True)
    (job.out / "tracking.json").write_text('{"wandb": {"id": "abc"}}')
    assert starting_point(job, "auto", trust=False) is None
    assert (job.out / "tracking.json").exists()
    assert starting_point(job, None, trust=False) is None
    assert list(job.out.iterdir()) == []


def test_a_missing_package_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as error:
        run(write(tmp_path), "track=[wandb]")
    assert str(error.value) == "track: wandb needs wandb; pip install 'esmshard[wandb]'"
    assert not (tmp_path / "run").exists()


def test_a_directory_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="needs runs_of_mine"):
        tracking.check_installed(["runs_of_mine"])


def test_a_tracker_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="track: names a tracker twice"):
        recipe_file.load(write(tmp_path), ["track=[wandb, wandb]"])


def test_the_process_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "PMI_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    kept = {"PATH": "/bin", "WANDB_API_KEY": KEY, "HTTPS_PROXY": "http://proxy"}
    assert tracking.clean({**given, **kept}) == kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def feed(out: Path, from_step: int, enough: Any) -> None:
    """The process alone, over files that are there, until its parent is killed. Its pipe stays open."""
    command = 'exec 3<&0; "$@" <&3 & wait'  # a process in the background has no input of its own
    tracker = [sys.executable, "-m", "esmshard.train.records.tracker", str(out), str(from_step), "60", "tensorboard"]
    environment = tracking.clean(os.environ)
    with subprocess.Popen(["sh", "-c", command, "sh", *tracker], stdin=subprocess.PIPE, env=environment) as parent:
        until(enough)
        parent.kill()
        parent.wait()
        settled(out)


def test_what_a_lost_tracker_missed_is_caught_up(tmp_path: Path) -> None:
    """It was killed after step 2 of 4, with a line that a crash cut off; NaN is not shown. And so is its parent now:
    it ends by itself."""
    (tmp_path / "recipe.yaml").write_text("out: x\n")
    (tmp_path / "tracking.json").write_text('{"tensorboard": {"logged": {"step": 2}}}')
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "loss": {loss}, "time": {n}}}\n' for n, loss in enumerate((8, 4, "null", 1), 1))
        + '{"event": "attempt", "attempt": 2, "from_step": 4, "steps_lost": 0, "seconds_lost": 1.5, "time": 9}\n{"step'
    )
    known = {"step": 4, "run": 1}
    feed(tmp_path, 4, lambda: books(tmp_path)["tensorboard"]["logged"] == known)
    of_start = {"run/attempt": [(4, 2.0)], "run/steps_lost": [(4, 0.0)], "run/seconds_lost": [(4, 1.5)]}
    assert scalars(tmp_path) == {"loss": [(4, 1.0)], **of_start}
