"""The files `lock.json`, `status.json` and `metrics.jsonl` of a run, and the output of `esmshard status`.

Only the first rank writes these files. Times are in seconds since 1970; `seconds` is the time since the command began,
and `stall_s` the time in which training waited for a checkpoint. A line of `metrics.jsonl` is about an optimizer
step, a validation (with the key `split`) or one of these events:

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
TAIL = 1 << 18
"""To find the last step, this number of bytes at the end of metrics.jsonl is read. With 64 ranks, a line has 5 KB."""

State = Literal["running", "preempted", "done", "failed"]
EXIT_CODES: Mapping[State, int] = {
    "failed": ExitCode.FAILED,
    "running": ExitCode.RUNNING,
    "preempted": ExitCode.REQUEUE,
    "done": ExitCode.DONE,
}
"""The exit code of `esmshard status` for each state. Of the states of several runs, the first in this list counts."""


class Holder(BaseModel):
    """The content of `lock.json`: the process that holds the lock of a run directory and writes to the directory."""

    host: str
    namespace: str
    """The id of the machine's last boot and the id of the process namespace (one for each container)."""
    pid: int
    process_start: str | None
    job: str | None
    """The scheduler's id of the job, which a restart does not change; see `job_id`."""
    since: str
    """The local time at which the process took the lock, for users to read."""

    @classmethod
    def here(cls) -> "Holder":
        """Return a `Holder` for this process."""
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
        """Whether the process still runs; None if that cannot be seen, such as from another machine."""
        if (self.host, self.namespace) != (socket.gethostname(), _namespace()):
            return None
        start = process_start(self.pid)
        return None if start == "" else start is not None and start == self.process_start

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Lock:
    """The lock of a run directory, which is held in a `with` block. The block also creates the directory.

    The lock is a file that is created only if it does not exist (`O_EXCL`). NFS and Lustre support this even if file
    locks are switched off. A killed run leaves its lock. The next run takes the lock over if the process is gone from
    this machine, or if both runs are the same job of a scheduler. With `take_over`, it also takes a lock from a process
    on another machine.

    The block raises `InputError` at its start if another run holds the directory or the directory is not writable.
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

    def __exit__(self, *_: object) -> None:
        with suppress(InputError, OSError):  # the next run sees that the process is gone
            self.check()
            self._path.unlink()

    def check(self) -> None:
        """Raise `InputError` if another run has taken the lock over, or if the lock was removed."""
        try:
            if self._path.read_text(encoding="utf-8", errors="replace") == self._text:
                return
        except FileNotFoundError:
            pass
        except OSError:  # an unreadable directory cannot be written to, either
            return
        raise InputError(
            f"{self._path}: another run took over ({holder(self._out) or 'the lock was removed'}); this run stops "
            "without saving"
        )

    def _make_room(self) -> None:
        """Remove the lock of another run if this run may take it over (see `Lock`). Otherwise raise `InputError`."""
        try:
            text, age = self._path.read_bytes(), time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        if not text and 0 <= age < 2:  # the file was just created, and is still empty
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
                + ("" if is_alive else "; this machine cannot see whether it still runs: if not, pass --take-over")
            )
        aside = self._path.with_name(f".{LOCK}.{uuid.uuid4().hex}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:  # another run was faster
            return
        if aside.read_bytes() != text:  # another run was faster, and the renamed file was its lock
            aside.rename(self._path)
            return
        aside.unlink()
        reason = "its process is gone" if is_gone else "an earlier start of this job" if is_this_job else "--take-over"
        say(f"{who}; taken over: {reason}")


def holder(out: Path) -> Holder | None:
    """Return the holder of the lock of a run directory; None if there is no lock, or if the lock file is damaged."""
    try:
        return _parsed((out / LOCK).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def abandoned(out: Path) -> bool:
    """Whether no run holds a directory: the directory has no lock, or the lock's process is gone from this machine."""
    held = holder(out)
    return not (out / LOCK).exists() if held is None else held.lives is False


def _parsed(text: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(text)
    except ValueError:
        return None


def process_start(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since the boot. It tells processes with the same id apart.

    Returns an empty text if the system does not show the time, and None if the process has ended.
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
    """Return the id of the job of a scheduler or launcher that contains this process, or None. Restarts keep the id.

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
    """The content of the file `status.json` of a run."""

    state: State
    step: int
    steps: int
    """The number of optimizer steps in the recipe; `step` is the number of steps done."""
    attempt: int
    exit_code: int | None
    """The exit code of the command; None while it runs. torchrun returns 0 if the command returns 75."""
    message: str
    checkpoint: str | None
    """The name of the newest complete checkpoint, such as `step_000100`; None before the first checkpoint."""
    started: float
    """The start time of this attempt's command, in seconds since 1970."""
    job: str | None
    host: str
    updated: float


def read_status(out: Path) -> Status | None:
    """Return the status of the run in a directory; None if no run began there.

    A killed run cannot write its last state. If `status.json` says `running` and no run holds the directory
    (`abandoned`), the returned state is `failed`. A run on another machine stays `running`.
    """
    status = _status_as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        message = f"the run ended without a message after step {status['step']}; continue with --resume auto"
        return {**status, "state": "failed", "message": message}
    return status


def _status_as_written(out: Path) -> Status | None:
    try:
        status: Status = read_json(out / STATUS)
        return status if status.keys() >= Status.__annotations__.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def begun_by_this_job(out: Path) -> bool:
    """Whether this job began the run in a directory, perhaps before a restart of the job."""
    status = _status_as_written(out)
    return status is not None and status["job"] is not None and status["job"] == job_id()


def last_word(out: Path, code: int) -> str:
    """Say why a run ended with the exit code `code`. If it was killed, also write the state `failed` to status.json."""
    status = _status_as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out) and code != Preempted.exit_code:
        message = "the processes were killed; continue with --resume auto"
        status |= {"state": "failed", "exit_code": code, "message": message, "updated": time.time()}
        replace_json(out / STATUS, status)
    if status is None or status["exit_code"] != code:  # the processes ended before they opened the directory of the run
        return f"{out}: its processes ended with exit code {code}; the reason is on stderr"
    return f"{out}: {status['state']} (exit code {code}): {status['message']}"


class Attempt:
    """The writer of the lock, `metrics.jsonl` and `status.json` of one attempt at a run. Only the first rank writes.

    Use it as `with Attempt(...) as attempt:` around the run. If an error ends the run, the last line of `metrics.jsonl`
    and the status say so. A `UsageError` before `begin` leaves the status of an earlier run unchanged. `started` is the
    start time of the command, in seconds since 1970. `trackers` are the names of trackers, which also get the lines of
    `metrics.jsonl`.
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
        """If `is_first`, take the lock of the directory. For `take_over` see `Lock`. The recipe has `steps` steps."""
        self._steps = steps
        if is_first:
            self._lock = Lock(self._out, take_over=take_over).__enter__()
            self._before = read_status(self._out)
            if self._before is not None:
                self._step, self._number = self._before["step"], self._before["attempt"]

    def check(self) -> None:
        """Raise `InputError` if another run has taken the directory over, so this run must not write there."""
        if self._lock is not None:
            self._lock.check()

    def begin(self, done: int, validated: bool = True) -> None:
        """Begin the attempt after `done` steps. Remove the lines of steps after `done` from metrics.jsonl, and with
        `validated=False` the validation after step `done`. The run repeats what is removed.
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
        """Append a line with the present time to metrics.jsonl, and send the line to the trackers."""
        if self._lock is None:
            return
        line["time"] = round(time.time(), 3)
        # JSON has no NaN and no infinity.
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with open(self._out / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(known) + "\n")
        self._tracking.log(known)

    def step_done(self, line: Mapping[str, Any]) -> None:
        """Append the line of an optimizer step to metrics.jsonl. After the first step, append `first_step`, too."""
        self.write(**line)
        self._step = int(line["step"])
        if self._first_step:
            self._first_step = False
            self.write(event="first_step", seconds=round(time.time() - self._started, 3))

    def report(self, state: State, message: str, exit_code: int | None = None) -> None:
        """Write the arguments to status.json in one operation, so that a crash leaves the old or the new file."""
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

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
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
        except (InputError, OSError):  # another run has taken the directory over, or the disk is full
            if error is None:
                raise
        finally:
            self._lock.__exit__()


def metrics_of(out: Path, *, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl; with `tail`, only lines in its last `tail` bytes.

    Incomplete lines, which a crash leaves, are skipped.
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
    """Whether a line of metrics.jsonl is about an optimizer step."""
    return "event" not in line and "split" not in line and "step" in line


def cut(
    lines: Iterable[Mapping[str, Any]], done: int, validated: bool = True
) -> tuple[list[Mapping[str, Any]], int, float]:
    """Return the lines to keep for a run that continues after `done` steps, the number of lost steps and their seconds.

    Lines of steps after `done` are removed, because these steps will be repeated. Events stay. A killed attempt gets an
    `end` event with the time of its last line, because that line may be removed. Unless `validated`, the validation
    after step `done` is removed, too.

    >>> cut([{"step": 1, "step_s": 2.0, "time": 12.0}, {"step": 2, "step_s": 2.5, "time": 15.0}], 1)[1:]
    (1, 2.5)
    """
    kept: list[Mapping[str, Any]] = []
    lost, seconds = 0, 0.0
    last: float | None = None  # the time of the newest line, if its attempt has no `end` event
    for line in [*lines, {"event": "attempt"}]:  # the attempt that begins now ends a killed attempt
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


def goodput(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up how a run used its time, from the lines of its metrics.jsonl. The last attempt may still run.

    Returns the number of `attempts`, `steps_lost`, seconds (`lost_s`, `useful_s`, `allocated_s`) and `goodput`. Goodput
    is useful time divided by allocated time (Google's ML Goodput Measurement), or None without allocated time.

    - Useful time is the time of optimizer steps (`step_s`, with the wait for data) whose result was kept.
    - Allocated time is the time from the start of an attempt to its `end` event, or to its last line if it was killed.
      Time between attempts, such as in a queue, is not allocated. An hour counts once, not for each process.
    - Lost steps are the steps after the checkpoint from which the next attempt continued.
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


def goodput_text(use: Mapping[str, Any]) -> str:
    """Describe the use of a run's time, such as `goodput 75%: 1m15s of 1m40s in steps that count; ...`."""
    share = "unknown" if use["goodput"] is None else f"{use['goodput']:.0%}"
    attempts, lost = use["attempts"], use["steps_lost"]
    text = (
        f"goodput {share}: {duration(use['useful_s'])} of {duration(use['allocated_s'])} in steps that count; "
        f"{attempts} attempt{'' if attempts == 1 else 's'}, {lost} step{'' if lost == 1 else 's'} lost"
    )
    return text + (f" ({duration(use['lost_s'])})" if lost else "")


def standings(out: Path) -> list[dict[str, Any]]:
    """Return the state of the run or sweep in a directory, or the states of all runs in its subdirectories.

    A state has the entries of `status.json`, with the newest step, and the state `failed` for a killed run. It also has
    `run` (the path), `unit` (what `step` and `steps` count), `holder` (of the lock) and, with a holder, `last_seen`
    (when the run's files last changed). A sweep has fewer entries. Raises `UsageError` if no run has begun there.
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
        raise UsageError(f"{out}: no run has begun there (a run would have written {STATUS}); give the path of a run")
    return runs


def _of_sweep(out: Path) -> dict[str, Any]:
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
    """Return the joint state of several runs: the first state in EXIT_CODES that any run has."""
    return next(state for state in EXIT_CODES if any(run["state"] == state for run in runs))


def status_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Format states from `standings`, with one line for each run. For a single run, add its message and other facts."""
    lines = []
    for run in runs:
        when = f", last seen {duration(time.time() - run['last_seen'])} ago" if run["last_seen"] else ""
        name = Path(run["run"]).resolve().name
        lines.append(f"{name}  {run['state']:11}{run['unit']} {run['step']} of {run['steps']}{when}")
    if len(runs) == 1:
        keys = ("message", "attempt", "checkpoint", "holder")
        lines += [f"  {key}: {runs[0][key]}" for key in keys if runs[0].get(key)]
    return "\n".join(lines)
