"""Several machines train together: one is lost, one comes, one is asked to stop. Each has its own network."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import esmshard
from held_runs import Hold
from machines import LIMIT, Machine, Pair, descendants, two_machines, wait_until
from ranks import free_port

STEPS = 16
FORKING = str(Path(__file__).parent.parent / "command.py")
"""Starts torchrun so that it forks its ranks: they need not import what runs import."""


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
        done = esmshard("finetune", recipe, f"out={out}", "--nproc", "2")
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
    """A machine is gone after 10 s. For another one is waited as long as it may take to start, maybe after this one."""
    last_call = 4 if machine.namespace else 12
    return f"last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=10,join_timeout=600"


def sizes(out: Path) -> list[int]:
    """Processes that did each step."""
    return [len(step["ranks"]["residues_per_s"]) for step in steps(out).values()]


def theirs(
    machine: Machine, recipe: Path, held: Hold, meet_at: str, nnodes: str, *more: str, log: str
) -> "subprocess.Popen[bytes]":
    options = [f"--nnodes={nnodes}", "--nproc-per-node=1", f"--rdzv-endpoint={meet_at}", "--rdzv-backend=c10d"]
    holds = int(meet_at.startswith(machine.address))  # torchrun finds that out by the machine's name
    options += ["--rdzv-id=a-job", f"--rdzv-conf={quick(machine)},is_host={holds}", f"--local-addr={machine.address}"]
    options += ["--max-restarts=3"]
    torchrun = [sys.executable, FORKING, "-m", "torch.distributed.run", *options]
    command = [*torchrun, "-m", "esmshard", "finetune", str(recipe)]
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **held.environment}
    return machine.start(*command, *more, "--resume", "auto", "--no-report", log=log, **settings)


def said(recipe: Path, *logs: str) -> str:
    text = "".join((recipe.parent / f"{name}.log").read_text(errors="replace") for name in logs)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("frame #", "[W", "[E")))


def test_a_machine_is_lost_and_comes_back(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    out, lost, rest = recipe.parent / "run", pair.first, pair.second
    expected = reference(unbroken, recipe)
    meet_at = f"{rest.address}:{free_port()}"
    held = Hold(recipe.parent / "hold", 5)
    survivor, _ = (theirs(m, recipe, held, meet_at, "1:2", log=f"{m.address}.log") for m in (rest, lost))
    held.wait(lambda: survivor.poll() is not None)
    lost.lose()
    held.at(7)
    held.wait(lambda: survivor.poll() is not None)
    assert 1 in sizes(out), "the other machine goes on alone"
    back = theirs(lost, recipe, held, meet_at, "1:2", log="back.log")
    # torchrun looks every 0.1 s whether a machine waits, and sends its own processes SIGTERM when one does.
    wait_until(lambda: held.asked() or back.poll() is not None, "the newcomer")
    held.go()
    assert (survivor.wait(600), back.wait(600)) == (0, 0), said(recipe, rest.address, "back")
    assert_same_steps(out, expected)
    assert sizes(out)[-1] == 2, "the machine was taken in again"
    assert sum(line.get("event") == "attempt" for line in lines(out)) == 3


def test_the_cable_is_cut(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    """No connection is closed then: the survivor waits for step_timeout, and the store on the other side is silent."""
    if not pair.is_cabled:
        pytest.skip("network namespaces are not allowed here")
    expected = reference(unbroken, recipe)
    out = recipe.parent / "run"
    meet_at = f"{pair.first.address}:{free_port()}"
    held = Hold(recipe.parent / "hold", 5)
    how = (recipe, held, meet_at, "1:2", "parallel.step_timeout=60")
    rest, _ = (theirs(m, *how, log=f"{m.address}.log") for m in (pair.first, pair.second))
    held.wait(lambda: rest.poll() is not None)
    pair.cut()
    held.go()
    assert rest.wait(LIMIT) == 0, said(recipe, pair.first.address)
    assert_same_steps(out, expected)
    assert sizes(out)[-1] == 1


def test_all_machines_leave_when_one_is_asked(recipe: Path, pair: Pair, unbroken: dict[str, Any]) -> None:
    out, both = recipe.parent / "run", (pair.first, pair.second)
    expected = reference(unbroken, recipe)

    held = Hold(recipe.parent / "hold", 5)

    def start(log: str) -> list["subprocess.Popen[bytes]"]:
        meet_at = f"{pair.first.address}:{free_port()}"
        return [theirs(machine, recipe, held, meet_at, "2", log=f"{log}{n}.log") for n, machine in enumerate(both)]

    jobs = start("begun")
    held.wait(lambda: any(job.poll() is not None for job in jobs))
    for pid in descendants(jobs[1].pid):  # the ranks of one machine, as the wrapper of a pod signals them
        os.kill(pid, signal.SIGTERM)
    held.go()
    assert [job.wait(600) for job in jobs] == [0, 0], said(recipe, "begun0", "begun1")
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["checkpoint"]) == ("preempted", f"step_{status['step']:06}")
    assert 5 <= status["step"] < STEPS
    jobs = start("again")
    assert [job.wait(600) for job in jobs] == [0, 0], said(recipe, "again0", "again1")
    assert {step: line["loss"] for step, line in steps(out).items()} == {s: e["loss"] for s, e in expected.items()}
    assert evaluation(out) == unbroken["evaluation"], "to the last bit"


def evaluation(out: Path) -> Any:
    found = json.loads((out / "evaluation.json").read_text())
    return {key: found[key] for key in ("metrics", "weights_sha256", "step")}


def assert_same_steps(out: Path, expected: dict[int, dict[str, Any]]) -> None:
    found = steps(out)
    assert list(found) == list(range(1, STEPS + 1))
    for step, line in found.items():
        assert (line["records"], line["residues"]) == (expected[step]["records"], expected[step]["residues"])
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=1e-4), step
    assert json.loads((out / "status.json").read_text())["state"] == "done"
