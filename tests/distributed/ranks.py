"""Run a function of a test module on several gloo ranks, each a process with a time limit.

The ranks are forked from a process that has imported everything already: the imports take longer than most tests.
"""

import contextlib
import importlib
import os
import pickle
import random
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT = 900


def free_port() -> int:
    """A port below the range from which the kernel gives ports to connections: nobody takes it before the ranks do."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(function: str, world_size: int, scratch: Path, *args: Any) -> list[Any]:
    """Call `function` (`module:name`) on every rank. Results in rank order; a failing rank fails the test."""
    from forks import forks  # Not at the top: scripts that only want a port lack the folder of tests in their path.

    job = scratch / f"job-{function.replace(':', '-')}-{world_size}-{free_port()}"
    job.mkdir(parents=True)
    (job / "args").write_bytes(pickle.dumps(args))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = [
        forks.Process(target=_rank, args=(function, str(job), {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + TIMEOUT
    try:
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert not hung, f"ranks {hung} of {world_size} did not end within {TIMEOUT} s"
    for rank, process in enumerate(ranks):
        output = (job / f"output-{rank}").read_text(errors="replace")
        assert process.exitcode == 0, f"rank {rank} of {world_size} failed:\n{output[-4000:]}"
    return [pickle.loads((job / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank(function: str, job: str, environment: dict[str, str]) -> None:
    """What a forked process does."""
    output = os.open(Path(job) / f"output-{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ |= environment
    import torch

    torch.set_num_threads(1)
    try:
        module, name = function.split(":")
        sys.path.insert(0, str(Path(__file__).parent))
        args = pickle.loads((Path(job) / "args").read_bytes())
        result = getattr(importlib.import_module(module), name)(*args)
        (Path(job) / f"result-{environment['RANK']}").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
