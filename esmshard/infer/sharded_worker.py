"""A model bigger than one GPU: ranks that hold it together, each a worker of a product with parts of its own.

A layer's weights are gathered from all ranks when they are needed, so every rank takes part in every forward pass: with
a pack, or, when it has none left, with a ghost of one residue that nobody looks at. Before each pass the ranks meet and
say whether they have a pack; when nobody has one, all are done. Beyond that a rank is as any other worker
(`esmshard.infer.worker`): it claims parts, and reads and writes by itself.

`python -m esmshard.infer.sharded_worker JSON` is one rank that `run_sharded` started.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError, UsageError
from esmshard.infer.claims import Worker
from esmshard.infer.compute import TORCH, Embedder, Tokens
from esmshard.infer.product import note_file, read_note
from esmshard.infer.product_plan import Spec, read_plan
from esmshard.infer.worker import checked_model, work
from esmshard.model.contacts import ContactRegression
from esmshard.model.esm2 import ESM2
from esmshard.model.weights import Weights
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.mesh import World, own_device, world
from esmshard.parallel.out_of_memory import is_out_of_memory
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.shard import shard
from esmshard.parallel.stuck import is_lost
from esmshard.parallel.worker import follow_launcher, tell_launcher
from esmshard.progress import Progress, rate, say
from esmshard.vocab import encode

PREFETCH = 2
"""Layers whose weights are on their way while one computes. What is gathered takes the memory of some three layers, and
of one more for each of these (measured on the CPU: 3.0 and 4.8 layers)."""
GHOST = encode("A")
_COURTESY = 2.0
"""Seconds that who lost another rank waits before it says so: that one, or the launcher, knows why."""


def sharded(found: Weights, spec: Spec, ranks: World) -> ESM2:
    """A model in evaluation mode of which each rank holds its share, in the precision of the arithmetic.

    Each rank reads its own rows of each tensor. Layers above the highest one asked for are not held at all. The contact
    regression is read outside forward passes, when weights of the root group are in shards: each rank has it whole.

    Raises:
        InputError: on all ranks alike, if weights cannot be read on one, or ranks read different ones.
    """
    dtype, n_layers = TORCH[spec.compute], found.config.n_layers
    with torch.device("meta"):
        esm = ESM2(found.config)
    esm.to(dtype).requires_grad_(False).eval()
    highest = max(n_layers if one.layer is None else one.layer for one in spec.outputs)
    esm.layers = esm.layers[: max(1, highest)]
    del esm.contact_head
    laid = Layout(world_size=ranks.size, group=ranks.size, precision=spec.compute, prefetch_forward=PREFETCH)
    shard(esm, laid, ranks)
    materialise(esm, found.rows, laid, ranks)
    head = ContactRegression(n_layers * found.config.n_heads)
    head.load_state_dict({name: found[f"contact_head.{name}"] for name in head.state_dict()})
    esm.contact_head = head.to(ranks.device, dtype).requires_grad_(False)
    return esm


class Lockstep(Embedder):
    """Computes packs with a sharded model; each pass waits until all ranks have come to one.

    Args:
        esm: of `sharded`.
        spec: of the product.
        ranks: that hold the model, each with a `Lockstep` of the same spec.
        tokens: of a pack.
        progress: told what all ranks have finished.
        done: rows that were finished before.
        rows: of the product.
    """

    def __init__(
        self, esm: ESM2, spec: Spec, ranks: World, tokens: int | None, progress: Progress, done: int, rows: int
    ) -> None:
        super().__init__(
            esm, spec.outputs, dtype=spec.dtype, long=spec.long, tokens=tokens, device=ranks.device, workers=1
        )
        self._ranks, self._progress, self._done, self._all_rows = ranks, progress, done, rows
        self._mine = [0, 0]
        self._began = time.monotonic()
        self._is_ghost = False

    def count(self, rows: int, residues: int) -> None:
        """Add what this rank has finished."""
        self._mine = [self._mine[0] + rows, self._mine[1] + residues]

    def keep_up(self) -> None:
        """Go through the passes of ranks that still have packs, until none has."""
        self._is_ghost = True
        while self._meet():
            for _ in self.compute([GHOST]):
                pass

    def _meet(self) -> bool:
        """Whether a rank has a pack. Comes back when all ranks have asked."""
        packs, rows, residues = self._ranks.sum([not self._is_ghost, *self._mine])
        speed = residues / max(time.monotonic() - self._began, 1e-9)
        self._progress.update(min(self._done + int(rows), self._all_rows), f"{rate(speed)} residues/s")
        return packs > 0

    def _forward(self, sequences: list[Tokens]) -> list[dict[str, torch.Tensor]]:
        if not self._is_ghost:
            self._meet()
        try:
            return super()._forward(sequences)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # The other ranks are in the middle of this pass, so that it cannot be tried again with less.
        longest = max(len(tokens) - 2 for tokens in sequences)
        what = f"{sum(map(len, sequences)):,} tokens" if len(sequences) > 1 else f"one sequence of {longest:,} residues"
        mend = f"--tokens below {self.tokens:,}" if len(sequences) > 1 else f"--long window --window {longest // 2}"
        raise InputError(
            f"rank {self._ranks.rank}: memory of {self.device.type} does not suffice for {what} at once; give {mend}"
            + (" and --overwrite" if len(sequences) == 1 else " and --resume")
        )


def work_together(directory: Path, plan: dict[str, Any], ranks: World, tokens: int | None) -> None:
    """Compute parts until every one is finished, or in the hands of a living worker that is none of these ranks.

    Args:
        directory: `OUT.partial`.
        plan: of it.
        ranks: all of them call it.
        tokens: of a pack.

    Raises:
        InputError: on all ranks if the model cannot be read, else on the one that has failed.
    """
    esm = sharded(ranks.agree(lambda: checked_model(plan)), Spec.of(plan), ranks)
    done = ranks.from_first(lambda: _finished_rows(directory, plan))
    with Progress("embed", plan["unique"], done=done, show=ranks.is_first) as progress:
        embedder = Lockstep(esm, Spec.of(plan), ranks, tokens, progress, done, plan["unique"])
        with Worker(directory / "work") as worker:
            work(directory, plan, embedder, worker, embedder.count)
            embedder.keep_up()


def _finished_rows(directory: Path, plan: dict[str, Any]) -> int:
    notes = (read_note(note_file(directory, k)) for k in range(plan["parts"]))
    return sum(note["rows"] for note in notes if note is not None)


@contextmanager
def joined() -> Iterator[World]:
    """The ranks that a launcher started, of which this is one.

    Raises:
        InputError: in place of the error that says that another rank is gone or did not come.
    """
    with world() as ranks:
        if ranks.mesh is None:
            raise UsageError("--shard: one process has nobody to share a model with; start two or more")
        try:
            yield ranks
        except RuntimeError as error:
            if not is_lost(error):
                raise
            time.sleep(_COURTESY)
            # gloo begins with a line of its source, and ends with advice.
            words = re.sub(r"^\[[^]]*] *", "", str(error).strip()).split("\n")[0].split(". ")[0]
            lost = InputError(
                f"rank {ranks.rank} has lost another one, which ended or is stuck ({words}); what is finished stays: "
                "go on with --resume"
            )
            lost.transient = True
            raise lost from None


def run_sharded(directory: Path, processes: int, tokens: int | None) -> None:
    """Run ranks on this machine that hold the model of a product together, until every part is finished.

    Args:
        directory: `OUT.partial`.
        processes: ranks to start; with CUDA each has a GPU of its own.
        tokens: of a pack.

    Raises:
        InputError: a rank has ended, and why is on stderr. `Preempted` after SIGTERM.
    """
    from esmshard.parallel.launch import run_local

    options = json.dumps({"directory": str(directory), "tokens": tokens})
    code = run_local(["-m", "esmshard.infer.sharded_worker", options], processes)
    if code == Preempted.exit_code:
        raise Preempted(f"{directory}: stopped; what is finished stays there: go on with --resume")
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise InputError(f"{directory}: is not finished, as a rank has failed; mend that and go on with --resume")


def check_ranks(processes: int) -> None:
    """`InputError` if so many ranks cannot be on this machine."""
    if processes < 2:
        raise UsageError("--shard: one process has nobody to share a model with; give --nproc 2 or more")
    own_device(processes - 1, processes)


def _main() -> None:
    options = json.loads(sys.argv[1])
    follow_launcher()
    directory = Path(options["directory"])
    try:
        with joined() as ranks:
            work_together(directory, read_plan(directory), ranks, options["tokens"])
    except InputError as error:
        tell_launcher(error)
        if not error.shared or os.environ["RANK"] == "0":
            say(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        say(f"error: {error.filename or directory}: {(error.strerror or str(error)).lower()}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    try:
        _main()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    else:
        code = 0
    sys.stderr.flush()
    # Without taking the interpreter down: see `esmshard.cli.main`.
    os._exit(code)
