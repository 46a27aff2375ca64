"""`esmshard.finetune` and `esmshard.Run`: the same as the command, and nothing left behind in the process."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import sklearn  # noqa: F401  # when it is imported it sets KMP_INIT_AT_FORK and another variable, for good
import torch
from command import Rank, in_process
from family_runs import losses
from ruamel.yaml import YAML

import esmshard
from esmshard.api.runs import Run, finetune, keys
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.parallel import launch
from esmshard.parallel.preemption import Preempted
from esmshard.train.run_dir import Attempt

TWO_STEPS = {"steps": 2, "eval_every": 2}
SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]

OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""The second one is of torch, once it has looked for its compiler."""


def state() -> dict[str, Any]:
    """All of this process that a run might leave otherwise."""
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in OF_OTHERS},
        "handlers": [signal.getsignal(number) for number in SIGNALS],
        "wakeup": signal.set_wakeup_fd(-1),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,  # the test's own time limit
        "directory": Path.cwd(),
        "grad": torch.is_grad_enabled(),
        "group": torch.distributed.is_initialized(),
        "log": logging.getLogger("torch.distributed").level,
        "argv": list(sys.argv),
    }


@pytest.fixture
def unchanged() -> Iterator[None]:
    before = state()
    yield
    after = state()
    assert [name for name in before if before[name] != after[name]] == []


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that need not import what runs import. How the launcher starts them, other tests see."""
    monkeypatch.setattr(launch, "Popen", Rank)


def as_dictionary(recipe: Path) -> dict[str, Any]:
    sections = YAML(typ="safe").load(recipe)
    sections["data"] |= {split: recipe.parent / sections["data"][split] for split in ("train", "valid", "test")}
    return dict(sections)


@pytest.mark.usefixtures("unchanged")
def test_it_does_what_the_command_does(tiny_recipe: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"report": False, "out": tmp_path / "here", "train": TWO_STEPS}
    run = finetune(as_dictionary(tiny_recipe), **how)
    assert isinstance(run, Run)
    assert (run.path, run.status, run.runs) == (tmp_path / "here", "done", {})
    assert [line["split"] for line in run.metrics if "split" in line] == ["valid"]
    done = in_process("finetune", tiny_recipe, "train.steps=2", "train.eval_every=2", f"out={tmp_path / 'there'}")
    assert done.returncode == 0, done.stderr
    uninterrupted = losses(tmp_path / "there")
    assert len(uninterrupted) == 2
    assert losses(run.path) == uninterrupted
    there = json.loads((tmp_path / "there" / "evaluation.json").read_text())
    assert run.evaluation["metrics"] == there["metrics"]
    assert not (run.path / "report.html").exists()
    model = run.model(device="cpu")
    assert (model.task, model.config.n_layers) == ("contact", esmshard.SIZES["nano"].n_layers)
    assert model.contacts("MKTAYIAKQR").shape == (10, 10)
    with pytest.raises(UsageError, match="exists already"):
        finetune(tiny_recipe, **how)
    for starts, option in ((2, {"resume": "auto"}), (1, {"overwrite": True})):
        assert losses(finetune(tiny_recipe, **how, **option).path) == uninterrupted
        assert sum(line.get("event") == "attempt" for line in run.metrics) == starts


@pytest.mark.usefixtures("forked_ranks", "unchanged")
def test_several_seeds_are_runs_of_one(tiny_recipe: Path, tmp_path: Path) -> None:
    run = finetune(tiny_recipe, seeds=2, report=False, train={"steps": 1, "eval_every": 1}, out=str(tmp_path / "two"))
    assert list(run.runs) == ["seed-3", "seed-4"]
    assert run.status == "done"
    assert run.evaluation["runs"] == ["seed-3", "seed-4"]
    assert losses(tmp_path / "two" / "seed-3") != losses(tmp_path / "two" / "seed-4")
    assert run.runs["seed-4"].evaluation["recipe"]["train"]["seed"] == 4
    for ask in (lambda: run.metrics, run.model):
        with pytest.raises(InputError, match=r"several runs; use \.runs\[NAME\]\.m.*seed-3, seed-4"):
            ask()
    for part in run.runs.values():
        (part.path / "status.json").unlink()
    with pytest.raises(InputError, match="no run has begun"):
        _ = run.status


@pytest.mark.usefixtures("forked_ranks", "unchanged")
def test_it_works_in_a_thread(tiny_recipe: Path) -> None:
    runs: list[Run] = []
    thread = threading.Thread(
        target=lambda: runs.append(finetune(tiny_recipe, nproc=2, report=False, train={"steps": 1}))
    )
    thread.start()
    thread.join(600)
    assert runs[0].status == "done"


@pytest.mark.usefixtures("forked_ranks", "unchanged")
def test_processes_that_fail_are_an_exception(tiny_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(esmshard.RunFailed, match=r"run: failed \(exit code 1\): .*loss or gradient was not") as caught:
        finetune(
            tiny_recipe,
            nproc=2,
            report=False,
            optim={"lr": 10.0, "head_lr": 10.0},
            train={"steps": 40, "eval_every": 40},
        )
    assert caught.value.exit_code == 1
    assert Run(tmp_path / "run").status == "failed"
    with pytest.raises(InputError, match="not evaluated yet"):
        _ = Run(tmp_path / "run").evaluation
    with pytest.raises(InputError, match="no such model"):
        Run(tmp_path / "run").model()


@pytest.mark.usefixtures("unchanged")
def test_mistakes_are_one_sentence(tiny_recipe: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optim": {"lrr": 1}}, r"optim\.lrr=1: optim\.lrr: unknown key; did you mean 'lr'"),
        ({"data": {"train": "nowhere.fasta"}}, r"nowhere\.fasta"),
        ({"optim": {"lr": {1, 2}}}, r"optim\.lr is \{1, 2\}"),
        ({"nproc": 0}, "nproc is 0"),
        ({"nproc": "2"}, "nproc is '2'"),
        ({"resume": "nowhere"}, "no such directory"),
        ({"nproc": 99}, "fewer than the 99 processes"),
    ]
    for options, token in cases:
        with pytest.raises(InputError, match=token) as caught:
            finetune(tiny_recipe, **options)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert Run(tmp_path).metrics == [{"step": 1}, {"step": 2}], "the last line is being written"


@pytest.mark.usefixtures("unchanged")
def test_a_signal_saves_and_is_reported(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"report": False, "train": {"steps": 5, "eval_every": 5}, "checkpoint": {"every": 5}}
    step_done = Attempt.step_done

    def stopped(attempt: Attempt, line: Mapping[str, Any]) -> None:
        step_done(attempt, line)
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "step_done", stopped)
        with pytest.raises(Preempted, match="stopped by SIGTERM after step 4"):
            finetune(tiny_recipe, **how)
    run = Run(tmp_path / "run")
    assert run.status == "preempted"
    assert finetune(tiny_recipe, resume="auto", **how).status == "done"
    assert len(losses(run.path)) == 5
    for code, error in ((ExitCode.REQUEUE, Preempted), (ExitCode.INTERRUPTED, KeyboardInterrupt)):
        monkeypatch.setattr(launch, "run_local", lambda *_, code=code, **__: code)
        with pytest.raises(error):
            finetune(tiny_recipe, nproc=2, resume="auto", **how)


def test_values_are_read_as_they_were_given() -> None:
    same = ("a: b", "null", "1e-4", " x ", "yes", "#x", "h\u00e9", "", "[1", "a=b", "'q'")
    pairs: list[tuple[object, object]] = [(value, value) for value in (*same, 1e-5, 3, True, None, 2.0, 10**20)]
    pairs += [(PurePosixPath("a b/c"), "a b/c"), (("a", None), ["a", None]), (np.float64(0.1), 0.1)]
    for value, kept in [*pairs, (np.int64(3), 3), (np.array([1, 2]), [1, 2])]:
        (text,) = keys({"a": {"b.c": value}})
        assert text.startswith("a.b.c=")
        read = YAML(typ="safe").load(text.removeprefix("a.b.c="))
        assert read == kept
        assert type(read) is type(kept)
