"""Measures saving and verifying of sharded checkpoints, beside plain file writes and sha256 of the same bytes.

Ranks on this machine save a model of random weights with the two moments of AdamW. Each variant is timed on all ranks,
from a barrier to the end of the last rank, when the disk has every byte (fsync). Variants take turns.
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import sharding
import torch
from torch.distributed.tensor import DTensor, Shard

from esmshard.checkpoint import manifest
from esmshard.checkpoint.sharded import Saver
from esmshard.io.paths import sha256
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import local

STATES = ("model", "exp_avg", "exp_avg_sq")


def state(name: str, ranks: World) -> dict[str, torch.Tensor]:
    """Make random weights and both moments, with the rows of each tensor divided over the ranks."""
    tensors: dict[str, torch.Tensor] = {}
    for parameter, shape in weights.shapes(SIZES[name]).items():
        if parameter == "lm_head.weight":  # tied
            continue
        rows = -(-shape[0] // ranks.size) if shape else 1
        own = max(0, min(shape[0] - ranks.rank * rows, rows)) if shape else 1
        for kind in STATES:
            shard = torch.rand(own, *shape[1:]) if shape else torch.rand(())
            stride = torch.empty(shape, device="meta").stride()
            tensors[f"{kind}.{parameter}"] = (
                DTensor.from_local(shard, ranks.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
                if shape and ranks.mesh is not None
                else shard
            )
    return tensors


def plain(directory: Path, tensors: dict[str, torch.Tensor], ranks: World) -> None:
    """Do the least work of a checkpoint: write this rank's bytes to one file, sync it, and read it again for sha256."""
    path = directory / f"plain_{ranks.rank}"
    with open(path, "wb") as file:
        for tensor in tensors.values():
            file.write(local(tensor).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        hashlib.file_digest(file, "sha256")


def rank(name: str, folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant, turn by turn, and the bytes; the same on all ranks."""
    directory, found = Path(folder), dict[str, list[float]]()
    with world() as ranks:
        tensors = state(name, ranks)
        savers = {background: Saver(directory / f"{background}", 1, background) for background in (False, True)}
        for saver in savers.values():  # the first turn makes directories, and the copy on the host
            saver.save(1, tensors, {})
            saver.finish()

        def clock(what: str, work: Callable[[], object]) -> None:
            ranks.sum([0])
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            found.setdefault(what, []).append(max(row[0] for row in ranks.rows([seconds])))

        for turn in range(2, 2 + rounds):
            clock("plain", lambda: plain(directory, tensors, ranks))
            (directory / f"plain_{ranks.rank}").unlink()
            clock("save", lambda turn=turn: savers[False].save(turn, tensors, {}))  # type: ignore[misc]
            began = time.perf_counter()
            clock("stall", lambda turn=turn: savers[True].save(turn, tensors, {}))  # type: ignore[misc]
            savers[True].finish()
            found.setdefault("in the background, to the end", []).append(time.perf_counter() - began)
            newest = manifest.path_of(directory / "False", turn)
            if ranks.is_first:
                files = [path for path in newest.iterdir() if path.name != manifest.MANIFEST]
                for what, work in (
                    ("sha256", lambda files=files: [sha256(path) for path in files]),
                    ("verify", lambda newest=newest: manifest.verify(newest)),
                ):
                    began = time.perf_counter()
                    work()
                    found.setdefault(what, []).append(time.perf_counter() - began)
                found["bytes"] = [float(sum(path.stat().st_size for path in files))]
            ranks.sum([0])
    return found


def measured(name: str, folder: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the result of the first of `size` ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    command = [sys.executable, __file__, "--rank", json.dumps([name, str(folder), rounds])]
    started = [
        subprocess.Popen(
            command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(size)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a rank failed; its error stands above")
    found: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    return found


def table(found: dict[str, list[float]]) -> list[list[str]]:
    """Return one line for each figure: seconds and ratio, median and range over the turns."""

    def row(what: str, of: str, words: str, asked: str) -> list[str]:
        ratios = [own / other for own, other in zip(found[what], found[of], strict=True)]
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        return [words, f"{statistics.median(found[what]):.2f}", f"{statistics.median(found[of]):.2f}", spread, asked]

    return [
        ["", "s", "s of what it is compared with", "ratio, median [min, max]", "asked"],
        row("save", "plain", "save / plain writes and sha256 of the same bytes", "1.3"),
        row("stall", "save", "stall of a save in the background / save", "0.15"),
        row("in the background, to the end", "save", "save in the background, to its end / save", ""),
        row("verify", "sha256", "verification by one process / sha256, file by file", "1"),
    ]


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sharding.SHORT, default="650M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="directory on the file system to measure; by default a temporary one"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(rank(*json.loads(args.rank))))
        return
    folder = Path(tempfile.mkdtemp(prefix="esmshard_", dir=args.folder))
    try:
        found = measured(sharding.SHORT[args.model], folder, args.ranks, args.rounds)
    finally:
        shutil.rmtree(folder)
    about: dict[str, Any] = measure.facts(torch.device("cpu"))
    command = " ".join(["python benchmarks/checkpoint.py", *sys.argv[1:]])
    title = f"{args.model} with optimizer state, {found['bytes'][0] / 1e9:.1f} GB, {args.ranks} ranks"
    text = "\n".join([f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""])
    text += "\n" + sharding.markdown(title, table(found))
    print(text)
    stem = measure.RESULTS / f"{about['date']}-checkpoint"
    stem.with_suffix(".md").write_text(f"# checkpoint, {about['date']}\n\n{text}", encoding="utf-8")
    raw = {"command": command, "about": about, "seconds": found}
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
