"""Scripts for Slurm: what they say to sbatch and srun, that bash and shellcheck are content, and the examples."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from esmshard.cluster import launch
from esmshard.cluster.launch import Job, default_file
from esmshard.cluster.site import Site
from esmshard.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "deploy" / "slurm"
WEIRD = "a'b\"c\\d`e$f!g#h*i\nj k"

JOB = Job(
    name="contact",
    kind="finetune",
    arguments=("finetune", "contact", "--resume", "auto"),
    out="/shared/runs/contact",
    directory="/shared/work",
    reads=("/shared/data/train.fasta", "/models/mine"),
    gpus_per_node=4,
    nproc=4,
)
EMBED = dataclasses.replace(
    JOB, kind="embed", arguments=("embed", "m", "f", "-o", "e", "--engine", "array"), array=3, starts_processes=True
)
DOCTOR = dataclasses.replace(JOB, kind="doctor", arguments=("doctor",), nodes=2, min_nodes=2)
JOBS = {
    "one": JOB,
    "two": dataclasses.replace(JOB, nodes=2, min_nodes=2),
    "table": dataclasses.replace(JOB, starts_processes=True),
    "cpu": dataclasses.replace(JOB, gpus_per_node=0, nproc=2),
    "weird": dataclasses.replace(JOB, name=WEIRD, arguments=("finetune", WEIRD), out=f"/shared/{WEIRD}"),
    "embed": EMBED,
    "doctor": DOCTOR,
}
SITES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {
        "exports": {"A": WEIRD, "B": "1"},
        "slurm": {"partition": "gpu", "cpus_per_gpu": 8, "memory_per_gpu": "60G", "setup": ["ulimit -c 0"]},
    },
    "pyxis": {"container": {"runtime": "pyxis", "image": "nvcr.io#x/esmshard:1", "mounts": ["/shared", "/models"]}},
    "apptainer": {"container": {"runtime": "apptainer", "image": "/i/e.sif", "mounts": ["/shared", "/models"]}},
}


def render(job: Job, profile: Site) -> str:
    return launch.render(job, profile, "slurm")


def site(**keys: Any) -> Site:
    return Site.model_validate({"python": "/venv/bin/python", **keys})


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("profile", SITES)
@pytest.mark.parametrize("job", JOBS)
def test_bash_and_shellcheck_are_content(job: str, profile: str, tmp_path: Path) -> None:
    script = tmp_path / "x.sbatch"
    script.write_text(render(JOBS[job], site(**SITES[profile])))
    assert subprocess.run(["bash", "-n", script], check=False, capture_output=True).stderr == b""
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    checked = subprocess.run([shellcheck, "--severity=style", script], check=False, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_sbatch_gets_what_the_job_and_the_profile_say() -> None:
    keys = {"partition": "gpu", "account": "a", "time": "1:00:00", "memory_per_gpu": "60G", "cpus_per_gpu": 8}
    keys |= {"options": ["--mail-type=END"], "grace": 99}
    assert directives(render(JOBS["two"], site(gpus_per_node=4, slurm=keys))) == [
        *("job-name=contact", "partition=gpu", "account=a", "time=1:00:00"),
        *("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=8", "mem-per-gpu=60G"),
        *("output=contact-%j.out", "open-mode=append", "signal=B:USR1@99", "requeue", "mail-type=END"),
    ]
    assert directives(render(JOBS["cpu"], site())) == [
        *("job-name=contact", "nodes=1", "ntasks-per-node=2", "output=contact-%j.out"),
        *("open-mode=append", "signal=B:USR1@180", "requeue"),
    ]
    assert not {"requeue", "signal=B:USR1@180"} & set(directives(render(DOCTOR, site())))
    gpus = {"gpus": "--gres=gpu:a100:{n}"}
    assert "gres=gpu:a100:4" in directives(render(JOB, site(slurm=gpus)))
    assert not [line for line in directives(render(JOBS["cpu"], site(slurm=gpus))) if "gpu" in line]
    assert {"array=0-2", "output=contact-%A_%a.out"} <= set(directives(render(EMBED, site())))


def step(script: str) -> list[str]:
    """The words of the step of a script."""
    return re.findall(r"^ *exec (srun (?:.*\\\n)*.*)$", script, re.M)[-1].replace("\\\n", " ").split()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("job", "cpus_per_gpu", "tasks", "cores", "threads", "nproc"),
    [
        (JOBS["two"], 8, 4, 8, "SLURM_CPUS_PER_TASK / 1", None),
        (JOBS["two"], None, 4, None, "SLURM_CPUS_ON_NODE / 4", None),
        (JOBS["table"], 8, 1, 32, "SLURM_CPUS_PER_TASK / 4", "4"),
        (EMBED, None, 1, None, "SLURM_CPUS_ON_NODE / 4", "4"),
    ],
)
def test_each_process_is_a_task_unless_one_command_starts_them(
    job: Job, cpus_per_gpu: int | None, tasks: int, cores: int | None, threads: str, nproc: str | None
) -> None:
    script = render(job, site(slurm={"cpus_per_gpu": cpus_per_gpu}))
    words, told = step(script), directives(script)
    assert f"ntasks-per-node={tasks}" in told
    assert [line for line in told if line.startswith("cpus-per-task")] == ([f"cpus-per-task={cores}"] if cores else [])
    assert ('--cpus-per-task="$SLURM_CPUS_PER_TASK"' in words) == (cores is not None)
    assert f"threads=$(({threads}))" in script
    assert ("--nproc" in words, words[-1] == nproc) == (nproc is not None, nproc is not None)


def test_what_the_site_sets_up_comes_first_and_as_it_stands(tmp_path: Path) -> None:
    """In a shell that stops at a failure, but accepts a variable that is not set. What it exports is there later."""
    lines = ["module use /apps/modules", 'export SEEN="a $USER_NOT_SET b"; ulimit -c 0']
    script = render(dataclasses.replace(JOB, directory="/"), site(slurm={"setup": lines}))
    begin = script[: script.index("threads=")]
    place = tmp_path / "begin.sh"
    place.write_text(f'module() {{ echo "$*"; }}\n{begin}\necho "$SEEN $(ulimit -c)"; echo $-\n')
    done = subprocess.run(["bash", place], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["use /apps/modules", "a  b 0"]
    assert "e" in done.stdout.splitlines()[2]
    place.write_text(place.read_text().replace("ulimit -c 0", "false"))
    assert subprocess.run(["bash", place], check=False, capture_output=True).returncode == 1


def test_a_name_is_one_for_files_and_slurm() -> None:
    for name, expected in ((WEIRD, "a-b-c-d-e-f-g-h-i-j-k"), ("..", "esmshard"), ("x" * 90, "x" * 64)):
        assert str(default_file(dataclasses.replace(JOB, name=name), "slurm")) == f"{expected}.sbatch"


def test_an_operators_own_template(tmp_path: Path) -> None:
    template = tmp_path / "own.sh"
    template.write_text("#!/bin/bash\nsrun esmshard {{ arguments | join(' ') }} # {{ job.nodes }} {{ site.python }}\n")
    text = launch.render(JOB, site(), "slurm", template)
    assert text == "#!/bin/bash\nsrun esmshard finetune contact --resume auto # 1 /venv/bin/python\n"
    template.write_text("#!/bin/bash\n{{ jobs.nodes }}\n")
    with pytest.raises(UsageError, match=r"own\.sh.*'jobs' is undefined"):
        launch.render(JOB, site(), "slurm", template)


def test_containers() -> None:
    profile = {"runtime": "pyxis", "image": "x", "mounts": ["/data:/data:ro", "/shared", "/host:/models"]}
    script = render(JOB, site(container=profile))
    mounts = re.search(r"--container-mounts='?([^' ]*)", script)[1]  # type: ignore[index]
    assert mounts.split(",") == ["/data:/data:ro", "/shared:/shared", "/host:/models", "/shared/work:/shared/work"]
    odd = dataclasses.replace(JOB, directory="/a b")
    for job, keys, problem in (
        (JOB, {"container": {"runtime": "pyxis"}}, "container.image"),
        (odd, {"container": {"runtime": "pyxis", "image": "x"}}, "cannot mount"),
        *(
            (job, {"container": profile}, f"{path}: the container does not see it")
            for job, path in (
                (dataclasses.replace(JOB, out="/runs/x"), "/runs/x"),
                (dataclasses.replace(EMBED, reads=("/shared/../x.fasta",)), "/x.fasta"),
                (dataclasses.replace(EMBED, out="../../e"), "/e"),
            )
        ),
        (dataclasses.replace(JOB, arguments=("a\0b",)), {}, "holds a character"),
    ):
        with pytest.raises(UsageError, match=problem):
            render(job, site(**keys))


def test_the_examples_are_what_the_command_writes(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", EXAMPLES / "render.sh", tmp_path], check=True, env={**os.environ, "PATH": path})
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == 6
    assert written == {path.name: path.read_text() for path in EXAMPLES.glob("*.sbatch")}, "bash deploy/slurm/render.sh"
