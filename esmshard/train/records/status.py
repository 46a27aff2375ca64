"""`status.json`: the state of a run, for people, scripts, and launchers that do not pass exit codes on."""

import os
import socket
import time
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict, Unpack  # pydantic does not read that of `typing` before Python 3.12

from esmshard.errors import InputError
from esmshard.files import read_json, replace_json
from esmshard.parallel import launch
from esmshard.train.records.lock import abandoned, job_id

NAME = "status.json"

State = Literal["running", "preempted", "done", "failed"]


class ReportedState(TypedDict):
    """The part of the file that a run knows. Times are seconds since 1970."""

    state: State
    step: int
    """The number of optimizer steps done."""
    steps: int
    """The number of steps of the recipe."""
    attempt: int
    """The number of attempts at this run so far."""
    idle: int
    """The number of attempts in a row that were asked to stop before their first step was done."""
    exit_code: int | None
    """The exit code of the command; None while it runs. torchrun returns 0 where the command returned 75."""
    message: str
    """One sentence for people."""
    checkpoint: str | None
    """The newest complete checkpoint, such as `step_000100`."""
    started: float
    """The start of this attempt."""


class Status(ReportedState):
    """The content of the file."""

    job: str | None
    launch: str | None
    """An id that all attempts of one launcher share."""
    host: str
    updated: float


def write(out: Path, **known: Unpack[ReportedState]) -> None:
    """Replace the status of a run in one operation, so that a crash leaves the old file. First rank only."""
    here = {"job": job_id(), "launch": _launch(), "host": socket.gethostname(), "updated": time.time()}
    replace_json(out / NAME, {**known, **here})


def read(out: Path) -> Status | None:
    """Return the state of a run; None if the run never began.

    A killed run could not write its last state. If the file says `running`, but the directory has no lock or the
    lock's process is gone from this machine, the result is `failed`. Of a run on another machine this cannot be seen.

    Raises:
        InputError: if the file is damaged.
    """
    status = as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        status = without_a_word(status)
    return status


def without_a_word(status: Status) -> Status:
    """Return the status `failed` for a run that was killed while its file said `running`."""
    message = f"the run ended without a word after step {status['step']}; go on with --resume auto"
    return {**status, "state": "failed", "message": message}


def begun_by_this_launch(out: Path) -> bool:
    """Whether the launcher that restarted this process also began the run in a directory."""
    status = as_written(out)
    return status is not None and status["launch"] is not None and status["launch"] == _launch()


def _launch() -> str | None:
    run = os.environ.get(launch.LAUNCH) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run if run not in ("", "none") else None


def mark_failed(out: Path, message: str, exit_code: int = 1) -> None:
    """Mark a run as failed, for a launcher whose processes were all killed. A final state that the run wrote stays."""
    status = as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        ended = {"state": "failed", "exit_code": exit_code, "message": message, "updated": time.time()}
        replace_json(out / NAME, {**status, **ended})


def is_written(out: Path) -> bool:
    """Whether a run left its status in a directory. A `status.json` of another program is none."""
    try:
        return as_written(out) is not None
    except InputError:
        return False


def as_written(out: Path) -> Status | None:
    """Read the file without a look at the lock. `InputError` if the file is damaged."""
    try:
        return TypeAdapter(Status).validate_python(read_json(out / NAME), strict=True)
    except FileNotFoundError:
        return None
    except ValueError:
        raise InputError(f"{out / NAME}: damaged; remove it, the run itself does not read it") from None
