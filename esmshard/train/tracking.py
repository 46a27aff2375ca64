"""The trackers of a run are fed by a process of their own, which is started and ended here.

`esmshard.train.tracker` is that process: it follows metrics.jsonl, the truth, and passes on what it reads
(docs/watching.md). A tracker that is slow, hangs, crashes or has no network so costs the training nothing: the first
rank starts the process, prints what it says, and at the end closes a pipe and waits for some seconds.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from esmshard.errors import UsageError
from esmshard.parallel.preemption import Preempted
from esmshard.progress import say

LOG = "tracking.log"
BOOKS = "tracking.json"
"""How far each tracker has come, and the id of the run at W&B."""
TRACKED = (BOOKS, LOG, "tensorboard", "wandb")
"""What trackers leave in the directory of a run."""

WAIT_DONE = 15.0
"""Seconds for the last lines of a run that is done. To be online takes W&B some seconds."""
WAIT_STOPPED = 5.0
"""The same of a run that was asked to stop or has failed: schedulers kill some 30 s after SIGTERM, and the checkpoint
came first."""
FINISH = 60.0
"""Seconds after the end of the run after which the process ends itself, whatever a tracker is waiting for."""

# The process must take itself for a single one without GPUs, for accelerate looks at all of these.
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
_PREFIXES = ("MASTER_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PMI", "OMPI_", "MV2_", "MPI_", "ESMSHARD_")

# Schedulers send these to all processes of a job, and the last lines of a run come after them.
_HELD = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP") if hasattr(signal, name)]


def check_installed(trackers: Sequence[str]) -> None:
    """Raise `UsageError` if a tracker lacks its package."""
    for name in trackers:
        missing = [package for package in ("accelerate", name) if not _is_there(package)]
        if missing:
            extra = "track" if name == "tensorboard" else name
            raise UsageError(f"track: {name} needs {' and '.join(missing)}; pip install 'esmshard[{extra}]'")


def _is_there(package: str) -> bool:
    """A directory of that name in the working directory, as W&B leaves one, is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


class Tracking:
    """Used as `with Tracking(...) as tracking:` around an `Attempt`, whose last line it passes on, too.

    Args:
        out: directory of the run.
        trackers: of the recipe; with none, nothing is ever started.
    """

    def __init__(self, out: Path, trackers: Sequence[str]) -> None:
        self._out, self._trackers = out, trackers
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: threading.Thread | None = None
        self._ending = self._left = False

    def __enter__(self) -> "Tracking":
        return self

    def begin(self, done: int) -> None:
        """Start, on the first rank, when metrics.jsonl has been cut to `done` steps. Never raises an `Exception`."""
        if not self._trackers:
            return
        command = [sys.executable, "-m", "esmshard.train.tracker", str(self._out), str(done), str(FINISH)]
        # The mask is inherited: there is no moment at which the process could be ended by one of them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD) if hasattr(signal, "pthread_sigmask") else None
        try:
            with open(self._out / LOG, "ab") as log:
                self._process = subprocess.Popen(  # noqa: S603  # our own module
                    [*command, *self._trackers],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=clean(os.environ),
                    start_new_session=True,  # Ctrl-C is for the run
                )
            self._relay = threading.Thread(target=self._pass_on, args=(self._process,), name="tracking", daemon=True)
            self._relay.start()
        except (OSError, RuntimeError) as error:
            say(f"track: {', '.join(self._trackers)} could not be started ({error}); the run goes on without")
        finally:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _pass_on(self, process: "subprocess.Popen[bytes]") -> None:
        """Run by a thread: print what the process says, and that it is gone."""
        assert process.stdout is not None
        for line in process.stdout:
            if not self._left:
                say(f"track: {line.decode(errors='replace').rstrip()}")
        code = process.wait()
        if code and not self._left:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            rest = "" if self._ending else "; the run goes on without"
            say(f"track: the process for {', '.join(self._trackers)} {how}{rest}; see {self._out / LOG}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._ending = True
        try:
            self._process.stdin.close()
            self._process.wait(WAIT_DONE if error is None else WAIT_STOPPED)
            if self._relay is not None:
                self._relay.join(1.0)
        except subprocess.TimeoutExpired:
            self._left = True
            say(
                f"track: {', '.join(self._trackers)} did not finish in time, and may go on for {FINISH:.0f} s by "
                f"itself (process {self._process.pid}); the run has ended, and {self._out / 'metrics.jsonl'} is whole"
            )
        except (OSError, Preempted):  # asked to stop meanwhile, as it does
            pass


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what makes a process one of several, and without GPUs."""
    kept = {k: v for k, v in environment.items() if k not in _RANK and not k.startswith(_PREFIXES)}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
