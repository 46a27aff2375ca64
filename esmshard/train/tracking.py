"""The experiment trackers of a run: TensorBoard and Weights & Biases, through accelerate (docs/watching.md)."""

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from esmshard.errors import ExitCode, UsageError
from esmshard.io.paths import read_json, replace_text
from esmshard.parallel.launch import environment
from esmshard.progress import say

WANDB_ID = "wandb-id"
"""The file with the run's id at Weights & Biases. A resumed run keeps this id."""
TRACKED = ("tensorboard", "wandb", WANDB_ID)
"""The files and directories that trackers leave in a run directory."""


def check_installed(trackers: Sequence[str]) -> None:
    """Raise `UsageError` if accelerate or the package of a tracker is not installed."""
    for name in trackers:
        # A mere directory with the name of a package has a spec, too, but this spec has no origin.
        missing = [package for package in ("accelerate", name) if getattr(find_spec(package), "origin", None) is None]
        if missing:
            extra = "track" if name == "tensorboard" else name
            raise UsageError(f"track: {name} needs {' and '.join(missing)}; pip install 'esmshard[{extra}]'")


class Tracking:
    """The experiment trackers of a run. If a tracker fails, the run prints a message and continues without it.

    `names` are the trackers in the recipe: `tensorboard`, `wandb`, or both.
    """

    def __init__(self, out: Path, names: Sequence[str]) -> None:
        self._out, self._names = out, names
        self._trackers: dict[str, Any] = {}

    def begin(self, done: int, lost: int = 0) -> None:
        """Open the trackers after `done` steps. The `lost` steps that follow were done before, and are repeated.

        TensorBoard shows the new values of repeated steps. Weights & Biases cannot replace values, and keeps the first.
        """
        self._repeated = range(done + 1, done + lost + 1)
        for name in self._names:
            with self._failing(name):
                self._trackers[name] = _opened(name, self._out, done)

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers in a line of metrics.jsonl to the trackers. Events are ignored."""
        if "event" in line:
            return
        prefix, step = f"{line['split']}/" if "split" in line else "", int(line["step"])
        shown = {key: value for key, value in line.items() if key not in ("step", "time")}
        numbers = {prefix + key: value for key, value in shown.items() if isinstance(value, bool | int | float)}
        for name, tracker in list(self._trackers.items()):
            if name != "wandb" or step not in self._repeated:
                with self._failing(name):
                    tracker.log(numbers, step=step)

    def end(self, state: str, step: int) -> None:
        """Close the trackers. If the run is done, first send them the test metrics as values after `step` steps."""
        if self._trackers and state == "done" and (self._out / "evaluation.json").is_file():
            from esmshard.tasks.base import MAIN

            metrics = read_json(self._out / "evaluation.json")["metrics"][MAIN]
            self.log({"split": "test", "step": step, **{name: cell["value"] for name, cell in metrics.items()}})
        for name, tracker in list(self._trackers.items()):
            with self._failing(name):
                if name == "wandb":  # accelerate's method passes no exit code
                    tracker.tracker.summary["status"] = state
                    tracker.tracker.finish(exit_code={"done": 0, "preempted": ExitCode.REQUEUE}.get(state, 1))
                else:
                    tracker.finish()

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker or its service may raise any exception
            self._trackers.pop(name, None)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"track: {name} has failed ({reason}); the run continues without it")


def _opened(name: str, out: Path, done: int) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker, WandBTracker
    from ruamel.yaml import YAML

    # accelerate must see a single process, because only this rank reports.
    sizes = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    with environment({"LOCAL_RANK": "-1", **dict.fromkeys(sizes, "1")}):
        PartialState(cpu=True)
    if name == "tensorboard":
        tracker = TensorBoardTracker(name, logging_dir=str(out), purge_step=done + 1)
        tracker.start()
        return tracker
    several = re.fullmatch(r"seed-\d+(-fold-\d+)?|curve-[\d.]+", out.name)  # `out` is one of several runs
    path = out / WANDB_ID
    if not path.is_file():  # a W&B sweep gives one id, which several runs cannot share
        replace_text(path, (not several and os.environ.get("WANDB_RUN_ID")) or uuid.uuid4().hex[:12])
    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT") or "esmshard",
        id=path.read_text(encoding="utf-8"),
        resume="allow",
        dir=str(out),
        name=os.environ.get("WANDB_NAME") or out.name,
        group=os.environ.get("WANDB_RUN_GROUP") or (out.parent.name if several else None),
    )
    tracker.start()
    tracker.store_init_configuration(YAML(typ="safe").load((out / "recipe.yaml").read_text(encoding="utf-8")))
    return tracker
