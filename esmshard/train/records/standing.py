"""The state of runs as seen from outside: `esmshard status`.

`status.json` holds the last state that a run wrote. A run that was killed could not write one, so `running` counts only
if the lease of the directory (`esmshard.train.records.lease`) shows that its holder is alive.
"""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from esmshard.errors import UsageError
from esmshard.train.records import goodput, lease, status
from esmshard.train.records.attempt import METRICS

EXIT_CODES: Mapping[status.State, int] = {"failed": 1, "running": 3, "preempted": 75, "done": 0}
"""The exit code of the command: that of the first of these states that one of the runs is in."""

_TAIL = 1 << 18
"""The number of bytes at the end of metrics.jsonl that are searched for the last step. A line of 64 ranks has 5 KB."""


@dataclass(frozen=True)
class Standing:
    """The state of one run. Times are seconds since 1970."""

    run: str
    state: status.State
    step: int
    """The number of optimizer steps done, steps after the last checkpoint included."""
    steps: int
    """The number of steps of the recipe."""
    attempt: int
    """The number of attempts at this run so far."""
    started: float
    """The start of this attempt."""
    last_step: float | None
    """The time of the last step, by the clock of the machine that took it."""
    last_seen: float | None
    """The time of the last beat of the lease, by the clock of the file system; None without a lease."""
    holder: str | None
    """The holder of the directory: user, host, process, job."""
    exit_code: int | None
    checkpoint: str | None
    """The newest complete checkpoint, such as `step_000100`."""
    message: str


def standings(out: Path) -> list[Standing]:
    """Return the state of the run in a directory, or of the runs in its subdirectories, ordered by name.

    This may take 25 s: the lease of a run on another machine is watched for a beat. Several leases are watched at once.

    Raises:
        UsageError: if no run has begun in the directory.
        InputError: a status.json is damaged.
    """
    runs = [out] if (out / status.NAME).exists() else sorted(path.parent for path in out.glob(f"*/{status.NAME}"))
    if not runs:
        raise UsageError(f"{out}: no run has begun there (it has no {status.NAME}); give `out` of a recipe")
    with ThreadPoolExecutor(len(runs)) as pool:
        found = [standing for standing in pool.map(_standing, runs) if standing is not None]
    return found


def _standing(run: Path) -> Standing | None:
    said = status.as_written(run)
    if said is None:  # the directory was removed at this moment
        return None
    seen = lease.watched(run) if said["state"] == "running" else lease.sign(run)
    said = status.as_written(run) or said  # the run may have ended meanwhile and have written so
    if said["state"] == "running" and (seen is None or not seen.lives):
        said = status.without_a_word(said)
    step, last_step = _last_step(run)
    return Standing(
        run=str(run),
        state=said["state"],
        step=max(step, said["step"]) if said["state"] == "running" else said["step"],
        steps=said["steps"],
        attempt=said["attempt"],
        started=said["started"],
        last_step=last_step,
        last_seen=seen.beaten if seen is not None else None,
        holder=str(seen.holder) if seen is not None and seen.holder is not None else None,
        exit_code=said["exit_code"],
        checkpoint=said["checkpoint"],
        message=said["message"],
    )


def _last_step(run: Path) -> tuple[int, float | None]:
    """Return number and time of the last optimizer step in metrics.jsonl; 0 and None without a step."""
    try:
        with open(run / METRICS, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return 0, None
    steps = [line for line in goodput.parse(text) if "lr" in line]
    return (int(steps[-1]["step"]), float(steps[-1]["time"])) if steps else (0, None)


def exit_code(found: Sequence[Standing]) -> int:
    """Return the exit code for several runs; see EXIT_CODES."""
    states = {standing.state for standing in found}
    return next(code for state, code in EXIT_CODES.items() if state in states)


def as_json(found: Sequence[Standing]) -> str:
    """Format as JSON: the joint `state`, and the fields of each run."""
    code = exit_code(found)
    state = next(state for state, one in EXIT_CODES.items() if one == code)
    return json.dumps({"state": state, "runs": [asdict(standing) for standing in found]}, indent=1)


def as_text(found: Sequence[Standing], now: float | None = None) -> str:
    """Format as text: a paragraph for a single run, a line for each of several runs."""
    now = time.time() if now is None else now
    if len(found) > 1:
        width = max(len(Path(standing.run).name) for standing in found) + 2
        lines = [
            f"{Path(standing.run).name.ljust(width)}{standing.state.ljust(11)}step {standing.step} of {standing.steps}"
            f"{_seen(standing, now)}"
            for standing in found
        ]
        return "\n".join(lines)
    (one,) = found
    rows = [
        ("state", f"{one.state}: {one.message}"),
        (
            "step",
            f"{one.step} of {one.steps}" + ("" if one.last_step is None else f", done {_ago(one.last_step, now)}"),
        ),
        ("attempt", f"{one.attempt}, begun {_ago(one.started, now)}"),
        ("last seen", "" if one.last_seen is None else f"{_ago(one.last_seen, now)}, {one.holder or 'an unknown run'}"),
        ("checkpoint", one.checkpoint or ""),
    ]
    return "\n".join([one.run, *(f"  {name:12}{value}" for name, value in rows if value)])


def _seen(standing: Standing, now: float) -> str:
    return "" if standing.last_seen is None else f", last seen {_ago(standing.last_seen, now)}"


def _ago(then: float, now: float) -> str:
    """Format a time such as `3 min ago`. The two clocks may differ, so nothing is decided by the result."""
    seconds = max(0.0, now - then)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
