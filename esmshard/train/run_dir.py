"""The records in a run's directory: lock, `status.json`, `metrics.jsonl`, and what `esmshard status` prints of them.

Only the first rank writes here. Times are in seconds since 1970. Lines of `metrics.jsonl` are optimizer steps,
validations (`split`) and these events:

    {"event": "attempt", "attempt": 2, "started": T, "time": T, "from_step": 100, "steps_lost": 7, "seconds_lost": 3.5}
    {"event": "first_step", "seconds": 41.2, "time": T}
    {"event": "checkpoint", "step": 110, "stall_s": 0.2, "time": T}
    {"event": "end", "state": "preempted", "time": T}
"""

import json
import math
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict

from pydantic import BaseModel

from esmshard.checkpoint import manifest
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.io.paths import lives, read_json, replace_json, replace_text
from esmshard.parallel.launch import LAUNCH, TRIAL
from esmshard.parallel.preemption import Preempted
from esmshard.progress import duration, say
from esmshard.train.tracking import Tracking

LOCK, STATUS, METRICS = "lock.json", "status.json", "metrics.jsonl"
SWEEP = "sweep.json"
"""The state of a sweep (`esmshard.train.search`)."""

TAIL = 1 << 18
"""The bytes at the end of metrics.jsonl in which the last step is looked for. A line of 64 ranks has 5 KB."""

State = Literal["running", "preempted", "done", "failed"]
EXIT_CODES: Mapping[State, int] = {
    "failed": ExitCode.FAILED,
    "running": ExitCode.RUNNING,
    "preempted": ExitCode.REQUEUE,
    "done": ExitCode.DONE,
}
"""The exit code of `esmshard status`: that of the first of these states that one of the runs is in."""


class Holder(BaseModel):
    """The content of `lock.json`: the process that writes in the directory."""

    host: str
    namespace: str
    """The boot of the machine and the namespace within which process ids have one meaning: each container has its own.
    """
    pid: int
    process_start: str | None
    """See `process_start`."""
    job: str | None
    """The scheduler's id of the job. It stays the same when the job is restarted after a preemption."""
    since: str
    """The time at which the lock was taken, by the holder's clock, for people."""

    @classmethod
    def here(cls) -> "Holder":
        """Return this process as the holder of a lock."""
        return cls(
            host=socket.gethostname(),
            namespace=_namespace(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            job=job_id(),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    @property
    def lives(self) -> bool | None:
        """Whether the process exists; None if that cannot be seen, as on another machine."""
        if (self.host, self.namespace) != (socket.gethostname(), _namespace()):
            return None
        start = process_start(self.pid)
        return None if start == "" else start is not None and start == self.process_start

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Lock:
    """The lock of a run directory, held from `with` to the end of the block.

    The file is created exclusively (`O_EXCL`), which NFS and Lustre guarantee even where locks are switched off. A run
    that was killed leaves its lock. The next run takes it over if the process is gone from this machine, or if the same
    job of a scheduler left it. Whether a process of another machine lives cannot be seen, so that the user decides.

    Args:
        out: the run directory. It is created if it does not exist.
        take_over: take the lock of a run that may still live on another machine (`--take-over`).

    Raises:
        InputError: on entering, if another run holds the directory or the directory cannot be written to.
    """

    def __init__(self, out: Path, *, take_over: bool = False) -> None:
        self._out, self._path, self._take_over = out, out / LOCK, take_over
        self._me = Holder.here()
        self._text = self._me.model_dump_json(indent=1) + "\n"

    def __enter__(self) -> "Lock":
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    with open(self._path, "x", encoding="utf-8") as file:
                        file.write(self._text)
                    return self
                except FileExistsError:
                    self._make_room()
        except OSError as error:
            raise InputError(
                f"{self._out}: cannot be written to ({(error.strerror or str(error)).lower()}); fix that, or choose "
                "another directory with out=DIR"
            ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(InputError, OSError):  # the file stays, and the next run sees that its process is gone
            self.check()
            self._path.unlink()

    def check(self) -> None:
        """Raise `InputError` if another run has taken the directory over, or somebody has removed the lock."""
        try:
            if self._path.read_text(encoding="utf-8", errors="replace") == self._text:
                return
        except FileNotFoundError:
            pass
        except OSError:  # nothing can be saved in the directory at this moment either
            return
        raise InputError(
            f"{self._path}: another run took over ({holder(self._out) or 'the lock was removed'}); this run stops "
            "without saving"
        )

    def _make_room(self) -> None:
        """Move the lock of a run away that has ended. `InputError` if it may still live."""
        try:
            text, age = self._path.read_bytes(), time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        if not text and 0 <= age < 2:  # it was just created, and is about to get its content
            time.sleep(0.05)
            return
        held = _parsed(text)
        who = f"{self._out}: held by {held or f'an unknown run ({LOCK} is damaged)'}"
        is_alive = None if held is None else held.lives
        is_gone = is_alive is False
        is_this_job = held is not None and held.job is not None and held.job == self._me.job
        if is_alive or not (is_gone or is_this_job or self._take_over):
            raise InputError(
                f"{who}{', which is still running' if is_alive else ''}; wait for it, stop it, or choose another "
                "directory with out=DIR"
                + ("" if is_alive else "; whether it still runs cannot be seen from here: if not, pass --take-over")
            )
        aside = self._path.with_name(f".{LOCK}.{uuid.uuid4().hex}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:  # another run was faster
            return
        if aside.read_bytes() != text:  # another run was faster, and this was its lock
            aside.rename(self._path)
            return
        aside.unlink()
        reason = "its process is gone" if is_gone else "an earlier start of this job" if is_this_job else "--take-over"
        say(f"{who}; taken over: {reason}")


def holder(out: Path) -> Holder | None:
    """Return who holds a run directory; None if nobody does, or the file is damaged."""
    try:
        return _parsed((out / LOCK).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def abandoned(out: Path) -> bool:
    """Whether no run holds a directory for certain: it has no lock, or the process is gone from this machine."""
    held = holder(out)
    return not (out / LOCK).exists() if held is None else held.lives is False


def _parsed(text: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(text)
    except ValueError:
        return None


def process_start(pid: int) -> str | None:
    """Return what tells a process of this machine from a later one with the same id: its start in the kernel's ticks,
    or an empty text where the system does not show it. None if there is no such process, or only its exit code is left.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # outside Linux, or /proc hides the processes of other users
        return "" if lives(pid) else None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # outside Linux
        return ""


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of this job, which stays the same when a scheduler or launcher starts its processes again; None if
    there is no such id.

    >>> job_id({"SLURM_JOB_ID": "812", "SLURM_ARRAY_JOB_ID": "810", "SLURM_ARRAY_TASK_ID": "2"})
    '810_2'
    """
    if job := environ.get("ESMSHARD_JOB_ID"):
        return job
    if (array := environ.get("SLURM_ARRAY_JOB_ID")) and (task := environ.get("SLURM_ARRAY_TASK_ID")):
        return f"{array}_{task}"
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    return environ.get("SLURM_JOB_ID") or environ.get(LAUNCH) or (torchrun if torchrun not in ("", "none") else None)


class Status(TypedDict):
    """The content of `status.json`."""

    state: State
    step: int
    """The number of optimizer steps done, of the `steps` of the recipe."""
    steps: int
    attempt: int
    """The number of attempts at this run so far."""
    exit_code: int | None
    """The exit code of the command; None while it runs. torchrun returns 0 where the command returned 75."""
    message: str
    checkpoint: str | None
    """The newest complete checkpoint, such as `step_000100`."""
    started: float
    """The start of this attempt."""
    job: str | None
    """See `job_id`."""
    host: str
    updated: float


def read_status(out: Path) -> Status | None:
    """Return the state of a run; None if no run began in the directory, whose `status.json` may be another program's.

    A killed run could not write its last state. If the file says `running`, but the directory has no lock or the
    lock's process is gone from this machine, the result is `failed`. Of a run on another machine this cannot be seen.
    """
    status = _status_as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        message = f"the run ended without a word after step {status['step']}; go on with --resume auto"
        return {**status, "state": "failed", "message": message}
    return status


def _status_as_written(out: Path) -> Status | None:
    try:
        status: Status = read_json(out / STATUS)
        return status if status.keys() >= Status.__annotations__.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def begun_by_this_job(out: Path) -> bool:
    """Whether the job that started this process again also began the run in a directory."""
    status = _status_as_written(out)
    return status is not None and status["job"] is not None and status["job"] == job_id()


def last_word(out: Path, code: int) -> str:
    """Explain why a run is not done whose processes ended with an exit code. Record it in `status.json` if no process
    has done so.
    """
    status = _status_as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out) and code != Preempted.exit_code:
        message = "the processes were ended from outside; continue with --resume auto"
        status |= {"state": "failed", "exit_code": code, "message": message, "updated": time.time()}
        replace_json(out / STATUS, status)
    if status is None or status["exit_code"] != code:  # they ended before they opened the run's directory
        return f"{out}: its processes ended with exit code {code}; the reason is on stderr"
    return f"{out}: {status['state']} (exit code {code}): {status['message']}"


class Attempt:
    """One attempt at a run: the lock of the directory, `metrics.jsonl` and `status.json`. Other ranks than the first
    write nothing.

    Use it as `with Attempt(...) as attempt:` around the whole run. The error that ends the run, if any, becomes the
    last line and the status, unless the command was refused before anything began.

    Args:
        out: the directory of the run.
        started: the time at which the command began.
        trackers: the trackers that show the lines of `metrics.jsonl`, too.
    """

    def __init__(self, out: Path, started: float, trackers: Sequence[str] = ()) -> None:
        self._out, self._steps, self._started = out, 0, started
        self._tracking = Tracking(out, trackers)
        self._lock: Lock | None = None
        self._before: Status | None = None
        self._step, self._number, self._first_step, self._begun = 0, 0, True, False

    def __enter__(self) -> "Attempt":
        return self

    def open(self, is_first: bool, steps: int, *, take_over: bool = False) -> None:
        """Take the lock of the run directory (see `Lock`); `steps` is the recipe's number. `InputError` if another run
        holds it.
        """
        self._steps = steps
        if is_first:
            self._lock = Lock(self._out, take_over=take_over).__enter__()
            self._before = read_status(self._out)
            if self._before is not None:
                self._step, self._number = self._before["step"], self._before["attempt"]

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
        kept, lost, seconds = cut(metrics_of(self._out), done, validated)
        self._step, self._number = done, 1 + sum(line.get("event") == "attempt" for line in kept)
        times = {"started": self._started, "time": time.time(), "from_step": done}
        begun = {"event": "attempt", "attempt": self._number, **times, "steps_lost": lost, "seconds_lost": seconds}
        replace_text(self._out / METRICS, "".join(json.dumps(line) + "\n" for line in [*kept, begun]))
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
            self._first_step = False
            self.write(event="first_step", seconds=round(time.time() - self._started, 3))

    def report(self, state: State, message: str, exit_code: int | None = None) -> None:
        """Replace status.json in one operation, so that a crash leaves the old file."""
        if self._lock is None:
            return
        self._begun = True
        newest = manifest.pointed(self._out / "checkpoints", "LATEST")
        status: Status = {
            "state": state,
            "step": self._step,
            "steps": self._steps,
            "attempt": self._number,
            "exit_code": exit_code,
            "message": message,
            "checkpoint": newest.name if newest else None,
            "started": self._started,
            "job": job_id(),
            "host": socket.gethostname(),
            "updated": time.time(),
        }
        replace_json(self._out / STATUS, status)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        ended: tuple[State, str, int]
        if error is None:
            is_trial = TRIAL in os.environ
            ended = ("done", f"trained and {'validated, as a trial of a sweep' if is_trial else 'evaluated'}", 0)
        elif isinstance(error, Preempted | InputError):
            ended = ("preempted" if isinstance(error, Preempted) else "failed", str(error), error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            ended = ("failed", "interrupted", ExitCode.INTERRUPTED)
        else:
            ended = ("failed", f"{type(error).__name__}: {error}".splitlines()[0], ExitCode.CRASHED)
        # A refused command, such as --resume with another learning rate, leaves the status of the run unchanged.
        refused = isinstance(error, UsageError) and not self._begun and self._before is not None
        try:
            self._lock.check()
            if not refused:
                self.write(event="end", state=ended[0])
                self.report(*ended)
                self._tracking.end(ended[0], self._step)
        # the directory belongs to another run now, or the disk is full; the error being raised is more useful
        except (InputError, OSError):
            if error is None:
                raise
        finally:
            self._lock.__exit__(kind, error, trace)


def metrics_of(out: Path, *, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, if it has one, or those in the `tail`, the last bytes. A line that a
    crash cut off is left out.
    """
    if not (out / METRICS).is_file():
        return
    with open(out / METRICS, "rb") as file:
        if tail is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
        for text in file:
            try:
                line = json.loads(text.decode(errors="replace"))
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def is_step(line: Mapping[str, Any]) -> bool:
    """Whether a line describes an optimizer step. The line of a validation names its step, too."""
    return "event" not in line and "split" not in line and "step" in line


def cut(
    lines: Iterable[Mapping[str, Any]], done: int, validated: bool = True
) -> tuple[list[Mapping[str, Any]], int, float]:
    """Return the lines that stay when a run continues after `done` steps, and the lost steps and their seconds.

    The lines of later steps will be written again. Events stay. An attempt that was killed gets an end line, because
    its last line may be removed here. Unless `validated` is true, the line of the validation after step `done` is
    removed, too.

    >>> cut([{"step": 1, "step_s": 2.0, "time": 12.0}, {"step": 2, "step_s": 2.5, "time": 15.0}], 1)[1:]
    (1, 2.5)
    """
    kept: list[Mapping[str, Any]] = []
    lost, seconds = 0, 0.0
    last: float | None = None  # time of the newest line of an attempt without an end line
    for line in [*lines, {"event": "attempt"}]:  # the attempt that begins now ends a killed one
        event = line.get("event")
        if event == "attempt" and last is not None:
            kept.append({"event": "end", "state": "killed", "time": last})
        last = None if event == "end" else line.get("time", last)
        step = line.get("step", 0)
        if event is not None or step < done or (step == done and (validated or is_step(line))):
            kept.append(line)
        elif is_step(line):
            lost += 1
            seconds += line.get("step_s") or 0.0
    return kept[:-1], lost, seconds


class Goodput(TypedDict):
    """The use of a run's time, over all attempts."""

    attempts: int
    steps_lost: int
    lost_s: float
    useful_s: float
    allocated_s: float
    goodput: float | None
    """The share of the allocated time that was useful; None if no time was allocated."""


def goodput(lines: Iterable[Mapping[str, Any]]) -> Goodput:
    """Sum up how the time of a run was used, from the lines of its metrics.jsonl. The last attempt may still run.

    Goodput is useful time divided by allocated time, as the "productive time" of Google's ML Goodput Measurement. The
    number of processes does not matter: an hour of the run is one hour.

    - Useful time is the seconds of optimizer steps (`step_s`, waiting for data included) whose result was kept. Start,
      validation, checkpoints, consolidation and repeated steps are not useful time.
    - Allocated time runs from the start of each attempt's command to the attempt's end line. A killed attempt has no
      end line and ends at its last line. Time between attempts (such as in a queue) is not allocated.
    - Lost steps were taken after the checkpoint from which the next attempt continued.
    """
    attempts = lost = 0
    useful = lost_s = allocated = begin = end = 0.0
    for line in lines:
        event = line.get("event")
        if event == "attempt":
            allocated += end - begin
            begin = end = line["started"]
            attempts += 1
            lost += line["steps_lost"]
            lost_s += line["seconds_lost"]
        elif is_step(line) and attempts:
            useful += line.get("step_s") or 0.0
        if attempts:
            end = max(end, line.get("time", end))
    allocated += end - begin
    return {
        "attempts": attempts,
        "steps_lost": lost,
        "lost_s": lost_s,
        "useful_s": useful,
        "allocated_s": allocated,
        "goodput": useful / allocated if allocated > 0 else None,
    }


def goodput_text(found: Goodput) -> str:
    """Describe the use of a run's time in one line, such as `goodput 75%: 1m15s of 1m40s in steps that count; ...`."""
    share = "unknown" if found["goodput"] is None else f"{found['goodput']:.0%}"
    attempts, lost = found["attempts"], found["steps_lost"]
    text = (
        f"goodput {share}: {duration(found['useful_s'])} of {duration(found['allocated_s'])} in steps that count; "
        f"{attempts} attempt{'' if attempts == 1 else 's'}, {lost} step{'' if lost == 1 else 's'} lost"
    )
    return text + (f" ({duration(found['lost_s'])})" if lost else "")


def standings(out: Path) -> list[dict[str, Any]]:
    """Return the state of the run or sweep in a directory, or of the runs in its subdirectories, ordered by name.

    Each has the entries of `status.json`, corrected for newer steps and for a killed run, and besides `run`, its path;
    `unit`, what `step` and `steps` count; `last_seen`, the time of the last change of its files, if somebody holds the
    directory; and `holder`.

    Raises:
        UsageError: if no run has begun in the directory.
    """
    if (out / SWEEP).is_file():
        return [_of_sweep(out)]
    runs = []
    for run in [out] if (out / STATUS).exists() else sorted(path.parent for path in out.glob(f"*/{STATUS}")):
        if (status := read_status(run)) is not None:
            steps = [int(line["step"]) for line in metrics_of(run, tail=TAIL) if is_step(line)]
            if status["state"] == "running" and steps:
                status["step"] = max(steps[-1], status["step"])
            runs.append({"run": str(run), "unit": "step", **status, **_seen(holder(run), run / METRICS, run / STATUS)})
    if not runs:
        raise UsageError(f"{out}: no run has begun there (it has no {STATUS} of a run); give `out` of a recipe")
    return runs


def _of_sweep(out: Path) -> dict[str, Any]:
    """Return the state of a sweep, whose `step` and `steps` count trials."""
    sweep = read_json(out / SWEEP)
    held = next((path.parent for path in out.glob(f"*/**/{LOCK}") if not abandoned(path.parent)), None)
    state: State = sweep["state"] if sweep["state"] in ("done", "failed") else "running" if held else "preempted"
    return {
        "run": str(out),
        "unit": "trial",
        "state": state,
        "step": sum(trial["state"] != "running" for trial in sweep["trials"]),
        "steps": sweep["trials_wanted"],
        "message": sweep["message"] + ("; go on with --resume auto" if state == "preempted" else ""),
        **_seen(holder(held) if held else None, out / SWEEP),
    }


def _seen(held: Holder | None, *files: Path) -> dict[str, Any]:
    changed = max(path.stat().st_mtime for path in files if path.is_file())
    return {"last_seen": held and changed, "holder": held and str(held)}


def joint_state(runs: Sequence[Mapping[str, Any]]) -> State:
    """Return the first state of EXIT_CODES that one of several runs is in."""
    return next(state for state in EXIT_CODES if any(run["state"] == state for run in runs))


def status_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Format as text: a line for each run, and below a single run further lines."""
    lines = []
    for run in runs:
        when = f", last seen {duration(time.time() - run['last_seen'])} ago" if run["last_seen"] else ""
        name = Path(run["run"]).resolve().name
        lines.append(f"{name}  {run['state']:11}{run['unit']} {run['step']} of {run['steps']}{when}")
    if len(runs) == 1:
        keys = ("message", "attempt", "checkpoint", "holder")
        lines += [f"  {key}: {runs[0][key]}" for key in keys if runs[0].get(key)]
    return "\n".join(lines)
