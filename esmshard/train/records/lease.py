"""The lease of a run directory: one run holds it at a time, also between machines that share only a file system.

    OUT/lease-1.json    names the holder, and has a count that grows as long as the holder is alive

The lease with the highest number is valid. Every file is created exclusively (`O_EXCL`), which NFS and Lustre guarantee
even where locks are switched off: if several runs want the next number, exactly one gets it. A run that takes over
creates the next number and removes the lower ones. A run that ends removes its own file.

Clocks of different machines are not compared. Whether a holder on another machine is alive shows in its growing count.
"""

import getpass
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from types import TracebackType

from pydantic import BaseModel

from esmshard.errors import InputError
from esmshard.launch.liveness import machine, process_lives, process_start

BEAT = 10.0
"""Seconds between two beats. With each beat the holder increases its count."""

PATIENCE = 2.5
"""The number of beats without a change after which a holder counts as gone. One beat may be late, and one may be lost.
"""

_NAME = re.compile(r"lease-(\d+)\.json")


class Holder(BaseModel):
    """The holder of a run directory; the content of a lease file."""

    nonce: str
    """A random value, drawn for each lease, by which a run recognises its own lease."""
    user: str
    job: str | None
    """The scheduler's id of the job. It stays the same when the job is restarted after a preemption."""
    host: str
    machine: str
    """The machine, or the container, within which process ids have one meaning."""
    pid: int
    process_start: str | None
    """The start time of the process in the kernel's ticks, since process ids are used again; None where it is unknown.
    """
    beat_s: float
    since: str
    """The start of the lease by the holder's clock, for people."""
    beats: int

    @property
    def lives(self) -> bool | None:
        """Whether the process exists; None on another machine, or where the system does not tell."""
        return process_lives(self.pid, self.process_start) if self.machine == machine() else None

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.user} on {self.host} (process {self.pid}{job}) since {self.since}"


class Lease:
    """The lease of a run directory, held from `with` to the end of the block. For the first rank only.

    A lease is taken over at once if its process on this machine is gone, or if an earlier start of the same job holds
    it on another machine. Any other lease is watched for two and a half beats, and taken over if its count does not
    change.

    Args:
        out: the run directory. It is created if it does not exist.
        say: called with a sentence when another run's lease is watched or taken over.
        beat: seconds between two beats.

    Raises:
        InputError: on entering, if another run holds the directory or the directory cannot be written to.
    """

    def __init__(self, out: Path, say: Callable[[str], None], *, beat: float = BEAT) -> None:
        self._out, self._say = out, say
        self._me = _myself(beat)
        self._number = 0
        self._lost: str | None = None
        self._looked = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise InputError(
                f"{self._out}: cannot be written to ({(error.strerror or str(error)).lower()}); fix that, or choose "
                "another directory with out=DIR"
            ) from None
        self._looked = time.time()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._look()
            if self._lost is None:
                self._path.unlink()
        except OSError:  # the file stays, but its count no longer grows
            pass

    def check(self) -> None:
        """Raise `InputError` if another run has taken the directory over. The check is cheap enough for every step.

        It reads a flag and a clock. Only a run that was suspended for minutes, and has missed beats, reads the files.
        """
        if abs(time.time() - self._looked) > 2 * self._me.beat_s:  # `time.time` continues while the machine sleeps
            try:
                self._look()
            except OSError:  # nothing can be saved in the directory at this moment either
                pass
        if self._lost is not None:
            raise InputError(f"{self._lost}; this run stops without saving")

    @property
    def _path(self) -> Path:
        return self._out / f"lease-{self._number}.json"

    def _acquire(self) -> None:
        taken = 0
        while True:
            known = set(_numbers(self._out)) | ({taken} if taken else set())
            newest, notice = max(known, default=0), ""
            if newest:
                found = self._follow(self._out / f"lease-{newest}.json")
                if found is None:  # the holder changed meanwhile; on NFS the next listing may still show the old one
                    taken = 0
                    time.sleep(0.05)
                    continue
                notice = found
            self._number = newest + 1
            try:
                with open(self._path, "xb", buffering=0) as file:
                    _write(file, self._text())
            except FileExistsError:
                taken = self._number  # the next listing may not show this file yet
                continue
            except OSError:
                self._path.unlink(missing_ok=True)
                raise
            # Creating a file refreshed the listing. Any new file in the listing came between our look and our file.
            if set(_numbers(self._out)) - known - {self._number}:
                self._path.unlink(missing_ok=True)
                taken = 0
                continue
            for number in known:
                (self._out / f"lease-{number}.json").unlink(missing_ok=True)
            if notice:
                self._say(notice)
            return

    def _follow(self, path: Path) -> str | None:
        """Return why this run may take over a lease, or None if the holder has changed. `InputError` if it may not."""
        raw = _read(path)
        if raw is None:
            return None
        holder, me = _parse(raw), self._me
        if holder is None:
            who = f"{self._out}: held by an unknown run ({path.name} is damaged)"
        else:
            who = f"{self._out}: held by {holder}"
            refusal = InputError(
                f"{who}, which is still running; wait for it, stop it, or choose another directory with out=DIR"
            )
            if lives := holder.lives:
                raise refusal
            if lives is False:
                return f"{who}, whose process is gone; taken over"
            if holder.job is not None and holder.job == me.job:
                return f"{who}, an earlier start of this job; taken over"
        patience = PATIENCE * max(me.beat_s, holder.beat_s if holder else 0.0)
        self._say(f"{who}; watching for {patience:.3g} s whether it gives a sign of life")
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(patience / 100)
            now = _read(path)
            if now != raw:
                after = _parse(now) if now is not None else None
                if holder is not None and after is not None and after.nonce == holder.nonce:
                    raise refusal
                return None
        return f"{who}, which gave no sign of life for {patience:.3g} s; taken over"

    def _keep_beating(self) -> None:
        wait = self._me.beat_s
        while not self._ended.wait(wait) and self._lost is None:
            try:
                self._look()
                if self._lost is None:
                    self._beat()
                wait = self._me.beat_s
            except OSError:  # the file system failed for a moment; try again soon, because others watch the count
                wait = self._me.beat_s / 5

    def _beat(self) -> None:
        """Write the count in place, at the same length: this needs no free disk, and cannot restore a removed file."""
        self._me = self._me.model_copy(update={"beats": self._me.beats + 1})
        with open(self._path, "r+b", buffering=0) as file:
            _write(file, self._text())

    def _text(self) -> bytes:
        return (self._me.model_dump_json(indent=1) + "\n").ljust(1024).encode()

    def _look(self) -> None:
        """Check whether this run still holds the directory. `OSError` if the check fails."""
        newest = max([self._number, *_numbers(self._out)])
        path = self._out / f"lease-{newest}.json"
        raw = _read(path)
        if raw is None:
            self._lost = f"{path}: the lease of this run was removed"
        elif self._me.nonce.encode() not in raw:
            self._lost = f"{self._out}: another run took over ({_parse(raw) or path.name})"
        self._looked = time.time()


@dataclass(frozen=True)
class Sign:
    """The state of a lease, as seen by a reader that does not hold it."""

    holder: Holder | None
    """The holder; None where the file is damaged."""
    beaten: float
    """The time of the holder's last beat: seconds since 1970, by the clock of the file system."""
    lives: bool | None
    """Whether the holder is alive; None if one look cannot show it, as for a holder on another machine."""


def sign(out: Path) -> Sign | None:
    """Read who holds a run directory, with one look; None if nobody holds it."""
    numbers = _numbers(out) if out.is_dir() else []
    path = out / f"lease-{max(numbers, default=0)}.json"
    raw = _read(path) if numbers else None
    if raw is None:
        return None
    try:
        beaten = path.stat().st_mtime
    except FileNotFoundError:
        return None
    holder = _parse(raw)
    return Sign(holder, beaten, holder.lives if holder is not None else None)


def watched(out: Path) -> Sign | None:
    """Read who holds a run directory, and watch a holder on another machine until its next beat.

    Watching takes two and a half beats at most. Clocks are not compared. Nothing is written.
    """
    first = sign(out)
    if first is None or first.lives is not None:
        return first
    patience = PATIENCE * (first.holder.beat_s if first.holder is not None else BEAT)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(patience / 100)
        now = sign(out)
        if now is None or now.lives is not None:
            return now
        if now.holder is not None and now.holder != first.holder:
            return replace(now, lives=True)
    return replace(first, lives=False)


def abandoned(out: Path) -> bool:
    """Whether no run holds a directory for certain: it has no lease, or the lease's process on this machine is gone.

    The result is False where one look cannot show it, as for a holder on another machine.
    """
    found = sign(out)
    return found is None or found.lives is False


def is_lease(path: Path) -> bool:
    """Whether a file of a run directory is a lease."""
    return _NAME.fullmatch(path.name) is not None


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


def _myself(beat: float) -> Holder:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have no names of users
        user = str(os.getuid())
    return Holder(
        nonce=uuid.uuid4().hex,
        user=user,
        job=job_id(),
        host=socket.gethostname(),
        machine=machine(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
        beat_s=beat,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        beats=0,
    )


def _numbers(out: Path) -> list[int]:
    return [int(match[1]) for path in out.iterdir() if (match := _NAME.fullmatch(path.name))]


def _read(path: Path) -> bytes | None:
    """Read a file, opened anew each time, since NFS then asks the server. None if the file does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(raw: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(raw)
    except ValueError:
        return None


def _write(file: FileIO, text: bytes) -> None:
    if file.write(text) != len(text):
        raise OSError("the disk is full")
