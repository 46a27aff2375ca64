"""`status.json`: how a run stands, for people, for scripts, and for launchers that flatten exit codes."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Literal, TypedDict, cast

from esmshard.errors import InputError
from esmshard.files import read_json, replacing
from esmshard.parallel import worker
from esmshard.train.lease import abandoned, job_id

NAME = "status.json"

State = Literal["running", "preempted", "done", "failed"]


class Status(TypedDict):
    """Content of the file. Times are seconds since 1970."""

    state: State
    step: int
    """Optimizer steps done."""
    steps: int
    """Steps of the recipe."""
    attempt: int
    """Starts of this run so far."""
    exit_code: int | None
    """What the command returned; None while it runs."""
    message: str
    """One sentence."""
    checkpoint: str | None
    """Newest complete one, as `step_000100`."""
    job: str | None
    launch: str | None
    """What all starts by one launcher share."""
    host: str
    started: float
    """Begin of this attempt."""
    updated: float


_KINDS = {
    **dict.fromkeys(("state", "message", "host"), str),
    **dict.fromkeys(("step", "steps", "attempt"), int),
    **dict.fromkeys(("checkpoint", "job", "launch"), str | None),
    **dict.fromkeys(("started", "updated"), int | float),
    "exit_code": int | None,
}
"""Of what type each value of the file is."""


def write(
    out: Path,
    *,
    state: State,
    step: int,
    steps: int,
    attempt: int,
    message: str,
    checkpoint: str | None,
    started: float,
    exit_code: int | None = None,
) -> None:
    """Write the status of a run: the whole of it or, if the machine dies meanwhile, the one before. First rank only."""
    status: Status = {
        "state": state,
        "step": step,
        "steps": steps,
        "attempt": attempt,
        "exit_code": exit_code,
        "message": message,
        "checkpoint": checkpoint,
        "job": job_id(),
        "launch": _launch(),
        "host": socket.gethostname(),
        "started": started,
        "updated": time.time(),
    }
    _replace(out, status)


def read(out: Path) -> Status | None:
    """How a run stands; None if it never began.

    A run that was killed has no last word. If it says `running`, but nobody holds its directory any more, or whoever
    did is gone from this machine, it has failed. Of a run on another machine only its lease can tell.

    Raises:
        InputError: if the file is damaged.
    """
    status = as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        status = without_a_word(status)
    return status


def without_a_word(status: Status) -> Status:
    """The status of a run that says `running` and was killed: it has failed."""
    message = f"the run ended without a word after step {status['step']}; go on with --resume auto"
    return {**status, "state": "failed", "message": message}


def begun_by_this_launch(out: Path) -> bool:
    """Whether what lies in a run directory was begun by the launcher that started this process again."""
    status = as_written(out)
    return status is not None and status["launch"] is not None and status["launch"] == _launch()


def _launch() -> str | None:
    run = os.environ.get(worker.LAUNCH) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run if run not in ("", "none") else None


def mark_failed(out: Path, message: str, exit_code: int = 1) -> None:
    """Say that a run has failed, for a launcher whose processes were all killed. A last word of their own stays."""
    status = as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        _replace(out, {**status, "state": "failed", "exit_code": exit_code, "message": message, "updated": time.time()})


def replace_text(path: Path, text: str) -> None:
    """Write a file that holds, whatever happens meanwhile, its old text or the new one."""
    with replacing(path) as file:
        file.write(text)


def _replace(out: Path, status: Status) -> None:
    replace_text(out / NAME, json.dumps(status, indent=1) + "\n")


def as_written(out: Path) -> Status | None:
    """The file as it is, whether it is still true or not. `InputError` if it is damaged."""
    try:
        found = read_json(out / NAME)
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(key, ...), kind) for key, kind in _KINDS.items()):
        raise InputError(f"{out / NAME}: damaged; remove it, the run itself does not read it")
    return cast(Status, found)
