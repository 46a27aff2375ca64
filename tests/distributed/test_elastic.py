"""Two machines train together, one is lost, and it comes back: two addresses of this machine stand for them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command import esmshard
from held_runs import Hold
from ranks import free_port

pytestmark = pytest.mark.slow
STEPS = 16
FORKING = str(Path(__file__).parent.parent / "command.py")
"""Starts torchrun so that it forks its ranks: they need not import what runs import."""


@dataclass
class Machine:
    """Starts commands as if it were a machine of its own."""

    address: str
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def train(self, recipe: Path, held: Hold, meet_at: str, log: str) -> "subprocess.Popen[bytes]":
        """Start torchrun. A machine is gone after 10 s, and another one has 600 s to start."""
        holds = int(meet_at.startswith(self.address))  # torchrun finds that out by the machine's name
        conf = "last_call_timeout=12,keep_alive_interval=1,keep_alive_max_attempt=10,join_timeout=600"
        options = ["--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint={meet_at}", "--rdzv-backend=c10d"]
        options += ["--rdzv-id=a-job", f"--rdzv-conf={conf},is_host={holds}", f"--local-addr={self.address}"]
        torchrun = [sys.executable, FORKING, "-m", "torch.distributed.run", *options, "--max-restarts=3"]
        command = [*torchrun, "-m", "esmshard", "finetune", str(recipe), "--resume", "auto", "--no-report"]
        settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1", **held.environment}
        with open(recipe.parent / log, "wb") as file:
            streams: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
            self.started.append(subprocess.Popen(command, env={**os.environ, **settings}, **streams))
        return self.started[-1]

    def lose(self) -> None:
        """All its processes are killed at once, launchers first."""
        for process in self.started:
            for pid in [process.pid, *descendants(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(120)
        self.started.clear()


def descendants(pid: int) -> list[int]:
    """Process ids of children, theirs, and so on."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    """The first one has the lower address, and so the first rank. At the end nothing runs there."""
    machines = Machine("127.0.0.1"), Machine("127.0.0.2")
    yield machines
    for machine in machines:
        machine.lose()


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 600
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def steps(out: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines(out) if "records" in line}


def sizes(out: Path) -> list[int]:
    """Processes that did each step."""
    return [len(step["ranks"]["residues_per_s"]) for step in steps(out).values()]


def test_a_machine_is_lost_and_comes_back(tiny_recipe: Path, pair: tuple[Machine, Machine]) -> None:
    text = tiny_recipe.read_text().replace("steps: 6", f"steps: {STEPS}").replace("eval_every: 3", "eval_every: 1000")
    tiny_recipe.write_text(text)
    out, unbroken, (lost, rest) = tiny_recipe.parent / "run", tiny_recipe.parent / "unbroken", pair
    done = esmshard("finetune", tiny_recipe, f"out={unbroken}", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    meet_at, held = f"{rest.address}:{free_port()}", Hold(tiny_recipe.parent / "hold", 5)
    survivor, _ = (machine.train(tiny_recipe, held, meet_at, f"{machine.address}.log") for machine in (rest, lost))
    held.wait(lambda: survivor.poll() is not None)
    lost.lose()
    held.at(7)
    held.wait(lambda: survivor.poll() is not None)
    assert 1 in sizes(out), "the other machine goes on alone"
    back = lost.train(tiny_recipe, held, meet_at, "back.log")
    # torchrun looks every 0.1 s whether a machine waits, and sends its own processes SIGTERM when one does.
    wait_until(lambda: held.asked() or back.poll() is not None)
    held.go()
    said = [(tiny_recipe.parent / f"{name}.log").read_text(errors="replace") for name in (rest.address, "back")]
    assert (survivor.wait(600), back.wait(600)) == (0, 0), said
    found, expected = steps(out), steps(unbroken)
    assert list(found) == list(range(1, STEPS + 1))
    for step, line in found.items():
        assert (line["records"], line["residues"]) == (expected[step]["records"], expected[step]["residues"])
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=1e-4), step
    assert json.loads((out / "status.json").read_text())["state"] == "done"
    assert sizes(out)[-1] == 2, "the machine was taken in again"
    assert sum(line.get("event") == "attempt" for line in lines(out)) == 3
