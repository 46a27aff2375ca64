"""Run a function of a test module on several gloo ranks. Each rank is forked from a process with all imports."""

import contextlib
import importlib
import os
import random
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 900


def free_port() -> int:
    """Return a port below the range from which the kernel gives ports to connections."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(function: str, world_size: int, scratch: Path, *args: Any) -> list[Any]:
    """Call `function` (`module:name`) on every rank, in the directory `scratch`. Return the results in rank order."""
    from forks import forks  # Not at the top: scripts that only want a port lack the folder of tests in their path.

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = []
    for rank in range(world_size):
        ours, theirs = forks.Pipe(duplex=False)
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = forks.Process(target=_rank, args=(theirs, own, scratch, function, args), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    answers = [_answer(pipe) for _, pipe in ranks]
    for process, _ in ranks:
        process.join(0 if not all(ok for ok, _ in answers) else 60)
        if process.is_alive():
            process.kill()
    failures = [f"rank {rank} of {world_size}: {text[-4000:]}" for rank, (ok, text) in enumerate(answers) if not ok]
    assert not failures, failures[0]
    return [result for _, result in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(TIMEOUT) else (False, f"no answer in {TIMEOUT} s")
    except (EOFError, OSError):
        return False, "its process has ended"


def _rank(pipe: Connection, environment: dict[str, str], scratch: Path, function: str, args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    os.chdir(scratch)
    os.environ.clear()
    os.environ |= environment
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    try:
        module, name = function.split(":")
        pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
