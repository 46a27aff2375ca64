"""The state of runs as seen from outside: `esmshard status`.

`status.json` holds the last state that a run wrote. A run that was killed could not write one, so `running` does not
count if the process that holds the lock of the directory (`esmshard.train.records.lock`) is gone from this machine.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esmshard.errors import ExitCode, UsageError, reading
from esmshard.files import read_json
from esmshard.train.records import goodput, lock, status
from esmshard.train.records.attempt import METRICS

EXIT_CODES: Mapping[status.State, int] = {
    "failed": ExitCode.FAILED,
    "running": ExitCode.RUNNING,
    "preempted": ExitCode.REQUEUE,
    "done": ExitCode.DONE,
}
"""The exit code of the command: that of the first of these states that one of the runs is in."""

SWEEP = "sweep.json"
"""The state of a sweep (`esmshard.train.experiments.sweep_results`)."""

_TAIL = 1 << 18
"""The number of bytes at the end of metrics.jsonl that are searched for the last step. A line of 64 ranks has 5 KB."""

_SHOWN = ("state", "step", "steps", "attempt", "started", "exit_code", "checkpoint", "message")
"""The keys of status.json that `--json` shows."""


@dataclass(frozen=True)
class Standing:
    """The state of one run. Times are seconds since 1970."""

    run: str
    status: status.Status
    """The content of status.json, corrected: `step` counts the newest steps too, and a killed run is `failed`."""
    last_step: float | None
    """The time of the last step, by the clock of the machine that took it."""
    last_seen: float | None
    """The time of the last change of metrics.jsonl or status.json, by the clock of the file system; None if nobody
    holds the directory.
    """
    holder: str | None
    """The holder of the directory: user, host, process, job."""
    unit: str = "step"
    """What `step` and `steps` of the status count: `trial` for a sweep."""


def standings(out: Path) -> list[Standing]:
    """Return the state of the run in a directory, or of the runs in its subdirectories, ordered by name.

    Of a sweep only the runs that have not ended count, so that a failed trial does not make the sweep a failed one.

    Raises:
        UsageError: if no run has begun in the directory.
        InputError: a status.json is damaged.
    """
    runs = [out] if (out / status.NAME).exists() else sorted(path.parent for path in out.glob(f"*/{status.NAME}"))
    if (out / SWEEP).is_file():
        return _of_sweep(out, runs)
    if not runs:
        raise UsageError(f"{out}: no run has begun there (it has no {status.NAME}); give `out` of a recipe")
    return [standing for standing in map(_standing, runs) if standing is not None]


def _of_sweep(out: Path, runs: Sequence[Path]) -> list[Standing]:
    """Return the state of a sweep, followed by the states of its runs that have not ended."""
    with reading(str(out / SWEEP), "remove it, and go on with --resume auto"):
        sweep = read_json(out / SWEEP)
        trials, wanted, stage = sweep["trials"], int(sweep["trials_wanted"]), sweep["state"]
        ended = sum(one["state"] != "running" for one in trials)
        failed = sum(one["state"] == "failed" for one in trials)
        best = next((one for one in trials if one["number"] == sweep["best"]), None)
        message = f"{ended} of {wanted} trials have ended" + (f", {failed} of them failed" if failed else "")
        if best is not None:
            message += f"; the best is trial {best['number']}, valid {sweep['metric']} {best['value']:.4g}"
    going_on = [out / "trials" / f"{one['number']:03}" for one in trials if one["state"] == "running"]
    others = [one for one in map(_standing, [*going_on, *runs]) if one is not None]
    going = [one for one in others if one.status["state"] in ("running", "preempted")]
    state: status.State = "running" if any(one.status["state"] == "running" for one in going) else "preempted"
    if stage in ("done", "failed"):
        state = "done" if stage == "done" else "failed"
    message += {"training": "; its settings are trained with new seeds", "done": "; its settings are tested"}.get(
        stage, ""
    )
    if state == "preempted":
        message += "; go on with --resume auto"
    code = next((code for known, code in EXIT_CODES.items() if known == state and known != "running"), None)
    written = (out / SWEEP).stat().st_mtime
    known = status.Status(
        state=state,
        step=ended,
        steps=wanted,
        attempt=1,
        idle=0,
        exit_code=code,
        message=message,
        checkpoint=None,
        started=written,
        job=None,
        launch=None,
        host="",
        updated=written,
    )
    beaten = max((one.last_seen for one in going if one.last_seen is not None), default=None)
    return [
        Standing(str(out), known, None, beaten, None, unit="trial"),
        *(going if state in ("running", "preempted") else []),
    ]


def _standing(run: Path) -> Standing | None:
    said = status.as_written(run)
    if said is None:  # the directory was removed at this moment
        return None
    held = lock.holder(run)
    if said["state"] == "running" and lock.abandoned(run):
        said = status.without_a_word(said)
    step, last_step = _last_step(run)
    if said["state"] == "running":
        said = {**said, "step": max(step, said["step"])}
    times = [path.stat().st_mtime for path in (run / METRICS, run / status.NAME) if path.is_file()]
    last_seen = max(times, default=None) if held is not None else None
    return Standing(str(run), said, last_step, last_seen, None if held is None else str(held))


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
    states = {standing.status["state"] for standing in found}
    return next(code for state, code in EXIT_CODES.items() if state in states)


def as_json(found: Sequence[Standing]) -> str:
    """Format as JSON: the joint `state`, and the fields of each run."""
    code = exit_code(found)
    state = next(state for state, one in EXIT_CODES.items() if one == code)
    runs = []
    for one in found:
        shown = {key: value for key, value in one.status.items() if key in _SHOWN}
        times = {"last_step": one.last_step, "last_seen": one.last_seen, "holder": one.holder}
        runs.append({"run": one.run, **shown, **times})
    return json.dumps({"state": state, "runs": runs}, indent=1)


def as_text(found: Sequence[Standing], now: float | None = None) -> str:
    """Format as text: a paragraph for a single run or a sweep, a line for each of several runs."""
    now = time.time() if now is None else now
    first, *others = found
    if others and first.unit == "step":
        return _lines(found, now)
    status = first.status
    done = "" if first.last_step is None else f", done {_ago(first.last_step, now)}"
    seen = "" if first.last_seen is None else f"{_ago(first.last_seen, now)}"
    rows = [
        ("state", f"{status['state']}: {status['message']}"),
        (first.unit, f"{status['step']} of {status['steps']}{done}"),
        ("attempt", f"{status['attempt']}, begun {_ago(status['started'], now)}" if first.unit == "step" else ""),
        ("last seen", f"{seen}, {first.holder or 'an unknown run'}" if seen and first.unit == "step" else seen),
        ("checkpoint", status["checkpoint"] or ""),
    ]
    lines = [first.run, *(f"  {name:12}{value}" for name, value in rows if value)]
    return "\n".join([*lines, *([_lines(others, now)] if others else [])])


def _lines(found: Sequence[Standing], now: float) -> str:
    width = max(len(Path(standing.run).name) for standing in found) + 2
    return "\n".join(
        f"{Path(one.run).name.ljust(width)}{one.status['state'].ljust(11)}step {one.status['step']} of "
        f"{one.status['steps']}{_seen(one, now)}"
        for one in found
    )


def _seen(standing: Standing, now: float) -> str:
    return "" if standing.last_seen is None else f", last seen {_ago(standing.last_seen, now)}"


def _ago(then: float, now: float) -> str:
    """Format a time such as `3 min ago`. The two clocks may differ, so nothing is decided by the result."""
    seconds = max(0.0, now - then)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
