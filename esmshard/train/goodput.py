"""How much of the time of a run went into steps that count: goodput, over all attempts, from metrics.jsonl.

What is written there, beside the lines of steps and of validations:

    {"event": "attempt", "attempt": 2, "started": T, "time": T, "from_step": 100, "steps_lost": 7, "seconds_lost": 3.5}
    {"event": "first_step", "seconds": 41.2, "time": T}
    {"event": "end", "state": "preempted", "time": T}

and `time` on each line of a step. T is in seconds since 1970. What counts:

- Useful are the seconds of optimizer steps (`step_s`, waiting for data included) whose result was kept. Start,
  validation, checkpoints, consolidation and steps that were taken again are not.
- Allocated is the time from the start of each attempt's command to its end line. A killed attempt has none; its last
  line ends it, so up to one step and what it did after that is not known, and not counted. Time between attempts, in a
  queue or until somebody came, is not allocated.
- Lost are steps that were taken, but after the checkpoint from which the next attempt went on.
- A restart lasts from the start of the command to the end of its first step.

Goodput is useful over allocated (as in Google's ML Goodput Measurement, whose "productive time" it is). An hour is an
hour, on however many processes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from esmshard.files import parse_json
from esmshard.progress import duration

Line = Mapping[str, Any]


class Summary(TypedDict):
    """All attempts of a run together."""

    attempts: int
    steps_lost: int
    lost_s: float
    useful_s: float
    allocated_s: float
    goodput: float | None
    """Of the allocated time, the share that was useful; None if nothing was allocated."""
    useful_steps: float | None
    """Of the steps taken, the share that was kept; None if none was taken."""
    restart_s: list[float]
    """Of each attempt that came to the end of a step."""


def parse(text: str) -> list[dict[str, Any]]:
    r"""Lines of metrics.jsonl. One that a crash cut off is left out.

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
    """The lines that stay when a run goes on after `done` steps, with the steps and the seconds of steps that are lost.

    Lines of later steps will be written again. Events stay, and an attempt that was killed gets an end, for its last
    line may be one of those that go. Unless `validated`, the validation after that step is still to be done, or done
    again.

    >>> cut([{"step": 1, "step_s": 2.0, "time": 12.0}, {"step": 2, "step_s": 2.5, "time": 15.0}], 1)[1:]
    (1, 2.5)
    """
    kept: list[Line] = []
    lost, seconds = 0, 0.0
    last: float | None = None  # time of the newest line of an attempt that has no end
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
    """Whether it tells of an optimizer step; a validation names its step too."""
    return "event" not in line and "split" not in line and "step" in line


def attempt_line(
    kept: Sequence[Line], *, started: float, now: float, from_step: int, steps_lost: int, seconds_lost: float
) -> dict[str, Any]:
    """The line with which an attempt begins.

    Args:
        kept: the lines before it; one more attempt than they tell of begins.
        started: when the command was started.
        now: when the line is written.
        from_step: steps done in the checkpoint from which it goes on.
        steps_lost: as `cut` says.
        seconds_lost: as `cut` says.
    """
    return {
        "event": "attempt",
        "attempt": 1 + sum(line.get("event") == "attempt" for line in kept),
        "started": started,
        "time": now,
        "from_step": from_step,
        "steps_lost": steps_lost,
        "seconds_lost": seconds_lost,
    }


def summary(lines: Iterable[Line]) -> Summary:
    """What became of the time of a run, from all its lines. The last attempt may still be running."""
    attempts = lost = kept = 0
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
            kept += 1
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
        "useful_steps": kept / (kept + lost) if kept + lost else None,
        "restart_s": restarts,
    }


def share(found: Summary) -> str:
    """The goodput, as every place says it."""
    return "unknown" if found["goodput"] is None else f"{found['goodput']:.0%}"


def sentence(found: Summary) -> str:
    """A summary in one line, for the end of a run.

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
