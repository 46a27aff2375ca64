"""Measures the peak memory of real training steps on CPU ranks, to check `esmshard.planner`.

`measure` starts its own ranks, each a process of one thread that trains on synthetic proteins. The peak is the kernel's
high-water mark of resident memory (VmHWM) above the memory before the model was made. glibc is set to return every
block over 64 KiB at once, so that the mark counts live memory and not the cache of the allocator.
"""

import gc
from dataclasses import asdict

import torch
from measure import parser, ranks_of, reset_peak, resident

from esmshard import planner
from esmshard.batch import TokenBatch, pack
from esmshard.model.attention import inverse_frequencies
from esmshard.model.config import ModelConfig, Quantization
from esmshard.model.families.family_registry import FAMILIES, SIZES, build
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import shard, trainable
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks.contact import ContactSettings
from esmshard.tasks.registry import new_task
from esmshard.train.step import train_step

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
TASK = ContactSettings(name="contact", channels=4, blocks=0)
"""A head so small that the figures are those of the trunk."""
FULL = AdaptSettings()  # type: ignore[call-arg]


def measure(
    model_name: str,
    layout: Layout,
    tokens: int,
    steps: int = 3,
    *,
    length: int = 256,
    micro_batches: int = 1,
    adapt: AdaptSettings = FULL,
    quantization: Quantization | None = None,
) -> list[int]:
    """Return the bytes of each rank at the peak of a training step, without imports.

    Args:
        model_name: a key of SIZES; the weights are random.
        layout: the division over the ranks, which this function starts.
        tokens: the tokens of a micro-batch on each rank.
        steps: the training steps; the largest peak counts. The optimizer state exists from the second step on.
        length: the tokens of each protein.
        micro_batches: the micro-batches of a step.
        adapt: the trained part of the model.
        quantization: how the frozen matrices of the layers are stored.
    """
    sizes = [tokens, steps, length, micro_batches]
    work = [model_name, quantization, adapt.model_dump(), asdict(layout), *sizes]
    return ranks_of(__file__, work, layout.world_size, **ALLOCATOR)


def numbers(
    model_name: str, adapt: AdaptSettings = FULL, quantization: Quantization | None = None
) -> planner.ModelNumbers:
    """Return the sizes of the model that `measure` trains."""
    config = SIZES[model_name]
    return planner.numbers_of(on_meta(config, adapt, quantization), config, quantization=quantization)


def head_bytes(tokens: int, length: int = 256) -> int:
    """Return the bytes that the head of `measure` keeps for a micro-batch."""
    return tokens // length * TASK.head_bytes(length, n_logits=0, dim=0)


def on_meta(config: ModelConfig, adapt: AdaptSettings, quantization: Quantization | None = None) -> FineTuner:
    """Make the model of `measure` without memory."""
    with torch.device("meta"):
        model = FineTuner(build(config), new_task(TASK, {}).head(config))
    model.adapt(adapt, 0, (), quantization)
    return model


def _rank(
    model_name: str,
    quantization: Quantization | None,
    adapt: AdaptSettings,
    layout: Layout,
    tokens: int,
    steps: int,
    length: int,
    micro_batches: int,
) -> int:
    with world(alone_too=layout.cpu_offload) as ranks:
        # After this, library pages that are read at their first use, and buffers of connections, are in memory. Each
        # family has its own.
        small = FAMILIES[SIZES[model_name].family].sizes
        nano = next(size for name, size in small.items() if name.endswith("nano"))
        _train(nano, quantization, adapt, layout, 4 * length, 2, length, micro_batches, ranks)
        gc.collect()
        before = resident()
        peak = _train(SIZES[model_name], quantization, adapt, layout, tokens, steps, length, micro_batches, ranks)
        return peak - before


def _train(
    config: ModelConfig,
    quantization: Quantization | None,
    adapt: AdaptSettings,
    layout: Layout,
    tokens: int,
    steps: int,
    length: int,
    micro_batches: int,
    ranks: World,
) -> int:
    model, batch = on_meta(config, adapt, quantization), batch_of(tokens, length)
    targets = [torch.zeros(length - 2, length - 2, dtype=torch.int8) for _ in range(len(batch))]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    shard(model, layout, ranks)

    def rows_of(name: str, rows: slice) -> torch.Tensor:
        if name.endswith("inv_freq"):
            return inverse_frequencies(config.head_dim)[rows]
        # Any values serve, but all ranks must read the same values.
        generator = torch.Generator().manual_seed(0)
        return torch.zeros(len(range(*rows.indices(shapes[name][0]))), *shapes[name][1:]).normal_(
            0, 0.02, generator=generator
        )

    materialise(model, rows_of, layout, ranks)
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-4, fused=True)
    peak = 0
    for _ in range(steps):
        reset_peak()
        work = [(batch, targets, False)] * micro_batches
        train_step(model, new_task(TASK, {}), optimizer, work, 1.0, ranks, layout)
        peak = max(peak, resident("VmHWM"))
    return peak


def batch_of(tokens: int, length: int) -> TokenBatch:
    """Return a pack of random proteins of one length."""
    generator = torch.Generator().manual_seed(0)
    residues = torch.randint(4, 24, (tokens // length, length), generator=generator, dtype=torch.uint8)
    residues[:, 0], residues[:, -1] = 0, 2
    return pack([row.numpy() for row in residues])


def main() -> None:
    """Run one rank of `measure`, and print its peak to the standard output."""
    name, quantization, adapt, layout, *rest = parser(__doc__).parse_args().rank
    print(_rank(name, quantization, AdaptSettings(**adapt), Layout(**layout), *rest))


if __name__ == "__main__":
    main()
