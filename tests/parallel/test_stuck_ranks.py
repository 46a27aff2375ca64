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
    "stopped": rf"rank 2 {HOST} is gone or does not answer, last heard of in step 3, computing; the other ranks waited",
    "first-stopped-with-store": r"rank 0 or the launcher on its machine \(127\.0\.0\.1\), .* is gone in step 3",
    "stuck-loader": rf"rank 2 {HOST} is stuck, last heard of in step 3, waiting for data;",
    "mistake": rf"rank 2 {HOST} ended in step 3, computing: train\.fasta:7: record 'x' is empty",
    "crash": rf"rank 1 {HOST} ended in step 3, computing: KeyError: 'trunk'",
}


def test_all_survivors_name_the_rank(tmp_path: Path) -> None:
    """Ranks that were killed say nothing, and neither do those of a good run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, watching.__file__, str(tmp_path)], env=environment, check=True, timeout=600)
    drills: dict[str, dict[int, dict[str, Any]]] = {job: {} for job in watching.JOBS}
    for path in tmp_path.glob("*.json"):
        job, rank = path.stem.rsplit("-", 1)
        drills[job][int(rank)] = json.loads(path.read_text(encoding="utf-8"))
    good = drills.pop("nothing")
    assert [good[rank]["says"] for rank in range(3)] == ["", "", ""]
    assert drills.keys() == SENTENCES.keys()
    for job, ranks in drills.items():
        size, victim, *_ = watching.JOBS[job]
        ranks.pop(victim, None)
        assert sorted(ranks) == [rank for rank in range(size) if rank != victim], job
        sentences = {end["says"] for end in ranks.values()}
        assert len(sentences) == 1
        assert re.match(SENTENCES[job], sentences.pop())
        assert {end["code"] for end in ranks.values()} == {1 if job == "mistake" else 69}
        if job != "first-stopped-with-store":  # there the ranks have nowhere left to agree on one that prints
            assert [end["shared"] for end in ranks.values()].count(False) == 1
            assert victim == 0 or not ranks[0]["shared"]


def test_one_process_needs_no_control(tmp_path: Path) -> None:
    with Control(World(0, 1, CPU, None), tmp_path / "dumps") as control:
        control.note("validating", 1)
        control.wait_for_device()
        assert control.host(0)
    with pytest.raises(RuntimeError, match="Timed out"), control:
        raise RuntimeError("Timed out waiting")
    assert not (tmp_path / "dumps").exists()


def test_which_errors_another_rank_may_have_caused() -> None:
    assert watch.is_lost(RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert watch.is_lost(torch.distributed.DistBackendError("remote process exited"))
    assert not watch.is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)"))
    assert not watch.is_lost(InputError("weights.pt: the download timed out"))
