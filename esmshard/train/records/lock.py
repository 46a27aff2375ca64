"""The lock of a run directory: `OUT/lock.json` names the process that writes there, and keeps every other run out.

The file is created exclusively (`O_EXCL`), which NFS and Lustre guarantee even where locks are switched off. A run that
was killed leaves its lock. The next run takes it over if the process is gone from this machine, or if the same job of a
scheduler left it. Whether a process of another machine lives cannot be seen, so that the user decides (`--take-over`).
"""

import getpass
import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from pydantic import BaseModel

from esmshard.errors import InputError
from esmshard.parallel.liveness import machine, process_lives, process_start
from esmshard.progress import say

NAME = "lock.json"
WRITTEN = 2.0
"""The seconds in which a lock that was just created gets its content."""


class Holder(BaseModel):
    """The content of the file."""

    nonce: str
    """A random value, drawn for each lock, by which a run recognises its own."""
    user: str
    job: str | None
    """The scheduler's id of the job. It stays the same when the job is restarted after a preemption."""
    host: str
    machine: str
    """The machine, or the container, within which process ids have one meaning."""
    pid: int
    process_start: str | None
    """The start of the process in the kernel's ticks, since process ids are used again; None where it is unknown."""
    since: str
    """The time at which the lock was taken, by the holder's clock, for people."""

    @property
    def lives(self) -> bool | None:
        """Whether the process exists; None on another machine, or where the system does not tell."""
        return process_lives(self.pid, self.process_start) if self.machine == machine() else None

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.user} on {self.host} (process {self.pid}{job}) since {self.since}"


class Lock:
    """The lock of a run directory, held from `with` to the end of the block. For the first rank only.

    Args:
        out: the run directory. It is created if it does not exist.
        take_over: take the lock of a run that may still live on another machine.

    Raises:
        InputError: on entering, if another run holds the directory or the directory cannot be written to.
    """

    def __init__(self, out: Path, *, take_over: bool = False) -> None:
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a container may have no names of users
            user = str(os.getuid())
        self._out, self._path, self._take_over = out, out / NAME, take_over
        self._me = Holder(
            nonce=uuid.uuid4().hex,
            user=user,
            job=job_id(),
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __enter__(self) -> "Lock":
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._make_room()
        except OSError as error:
            raise InputError(
                f"{self._out}: cannot be written to ({(error.strerror or str(error)).lower()}); fix that, or choose "
                "another directory with out=DIR"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(InputError, OSError):  # the file stays, and the next run sees that its process is gone
            self.check()
            self._path.unlink()

    def check(self) -> None:
        """Raise `InputError` if another run has taken the directory over, or somebody has removed the lock."""
        try:
            if self._me.nonce.encode() in self._path.read_bytes():
                return
            why = f"{self._out}: another run took over ({holder(self._out) or NAME})"
        except FileNotFoundError:
            why = f"{self._path}: the lock of this run was removed"
        except OSError:  # nothing can be saved in the directory at this moment either
            return
        raise InputError(f"{why}; this run stops without saving")

    def _create(self) -> bool:
        try:
            with open(self._path, "xb", buffering=0) as file:
                text = (self._me.model_dump_json(indent=1) + "\n").encode()
                if file.write(text) != len(text):
                    raise OSError("the disk is full")
        except FileExistsError:
            return False
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _make_room(self) -> None:
        """Move the lock of a run away that has ended. `InputError` if it may still live."""
        try:
            text, age = self._path.read_bytes(), time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        if not text and 0 <= age < WRITTEN:
            time.sleep(0.05)
            return
        held = _parsed(text)
        who = f"{self._out}: held by {held or f'an unknown run ({NAME} is damaged)'}"
        if held is not None and held.lives:
            raise InputError(
                f"{who}, which is still running; wait for it, stop it, or choose another directory with out=DIR"
            )
        if held is not None and held.lives is False:
            reason = "whose process is gone"
        elif held is not None and held.job is not None and held.job == self._me.job:
            reason = "an earlier start of this job"
        elif self._take_over:
            reason = "as --take-over asks"
        else:
            raise InputError(
                f"{who}; whether it still runs cannot be seen from here: if it has ended, pass --take-over, else wait "
                "for it, or choose another directory with out=DIR"
            )
        aside = self._path.with_name(f".{NAME}.{self._me.nonce}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:  # another run was faster
            return
        if aside.read_bytes() != text:  # another run was faster, and this was its lock
            with suppress(FileExistsError):
                os.link(aside, self._path)
        else:
            say(f"{who}, {reason}; taken over")
        aside.unlink()


def holder(out: Path) -> Holder | None:
    """Return who holds a run directory; None if nobody does, or the file is damaged."""
    try:
        return _parsed((out / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def abandoned(out: Path) -> bool:
    """Whether no run holds a directory for certain: it has no lock, or the process is gone from this machine."""
    held = holder(out)
    return not (out / NAME).exists() if held is None else held.lives is False


def _parsed(text: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(text)
    except ValueError:
        return None


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of this job, which stays the same when a scheduler restarts the job; None if there is no such id.

    >>> job_id({"SLURM_JOB_ID": "812", "SLURM_ARRAY_JOB_ID": "810", "SLURM_ARRAY_TASK_ID": "2"})
    '810_2'
    """
    if job := environ.get("ESMSHARD_JOB_ID"):
        return job
    if (array := environ.get("SLURM_ARRAY_JOB_ID")) and (task := environ.get("SLURM_ARRAY_TASK_ID")):
        return f"{array}_{task}"
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    return environ.get("SLURM_JOB_ID") or (run if run not in ("", "none") else None)
