"""The records of one attempt at a run: the lock of its directory, its status, its metrics."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from esmshard.checkpoint import manifest
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.files import replace_text
from esmshard.parallel.preemption import Preempted
from esmshard.train.records import goodput, status
from esmshard.train.records.lock import Lock
from esmshard.train.records.tracking import Tracking

METRICS = "metrics.jsonl"

MOST_IDLE = 3
"""The number of attempts in a row without a step after which a run has failed. Otherwise a scheduler could restart it
forever.
"""


class Attempt:
    """The lock of the run directory, `metrics.jsonl` and `status.json`, on the first rank. On other ranks nothing is
    written.

    Use it as `with Attempt(...) as attempt:` around the whole run. The error that ends the run, if any, becomes the
    last line and the status, unless the command was refused before anything began.

    Args:
        out: the directory of the run.
        started: the time at which the command began, in seconds since 1970.
        trackers: the trackers that show the lines of `metrics.jsonl`, too.
    """

    def __init__(self, out: Path, started: float, trackers: Sequence[str] = ()) -> None:
        self._out, self._steps, self._started = out, 0, started
        self._tracking = Tracking(out, trackers)
        self._lock: Lock | None = None
        self._step, self._number, self._first_step, self._begun = 0, 0, True, False
        self._idle = 0
        self.ending = "trained and evaluated"
        """The message of a run that is done."""

    def __enter__(self) -> "Attempt":
        return self

    def open(self, is_first: bool, steps: int, *, take_over: bool = False) -> None:
        """Take the lock of the run directory (see `Lock`); `steps` is the recipe's number. `InputError` if another run
        holds it.
        """
        self._steps = steps
        if is_first:
            lock = Lock(self._out, take_over=take_over)
            lock.__enter__()
            self._lock = lock
            if (before := self._before()) is not None:
                self._step, self._number = before["step"], before["attempt"]
                self._idle = before["idle"] if before["state"] == "preempted" else 0

    def _before(self) -> status.Status | None:
        try:
            return status.read(self._out)
        except InputError:  # a crash left half a file; it is written again
            return None

    def check(self) -> None:
        """Raise `InputError` if another run has taken the directory over. This run must then no longer write to it."""
        if self._lock is not None:
            self._lock.check()

    def begin(self, done: int, validated: bool = True) -> None:
        """Begin after `done` steps. The lines of later steps leave metrics.jsonl, because those steps are taken again.

        The line of the validation after step `done` leaves it too, unless the checkpoint records that this validation
        is done.
        """
        if self._lock is None:
            return
        path = self._out / METRICS
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        kept, lost, seconds = goodput.cut(goodput.parse(text), done, validated)
        begun = goodput.attempt_line(
            kept, started=self._started, now=time.time(), from_step=done, steps_lost=lost, seconds_lost=seconds
        )
        replace_text(path, "".join(json.dumps(line) + "\n" for line in [*kept, begun]))
        self._step, self._number = done, begun["attempt"]
        self._tracking.begin(done, lost)
        self.report("running", "training")

    def write(self, **line: Any) -> None:
        """Append a line to metrics.jsonl."""
        if self._lock is None:
            return
        line["time"] = round(time.time(), 3)
        # JSON has no NaN
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with open(self._out / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(known) + "\n")
        self._tracking.log(known)

    def step_done(self, line: Mapping[str, Any]) -> None:
        """Write the line of an optimizer step."""
        self.write(**line)
        self._step = int(line["step"])
        if self._first_step:
            self._first_step, self._idle = False, 0
            self.write(event="first_step", seconds=round(time.time() - self._started, 3))

    def report(self, state: status.State, message: str, exit_code: int | None = None) -> None:
        """Write status.json."""
        if self._lock is None:
            return
        self._begun = True
        newest = manifest.pointed(self._out / "checkpoints", "LATEST")
        status.write(
            self._out,
            state=state,
            step=self._step,
            steps=self._steps,
            attempt=self._number,
            message=message,
            checkpoint=newest.name if newest else None,
            started=self._started,
            idle=self._idle,
            exit_code=exit_code,
        )

    def summary(self) -> str:
        """Return the goodput of all attempts so far, in one line."""
        return goodput.sentence(goodput.summary(goodput.parse((self._out / METRICS).read_text(encoding="utf-8"))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        stopped = error
        if isinstance(error, Preempted) and self._first_step:
            self._idle += 1
            if self._idle >= MOST_IDLE:
                error = InputError(
                    f"{self._out}: {self._idle} starts in a row were asked to stop before they had done a step (now: "
                    f"{error}); give the job more time, then start again with --resume auto"
                )
                kind = type(error)
        ended: tuple[status.State, str, int]
        if error is None:
            ended = ("done", self.ending, ExitCode.DONE)
        elif isinstance(error, Preempted):
            ended = ("preempted", str(error), error.exit_code)
        elif isinstance(error, InputError):
            ended = ("failed", str(error), error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            ended = ("failed", "interrupted", ExitCode.INTERRUPTED)
        else:
            ended = ("failed", f"{type(error).__name__}: {error}".splitlines()[0], ExitCode.CRASHED)
        state, message, exit_code = ended
        # A refused command, such as --resume with another learning rate, leaves the status of the run unchanged.
        refused = isinstance(error, UsageError) and not self._begun and self._before() is not None
        try:
            self._lock.check()
            if not refused:
                self.write(event="end", state=state)
                self.report(state, message, exit_code)
                self._tracking.end(state, self._step)
        # the directory belongs to another run now, or the disk is full; the error being raised is more useful
        except (InputError, OSError):
            if error is None:
                raise
        finally:
            self._lock.__exit__(kind, error, trace)
        if error is not None and error is not stopped:
            raise error from stopped
