"""Devices by name: `--device` and `device=`. No GPU is needed to see which device is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import in_process

import esmshard
from esmshard.errors import InputError, UsageError
from esmshard.parallel.process_group import own_device
from esmshard.train import loop
from esmshard.train.resume import history

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that there are two GPUs. A computation on one of them would fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_processes_share_the_kind_of_device_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [own_device(n, 2, "cuda") for n in range(2)] == [torch.device("cuda", n) for n in range(2)]
    assert [own_device(n, 3, "cpu") for n in range(3)] == [CPU] * 3
    assert own_device(0, 1, "cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InputError, match="sees 2 of"):
        own_device(2, 3, "cuda")
    with pytest.raises(UsageError, match=r"device cuda:1: is a single GPU.*pass --nproc 1, or --device cuda or cpu"):
        own_device(0, 2, "cuda:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert own_device(0, 1, "mps") == torch.device("mps")
    with pytest.raises(UsageError, match="device mps: is a single GPU"):
        own_device(0, 2, "mps")


@pytest.mark.usefixtures("two_gpus")
def test_everything_runs_on_the_cpu_of_a_machine_with_gpus_and_a_change_of_the_kind_is_said(
    tmp_path: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert esmshard.load("starter", "cpu").device == CPU
    assert esmshard.SequenceEmbedder(device="cpu").transform(["MKTAYIAK"]).shape == (1, 192)
    with pytest.raises(UsageError, match="device cuda:1: is a single GPU"):
        esmshard.finetune(tiny_recipe, device="cuda:1", nproc=2, out=tmp_path / "two")
    assert not (tmp_path / "two").exists()
    how: dict[str, Any] = {"device": "cpu", "out": tmp_path / "run", "report": False}
    with monkeypatch.context() as patch:
        # as if it had been computed there
        patch.setattr(loop, "history", lambda saved, steps, device: history(saved, steps, torch.device("cuda")))
        esmshard.finetune(tiny_recipe, train={"steps": 1}, **how)
    capfd.readouterr()
    run = esmshard.finetune(tiny_recipe, train={"steps": 2}, resume="auto", **how)
    says = "computed on cuda, then cpu: the numbers of two kinds of device agree up to rounding only"
    assert says in capfd.readouterr().err
    facts = json.loads((run.path / "versions.json").read_text())
    assert (facts["device"], facts["processes"], "gpu" in facts) == ("cpu", 1, False)
    assert run.evaluation["device"] == "cpu"
    state = max((run.path / "checkpoints").glob("step_*")) / "state.json"
    for file in (run.path / "versions.json", state):
        assert [start["device"] for start in json.loads(file.read_text())["history"]] == ["cuda", "cpu"]


COMMANDS = {
    "finetune": ["mlm"],
    "embed": ["starter", "x.fasta", "-o", "x.npy"],
    "predict": ["starter", "x.fasta", "-o", "x.csv"],
    "score": ["starter", "x.fasta", "-o", "x.csv"],
    "evaluate": ["starter", "sample:contact/test", "-o", "x"],
    "track": ["structure_tokens", "x.pdb", "--weights", "x.pth", "-o", "x.npz"],
}


def test_every_command_that_computes_refuses_a_device_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, arguments in COMMANDS.items():
        done = in_process(name, *arguments, "--device", "cuda:77")
        assert (done.returncode, "device cuda:77: this machine has cpu" in done.stderr) == (2, True), name
