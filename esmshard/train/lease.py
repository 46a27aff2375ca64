"""A run directory is held by one run at a time, also between machines that share nothing but a file system.

    OUT/lease-1.json    who holds the directory, and a count that grows as long as they live

The highest number holds it. Every file is made exclusively (`O_EXCL`), which NFS and Lustre promise while their locks
may be off: of several runs that want the next number exactly one gets it, whatever the timing. A run that takes over
makes the next number and removes the lower ones; a run that ends removes its own.

Clocks of machines are not compared. Whether a holder on another machine lives is seen by watching its count.
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
from esmshard.parallel.alive import machine as _machine
from esmshard.parallel.alive import process_lives, process_start

BEAT = 10.0
"""Seconds between two signs of life."""

PATIENCE = 2.5
"""Beats without a sign of life after which a holder counts as gone: one may come late, and one be lost."""

_NAME = re.compile(r"lease-(\d+)\.json")


class Holder(BaseModel):
    """Who holds a run directory; the content of a lease file."""

    nonce: str
    """Drawn anew for each lease, so that nobody takes another's for their own."""
    user: str
    job: str | None
    """What a scheduler calls the job; the same when it is started again after a preemption."""
    host: str
    machine: str
    """Within which process ids mean the same."""
    pid: int
    process_start: str | None
    """When the process began, in the kernel's ticks, as ids are used again; None where the system does not tell."""
    beat_s: float
    since: str
    """Time of the holder's clock, for people."""
    beats: int

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.user} on {self.host} (process {self.pid}{job}) since {self.since}"


class Lease:
    """Holds a run directory from `with` to its end. For the first rank only; `check` says whether it is held still.

    A holder on this machine whose process is gone, or an earlier start of the same job on another machine, is followed
    at once; any other that shows no sign of life, after it has been watched for two beats and a half.

    Args:
        out: the run directory; made if it is not there.
        say: called with a sentence when another one's lease is watched or taken over.
        beat: seconds between two signs of life.

    Raises:
        InputError: when entered, if another run holds the directory, or it cannot be written to.
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
                f"{self._out}: cannot be written to ({(error.strerror or str(error)).lower()}); mend that, or choose "
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
        except OSError:  # it stays, and shows no sign of life
            pass

    def check(self) -> None:
        """Raise `InputError` if another run has taken over. A flag and a clock: cheap enough for every step.

        A run that was suspended for minutes comes here before its next beat; then the files are looked at.
        """
        if abs(time.time() - self._looked) > 2 * self._me.beat_s:  # this clock goes on while the machine sleeps
            try:
                self._look()
            except OSError:  # nothing can be saved there now either
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
                if found is None:  # it changed hands meanwhile; on NFS the next listing may not know that yet
                    taken = 0
                    time.sleep(0.05)
                    continue
                notice = found
            self._number = newest + 1
            try:
                with open(self._path, "xb", buffering=0) as file:
                    _write(file, self._text())
            except FileExistsError:
                taken = self._number  # the next listing may not show it yet, either
                continue
            except OSError:
                self._path.unlink(missing_ok=True)
                raise
            # Making a file made the listing fresh. Whoever is new in it came between our look and our file.
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
        """Why this run may take the place of a lease's holder; None if it has changed hands. `InputError` if not."""
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
            lives = process_lives(holder.pid, holder.process_start) if holder.machine == me.machine else None
            if lives:
                raise refusal
            if lives is not None:
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
            except OSError:  # a hiccup of the file system: soon again, for others are watching
                wait = self._me.beat_s / 5

    def _beat(self) -> None:
        """Written in place, at the same length: needs no room on a full disk, and brings no removed file back."""
        self._me = self._me.model_copy(update={"beats": self._me.beats + 1})
        with open(self._path, "r+b", buffering=0) as file:
            _write(file, self._text())

    def _text(self) -> bytes:
        return (self._me.model_dump_json(indent=1) + "\n").ljust(1024).encode()

    def _look(self) -> None:
        """Whether the directory is still held. `OSError` if that cannot be seen."""
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
    """What the lease of a run directory shows to whoever only looks."""

    holder: Holder | None
    """None where the file is damaged."""
    beaten: float
    """When the holder gave its last sign of life: seconds since 1970, by the clock of the file system."""
    lives: bool | None
    """None where nobody can tell at a glance, as of a holder on another machine."""


def sign(out: Path) -> Sign | None:
    """Who holds a run directory, at a glance; None if nobody does."""
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
    here = holder is not None and holder.machine == _machine()
    return Sign(
        holder, beaten, process_lives(holder.pid, holder.process_start) if holder is not None and here else None
    )


def watched(out: Path) -> Sign | None:
    """The same, for certain: a holder on another machine is watched until its next beat, two beats and a half at most.

    Clocks are not compared here either. Writes nothing.
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
    """Whether it is certain that no run holds a directory: there is no lease, or its process on this machine is gone.

    False also where nobody can tell at a glance, as of a holder on another machine.
    """
    found = sign(out)
    return found is None or found.lives is False


def is_lease(path: Path) -> bool:
    """Whether a file of a run directory is a lease, and no result."""
    return _NAME.fullmatch(path.name) is not None


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """What identifies this job and stays the same when a scheduler starts it again; None if nothing does.

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
    except (OSError, KeyError):  # a container may know no names
        user = str(os.getuid())
    return Holder(
        nonce=uuid.uuid4().hex,
        user=user,
        job=job_id(),
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
        beat_s=beat,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        beats=0,
    )


def _numbers(out: Path) -> list[int]:
    return [int(match[1]) for path in out.iterdir() if (match := _NAME.fullmatch(path.name))]


def _read(path: Path) -> bytes | None:
    """Opened anew each time: that is when NFS asks the server. None if it is not there."""
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
