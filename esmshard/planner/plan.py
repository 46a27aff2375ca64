"""The needs of a recipe on given machines under each strategy, and the best strategy, for `esmshard plan`."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import SCORED_TOKENS
from esmshard.data.splits.recipe_splits import in_tokens, open_split
from esmshard.data.tracks import track_files
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import is_hub_name
from esmshard.model import hub, weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import SIZES, build, family_of, released_name
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.parallel.layout import BYTES, STRATEGIES, Layout, check_tensor, layout
from esmshard.planner.cost import Cost, Machines, Work, cost
from esmshard.planner.memory_model import KINDS, Device, Memory, ModelNumbers, memory, numbers_of
from esmshard.recipe.sections import Recipe, TaskSettings
from esmshard.tasks.base import Task
from esmshard.tasks.registry import new_task

RESERVE = 0.1  # the share of a GPU's memory that stays free, for gaps of the allocator and errors of the estimate
AS_GOOD = 1.03  # step times within this factor count as equal; the plan that needs less memory is then the better one
MOST_TOKENS = 1 << 20  # the largest micro-batch that the search for the largest one considers
SHOWN = 16  # the most options that the table shows
HEAD = "strategy checkpointing weights grads optim gather activ head other total fits most tokens ms/step exposed GiB"
GIB = 2**30


class MicroBatches:
    """The memory of a recipe's micro-batches on one rank. `plan` and `finetune` ask it what fits.

    `recipe` is the recipe after `in_tokens`, and `train` has the training records.
    """

    def __init__(self, recipe: Recipe, train: Examples, numbers: ModelNumbers, layout: Layout, device: Device) -> None:
        self.longest, self._beside = int(train.tokens.max()), train.beside
        self.share = -(-recipe.batch.global_tokens // layout.data_size)  # of a rank in a step
        self._head_of = partial(head_bytes, recipe.task, layout=layout, n_logits=numbers.config.n_logits)
        self.head = self._head_of(train.tokens)
        padding = self.longest / float(train.tokens.mean(dtype=np.float64))
        self._memory = partial(memory, numbers, layout, device=device, padding=padding)

    def largest(self, room: int, share: int | None = None) -> int:
        """Return the largest `batch.tokens_per_rank` that fits into `room` bytes; 0 if the longest record does not fit.

        The result is at most the rank's share of a step, or `share`; but never less than the longest record.
        """
        whole, longest = (share or self.share) + self._beside, self.longest + self._beside

        def too_large(tokens: int) -> bool:
            return self._memory(tokens, self.head(tokens), micro_batches=-(-whole // tokens)).total > room

        if not too_large(max(longest, whole)):
            return max(longest, whole) - self._beside
        n_fitting = bisect_left(range(longest, whole), True, key=too_large)
        return self.longest + n_fitting - 1 if n_fitting else 0

    def need(self, tokens: int, micro_batches: int, scored_N: npt.NDArray[np.int32]) -> Memory:
        """Return the memory of a step whose largest micro-batch has so many tokens; or of a validation, which takes
        records of `scored_N` tokens whole, if a validation needs more.
        """
        step = self._memory(tokens + self._beside, self.head(tokens), micro_batches=micro_batches)
        longest, mean = int(scored_N.max()), float(scored_N.mean(dtype=np.float64))
        head = self._head_of(scored_N)(max(tokens, longest))
        scored = max(tokens, longest, SCORED_TOKENS) + self._beside
        scoring = self._memory(scored, head, padding=longest / mean, scoring=True)
        return max(step, scoring, key=lambda moment: moment.total)


def head_bytes(
    task: TaskSettings, tokens_N: npt.NDArray[np.int32], layout: Layout, n_logits: int
) -> Callable[[int], int]:
    """Return the bytes that a task's head keeps of a micro-batch, as a function of its tokens.

    The micro-batch has the longest of the records with `tokens_N` tokens, and is otherwise an average of all of them.
    """
    lengths, counts = np.unique(tokens_N, return_counts=True)
    each = np.array([task.head_bytes(int(length), n_logits) for length in lengths], dtype=np.float64)
    size = BYTES[layout.precision] / 4  # the task gives the bytes in fp32
    longest, per_token = int(lengths[-1]), float((each * counts).sum() / (lengths * counts).sum())
    return lambda tokens: round(size * (each[-1] + max(0, tokens - longest) * per_token))


@dataclass(frozen=True)
class Option:
    """One way to divide the run over the GPUs that is possible."""

    layout: Layout
    tokens: int  # of the largest micro-batch of a step on one rank
    micro_batches: int
    largest: int  # the largest `batch.tokens_per_rank` that fits; 0 if the longest record does not fit
    fits: bool
    memory: Memory
    cost: Cost


@dataclass(frozen=True)
class Plan:
    """The result of `plan`."""

    recipe: Recipe
    machines: Machines
    numbers: ModelNumbers
    room: int  # the bytes of each GPU with which the plan may be made
    options: list[Option]  # those that fit, the fastest first; then the others, those that need the least memory first

    @property
    def best(self) -> Option | None:
        """The fastest option that fits; of those that are as fast, the one that needs the least memory."""
        fitting = [option for option in self.options if option.fits]
        equal = [option for option in fitting if option.cost.seconds <= AS_GOOD * fitting[0].cost.seconds]
        return min(equal, key=lambda option: option.memory.total, default=None)

    @property
    def keys(self) -> list[str]:
        """The recipe keys of the best option, to paste behind `esmshard finetune RECIPE`."""
        if (best := self.best) is None:
            return []
        tokens = best.largest if self.recipe.batch.tokens_per_rank == "auto" else best.tokens
        return [
            f"parallel.strategy={best.layout.strategy}",
            f"parallel.activation_checkpointing={best.layout.activation_checkpointing}",
            f"batch.tokens_per_rank={tokens}",
            *[f"parallel.tensor={best.layout.tensor}"] * (best.layout.tensor > 1),
            *["parallel.cpu_offload=true"] * best.layout.cpu_offload,
        ]

    @property
    def reason(self) -> str:
        """One sentence that says why the best option is the best."""
        best, room = self.best, self.room / GIB
        if best is None:
            return (
                f"nothing fits: the least needs {self.options[0].memory.total / GIB:.1f} GiB a GPU, and there are "
                f"{room:.1f} to plan with; take more or larger GPUs, or lower data.max_length or batch.tokens_per_rank"
            )
        host = best.memory.host * self.machines.per_machine / GIB
        return (
            f"of the {sum(option.fits for option in self.options)} options that fit, none is {AS_GOOD - 1:.0%} faster, "
            f"and it needs {best.memory.total / GIB:.1f} of {room:.1f} GiB at the peak ({best.memory.when})"
            + (f" and {host:.0f} GiB of the memory of each machine" if host else "")
        )

    def as_text(self) -> str:
        """Return a table of the options, the best one and the reason."""
        machines, numbers, best = self.machines, self.numbers, self.best
        rows = [HEAD.split()]
        for option in self.options[:SHOWN]:
            laid_out, need, spent = option.layout, option.memory, option.cost
            name = laid_out.strategy + f", tensor {laid_out.tensor}" * (laid_out.tensor > 1)
            row = [name + ", cpu_offload" * laid_out.cpu_offload, laid_out.activation_checkpointing]
            row += [f"{getattr(need, kind) / GIB:.2f}" for kind in (*KINDS, "total")]
            row += ["yes" if option.fits else "no", f"{option.largest or '-'}"]
            row += [f"{option.micro_batches} x {option.tokens:,}", f"{1e3 * spent.seconds:.1f}"]
            rows.append([*row, f"{1e3 * spent.exposed:.1f}", f"{spent.received / GIB:.2f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        network = f", {machines.network * 8 / 1e9:g} Gbit/s a GPU between machines" if machines.nodes > 1 else ""
        lines = [
            f"machines  {machines}: {self.room / GIB:.1f} GiB a GPU to plan with{network}",
            f"model     {self.recipe.model.name}: {numbers.parameters:,} parameters, {numbers.trained:,} learn, "
            f"{self.options[0].layout.precision}; {self.recipe.batch.global_tokens:,} tokens a step",
            "\nGiB a rank at the peak of a step; most: largest batch.tokens_per_rank that fits; tokens: micro-batches "
            "of a step; GiB: received a step",
        ]
        for row in rows:
            lines.append("  ".join(f"{cell:{'<' if k < 2 else '>'}{widths[k]}}" for k, cell in enumerate(row)))
        if best is not None:
            speed, total = best.cost.tokens_per_second, best.cost.tokens_per_second * machines.world_size
            lines.append(f"\ntake      {' '.join(self.keys)}")
            lines.append(f"speed     {speed:,.0f} tokens/s a GPU, {total:,.0f} in all, MFU {best.cost.mfu:.1%}")
        return "\n".join([*lines, f"because   {self.reason}"])

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, in bytes and seconds."""
        numbers, rows = self.numbers, [asdict(option) for option in self.options]
        sizes = {"parameters": numbers.parameters, "trained": numbers.trained, **numbers.config.recorded()}
        return {
            "machines": {**asdict(self.machines), "world_size": self.machines.world_size},
            "room_bytes": self.room,
            "model": {"name": self.recipe.model.name, **sizes},
            "options": rows,
            "best": None if self.best is None else rows[self.options.index(self.best)],
            "keys": self.keys,
            "reason": self.reason,
        }


def plan(recipe: Recipe, machines: Machines) -> Plan:
    """Estimate every strategy and checkpointing mode; if nothing fits, estimate them with `cpu_offload` too.

    Unless the recipe sets `parallel.tensor` or `context`, each power of two for `parallel.tensor` that divides the GPUs
    of a machine and the model is estimated. `InputError` if the data or the model cannot be read, or there are fewer
    records than GPUs. `UsageError` if no strategy is possible with the other settings of `parallel`.
    """
    config, task, data = config_of(recipe.model.name), new_task(recipe.task, {}), recipe.data
    named = (family_of(config).tracks, recipe.model.name, "data.tracks.")
    tracks = track_files(data.tracks, *named) if data.tracks else []
    train = open_split(recipe, "train", task.labels, tracks)
    recipe, task, parallel = in_tokens(recipe, train), task.learn(train), recipe.parallel
    tokens_N, gpu, precision = train.tokens, machines.gpu, parallel.precision
    scored_N = np.concatenate([open_split(recipe, name, None, tracks).tokens for name in ("valid", "test")])
    if len(tokens_N) < machines.world_size // (parallel.tensor * parallel.context):
        raise InputError(
            f"{train.path}: train has {len(tokens_N)} records, fewer than the {machines.world_size} GPUs; take fewer"
        )
    if precision == "auto":
        precision = "bf16" if gpu.has_bf16 else "fp16"
    if precision == "bf16" and not gpu.has_bf16:
        raise UsageError(f"parallel.precision: {gpu.name} has no bf16; take auto, fp16 or fp32")
    device: Literal["cuda", "cuda-padded"] = "cuda" if gpu.has_bf16 and precision != "fp32" else "cuda-padded"
    attended = float(np.square(tokens_N, dtype=np.float64).sum() / tokens_N.sum(dtype=np.float64))
    numbers, room = model_numbers(recipe, config, task), int(machines.room * (1 - RESERVE))
    is_given = "tensor" in parallel.model_fields_set or parallel.context > 1
    tensors = [parallel.tensor] if is_given else [2**k for k in range(9) if machines.per_machine % 2**k == 0]
    refusals: list[UsageError] = []

    def layouts(tensor: int, offload: bool) -> Iterator[Layout]:
        for strategy in STRATEGIES if machines.world_size > tensor else [parallel.strategy]:
            change: dict[str, Any] = {"strategy": strategy, "cpu_offload": offload, "tensor": tensor}
            if strategy != "hybrid_shard":
                change["group_size"] = None
            for mode in ("none", "selective", "full"):
                settings = parallel.model_copy(update={**change, "activation_checkpointing": mode})
                try:
                    check_tensor(tensor, n_heads=config.n_heads, ffn_width=config.ffn_width, quantized=is_quantized)
                    yield layout(settings, machines.world_size, machines.per_machine, precision)
                except UsageError as error:
                    refusals.append(error)
                    break

    def option(laid_out: Layout) -> Option:
        batches = MicroBatches(recipe, train, numbers, laid_out, device)
        wanted, longest, beside = recipe.batch.tokens_per_rank, batches.longest, train.beside
        parts = -(-batches.share // max(batches.largest(room) if wanted == "auto" else wanted, longest))
        # Shares are balanced, so that no micro-batch is much larger than the mean; but the longest record stays whole.
        mean = -(-batches.share // parts)
        tokens = max(longest, mean)
        need = batches.need(tokens, parts, scored_N)
        work = Work(
            tokens=mean + beside,
            micro_batches=parts,
            attended=attended if device == "cuda" else float(longest),
            head_bytes=round(batches.head(tokens) * (mean + beside) / (tokens + beside)),
        )
        largest, spent = batches.largest(room, MOST_TOKENS - beside), cost(numbers, laid_out, work, machines)
        return Option(laid_out, tokens, parts, largest, need.total <= room, need, spent)

    is_quantized = recipe.model.quantize is not None
    possible: list[Option] = []
    for offload in [True] if parallel.cpu_offload else [False, True]:
        if not any(found.fits for found in possible):
            possible += [option(laid_out) for tensor in tensors for laid_out in layouts(tensor, offload)]
    if not possible:
        raise refusals[0]
    possible.sort(key=lambda found: (not found.fits, found.cost.seconds if found.fits else found.memory.total))
    return Plan(recipe, machines, numbers, room, possible)


def model_numbers(recipe: Recipe, config: ModelConfig, task: Task | None = None) -> ModelNumbers:
    """Count the parameters of a recipe's model, with the head of a task that has learned from the labels."""
    tracks, quantization = recipe.data.tracks or (), recipe.model.quantize
    with torch.device("meta"):
        model = FineTuner(build(config), LanguageModelHead() if task is None else task.head(config))
        model.adapt(recipe.adapt, recipe.train.seed, tracks, quantization)
    return numbers_of(model, config, tracks=tracks, quantization=quantization)


def config_of(name: str) -> ModelConfig:
    """Return the architecture of the model that a recipe names. Nothing is downloaded: `InputError` if it would be."""
    if not Path(name).exists():
        if known := name if name in SIZES else released_name(name):
            return SIZES[known]
        if is_hub_name(name) and hub.find(name) is None:
            raise InputError(
                f"{name}: is not on this machine, and a plan downloads nothing; run `esmshard download {name}`"
            )
    return weights.read(name).config
