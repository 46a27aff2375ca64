"""How runs stand, for somebody who looks from outside: `esmshard status`.

`status.json` says what a run last wrote. A run that was killed has no last word, so `running` counts only with a sign
of life of whoever holds the directory (`esmshard.train.lease`).
"""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from esmshard.errors import UsageError
from esmshard.train import goodput, lease, status
from esmshard.train.attempt import METRICS

EXIT_CODES: Mapping[status.State, int] = {"failed": 1, "running": 3, "preempted": 75, "done": 0}
"""Of the command, the first of these states that one of the runs is in."""

_TAIL = 1 << 18
"""Bytes at the end of metrics.jsonl in which the last step is looked for; a line of 64 ranks has 5 KB."""


@dataclass(frozen=True)
class Standing:
    """One run. Times are seconds since 1970."""

    run: str
    state: status.State
    step: int
    """Optimizer steps done, those after the last checkpoint too."""
    steps: int
    """Steps of the recipe."""
    attempt: int
    """Starts of this run so far."""
    started: float
    """Begin of this attempt."""
    last_step: float | None
    """When the last step was done, by the clock of the machine that did it."""
    last_seen: float | None
    """When its holder last gave a sign of life, by the clock of the file system. None without one."""
    holder: str | None
    """Who holds the directory: user, host, process, job."""
    exit_code: int | None
    checkpoint: str | None
    """Newest complete one, as `step_000100`."""
    message: str


def standings(out: Path) -> list[Standing]:
    """The run of a directory, or the runs of its directories, in the order of their names.

    May take 25 s: a run on another machine is watched for a sign of life; several are watched at the same time.

    Raises:
        UsageError: no run has begun there.
        InputError: a status.json is damaged.
    """
    runs = [out] if (out / status.NAME).exists() else sorted(path.parent for path in out.glob(f"*/{status.NAME}"))
    if not runs:
        raise UsageError(f"{out}: no run has begun there (it has no {status.NAME}); give `out` of a recipe")
    with ThreadPoolExecutor(len(runs)) as pool:
        found = [standing for standing in pool.map(_standing, runs) if standing is not None]
    return found


def _standing(run: Path) -> Standing | None:
    seen = lease.sign(run)
    said = status.as_written(run)
    if said is not None and said["state"] == "running":
        seen = lease.watched(run)
        again = status.as_written(run)  # it may have ended meanwhile, and have said so
        said = again or said
        if said["state"] == "running" and (seen is None or not seen.lives):
            said = status.without_a_word(said)
    if said is None:  # it was removed in this moment
        return None
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
    """Number and time of the last optimizer step in metrics.jsonl; 0 and None without one."""
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
    """See EXIT_CODES."""
    states = {standing.state for standing in found}
    return next(code for state, code in EXIT_CODES.items() if state in states)


def as_json(found: Sequence[Standing]) -> str:
    """`state` of all together, and the fields of each run."""
    code = exit_code(found)
    state = next(state for state, one in EXIT_CODES.items() if one == code)
    return json.dumps({"state": state, "runs": [asdict(standing) for standing in found]}, indent=1)


def as_text(found: Sequence[Standing], now: float | None = None) -> str:
    """A paragraph for a single run, a line for each of several."""
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
    """As 3 min ago. By two clocks, which may differ: nothing follows from it."""
    seconds = max(0.0, now - then)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
