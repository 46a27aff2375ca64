"""Which worker computes which part. Workers may share nothing but a file system.

    work/workers/3f9c21ab.json     a worker: process, machine, and a count that grows as long as it lives
    work/commands/77d01e5b.json    a command that started workers, or will finish the output: the same
    work/claims/000012.1           part 12 is that worker's; of several files the one of the highest number counts

Claims are made exclusively (`O_EXCL`), which NFS and Lustre promise while their locks may be off: of several workers
that want a part exactly one gets it. A worker whose process is gone, or whose count does not grow while it is watched,
is dead, and its part can be claimed by the next number. Clocks of machines are not compared. A worker that was only
asleep may finish a part that has been given to another one; then whoever is first counts, and both computed the same.
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
from esmshard.parallel.alive import machine, process_lives, process_start

BEAT = 5.0
"""Seconds between two signs of life."""
PATIENCE = 5
"""Beats without a sign of life after which a worker counts as dead: some may come late, and one be lost."""


class Command:
    """One process that shows in a directory that it is alive, from `with` to its end.

    Args:
        work: the directory of claims, commands and workers; made if it is not there, in one that is.
        beat: seconds between two signs of life.
    """

    folder = "commands"
    """Where its note lies."""

    def __init__(self, work: Path, *, beat: float = BEAT) -> None:
        self._notes = work / self.folder
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
        # What another one's count was, and since when it has been that.
        self._watched: dict[str, tuple[int, float]] = {}

    def __enter__(self) -> Self:
        # Not its parents: another worker may have finished, and removed them.
        for directory in (self._notes.parent, self._notes):
            directory.mkdir(exist_ok=True)
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # it stays, and shows no sign of life
            self._path(self.name).unlink()

    def lives(self, note: Mapping[str, Any]) -> bool | None:
        """Whether the process that wrote a note lives; None if it has to be watched longer to tell.

        Args:
            note: as it stands now; of a process of another machine it is compared with the one of the last call.
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
            with contextlib.suppress(OSError):  # a hiccup of the file system; soon again
                self._tell()

    def _tell(self) -> None:
        path = self._path(self.name)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._note), encoding="utf-8")
        scratch.replace(path)


class Worker(Command):
    """One process that claims what is to be done in a directory, from `with` to its end. Arguments as of `Command`."""

    folder = "workers"

    def __init__(self, work: Path, *, beat: float = BEAT) -> None:
        super().__init__(work, beat=beat)
        self._claims = work / "claims"

    def __enter__(self) -> Self:
        for directory in (self._claims.parent, self._claims):
            directory.mkdir(exist_ok=True)
        return super().__enter__()

    def count(self, rows: int, residues: int) -> None:
        """Add what was finished; others read it with the next sign of life."""
        self._note["rows"] += rows
        self._note["residues"] += residues

    def claim(self, what: str) -> bool:
        """Whether it is this worker's from now on. False if a living one, or one that may live, has it."""
        number, holder = self._holder(what)
        if holder == self.name:
            return True
        if number and self.holder_lives(holder) is not False:
            return False
        return publish(self._claims / f"{what}.{number + 1}", self.name)

    def succeeds(self, what: str) -> bool:
        """Whether it was another worker's before."""
        return self._holder(what)[0] > 1

    def holder_lives(self, name: str) -> bool | None:
        """Whether another worker lives; None if it has to be watched longer to tell."""
        note = _read(self._path(name))
        return False if note is None else self.lives(note)  # written before its first claim, removed when it left

    def settle(self, wanted: Callable[[], list[str]]) -> bool:
        """Wait until it is known of the holders of what is wanted whether they live.

        Returns:
            Whether one of them is dead, and its claim free. False as well if nothing is wanted any more.
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
            time.sleep(self._beat / 20)
        return False

    def _holder(self, what: str) -> tuple[int, str]:
        """Number and worker of the claim that counts; 0 and nobody if there is none."""
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
    """Write a file that is there as a whole or not at all; False if there is one already."""
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
        except OSError:  # no hard links here; then two that come at the same moment are not told apart
            if path.exists():
                return False
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return True


def workers(work: Path) -> Iterator[dict[str, Any]]:
    """What all workers of a directory last said of themselves."""
    yield from _notes(work / Worker.folder)


def at_work(work: Path, say: Callable[[str], None]) -> str | None:
    """Who is at work in a directory, as `process 4711 on node07`; None if nobody is.

    Processes of this machine are known at once. One of another machine, or of another container of this one, is watched
    until it shows a sign of life, or has shown none for PATIENCE of its beats.

    Args:
        work: the directory of claims, commands and workers.
        say: is told that somebody is being watched.
    """
    watcher, told = Command(work), False
    while True:
        notes = [*_notes(work / Command.folder), *_notes(work / Worker.folder)]
        states = [watcher.lives(note) for note in notes]
        for note, state in zip(notes, states, strict=True):
            if state:
                return f"process {note['pid']} on {note['host']}"
        if None not in states:
            return None
        note = notes[states.index(None)]
        if not told:
            patience = PATIENCE * max(BEAT, note["beat_s"])
            say(f"{work.parent}: looking whether {note['host']} still works on it, for {patience:.0f} s at most")
            told = True
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
