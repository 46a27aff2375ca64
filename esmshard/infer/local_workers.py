"""Workers of one product as processes of this machine: one a GPU, or sharing the cores."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esmshard.errors import InputError
from esmshard.infer.claims import workers
from esmshard.parallel import allowed
from esmshard.progress import say

BEAT = 1.0
"""Seconds between two signs of life of these workers: the progress is seen by them."""
MOST_LOSSES = 3
"""Times that processes may be lost without any part finished between."""


def run_local(
    directory: Path, device: str, processes: int, tokens: int | None, told: Callable[[int, int], None]
) -> None:
    """Run workers until every part is finished or in the hands of other ones. A killed one is started again.

    Args:
        directory: `OUT.partial`.
        device: its type; with `cuda` each process has a GPU of its own.
        processes: to start.
        tokens: of a pack.
        told: called with rows and residues that were finished since the last call.

    Raises:
        InputError: what a worker said, or that they were killed again and again.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, allowed.cores() // processes))
    environment = os.environ | {"OMP_NUM_THREADS": threads}

    def start(number: int) -> "subprocess.Popen[bytes]":
        where = f"cuda:{number}" if device == "cuda" else device
        options = {"directory": str(directory), "device": where, "tokens": tokens, "beat": BEAT}
        command = [sys.executable, "-m", "esmshard.infer.worker", json.dumps(options)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)  # noqa: S603

    def finished() -> int:
        return sum(1 for path in (directory / "parts").iterdir() if path.suffix == ".json")

    running = {number: start(number) for number in range(processes)}
    mine: dict[int, tuple[int, int]] = {}
    losses, parts = 0, finished()
    try:
        while running:
            time.sleep(0.2)
            _follow(directory, {process.pid for process in running.values()}, mine, told)
            for number, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                _, output = running.pop(number), process.stdout.read() if process.stdout else b""
                if code == 0:
                    continue
                if code > 0:
                    raise _failure(directory, code, output)
                losses = 1 if finished() > parts else losses + 1
                parts = finished()
                cause = f"a worker was ended by signal {-code}" + (" (out of memory, perhaps)" if code == -9 else "")
                if losses > MOST_LOSSES:
                    raise InputError(
                        f"{directory}: {cause}, {losses} times without a part finished; give --nproc fewer processes, "
                        "or --tokens fewer, and go on with --resume"
                    )
                say(f"{cause}; another one takes its place")
                running[number] = start(number)
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()


def _follow(
    directory: Path, pids: set[int], seen: dict[int, tuple[int, int]], told: Callable[[int, int], None]
) -> None:
    """Tell what these processes finished since they were last looked at."""
    for note in workers(directory / "work"):
        if note["pid"] in pids:
            rows, residues = seen.get(note["pid"], (0, 0))
            if note["rows"] > rows:
                told(note["rows"] - rows, note["residues"] - residues)
                seen[note["pid"]] = note["rows"], note["residues"]


def _failure(directory: Path, code: int, output: bytes) -> Exception:
    try:
        said = json.loads(output)
    except ValueError:
        return ChildProcessError(f"{directory}: a worker ended with exit code {code}; go on with --resume")
    if said["errno"] is not None:
        return OSError(said["errno"], os.strerror(said["errno"]), str(directory))
    return InputError(said["error"])
