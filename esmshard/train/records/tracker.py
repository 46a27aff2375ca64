"""The process that passes metrics.jsonl to TensorBoard and W&B, through accelerate's trackers.

    python -m esmshard.train.records.tracker OUT FROM_STEP SECONDS TRACKER...

`esmshard.train.records.tracking` starts this process on the first rank, and explains why it is a process. The process
ends when its standard input or its parent ends, after it has passed on all lines written until then, and SECONDS later
at the latest. Each tracker has a thread, so a tracker that hangs does not delay another.

OUT/tracking.json records how far each tracker has come. Steps that are repeated after a crash are not shown twice:
TensorBoard drops the old values (`purge_step`) and shows the new ones; W&B cannot drop values and keeps the old ones.
"""

import os
import re
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ruamel.yaml import YAML

from esmshard.files import read_json, replace_json
from esmshard.train.records.tracker_values import Point, TrackedFileReader, complete, on_test_split
from esmshard.train.records.tracking import BOOKS

POLL = 1.0
"""Seconds between two looks at metrics.jsonl."""
FLUSH = 2.0
"""Seconds for which W&B holds rows before it writes them."""
REOPEN = 3
"""How often W&B is started again after its service has ended, for example by a signal that a scheduler sent to all."""
_SEVERAL = re.compile(r"seed-\d+(-fold-\d+)?|curve-[\d.]+")
"""The names of run directories that belong to one experiment."""
_STATES = {"done": 0, "preempted": 75}
"""Exit codes by state; the exit code of other states is 1."""

Say = Callable[[str], None]


class Books:
    """The content of tracking.json: of each tracker `logged`, the last number of each kind of point, and W&B's `id`."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._lock = path, threading.Lock()
        self._content: dict[str, Any] = {}
        try:
            found = read_json(path)
            self._content = found if isinstance(found, dict) else {}
        except FileNotFoundError:
            pass
        except ValueError:
            say(f"{path}: damaged; all is shown again, by W&B as a new run")

    def of(self, name: str) -> dict[str, Any]:
        """Return the entry of a tracker."""
        page = self._content.get(name)
        return {"logged": {}, **(page if isinstance(page, dict) else {})}

    def write(self, name: str, page: Mapping[str, Any]) -> None:
        """Replace the entry of a tracker."""
        with self._lock:
            self._content[name] = page
            replace_json(self._path, self._content)


class TensorBoard:
    """Event files in OUT/tensorboard."""

    lag = 0.0
    """Seconds after which a logged point survives kill -9."""

    def __init__(self, out: Path, from_step: int, page: dict[str, Any]) -> None:
        self._out, self.page = out, page
        self._first = min(int(page["logged"].get("step", -1)) + 1, from_step)

    def open(self) -> None:
        """Open the event files, and mark points of later steps in them as void."""
        from accelerate.tracking import TensorBoardTracker

        self._tracker = TensorBoardTracker("tensorboard", logging_dir=str(self._out), purge_step=self._first)
        self._tracker.start()
        recipe = (self._out / "recipe.yaml").read_text(encoding="utf-8")
        # indented text is code in Markdown
        self._tracker.log({"recipe": "    " + recipe.replace("\n", "\n    ")}, step=self._first)

    def wants(self, point: Point) -> bool:
        """Accept every point, since void points are hidden."""
        return point.step >= self._first

    def log(self, point: Point) -> None:
        """Write a point in single precision, as TensorBoard's scalars are."""
        self._tracker.log(dict(point.values), step=point.step, walltime=point.time)

    def finish(self, state: str) -> None:
        """Close the event file."""
        self._tracker.log({"status": state}, step=None)
        self._tracker.finish()


class WandB:
    """A run at Weights & Biases, or its files in OUT/wandb. Environment variables set project, owner and mode."""

    lag = 2 * FLUSH

    def __init__(self, out: Path, page: dict[str, Any], say: Say) -> None:
        self._out, self.page, self._say = out, page, say
        self._opened, self._offline = 0, False
        self._group = out.parent.name if _SEVERAL.fullmatch(out.name) else None
        given = None if self._group else os.environ.get("WANDB_RUN_ID")  # an agent of a W&B sweep sets this id
        self.page.setdefault("id", given or uuid.uuid4().hex[:12])
        self._before: dict[str, int] = {}

    def open(self) -> None:
        """Begin the W&B run. Without key or network the records stay in files, and a message says how to upload."""
        os.environ.setdefault("WANDB_CONSOLE", "off")  # the output of this process is not worth keeping
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
        os.environ.setdefault("WANDB_X_STATS_PID", str(os.getppid()))  # W&B shows memory and load of this process
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", str(FLUSH))  # the default is 15
        try:
            self._start()
        except Exception as error:
            if self._offline:
                raise
            traceback.print_exc()
            self._offline = True
            self._teardown()
            self._start()
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            self._say(
                f"W&B is not online ({reason}); the records stay in {self._out / 'wandb'}. Set WANDB_API_KEY, or "
                f"WANDB_MODE=offline to mean it, and send them with `wandb sync {self._out}/wandb/offline-run-*`"
            )
        self._run = self._tracker.tracker
        self._run.define_metric("*", step_metric="step")  # W&B's own step count never decreases, ours may
        self._before = dict(self.page["logged"])
        if not (self._opened or self._offline or getattr(self._run, "offline", True)) and (url := self._run.url):
            self._say(f"W&B run {url}")
        self._opened += 1

    def _start(self) -> None:
        from accelerate.tracking import WandBTracker

        options = {"mode": "offline"} if self._offline else {}
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
        """End W&B's service, since a W&B run that failed to begin blocks the next one of the same id."""
        import wandb

        try:
            wandb.teardown()
        except Exception:  # the service has ended already
            traceback.print_exc()

    def wants(self, point: Point) -> bool:
        """Reject repeated steps. On the same number of processes the values are the same."""
        return point.number > self._before.get(point.kind, -1)

    def log(self, point: Point) -> None:
        """Log a point as one row that includes its step."""
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
        """End the W&B run with its state: finished, preempted or failed."""
        self._run.summary["status"] = state
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_STATES.get(state, 1))


class Follower(threading.Thread):
    """A thread that reads metrics.jsonl for one tracker until `ended` is set."""

    def __init__(
        self, name: str, tracker: TensorBoard | WandB, out: Path, books: Books, ended: threading.Event, say: Say
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._tracker, self._out, self._books, self._ended, self._say = tracker, out, books, ended, say

    def run(self) -> None:
        """Follow the file. A failure of the tracker becomes one message, and nothing else depends on it."""
        try:
            self._follow()
        except BaseException as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"{self.name} has failed ({reason}); the run goes on without, see {self._out / 'tracking.log'}")

    def _follow(self) -> None:
        reader, page = TrackedFileReader(), self._tracker.page
        with open(self._out / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            self._tracker.open()
            self._books.write(self.name, page)
            # tracking.json must not list what kill -9 would lose: to show a point twice is better than to lose it.
            # `noted` was logged at the time `since`, and is written once the tracker's lag has passed.
            written = noted = dict(page["logged"])
            since, last = time.monotonic(), False
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
                if noted == written:
                    noted, since = dict(page["logged"]), time.monotonic()
                if noted != written and time.monotonic() >= since + self._tracker.lag:
                    self._books.write(self.name, {**page, "logged": noted})
                    written = noted
                self._ended.wait(POLL)
            if reader.state == "done":
                self._tracker.log(Point("test", reader.step, reader.step, on_test_split(self._out), time.time()))
            self._tracker.finish(reader.state)
            if self._is_ours(file):  # waiting may have taken long
                self._books.write(self.name, page)

    def _is_ours(self, file: IO[str]) -> bool:
        """Whether the file still belongs to this run. A run that continues replaces the file; a new run removes it."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self._out / "metrics.jsonl").stat())
        except OSError:
            return False


def main(out: Path, from_step: int, seconds: float, names: list[str]) -> int:
    """Run the process until the training run ends."""
    # Trackers print and prompt. Their output goes into the log, and nobody can answer a prompt.
    output, pipe = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    def say(sentence: str) -> None:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
        try:
            os.write(output, f"{sentence}\n".encode())
        except OSError:  # the parent has ended
            pass

    parent, ended = os.getppid(), threading.Event()

    def listen() -> None:
        while os.read(pipe, 64):
            pass
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    from accelerate import PartialState

    PartialState(cpu=True)  # the trackers read their rank from this object
    books = Books(out / BOOKS, say)
    followers = []
    for name in names:
        page = books.of(name)
        tracker = TensorBoard(out, from_step, page) if name == "tensorboard" else WandB(out, page, say)
        followers.append(Follower(name, tracker, out, books, ended, say))
    for follower in followers:
        follower.start()
    while any(follower.is_alive() for follower in followers) and not ended.wait(POLL):
        if os.getppid() != parent:  # a child of the parent may still hold the pipe
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
