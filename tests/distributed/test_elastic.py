"""Several machines train together: one is lost, one comes, one is asked to stop. Each has its own network."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from machines import Machine, Pair, descendants, two_machines, wait_until
from ranks import free_port

STEPS = 16


@pytest.fixture
def recipe(tiny_recipe: Path) -> Path:
    text = tiny_recipe.read_text().replace("steps: 6", f"steps: {STEPS}").replace("eval_every: 3", "eval_every: 1000")
    tiny_recipe.write_text(text)
    return tiny_recipe


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with two_machines(tmp_path) as machines:
        yield machines


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Filled by the first test that needs it: the same recipe for each."""
    return {}


def reference(unbroken: dict[str, Any], recipe: Path) -> dict[int, dict[str, Any]]:
    """Steps of a run of two processes on one machine that nothing disturbs."""
    if not unbroken:
        out = recipe.parent / "unbroken"
        command = [sys.executable, "-m", "esmshard", "finetune", str(recipe), f"out={out}", "--nproc", "2"]
        done = subprocess.run([*command, "--no-report"], check=False, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        unbroken |= {"steps": steps(out), "evaluation": evaluation(out)}
    found: dict[int, dict[str, Any]] = unbroken["steps"]
    return found


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def steps(out: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines(out) if "records" in line}


def quick(machine: Machine) -> str:
    """A machine is gone after 3 s. For another one is waited as long as it may take to start, maybe after this one."""
    return f"last_call_timeout={4 if machine.namespace else 12},keep_alive_interval=1,join_timeout=100"


def sizes(out: Path) -> list[int]:
    """Processes that did each step."""
    return [len(step["ranks"]["busy_s"]) for step in steps(out).values()]


def ours(machine: Machine, recipe: Path, meet_at: str, nnodes: str, *more: str, log: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "esmshard", "finetune", str(recipe), "--nproc", "1", "--no-report"]
    options = ["--nnodes", nnodes, "--rdzv-endpoint", meet_at, "--rdzv-id", "a-job", "--rdzv-conf", quick(machine)]
    return machine.start(*command, *options, "--local-addr", machine.address, *more, log=log)


def theirs(
    machine: Machine, recipe: Path, meet_at: str, nnodes: str, *more: str, log: str
) -> "subprocess.Popen[bytes]":
    options = [f"--nnodes={nnodes}", "--nproc-per-node=1", f"--rdzv-endpoint={meet_at}", "--rdzv-backend=c10d"]
    holds = int(meet_at.startswith(machine.address))  # torchrun finds that out by the machine's name
    options += ["--rdzv-id=a-job", f"--rdzv-conf={quick(machine)},is_host={holds}", f"--local-addr={machine.address}"]
    options += ["--max-restarts=3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "esmshard", "finetune", str(recipe)]
    device = _device(machine)
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": device}
    return machine.start(*command, "--resume", "auto", "--no-report", log=log, **settings)


def _device(machine: Machine) -> str:
    return "cable" if machine.namespace else "lo"


def said(recipe: Path, *logs: str) -> str:
    text = "".join((recipe.parent / f"{name}.log").read_text(errors="replace") for name in logs)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("frame #", "[W", "[E")))


def test_a_machine_is_lost_and_comes_back(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    # It has the first rank, which writes all that is written; the other one keeps the place where they meet.
    out, lost, rest = recipe.parent / "run", pair.first, pair.second
    port = free_port()
    how = (recipe, f"{rest.address}:{port}", "1:2", "--max-restarts", "2")
    survivor = ours(rest, *how, log="rest.log")
    if not pair.is_cabled:  # both addresses are of this machine, and whoever is first keeps that place
        wait_until(lambda: answers(rest.address, port), "the survivor")
    ours(lost, *how, log="lost.log")
    wait_until(lambda: 5 in steps(out) or survivor.poll() is not None, "five steps")
    lost.lose()
    wait_until(lambda: 1 in sizes(out) or survivor.poll() is not None, "a step of the other machine alone")
    assert survivor.poll() is None, said(recipe, "rest", "lost")
    (alone,) = descendants(survivor.pid)
    os.kill(alone, signal.SIGSTOP)  # it would be done before the other machine is there
    try:
        back = ours(lost, *how, log="back.log")
        wait_until(lambda: "another machine has come" in said(recipe, "rest"), "the launchers")
    finally:
        os.kill(alone, signal.SIGCONT)
    assert (survivor.wait(100), back.wait(10)) == (0, 0), said(recipe, "rest", "back")
    assert_same_steps(out, reference(unbroken, recipe))
    ranks = sizes(out)
    assert ranks[:4] == [2] * 4
    assert 1 in ranks, "the other machine went on alone"
    assert ranks[-1] == 2, "the machine was taken in again"
    assert len(attempts(out)) == 3
    assert len(re.findall(r"restart \d of 2", said(recipe, "rest"))) == 1, "that a machine comes is no restart"


def test_torchrun_loses_a_machine(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    out, lost, rest = recipe.parent / "run", pair.first, pair.second
    meet_at = f"{rest.address}:{free_port()}"
    survivor, _ = (theirs(m, recipe, meet_at, "1:2", log=f"{m.address}.log") for m in (rest, lost))
    wait_until(lambda: 5 in steps(out) or survivor.poll() is not None, "five steps")
    lost.lose()
    assert survivor.wait(100) == 0, said(recipe, rest.address)
    assert_same_steps(out, reference(unbroken, recipe))
    assert sizes(out)[-1] == 1


def test_the_cable_is_cut(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    if not pair.is_cabled:
        pytest.skip("network namespaces are not allowed here")
    out = recipe.parent / "run"
    how = (recipe, f"{pair.first.address}:{free_port()}", "1:2", "--max-restarts", "2")
    rest = ours(pair.first, *how, log="rest.log")
    ours(pair.second, *how, log="lost.log")
    wait_until(lambda: 5 in steps(out) or rest.poll() is not None, "five steps")
    pair.cut()
    assert rest.wait(100) == 0, said(recipe, "rest")
    assert "gave no sign of life for 3 s; restart 1 of 2" in said(recipe, "rest")
    assert_same_steps(out, reference(unbroken, recipe))
    pair.second.lose()  # it would find out after a minute


def test_all_machines_leave_when_one_is_asked(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    out, both = recipe.parent / "run", (pair.first, pair.second)
    how = (f"{pair.first.address}:{free_port()}", "2", "--resume", "auto")
    jobs = [ours(machine, recipe, *how, log=f"begun{n}.log") for n, machine in enumerate(both)]
    wait_until(lambda: 5 in steps(out) or any(job.poll() is not None for job in jobs), "five steps")
    jobs[1].send_signal(signal.SIGTERM)
    assert [job.wait(60) for job in jobs] == [75, 75], said(recipe, "begun0", "begun1")
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["checkpoint"]) == (
        "preempted",
        75,
        f"step_{status['step']:06}",
    )
    assert 5 <= status["step"] < STEPS
    jobs = [ours(machine, recipe, *how, log=f"again{n}.log") for n, machine in enumerate(both)]
    assert [job.wait(100) for job in jobs] == [0, 0], said(recipe, "again0", "again1")
    expected = reference(unbroken, recipe)
    assert {step: line["loss"] for step, line in steps(out).items()} == {s: e["loss"] for s, e in expected.items()}
    assert evaluation(out) == unbroken["evaluation"], "to the last bit"


def answers(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), 1).close()
        return True
    return False


def evaluation(out: Path) -> Any:
    found = json.loads((out / "evaluation.json").read_text())
    return {key: found[key] for key in ("metrics", "weights_sha256", "step")}


def attempts(out: Path) -> list[dict[str, Any]]:
    return [line for line in lines(out) if line.get("event") == "attempt"]


def assert_same_steps(out: Path, expected: dict[int, dict[str, Any]]) -> None:
    found = steps(out)
    assert list(found) == list(range(1, STEPS + 1))
    for step, line in found.items():
        assert (line["records"], line["residues"]) == (expected[step]["records"], expected[step]["residues"])
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=1e-4), step
    assert json.loads((out / "status.json").read_text())["state"] == "done"
