"""The records in a run's directory: lock, `status.json`, `metrics.jsonl`, and what `esmshard status` prints of them.

Only the first rank writes here. Times are in seconds since 1970. Lines of `metrics.jsonl` are optimizer steps,
validations (`split`) and these events:

    {"event": "attempt", "attempt": 2, "started": T, "time": T, "from_step": 100, "steps_lost": 7, "seconds_lost": 3.5}
    {"event": "first_step", "seconds": 41.2, "time": T}
    {"event": "checkpoint", "step": 110, "stall_s": 0.2, "time": T}
    {"event": "end", "state": "preempted", "time": T}
"""

import getpass
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
from esmshard.errors import ExitCode, InputError, UsageError, reading
from esmshard.io.paths import read_json, replace_json, replace_text
from esmshard.parallel.launch import LAUNCH
from esmshard.parallel.preemption import Preempted
from esmshard.progress import duration, say
from esmshard.train.tracking import Tracking

LOCK, STATUS, METRICS = "lock.json", "status.json", "metrics.jsonl"
SWEEP = "sweep.json"
"""The state of a sweep (`esmshard.train.search`)."""

MOST_IDLE = 3
"""The number of attempts in a row without a step after which a run has failed. Otherwise a scheduler could restart it
forever.
"""

State = Literal["running", "preempted", "done", "failed"]
EXIT_CODES: Mapping[State, int] = {
    "failed": ExitCode.FAILED,
    "running": ExitCode.RUNNING,
    "preempted": ExitCode.REQUEUE,
    "done": ExitCode.DONE,
}
"""The exit code of `esmshard status`: that of the first of these states that one of the runs is in."""

_TAIL = 1 << 18
"""The number of bytes at the end of metrics.jsonl that are searched for the last step. A line of 64 ranks has 5 KB."""


class Holder(BaseModel):
    """The content of `lock.json`: the process that writes in the directory."""

    nonce: str
    """A random value, drawn for each lock, by which a run recognises its own."""
    user: str
    job: str | None
    """The scheduler's id of the job. It stays the same when the job is restarted after a preemption."""
    host: str
    machine: str
    """The machine, or the container, within which process ids have one meaning."""
    pid: int
    process_start: str | None
    """The start of the process in the kernel's ticks, since process ids are used again; None where it is unknown."""
    since: str
    """The time at which the lock was taken, by the holder's clock, for people."""

    @property
    def lives(self) -> bool | None:
        """Whether the process exists; None on another machine, or where the system does not tell."""
        return process_lives(self.pid, self.process_start) if self.machine == machine() else None

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.user} on {self.host} (process {self.pid}{job}) since {self.since}"


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
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a container may have no names of users
            user = str(os.getuid())
        self._out, self._path, self._take_over = out, out / LOCK, take_over
        self._me = Holder(
            nonce=uuid.uuid4().hex,
            user=user,
            job=job_id(),
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __enter__(self) -> "Lock":
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    with open(self._path, "x", encoding="utf-8") as file:
                        file.write(self._me.model_dump_json(indent=1) + "\n")
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
            if self._me.nonce in self._path.read_text(encoding="utf-8", errors="replace"):
                return
            why = f"{self._out}: another run took over ({holder(self._out) or LOCK})"
        except FileNotFoundError:
            why = f"{self._path}: the lock of this run was removed"
        except OSError:  # nothing can be saved in the directory at this moment either
            return
        raise InputError(f"{why}; this run stops without saving")

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
        lives = None if held is None else held.lives
        if lives:
            raise InputError(
                f"{who}, which is still running; wait for it, stop it, or choose another directory with out=DIR"
            )
        if lives is False:
            reason = "whose process is gone"
        elif held is not None and held.job is not None and held.job == self._me.job:
            reason = "an earlier start of this job"
        elif self._take_over:
            reason = "as --take-over asks"
        else:
            raise InputError(
                f"{who}; whether it still runs cannot be seen from here: if it has ended, pass --take-over, else wait "
                "for it, or choose another directory with out=DIR"
            )
        aside = self._path.with_name(f".{LOCK}.{self._me.nonce}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:  # another run was faster
            return
        if aside.read_bytes() != text:  # another run was faster, and this was its lock
            with suppress(FileExistsError):
                os.link(aside, self._path)
        else:
            say(f"{who}, {reason}; taken over")
        aside.unlink()


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
    """The number of optimizer steps done."""
    steps: int
    """The number of steps of the recipe."""
    attempt: int
    """The number of attempts at this run so far."""
    idle: int
    """The number of attempts in a row that were asked to stop before their first step was done."""
    exit_code: int | None
    """The exit code of the command; None while it runs. torchrun returns 0 where the command returned 75."""
    message: str
    """One sentence for people."""
    checkpoint: str | None
    """The newest complete checkpoint, such as `step_000100`."""
    started: float
    """The start of this attempt."""
    job: str | None
    """The id of the job that wrote the file (`job_id`)."""
    host: str
    updated: float


def read_status(out: Path) -> Status | None:
    """Return the state of a run; None if the run never began.

    A killed run could not write its last state. If the file says `running`, but the directory has no lock or the
    lock's process is gone from this machine, the result is `failed`. Of a run on another machine this cannot be seen.

    Raises:
        InputError: if the file is no status of a run.
    """
    status = _status_as_written(out)
    if status is not None and status["state"] == "running" and abandoned(out):
        message = f"the run ended without a word after step {status['step']}; go on with --resume auto"
        return {**status, "state": "failed", "message": message}
    return status


def _status_as_written(out: Path) -> Status | None:
    try:
        found: Status = read_json(out / STATUS)
        if found.keys() >= Status.__annotations__.keys():
            return found
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        pass
    raise InputError(f"{out / STATUS}: damaged; remove it, the run itself does not read it")


def has_status(out: Path) -> bool:
    """Whether a run left its status in a directory. A `status.json` of another program is none."""
    try:
        return _status_as_written(out) is not None
    except InputError:
        return False


def begun_by_this_job(out: Path) -> bool:
    """Whether the job that started this process again also began the run in a directory."""
    status = _status_as_written(out)
    return status is not None and status["job"] is not None and status["job"] == job_id()


def last_word(out: Path, code: int) -> str:
    """Explain why a run is not done whose processes ended with an exit code. Record it in `status.json` if no process
    has done so.
    """
    try:
        status = _status_as_written(out)
        if status is not None and status["state"] == "running" and abandoned(out) and code != Preempted.exit_code:
            message = "the processes were ended from outside; continue with --resume auto"
            status |= {"state": "failed", "exit_code": code, "message": message, "updated": time.time()}
            replace_json(out / STATUS, status)
        status = read_status(out)
    except InputError as damaged:
        return str(damaged)
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
        self._step, self._number, self._idle, self._first_step, self._begun = 0, 0, 0, True, False
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
            self._lock = Lock(self._out, take_over=take_over).__enter__()
            self._before = read_status(self._out) if has_status(self._out) else None
            if self._before is not None:
                self._step, self._number = self._before["step"], self._before["attempt"]
                self._idle = self._before["idle"] if self._before["state"] == "preempted" else 0

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
            self._first_step, self._idle = False, 0
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
            "idle": self._idle,
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
        stopped = error
        if isinstance(error, Preempted) and self._first_step:
            self._idle += 1
            if self._idle >= MOST_IDLE:
                error = InputError(
                    f"{self._out}: {self._idle} starts in a row were asked to stop before they had done a step (now: "
                    f"{error}); give the job more time, then start again with --resume auto"
                )
        ended: tuple[State, str, int]
        if error is None:
            ended = ("done", self.ending, 0)
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
        if error is not None and error is not stopped:
            raise error from stopped


def metrics_of(out: Path, *, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl. A line that a crash cut off is left out.

    Args:
        out: the directory of the run. Nothing is yielded if it has no metrics.jsonl.
        tail: read only this number of bytes at the end of the file; None for all.
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

    Each is the content of `status.json`, corrected for newer steps and for a killed run, with these entries:
    `run`, its path; `unit`, what `step` and `steps` count, `step` or the `trial` of a sweep; `last_step`, the time of
    the last step by the clock of the machine that took it; `last_seen`, the time of the last change of metrics.jsonl or
    status.json, if somebody holds the directory; and `holder`.

    Raises:
        UsageError: if no run has begun in the directory.
        InputError: if a status.json is damaged.
    """
    if (out / SWEEP).is_file():
        return [_of_sweep(out)]
    runs = [out] if (out / STATUS).exists() else sorted(path.parent for path in out.glob(f"*/{STATUS}"))
    if not runs:
        raise UsageError(f"{out}: no run has begun there (it has no {STATUS}); give `out` of a recipe")
    return [found for found in map(_standing, runs) if found is not None]


def _standing(run: Path) -> dict[str, Any] | None:
    status, held = read_status(run), holder(run)
    if status is None:  # the directory was removed at this moment
        return None
    last = next((line for line in reversed([*metrics_of(run, tail=_TAIL)]) if is_step(line)), None)
    if status["state"] == "running" and last is not None:
        status["step"] = max(int(last["step"]), status["step"])
    times = [path.stat().st_mtime for path in (run / METRICS, run / STATUS) if path.is_file()]
    return {
        "run": str(run),
        "unit": "step",
        **{key: value for key, value in status.items() if key not in ("idle", "job", "host", "updated")},
        "last_step": None if last is None else float(last["time"]),
        "last_seen": max(times, default=None) if held is not None else None,
        "holder": None if held is None else str(held),
    }


def _of_sweep(out: Path) -> dict[str, Any]:
    """Return the state of a sweep, whose `step` and `steps` count trials. A failed trial is no failed sweep."""
    with reading(str(out / SWEEP), "remove it, and go on with --resume auto"):
        sweep = read_json(out / SWEEP)
        ended = [one for one in sweep["trials"] if one["state"] != "running"]
        failed = sum(one["state"] == "failed" for one in ended)
        message = f"{len(ended)} of {sweep['trials_wanted']} trials have ended"
        message += f", {failed} of them failed" if failed else ""
        for one in ended:
            if one["number"] == sweep["best"]:
                message += f"; the best is trial {one['number']}, valid {sweep['metric']} {one['value']:.4g}"
    held = [path.parent for path in out.glob(f"*/**/{LOCK}") if not abandoned(path.parent)]
    state: State = "running" if held else "preempted"
    state = sweep["state"] if sweep["state"] in ("done", "failed") else state
    changed = (out / SWEEP).stat().st_mtime
    return {
        "run": str(out),
        "unit": "trial",
        "state": state,
        "step": len(ended),
        "steps": int(sweep["trials_wanted"]),
        "attempt": 1,
        "exit_code": None if state == "running" else EXIT_CODES[state],
        "message": message + ("; go on with --resume auto" if state == "preempted" else ""),
        "checkpoint": None,
        "started": changed,
        "last_step": None,
        "last_seen": changed if held else None,
        "holder": str(holder(held[0])) if held else None,
    }


def joint_state(found: Sequence[Mapping[str, Any]]) -> State:
    """Return the first state of EXIT_CODES that one of several runs is in."""
    return next(state for state in EXIT_CODES if any(one["state"] == state for one in found))


def status_json(found: Sequence[Mapping[str, Any]]) -> str:
    """Format as JSON: the joint `state`, and the entries of each run."""
    return json.dumps({"state": joint_state(found), "runs": found}, indent=1)


def status_text(found: Sequence[Mapping[str, Any]], now: float | None = None) -> str:
    """Format as text: a paragraph for each run, or a line for each of several runs."""
    now = time.time() if now is None else now
    if len(found) > 1:
        width = max(len(Path(one["run"]).name) for one in found) + 2
        return "\n".join(
            f"{Path(one['run']).name.ljust(width)}{one['state'].ljust(11)}step {one['step']} of {one['steps']}"
            + ("" if one["last_seen"] is None else f", last seen {_ago(one['last_seen'], now)}")
            for one in found
        )
    (one,) = found
    done = "" if one["last_step"] is None else f", done {_ago(one['last_step'], now)}"
    rows = [
        ("state", f"{one['state']}: {one['message']}"),
        (one["unit"], f"{one['step']} of {one['steps']}{done}"),
        ("attempt", f"{one['attempt']}, begun {_ago(one['started'], now)}" if one["unit"] == "step" else ""),
        ("last seen", "" if one["last_seen"] is None else f"{_ago(one['last_seen'], now)}, {one['holder']}"),
        ("checkpoint", one["checkpoint"] or ""),
    ]
    return "\n".join([one["run"], *(f"  {name:12}{value}" for name, value in rows if value)])


def _ago(then: float, now: float) -> str:
    """Format a time such as `3 min ago`. The two clocks may differ, so nothing is decided by the result."""
    seconds = max(0.0, now - then)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def process_lives(pid: int, start: str | None) -> bool | None:
    """Return whether a process of this machine still runs; None if the system does not provide this.

    Args:
        pid: the id of the process. The system may have given it to another process since.
        start: the `process_start` of the process.
    """
    if os.name != "posix":  # signal 0 would end the process on Windows
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        pass
    now = process_start(pid)
    return None if start is None or now is None else now == start


def process_start(pid: int) -> str | None:
    """Return the start of a process, in ticks since the machine's start; `ended` for a zombie; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "ended" if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        return None


def machine() -> str:
    """Return an identifier of one boot of a kernel and of one namespace of process ids. Each container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
