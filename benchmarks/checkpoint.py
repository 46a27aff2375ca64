"""Measures saving and verifying of sharded checkpoints, beside plain file writes and sha256 of the same bytes.

Ranks on this machine save a model of random weights with the two moments of AdamW. Each variant is timed on all ranks,
from a barrier to the end of the last rank, when the disk has every byte (fsync). Variants take turns.
"""

import hashlib
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import measure
import torch
from random_models import CONFIGS, SHORT
from torch.distributed.tensor import DTensor, Shard

from esmshard.checkpoint import manifest
from esmshard.checkpoint.sharded import Saver
from esmshard.io.paths import sha256
from esmshard.model import weights
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import local


def state(name: str, ranks: World) -> dict[str, torch.Tensor]:
    """Make random weights and both moments, with the rows of each tensor divided over the ranks."""
    tensors: dict[str, torch.Tensor] = {}
    for parameter, shape in weights.shapes(CONFIGS[name]).items():
        if parameter == "lm_head.weight":  # tied
            continue
        rows = -(-shape[0] // ranks.size) if shape else 1
        own = max(0, min(shape[0] - ranks.rank * rows, rows)) if shape else 1
        for kind in ("model", "exp_avg", "exp_avg_sq"):
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
    directory, seconds = Path(folder), dict[str, list[float]]()
    with world() as ranks:
        tensors = state(name, ranks)
        savers = {background: Saver(directory / f"{background}", 1, background) for background in (False, True)}
        for saver in savers.values():  # the first turn makes directories, and the copy on the host
            saver.save(1, tensors, {})
            saver.finish()

        def clock(what: str, work: Callable[[], object]) -> None:
            ranks.sum([0])
            took = measure.clock(work, measure.CPU)
            seconds.setdefault(what, []).append(max(row[0] for row in ranks.rows([took])))

        for turn in range(2, 2 + rounds):
            clock("plain", lambda: plain(directory, tensors, ranks))
            (directory / f"plain_{ranks.rank}").unlink()
            clock("save", lambda turn=turn: savers[False].save(turn, tensors, {}))  # type: ignore[misc]
            clock("stall", lambda turn=turn: savers[True].save(turn, tensors, {}))  # type: ignore[misc]
            savers[True].finish()
            newest = manifest.path_of(directory / "False", turn)
            if ranks.is_first:
                files = [path for path in newest.iterdir() if path.name != manifest.MANIFEST]
                hashing = measure.clock(lambda files=files: [sha256(path) for path in files], measure.CPU)  # type: ignore[misc]
                seconds.setdefault("sha256", []).append(hashing)
                checking = measure.clock(lambda newest=newest: manifest.verify(newest), measure.CPU)  # type: ignore[misc]
                seconds.setdefault("verify", []).append(checking)
                seconds["bytes"] = [float(sum(path.stat().st_size for path in files))]
            ranks.sum([0])
    return seconds


ROWS = (
    ("save", "plain", "save / plain writes and sha256 of the same bytes", "1.3"),
    ("stall", "save", "how long a save in the background holds training up / save", "0.15"),
    ("verify", "sha256", "verification by one process / sha256, file by file", "1"),
)


def main() -> None:
    """Measure, print, and store."""
    parser = measure.parser(__doc__)
    parser.add_argument("--model", choices=SHORT, default="650M")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(rank(*args.rank)))
        return
    folder = Path(tempfile.mkdtemp(prefix="esmshard_"))
    try:
        seconds = measure.ranks_of(__file__, [SHORT[args.model], str(folder), args.rounds], args.ranks)[0]
    finally:
        shutil.rmtree(folder)
    rows = []
    for what, of, words, most in ROWS:
        middle = [f"{statistics.median(seconds[one]):.2f}" for one in (what, of)]
        rows.append([words, *middle, measure.spread(measure.over(seconds[what], seconds[of])), most])
    title = f"### {args.model} with optimizer state, {seconds['bytes'][0] / 1e9:.1f} GB, {args.ranks} ranks"
    head = ["", "s", "s of what it is compared with", "ratio, median [min, max]", "at most"]
    measure.store("checkpoint", [title, "", *measure.table(head, rows)], seconds, args.out)


if __name__ == "__main__":
    main()
