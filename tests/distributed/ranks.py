"""Run a function of a test module on several gloo ranks, each a process with a time limit."""

import contextlib
import importlib
import os
import pickle
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT = 240


def free_port() -> int:
    """A port below the range from which the kernel gives ports to connections: nobody takes it before the ranks do."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(function: str, world_size: int, scratch: Path, *args: Any) -> list[Any]:
    """Call `function` (`module:name`) on every rank. Results in rank order; a failing rank fails the test."""
    job = scratch / f"job-{function.replace(':', '-')}-{world_size}-{free_port()}"
    job.mkdir(parents=True)
    (job / "args").write_bytes(pickle.dumps(args))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, function, str(job)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [p.communicate(timeout=TIMEOUT)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    for rank, (p, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert p.returncode == 0, f"rank {rank} of {world_size} failed:\n{output[-4000:]}"
    return [pickle.loads((job / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def main() -> None:
    function, job = sys.argv[1], Path(sys.argv[2])
    module, name = function.split(":")
    sys.path.insert(0, str(Path(__file__).parent))
    args = pickle.loads((job / "args").read_bytes())
    result = getattr(importlib.import_module(module), name)(*args)
    (job / f"result-{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
