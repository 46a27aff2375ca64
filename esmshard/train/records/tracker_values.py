"""The values of lines of metrics.jsonl and evaluation.json as named numbers for a tracker (docs/watching.md)."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from esmshard.files import parse_json, read_json


@dataclass(frozen=True)
class Point:
    """The values of one line, for a tracker."""

    kind: str
    """`step`, `valid`, `run` or `test`."""
    number: int
    """The step, or for `run` the number of earlier points of this kind. It grows, unless steps are repeated."""
    step: int
    values: Mapping[str, float]
    time: float


@dataclass
class TrackedFileReader:
    """The conversion of lines of metrics.jsonl into points."""

    step: int = 0
    """The step of the newest line."""
    state: str = "killed"
    """The final state of the run, from its last line."""
    _events: int = 0

    def point(self, line: Mapping[str, Any]) -> Point | None:
        """Convert a line of metrics.jsonl. Lines come in order. None if a line has no values to show.

        >>> TrackedFileReader().point({"step": 3, "loss": 0.5, "mfu": None, "skipped": False, "time": 9.0})
        Point(kind='step', number=3, step=3, values={'loss': 0.5, 'skipped': 0}, time=9.0)
        >>> TrackedFileReader().point({"step": 3, "split": "valid", "loss": 0.5, "time": 9.0})
        Point(kind='valid', number=3, step=3, values={'valid/loss': 0.5}, time=9.0)
        """
        event, when = line.get("event"), float(line.get("time") or time.time())
        if event is None:
            self.step, self.state = int(line["step"]), "killed"
            split = line.get("split")
            return Point(split or "step", self.step, self.step, numbers(line, f"{split}/" if split else ""), when)
        if event == "end":
            self.state = str(line["state"])
            return None
        if event == "attempt":
            self.step, self.state = int(line["from_step"]), "killed"
        values = numbers({k: v for k, v in line.items() if k in _OF_EVENTS}, "run/")
        self._events += 1
        # The first step of an attempt is written before the event of the first step.
        return Point("run", self._events, self.step, values, when)


_OF_EVENTS = ("attempt", "steps_lost", "seconds_lost", "seconds", "stall_s")


def numbers(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the numbers of a line. Unknown values are left out."""
    rename = {"seconds": "start_s", "stall_s": "checkpoint_stall_s"}
    found = {}
    for key, value in line.items():
        if key not in ("step", "time", "event") and isinstance(value, bool | int | float):
            found[prefix + rename.get(key, key)] = int(value) if isinstance(value, bool) else value
    return found


def complete(file: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines after the file's position. A line without an end is still being written, and is left for the next
    call.
    """
    while True:
        place = file.tell()
        text = file.readline()
        if not text.endswith("\n"):
            file.seek(place)
            return
        try:
            found = parse_json(text)
        except ValueError:  # a crash cut the line off
            continue
        if isinstance(found, dict):
            yield found


def on_test_split(out: Path) -> dict[str, float]:
    """Return the metrics of the fine-tuned model on the test split."""
    from esmshard.tasks.base import MAIN

    found = read_json(out / "evaluation.json")["metrics"][MAIN]
    return {f"test/{metric}": one["value"] for metric, one in found.items() if one["value"] is not None}
