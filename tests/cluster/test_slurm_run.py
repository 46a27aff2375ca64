"""The script for Slurm is executed: real shells, signals and runs, under programs that stand in for srun and scontrol.

Facts of Slurm 22.05 that the stand-ins follow: `scancel -s` reaches the shell, srun passes SIGUSR1 on to all tasks,
ends the others after a task that fails, and returns the highest exit code; `scontrol requeue` starts a job again under
its number, even one that is cancelled.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import esmshard
from held_runs import Hold

from esmshard.cluster.launch import Job, Options, finetune_job, render
from esmshard.cluster.site import Site

PLAYED = """\
#!/bin/bash
# Leaves with the codes of its starts; the first start may wait until it is asked.
codes=($CODES) n=$(ls "$STATE" | grep -c ^start-)
touch "$STATE/start-$n"
trap 'echo USR1 >> "$STATE/heard"' USR1
trap 'echo TERM >> "$STATE/heard"' TERM
if [[ $WAITS && $n = 0 ]]; then
    touch "$STATE/listening"
    while [[ ! -e $STATE/heard ]]; do sleep 0.01; done
fi
exit "${codes[n]}"
"""
SRUN = """\
#!{python}
import os, signal, subprocess, sys, time
from pathlib import Path
state, size = Path(os.environ["STATE"]), int(os.environ["SLURM_NTASKS"])
step = len(list(state.glob("start-*")))
(state / f"start-{{step}}").touch()
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
(state / "srun").write_text("\\0".join(sys.argv[1 : -len(command)]))
nodes = [f"127.0.0.{{n + 1}}" for n in range(size)]
known = {{"SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": ",".join(nodes), "SLURM_STEP_NUM_TASKS": size}}
known |= {{"SLURM_STEP_TASKS_PER_NODE": f"1(x{{size}})", "SLURM_LOCALID": 0}}
tasks = []
for rank in range(size):
    mine = known | {{"SLURM_NODEID": rank, "SLURM_PROCID": rank, "SLURMD_NODENAME": nodes[rank]}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **{{k: str(v) for k, v in mine.items()}}}}))
    (state / f"task-{{rank}}").write_text(str(tasks[-1].pid))
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
ended = False
while None in (codes := [task.poll() for task in tasks]):
    if any(codes) and not ended:
        ended = [task.terminate() for task in tasks]
    time.sleep(0.02)
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
APPTAINER = """\
#!/bin/bash
printf '%s\\0' "$@" > "$STATE/apptainer"
while [[ $1 = exec || $1 = --* ]]; do shift; done
exec "${@:2}"
"""
SCONTROL = """\
#!/bin/sh
case $1 in
    show) echo "   JobState=$(cat "$STATE/job-state") Reason=None" ;;
    requeue) [ ! -e "$STATE/no-requeue" ] && echo "$2" >> "$STATE/requeued" ;;
esac
"""


class Cluster:
    """One job, its shell, and what became of it."""

    def __init__(self, folder: Path) -> None:
        self.state, self.work, self.log = folder / "state", folder / "work", folder / "log"
        for path in (self.state, self.work, folder / "bin"):
            path.mkdir()
        self.programs = {"scontrol": SCONTROL, "srun": SRUN.format(python=sys.executable), "apptainer": APPTAINER}
        (self.state / "job-state").write_text("RUNNING")
        self.shells: list[subprocess.Popen[bytes]] = []

    def start(self, script: str, tasks: int = 1, **variables: str) -> subprocess.Popen[bytes]:
        """Start the shell of the job, as Slurm does at first and after a requeue."""
        (self.work / "job.sbatch").write_text(script)
        for name, text in self.programs.items():
            program = self.state.parent / "bin" / name
            program.write_text(text)
            program.chmod(0o755)
        known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        known |= {"PATH": f"{self.state.parent / 'bin'}:{os.environ['PATH']}", "STATE": str(self.state)}
        known |= {"SLURM_JOB_ID": "4001", "SLURM_NTASKS": str(tasks), "SLURM_CPUS_ON_NODE": "1", **variables}
        with open(self.log, "ab") as log:
            command = ["bash", self.work / "job.sbatch"]
            self.shells.append(subprocess.Popen(command, env=known, stdout=log, stderr=log, start_new_session=True))
        return self.shells[-1]

    def play(self, *codes: int, waits: bool = False) -> subprocess.Popen[bytes]:
        """A run that leaves with these codes, one a start, the first maybe when it is asked."""
        self.programs["srun"] = PLAYED
        arguments = ("finetune", "contact", "--resume", "auto")
        job = Job(name="x", kind="finetune", arguments=arguments, out="run", directory=str(self.work))
        script = render(job, Site.model_validate({"python": "/python"}), "slurm")
        shell = self.start(script, CODES=" ".join(map(str, codes)), WAITS="yes" if waits else "")
        self.until((self.state / "listening").exists) if waits else None
        return shell

    def wait(self, shell: subprocess.Popen[bytes]) -> int:
        return shell.wait(900)

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 900
        while not reached():
            assert time.monotonic() < end
            time.sleep(0.01)

    @property
    def starts(self) -> int:
        return len(list(self.state.glob("start-*")))

    @property
    def requeued(self) -> list[str]:
        path = self.state / "requeued"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "cluster").mkdir()
    made = Cluster(tmp_path / "cluster")
    yield made
    for shell in made.shells:  # of a test that failed
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "requeued", "code"),
    [
        ((0,), False, 0),
        *(((asked,), True, 75) for asked in (75, 138)),  # USR1 may come before the run can take one
        *(((lost, 0), False, 0) for lost in (69, 70, 134, 135, 137, 139, 143)),  # in the same job
        ((69, 137, 75), True, 75),
        ((69, 70, 137, 139), False, 139),  # the fourth start was the last one
        *(((mistake,), False, mistake) for mistake in (1, 2, 130)),
    ],
)
def test_the_exit_code_decides_what_is_started_again(
    codes: tuple[int, ...], requeued: bool, code: int, cluster: Cluster
) -> None:
    assert cluster.wait(cluster.play(*codes)) == code, cluster.log.read_text()
    assert cluster.requeued == (["4001"] if requeued else [])
    assert cluster.starts == len(codes)


@pytest.mark.parametrize("code", [75, 143, 137])
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_the_shell_goes_on_to_the_run(name: str, code: int, cluster: Cluster) -> None:
    """Who was asked to stop and was lost with it, or heard it too early to save, goes back into the queue as well."""
    shell = cluster.play(code, waits=True)
    shell.send_signal(signal.Signals[f"SIG{name}"])
    assert cluster.wait(shell) == 75, cluster.log.read_text()
    assert (cluster.state / "heard").read_text() == "USR1\n"
    assert (cluster.requeued, cluster.starts) == (["4001"], 1)


def test_a_job_that_is_cancelled_is_not_requeued_and_one_that_ends_is_done(cluster: Cluster) -> None:
    (cluster.state / "job-state").write_text("COMPLETING")
    for code in (75, 143, 137):
        shell = cluster.play(code, waits=True)
        shell.terminate()
        assert (cluster.wait(shell), cluster.requeued, cluster.starts) == (75, [], 1)
        for name in ("heard", "start-0", "listening"):
            (cluster.state / name).unlink()
    (cluster.state / "job-state").write_text("RUNNING")
    shell = cluster.play(0, waits=True)
    shell.send_signal(signal.SIGUSR1)
    assert (cluster.wait(shell), cluster.requeued) == (0, [])
    (cluster.state / "start-0").unlink()
    (cluster.state / "no-requeue").touch()
    assert cluster.wait(cluster.play(75)) == 75
    assert "esmshard: job 4001 is not requeued" in cluster.log.read_text()


@pytest.mark.parametrize("runtime", ["none", "pyxis", "apptainer"])
def test_whatever_a_value_holds_it_arrives_as_it_is(runtime: str, cluster: Cluster, tmp_path: Path) -> None:
    pwned, image = tmp_path / "pwned", str(tmp_path / "esm shard's.sqsh")
    evil = f"x; rm -rf {cluster.work}; $(touch {pwned}) `touch {pwned}` 'q' \"d\" \\ # $HOME !! %s\nz *"
    player = tmp_path / "cluster" / "bin" / "esmshard"  # what the image has; without one, the interpreter
    player.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        'open(os.path.join(os.environ["STATE"], "said"), "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))\n'
    )
    player.chmod(0o755)
    keys = {"python": str(player), "exports": {"WEIRD": evil}, "slurm": {"setup": ["export X=/tmp/$SLURM_JOB_ID"]}}
    keys["container"] = {"runtime": runtime, "image": image, "mounts": ["/data:/data:ro"]}
    arguments = ("finetune", "sequence", f"data.target=[{json.dumps(evil)}]")
    job = Job(name=evil, kind="finetune", arguments=arguments, out=evil, directory=str(cluster.work), nodes=2)
    job = job if runtime == "none" else dataclasses.replace(job, out="run")  # no runtime can mount any path
    script = render(job, Site.model_validate(keys), "slurm")
    assert re.search(r"^#SBATCH --job-name=[A-Za-z0-9._-]+$", script, re.MULTILINE)
    assert cluster.wait(cluster.start(script, 2)) == 0, cluster.log.read_text()
    argv, environment = json.loads((cluster.state / "said").read_text())
    assert argv == [*(("-m", "esmshard") if runtime == "none" else ()), *arguments]
    if runtime != "none":
        options = (cluster.state / {"pyxis": "srun", "apptainer": "apptainer"}[runtime]).read_text().split("\0")
        mounts, prefix = f"/data:/data:ro,{cluster.work}:{cluster.work}", "container-" if runtime == "pyxis" else ""
        assert f"--{prefix}{'mounts' if prefix else 'bind'}={mounts}" in options
        assert f"--{prefix}{'workdir' if prefix else 'pwd'}={cluster.work}" in options
        assert "--nv" not in options
        expected = {f"--container-image={image}", "--container-env=WEIRD,OMP_NUM_THREADS,ESMSHARD_CACHE,TMPDIR"}
        assert expected <= set(options) if prefix else image in options
    assert (environment["WEIRD"], environment["X"], environment["OMP_NUM_THREADS"]) == (evil, "/tmp/4001", "1")
    assert cluster.work.is_dir()
    assert not pwned.exists()


# Runs


def script_of(recipe: Path, *overrides: str) -> str:
    """On two nodes of one process each."""
    options = Options(target="slurm", nodes="2", nproc=1)
    job = finetune_job(str(recipe), overrides, options, site := Site.model_validate({"python": sys.executable}))
    return render(job, site, "slurm")


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line and "split" not in line]


@pytest.mark.parametrize("kind", ["preempted", "killed"])
def test_a_run_that_is_interrupted_ends_like_an_unbroken_one(
    kind: str, cluster: Cluster, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted, it saves and is requeued; after the loss of a rank the step starts again from the last checkpoint."""
    run, every = tmp_path / "run; $(touch pwned) 'q'", "1000" if kind == "preempted" else "4"
    longer = ("train.steps=30", "train.eval_every=30", f"checkpoint.every={every}")
    script, hold = script_of(tiny_recipe, *longer, f"out={json.dumps(str(run))}"), Hold(tmp_path / "hold", 5)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", hold.environment["PYTHONPATH"])
        shell = cluster.start(script, 2)
    hold.wait(lambda: shell.poll() is not None)
    if kind == "preempted":
        shell.send_signal(signal.SIGUSR1)
        hold.go_when_asked(lambda: shell.poll() is not None)
        assert cluster.wait(shell) == 75, cluster.log.read_text()
        assert cluster.requeued == ["4001"]
        shell = cluster.start(script, 2)
    else:
        os.kill(int((cluster.state / "task-1").read_text()), signal.SIGKILL)
        hold.go()
    assert cluster.wait(shell) == 0, cluster.log.read_text()
    assert ("a process was lost (exit code 137)" in cluster.log.read_text()) is (kind == "killed")
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["attempt"], status["job"]) == ("done", 30, 2, "4001")
    whole = tmp_path / "whole"
    done = esmshard("finetune", tiny_recipe, *longer, f"out={whole}", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(whole)
    assert [step for step, _ in losses(run)] == list(range(1, 31)), "none was taken twice"
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert not list(tmp_path.rglob("pwned"))


def test_a_mistake_of_all_ranks_is_said_once_and_ends_the_job(cluster: Cluster, tiny_recipe: Path) -> None:
    assert esmshard("finetune", tiny_recipe, "train.steps=1", "--nproc", "1", "--no-report").returncode == 0
    shell = cluster.start(script_of(tiny_recipe, "train.steps=1", "optim.lr=0.5"), 2)
    assert cluster.wait(shell) == 2, cluster.log.read_text()
    assert cluster.log.read_text().count("was written under another recipe") == 1
    assert (cluster.starts, cluster.requeued) == (1, [])


def test_workers_of_an_array_make_one_file(cluster: Cluster, tiny_recipe: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "emb.npy", ("starter", str(tmp_path / "train.fasta"))
    arguments = ("embed", *given, "-o", str(out), "--tokens", "64", "--engine", "array")
    settings: dict[str, Any] = {"array": 2, "starts_processes": True, "directory": str(cluster.work)}
    job = Job(name="emb", kind="embed", arguments=arguments, out=str(out), **settings)
    script = render(job, Site.model_validate({"python": sys.executable}), "slurm")
    array = {"SLURM_ARRAY_JOB_ID": "4001", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_CPUS_PER_TASK": "1"}
    shells = [cluster.start(script, SLURM_ARRAY_TASK_ID=str(n), **array) for n in range(2)]
    assert [cluster.wait(shell) for shell in shells] == [0, 0], cluster.log.read_text()
    assert esmshard("embed", *given, "-o", tmp_path / "alone.npy").returncode == 0
    np.testing.assert_allclose(np.load(out), np.load(tmp_path / "alone.npy"), atol=1e-5)
    assert out.with_suffix(".ids.txt").read_bytes() == (tmp_path / "alone.ids.txt").read_bytes()
    assert not (tmp_path / "emb.npy.partial").exists()
