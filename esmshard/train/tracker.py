"""The process that passes metrics.jsonl on to TensorBoard and W&B, through accelerate's trackers.

    python -m esmshard.train.tracker OUT FROM_STEP SECONDS TRACKER...

`esmshard.train.tracking` starts it on the first rank, and says why it is a process. It ends when its standard input
does, or its parent, after the lines that are there by then; at the latest so many SECONDS later. Each tracker has a
thread, so that one that hangs does not hold up another.

OUT/tracking.json says how far each has come. What is redone after a crash is not shown twice: TensorBoard is told to
forget it (`purge_step`), and shows the new values; W&B cannot forget, and keeps the old ones.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from ruamel.yaml import YAML

from esmshard.files import read_json
from esmshard.train.points import Point, Reader, complete, on_test_split
from esmshard.train.tracking import BOOKS

POLL = 1.0
"""Seconds between two looks at metrics.jsonl."""
FLUSH = 2.0
"""Seconds that W&B keeps rows before it writes them."""
REOPEN = 3
"""How often W&B is begun again after its service was lost, such as to a signal that a scheduler sent to all."""
_SEVERAL = re.compile(r"seed-\d+(-fold-\d+)?|curve-[\d.]+")
"""Directories of runs that belong together."""
_STATES = {"done": 0, "preempted": 75}
"""Exit codes; that of all others is 1."""

Say = Callable[[str], None]


@dataclass
class Books:
    """Content of tracking.json."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _content: dict[str, Any] = field(default_factory=dict)

    def read(self, say: Say) -> None:
        """Once, at the start."""
        try:
            found = read_json(self.path)
            self._content = found if isinstance(found, dict) else {}
        except FileNotFoundError:
            pass
        except ValueError:
            say(f"{self.path}: damaged; all is shown again, by W&B as a new run")

    def of(self, name: str) -> dict[str, Any]:
        """The page of a tracker: `logged` and, of W&B, `id`."""
        with self._lock:
            page = self._content.get(name)
        return {"logged": {}, **page} if isinstance(page, dict) else {"logged": {}}

    def write(self, name: str, page: Mapping[str, Any]) -> None:
        """Replace a page; the file is the old one or the new one at any time."""
        with self._lock:
            self._content[name] = page
            work = self.path.with_name(f".tmp-{self.path.name}")
            work.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
            work.replace(self.path)


class Tracker(Protocol):
    """One of the services."""

    page: dict[str, Any]
    """Of the books."""
    lag: float
    """Seconds after which what it was given is safe from kill -9."""

    def open(self) -> None:
        """Begin, or go on."""

    def wants(self, point: Point) -> bool:
        """Whether it has not been shown."""

    def log(self, point: Point) -> None:
        """Show."""

    def finish(self, state: str) -> None:
        """End; the state is that of the run."""


class TensorBoard:
    """Event files in OUT/tensorboard."""

    lag = 0.0

    def __init__(self, out: Path, from_step: int, page: dict[str, Any]) -> None:
        self._out, self.page = out, page
        self._first = min(int(page["logged"].get("step", -1)) + 1, from_step)

    def open(self) -> None:
        """What lies there of later steps is told to be void."""
        from accelerate.tracking import TensorBoardTracker

        self._tracker = TensorBoardTracker("tensorboard", logging_dir=str(self._out), purge_step=self._first)
        self._tracker.start()
        recipe = (self._out / "recipe.yaml").read_text(encoding="utf-8")
        self._tracker.log({"recipe": "    " + recipe.replace("\n", "\n    ")}, step=self._first)  # code, in Markdown

    def wants(self, point: Point) -> bool:
        """All that is not void."""
        return point.step >= self._first

    def log(self, point: Point) -> None:
        """Single precision, as TensorBoard's scalars are."""
        self._tracker.log(dict(point.values), step=point.step, walltime=point.time)

    def finish(self, state: str) -> None:
        """Close the file."""
        self._tracker.log({"status": state}, step=None)
        self._tracker.finish()


class WandB:
    """A run at Weights & Biases, or its files in OUT/wandb; where and whose it is, its environment variables say."""

    lag = 2 * FLUSH

    def __init__(self, out: Path, page: dict[str, Any], say: Say) -> None:
        self._out, self.page, self._say = out, page, say
        self._opened, self._offline = 0, False
        self._group = out.parent.name if _SEVERAL.fullmatch(out.name) else None
        given = None if self._group else os.environ.get("WANDB_RUN_ID")  # a sweep's agent sets it
        self.page.setdefault("id", given or uuid.uuid4().hex[:12])
        self._before: dict[str, int] = {}

    def open(self) -> None:
        """Without key or network, its records stay in files, and a sentence says how to send them."""
        defaults = {
            "WANDB_CONSOLE": "off",  # the output of this process is nothing to keep
            "WANDB_INIT_TIMEOUT": "30",
            "WANDB_X_STATS_PID": str(os.getppid()),  # whose memory and load is shown
            "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": str(FLUSH),  # else 15
        }
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        if self._offline:
            self._start(mode="offline")
        else:
            try:
                self._start()
            except Exception as error:
                traceback.print_exc()
                self._offline = True
                self._teardown()
                self._start(mode="offline")
                reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
                self._say(
                    f"W&B is not online ({reason}); the records stay in {self._out / 'wandb'}. Set WANDB_API_KEY, or "
                    f"WANDB_MODE=offline to mean it, and send them with `wandb sync {self._out}/wandb/offline-run-*`"
                )
        self._run = self._tracker.tracker
        self._run.define_metric("*", step_metric="step")  # its own count never goes back, ours may
        self._before = dict(self.page["logged"])
        if not (self._opened or self._offline or getattr(self._run, "offline", True)) and (url := self._run.url):
            self._say(f"W&B run {url}")
        self._opened += 1

    def _start(self, **options: Any) -> None:
        from accelerate.tracking import WandBTracker

        if "WANDB_NAME" not in os.environ:
            options["name"] = self._out.name
        if self._group and "WANDB_RUN_GROUP" not in os.environ:
            options["group"] = self._group
        project = os.environ.get("WANDB_PROJECT") or "esmshard"
        self._tracker = WandBTracker(project, id=self.page["id"], resume="allow", dir=str(self._out), **options)
        self._tracker.start()
        recipe = YAML(typ="safe").load((self._out / "recipe.yaml").read_text(encoding="utf-8"))
        self._tracker.store_init_configuration(recipe)

    def _teardown(self) -> None:
        """A run that did not begin blocks the next one of the same id."""
        import wandb

        try:
            wandb.teardown()
        except Exception:  # its service is gone already
            traceback.print_exc()

    def wants(self, point: Point) -> bool:
        """What is redone is known already: on as many processes the values are the same."""
        return point.number > self._before.get(point.kind, -1)

    def log(self, point: Point) -> None:
        """As a row of its own, with its step."""
        row = {"step": point.step, **point.values}
        try:
            self._tracker.log(row)
        except Exception:
            if self._opened > REOPEN:
                raise
            traceback.print_exc()
            self._teardown()
            self.open()
            self._tracker.log(row)

    def finish(self, state: str) -> None:
        """Its own names for states: finished, preempted, failed."""
        self._run.summary["status"] = state
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_STATES.get(state, 1))


class Follower(threading.Thread):
    """Reads metrics.jsonl for one tracker, until `ended` is set."""

    def __init__(self, name: str, tracker: Tracker, out: Path, books: Books, ended: threading.Event, say: Say) -> None:
        super().__init__(name=name, daemon=True)
        self._tracker, self._out, self._books, self._ended, self._say = tracker, out, books, ended, say

    def run(self) -> None:
        """Whatever happens to one tracker is one sentence; nothing else depends on it."""
        try:
            self._follow()
        except BaseException as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"{self.name} has failed ({reason}); the run goes on without, see {self._out / 'tracking.log'}")

    def _follow(self) -> None:
        reader, page = Reader(), self._tracker.page
        with open(self._out / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            self._tracker.open()
            self._books.write(self.name, page)
            # The books must not tell of what is lost after kill -9: better a point twice than not at all.
            waiting: deque[tuple[float, dict[str, int]]] = deque()
            written, last = dict(page["logged"]), False
            while not last:
                last = self._ended.is_set()
                if not self._is_ours(file):
                    return  # another run has begun in this directory
                for line in complete(file):
                    point = reader.point(line)
                    if point is None or not point.values or not self._tracker.wants(point):
                        continue
                    self._tracker.log(point)
                    page["logged"][point.kind] = max(point.number, page["logged"].get(point.kind, -1))
                waiting.append((time.monotonic(), dict(page["logged"])))
                safe = written
                while waiting and time.monotonic() >= waiting[0][0] + self._tracker.lag:
                    safe = waiting.popleft()[1]
                if safe != written:
                    self._books.write(self.name, {**page, "logged": safe})
                    written = safe
                self._ended.wait(POLL)
            if reader.state == "done":
                self._tracker.log(Point("test", reader.step, reader.step, on_test_split(self._out), time.time()))
            self._tracker.finish(reader.state)
            if self._is_ours(file):  # that may have taken long
                self._books.write(self.name, page)

    def _is_ours(self, file: IO[str]) -> bool:
        """A run that goes on replaces the file, one that starts again removes it."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self._out / "metrics.jsonl").stat())
        except OSError:
            return False


def main(out: Path, from_step: int, seconds: float, names: list[str]) -> int:
    """What the process does."""
    # Trackers print and ask; what they print goes into the log, and there is nobody to ask.
    told, pipe = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    def say(sentence: str) -> None:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
        try:
            os.write(told, f"{sentence}\n".encode())
        except OSError:  # the run is gone
            pass

    parent, ended = os.getppid(), threading.Event()

    def listen() -> None:
        while os.read(pipe, 64):
            pass
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    from accelerate import PartialState

    PartialState(cpu=True)  # what the trackers ask for their rank
    books = Books(out / BOOKS)
    books.read(say)
    trackers: dict[str, Tracker] = {
        name: TensorBoard(out, from_step, books.of(name)) if name == "tensorboard" else WandB(out, books.of(name), say)
        for name in names
    }
    followers = [Follower(name, tracker, out, books, ended, say) for name, tracker in trackers.items()]
    for follower in followers:
        follower.start()
    while any(follower.is_alive() for follower in followers) and not ended.wait(POLL):
        if os.getppid() != parent:  # its pipe may be held by a child of its own
            ended.set()
    until = time.monotonic() + seconds
    for follower in followers:
        follower.join(max(0.0, until - time.monotonic()))
    late = [follower.name for follower in followers if follower.is_alive()]
    if late:
        say(f"{', '.join(late)} did not finish within {seconds:g} s of the end of the run")
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
