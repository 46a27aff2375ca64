"""The claims of workers on parts. Workers need to share nothing but a file system.

    work/workers/3f9c21ab.json     a worker: process, machine, and a count that grows as long as it is alive
    work/commands/77d01e5b.json    the same for a command that started workers or will finish the output
    work/claims/000012.1           holds the worker of part 12; the file with the highest number is valid

Claim files are created exclusively (`O_EXCL`), which NFS and Lustre guarantee even where locks are switched off: if
several workers want a part, exactly one gets it. A worker is dead if its process is gone, or if its count does not grow
while it is watched. The part of a dead worker can be claimed with the next number. Clocks of different machines are not
compared. A worker that was only suspended may finish a part that another worker has claimed. Then the first result is
kept; both are the same.

For an output in a bucket, the same files are objects below the output's address. A bucket creates an object only if its
name is free, as `O_EXCL` does (`esmshard.remote.RemoteDirectory.create`). A file `remote.json` beside `work/` names
the address.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from esmshard.files import read_json
from esmshard.parallel.liveness import machine, process_lives, process_start

BEAT = 5.0
"""Seconds between two beats. With each beat a process increases its count."""
PATIENCE = 5
"""The number of beats without a change after which a worker counts as dead. Some may be late, and one may be lost."""


class Command:
    """One process that shows in a directory that it is alive, from `with` to the end of the block.

    Args:
        work: the directory of claims, commands and workers. It is created, but its parents must exist.
        beat: seconds between two beats.
    """

    folder = "commands"
    """The subdirectory of its note."""

    def __init__(self, work: Path, *, beat: float = BEAT) -> None:
        self._work, self._notes, self._claims = work, work / self.folder, work / "claims"
        self.name = uuid.uuid4().hex[:8]
        self._beat = beat
        self._note: dict[str, Any] = {
            "name": self.name,
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "beat_s": beat,
            "beats": 0,
            "rows": 0,
            "residues": 0,
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name=self.folder, daemon=True)
        # The last count of each other process, and the time since which the count is unchanged.
        self._watched: dict[str, tuple[int, float]] = {}

    def __enter__(self) -> Self:
        # Parents are not created, since another worker may have finished and removed them.
        for directory in (self._work, self._claims, self._notes):
            directory.mkdir(exist_ok=True)
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the file stays, but its count no longer grows
            self._path(self.name).unlink()

    def lives(self, note: Mapping[str, Any]) -> bool | None:
        """Whether the process that wrote a note is alive; None if it must be watched longer.

        Args:
            note: the current note. The note of a process on another machine is compared with that of the last call.
        """
        if note["machine"] == self._note["machine"]:
            here = process_lives(note["pid"], note["process_start"])
            if here is not None:
                return here
        now, before = time.monotonic(), self._watched.get(note["name"])
        if before is None or before[0] != note["beats"]:
            self._watched[note["name"]] = (note["beats"], now)
            return None if before is None else True
        return None if now - before[1] < PATIENCE * max(self._beat, note["beat_s"]) else False

    def _path(self, name: str) -> Path:
        return self._notes / f"{name or 'nobody'}.json"

    def _keep_beating(self) -> None:
        while not self._ended.wait(self._beat if self._note["beats"] else min(self._beat, 1.0)):
            self._note["beats"] += 1
            with contextlib.suppress(OSError):  # the file system failed for a moment; the next beat tries again
                self._tell()

    def _tell(self) -> None:
        path = self._path(self.name)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._note), encoding="utf-8")
        scratch.replace(path)


class Worker(Command):
    """One process that claims parts in a directory, from `with` to the end of the block. Arguments as for `Command`."""

    folder = "workers"

    def count(self, rows: int, residues: int) -> None:
        """Add finished rows and residues. Other processes read them with the next beat."""
        self._note["rows"] += rows
        self._note["residues"] += residues

    def claim(self, what: str) -> bool:
        """Claim a part. Returns False if a worker that is alive, or that may be alive, holds it."""
        number, holder = self._holder(what)
        if holder == self.name:
            return True
        if number and self.holder_lives(holder) is not False:
            return False
        return self._create(f"{what}.{number + 1}")

    def succeeds(self, what: str) -> bool:
        """Whether another worker held the part before."""
        return self._holder(what)[0] > 1

    def holder_lives(self, name: str) -> bool | None:
        """Whether another worker is alive; None if it must be watched longer."""
        note = self._note_of(name)
        # a worker writes its note before its first claim, and removes it when it ends
        return False if note is None else self.lives(note)

    def settle(self, wanted: Callable[[], list[str]]) -> bool:
        """Wait until it is known whether the holders of the wanted parts are alive.

        Returns:
            True if one of them is dead, so that its part can be claimed; False if not, or if no part is wanted any
            more.
        """
        alive: set[str] = set()
        while names := wanted():
            for holder in {self._holder(what)[1] for what in names} - alive:
                state = self.holder_lives(holder)
                if state is False:
                    return True
                alive |= {holder} if state else set()
            if {self._holder(what)[1] for what in names} <= alive:
                return False
            time.sleep(self._pause)
        return False

    @property
    def _pause(self) -> float:
        """Return the seconds between two looks at other workers."""
        return self._beat / 20

    def _create(self, claim: str) -> bool:
        """Create a claim. Returns False if another worker has created it."""
        return publish(self._claims / claim, self.name)

    def _note_of(self, name: str) -> dict[str, Any] | None:
        """Return the newest note of a worker; None if it has ended."""
        return _read(self._path(name))

    def _holder(self, what: str) -> tuple[int, str]:
        """Return number and worker of the valid claim; 0 and an empty name if there is none."""
        number = 0
        while (self._claims / f"{what}.{number + 1}").exists():
            number += 1
        if not number:
            return 0, ""
        try:
            return number, (self._claims / f"{what}.{number}").read_text(encoding="ascii")
        except OSError:
            return number, ""


def publish(path: Path, text: str) -> bool:
    """Write a file that appears complete or not at all. Returns False if the file exists already."""
    scratch = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links; two processes at the same moment may then both succeed
            if path.exists():
                return False
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return True


def workers(work: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest note of each worker of a directory."""
    yield from _notes(work / Worker.folder)


def at_work(work: Path, say: Callable[[str], None]) -> str | None:
    """Return a process that works in a directory, as `process 4711 on node07`; None if there is none.

    Processes of this machine are known at once. A process of another machine, or of another container on this machine,
    is watched until its next beat, or for PATIENCE of its beats.

    Args:
        work: the directory of claims, commands and workers.
        say: called with a message when a process is being watched.
    """
    return first_alive(
        Command(work), lambda: [*_notes(work / Command.folder), *_notes(work / Worker.folder)], str(work.parent), say
    )


def first_alive(
    watcher: Command, read: Callable[[], list[dict[str, Any]]], place: str, say: Callable[[str], None]
) -> str | None:
    """Return the first process that is alive, as `at_work` does.

    Args:
        watcher: a process that need not have been entered.
        read: returns the current notes of all processes.
        place: the output, for messages.
        say: called with a message when a process is being watched.
    """
    reported = False
    while True:
        notes = read()
        states = [watcher.lives(note) for note in notes]
        for note, state in zip(notes, states, strict=True):
            if state:
                return f"process {note['pid']} on {note['host']}"
        if None not in states:
            return None
        note = notes[states.index(None)]
        if not reported:
            patience = PATIENCE * max(BEAT, note["beat_s"])
            say(f"{place}: looking whether {note['host']} still works on it, for {patience:.0f} s at most")
            reported = True
        time.sleep(min(BEAT, note["beat_s"]) / 20)


def _notes(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.suffix == ".json" and (note := _read(path)) is not None:
            yield note


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = read_json(path)
    except (OSError, ValueError):
        return None
    return note
