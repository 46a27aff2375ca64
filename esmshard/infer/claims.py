"""Which worker computes which part. Workers may share nothing but a file system.

    work/workers/3f9c21ab.json     a worker: process, machine, and a count that grows as long as it lives
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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from esmshard.files import read_json
from esmshard.parallel.alive import machine, process_lives, process_start

BEAT = 5.0
"""Seconds between two signs of life."""
PATIENCE = 5
"""Beats without a sign of life after which a worker counts as dead: some may come late, and one be lost."""


class Worker:
    """One process at work in a directory, from `with` to its end.

    Args:
        work: the directory of claims and workers; made if it is not there, in one that is.
        beat: seconds between two signs of life.
    """

    def __init__(self, work: Path, *, beat: float = BEAT) -> None:
        self._claims, self._workers = work / "claims", work / "workers"
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
        self._thread = threading.Thread(target=self._keep_beating, name="worker", daemon=True)
        # What another worker's count was, and since when it has been that.
        self._watched: dict[str, tuple[int, float]] = {}

    def __enter__(self) -> "Worker":
        # Not its parents: another worker may have finished, and removed them.
        for directory in (self._claims.parent, self._claims, self._workers):
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

    def count(self, rows: int, residues: int) -> None:
        """Add what was finished; others read it with the next sign of life."""
        self._note["rows"] += rows
        self._note["residues"] += residues

    def claim(self, what: str) -> bool:
        """Whether it is this worker's from now on. False if a living one, or one that may live, has it."""
        number, holder = self._holder(what)
        if holder == self.name:
            return True
        if number and self.lives(holder) is not False:
            return False
        return publish(self._claims / f"{what}.{number + 1}", self.name)

    def succeeds(self, what: str) -> bool:
        """Whether it was another worker's before."""
        return self._holder(what)[0] > 1

    def lives(self, name: str) -> bool | None:
        """Whether another worker lives; None if it has to be watched longer to tell."""
        note = _read(self._path(name))
        if note is None:  # written before its first claim, removed when it left
            return False
        if note["machine"] == self._note["machine"]:
            here = process_lives(note["pid"], note["process_start"])
            if here is not None:
                return here
        now, before = time.monotonic(), self._watched.get(name)
        if before is None or before[0] != note["beats"]:
            self._watched[name] = (note["beats"], now)
            return None if before is None else True
        return None if now - before[1] < PATIENCE * max(self._beat, note["beat_s"]) else False

    def settle(self, wanted: Callable[[], list[str]]) -> bool:
        """Wait until it is known of the holders of what is wanted whether they live.

        Returns:
            Whether one of them is dead, and its claim free. False as well if nothing is wanted any more.
        """
        alive: set[str] = set()
        while names := wanted():
            for holder in {self._holder(what)[1] for what in names} - alive:
                state = self.lives(holder)
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

    def _path(self, name: str) -> Path:
        return self._workers / f"{name or 'nobody'}.json"

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
    directory = work / "workers"
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.suffix == ".json" and (note := _read(path)) is not None:
            yield note


def at_work(work: Path) -> bool:
    """Whether a process of this machine works in a directory; others cannot be seen at a glance."""
    here = machine()
    return any(note["machine"] == here and process_lives(note["pid"], note["process_start"]) for note in workers(work))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = read_json(path)
    except (OSError, ValueError):
        return None
    return note
