"""Fine-tuning from Python, and the results of a run: `esmshard.finetune` and `esmshard.Run`."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from esmshard.api import start_run
from esmshard.errors import ExitCode, InputError, RunFailed, UsageError
from esmshard.io.paths import read_json
from esmshard.parallel.preemption import Preempted

if TYPE_CHECKING:
    import torch

    from esmshard.api.model import Model


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
        """The state `failed`, `running`, `preempted` or `done`; of several runs the first of these that one is in."""
        from esmshard.train.run_dir import joint_state, standings

        return joint_state(standings(self.path))

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
        return dict(read_json(path)) if path.is_file() else None


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
    Afterwards, environment variables and signal handlers are as before.

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
        sweep: a file with settings to search (docs/sweep.md). The result is then the run of the best settings.
        trials: the number of trials of a sweep; 20 by default, or the whole grid.
        report: draw figures and report.html at the end, if matplotlib is installed.
        **overrides: settings of the recipe, such as `train={"steps": 10}` or `**{"optim.lr": 1e-4}`. Relative paths are
            relative to the working directory.

    Raises:
        InputError: for a mistake in recipe, data or options, in one sentence.
        RunFailed: if processes that were started have failed.
        Preempted: after SIGTERM or SIGUSR1. The work is saved, and `resume="auto"` continues. This is not an
            `Exception`.
    """
    for name, number, least in (("nproc", nproc, 1), ("seeds", seeds, 1), ("folds", folds, 3), ("trials", trials, 1)):
        if number is not None and not (isinstance(number, int | np.integer) and number >= least):
            raise UsageError(f"{name} is {number!r}; a number from {least} on is expected")
    given = keys(overrides)
    if isinstance(recipe, Mapping):
        given = [*keys(recipe), *given]
    with _file_of(recipe) as file:
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


def keys(overrides: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Convert overrides to the form of the command line: nested mappings become dotted keys, values become JSON, which
    YAML reads as the same value.

    >>> keys({"adapt": {"method": "lora", "lora": {"rank": 4}}, "adapt.freeze": ["embedding"], "data.labels": None})
    ['adapt.method="lora"', 'adapt.lora.rank=4', 'adapt.freeze=["embedding"]', 'data.labels=null']

    Raises:
        UsageError: for a value that a recipe cannot hold.
    """
    found = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            found += keys(value, f"{prefix}{key}.")
            continue
        try:
            found.append(f"{prefix}{key}={json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)}")
        except (TypeError, ValueError):
            raise UsageError(f"{prefix}{key}: {value!r} is nothing that a recipe can hold") from None
    return found


def _plain(value: Any) -> Any:
    """Convert values that JSON lacks: paths, and numbers and arrays of numpy."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else os.fspath(value)


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
