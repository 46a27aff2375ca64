"""Real training steps of a random model on one device, timed, with their peak memory beside the planner's."""

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import measure
import numpy as np
import peers
import random_models
import torch

from esmshard.batch import TokenBatch, pack
from esmshard.launch.process_group import World, world
from esmshard.model.attention import inverse_frequencies, kernel_name
from esmshard.model.config import SIZES, EsmConfig
from esmshard.model.trunk import ESM2
from esmshard.planner import memory_model
from esmshard.planner.cost import training_flops
from esmshard.planner.recipe_plan import head_bytes
from esmshard.recipe.sections import AdaptSettings, OptimSettings
from esmshard.sharding.layout import Layout
from esmshard.sharding.load import materialise
from esmshard.sharding.shard import DTYPES, shard
from esmshard.tasks.finetuner import FineTuner
from esmshard.tasks.mlm_settings import MlmSettings
from esmshard.tasks.registry import new_task
from esmshard.train.optimizer import adamw, set_learning_rate
from esmshard.train.step import train_step

TASK = MlmSettings(name="mlm")
FULL = AdaptSettings()  # type: ignore[call-arg]
WARM_UP = 2
"""Steps before the first that counts: the second one is the first to find the optimizer's state."""


@dataclass(frozen=True)
class Trained:
    """Some steps of training."""

    seconds: list[float]
    """Of each step after the warm-up."""
    peak: int | None
    """Bytes of the GPU that were allocated at the peak of these steps; None on a CPU, which does not count them."""
    planned: memory_model.Memory
    tokens: int
    """Of a step; none of them is padding."""
    residues: int
    """Of a step."""
    flops: float
    """That a step needs, forward and backward; what is computed again for the sake of memory does not count."""
    ceiling: float
    """FLOP/s of a large matrix product, measured right after the steps."""

    @property
    def second(self) -> float:
        """Median of the steps."""
        return statistics.median(self.seconds)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, of the measured matrix product."""
        return self.flops / self.second / self.ceiling


@contextmanager
def prepared(
    name: str,
    device: torch.device,
    layout: Layout,
    *,
    tokens: int,
    adapt: AdaptSettings = FULL,
    micro_batches: int = 1,
    longest: int = 1022,
) -> Iterator[tuple[Callable[[], None], memory_model.Memory, list[TokenBatch], float]]:
    """A model laid out and an optimizer over it: gives a function that takes one step.

    Args:
        name: a key of SIZES.
        device: where to train.
        layout: of one process.
        tokens: of a micro-batch, exactly.
        adapt: what learns.
        micro_batches: of a step.
        longest: residues; lengths are those of proteins, cut there.

    Yields:
        The step, the memory that the planner expects, the batches of a step, and the FLOPs that it needs.
    """
    config = SIZES[name]
    task = new_task(TASK, {})
    with torch.device("meta"):
        model = FineTuner(ESM2(config), task.head(config))
    model.adapt(adapt, 0)
    numbers = memory_model.of_model(model, config.dim, config.n_heads)
    work = [_batch(tokens, longest, seed) for seed in range(micro_batches)]
    kernels: dict[str, memory_model.Device] = {"slices": "cpu", "varlen": "cuda", "padded": "cuda-padded"}
    planned = memory_model.memory(
        numbers,
        layout,
        tokens,
        head_bytes(TASK, np.array([longest + 2], np.int32), layout)(tokens),
        kernels[kernel_name(device, DTYPES[layout.precision])],
        micro_batches=micro_batches,
        padding=max(batch.max_seqlen * len(batch) / batch.bounds[-1] for batch, _ in work),
    )
    lengths = np.concatenate([batch.token_counts for batch, _ in work]).astype(np.float64)
    flops = float(lengths.sum()) * training_flops(numbers, float((lengths**2).sum() / lengths.sum()))
    with _ranks(device, layout) as ranks:
        shard(model, layout, ranks)
        if layout.sharded:
            materialise(model, _rows_of(model, config), layout, ranks)
        else:
            random_models.fill(model, device)
        optimizer = adamw(model.train(), OptimSettings())  # type: ignore[call-arg]
        set_learning_rate(optimizer, 0.0)  # all of a step's work, and the weights stay as they were drawn

        def step() -> None:
            train_step(model, task, optimizer, [(*one, False) for one in work], 1.0, ranks, layout)

        yield step, planned, [batch for batch, _ in work], flops


def train(
    name: str,
    device: torch.device,
    layout: Layout,
    *,
    tokens: int,
    steps: int,
    adapt: AdaptSettings = FULL,
    micro_batches: int = 1,
    longest: int = 1022,
) -> Trained:
    """Take some steps; see `prepared` for the arguments."""
    gc.collect()
    seconds, peaks = [], []
    with prepared(name, device, layout, tokens=tokens, adapt=adapt, micro_batches=micro_batches, longest=longest) as (
        step,
        planned,
        batches,
        flops,
    ):
        for n in range(WARM_UP + steps):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = measure.clock(step, device)
            if n >= WARM_UP:
                seconds.append(took)
                peaks.append(torch.cuda.max_memory_allocated() if device.type == "cuda" else None)
        ceiling = measure.ceiling(device, DTYPES[layout.precision])
    most = max((peak for peak in peaks if peak is not None), default=None)
    whole, residues = sum(batch.bounds[-1] for batch in batches), sum(batch.n_residues for batch in batches)
    return Trained(seconds, most, planned, whole, residues, flops, ceiling)


@contextmanager
def _ranks(device: torch.device, layout: Layout) -> Iterator[World]:
    """A world of one. FSDP, which keeps weights outside the GPU, wants a process group."""
    if layout.sharded:
        with world(alone_too=True) as ranks:
            yield ranks
    else:
        yield World(0, 1, device, None)


def _batch(tokens: int, longest: int, seed: int) -> tuple[TokenBatch, list[torch.Tensor]]:
    """A pack of exactly so many tokens, 15% of the residues masked, and what was there."""
    lengths: list[int] = []
    for length in peers.protein_lengths(tokens // 20, seed):
        left = tokens - sum(lengths) - 2 * len(lengths)
        if left < 25:  # what is left over goes to the protein before
            lengths[-1] += left
            break
        lengths.append(min(length, longest, left - 2))
    sequences = peers.sequences(lengths, seed)
    masked, chosen = peers.corrupt(sequences, seed + 1)
    places = [np.flatnonzero(one) for one in chosen]
    targets = [torch.from_numpy(s[at].astype(np.int64)) for s, at in zip(sequences, places, strict=True)]
    return pack(masked, logits_at=places), targets


def _rows_of(model: FineTuner, config: EsmConfig) -> Callable[[str, slice], torch.Tensor]:
    """Random rows of any tensor, on the CPU."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def rows(name: str, which: slice) -> torch.Tensor:
        if name.endswith("inv_freq"):
            return inverse_frequencies(config.head_dim)[which]
        count = len(range(*which.indices(shapes[name][0])))
        drawn = torch.empty(count, *shapes[name][1:])
        return drawn.normal_(0, random_models.DEVIATION, generator=torch.Generator().manual_seed(0))

    return rows
