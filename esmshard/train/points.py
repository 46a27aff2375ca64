"""What lines of metrics.jsonl and evaluation.json say to a tracker: named numbers and a step (docs/watching.md)."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from esmshard.files import parse_json, read_json


@dataclass(frozen=True)
class Point:
    """What a line says, for a tracker."""

    kind: str
    """`step`, `valid`, `run` or `test`."""
    number: int
    """The step; of `run` how many of its kind came before. It grows, unless something is done again."""
    step: int
    values: Mapping[str, float]
    time: float


@dataclass
class Reader:
    """Makes points of lines."""

    step: int = 0
    """Of the newest line."""
    state: str = "killed"
    """How the run ended, by its last line."""
    _events: int = 0

    def point(self, line: Mapping[str, Any]) -> Point | None:
        """Of a line of metrics.jsonl, in order. None if it has nothing to show.

        >>> Reader().point({"step": 3, "loss": 0.5, "mfu": None, "skipped": False, "time": 9.0})
        Point(kind='step', number=3, step=3, values={'loss': 0.5, 'skipped': 0}, time=9.0)
        >>> Reader().point({"step": 3, "split": "valid", "loss": 0.5, "time": 9.0})
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
        # Of a start, the first step is written before the event that tells of it.
        return Point("run", self._events, self.step, values, when)


_OF_EVENTS = ("attempt", "steps_lost", "seconds_lost", "seconds", "stall_s")


def numbers(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """What of a line is a number; what is not known is left out."""
    rename = {"seconds": "start_s", "stall_s": "checkpoint_stall_s"}
    found = {}
    for key, value in line.items():
        if key not in ("step", "time", "event") and isinstance(value, bool | int | float):
            found[prefix + rename.get(key, key)] = int(value) if isinstance(value, bool) else value
    return found


def complete(file: IO[str]) -> Iterator[dict[str, Any]]:
    """Lines from where the file was read to. One without an end is being written, and is left for the next call."""
    while True:
        place = file.tell()
        text = file.readline()
        if not text.endswith("\n"):
            file.seek(place)
            return
        try:
            found = parse_json(text)
        except ValueError:  # cut off by a crash
            continue
        if isinstance(found, dict):
            yield found


def on_test_split(out: Path) -> dict[str, float]:
    """Metrics of the fine-tuned model on the test split."""
    from esmshard.train.verdict import MAIN

    found = read_json(out / "evaluation.json")["metrics"][MAIN]
    return {f"test/{metric}": one["value"] for metric, one in found.items() if one["value"] is not None}
