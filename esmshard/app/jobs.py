"""The jobs of the page: directories `jobs/ID` with the user's files, `job.json`, `output.txt` and `log.txt`.

Each command of a job is a process of its own. One job runs at a time, in the order in which they were started; only
the check of a new job does not wait. A job belongs to one browser (`owner`), and goes on when the browser is closed.
When the server ends, the running job is stopped. If it is started again, finetune continues from its last checkpoint.
"""

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from esmshard.app.forms import KINDS
from esmshard.errors import InputError
from esmshard.io.paths import read_json, replace_json

State = Literal["new", "checking", "refused", "checked", "waiting", "running", "done", "failed", "stopped"]
ENDED: tuple[State, ...] = ("refused", "checked", "done", "failed", "stopped")
"""The states in which no process of the job runs or will run."""
UNUSED: tuple[State, ...] = ("new", "refused", "checked")
"""The states of a job that has no results yet."""
STOP_SECONDS = 30.0
"""How long a stopped process may take to save its work before it is killed."""
TAIL = 20_000
"""How many bytes at the end of the log the page shows."""


@dataclass
class Job:
    """A job. `job.json` has these fields, except for `directory`."""

    id: str
    owner: str
    """The session of the browser that made the job."""
    kind: str
    directory: Path = field(repr=False)
    values: dict[str, str] = field(default_factory=dict)
    """The answers in the form."""
    names: dict[str, str] = field(default_factory=dict)
    """The names that the uploaded files have on the user's machine, by question."""
    state: State = "new"
    step: int = 0
    """The number of commands that have ended."""
    created: float = 0.0
    queued: float = 0.0
    """The time when the user started the job."""
    ended: float | None = None

    @property
    def place(self) -> str:
        """The job's directory, relative to the page's directory."""
        return f"jobs/{self.id}"

    @property
    def commands(self) -> list[list[str]]:
        """The commands; each is a list of the words after `esmshard`."""
        return KINDS[self.kind].words(self.values, self.place)

    @property
    def lines(self) -> list[str]:
        """The commands as a user can type them."""
        return [shlex.join(["esmshard", *command]) for command in self.commands]

    @property
    def error(self) -> str:
        """The sentence with which the last command failed; empty if there is none."""
        sentences = re.findall(r"^error: (.*)$", self.log, re.MULTILINE)
        if sentences and self.state in ("refused", "failed"):
            return str(sentences[-1])
        return "a process ended with an error that the log shows" if self.state == "failed" else ""

    @property
    def log(self) -> str:
        """The end of the messages of the commands."""
        path = self.directory / "log.txt"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read().decode("utf-8", "replace").replace("\r", "\n")

    @property
    def output(self) -> str:
        """The results that the commands printed."""
        path = self.directory / "output.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def save(self) -> None:
        """Write `job.json`."""
        values = {key: value for key, value in asdict(self).items() if key != "directory"}
        replace_json(self.directory / "job.json", values)


class Jobs:
    """All jobs of a directory, and the thread that runs them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "jobs").mkdir(exist_ok=True)
        self._jobs: dict[str, Job] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._changed, self._closed = threading.Condition(), False
        for path in sorted((directory / "jobs").glob("*/job.json")):
            with suppress(ValueError, TypeError, KeyError):  # The user may have changed the file.
                job = Job(directory=path.parent, **read_json(path))
                if job.kind in KINDS and job.id == path.parent.name:
                    self._jobs[job.id] = job
                    if job.state in ("checking", "running"):  # The server was killed.
                        self._set(job, "stopped")
        self._thread = threading.Thread(target=self._run_all, daemon=True)
        self._thread.start()

    def of(self, owner: str) -> list[Job]:
        """Return the jobs of a session, the newest first."""
        mine = [job for job in list(self._jobs.values()) if job.owner == owner and job.state != "new"]
        return sorted(mine, key=lambda job: -job.created)

    def get(self, job_id: str, owner: str) -> Job | None:
        """Return a job of a session; None if there is no such job, or another session made it."""
        job = self._jobs.get(job_id)
        return job if job is not None and secrets.compare_digest(job.owner, owner) else None

    def create(self, kind: str, owner: str) -> Job:
        """Make the directory of a new job, which does not run yet."""
        job_id = secrets.token_hex(6)
        job = Job(job_id, owner, kind, self.directory / "jobs" / job_id, created=time.time())
        job.directory.mkdir()
        job.save()
        self._jobs[job_id] = job
        return job

    def copy(self, job: Job) -> Job:
        """Make a new job with the answers and files of another one."""
        new = self.create(job.kind, job.owner)
        for name in job.names:
            shutil.copytree(job.directory / name, new.directory / name, copy_function=os.link)
        new.values = {name: value.replace(job.place, new.place, 1) for name, value in job.values.items()}
        new.names = dict(job.names)
        return new

    def check(self, job: Job) -> None:
        """Run the first command with `--dry-run`, at once. A kind without a check is put into the queue."""
        if not KINDS[job.kind].checked:
            return self.start(job)
        command = [word for word in job.commands[0] if word not in ("--resume", "auto")]
        self._set(job, "checking")

        def run() -> None:
            for name in ("log.txt", "output.txt"):
                (job.directory / name).unlink(missing_ok=True)
            code = self._run(job, [*command, "--dry-run"])
            if job.state == "checking":
                self._set(job, "checked" if code == 0 else "refused")

        threading.Thread(target=run, daemon=True).start()

    def start(self, job: Job) -> None:
        """Put a job into the queue, if it is not in the queue or running."""
        with self._changed:
            if job.state in (*ENDED, "new"):
                job.queued, job.step, job.ended = time.time(), 0, None
                for name in ("log.txt", "output.txt"):
                    (job.directory / name).unlink(missing_ok=True)
                self._set(job, "waiting")
                self._changed.notify_all()

    def stop(self, job: Job) -> None:
        """Stop a job. A running process gets SIGTERM, so that a finetune run saves a checkpoint."""
        with self._changed:
            if job.state in ENDED:
                return
            self._set(job, "stopped")
            process = self._processes.get(job.id)
        if process is not None:
            threading.Thread(target=_end, args=(process,), daemon=True).start()

    def remove(self, job: Job) -> None:
        """Delete a job that has ended, with its files."""
        if job.state not in ENDED or job.id in self._processes:
            raise InputError("the job still runs; stop it first")
        del self._jobs[job.id]
        shutil.rmtree(job.directory, ignore_errors=True)

    def close(self) -> None:
        """Stop all processes, and wait for their ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for job_id, process in list(self._processes.items()):
            self._set(self._jobs[job_id], "stopped")
            _end(process)

    def _set(self, job: Job, state: State) -> None:
        job.state = state
        job.ended = time.time() if state in ENDED else None
        job.save()

    def _waiting(self) -> list[Job]:
        return [job for job in list(self._jobs.values()) if job.state == "waiting"]

    def _run_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting())
                if self._closed:
                    return
                job = min(self._waiting(), key=lambda job: job.queued)
                self._set(job, "running")
            code = 0
            for command in job.commands:
                code = self._run(job, command)
                if code or job.state != "running":
                    break
                job.step += 1
            if job.state == "running":
                self._set(job, "failed" if code else "done")

    def _run(self, job: Job, command: list[str]) -> int:
        """Run a command of esmshard in the page's directory, and return its exit code."""
        with (job.directory / "log.txt").open("ab") as log, (job.directory / "output.txt").open("ab") as output:
            log.write(f"$ {shlex.join(['esmshard', *command])}\n".encode())
            log.flush()
            process = subprocess.Popen(  # noqa: S603  # no shell; `server` has checked all answers
                [sys.executable, "-m", "esmshard", *command],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=os.environ | {"COLUMNS": "120"},
                start_new_session=True,
            )
            self._processes[job.id] = process
            if job.state == "stopped" or self._closed:  # The user stopped the job while the process began.
                _end(process)
            code = process.wait()
            del self._processes[job.id]
            return code


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process and its children to end, and kill them after STOP_SECONDS."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
