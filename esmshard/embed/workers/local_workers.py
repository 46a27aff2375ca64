"""The workers of one embedding store as processes of this machine: one for each GPU, or several sharing the cores."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esmshard.embed.workers.claims import workers
from esmshard.errors import InputError
from esmshard.parallel import cpu_limits
from esmshard.progress import say

BEAT = 1.0
"""Seconds between two beats of these workers. The progress display reads their counts."""
MOST_LOSSES = 3
"""How often processes may be lost without a finished part in between."""


def run_local(
    directory: Path, device: str, processes: int, tokens: int | None, progressed: Callable[[int, int], None]
) -> None:
    """Run workers until each part is finished or claimed by another worker. A killed worker is started again.

    Args:
        directory: `OUT.partial`.
        device: the type of the device. With `cuda` each process has a GPU of its own.
        processes: the number of processes to start.
        tokens: tokens of a pack.
        progressed: called with the rows and residues that were finished since the last call.

    Raises:
        InputError: with the message of a worker, or if workers were killed again and again.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_limits.cores() // processes))
    environment = os.environ | {"OMP_NUM_THREADS": threads}

    def start(number: int) -> "subprocess.Popen[bytes]":
        where = f"cuda:{number}" if device == "cuda" else device
        options = {"directory": str(directory), "device": where, "tokens": tokens, "beat": BEAT}
        command = [sys.executable, "-m", "esmshard.embed.workers.embed_worker", json.dumps(options)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)  # noqa: S603

    def finished() -> int:
        return sum(1 for path in (directory / "parts").iterdir() if path.suffix == ".json")

    running = {number: start(number) for number in range(processes)}
    mine: dict[int, tuple[int, int]] = {}
    losses, parts = 0, finished()
    try:
        while running:
            time.sleep(0.2)
            _follow(directory, {process.pid for process in running.values()}, mine, progressed)
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
    directory: Path, pids: set[int], seen: dict[int, tuple[int, int]], progressed: Callable[[int, int], None]
) -> None:
    """Report what these processes have finished since the last call."""
    for note in workers(directory / "work"):
        if note["pid"] in pids:
            rows, residues = seen.get(note["pid"], (0, 0))
            if note["rows"] > rows:
                progressed(note["rows"] - rows, note["residues"] - residues)
                seen[note["pid"]] = note["rows"], note["residues"]


def _failure(directory: Path, code: int, output: bytes) -> Exception:
    try:
        said = json.loads(output)
    except ValueError:
        return ChildProcessError(f"{directory}: a worker ended with exit code {code}; go on with --resume")
    if said["errno"] is not None:
        return OSError(said["errno"], os.strerror(said["errno"]), str(directory))
    return InputError(said["error"])
