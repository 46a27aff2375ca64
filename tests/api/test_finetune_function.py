"""`esmshard.finetune` and `esmshard.Run`: the same as the command, and nothing left behind in the process."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import sklearn  # noqa: F401  # when it is imported it sets KMP_INIT_AT_FORK and another variable, for good
import torch
from command import Rank
from command import esmshard as command
from family_runs import losses
from held_runs import Hold
from ruamel.yaml import YAML

import esmshard
from esmshard.api.runs import Run, finetune, keys
from esmshard.errors import InputError, UsageError
from esmshard.parallel import launch

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


# Runs


@pytest.mark.parametrize("nproc", [None, 2])
@pytest.mark.usefixtures("forked_ranks", "unchanged")
def test_it_does_what_the_command_does(tiny_recipe: Path, tmp_path: Path, nproc: int | None) -> None:
    recipe = tiny_recipe if nproc is None else as_dictionary(tiny_recipe)
    run = finetune(recipe, nproc=nproc, report=False, out=tmp_path / "here", train=TWO_STEPS)
    assert isinstance(run, Run)
    assert (run.path, run.status, run.runs) == (tmp_path / "here", "done", {})
    steps = [line for line in run.metrics if "loss" in line and "split" not in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["split"] for line in run.metrics if "split" in line] == ["valid"]
    options = ("train.steps=2", "train.eval_every=2", f"out={tmp_path / 'there'}", "--nproc", str(nproc or 1))
    done = command("finetune", tiny_recipe, *options)
    assert done.returncode == 0, done.stderr
    assert losses(run.path) == losses(tmp_path / "there")
    there = json.loads((tmp_path / "there" / "evaluation.json").read_text())
    assert run.evaluation["metrics"] == there["metrics"]
    assert not (run.path / "report.html").exists()
    model = run.model(device="cpu")
    assert (model.task, model.config.n_layers) == ("contact", esmshard.SIZES["nano"].n_layers)
    assert model.contacts("MKTAYIAKQR").shape == (10, 10)
    assert repr(run) == f"Run({str(run.path)!r})"


@pytest.mark.usefixtures("unchanged")
def test_a_run_is_gone_on_with_or_replaced(tiny_recipe: Path) -> None:
    first = finetune(tiny_recipe, report=False, **{"train.steps": 2})
    with pytest.raises(UsageError, match="exists already"):
        finetune(tiny_recipe, report=False, train={"steps": 2})
    with pytest.raises(UsageError, match="pass one of the two"):
        finetune(tiny_recipe, resume="auto", overwrite=True)
    whole = losses(first.path)
    for starts, how in ((2, {"resume": "auto"}), (1, {"overwrite": True})):
        again = finetune(tiny_recipe, report=False, train={"steps": 2}, **how)
        assert losses(again.path) == whole
        assert sum(line.get("event") == "attempt" for line in again.metrics) == starts


@pytest.mark.usefixtures("forked_ranks", "unchanged")
def test_several_seeds_are_runs_of_one(tiny_recipe: Path, tmp_path: Path) -> None:
    run = finetune(tiny_recipe, seeds=2, report=False, train={"steps": 1, "eval_every": 1}, out=str(tmp_path / "two"))
    assert list(run.runs) == ["seed-3", "seed-4"]
    assert run.status == "done"
    assert run.evaluation["runs"] == ["seed-3", "seed-4"]
    assert losses(tmp_path / "two" / "seed-3") != losses(tmp_path / "two" / "seed-4")
    assert run.runs["seed-4"].evaluation["recipe"]["train"]["seed"] == 4
    for ask in (lambda: run.metrics, run.model):
        with pytest.raises(InputError, match=r"several runs; each of \.runs has .*seed-3, seed-4"):
            ask()
    for part in run.runs.values():
        (part.path / "status.json").unlink()
    with pytest.raises(InputError, match="no run has begun"):
        _ = run.status


@pytest.mark.usefixtures("forked_ranks")
def test_it_works_in_a_thread(tiny_recipe: Path) -> None:
    runs: list[Run] = []
    how: dict[str, Any] = {"nproc": 2, "report": False, "train": {"steps": 1}}
    thread = threading.Thread(target=lambda: runs.append(finetune(tiny_recipe, **how)))
    thread.start()
    thread.join(600)
    assert runs[0].status == "done"


# What goes wrong


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


def test_a_signal_saves_and_is_reported(tiny_recipe: Path, tmp_path: Path) -> None:
    """In a process of its own: SIGTERM would end this one where nothing listens."""
    nproc = 2
    long = {"train": {"steps": 40, "eval_every": 40}, "checkpoint": {"every": 40}}
    script = textwrap.dedent(f"""
        import esmshard, signal, sys
        from esmshard.parallel.preemption import Preempted
        try:
            esmshard.finetune({str(tiny_recipe)!r}, nproc={nproc}, report=False, **{long})
        except Preempted as stop:
            print("told:", stop, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """)
    held = Hold(tmp_path / "hold", 3)
    environment = {**os.environ, **held.environment}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    held.wait(lambda: process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    held.go_when_asked(lambda: process.poll() is not None)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "told: " in out
    assert "stopped by SIGTERM after step" in out
    assert out.rstrip().endswith("True")
    run = Run(tmp_path / "run")
    assert run.status == "preempted"
    assert len(losses(run.path)) < 40
    assert finetune(tiny_recipe, report=False, resume="auto", **long).status == "done"
    assert len(losses(run.path)) == 40


# Overrides


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


# Run


def test_metrics_are_read_while_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert Run(tmp_path).metrics == [{"step": 1}, {"step": 2}]
