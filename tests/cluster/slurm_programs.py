"""Stand-ins for sbatch, srun, scontrol and scancel, that start real processes. `slurm_programs.py NAME ARGS`

They do what Slurm 22.05 was seen to do. Signals reach every process of a step, whatever its session. After a task that
fails srun sends SIGTERM to the others, and SIGKILL after a while; its exit code is the highest of all. A job that is
cancelled is COMPLETING, its shell, srun and tasks get SIGTERM, and `scontrol requeue` brings even that one to life.
What they do not know they refuse, as the real ones do. $STAND_IN is the directory of their state. Nodes are addresses
of this machine.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

STATE = Path(os.environ.get("STAND_IN", "."))
KILL_WAIT = 600.0
NODES = ("127.0.0.1", "127.0.0.2")

DIRECTIVES = {
    *("job-name", "array", "partition", "account", "time", "nodes", "ntasks-per-node", "mem-per-gpu"),
    *("gpus-per-node", "cpus-per-task", "output", "open-mode", "signal", "requeue", "mail-type"),
}
SRUN = {"mpi", "cpu-bind", "cpus-per-task", "kill-on-bad-exit", "wait"}


def install(folder: Path, names: tuple[str, ...]) -> None:
    """Put programs of these names into a directory."""
    folder.mkdir(exist_ok=True)
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(0o755)


def refuse(message: str) -> NoReturn:
    sys.exit(f"stand-in: {message}")


def note(kind: str, what: Any) -> None:
    with open(STATE / f"{kind}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")


def noted(kind: str) -> list[Any]:
    path = STATE / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Job:
    """What is known of a job, in files: `state`, `shell` (a process id), `requeue` (if it is to be)."""

    def __init__(self, number: str) -> None:
        self.number, self.folder = number, STATE / "jobs" / number

    def get(self, key: str) -> str:
        try:
            return (self.folder / key).read_text()
        except FileNotFoundError:
            return ""

    def set(self, key: str, value: str) -> None:
        work = self.folder / f".{key}-{uuid.uuid4().hex}"
        work.write_text(value)
        work.replace(self.folder / key)

    def processes(self, marker: str) -> list[int]:
        """Those whose environment has STAND_IN_MARKER of this job."""
        wanted, found = f"STAND_IN_{marker}={self.number}".encode(), []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
        return found

    def signal(self, marker: str, number: int) -> None:
        for pid in self.processes(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def sbatch(arguments: list[str]) -> None:
    if len(arguments) != 1:
        refuse("sbatch takes one file")
    script = Path(arguments[0])
    options: dict[str, str] = {}
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH "):
            found = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
            if found is None or found[1] not in DIRECTIVES:
                refuse(f"sbatch: unrecognized line {line!r}")
            options[found[1]] = found[2] or ""
        elif line and not line.startswith("#"):
            break  # Slurm reads no further
    jobs = STATE / "jobs"
    jobs.mkdir(exist_ok=True)
    first = 4001 + len(list(jobs.iterdir()))
    tasks = [None]
    if "array" in options:
        tasks = list(range(int(options["array"].removeprefix("0-")) + 1))  # type: ignore[arg-type]
    for n, task in enumerate(tasks):
        job = Job(f"{first}_{task}" if task is not None else str(first))
        job.folder.mkdir()
        (job.folder / "script").write_bytes(script.read_bytes())
        job.set("state", "PENDING")
        if not os.fork():
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            _run_job(job, options, first, task, n)
            os._exit(0)
    print(f"Submitted batch job {first}")


def _run_job(job: Job, options: dict[str, str], first: int, task: int | None, n: int) -> None:
    nodes = NODES[: int(options["nodes"])]
    output = options["output"].replace("%j", job.number).replace("%A", str(first)).replace("%a", str(task))
    variables = {
        "SLURM_JOB_ID": str(first + n),
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NTASKS": str(len(nodes) * int(options["ntasks-per-node"])),
        "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        "SLURM_CPUS_ON_NODE": str(int(options["ntasks-per-node"]) * int(options.get("cpus-per-task", "1"))),
        "STAND_IN_JOB": job.number,
    }
    if "cpus-per-task" in options:
        variables["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    if task is not None:
        variables |= {"SLURM_ARRAY_JOB_ID": str(first), "SLURM_ARRAY_TASK_ID": str(task)}
        count = int(options["array"].removeprefix("0-")) + 1
        variables |= {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_COUNT": str(count)}
    for restart in range(20):
        if restart:
            variables["SLURM_RESTART_COUNT"] = str(restart)
        with open(output, "ab") as file:
            shell = subprocess.Popen(
                ["/bin/bash", str(job.folder / "script")],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            job.set("shell", str(shell.pid))
            job.set("state", "RUNNING")
            code = shell.wait()
        note("ended", [job.number, code])
        if not job.get("requeue"):
            break
        (job.folder / "requeue").unlink()
    job.set("code", str(code))
    job.set("state", "CANCELLED" if job.get("state") == "COMPLETING" else "FAILED" if code else "COMPLETED")


def srun(arguments: list[str]) -> None:
    options: dict[str, str] = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0)[2:].partition("=")
        options[name] = value
        if name not in SRUN:
            refuse(f"srun: unrecognized option --{name}")
    number, nodes = os.environ["STAND_IN_JOB"], os.environ["SLURM_JOB_NODELIST"].split(",")
    job, each, size = Job(number), int(os.environ["SLURM_NTASKS_PER_NODE"]), int(os.environ["SLURM_NTASKS"])
    step = len([one for one in noted("srun") if one["job"] == number])
    note("srun", {"options": options, "job": number})
    came: list[int] = []
    for heard in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(heard, lambda number, frame: came.append(number))
    tasks: list[subprocess.Popen[bytes]] = []
    for rank in range(size):
        node = rank // each
        environment = {
            **{key: value for key, value in os.environ.items() if key != "STAND_IN_JOB"},
            "STAND_IN_STEP": number,
            "SLURM_STEP_ID": str(step),
            "SLURM_STEP_NODELIST": ",".join(nodes),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{len(nodes)})" if len(nodes) > 1 else str(each),
            "SLURM_NODEID": str(node),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % each),
            "SLURMD_NODENAME": nodes[node],
        }
        tasks.append(subprocess.Popen(arguments, env=environment, start_new_session=True))
    ended = _ended(job, tasks, came, options)
    for rank, code in enumerate(ended):
        if code:
            print(f"srun: error: {nodes[rank // each]}: task {rank}: Exited with exit code {code}", file=sys.stderr)
    sys.exit(max(ended))


def _ended(job: Job, tasks: list[subprocess.Popen[bytes]], came: list[int], options: dict[str, str]) -> list[int]:
    """Exit codes of the tasks, to which signals are passed on until all have ended."""
    patience, kill_at, terminated = float(options.get("wait", "0")), float("inf"), False
    while any(task.poll() is None for task in tasks):
        while came:
            heard = came.pop(0)
            if heard != signal.SIGUSR1:
                print("srun: forcing job termination", file=sys.stderr, flush=True)
                kill_at = min(kill_at, time.monotonic() + KILL_WAIT)
            job.signal("STEP", heard)
        codes = [task.poll() for task in tasks]
        if patience and any(code is not None for code in codes):
            kill_at = min(kill_at, time.monotonic() + patience)
        if options.get("kill-on-bad-exit") == "1" and any(codes) and not terminated:
            terminated, kill_at = True, min(kill_at, time.monotonic() + KILL_WAIT)
            job.signal("STEP", signal.SIGTERM)
        if time.monotonic() > kill_at:
            job.signal("STEP", signal.SIGKILL)
        time.sleep(0.02)
    return [code if code >= 0 else 128 - code for code in (task.wait() for task in tasks)]


def scontrol(arguments: list[str]) -> None:
    match arguments:
        case ["show", "job", number]:
            print(f"JobId={number} JobName=x\n   JobState={Job(number).get('state')} Reason=None Dependency=(null)")
        case ["requeue", number]:
            if (STATE / "no-requeue").exists():
                sys.exit("Requeue of jobs is disabled")
            Job(number).set("requeue", "yes")
            note("requeues", number)
        case _:
            refuse(f"scontrol {arguments}")


def scancel(arguments: list[str]) -> None:
    match arguments:
        case ["-s", name, number]:
            Job(number).signal("STEP", signal.Signals[f"SIG{name}"])
        case ["--batch", "-s", name, number]:
            os.kill(int(Job(number).get("shell")), signal.Signals[f"SIG{name}"])
        case [number]:
            job = Job(number)
            job.set("state", "COMPLETING")
            job.signal("JOB", signal.SIGTERM)  # the shell, and srun
            job.signal("STEP", signal.SIGTERM)
        case _:
            refuse(f"scancel {arguments}")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
