"""The goodput of a run: the share of its time, over all attempts, that went into steps that count.

The figures come from these lines of metrics.jsonl, and from its lines of steps and validations:

    {"event": "attempt", "attempt": 2, "started": T, "time": T, "from_step": 100, "steps_lost": 7, "seconds_lost": 3.5}
    {"event": "first_step", "seconds": 41.2, "time": T}
    {"event": "end", "state": "preempted", "time": T}

Each line of a step has `time`, too. T is in seconds since 1970. The terms are:

- Useful time is the seconds of optimizer steps (`step_s`, waiting for data included) whose result was kept. Start,
validation, checkpoints, consolidation and repeated steps are not useful time.
- Allocated time runs from the start of each attempt's command to the attempt's end line. A killed attempt has no end
line and ends at its last line, so at most one step and the work after this step are not counted. Time between attempts
(in a queue, or until somebody restarted the run) is not allocated.
- Lost steps were taken after the checkpoint from which the next attempt continued.
- A restart lasts from the start of the command to the end of its first step.

Goodput is useful time divided by allocated time, as the "productive time" of Google's ML Goodput Measurement. The
number of processes does not matter: an hour of the run is one hour.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from esmshard.files import parse_json
from esmshard.progress import duration

Line = Mapping[str, Any]


class Summary(TypedDict):
    """The totals over all attempts of a run."""

    attempts: int
    steps_lost: int
    lost_s: float
    useful_s: float
    allocated_s: float
    goodput: float | None
    """The share of the allocated time that was useful; None if no time was allocated."""
    restart_s: list[float]
    """The duration in seconds of each restart that reached the end of a step."""


def parse(text: str) -> list[dict[str, Any]]:
    r"""Parse the lines of metrics.jsonl. A line that a crash cut off is left out.

    >>> parse('{"step": 1}\n{"step": 2, "lo')
    [{'step': 1}]
    """
    lines = []
    for line in text.splitlines():
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            lines.append(found)
    return lines


def cut(lines: Iterable[Line], done: int, validated: bool = True) -> tuple[list[Line], int, float]:
    """Return the lines that stay when a run continues after `done` steps, and the lost steps and their seconds.

    The lines of later steps will be written again. Events stay. An attempt that was killed gets an end line, because
    its last line may be removed here. Unless `validated` is true, the line of the validation after step `done` is
    removed, too.

    >>> cut([{"step": 1, "step_s": 2.0, "time": 12.0}, {"step": 2, "step_s": 2.5, "time": 15.0}], 1)[1:]
    (1, 2.5)
    """
    kept: list[Line] = []
    lost, seconds = 0, 0.0
    last: float | None = None  # time of the newest line of an attempt without an end line
    for line in lines:
        event = line.get("event")
        if event == "attempt" and last is not None:
            kept.append(_killed(last))
        last = None if event == "end" else line.get("time", last)
        step = line.get("step", 0)
        if event is not None or step < done or (step == done and (validated or _is_step(line))):
            kept.append(line)
        elif _is_step(line):
            lost += 1
            seconds += line.get("step_s") or 0.0
    if last is not None:
        kept.append(_killed(last))
    return kept, lost, seconds


def _killed(time: float) -> dict[str, Any]:
    return {"event": "end", "state": "killed", "time": time}


def _is_step(line: Line) -> bool:
    """Whether a line describes an optimizer step. The line of a validation names its step, too."""
    return "event" not in line and "split" not in line and "step" in line


def attempt_line(
    kept: Sequence[Line], *, started: float, now: float, from_step: int, steps_lost: int, seconds_lost: float
) -> dict[str, Any]:
    """Return the line with which an attempt begins, after the results of `cut`. The command began at `started`."""
    attempt = 1 + sum(line.get("event") == "attempt" for line in kept)
    line = {"event": "attempt", "attempt": attempt, "started": started, "time": now, "from_step": from_step}
    return line | {"steps_lost": steps_lost, "seconds_lost": seconds_lost}


def summary(lines: Iterable[Line]) -> Summary:
    """Sum up how the time of a run was used, from all its lines. The last attempt may still be running."""
    attempts = lost = 0
    useful = lost_s = allocated = 0.0
    restarts: list[float] = []
    begin = end = 0.0
    for line in lines:
        event = line.get("event")
        if event == "attempt":
            allocated += end - begin
            begin = end = line["started"]
            attempts += 1
            lost += line["steps_lost"]
            lost_s += line["seconds_lost"]
        elif event == "first_step":
            restarts.append(line["seconds"])
        elif _is_step(line) and attempts:
            useful += line.get("step_s") or 0.0
        if attempts:
            end = max(end, line.get("time", end))
    allocated += end - begin
    return {
        "attempts": attempts,
        "steps_lost": lost,
        "lost_s": lost_s,
        "useful_s": useful,
        "allocated_s": allocated,
        "goodput": useful / allocated if allocated > 0 else None,
        "restart_s": restarts,
    }


def share(found: Summary) -> str:
    """Format the goodput, in the same words everywhere."""
    return "unknown" if found["goodput"] is None else f"{found['goodput']:.0%}"


def sentence(found: Summary) -> str:
    """Describe a summary in one line, for the end of a run.

    >>> sentence(summary([
    ...     {"event": "attempt", "attempt": 1, "started": 0.0, "time": 5.0, "steps_lost": 0,
    ...      "seconds_lost": 0.0},
    ...     {"event": "first_step", "seconds": 10.0, "time": 10.0},
    ...     {"step": 1, "step_s": 75.0, "time": 80.0},
    ...     {"event": "end", "state": "done", "time": 100.0},
    ... ]))
    'goodput 75%: 1m15s of 1m40s in steps that count; 1 attempt, 0 steps lost, first step after 10s'
    """
    attempts, lost = found["attempts"], found["steps_lost"]
    text = (
        f"goodput {share(found)}: {duration(found['useful_s'])} of {duration(found['allocated_s'])} in steps that "
        f"count; {attempts} attempt{'' if attempts == 1 else 's'}, {lost} step{'' if lost == 1 else 's'} lost"
    )
    if lost:
        text += f" ({duration(found['lost_s'])})"
    if found["restart_s"]:
        text += f", first step after {', '.join(map(duration, found['restart_s'][-5:]))}"
    return text
