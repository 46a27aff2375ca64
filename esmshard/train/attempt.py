"""The records of one attempt at a run: who holds its directory, how it stands, what was measured."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from esmshard.checkpoint import manifest
from esmshard.errors import InputError, UsageError
from esmshard.parallel.preemption import Preempted
from esmshard.progress import say
from esmshard.train import goodput, status
from esmshard.train.lease import Lease

METRICS = "metrics.jsonl"


class Attempt:
    """Holds the run directory and writes `metrics.jsonl` and `status.json`, on the first rank; on others, nothing.

    Used as `with Attempt(...) as attempt:` around the whole run; whatever ends it becomes the attempt's last line and
    the run's status, unless the command was refused before anything began.

    Args:
        out: directory of the run.
        started: when the command was, in seconds since 1970.
    """

    def __init__(self, out: Path, started: float) -> None:
        self._out, self._steps, self._started = out, 0, started
        self._lease: Lease | None = None
        self._step, self._number, self._first_step, self._begun = 0, 0, True, False

    def __enter__(self) -> "Attempt":
        return self

    def open(self, is_first: bool, steps: int) -> None:
        """Take the lease of the run directory, for so many steps. `InputError` if another run holds it."""
        self._steps = steps
        if is_first:
            lease = Lease(self._out, say)
            lease.__enter__()
            self._lease = lease
            if (before := self._before()) is not None:
                self._step, self._number = before["step"], before["attempt"]

    def _before(self) -> status.Status | None:
        try:
            return status.read(self._out)
        except InputError:  # cut off by a crash; it is written anew
            return None

    def check(self) -> None:
        """Raise `InputError` if another run has taken the directory over: this one must not write there any more."""
        if self._lease is not None:
            self._lease.check()

    def begin(self, done: int, validated: bool = True) -> None:
        """Go on after `done` steps: lines of later ones leave metrics.jsonl, for they will be written again.

        So does a validation after that step, unless the checkpoint says that it is done.
        """
        if self._lease is None:
            return
        path = self._out / METRICS
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        kept, lost, seconds = goodput.cut(goodput.parse(text), done, validated)
        begun = goodput.attempt_line(
            kept, started=self._started, now=time.time(), from_step=done, steps_lost=lost, seconds_lost=seconds
        )
        status.replace_text(path, "".join(json.dumps(line) + "\n" for line in [*kept, begun]))
        self._step, self._number = done, begun["attempt"]
        self.tell("running", "training")

    def write(self, **line: Any) -> None:
        """Append a line to metrics.jsonl."""
        if self._lease is None:
            return
        line["time"] = round(time.time(), 3)
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}  # as in JSON
        with open(self._out / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(known) + "\n")

    def step_done(self, line: Mapping[str, Any]) -> None:
        """Write the line of an optimizer step."""
        self.write(**line)
        self._step = int(line["step"])
        if self._first_step:
            self._first_step = False
            self.write(event="first_step", seconds=round(time.time() - self._started, 3))

    def tell(self, state: status.State, message: str, exit_code: int | None = None) -> None:
        """Write status.json."""
        if self._lease is None:
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
            exit_code=exit_code,
        )

    def summary(self) -> str:
        """Goodput of all attempts so far, in one line."""
        return goodput.sentence(goodput.summary(goodput.parse((self._out / METRICS).read_text(encoding="utf-8"))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is None:
            return
        ended: tuple[status.State, str, int]
        if error is None:
            ended = ("done", "trained and evaluated", 0)
        elif isinstance(error, Preempted):
            ended = ("preempted", str(error), error.exit_code)
        elif isinstance(error, InputError):
            ended = ("failed", str(error), error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            ended = ("failed", "interrupted", 130)
        else:
            ended = ("failed", f"{type(error).__name__}: {error}".splitlines()[0], 1)
        state, message, exit_code = ended
        # A command that is refused, such as --resume with another learning rate, changes nothing of how the run stands.
        refused = isinstance(error, UsageError) and not self._begun and self._before() is not None
        try:
            self._lease.check()
            if not refused:
                self.write(event="end", state=state)
                self.tell(state, message, exit_code)
        except (InputError, OSError):  # the directory is another run's now, or full: the error on its way says more
            if error is None:
                raise
        finally:
            self._lease.__exit__(kind, error, trace)
