"""`esmshard plan`: what a recipe needs on given machines, strategy by strategy, and which one to take."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.splits.recipe_splits import in_tokens, open_split
from esmshard.errors import InputError, UsageError
from esmshard.model.config import SIZES, EsmConfig
from esmshard.planner.cost import Cost, Work, cost
from esmshard.planner.machines import Machines
from esmshard.planner.memory_model import KINDS, Device, Memory, ModelNumbers, largest_micro_batch, memory
from esmshard.planner.parameter_counts import numbers_of
from esmshard.recipe.sections import Recipe
from esmshard.recipe.task_section import TaskSettings
from esmshard.sharding.layout import BYTES, STRATEGIES, Layout, layout

RESERVE = 0.1
"""Share of a GPU's memory that a plan leaves free: gaps of the allocator, and what the estimate may be off by."""
AS_GOOD = 1.03
"""Step times within this factor count as equal; the plan that needs less memory is then the better one."""
MOST_TOKENS = 1 << 20
"""Where the search for the largest micro-batch ends."""
GIB = 2**30

Checkpointing = Literal["none", "selective", "full"]
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Lengths:
    """The user's own proteins, as training cuts them."""

    records: int
    longest: int
    """Tokens, `<cls>` and `<eos>` counted."""
    mean: float
    attended: float
    """Tokens that a token attends to, on average over tokens."""
    beside: int
    """Tokens that go through the model with every micro-batch besides."""


@dataclass(frozen=True)
class Option:
    """One way to lay the run out."""

    strategy: str
    checkpointing: str
    cpu_offload: bool
    impossible: str = ""
    """Why it cannot be, where it cannot; the rest is then empty."""
    tokens: int = 0
    """Of the largest micro-batch of a rank that a step has."""
    micro_batches: int = 0
    largest: int = 0
    """Largest `batch.tokens_per_rank` that fits; 0 if not even the longest record does."""
    fits: bool = False
    memory: Memory | None = None
    cost: Cost | None = None


@dataclass(frozen=True)
class RecipePlan:
    """What `plan` found."""

    recipe: Recipe
    machines: Machines
    numbers: ModelNumbers
    lengths: Lengths
    precision: str
    room: int
    """Bytes of each GPU that may be planned with."""
    options: list[Option]
    best: Option | None

    def reasons(self) -> list[str]:
        """Why the best option is the best, a sentence each."""
        return list(_reasons(self))


def plan(recipe: Recipe, machines: Machines) -> RecipePlan:
    """Reckon every strategy and checkpointing mode; with `cpu_offload` too if nothing else fits.

    Raises:
        InputError: the training data or the model cannot be read, or there are fewer records than GPUs.
        UsageError: the settings of `parallel` cannot be under any strategy.
    """
    train = open_split(recipe, "train", None)
    recipe, tokens_N = in_tokens(recipe, train), train.tokens
    if len(tokens_N) < machines.world_size:
        raise InputError(
            f"{train.path}: train has {len(tokens_N)} records, fewer than the {machines.world_size} GPUs; take fewer"
        )
    config = _config(recipe)
    numbers = numbers_of(config, recipe.task.head_parameters(config), recipe.adapt, logits=recipe.task.trains_lm_head)
    total = float(tokens_N.sum(dtype=np.int64))
    attended = float(np.square(tokens_N, dtype=np.float64).sum()) / total
    lengths = Lengths(len(tokens_N), int(tokens_N.max()), total / len(tokens_N), attended, train.beside)
    precision = _precision(recipe, machines)
    room = int(machines.room * (1 - RESERVE))

    def options(offload: bool) -> list[Option]:
        return [
            _option(recipe, machines, numbers, lengths, precision, room, tokens_N, strategy, mode, offload)
            for strategy in (STRATEGIES if machines.world_size > 1 else [recipe.parallel.strategy])
            for mode in MODES
        ]

    found = options(recipe.parallel.cpu_offload)
    if all(option.impossible for option in found):
        raise UsageError(found[0].impossible)
    if not any(option.fits for option in found) and not recipe.parallel.cpu_offload:
        found += options(True)
    return RecipePlan(recipe, machines, numbers, lengths, precision, room, found, _best(found))


def head_bytes(task: TaskSettings, tokens_N: npt.NDArray[np.int32], layout: Layout) -> Callable[[int], int]:
    """Bytes that a task's head keeps of a micro-batch of so many tokens: the longest record, and the usual mix.

    Args:
        task: whose head it is; it reckons in fp32.
        tokens_N: of each training record.
        layout: of the model. FSDP runs the head in the precision of the arithmetic too.
    """
    lengths, counts = np.unique(tokens_N, return_counts=True)
    each = np.array([task.head_bytes(int(length)) for length in lengths], dtype=np.float64)
    size = BYTES[layout.precision] / 4 if layout.sharded else 1.0
    longest, per_token = int(lengths[-1]), float((each * counts).sum() / (lengths * counts).sum())
    return lambda tokens: round(size * (each[-1] + max(0, tokens - longest) * per_token))


def _config(recipe: Recipe) -> EsmConfig:
    """Of the model that a recipe names. Weights are not read, and nothing is downloaded."""
    name = recipe.model.name
    if name in SIZES and not Path(name).exists():
        return SIZES[name]
    from esmshard.model.weights import key_maps, open_weights, weight_reader  # with torch; a released name does without

    if (Path(name) / "config.json").is_file():
        try:
            return key_maps.config_of_transformers(weight_reader.read_json(Path(name) / "config.json"))
        except ValueError as error:
            raise InputError(f"{Path(name) / 'config.json'}: not a model that can be read: {error}") from None
    return open_weights.read(name).config


def _precision(recipe: Recipe, machines: Machines) -> Literal["fp32", "bf16", "fp16"]:
    wanted, gpu = recipe.parallel.precision, machines.gpu
    if wanted == "auto":
        return "bf16" if gpu.has_bf16 else "fp16"
    if wanted == "bf16" and not gpu.has_bf16:
        raise UsageError(f"parallel.precision: {gpu.name} has no bf16; take auto, fp16 or fp32")
    return wanted


def _option(
    recipe: Recipe,
    machines: Machines,
    numbers: ModelNumbers,
    lengths: Lengths,
    precision: Literal["fp32", "bf16", "fp16"],
    room: int,
    tokens_N: npt.NDArray[np.int32],
    strategy: str,
    mode: Checkpointing,
    offload: bool,
) -> Option:
    change: dict[str, Any] = {"strategy": strategy, "activation_checkpointing": mode, "cpu_offload": offload}
    if strategy != "hybrid_shard":
        change["group_size"] = None
    settings = recipe.parallel.model_copy(update=change)
    try:
        laid_out = layout(settings, machines.world_size, machines.per_machine, precision)
    except UsageError as error:
        return Option(strategy, mode, offload, impossible=str(error))
    packed = machines.gpu.has_bf16 and precision != "fp32"
    device: Device = "cuda" if packed else "cuda-padded"
    padding = 1.0 if packed else lengths.longest / lengths.mean
    head = head_bytes(recipe.task, tokens_N, laid_out)

    share = -(-recipe.batch.global_tokens // machines.world_size)
    beside = lengths.beside
    least = lengths.longest + beside
    largest = largest_micro_batch(
        numbers, laid_out, room, head, device, longest=least, share=MOST_TOKENS, padding=padding
    )
    asked = recipe.batch.tokens_per_rank
    if asked == "auto":
        most = largest_micro_batch(
            numbers, laid_out, room, head, device, longest=least, share=share + beside, padding=padding
        )
        most -= beside
    else:
        most = asked
    most = max(most, lengths.longest)
    parts = -(-share // most)
    # Shares are balanced, so that no micro-batch is much larger than the mean; but the longest record stays whole.
    tokens = max(lengths.longest, -(-share // parts))
    need = memory(numbers, laid_out, tokens + beside, head(tokens), device, micro_batches=parts, padding=padding)
    mean_tokens = -(-share // parts) + beside
    work = Work(
        tokens=mean_tokens,
        micro_batches=parts,
        attended=lengths.attended if packed else float(lengths.longest),
        head_bytes=round(head(tokens) * mean_tokens / (tokens + beside)),
    )
    return Option(
        strategy,
        mode,
        offload,
        tokens=tokens,
        micro_batches=parts,
        largest=max(0, largest - beside),
        fits=need.total <= room,
        memory=need,
        cost=cost(numbers, laid_out, work, machines),
    )


def _seconds(option: Option) -> float:
    assert option.cost is not None
    return option.cost.seconds


def _total(option: Option) -> int:
    assert option.memory is not None
    return option.memory.total


def _best(options: list[Option]) -> Option | None:
    """The fastest that fits; of those as good as it, the one that needs the least memory."""
    fitting = [option for option in options if option.fits]
    if not fitting:
        return None
    fastest = min(map(_seconds, fitting))
    return min((o for o in fitting if _seconds(o) <= AS_GOOD * fastest), key=_total)


def _reasons(found: RecipePlan) -> Iterator[str]:
    best = found.best
    if best is None:
        least = min(_total(option) for option in found.options if option.memory is not None) / GIB
        yield (
            f"nothing fits: the least needs {least:.1f} GiB a GPU, and there are {found.room / GIB:.1f} to plan with; "
            "take more or larger GPUs, or lower data.max_length or batch.tokens_per_rank"
        )
        return
    assert best.cost is not None
    assert best.memory is not None
    free = 1 - best.memory.total / found.machines.gpu.memory_bytes
    yield (
        f"it fits: {best.memory.total / GIB:.1f} GiB at the peak ({best.memory.when}), which leaves {free:.0%} of the "
        f"GPU free, {RESERVE:.0%} being the reserve"
    )
    if best.memory.host:
        yield (
            f"each machine needs {best.memory.host * found.machines.per_machine / GIB:.0f} GiB of its own memory for "
            "weights, gradients and optimizer state"
        )
    others = [o for o in found.options if o.fits and o is not best]
    faster = [o for o in others if _seconds(o) < best.cost.seconds]
    if faster:
        yield f"what is faster ({len(faster)}) is so by less than {AS_GOOD - 1:.0%}, and needs more memory"
    elif others:
        yield "no other that fits has a shorter step"
    else:
        yield "nothing else fits"
    traffic = best.cost.traffic
    if traffic.total == 0:
        yield "nothing travels between GPUs"
    elif best.cost.exposed < 0.02 * best.cost.seconds:
        yield f"the link hides its {traffic.total / GIB:.2f} GiB a step behind the arithmetic"
    else:
        yield (
            f"the link does not hide its {traffic.total / GIB:.2f} GiB a step: "
            f"{best.cost.exposed / best.cost.seconds:.0%} of the step is waiting; a larger batch.global_tokens helps"
        )


def keys(found: RecipePlan) -> list[str]:
    """The recipe keys of the best option, to paste behind `esmshard finetune RECIPE`."""
    best = found.best
    if best is None:
        return []
    lines = [
        f"parallel.strategy={best.strategy}",
        f"parallel.activation_checkpointing={best.checkpointing}",
        f"batch.tokens_per_rank={best.largest if found.recipe.batch.tokens_per_rank == 'auto' else best.tokens}",
    ]
    return [*lines, "parallel.cpu_offload=true"] if best.cpu_offload else lines


_HEAD = (
    *("strategy", "checkpointing", "weights", "grads", "optim", "gather", "activ", "head", "other", "total", "fits"),
    *("most", "tokens", "ms/step", "exposed", "GiB"),
)


def _table(found: RecipePlan) -> Iterator[str]:
    """A line for each option, every column as wide as its widest cell; words to the left, numbers to the right."""
    rows: list[tuple[str, ...]] = [_HEAD]
    impossible: dict[str, str] = {}
    for option in found.options:
        name = option.strategy
        if option.cpu_offload and not found.recipe.parallel.cpu_offload:
            name += " + cpu_offload"
        if option.memory is None or option.cost is None:
            impossible[name] = option.impossible  # for every mode alike
            rows += [(name,)] if (name,) not in rows else []
            continue
        rows.append(
            (
                *(name, option.checkpointing),
                *(f"{getattr(option.memory, kind) / GIB:.2f}" for kind in KINDS),
                *(f"{option.memory.total / GIB:.2f}", "yes" if option.fits else "no", f"{option.largest or '-'}"),
                f"{option.micro_batches} x {option.tokens:,}",
                *(f"{1e3 * seconds:.1f}" for seconds in (option.cost.seconds, option.cost.exposed)),
                f"{option.cost.traffic.total / GIB:.2f}",
            )
        )
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(len(_HEAD))]
    for row in rows:
        if len(row) == 1:
            yield f"{row[0]:<{widths[0]}}  not possible: {impossible[row[0]]}"
            continue
        cells = [cell.ljust(widths[k]) if k in (0, 1, 10) else cell.rjust(widths[k]) for k, cell in enumerate(row)]
        yield "  ".join(cells)


def as_text(found: RecipePlan) -> str:
    """The table, the recommendation and its reasons."""
    numbers, lengths, machines = found.numbers, found.lengths, found.machines
    lines = [
        f"machines  {machines}: {found.room / GIB:.1f} GiB a GPU to plan with ({machines.gpu.memory_bytes / GIB:.1f} "
        f"less CUDA's own and {RESERVE:.0%}), {machines.gpu.link / 1e9:.0f} GB/s within a machine"
        + (f", {machines.network * 8 / 1e9:g} Gbit/s a GPU between machines (--network)" if machines.nodes > 1 else ""),
        f"model     {found.recipe.model.name}: {numbers.parameters:,} parameters, {numbers.trained:,} learn, "
        f"{found.precision}",
        f"data      {lengths.records:,} records of {lengths.mean:.0f} tokens on average, longest {lengths.longest:,}; "
        f"{found.recipe.batch.global_tokens:,} tokens a step"
        + (f"; {lengths.beside:,} of the wild type with every micro-batch" if lengths.beside else ""),
        "",
        "GiB a rank at the peak of a step",
        *_table(found),
    ]
    lines += [
        "",
        "most: largest batch.tokens_per_rank that fits; tokens: micro-batches of a step; GiB: received a step",
        "",
    ]
    if found.best is not None:
        assert found.best.cost is not None
        lines += [
            f"take      {' '.join(keys(found))}",
            f"speed     {found.best.cost.tokens_per_second:,.0f} tokens/s a GPU, "
            f"{found.best.cost.tokens_per_second * machines.world_size:,.0f} in all, MFU {found.best.cost.mfu:.1%}",
        ]
    lines += [f"{'because' if n == 0 else '':<10}{reason}" for n, reason in enumerate(found.reasons())]
    return "\n".join(lines)


def as_json(found: RecipePlan) -> dict[str, Any]:
    """The same for programs: bytes and seconds."""

    def row(option: Option) -> dict[str, Any]:
        known = asdict(option)
        if option.memory is not None and option.cost is not None:
            known["memory"]["total"], known["cost"]["seconds"] = option.memory.total, option.cost.seconds
            known["cost"]["traffic"]["total"] = option.cost.traffic.total
        return known

    return {
        "machines": {**asdict(found.machines), "world_size": found.machines.world_size},
        "room_bytes": found.room,
        "model": {"name": found.recipe.model.name, "parameters": found.numbers.parameters, **asdict(found.numbers)},
        "lengths": asdict(found.lengths),
        "precision": found.precision,
        "options": [row(option) for option in found.options],
        "best": None if found.best is None else row(found.best),
        "keys": keys(found),
        "reasons": found.reasons(),
    }
