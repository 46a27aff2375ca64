"""Claims of workers on the parts of an output in a bucket. They need to share nothing but the bucket.

    work/workers/3f9c21ab.json, work/claims/000012.1    as on a disk, see `esmshard.embed.workers.claims`

An object with the number of the next claim is created only if its name is free, so exactly one worker gets a part.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from esmshard.embed.store.remote_store import RemoteStore
from esmshard.embed.workers.claims import BEAT, Worker, first_alive
from esmshard.errors import InputError
from esmshard.files import parse_json
from esmshard.remote import RemoteDirectory

PAUSE = 1.0
"""Seconds between two looks at other workers: each look is some requests."""


def worker_of(directory: Path, beat: float = BEAT) -> Worker:
    """Return a worker of an unfinished store, which claims parts where its output is: on a disk or in a bucket.

    Args:
        directory: `OUT.partial`, or the local directory of an output in a bucket.
        beat: seconds between two beats on this machine.
    """
    store = RemoteStore.of(directory)
    return Worker(directory / "work", beat=beat) if store is None else RemoteWorker(directory / "work", store, beat)


class RemoteWorker(Worker):
    """A worker whose claims lie in a bucket. Its note lies there and, with more beats, on this machine.

    Args:
        work: the local directory of notes.
        store: the output.
        beat: seconds between two beats on this machine, for the progress of the command.
    """

    _active: ClassVar[set[str]] = set()
    """The workers of this process that have not ended. One that lost the bucket could not remove its note there."""

    def __init__(self, work: Path, store: RemoteStore, beat: float = BEAT) -> None:
        super().__init__(work, beat=beat)
        self._place = store.place
        self._told: float | None = None
        """The time of the last beat in the bucket; None before the first one."""
        self._holders: dict[str, str] = {}
        """The worker of each claim. Claims never change."""

    def __enter__(self) -> Self:
        self._active.add(self.name)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._active.discard(self.name)
        with contextlib.suppress(InputError):  # the note stays, but its count no longer grows
            self._place.remove([self._key(self.name)])

    def lives(self, note: Mapping[str, Any]) -> bool | None:
        """See `Command.lives`."""
        mine = ("machine", "pid", "process_start")
        if all(note[key] == self._note[key] for key in mine):
            return note["name"] in self._active
        return super().lives(note)

    def _tell(self) -> None:
        super()._tell()
        now, first = time.monotonic(), self._told is None
        if self._told is not None and now - self._told < 0.9 * BEAT:
            return
        try:
            self._place.write(self._key(self.name), json.dumps({**self._note, "beat_s": BEAT}).encode())
        except InputError:  # the next beat tries again
            if first:
                raise
        else:
            self._told = now

    @property
    def _pause(self) -> float:
        return PAUSE

    def _create(self, claim: str) -> bool:
        created = self._place.create(f"work/claims/{claim}", self.name.encode())
        if created:
            self._holders[claim] = self.name
        else:
            self._look()
        return created

    def _note_of(self, name: str) -> dict[str, Any] | None:
        return notes(self._place, [self._key(name)]).get(self._key(name))

    def _holder(self, what: str) -> tuple[int, str]:
        number = 0
        while f"{what}.{number + 1}" in self._holders:
            number += 1
        return number, self._holders.get(f"{what}.{number}", "")

    def settle(self, wanted: Callable[[], list[str]]) -> bool:
        """See `Worker.settle`."""

        def fresh() -> list[str]:
            self._look()
            return wanted()

        return super().settle(fresh)

    def _look(self) -> None:
        """Read the claims of other workers."""
        new = [key for key in self._place.listing("work/claims") if key.rpartition("/")[2] not in self._holders]
        for key, text in self._place.read(*new).items():
            self._holders[key.rpartition("/")[2]] = text.decode("ascii", "replace")

    def _key(self, name: str) -> str:
        return f"work/{self.folder}/{name or 'nobody'}.json"


def notes(place: RemoteDirectory, keys: list[str]) -> dict[str, dict[str, Any]]:
    """Return the notes of workers, by the names of their objects. Those that cannot be read are left out."""
    found = {}
    for key, data in place.read(*keys).items():
        with contextlib.suppress(ValueError):
            found[key] = parse_json(data.decode())
    return found


def at_work_in_bucket(store: RemoteStore, directory: Path, say: Callable[[str], None]) -> str | None:
    """Return a process that works on an output in a bucket; see `esmshard.embed.workers.claims.at_work`.

    Args:
        store: the output.
        directory: its local directory.
        say: called with a message when a process is being watched.
    """

    def read() -> list[dict[str, Any]]:
        return [*notes(store.place, [*store.place.listing(f"work/{Worker.folder}")]).values()]

    return first_alive(RemoteWorker(directory / "work", store), read, store.place.url, say)
