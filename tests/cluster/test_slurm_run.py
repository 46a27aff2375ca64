"""The script for Slurm is executed: real shells, signals and runs, under programs that stand in for Slurm's.

Where a run only has to end in a certain way, a program plays it; what it plays is in `play.json`, one entry a start.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slurm_programs
from command import esmshard
from held_runs import Hold
from slurm_programs import Job, install, noted

PLAYER = '''\
#!{python}
"""Writes what its start is to leave, waits for a signal if it is to, and ends."""
import json, os, signal, sys, time
from pathlib import Path
state = Path(os.environ["STAND_IN"])
if os.environ["SLURM_PROCID"] != "0":
    sys.exit(0)
n = len((state / "played").read_text()) if (state / "played").exists() else 0
(state / "played").write_text("x" * (n + 1))
(state / f"argv-{{n}}.json").write_text(json.dumps(sys.argv[1:]))
(state / f"environ-{{n}}.json").write_text(json.dumps(dict(os.environ)))
act = json.loads((state / "play.json").read_text())[n]
came = []
if act.get("until_signal"):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: came.append(number))
    (state / "listening").touch()
    while not came:
        time.sleep(0.01)
    (state / "heard").write_text(signal.Signals(came[0]).name)
    time.sleep(0.5)  # it saves
if act["code"] > 128:
    signal.signal(act["code"] - 128, signal.SIG_DFL) if act["code"] != 137 else None
    os.kill(os.getpid(), act["code"] - 128)
sys.exit(act["code"])
'''


class Cluster:
    """Where jobs run, and what became of them."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.site: dict[str, Any] = {"gpus_per_node": 0}

    def launch(self, *arguments: str | Path) -> str:
        """`esmshard launch ARGUMENTS --target slurm`; the number of the job."""
        (self.work / "site.yaml").write_text(json.dumps(self.site))
        split = arguments.index("--") if "--" in arguments else len(arguments)
        done = esmshard("launch", *arguments[:split], "--target", "slurm", *arguments[split:], cwd=self.work)
        assert done.returncode == 0, done.stderr
        assert done.stderr == f"site profile: {self.work / 'site.yaml'}\n"
        return done.stdout.split("Submitted batch job ")[1].strip()

    def play(self, *codes: int, until_signal: bool = False, arguments: tuple[str, ...] = ()) -> str:
        """A run that is played and leaves with these codes, one a start, the first maybe when it was asked to stop.

        Returns:
            The number of the job.
        """
        acts = [{"code": code, "until_signal": until_signal and not n} for n, code in enumerate(codes)]
        player = self.folder / "python"
        player.write_text(PLAYER.format(python=sys.executable))
        player.chmod(0o755)
        (self.folder / "play.json").write_text(json.dumps(acts))
        self.site["python"] = str(player)
        return self.launch(*(arguments or ("contact", f"out={self.work / 'run'}", "--name", "played")))

    def wait(self, number: str) -> tuple[int, str]:
        """Exit code, and how Slurm calls the end."""
        job, end = Job(number), time.monotonic() + 900
        while not self.is_over(number):
            assert time.monotonic() < end, self.log(number)
            time.sleep(0.02)
        return int(job.get("code")), job.get("state")

    def log(self, number: str, name: str = "played") -> str:
        return (self.work / f"{name}-{number}.out").read_text()

    def is_over(self, number: str) -> bool:
        return Job(number).get("state") in ("CANCELLED", "FAILED", "COMPLETED")

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 900
        while not reached():
            assert time.monotonic() < end
            time.sleep(0.01)

    def starts(self) -> int:
        """Of the step, by which the script started the run."""
        return len(noted("srun"))

    def signal(self, *arguments: str) -> None:
        subprocess.run([self.folder / "bin" / "scancel", *arguments], check=True)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    folder = tmp_path / "stand-in"
    folder.mkdir()
    install(folder / "bin", ("sbatch", "srun", "scontrol", "scancel"))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setattr(slurm_programs, "STATE", folder)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("ESMSHARD_SITE", str(work / "site.yaml"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    yield Cluster(folder, work)
    for path in (folder / "jobs").glob("*"):  # of a test that failed
        for marker in ("JOB", "STEP"):
            Job(path.name).signal(marker, signal.SIGKILL)


Unbroken = dict[tuple[str, ...], tuple[list[float], bytes]]
"""Losses and weights of runs that nothing interrupted, by their overrides."""


@pytest.fixture(scope="module")
def unbroken() -> Unbroken:
    """Filled by the tests that need it: the same recipe for each."""
    return {}


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hold:
    hold = Hold(tmp_path / "hold", 5)
    monkeypatch.setenv("PYTHONPATH", hold.environment["PYTHONPATH"])
    return hold


def steps(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "loss" in line and "split" not in line]


LONGER = ("train.steps=30", "train.eval_every=30", "checkpoint.every=1000")
# As sbatch sends it before the time limit: to the shell. By hand: to every process of the steps.
ASKED = {"limit": ("--batch", "-s", "USR1"), "scancel": ("-s", "USR1")}


@pytest.mark.parametrize(("nodes", "asked"), [pytest.param("1", "scancel", marks=pytest.mark.slow), ("2", "limit")])
def test_a_preempted_run_is_started_again_and_ends_like_an_unbroken_one(
    nodes: str,
    asked: str,
    cluster: Cluster,
    tiny_recipe: Path,
    tmp_path: Path,
    held: Hold,
    unbroken: Unbroken,
) -> None:
    run, name = tmp_path / "run; $(touch pwned) 'q'", "a; touch pwned"
    launched = ("--nodes", nodes, "--nproc", "2" if nodes == "1" else "1", "--name", name)
    job = cluster.launch(tiny_recipe, *LONGER, f"out={run}", *launched)
    held.wait(partial(cluster.is_over, job))
    cluster.signal(*ASKED[asked], job)
    held.go_when_asked(partial(cluster.is_over, job))
    assert cluster.wait(job) == (0, "COMPLETED"), cluster.log(job, "a-touch-pwned")
    assert noted("requeues") == [job]
    assert [code for _, code in noted("ended")] == [75, 0]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["attempt"], status["job"]) == ("done", 30, 2, job)
    assert [step["step"] for step in steps(run)] == list(range(1, 31)), "none was taken twice"
    like_unbroken(unbroken, run, tiny_recipe, *LONGER)
    assert not list(tmp_path.rglob("pwned"))


def test_a_killed_rank_ends_the_step_which_starts_again_from_the_last_checkpoint(
    cluster: Cluster, tiny_recipe: Path, tmp_path: Path, held: Hold, unbroken: Unbroken
) -> None:
    saved = ("train.steps=30", "train.eval_every=30", "checkpoint.every=4")
    job = cluster.launch(tiny_recipe, *saved, "--nodes", "2", "--nproc", "1")
    run = tmp_path / "run"
    held.wait(partial(cluster.is_over, job))
    ranks = {rank_of(pid): pid for pid in Job(job).processes("STEP")}
    os.kill(ranks["1"], signal.SIGKILL)
    held.go()
    assert cluster.wait(job) == (0, "COMPLETED"), cluster.log(job, "tiny")
    assert "esmshard: a process was lost (exit code 137)\n" in cluster.log(job, "tiny")
    assert (cluster.starts(), noted("requeues")) == (2, [])
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["attempt"]) == ("done", 30, 2)
    assert not Job(job).processes("STEP"), "no process is left behind"
    like_unbroken(unbroken, run, tiny_recipe, *saved)


def like_unbroken(unbroken: Unbroken, run: Path, recipe: Path, *overrides: str) -> None:
    """The run has the losses and the weights of one that nothing interrupted, on as many processes."""
    if overrides not in unbroken:
        whole = run.parent / "whole"
        done = esmshard("finetune", recipe, *overrides, f"out={whole}", "--nproc", "2")
        assert done.returncode == 0, done.stderr
        unbroken[overrides] = what_it_came_to(whole)
    assert what_it_came_to(run) == unbroken[overrides]


def what_it_came_to(run: Path) -> tuple[list[float], bytes]:
    return [step["loss"] for step in steps(run)], (run / "model/model.safetensors").read_bytes()


def rank_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(line for line in environment if line.startswith(b"SLURM_PROCID=")).decode().partition("=")[2]


def test_a_users_mistake_is_not_started_again(cluster: Cluster, tiny_recipe: Path) -> None:
    job = cluster.launch(tiny_recipe, "batch.tokens_per_rank=20", "--nproc", "1", "--name", "played")
    assert cluster.wait(job) == (1, "FAILED")
    assert "but batch.tokens_per_rank is 20; raise it" in cluster.log(job)
    assert (cluster.starts(), noted("requeues")) == (1, [])


@pytest.mark.parametrize(
    ("codes", "requeued", "code"),
    [
        ((75, 0), True, 0),
        ((138, 0), True, 0),  # USR1 came before the run could take one
        *(((lost, 0), False, 0) for lost in (69, 70, 134, 135, 137, 139, 143)),  # in the same job
        ((69, 137, 75, 0), True, 0),
        ((69, 70, 137, 139), False, 139),  # the fourth start was the last one
        *(((mistake,), False, mistake) for mistake in (1, 2, 130)),
    ],
)
def test_the_exit_code_decides_what_is_started_again(
    codes: tuple[int, ...], requeued: bool, code: int, cluster: Cluster
) -> None:
    job = cluster.play(*codes)
    assert cluster.wait(job)[0] == code, cluster.log(job)
    assert noted("requeues") == ([job] if requeued else [])
    assert cluster.starts() == len(codes)


@pytest.mark.parametrize("code", [75, 143, 137])
def test_a_job_that_is_cancelled_saves_and_stays_cancelled(code: int, cluster: Cluster) -> None:
    job = cluster.play(code, until_signal=True)
    cluster.until((cluster.folder / "listening").exists)
    cluster.signal(job)
    assert cluster.wait(job) == (75, "CANCELLED")
    assert (cluster.starts(), noted("requeues")) == (1, [])


@pytest.mark.parametrize("code", [75, 143, 137])
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_the_shell_alone_goes_on_to_the_run(name: str, code: int, cluster: Cluster) -> None:
    """Who was asked to stop and was lost with it, or heard it too early to save, goes back into the queue as well."""
    job = cluster.play(code, 0, until_signal=True)
    cluster.until((cluster.folder / "listening").exists)
    cluster.signal("--batch", "-s", name, job)
    assert cluster.wait(job) == (0, "COMPLETED"), cluster.log(job)
    assert (cluster.folder / "heard").read_text() == "SIGUSR1"
    assert f"Exited with exit code {code}" in cluster.log(job), "it was waited for"
    assert noted("requeues") == [job]


def test_a_run_may_end_while_it_is_asked_to_stop_or_not_be_requeued(cluster: Cluster) -> None:
    job = cluster.play(0, until_signal=True)
    cluster.until((cluster.folder / "listening").exists)
    cluster.signal("--batch", "-s", "USR1", job)
    assert cluster.wait(job) == (0, "COMPLETED"), cluster.log(job)
    assert noted("requeues") == []
    (cluster.folder / "no-requeue").touch()
    (cluster.folder / "played").unlink()
    job = cluster.play(75)
    assert cluster.wait(job) == (75, "FAILED")
    assert f"esmshard: job {job} is not requeued; sbatch this file again" in cluster.log(job)


EVIL = "x; rm -rf {folder}; $(touch {folder}/pwned) `touch {folder}/pwned` 'q' \"d\" \\ # $HOME !! %s\nz *"


def test_whatever_a_value_holds_it_arrives_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "victim"
    folder.mkdir()
    evil = EVIL.format(folder=folder)
    setup = {"grace": 60, "options": ["--mail-type=END"], "setup": ["export ESMSHARD_CACHE=/tmp/$SLURM_JOB_ID"]}
    cluster.site |= {"exports": {"WEIRD": evil}, "slurm": setup}
    overrides = (f"out={json.dumps(str(cluster.work / evil.partition(chr(10))[0].replace('/', ' ')))}",
                 f"data.target=[{json.dumps(evil)}]")  # fmt: skip
    job = cluster.play(0, arguments=("sequence", *overrides, "--name", f"a{evil}", "--nodes", "2", "--nproc", "3"))
    name = next(cluster.work.glob("a*.sbatch")).stem
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    assert cluster.wait(job) == (0, "COMPLETED"), cluster.log(job, name)
    argv = json.loads((cluster.folder / "argv-0.json").read_text())
    assert argv == ["-m", "esmshard", "finetune", "sequence", *overrides, "--resume", "auto"]
    environment = json.loads((cluster.folder / "environ-0.json").read_text())
    assert environment["WEIRD"] == evil
    ranks = ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    assert tuple(environment[name] for name in ranks) == ("4001", "6", "0", "3(x2)")
    assert (environment["OMP_NUM_THREADS"], environment["ESMSHARD_CACHE"]) == ("1", "/tmp/4001")
    assert folder.is_dir()
    assert not list(tmp_path.rglob("pwned"))


def test_workers_of_an_array_make_one_file_and_one_that_is_preempted_comes_back(
    cluster: Cluster, tiny_recipe: Path, tmp_path: Path
) -> None:
    fasta, out = tmp_path / "train.fasta", tmp_path / "emb.npy"
    cluster.site["python"] = sys.executable
    given = ("starter", fasta, "-o", out, "--tokens", "64")
    job = cluster.launch("embed", "--array", "2", "--", *given)
    first = f"{job}_0"
    cluster.until(lambda: any((tmp_path / "emb.npy.partial").glob("*")) or cluster.is_over(first))
    cluster.signal("-s", "USR1", first)
    assert cluster.wait(f"{job}_1") == (0, "COMPLETED"), cluster.log(f"{job}_1", "embed-emb")
    assert cluster.wait(first) == (0, "COMPLETED"), cluster.log(first, "embed-emb")
    assert noted("requeues") == [first]
    assert esmshard("embed", "starter", fasta, "-o", tmp_path / "alone.npy").returncode == 0
    np.testing.assert_allclose(np.load(out), np.load(tmp_path / "alone.npy"), atol=1e-5)
    assert out.with_suffix(".ids.txt").read_bytes() == (tmp_path / "alone.ids.txt").read_bytes()
    assert not (tmp_path / "emb.npy.partial").exists()
