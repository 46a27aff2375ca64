"""The start and the end of the process that feeds the trackers of a run.

`esmshard.train.records.tracker` is the process: it follows metrics.jsonl and passes on what it reads
(docs/watching.md). So a tracker that is slow, hangs, crashes or has no network does not slow the training down. The
first rank starts the process, prints its messages, and at the end closes a pipe and waits for some seconds.
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
from esmshard.launch.preemption import Preempted
from esmshard.progress import say

LOG = "tracking.log"
BOOKS = "tracking.json"
"""The file that records how far each tracker has come, and the id of the run at W&B."""
TRACKED = (BOOKS, LOG, "tensorboard", "wandb")
"""The files that trackers leave in the directory of a run."""

WAIT_DONE = 15.0
"""Seconds to wait for the last lines of a run that is done. W&B needs some seconds to connect."""
WAIT_STOPPED = 5.0
"""Seconds to wait for the last lines of a run that was asked to stop or has failed. Schedulers kill processes about 30
s after SIGTERM, and the checkpoint is written first.
"""
FINISH = 60.0
"""Seconds after the end of the run at which the process ends itself, whatever a tracker is waiting for."""

# accelerate reads all of these variables; the process must see itself as a single process without GPUs.
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
_PREFIXES = ("MASTER_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PMI", "OMPI_", "MV2_", "MPI_", "ESMSHARD_")

# Schedulers send these signals to all processes of a job, but the last lines of a run are written after the signals.
_HELD = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP") if hasattr(signal, name)]


def check_installed(trackers: Sequence[str]) -> None:
    """Raise `UsageError` if the package of a tracker is not installed."""
    for name in trackers:
        missing = [package for package in ("accelerate", name) if not _is_there(package)]
        if missing:
            extra = "track" if name == "tensorboard" else name
            raise UsageError(f"track: {name} needs {' and '.join(missing)}; pip install 'esmshard[{extra}]'")


def _is_there(package: str) -> bool:
    """Whether a package is installed. A directory of that name in the working directory does not count."""
    found = find_spec(package)
    return found is not None and found.origin is not None


class Tracking:
    """The process for the trackers. Use it as `with Tracking(...) as tracking:` around an `Attempt`, whose last line it
    passes on.

    Args:
        out: the directory of the run.
        trackers: the trackers of the recipe. Without trackers no process is started.
    """

    def __init__(self, out: Path, trackers: Sequence[str]) -> None:
        self._out, self._trackers = out, trackers
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: threading.Thread | None = None
        self._ending = self._left = False

    def __enter__(self) -> "Tracking":
        return self

    def begin(self, done: int) -> None:
        """Start the process, on the first rank, once metrics.jsonl is cut to `done` steps. Raises no `Exception`."""
        if not self._trackers:
            return
        command = [sys.executable, "-m", "esmshard.train.records.tracker", str(self._out), str(done), str(FINISH)]
        # The child inherits the mask of blocked signals, so none of these signals can end it at any moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD) if hasattr(signal, "pthread_sigmask") else None
        try:
            with open(self._out / LOG, "ab") as log:
                self._process = subprocess.Popen(  # noqa: S603  # our own module
                    [*command, *self._trackers],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=clean(os.environ),
                    start_new_session=True,  # Ctrl-C goes to the run only
                )
            self._relay = threading.Thread(target=self._pass_on, args=(self._process,), name="tracking", daemon=True)
            self._relay.start()
        except (OSError, RuntimeError) as error:
            say(f"track: {', '.join(self._trackers)} could not be started ({error}); the run goes on without")
        finally:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _pass_on(self, process: "subprocess.Popen[bytes]") -> None:
        """Print the messages of the process, and report when it has ended. A thread runs this."""
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
        except (OSError, Preempted):  # the run was asked to stop while it waited
            pass


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that describe ranks, and without GPUs."""
    kept = {k: v for k, v in environment.items() if k not in _RANK and not k.startswith(_PREFIXES)}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
