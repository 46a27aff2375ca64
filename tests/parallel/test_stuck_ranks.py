"""A process that holds up the others is named, by all that survive, in one sentence with its host and last place."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import watching

from esmshard.errors import InputError
from esmshard.parallel import watch
from esmshard.parallel.process_group import World
from esmshard.parallel.watch import Control

CPU = torch.device("cpu")
HOST = r"\(host [^ )]+\)"
SENTENCES = {
    "killed": rf"rank 1 {HOST} is gone or does not answer, last heard of in step 3, computing;",
    "first-killed": rf"rank 0 {HOST} is gone or does not answer, last heard of in step 3, computing;",
    "killed-of-six": rf"rank 1 {HOST} is gone or does not answer, last heard of in step 3, computing;",
    "stopped": rf"rank 2 {HOST} is gone or does not answer, last heard of in step 3, computing; the others waited",
    "first-stopped": rf"rank 0 {HOST} is gone or does not answer, last heard of in step 3, computing;",
    "first-stopped-with-store": r"rank 0 or the launcher on its machine \(127\.0\.0\.1\), .* is gone in step 3",
    "stuck": rf"rank 1 {HOST} is stuck, last heard of in step 3, computing;",
    "stuck-loader": rf"rank 2 {HOST} is stuck, last heard of in step 3, waiting for data;",
    "mistake": rf"rank 2 {HOST} ended in step 3, computing: train\.fasta:7: record 'x' is empty",
    "crash": rf"rank 1 {HOST} ended in step 3, computing: KeyError: 'trunk'",
}


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, dict[str, Any]]]:
    """What each rank of each drill had to say. Ranks that were killed say nothing."""
    folder = tmp_path_factory.mktemp("watching")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, watching.__file__, str(folder)], env=environment, check=True, timeout=600)
    ends: dict[str, dict[int, dict[str, Any]]] = {job: {} for job in watching.JOBS}
    for path in folder.glob("*.json"):
        job, rank = path.stem.rsplit("-", 1)
        ends[job][int(rank)] = json.loads(path.read_text(encoding="utf-8"))
    return ends


@pytest.mark.parametrize("job", SENTENCES)
def test_all_survivors_name_the_rank(drills: dict[str, dict[int, dict[str, Any]]], job: str) -> None:
    size, victim, *_ = watching.JOBS[job]
    ranks = drills[job]
    ranks.pop(victim, None)
    assert sorted(ranks) == [rank for rank in range(size) if rank != victim]
    sentences = {end["says"] for end in ranks.values()}
    assert len(sentences) == 1
    assert re.match(SENTENCES[job], sentences.pop())
    assert {end["code"] for end in ranks.values()} == {1 if job == "mistake" else 69}
    if job != "first-stopped-with-store":  # there the ranks have nowhere left to agree on one that prints
        assert [end["shared"] for end in ranks.values()].count(False) == 1
        assert victim == 0 or not ranks[0]["shared"]


def test_a_good_run_says_nothing(drills: dict[str, dict[int, dict[str, Any]]]) -> None:
    assert [drills["nothing"][rank]["says"] for rank in range(3)] == ["", "", ""]


def test_one_process_needs_no_control(tmp_path: Path) -> None:
    with Control(World(0, 1, CPU, None), tmp_path / "dumps") as control:
        control.note("validating", 1)
        control.wait_for_device()
        assert control.host(0)
    with pytest.raises(RuntimeError, match="Timed out"), control:
        raise RuntimeError("Timed out waiting")
    assert not (tmp_path / "dumps").exists()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)"), False),
        (InputError("weights.pt: the download timed out"), False),
    ],
)
def test_which_errors_another_rank_may_have_caused(error: BaseException, lost: bool) -> None:
    assert watch.is_lost(error) is lost
