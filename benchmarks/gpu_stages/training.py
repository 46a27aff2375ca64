"""Real training steps of a random model on one device: their time, and their peak memory beside the estimate."""

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

from esmshard import planner
from esmshard.batch import TokenBatch, pack
from esmshard.model.attention import inverse_frequencies, kernel_name
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import DTYPES, shard
from esmshard.planner import head_bytes, training_flops
from esmshard.recipe.sections import AdaptSettings, OptimSettings
from esmshard.tasks.mlm import MlmSettings
from esmshard.tasks.registry import new_task
from esmshard.train.optim import adamw, set_learning_rate
from esmshard.train.step import train_step

TASK = MlmSettings(name="mlm")
FULL = AdaptSettings()  # type: ignore[call-arg]
WARM_UP = 2
"""The number of first steps that do not count. The optimizer's state exists from the second step on."""
KERNELS: dict[str, planner.Device] = {"slices": "cpu", "varlen": "cuda", "padded": "cuda-padded"}


@dataclass(frozen=True)
class Trained:
    """The measurements of some training steps."""

    seconds: list[float]
    """The seconds of each step after the warm-up."""
    peak: int | None
    """The bytes of the GPU that were allocated at the peak of these steps; None on a CPU."""
    planned: planner.Memory
    tokens: int
    """The tokens of a step, without padding."""
    flops: float
    """The FLOPs of a step, forward and backward. Recomputation for the sake of memory does not count."""
    ceiling: float
    """The FLOP/s of a large matrix product, measured right after the steps."""

    @property
    def second(self) -> float:
        """The median of the steps."""
        return statistics.median(self.seconds)

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation, as a share of the measured matrix product."""
        return self.flops / self.second / self.ceiling


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
    """Take some steps, and measure them. `tokens` is the exact number of tokens of a micro-batch; `longest` is the most
    residues of a protein.
    """
    gc.collect()
    config, task = SIZES[name], new_task(TASK, {})
    with torch.device("meta"):
        model = FineTuner(ESM2(config), task.head(config))
    model.adapt(adapt, 0)
    numbers = planner.numbers_of(model, config)
    work = [_batch(tokens, longest, seed) for seed in range(micro_batches)]
    planned = planner.memory(
        numbers,
        layout,
        tokens,
        head_bytes(TASK, np.array([longest + 2], np.int32), layout, config)(tokens),
        KERNELS[kernel_name(device, DTYPES[layout.precision])],
        micro_batches=micro_batches,
        padding=max(batch.max_seqlen * len(batch) / batch.bounds[-1] for batch, _ in work),
    )
    lengths = np.concatenate([batch.token_counts for batch, _ in work]).astype(np.float64)
    flops = float(lengths.sum()) * training_flops(numbers, float((lengths**2).sum() / lengths.sum()))
    seconds, peaks = [], [0]
    with _ranks(device, layout) as ranks:
        shard(model, layout, ranks)
        if layout.sharded:
            materialise(model, _rows_of(model, config), layout, ranks)
        else:
            random_models.fill(model, device)
        optimizer = adamw(model.train(), OptimSettings())  # type: ignore[call-arg]
        set_learning_rate(optimizer, 0.0)  # the step does all its work, and the weights stay the same

        def step() -> None:
            train_step(model, task, optimizer, [(*one, False) for one in work], 1.0, ranks, layout)

        for n in range(WARM_UP + steps):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = measure.clock(step, device)
            if n >= WARM_UP:
                seconds.append(took)
                peaks.append(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
        ceiling = measure.ceiling(device, DTYPES[layout.precision])
    whole = sum(batch.bounds[-1] for batch, _ in work)
    return Trained(seconds, max(peaks) or None, planned, whole, flops, ceiling)


@contextmanager
def _ranks(device: torch.device, layout: Layout) -> Iterator[World]:
    """Yield a world of one process. FSDP needs a process group to keep weights outside the GPU."""
    if layout.sharded:
        with world(alone_too=True) as ranks:
            yield ranks
    else:
        yield World(0, 1, device, None)


def _batch(tokens: int, longest: int, seed: int) -> tuple[TokenBatch, list[torch.Tensor]]:
    """Return a pack with this exact number of tokens, 15% of the residues masked, and the original residues."""
    lengths: list[int] = []
    for length in peers.protein_lengths(tokens // 20, seed):
        left = tokens - sum(lengths) - 2 * len(lengths)
        if left < 25:  # the remaining tokens go to the protein before
            lengths[-1] += left
            break
        lengths.append(min(length, longest, left - 2))
    sequences = peers.sequences(lengths, seed)
    masked, chosen = peers.corrupt(sequences, seed + 1)
    places = [np.flatnonzero(one) for one in chosen]
    targets = [torch.from_numpy(s[at].astype(np.int64)) for s, at in zip(sequences, places, strict=True)]
    return pack(masked, logits_at=places), targets


def _rows_of(model: FineTuner, config: EsmConfig) -> Callable[[str, slice], torch.Tensor]:
    """Return a function that draws random rows of any tensor, on the CPU."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def rows(name: str, which: slice) -> torch.Tensor:
        if name.endswith("inv_freq"):
            return inverse_frequencies(config.head_dim)[which]
        drawn = torch.empty(len(range(*which.indices(shapes[name][0]))), *shapes[name][1:])
        return drawn.normal_(0, random_models.DEVIATION, generator=torch.Generator().manual_seed(0))

    return rows
