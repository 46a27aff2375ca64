"""Each engine writes the same output, whatever workers are killed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from embed_runs import Run, content, until, write_fasta, write_model

from esmshard.embed.engines import Share, share
from esmshard.errors import UsageError

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")

PART = 4096


class Given(NamedTuple):
    model: Path
    fasta: Path
    whole: dict[str, object]

    def run(self, out: Path, *options: str) -> Run:
        number = len(list(out.parent.parent.glob("said-*")))
        folder = out.parent.parent / f"said-{number}"
        return Run("embed", self.model, self.fasta, "-o", out, *options, folder=folder, part_tokens=PART)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    directory = tmp_path_factory.mktemp("given")
    model, fasta = write_model(directory / "model"), write_fasta(directory / "x.fasta", 600)
    out = directory / "whole" / "x.npy"
    out.parent.mkdir()
    run = Given(model, fasta, {}).run(out)
    assert run.wait() == 0, run.said
    return Given(model, fasta, content(out))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "x.npy"


def test_workers_of_an_array_share_the_parts_and_one_may_die(given: Given, out: Path) -> None:
    """Worker 1 waits for the plan of worker 0, worker 2 is killed, and worker 3 never begins."""
    runs = [given.run(out, "--engine", "array", "--worker", f"{number}/4") for number in (1, 2, 0)]
    until(runs[1], "computing", out)
    runs[1].kill("group")
    for run in (runs[0], runs[2]):
        assert run.wait() == 0, run.said
    assert content(out) == given.whole
    late = given.run(out, "--engine", "array", "--worker", "3/4")
    assert late.wait() == 0, late.said
    assert content(out) == given.whole


def test_a_killed_process_is_replaced(given: Given, out: Path) -> None:
    run = given.run(out, "--nproc", "2")
    until(run, "computing", out)
    assert run.kill("worker")
    assert run.wait() == 0, run.said
    assert "another one takes its place" in run.said
    assert content(out) == given.whole


def test_processes_end_with_their_parent(given: Given, out: Path) -> None:
    run = given.run(out, "--nproc", "2")
    until(run, "computing", out)
    workers = run.workers()
    assert len(workers) == 2
    run.kill("parent")
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end, "processes outlive the command"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "8"}, Share(3, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Share(1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, Share(5, 6)),
    ],
)
def test_the_number_of_a_worker(variables: dict[str, str], expected: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="--worker"):
        share(None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert share(None) == expected
    assert share("0/1") == Share(0, 1)
    for wrong in ("1/1", "x", "-1/2", "1"):
        with pytest.raises(UsageError, match=f"--worker {wrong}"):
            share(wrong)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of two nodes with a core each, beside a node without cores for the command."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


@pytest.mark.timeout(600)
def test_a_node_of_a_ray_cluster_is_lost(given: Given, out: Path, cluster: Any) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    run = given.run(out, "--engine", "ray", "--ray-address", cluster.address)
    until(run, "computing", out)
    cluster.remove_node(nodes[0], allow_graceful=False)
    assert run.wait() == 0, run.said
    assert content(out) == given.whole


def test_a_ray_cluster_that_cannot_be_reached(given: Given, out: Path) -> None:
    pytest.importorskip("ray")
    run = given.run(out, "--engine", "ray", "--ray-address", "127.0.0.1:1")
    assert run.wait() == 2, run.said
    assert "no Ray cluster can be reached" in run.said
    assert "Traceback" not in run.said


KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["local", "array"])
def test_ten_kills(given: Given, tmp_path: Path, engine: str) -> None:
    """At random moments a command or a process is killed, and the command starts again; each output is whole."""
    rng, kills, outputs = np.random.default_rng(3), 0, 0
    workers = (
        (("--nproc", "2"),) if engine == "local" else tuple(("--engine", engine, "--worker", f"{n}/2") for n in (0, 1))
    )
    while kills < KILLS:
        out = tmp_path / str(outputs) / "x.npy"
        out.parent.mkdir()
        runs = [given.run(out, *options) for options in workers]
        for attempt in range(3):  # a command gives up after four losses without a finished part
            time.sleep(rng.uniform(0, 4 if engine == "local" else 0.9))
            k = int(rng.integers(len(runs)))
            whom = "worker" if engine == "local" and rng.random() < 0.5 else "group"
            if runs[k].kill(whom, attempt):
                kills += 1
                if whom == "group":
                    runs[k] = given.run(out, *workers[k])
        for run in runs:
            assert run.wait() == 0, run.said
        assert content(out) == given.whole
        outputs += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_kills_of_ray(given: Given, tmp_path: Path, cluster: Any) -> None:
    """A node, or the command itself, is killed at random moments; a new node joins."""
    rng, kills, outputs = np.random.default_rng(4), 0, 0
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    while kills < KILLS:
        out = tmp_path / str(outputs) / "x.npy"
        out.parent.mkdir()
        while True:
            run = given.run(out, "--engine", "ray", "--ray-address", cluster.address)
            until(run, "computing", out)
            time.sleep(rng.uniform(0, 1.5))
            if rng.random() < 0.5:
                kills += run.kill("group")
            else:
                cluster.remove_node(nodes.pop(0), allow_graceful=False)
                nodes.append(cluster.add_node(num_cpus=1))
                kills += 1
            if run.wait() == 0:
                break
            assert run.process.exitcode == -9, run.said
        assert content(out) == given.whole
        outputs += 1
