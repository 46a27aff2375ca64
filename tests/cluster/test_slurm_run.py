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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from held_runs import Hold

from esmshard.cluster.launch import Job, Options, finetune_job, render
from esmshard.cluster.site import Site

TESTS = Path(__file__).parents[1]
PLAYED = """\
#!/bin/bash
# Leaves with the codes of its starts; the first start may wait until it is asked.
codes=($CODES) n=$(ls "$STATE" | grep -c ^start-)
touch "$STATE/start-$n"
trap 'echo USR1 >> "$STATE/heard"' USR1
trap 'echo TERM >> "$STATE/heard"' TERM
if [[ $ASKED && $n = 0 ]]; then
    touch "$STATE/listening"
    while [[ ! -e $STATE/heard ]]; do sleep 0.01; done
fi
exit "${codes[n]}"
"""
# Plays the jobs of `plays` in turn: codes, the signal that is sent, the state of the job, and whether it goes back.
PLAYS = """\
while IFS='|' read -r CODES ASKED job_state no_requeue; do
    n=$((n + 1))
    export CODES ASKED STATE=$PWD/play-$n
    mkdir "$STATE" && echo "$job_state" > "$STATE/job-state"
    [ -z "$no_requeue" ] || touch "$STATE/no-requeue"
    bash job.sbatch 2>> "$STATE/log" &
    if [ -n "$ASKED" ]; then
        while [ ! -e "$STATE/listening" ]; do sleep 0.01; done
        kill -"$ASKED" $!
    fi
    wait $!
    echo $? > "$STATE/code"
done < plays
"""
SRUN = """\
#!{python}
import importlib, os, signal, subprocess, sys, time
from pathlib import Path
state, size, popen = Path(os.environ["STATE"]), int(os.environ["SLURM_NTASKS"]), subprocess.Popen
step = len(list(state.glob("start-*")))
(state / f"start-{{step}}").touch()
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
(state / "srun").write_text("\\0".join(sys.argv[1 : -len(command)]))
if command[0] == sys.executable:  # tasks of esmshard are forked, so that torch is imported once
    sys.path.insert(0, "{tests}")
    import command as forking
    popen = forking.Forked
    for module in forking.IMPORTED:
        importlib.import_module(module)
nodes = [f"127.0.0.{{n + 1}}" for n in range(size)]
known = {{"SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": ",".join(nodes), "SLURM_STEP_NUM_TASKS": size}}
known |= {{"SLURM_STEP_TASKS_PER_NODE": f"1(x{{size}})", "SLURM_LOCALID": 0}}
tasks = []
for rank in range(size):
    mine = known | {{"SLURM_NODEID": rank, "SLURM_PROCID": rank, "SLURMD_NODENAME": nodes[rank]}}
    tasks.append(popen(command, env={{**os.environ, **{{k: str(v) for k, v in mine.items()}}}}))
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
            path.mkdir(parents=True)
        self.programs = {
            "scontrol": SCONTROL,
            "srun": SRUN.format(python=sys.executable, tests=TESTS),
            "apptainer": APPTAINER,
        }
        (self.state / "job-state").write_text("RUNNING")
        self.shells: list[subprocess.Popen[bytes]] = []

    def start(self, script: str, tasks: int = 1, command: str = "exec bash job.sbatch", **variables: str) -> Any:
        """Start the shell of the job, as Slurm does at first and after a requeue."""
        (self.work / "job.sbatch").write_text(script)
        for name, text in self.programs.items():
            program = self.state.parent / "bin" / name
            program.write_text(text)
            program.chmod(0o755)
        known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        known |= {"PATH": f"{self.state.parent / 'bin'}:{os.environ['PATH']}", "STATE": str(self.state)}
        known |= {"SLURM_JOB_ID": "4001", "SLURM_NTASKS": str(tasks), "SLURM_CPUS_ON_NODE": "1", **variables}
        streams: dict[str, Any] = {"cwd": self.work, "start_new_session": True}
        with open(self.log, "ab") as log:
            self.shells.append(subprocess.Popen(["bash", "-c", command], env=known, stdout=log, stderr=log, **streams))
        return self.shells[-1]

    def wait(self, shell: "subprocess.Popen[bytes]") -> int:
        return shell.wait(900)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    for shell in made.shells:  # of a test that failed
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)


PLAYED_JOBS = [
    # codes of the starts, signal, state of the job, no requeue; requeued, exit code
    ("0", "", "RUNNING", "", False, 0),
    *((str(asked), "", "RUNNING", "", True, 75) for asked in (75, 138)),  # USR1 may come before the run can take one
    *((f"{lost} 0", "", "RUNNING", "", False, 0) for lost in (69, 70, 137, 143)),  # in the same job
    ("69 137 75", "", "RUNNING", "", True, 75),
    ("69 70 137 139", "", "RUNNING", "", False, 139),  # the fourth start was the last one
    *((str(mistake), "", "RUNNING", "", False, mistake) for mistake in (1, 2, 130)),
    # Who was asked to stop and was lost with it, or heard it too early to save, goes back into the queue as well.
    *((str(code), name, "RUNNING", "", True, 75) for code, name in ((75, "TERM"), (143, "USR1"), (137, "TERM"))),
    # A job that is cancelled is not requeued, and one that ends is done.
    *((str(code), "TERM", "COMPLETING", "", False, 75) for code in (75, 137)),
    ("0", "USR1", "RUNNING", "", False, 0),
    ("75", "", "RUNNING", "yes", False, 75),
]


def test_exit_codes_and_signals_decide_what_is_started_again(cluster: Cluster) -> None:
    cluster.programs["srun"] = PLAYED
    (cluster.work / "plays").write_text("".join("|".join(play[:4]) + "\n" for play in PLAYED_JOBS))
    job = Job(name="x", kind="finetune", arguments=("finetune", "contact"), out="run", directory=str(cluster.work))
    script = render(job, Site.model_validate({"python": "/python"}), "slurm")
    assert cluster.wait(cluster.start(script, command=PLAYS)) == 0, cluster.log.read_text()
    for n, (codes, asked, _, _, requeued, code) in enumerate(PLAYED_JOBS, 1):
        state = cluster.work / f"play-{n}"
        assert int((state / "code").read_text()) == code, (n, (state / "log").read_text())
        assert (state / "requeued").exists() == requeued, n
        assert len(list(state.glob("start-*"))) == len(codes.split()), n
        if asked:
            assert (state / "heard").read_text() == "USR1\n", "at a TERM srun would end the tasks"
    assert "esmshard: job 4001 is not requeued" in (state / "log").read_text()


def test_whatever_a_value_holds_it_arrives_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    pwned, image = tmp_path / "pwned", str(tmp_path / "esm shard's.sqsh")
    evil = f"x; rm -rf {cluster.work}; $(touch {pwned}) `touch {pwned}` 'q' \"d\" \\ # $HOME !! %s\nz *"
    player = tmp_path / "cluster" / "bin" / "esmshard"  # what the image has; without one, the interpreter
    player.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        'open(os.path.join(os.environ["STATE"], "said"), "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))\n'
    )
    player.chmod(0o755)
    arguments = ("finetune", "sequence", f"data.target=[{json.dumps(evil)}]")
    for runtime in ("none", "pyxis", "apptainer", "stops"):
        setup = ["export X=/tmp/$SLURM_JOB_ID$USER_NOT_SET; ulimit -c 0", *(["false"] if runtime == "stops" else [])]
        keys: dict[str, Any] = {"python": str(player), "exports": {"WEIRD": evil}, "slurm": {"setup": setup}}
        container = {"runtime": runtime.replace("stops", "none"), "image": image, "mounts": ["/data:/data:ro"]}
        job = Job(name=evil, kind="finetune", arguments=arguments, out=evil, directory=str(cluster.work), nodes=2)
        if runtime in ("pyxis", "apptainer"):
            job = dataclasses.replace(job, out="run")  # no runtime can mount any path
        script = render(job, Site.model_validate(keys | {"container": container}), "slurm")
        assert re.search(r"^#SBATCH --job-name=[A-Za-z0-9._-]+$", script, re.MULTILINE)
        (cluster.work / f"{runtime}.sbatch").write_text(script)
    runs = "for r in none pyxis apptainer; do export STATE=$PWD/of-$r; mkdir $STATE; bash $r.sbatch || exit 9; done\n"
    runs += "mkdir of-stops; STATE=$PWD/of-stops bash stops.sbatch && exit 8; exit 0"
    assert cluster.wait(cluster.start("", 2, command=runs)) == 0, cluster.log.read_text()
    assert list((cluster.work / "of-stops").iterdir()) == [], "the job ends where a line of the setup fails"
    for runtime in ("none", "pyxis", "apptainer"):
        state = cluster.work / f"of-{runtime}"
        argv, environment = json.loads((state / "said").read_text())
        assert argv == [*(("-m", "esmshard") if runtime == "none" else ()), *arguments]
        if runtime != "none":
            options = (state / {"pyxis": "srun", "apptainer": "apptainer"}[runtime]).read_text().split("\0")
            mounts, prefix = f"/data:/data:ro,{cluster.work}:{cluster.work}", "container-" * (runtime == "pyxis")
            assert f"--{prefix}{'mounts' if prefix else 'bind'}={mounts}" in options
            assert f"--{prefix}{'workdir' if prefix else 'pwd'}={cluster.work}" in options
            assert "--nv" not in options
            expected = {f"--container-image={image}", "--container-env=WEIRD,OMP_NUM_THREADS,ESMSHARD_CACHE,TMPDIR"}
            assert expected <= set(options) if prefix else image in options
        assert (environment["WEIRD"], environment["X"], environment["OMP_NUM_THREADS"]) == (evil, "/tmp/4001", "1")
    assert cluster.work.is_dir()
    assert not pwned.exists()


# Runs


def test_a_run_that_is_interrupted_goes_on_to_its_end(
    cluster: Cluster, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of a rank, and after a preemption. tests/distributed/test_saver.py compares the losses."""
    run = tmp_path / "run; $(touch pwned) 'q'"
    longer = ("train.steps=16", "train.eval_every=16", "checkpoint.every=4")
    options = Options(target="slurm", nodes="2", nproc=1)
    site = Site.model_validate({"python": sys.executable})
    job = finetune_job(str(tiny_recipe), [*longer, f"out={json.dumps(str(run))}"], options, site)
    script = render(job, site, "slurm").replace("--resume auto", "--resume auto --no-report")
    hold = Hold(tmp_path / "hold", 5)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", hold.environment["PYTHONPATH"])
        shell = cluster.start(script, 2)
    hold.wait(lambda: shell.poll() is not None)
    os.kill(int((cluster.state / "task-1").read_text()), signal.SIGKILL)
    hold.at(9)
    hold.wait(lambda: shell.poll() is not None)
    assert "a process was lost (exit code 137)" in cluster.log.read_text()
    shell.send_signal(signal.SIGUSR1)
    hold.go_when_asked(lambda: shell.poll() is not None)
    assert cluster.wait(shell) == 75, cluster.log.read_text()
    assert cluster.wait(cluster.start(script, 2)) == 0, cluster.log.read_text()
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["attempt"], status["job"]) == ("done", 16, 3, "4001")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if "loss" in line and "split" not in line]
    assert steps == list(range(1, 17)), "none was taken twice"
    assert (run / "model" / "model.safetensors").is_file()
    assert not list(tmp_path.rglob("pwned"))
    assert len(list(cluster.state.glob("start-*"))) == 3
    assert (cluster.state / "requeued").read_text() == "4001\n"
