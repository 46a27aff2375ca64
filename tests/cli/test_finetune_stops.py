"""The options of `finetune` for stopping and starting again, and what reaches the launcher."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from esmshard.cli import app, train
from esmshard.errors import UsageError
from esmshard.parallel import launch, preemption
from esmshard.train import finetune as training
from esmshard.train.run_dir import Attempt

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launcher or the training was called with; neither runs."""
    calls: list[Any] = []

    def run_local(arguments: list[str], nproc: int, **options: Any) -> int:
        calls.append((arguments, nproc, options))
        return 0

    def run(recipe: object, resume: str | None, overwrite: bool, *rest: Any, **options: Any) -> None:
        calls.append((resume, overwrite))

    monkeypatch.setattr(launch, "run_local", run_local)
    monkeypatch.setattr(training, "run", run)
    elastic = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    for name in (*LAUNCHED, *elastic, "ESMSHARD_JOB_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(preemption.STOP_AT, "")  # so that it is put back
    return calls


def test_the_time_limit_counts_from_the_command(
    called: list[Any], tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_local(arguments: list[str], nproc: int, **options: Any) -> int:
        called.append((arguments, os.environ[preemption.STOP_AT]))
        return 0

    monkeypatch.setattr(launch, "run_local", run_local)
    before = time.time()
    train.finetune(str(tiny_recipe), nproc=2, stop_after="1h30m")
    ((arguments, stop_at),) = called
    assert float(stop_at) <= time.time() + 5400
    assert float(stop_at) > before + 4800, "the time counts from the start of the command"
    assert "--stop-after" not in arguments, "the processes would count anew"
    assert os.environ[preemption.STOP_AT] == "", "it is the command's, and not of what comes after it"


def test_what_was_begun_in_place_of_another_run_is_not_removed(
    called: list[Any], tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**LAUNCHED, "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, value)
    out = tiny_recipe.parent / "run"
    out.mkdir()
    attempt = Attempt(out, 1.0)
    attempt.open(True, 6)
    attempt.report("running", "")
    (out / "lock.json").unlink()
    train.finetune(str(tiny_recipe), overwrite=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    train.finetune(str(tiny_recipe), overwrite=True)
    train.finetune(str(tiny_recipe), resume="auto")
    assert called == [("auto", False), (None, True), ("auto", False)]


def test_mistakes(called: list[Any], tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--stop-after soon"):
        train.finetune(str(tiny_recipe), stop_after="soon")
    with pytest.raises(UsageError, match="pass one of the two"):
        train.finetune(str(tiny_recipe), resume="auto", overwrite=True)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--max-restarts"):
        train.finetune(str(tiny_recipe), max_restarts=1)
    assert called == []


def test_a_crash_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_recipe: Path
) -> None:
    def broken(*given: Any, **options: Any) -> None:
        raise KeyError("trunk")

    monkeypatch.setattr(training, "run", broken)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["esmshard", "finetune", str(tiny_recipe), "--nproc", "1"])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 70
    assert capsys.readouterr().err.endswith("KeyError: 'trunk'\n")
