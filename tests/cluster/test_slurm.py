"""Scripts for Slurm: what they say to sbatch and srun, that shellcheck is content, and the examples."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from esmshard.cli.app import app
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


def test_shellcheck_is_content(tmp_path: Path) -> None:
    """With each job under each profile, and with the wrapper of Kubernetes."""
    files = [launch.TEMPLATES / "torchrun_wrapper.sh"]
    for name, job in JOBS.items():
        for profile, keys in SITES.items():
            files.append(tmp_path / f"{name}-{profile}.sbatch")
            files[-1].write_text(render(job, site(**keys)))
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    checked = subprocess.run([shellcheck, "--severity=style", *files], check=False, capture_output=True, text=True)
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
        (dataclasses.replace(JOB, arguments=("a\0b",)), {}, "contains a character"),
    ):
        with pytest.raises(UsageError, match=problem):
            render(job, site(**keys))


def test_the_examples_are_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of deploy/slurm/render.sh, in this process."""
    monkeypatch.chdir("/")
    lines = (EXAMPLES / "render.sh").read_text().splitlines()
    written = {}
    for _, file, profile, what, *arguments in (line.split() for line in lines if line.startswith("render ")):
        monkeypatch.setenv("ESMSHARD_SITE", str(EXAMPLES / profile))
        done = CliRunner().invoke(app, ["launch", what, "--target", "slurm", "--dry-run", *arguments])
        assert done.exit_code == 0, done.output
        written[file] = done.stdout
    assert len(written) == 6
    assert written == {path.name: path.read_text() for path in EXAMPLES.glob("*.sbatch")}, "bash deploy/slurm/render.sh"
