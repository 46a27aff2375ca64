"""A model that is larger than one GPU: ranks hold it together, and each rank is a worker with parts of its own.

A layer's weights are gathered from all ranks when they are needed, so every rank takes part in every forward pass: with
a pack or, if it has no pack left, with a dummy pack of one residue, whose result is not used. Before each pass the
ranks exchange whether they have a pack; if no rank has one, all ranks are done. In all other respects a rank is like
any worker (`esmshard.embed.workers.embed_worker`): it claims parts, and reads and writes by itself.

`python -m esmshard.embed.workers.sharded_worker JSON` is one rank that `run_sharded` started.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esmshard.devices import DeviceName, is_out_of_memory
from esmshard.embed.compute.embedder import TORCH, Embedder, Seen
from esmshard.embed.store.embedding_store import note_file, read_note
from esmshard.embed.store.part_plan import Spec, read_plan
from esmshard.embed.workers.claims import Worker
from esmshard.embed.workers.embed_worker import checked_model, work
from esmshard.errors import InputError, LostProcess, UsageError
from esmshard.model.families import family_registry
from esmshard.model.trunk import ContactRegression, Trunk
from esmshard.model.weights import Weights
from esmshard.parallel.launch import follow_launcher
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.process_group import World, own_device, world
from esmshard.parallel.shard import shard
from esmshard.parallel.watch import is_lost
from esmshard.progress import Progress, rate, say
from esmshard.vocab import encode

DUMMY = encode("A")
_COURTESY = 2.0
"""Seconds that a rank waits before it reports the loss of another rank, because that rank or the launcher knows the
reason.
"""


def sharded(found: Weights, spec: Spec, ranks: World) -> Trunk:
    """Build a model in evaluation mode of which each rank holds its share, in the precision of the arithmetic.
    `ranks.together` neighbours compute each layer together.

    Each rank reads its own rows of each tensor. Layers above the highest requested layer are not loaded. Every rank has
    the whole contact regression, because it is used outside forward passes, when the root group's weights are in
    shards.

    Raises:
        InputError: on all ranks, if one rank cannot read its weights, or ranks read different weights.
    """
    dtype, n_layers = TORCH[spec.compute], found.config.n_layers
    with torch.device("meta"):
        esm = family_registry.build(found.config)
    esm.to(dtype).requires_grad_(False).eval()
    highest = max(n_layers if one.layer is None else one.layer for one in spec.outputs)
    esm.layers = esm.layers[: max(1, highest)]
    del esm.contact_head
    laid = Layout(world_size=ranks.size, tensor=ranks.together, precision=spec.compute)
    shard(esm, laid, ranks)
    materialise(esm, found.rows, laid, ranks)
    head = ContactRegression(found.config.n_maps)
    head.load_state_dict({name: found[f"contact_head.{name}"] for name in head.state_dict()})
    esm.contact_head = head.to(ranks.device, dtype).requires_grad_(False)
    return esm


class Lockstep(Embedder):
    """The computation of packs with a sharded model. Each pass waits for all ranks.

    Args:
        esm: the model from `sharded`.
        spec: the spec of the store.
        ranks: the ranks that hold the model, each with a `Lockstep` of the same spec.
        tokens: tokens of a pack.
        progress: the display of what all ranks have finished.
        done: the number of rows that were finished before.
        rows: the number of rows of the store.
    """

    def __init__(
        self, esm: Trunk, spec: Spec, ranks: World, tokens: int | None, progress: Progress, done: int, rows: int
    ) -> None:
        super().__init__(
            esm, spec.outputs, dtype=spec.dtype, long=spec.long, tokens=tokens, device=ranks.device, workers=1
        )
        self._ranks, self._progress, self._done, self._all_rows = ranks, progress, done, rows
        self._mine = [0, 0]
        self._began = time.monotonic()
        self._has_no_pack = False

    def count(self, rows: int, residues: int) -> None:
        """Add the rows and residues that this rank has finished."""
        self._mine = [self._mine[0] + rows, self._mine[1] + residues]

    def keep_up(self) -> None:
        """Take part in the passes of ranks that still have packs, until no rank has one."""
        self._has_no_pack = True
        while self._meet():
            for _ in self.compute([DUMMY]):
                pass

    def _meet(self) -> bool:
        """Exchange with all ranks whether they have a pack; returns whether any rank has one."""
        packs, rows, residues = self._ranks.sum([not self._has_no_pack, *self._mine])
        speed = residues / max(time.monotonic() - self._began, 1e-9)
        self._progress.update(min(self._done + int(rows), self._all_rows), f"{rate(speed)} residues/s")
        return packs > 0

    @property
    def follows(self) -> bool:
        """Whether this rank computes the packs of the first rank of its group, and has none of its own."""
        return bool(self._ranks.rank % self._ranks.together)

    def follow(self) -> None:
        """Take part in the passes of the first rank of this rank's group, until no rank has a pack."""
        self._has_no_pack = True
        while self._meet():
            self._forward([])

    def _forward(self, sequences: list[Seen]) -> list[dict[str, torch.Tensor]]:
        if not self._has_no_pack:
            self._meet()
        if self._ranks.together > 1:  # A pack is a few kilobytes.
            sequences = self._ranks.gather(sequences)[self._ranks.rank - self._ranks.rank % self._ranks.together]
        try:
            return super()._forward(sequences)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # The other ranks are in the middle of this pass, so it cannot be repeated with a smaller pack.
        longest = max(len(tokens) - 2 for tokens in sequences)
        what = f"{sum(map(len, sequences)):,} tokens" if len(sequences) > 1 else f"one sequence of {longest:,} residues"
        fix = f"--tokens below {self.tokens:,}" if len(sequences) > 1 else f"--long window --window {longest // 2}"
        raise InputError(
            f"rank {self._ranks.rank}: memory of {self.device.type} does not suffice for {what} at once; give {fix}"
            + (" and --overwrite" if len(sequences) == 1 else " and --resume")
        )


def work_together(directory: Path, plan: dict[str, Any], ranks: World, tokens: int | None, tensor: int) -> None:
    """Compute parts until each is finished or claimed by a worker outside these ranks that is alive.

    Args:
        directory: `OUT.partial`.
        plan: its plan.
        ranks: the ranks, which all call this function.
        tokens: tokens of a pack.
        tensor: the number of neighbouring ranks that compute each layer, and each pack, together.

    Raises:
        InputError: on all ranks if the model cannot be read, else on the rank that failed.
    """
    ranks = replace(ranks, together=tensor)
    esm = sharded(ranks.agree(lambda: checked_model(plan)), Spec.of(plan), ranks)
    done = ranks.from_first(lambda: _finished_rows(directory, plan))
    with Progress("embed", plan["unique"], show=ranks.is_first) as progress:
        embedder = Lockstep(esm, Spec.of(plan), ranks, tokens, progress, done, plan["unique"])
        if embedder.follows:
            embedder.follow()
            return
        with Worker(directory / "work") as worker:
            work(directory, plan, embedder, worker, embedder.count)
            embedder.keep_up()


def _finished_rows(directory: Path, plan: dict[str, Any]) -> int:
    notes = (read_note(note_file(directory, k)) for k in range(plan["parts"]))
    return sum(note["rows"] for note in notes if note is not None)


@contextmanager
def joined(device: DeviceName = None) -> Iterator[World]:
    """Join the ranks that a launcher started, of which this process is one.

    Args:
        device: the device that the user named, see `own_device`.

    Raises:
        InputError: in place of the error that another rank is gone or did not start.
    """
    with world(wanted=device) as ranks:
        if ranks.mesh is None:
            raise UsageError("--shard: one process has nobody to share a model with; start two or more")
        try:
            yield ranks
        except RuntimeError as error:
            if not is_lost(error):
                raise
            time.sleep(_COURTESY)
            # The messages of gloo begin with a line of its source, and end with advice.
            words = re.sub(r"^\[[^]]*] *", "", str(error).strip()).split("\n")[0].split(". ")[0]
            raise LostProcess(
                f"rank {ranks.rank} has lost another one, which ended or is stuck ({words}); what is finished stays: "
                "go on with --resume"
            ) from None


def run_sharded(
    directory: Path, processes: int, tokens: int | None, device: DeviceName = None, tensor: int = 1
) -> None:
    """Run ranks on this machine that hold one model together, until every part is finished.

    Args:
        directory: `OUT.partial`.
        processes: the number of ranks. With CUDA each rank has a GPU of its own.
        tokens: tokens of a pack.
        device: the device that the user named, see `own_device`.
        tensor: the number of ranks that compute each layer together.

    Raises:
        InputError: if a rank has ended; its own message is on stderr. `Preempted` after SIGTERM.
    """
    from esmshard.parallel.launch import run_local

    named = None if device is None else str(device)
    options = json.dumps({"directory": str(directory), "tokens": tokens, "device": named, "tensor": tensor})
    code = run_local(["-m", "esmshard.embed.workers.sharded_worker", options], processes)
    if code == Preempted.exit_code:
        raise Preempted(f"{directory}: stopped; what is finished stays there: go on with --resume")
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise InputError(f"{directory}: is not finished, as a rank has failed; fix that and go on with --resume")


def check_ranks(processes: int, device: DeviceName) -> None:
    """Raise `InputError` if this machine cannot run that many ranks."""
    if processes < 2:
        raise UsageError("--shard: one process has nobody to share a model with; give --nproc 2 or more")
    own_device(processes - 1, processes, device)


def _main() -> None:
    options = json.loads(sys.argv[1])
    follow_launcher()
    directory = Path(options["directory"])
    try:
        with joined(options["device"]) as ranks:
            work_together(directory, read_plan(directory), ranks, options["tokens"], options["tensor"])
    except InputError as error:
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
    # The interpreter is not shut down; see `esmshard.cli.app.main`.
    os._exit(code)
