"""What srun starts trains together, what only looks like it trains alone, and half a launcher is a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esmshard.parallel import launch

STEP = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[007-009,12]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def start(recipe: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "esmshard", "finetune", str(recipe), "--no-report", *arguments]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_SIZE"))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=kept | variables, **streams)  # type: ignore[call-overload,no-any-return]


def test_a_step_in_the_words_of_torch() -> None:
    found = launch.variables(STEP)
    assert int(found.pop("MASTER_PORT")) in launch.PORTS
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu007",
    }
    other = launch.variables(STEP | {"SLURM_STEP_ID": "4"})
    assert other["MASTER_PORT"] != launch.variables(STEP)["MASTER_PORT"], "two steps of a job run beside each other"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[3-5],b", "a3"), ("r[0-1]n[08,10]-ib", "r0n08-ib"), ("x[1]", "x1")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert launch.first_host(nodes) == first


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "812", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
)
def test_others_are_left_alone(environ: dict[str, str]) -> None:
    assert launch.variables(environ) == {}


def test_half_a_launcher_is_a_sentence(tiny_recipe: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    process = start(tiny_recipe, **environ)
    err = process.communicate(timeout=600)[1]
    assert process.returncode in (1, 2)
    assert "MASTER_ADDR" in err
    assert len(err.splitlines()) == 1


def test_two_tasks_of_a_step_train_together(tiny_recipe: Path) -> None:
    step = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_JOB_ID": str(os.getpid())}
    step |= {"SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
    tasks = [start(tiny_recipe, **step | {"SLURM_PROCID": n, "SLURM_LOCALID": n}) for n in ("0", "1")]
    errors = [task.communicate(timeout=600)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], errors
    lines = (tiny_recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "ranks" in line]
    assert len(steps) == 6
    assert all(len(line["ranks"]["residues_per_s"]) == 2 for line in steps)
    assert not any("trains alone" in error for error in errors)


def test_a_mistake_that_only_a_later_rank_sees_is_said_by_it(tiny_recipe: Path) -> None:
    alone = start(tiny_recipe, "optim.nonsense=1", **STEP)
    err = alone.communicate(timeout=600)[1]
    assert (alone.returncode, err) == (2, "error: optim.nonsense=1: optim.nonsense: unknown key\n")


def test_srun_with_pmi_is_srun() -> None:
    assert launch.variables(STEP | {"PMI_RANK": "3", "PMI_SIZE": "6"})["MASTER_ADDR"] == "gpu007"
