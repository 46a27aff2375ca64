"""`esmshard doctor` as a user types it: what it says, its exit code, and that it leaves nothing behind."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import esmshard
from model_files import TINY, fair_esm, write_fair_esm, write_transformers

KEYS = {"schema", "esmshard", "host", "hosts", "processes", "summary", "exit_code", "findings"}
OF_A_FINDING = {"check", "name", "level", "found", "mend", "values", "node"}
GROUPS = ["versions", "gpus", "links", "machine", "storage", "recipe", "collectives"]
CARD = (
    "0, GPU-5f7c, NVIDIA A100-SXM4-80GB, {driver}, 8.0, 81920, 81038, Enabled, 0, Disabled, Default, Enabled, 31, "
    "0x0000000000000001"
)


def by_name(report: dict[str, Any]) -> dict[str, Any]:
    return {f"{one['check']}/{one['name']}": one for one in report["findings"]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with its own TMPDIR and cache; at the end both are empty again."""
    for name in ("work", "tmp", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "work"
    left = [path for path in tmp_path.rglob("*") if "doctor" in path.name or "nccl" in path.name]
    assert left == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_report_for_programs(place: Path) -> None:
    done = esmshard("doctor", "--json", cwd=place)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    assert report.keys() == KEYS
    assert report["schema"] == 1
    assert report["processes"] == 2
    assert report["hosts"] == [report["host"]] == [socket.gethostname()]
    assert report["exit_code"] == 0
    assert all(one.keys() == OF_A_FINDING for one in report["findings"])
    assert all(one["mend"] for one in report["findings"] if one["level"] in ("warning", "error"))
    groups = [one["check"] for one in report["findings"]]
    assert list(dict.fromkeys(groups)) == GROUPS
    levels = [one["level"] for one in report["findings"]]
    assert report["summary"] == {level: levels.count(level) for level in ("ok", "note", "warning", "error")}

    found = by_name(report)
    speeds = found["collectives/bandwidth all"]["values"]["speeds"]
    assert [one["collective"] for one in speeds] == ["all_gather", "reduce_scatter"]
    for one in speeds:
        assert one["ranks"] == 2
        assert one["bus"] == pytest.approx(one["bytes"] / one["seconds"] / 2)
        assert 1e6 < one["bus"] < 1e12
    versions = found["collectives/versions"]["values"]["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["recipe/precision"]["values"]["kernel"] == "slices"
    assert found["storage/out speed"]["values"]["write"] > 0


def test_report_for_people_and_a_recipe(place: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = esmshard("doctor", tiny_recipe, f"out={place / 'run'}", "--nproc", "1", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")][:-1] == GROUPS
    assert "  ok       weights          nano starts from random weights: none are needed" in lines
    assert "  ok       data             records: train 24, valid 5, test 5" in lines
    assert any("fits into 1 process of this CPU: 130 tokens at a time" in line for line in lines)
    assert any("precision fp32 is fp32 on cpu; attention kernel: slices" in line for line in lines)
    assert any("one process has no collective to measure; --nproc 2 starts two" in line for line in lines)
    assert lines[-1].startswith("1 machine, 1 process: 0 errors, ")
    assert not (place / "run").exists()


def test_recipe_that_cannot_run_here(place: Path, tiny_recipe: Path) -> None:
    changes = ["model.name=esm2_t33_650M_UR50D", "init=pretrained", "batch.tokens_per_rank=200000"]
    changes += ["batch.global_tokens=200000", f"out={place / 'run'}"]
    done = esmshard("doctor", tiny_recipe, *changes, "--nproc", "1", "--json", cwd=place)
    found = by_name(json.loads(done.stdout))
    assert done.returncode == 1
    assert found["recipe/weights"]["level"] == "error"  # tests may not download
    assert "HF_HUB_OFFLINE forbids" in found["recipe/weights"]["found"]
    assert found["recipe/weights"]["mend"].startswith("esmshard download esm2_t33_650M_UR50D")
    assert found["recipe/memory"]["level"] == "error"
    assert "does not fit into 1 process of this CPU: 200,000 tokens" in found["recipe/memory"]["found"]
    # 650M in fp32: 2.6 GB of weights and 5.2 of moments, in 2 + 1 checkpoints, and the model.
    assert 25e9 < found["storage/out space"]["values"]["needed"] < 27e9


def test_what_a_run_writes_is_known_of_a_model_in_a_file(place: Path, tiny_recipe: Path) -> None:
    model = write_fair_esm(place / "esm2_tiny.pt", fair_esm(TINY))
    done = esmshard(
        "doctor", tiny_recipe, f"model.name={model}", "init=pretrained", "--nproc", "1", "--json", cwd=place
    )
    found = by_name(json.loads(done.stdout))
    assert done.returncode == 0, done.stdout
    assert found["recipe/weights"]["found"] == f"{model} is present"
    weights = 4 * TINY.n_parameters
    # In 2 + 1 checkpoints with two moments each, and the model; the head is small.
    assert 1 <= found["storage/out space"]["values"]["needed"] / (10 * weights) < 1.1


def test_a_repository_of_the_hub_is_looked_for_in_its_cache(
    place: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    snapshots = place / "hub" / "models--lab--esm2_mine" / "snapshots"
    snapshots.mkdir(parents=True)
    write_transformers(snapshots / ("a" * 40), fair_esm(TINY), TINY)
    checked = {}
    for name in ("lab/esm2_mine", "lab/other"):
        done = esmshard(
            "doctor", tiny_recipe, f"model.name={name}", "init=pretrained", "--nproc", "1", "--json", cwd=place
        )
        checked[name] = by_name(json.loads(done.stdout))["recipe/weights"]
    assert (checked["lab/esm2_mine"]["level"], checked["lab/other"]["level"]) == ("ok", "error")
    assert checked["lab/esm2_mine"]["found"] == "lab/esm2_mine is present"
    assert "lab/other is in no cache, and HF_HUB_OFFLINE forbids" in checked["lab/other"]["found"]
    assert checked["lab/other"]["mend"].startswith("esmshard download lab/other")


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_model_that_does_not_exist(place: Path, tiny_recipe: Path, init: str) -> None:
    empty = place / "empty"
    empty.mkdir()
    for name, says in (("esm2_t99_9B", "no such file or directory"), (str(empty), "config.json")):
        done = esmshard(
            "doctor", tiny_recipe, f"model.name={name}", f"init={init}", "--nproc", "1", "--json", cwd=place
        )
        found = by_name(json.loads(done.stdout))["recipe/weights"]
        assert (done.returncode, found["level"]) == (1, "error"), name
        assert says in found["found"]
        assert "model.name" in found["mend"]


def test_recipe_whose_data_are_not_there(place: Path, tiny_recipe: Path) -> None:
    (tiny_recipe.parent / "valid.fasta").unlink()
    done = esmshard("doctor", tiny_recipe, "--nproc", "1", "--json", cwd=place)
    found = by_name(json.loads(done.stdout))
    assert done.returncode == 1
    assert found["recipe/data"]["level"] == "error"
    assert f"valid: {tiny_recipe.parent / 'valid.fasta'}" in found["recipe/data"]["found"]


def test_wrong_usage(place: Path, tiny_recipe: Path) -> None:
    for arguments, said in (
        (["doctor", "no-such-recipe"], "no-such-recipe"),
        (["doctor", str(tiny_recipe), "optim.lrr=1"], "did you mean"),
        (["doctor", "optim.lr=1"], "optim.lr=1"),
    ):
        done = esmshard(*arguments, cwd=place)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


def _nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_gpus_and_a_torch_that_cannot_use_them(
    place: Path, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    cards = [CARD.format(driver="535.104.05"), CARD.format(driver="535.104.05").replace("0, GPU-5f7c", "1, GPU-6a")]
    script = f"""case "$1" in
--query-gpu=*) echo '{cards[0]}'; echo '{cards[1]}';;
--query-compute-apps=*) echo 'GPU-5f7c, 77, /usr/bin/python3, 61000';;
esac"""
    _nvidia_smi(tmp_path / "bin", script, monkeypatch)
    big = ["model.name=esm2_t36_3B_UR50D", "parallel.precision=auto", f"out={place / 'run'}"]
    done = esmshard("doctor", tiny_recipe, *big, "--nproc", "2", "--json", cwd=place)
    found = by_name(json.loads(done.stdout))
    assert done.returncode == 1
    driver = found["versions/driver"]
    assert driver["level"] == "error"
    assert "2 x NVIDIA A100-SXM4-80GB, but torch" in driver["found"]
    assert "--index-url https://download.pytorch.org/whl/cu126" in driver["mend"]
    assert found["gpus/gpu 1"]["values"]["capability"] == [8, 0]
    assert "python3 (pid 77, 61000 MiB)" in found["gpus/gpu 0 free"]["found"]
    # Planned for the GPUs that are there: 3B parameters in fp32 with gradients and moments take 42 GiB of two.
    memory = found["recipe/memory"]
    assert memory["level"] == "ok", memory
    assert "fits on 2 x A100-80GB: full_shard" in memory["found"]
    assert 20 * 2**30 < memory["values"]["total"] < 30 * 2**30


def test_driver_that_does_not_answer_is_no_traceback(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    _nvidia_smi(tmp_path / "bin", f'echo "{said}"; exit 9', monkeypatch)
    done = esmshard("doctor", "--nproc", "1", cwd=place)
    assert done.returncode == 1
    assert f"  ERROR    nvidia-smi       nvidia-smi (exit code 9): {said}" in done.stdout
    assert "           fix: load the driver (modprobe nvidia)" in done.stdout
    assert "doctor: there are errors" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_that_cannot_meet_are_a_finding(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    done = esmshard("doctor", "--json", cwd=place)
    found = by_name(json.loads(done.stdout))
    assert done.returncode == 1
    assert found["machine/interface"]["level"] == "error"
    assert found["machine/interface"]["found"].startswith("GLOO_SOCKET_IFNAME=nope0, but this machine has only ")
    assert "the processes did not connect: " in found["collectives/processes"]["found"]
    assert "nope0" in found["collectives/processes"]["found"]
    assert "storage/out speed" in found  # all the rest is still told
    assert "Traceback" not in done.stderr


def _free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def test_two_machines_under_torchrun(place: Path) -> None:
    """Two agents of torchrun on the loopback address: the first process reports what both machines found out."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}", "--rdzv-id", "drill"]
    torchrun += ["--local-addr", "127.0.0.1", "--log-dir", str(place / "logs")]
    folders = [place / "a", place / "b"]
    agents = []
    for folder in folders:
        folder.mkdir()
        command = [*torchrun, "-m", "esmshard", "doctor", "--json", "--out", str(folder)]
        agents.append(subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [agent.communicate(timeout=600) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    (text,) = [out for out, _ in said if out]  # one of them has the first process
    report = json.loads(text)
    name = socket.gethostname()
    assert sorted(report["hosts"]) == [f"{name}#0", f"{name}#1"]
    assert report["host"] == f"{name}#0"
    assert report["processes"] == 2
    disks = {one["node"]: one["values"]["path"] for one in report["findings"] if one["name"] == "out space"}
    assert sorted(disks) == sorted(report["hosts"])
    assert set(disks.values()) == set(map(str, folders))
    found = by_name(report)
    assert found["collectives/bandwidth all"]["found"].startswith("all 2 processes")
    assert found["collectives/versions"]["level"] == "ok"


@pytest.mark.parametrize(
    ("bound", "rank", "says", "fix"),
    [
        ("START = 2", "1", "", "MASTER_ADDR"),  # nobody listens at MASTER_ADDR
        ("LIMIT = 1", "0", "a collective did not end within 1 s", "firewalls"),
    ],
)
def test_a_machine_that_loses_the_others_reports_itself(
    place: Path, bound: str, rank: str, says: str, fix: str
) -> None:
    """The first process of a machine says what it knows of the machine, though the other process never comes."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "RANK": rank}
    variables |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    code = f"import esmshard.cluster.doctor.doctor_ranks as ranks; ranks.{bound}"
    code += "; from esmshard.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        check=False,
        env={**os.environ, **variables},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 1, done.stderr
    found = by_name(json.loads(done.stdout))
    assert found["collectives/processes"]["level"] == "error"
    assert f"the processes did not connect: {says}" in found["collectives/processes"]["found"]
    assert fix in found["collectives/processes"]["mend"]
    assert says in done.stderr
    assert "storage/out speed" in found
    assert "Traceback" not in done.stderr


def test_under_another_launcher_the_first_rank_reports(place: Path) -> None:
    """As srun or torchrun start it: variables only."""
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    variables |= {"LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "esmshard", "doctor", "--json"]
    ranks = [
        subprocess.Popen(
            command,
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[1][0] == ""
    report = json.loads(said[0][0])
    assert report["processes"] == 2
    assert by_name(report)["collectives/versions"]["level"] == "ok"
    assert sum(one["name"] == "out space" for one in report["findings"]) == 1  # a machine is looked at once
