"""The files of a sweep, read for a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esmshard.errors import InputError
from esmshard.report.read.run_directory import json_object
from esmshard.train.cross_validation import SUMMARY
from esmshard.train.run_dir import SWEEP


@dataclass(frozen=True)
class SweepFiles:
    """A sweep, which may be unfinished."""

    path: Path
    raw: Mapping[str, Any]
    """The content of sweep.json."""
    keys: list[str]
    """The settings that were searched."""
    trials: list[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    """The content of summary.json: the tests of the best settings; None until they are done."""

    @property
    def complete(self) -> list[Mapping[str, Any]]:
        """The trials that were trained to their end, in their order."""
        return [one for one in self.trials if one["state"] == "complete"]

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best trial; None until one was trained to its end."""
        return next((one for one in self.trials if one["number"] == self.raw["best"]), None)


def is_sweep(run: Path) -> bool:
    """Whether a directory holds a sweep."""
    return (run / SWEEP).is_file()


def read_sweep(out: Path) -> SweepFiles:
    """Read the directory of a sweep.

    Raises:
        InputError: if a file is damaged.
    """
    raw = json_object(out / SWEEP)
    assert raw is not None
    if not isinstance(raw.get("trials"), list) or not isinstance(raw.get("sweep"), dict):
        raise InputError(f"{out / SWEEP}: damaged; remove it, and go on with --resume auto")
    summary = json_object(out / SUMMARY) if raw["state"] == "done" else None
    return SweepFiles(out, raw, list(raw["sweep"]["space"]), raw["trials"], summary)
