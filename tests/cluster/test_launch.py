"""`esmshard launch`: what becomes a job, and what is said before anything is in a queue."""

import json
import os
import re
from pathlib import Path

import pytest
from command import in_process
from ruamel.yaml import YAML

from esmshard.cluster.launch import Job, Options, doctor_job, embed_job, finetune_job, render
from esmshard.cluster.site import KubernetesSite, Site
from esmshard.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("ESMSHARD_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return work


def site(**keys: object) -> Site:
    return Site.model_validate(keys)


def slurm(**keys: object) -> Options:
    return Options(target="slurm", **keys)  # type: ignore[arg-type]


def test_a_recipe_becomes_a_run_that_goes_on(here: Path, tiny_recipe: Path) -> None:
    job = finetune_job(str(tiny_recipe), ["optim.lr=1e-4", "out=runs/x"], slurm(nodes="2", gpus_per_node=4), site())
    assert job == Job(
        name="tiny",
        kind="finetune",
        arguments=("finetune", str(tiny_recipe), "optim.lr=1e-4", "out=runs/x", "--resume", "auto"),
        out=str(here / "runs" / "x"),
        directory=str(here),
        reads=tuple(str(tiny_recipe.parent / name) for name in ("tiny.yaml", "train.fasta", "valid.fasta")),
        nodes=2,
        min_nodes=2,
        gpus_per_node=4,
        nproc=4,
    )


def test_options_come_before_the_profile() -> None:
    for options, profile, gpus, nproc in (
        ({"gpus_per_node": 2}, {"gpus_per_node": 8}, 2, 2),
        ({}, {"gpus_per_node": 8}, 8, 8),
        ({"nproc": 3}, {"gpus_per_node": 8}, 8, 3),
        ({"nproc": 3}, {}, 0, 3),
        ({}, {"gpus_per_node": 0}, 0, 1),
    ):
        job = finetune_job("contact", [], slurm(**options), site(**profile))
        assert (job.gpus_per_node, job.nproc, job.starts_processes) == (gpus, nproc, False)
        assert (job.arguments, job.reads) == (("finetune", "contact", "--resume", "auto"), ()), "it goes by its name"
    assert finetune_job("variants", [], slurm(nproc=2), site()).starts_processes, "a cross-validation"
    profile = site(python="/p", gpus_per_node=1, slurm={"time": "24:00:00"})
    for time, expected in ((None, "24:00:00"), ("2-00:00:00", "2-00:00:00")):
        job = finetune_job("contact", [], slurm(time=time), profile)
        assert f"#SBATCH --time={expected}\n" in render(job, profile, "slurm")
    for wrong in (slurm(time="1h; reboot"), Options(target="kubernetes", time="24:00:00")):
        with pytest.raises(UsageError, match="--time"):
            doctor_job([], wrong, profile)


def test_what_cannot_run_is_refused() -> None:
    for recipe, overrides, options, problem in (
        ("contact", ["optim.lrr=1"], {"gpus_per_node": 1}, "did you mean 'lr'?"),
        ("kontact", [], {"gpus_per_node": 1}, "neither a file nor a shipped recipe"),
        ("contact", [], {}, "--gpus-per-node N"),
        *(("contact", [], {"gpus_per_node": 1, "nodes": nodes}, f"--nodes {nodes}: ") for nodes in ("2:1", "1:4", "x")),
        ("contact", [], {"gpus_per_node": 1, "array": 3}, "--array is for embed"),
        ("variants", [], {"nproc": 2, "nodes": "2"}, "cross-validation of variants uses one node"),
        ("contact", ["adapt.method=probe", "task.head=attention"], {"nproc": 2}, "probe: runs in one process"),
    ):
        with pytest.raises(UsageError, match=re.escape(problem)):
            finetune_job(recipe, overrides, slurm(**options), site())
    job = doctor_job(["contact"], slurm(nodes="2", gpus_per_node=8), site())
    assert (job.arguments, job.kind, job.nodes, job.min_nodes) == (("doctor", "contact"), "doctor", 2, 2)
    with pytest.raises(UsageError, match="doctor checks a fixed number of nodes; pass --nodes "):
        doctor_job([], slurm(nodes="1:2", gpus_per_node=8), site())


def test_for_kubernetes_the_recipe_travels_and_paths_are_those_of_the_pods(here: Path, tiny_recipe: Path) -> None:
    profile = Site(kubernetes=KubernetesSite(mount="/vol"))  # type: ignore[call-arg]
    options = Options(target="kubernetes", gpus_per_node=1)
    job = finetune_job(str(tiny_recipe), ["out=runs/x"], options, profile)
    assert job.arguments[:2] == ("finetune", "/vol/tiny.yaml")
    assert (job.out, job.recipe_text) == ("/vol/runs/x", tiny_recipe.read_text())
    shipped = finetune_job("contact", [], options, profile)
    assert (shipped.arguments[1], shipped.recipe_text) == ("contact", None)


def test_the_command_writes_the_file_and_says_how_to_submit_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # without sbatch
    command = ("launch", "contact", "--target", "slurm", "--gpus-per-node", "2", "--name", "my run")
    printed = in_process(*command, "--dry-run", cwd=here)
    assert (printed.returncode, list(here.iterdir())) == (0, [])
    done = in_process(*command, cwd=here)
    assert done.returncode == 0
    assert done.stdout.startswith("my-run.sbatch\nno sbatch on this machine")
    assert (here / "my-run.sbatch").read_text() == printed.stdout
    assert "#SBATCH --gpus-per-node=2" in printed.stdout.splitlines()
    assert "does not exist; all keys have their defaults" in done.stderr
    refused = in_process(*command, "--time", "1:00", cwd=here)
    assert (refused.returncode, "my-run.sbatch: exists already" in refused.stderr) == (2, True)
    assert in_process(*command, "--time", "1:00", "--overwrite", cwd=here).returncode == 0
    assert "#SBATCH --time=1:00" in (here / "my-run.sbatch").read_text()

    sbatch = here / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho "sbatch: error: invalid partition specified: $1" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent))
    done = in_process("launch", "contact", "--target", "slurm", "--nproc", "1", "-o", "-x.sbatch", cwd=here)
    assert done.returncode == 1
    assert "sbatch refuses it: sbatch: error: invalid partition specified: ./-x.sbatch" in done.stderr


def test_mistakes_in_embeds_own_arguments_show_at_once(here: Path) -> None:
    for arguments, problem in (
        ("starter a.fasta -o x.h5 --pol mean", "No such option: --pol"),
        ("starter a.fasta", "-o: name the file"),
        ("starter - -o x.h5", "-: a job has no standard input"),
        ("starter a.fasta -o x.h5 --overwrite", "--overwrite"),
        ("starter a.fasta -o x.h5 --dry-run", "--dry-run"),
    ):
        done = in_process("launch", "embed", "--target", "slurm", "--array", "4", "--", *arguments.split())
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
    assert list(here.iterdir()) == []


def test_workers_of_embed_share_the_output(here: Path) -> None:
    (here / "a.fasta").touch()
    given = ("--", "esm2_t6_8M_UR50D", "a.fasta", "-o", "emb", "--pool", "mean")
    done = in_process("launch", "embed", "--target", "slurm", "--array", "4", "--dry-run", *given, cwd=here)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "#SBATCH --array=0-3" in lines
    assert "#SBATCH --gpus-per-node=1" in lines
    joined = " ".join(done.stdout.replace("\\\n", " ").split())
    assert "embed esm2_t6_8M_UR50D a.fasta -o emb --pool mean --engine array --nproc 1 }" in joined
    (here / "a.fasta").unlink()
    done = in_process("launch", "embed", "--target", "slurm", "--dry-run", *given, cwd=here)
    assert f"{here}/a.fasta: does not exist on this machine" in done.stderr
    given = ("--", "esm2_t6_8M_UR50D", "s3://b/a.fasta", "-o", "s3://b/emb")
    done = in_process("launch", "embed", "--target", "slurm", "--dry-run", *given, cwd=here)
    assert (done.returncode, "does not exist on this machine" in done.stderr) == (0, False)
    assert "embed esm2_t6_8M_UR50D s3://b/a.fasta -o s3://b/emb --nproc 1" in done.stdout


def test_tracks_and_complexes_are_among_what_the_job_reads(here: Path) -> None:
    overrides = ["data.train=pdb", "data.complexes=c.tsv"]
    assert f"{here}/c.tsv" in finetune_job("contact", overrides, slurm(nproc=1), site()).reads
    parsed = {"model": "saprot_35m", "fasta": Path("a.fasta"), "out": Path("emb"), "reuse": None, "nproc": None}
    parsed |= {"overwrite": False, "dry_run": False, "engine": "local", "worker": None}
    parsed["track"] = ["3di=letters.fasta", "coordinates=inside"]
    job = embed_job((), parsed, slurm(), site())
    assert job.reads == (f"{here}/a.fasta", f"{here}/letters.fasta")
    with pytest.raises(UsageError, match=r"--track letters\.fasta: write NAME=PATH"):
        embed_job((), parsed | {"track": ["letters.fasta"]}, slurm(), site())


def test_the_kubernetes_file_is_rendered(here: Path) -> None:
    profile = {"gpus_per_node": 1, "container": {"image": "esmshard:1"}, "kubernetes": {"claim": "shared"}}
    (here / "config").mkdir()
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "esmshard"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(json.dumps(profile))
    done = in_process("launch", "contact", "--target", "kubernetes", "--dry-run", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"site profile: {folder / 'site.yaml'}\n"
    job = list(YAML(typ="safe").load_all(done.stdout))[-1]
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert (job["kind"], container["image"], container["args"][:2]) == ("Job", "esmshard:1", ["finetune", "contact"])


def test_the_file_never_replaces_the_recipe(tiny_recipe: Path) -> None:
    given, text = ("launch", "tiny.yaml", "--target", "slurm", "--nproc", "1"), tiny_recipe.read_text()
    done = in_process(*given, "-o", "tiny.yaml", "--overwrite", cwd=tiny_recipe.parent)
    assert (done.returncode, "tiny.yaml: is an input of the job" in done.stderr) == (2, True)
    assert tiny_recipe.read_text() == text
