"""Run a function of a test module on several gloo ranks, which stay alive for the next functions.

Ranks are forked from a process that has imported everything already. A function changes the package by `patch`, which
takes the changes back after the function.
"""

import contextlib
import importlib
import itertools
import os
import random
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 900
patch = pytest.MonkeyPatch()
_ranks: list[tuple[Any, Connection]] = []


def free_port() -> int:
    """A port below the range from which the kernel gives ports to connections: nobody takes it before the ranks do."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(function: str, world_size: int, scratch: Path, *args: Any) -> list[Any]:
    """Call `function` (`module:name`) on every rank. Results in rank order; a failing rank fails the test."""
    assert scratch.is_dir()
    from forks import forks  # Not at the top: scripts that only want a port lack the folder of tests in their path.

    while len(_ranks) < world_size:
        ours, theirs = forks.Pipe()
        process = forks.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _ranks.append((process, ours))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    pipes = [pipe for _, pipe in _ranks[:world_size]]
    for rank, pipe in enumerate(pipes):
        pipe.send((function, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, args))
    answers = [_answer(pipe) for pipe in pipes]
    failures = [
        f"rank {rank} of {world_size} failed:\n{text[-4000:]}" for rank, (ok, text) in enumerate(answers) if not ok
    ]
    if failures:  # the next function gets new ranks
        for process, _ in _ranks:
            process.kill()
        _ranks.clear()
    assert not failures, failures[0]
    return [result for _, result in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    """Return whether the function of a rank has succeeded, and its result or the reason."""
    try:
        return pipe.recv() if pipe.poll(TIMEOUT) else (False, f"no answer in {TIMEOUT} s")
    except (EOFError, OSError):
        return False, "its process has ended"


def _serve(pipe: Connection) -> None:
    """What a rank does."""
    import torch
    from torch.distributed.tensor import debug

    from esmshard.parallel import process_group

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    before = {**os.environ}
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    while True:
        try:
            function, environment, args = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ |= environment
        process_group._STARTS = itertools.count()  # ranks have been in different numbers of groups
        torch._dynamo.reset()
        debug._clear_sharding_prop_cache()  # its entries name groups of the functions before
        try:
            module, name = function.split(":")
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            patch.undo()
            os.environ.clear()
            os.environ |= before
