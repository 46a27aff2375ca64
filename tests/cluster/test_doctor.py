"""`esmshard doctor`: what it finds, its exit code, and that it leaves nothing behind."""

import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import esmshard

from esmshard.cluster import doctor
from esmshard.errors import UsageError

A100 = "NVIDIA A100-SXM4-80GB, 535.104.05, 81920, {free}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory; at the end nothing of the doctor is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    yield tmp_path
    assert [path for path in tmp_path.rglob("*") if "doctor" in path.name] == []


def report(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> tuple[int, list[dict[str, str]]]:
    code = doctor.run(*(arguments or (None, ())), nproc=1, as_json=True, **options)
    text = json.loads(capsys.readouterr().out)
    assert text["exit_code"] == code
    findings: list[dict[str, str]] = text["findings"]
    assert all(one["fix"] for one in findings if one["level"] in ("warning", "error"))
    return code, findings


def only(findings: Sequence[dict[str, str]], check: str, *levels: str) -> list[str]:
    return [one["found"] for one in findings if one["check"] == check and one["level"] in levels]


def test_a_machine_without_gpus_and_a_recipe_that_runs(
    place: Path, tiny_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = report(capsys, str(tiny_recipe), [f"out={place / 'run'}"])
    assert code == 0
    assert {one["check"] for one in findings} == {"versions", "gpus", "machine", "disks", "recipe"}
    (ready,) = only(findings, "recipe", "ok")
    assert "6 steps" in ready
    assert not (place / "run").exists()


def test_a_recipe_that_cannot_run_here(
    place: Path, tiny_recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="did you mean"):
        doctor.run(str(tiny_recipe), ["optim.lrr=1"])
    for changes, found in (
        (["init=pretrained", "model.name=esm2_t33_650M_UR50D"], "is in no cache"),
        (["data.valid=none.fasta"], "none.fasta"),
    ):
        code, findings = report(capsys, str(tiny_recipe), changes)
        assert code == 1
        assert found in " ".join(only(findings, "recipe", "error"))


def test_gpus_and_a_torch_that_cannot_use_them(
    place: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    answer = "".join(f"{A100.format(free=free)}\n" for free in (81038, 20000))
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *arguments: answer)
    monkeypatch.setattr("shutil.which", lambda program: program)
    big = ["model.name=esm2_t36_3B_UR50D", "parallel.precision=auto", f"out={place / 'run'}"]
    code, findings = report(capsys, str(tiny_recipe), big)
    assert code == 1
    assert any("built without CUDA" in one["found"] for one in findings)
    assert len(only(findings, "gpus", "ok")) == 1
    assert "GPU 1: NVIDIA A100-SXM4-80GB" in only(findings, "gpus", "warning")[0]
    # 3B parameters in fp32 with gradients and moments take 42 GiB of two GPUs.
    assert "fits on 2 x A100-80GB: full_shard" in " ".join(only(findings, "recipe", "ok"))
    code, findings = report(capsys, str(tiny_recipe), [*big, "model.name=esm2_t48_15B_UR50D"])
    assert "full_shard does not fit on 2 x A100-80GB" in " ".join(only(findings, "recipe", "error"))


def test_a_driver_that_does_not_answer_versions_that_do_not_fit_and_a_directory_that_cannot_be_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Installed:
        def __init__(self, name: str, version: str) -> None:
            self.name, self.version = name, version

    there = [Installed(*one) for one in (("esmshard", "0.1.0"), ("numpy", "1.20"), ("esm", "3.2"), ("fair-esm", "2.0"))]
    answer = SimpleNamespace(returncode=9, stdout="NVIDIA-SMI has failed\n", stderr="")
    programs = SimpleNamespace(run=lambda *arguments, **options: answer, SubprocessError=subprocess.SubprocessError)
    monkeypatch.setattr("importlib.metadata.distributions", lambda: there)
    monkeypatch.setattr(doctor, "subprocess", programs)
    monkeypatch.setattr("shutil.which", lambda program: program)
    code, findings = report(capsys, out=Path("/proc/self/run"))
    assert code == 1
    assert "exit code 9: NVIDIA-SMI has failed" in only(findings, "gpus", "error")[0]
    assert "out: /proc/self cannot be written" in only(findings, "disks", "error")[0]
    errors = " ".join(only(findings, "versions", "error"))
    assert "numpy 1.20 does not fit >=1.26" in errors
    assert "torch is missing" in errors
    assert "both contain the package `esm`" in " ".join(only(findings, "versions", "warning"))


def test_processes_of_this_machine_are_timed(place: Path) -> None:
    done = esmshard("doctor", "--nproc", "2", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes: all-reduce of " in done.stdout
    assert done.stdout.count("cores for 2 processes") == 1, "a machine is looked at once"
    assert done.stdout.splitlines()[-1].startswith("0 errors, ")


def test_a_machine_whose_other_processes_never_come_reports_itself(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        port = str(asking.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}
    for name, value in (variables | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "START", 1)
    code, findings = report(capsys)
    assert code == 1
    assert "did not work together" in only(findings, "collectives", "error")[0]
    assert only(findings, "disks", "ok", "warning")
