"""The variables of srun in the words of torch, what is left alone, and half a launcher."""

import os
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

from esmshard.cli import app
from esmshard.errors import UsageError
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


def test_a_step_in_the_words_of_torch() -> None:
    found = launch.variables(STEP | {"PMI_RANK": "3", "PMI_SIZE": "6"})
    port = found.pop("MASTER_PORT")
    assert int(port) in launch.PORTS
    ranks = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert found == ranks | {"MASTER_ADDR": "gpu007"}
    other = launch.variables(STEP | {"SLURM_STEP_ID": "4"})
    assert other["MASTER_PORT"] != port, "two steps of a job run beside each other"
    assert launch.variables({}) == {}
    assert launch.variables({"SLURM_JOB_ID": "812", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == {}
    lists = {"n1": "n1", "n1,n2": "n1", "a[3-5],b": "a3", "r[0-1]n[08,10]-ib": "r0n08-ib", "x[1]": "x1"}
    assert {nodes: launch.first_host(nodes) for nodes in lists} == lists


def test_half_a_launcher_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    launch.check()
    monkeypatch.setenv("RANK", "0")
    for size in ("2", "1x"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(UsageError, match="MASTER_ADDR"):
            launch.check()


def test_a_mistake_that_only_a_later_rank_sees_is_said_by_it(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = ("SLURM_", "MASTER_", "RANK", "WORLD_SIZE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(launch, "FIRST_LEAVES", 0.1)
    monkeypatch.setattr(sys, "argv", ["esmshard", "finetune", str(tiny_recipe), "optim.nonsense=1"])
    with mock.patch.dict(os.environ, clean | STEP, clear=True), pytest.raises(SystemExit) as left:
        app._main()
    signal.signal(signal.SIGTERM, handler)
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: optim.nonsense=1: optim.nonsense: unknown key\n"
