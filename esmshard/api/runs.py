"""Fine-tuning from Python, and the results of a run: `esmshard.finetune` and `esmshard.Run`."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from ruamel.yaml.error import YAMLError

from esmshard.api import start_run
from esmshard.errors import ExitCode, InputError, RunFailed, UsageError
from esmshard.io.paths import read_json
from esmshard.parallel.preemption import Preempted
from esmshard.recipe.yaml_keys import parse_yaml

if TYPE_CHECKING:
    import torch

    from esmshard.api.model import Model

_one_at_a_time = threading.Lock()


class Run:
    """The directory of a run, or of several runs of one call. Files are read when they are requested.

    Args:
        path: the `out` of the recipe.

    Raises:
        InputError: if it is no such directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError(f"{self.path}: no such directory; give that of a run, which is `out` of its recipe")

    @property
    def runs(self) -> dict[str, "Run"]:
        """The runs of a cross-validation, or of several seeds, by name; empty for one run, and until all are done."""
        summary = self._json("summary.json")
        return {} if summary is None else {name: Run(self.path / name) for name in summary["runs"]}

    @property
    def status(self) -> str:
        """The state `running`, `preempted`, `done` or `failed`; for several runs `done` when all are done."""
        from esmshard.train.run_dir import STATUS, read_status

        if parts := self.runs:
            states = {part.status for part in parts.values()}
            return next(state for state in ("failed", "preempted", "running", "done") if state in states)
        found = read_status(self.path)
        if found is None:
            raise InputError(f"{self.path}: no run has begun there (it has no {STATUS})")
        return found["state"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`: optimizer steps (`loss`, `lr`, ...), validations (`split`), events (`event`)."""
        if parts := self.runs:
            raise InputError(f"{self.path}: several runs; each of .runs has its own metrics ({', '.join(parts)})")
        from esmshard.train.run_dir import METRICS, metrics_of

        if not (self.path / METRICS).is_file():
            raise InputError(f"{self.path / METRICS}: no such file; the run has not begun")
        return list(metrics_of(self.path))

    @property
    def evaluation(self) -> dict[str, Any]:
        """The content of `evaluation.json`: test metrics with intervals, and baselines; for several runs
        `summary.json`.
        """
        found = self._json("summary.json") or self._json("evaluation.json")
        if found is None:
            raise InputError(f"{self.path}: not evaluated yet; finetune does it at the end")
        return found

    def model(self, **options: Any) -> "Model":
        """Open the fine-tuned model as `esmshard.load` does, with the same options.

        Raises:
            InputError: if there is no model yet, or there are several, one in each of `runs`.
        """
        from esmshard.api.model import load

        if parts := self.runs:
            raise InputError(f"{self.path}: several runs; each of .runs has a model ({', '.join(parts)})")
        path = self.path / "model"
        if not path.is_dir():
            raise InputError(f"{path}: there is no model; finetune makes it at the end, or esmshard consolidate")
        return load(str(path), **options)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            found: dict[str, Any] = read_json(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise InputError(f"{path}: damaged ({error}); write it again with finetune, resume='auto'") from None
        return found


def finetune(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    *,
    nproc: int | None = None,
    device: "str | torch.device | None" = None,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    seeds: int | None = None,
    folds: int | None = None,
    sweep: str | os.PathLike[str] | None = None,
    trials: int | None = None,
    report: bool = True,
    **overrides: Any,
) -> Run:
    """Fine-tune a model by a recipe: train, consolidate, evaluate. This is what `esmshard finetune` does.

    A single run in one process is trained in this process. Several processes, seeds or folds are separate processes.
    Afterwards, environment variables, signal handlers, random states and torch's number of threads are as before.

    >>> keys({"train": {"steps": 10}, "optim.lr": 1e-4, "out": "runs/x"})
    ['train.steps=10', 'optim.lr=0.0001', 'out=runs/x']

    Args:
        recipe: a file, the name of a shipped recipe (`esmshard recipes ls`), or a dictionary with the sections of a
            recipe. Relative paths in a dictionary are relative to the working directory.
        nproc: the number of processes; by default one for each GPU, or one.
        device: the device of each process: `cpu`, `cuda` (a GPU each), `cuda:N` or `mps`; by default its own GPU, else
            the CPU.
        resume: `auto` continues from the newest checkpoint of `out` if there is one; a path continues from that run or
            checkpoint.
        overwrite: replace the files of an earlier run in `out`.
        seeds: the number of runs with different seeds; 1 by default, and 3 for the best settings of a sweep.
        folds: the number of folds of a cross-validation; 5 by default for a table of variants.
        sweep: a file with settings to search (docs/sweep.md).
        trials: the number of trials of a sweep; 20 by default, or the whole grid.
        report: draw figures and report.html at the end, if matplotlib and jinja2 are installed.
        **overrides: settings of the recipe, such as `train={"steps": 10}` or `**{"optim.lr": 1e-4}`. Relative paths are
            relative to the working directory.

    Raises:
        InputError: for a mistake in recipe, data or options, in one sentence.
        RunFailed: if processes that were started have failed.
        Preempted: after SIGTERM or SIGUSR1. The work is saved, and `resume="auto"` continues. This is not an
            `Exception`.
    """
    least = {"nproc": (nproc, 1), "seeds": (seeds, 1), "folds": (folds, 3), "trials": (trials, 1)}
    for name, (value, minimum) in least.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise UsageError(f"{name} is {value!r}; a number from {minimum} on is expected")
    given = keys(overrides)
    if isinstance(recipe, Mapping):
        given = [*keys(recipe), *given]
    with _one_run(), _undisturbed(), _file_of(recipe) as file:
        try:
            options = start_run.RunOptions(
                nproc=nproc,
                device=None if device is None else str(device),
                resume=None if resume is None else os.fspath(resume),
                overwrite=overwrite,
                seeds=seeds,
                folds=folds,
                sweep=None if sweep is None else os.fspath(sweep),
                trials=trials,
                report=report,
                started=time.time(),
            )
            out = start_run.finetune(file, given, options)
        except RunFailed as failed:
            if failed.exit_code == ExitCode.REQUEUE:
                raise Preempted(str(failed)) from None
            if failed.exit_code == ExitCode.INTERRUPTED:
                raise KeyboardInterrupt(str(failed)) from None
            raise
    return Run(out)


def keys(overrides: Mapping[str, Any]) -> list[str]:
    """Convert overrides to the form of the command line: nested mappings become dotted keys, values become YAML.

    >>> keys({"adapt": {"method": "lora", "lora": {"rank": 4}}, "adapt.freeze": ["embedding"], "data.labels": None})
    ['adapt.method=lora', 'adapt.lora.rank=4', 'adapt.freeze=["embedding"]', 'data.labels=null']

    Raises:
        UsageError: for a value that a recipe cannot hold.
    """
    return [f"{key}={_written(key, value)}" for key, value in _leaves(overrides)]


def _leaves(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _written(key: str, value: Any) -> str:
    """Format a value as YAML that reads as the same value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        raise UsageError(f"{key}: {value!r} is nothing that a recipe can hold") from None
    if not isinstance(value, str | os.PathLike):
        return text
    path = os.fspath(value)
    try:
        return path if path == path.strip() and parse_yaml(path) == path else text
    except (YAMLError, ValueError):
        return text


def _plain(value: Any) -> Any:
    """Convert values that JSON lacks: paths, and numbers and arrays of numpy."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


@contextmanager
def _file_of(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a recipe. A dictionary gets an empty file, over which all of its keys are overrides.

    Other processes of the run read the same file and get the same overrides.
    """
    if not isinstance(recipe, Mapping):
        yield os.fspath(recipe)
        return
    with TemporaryDirectory() as directory:
        file = Path(directory) / "recipe.yaml"
        file.write_text("{}\n", encoding="utf-8")
        yield str(file)


@contextmanager
def _one_run() -> Iterator[None]:
    """Refuse a second run at the same time, since two runs of one process would share random states and environment."""
    if not _one_at_a_time.acquire(blocking=False):
        raise UsageError("this process is fine-tuning already; start a process of its own for another run")
    try:
        yield
    finally:
        _one_at_a_time.release()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random states, torch's threads and the current GPU after the block."""
    import torch

    threads, of_python, of_numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()  # noqa: NPY002
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking for its state would take memory there, if it was not
    device = torch.cuda.current_device() if on_gpu else -1
    devices: Sequence[int] = range(torch.cuda.device_count()) if on_gpu else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_num_threads(threads)
        if on_gpu:
            torch.cuda.set_device(device)
