"""The needs of a recipe on given machines under each strategy, and the best strategy, for `esmshard plan`."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import SCORED_TOKENS
from esmshard.data.splits.recipe_splits import in_tokens, open_split
from esmshard.data.tracks.track_files import track_files
from esmshard.errors import InputError, UsageError
from esmshard.files import is_hub_name
from esmshard.model import hub, weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import SIZES, build, family_of, released_name
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.parallel.layout import BYTES, STRATEGIES, Layout, check_tensor, layout
from esmshard.planner.cost import Cost, Work, cost
from esmshard.planner.machines import Machines
from esmshard.planner.memory_model import KINDS, Device, Memory, ModelNumbers, largest_micro_batch, memory, numbers_of
from esmshard.recipe.sections import Recipe
from esmshard.recipe.task_section import TaskSettings
from esmshard.tasks.base import Task
from esmshard.tasks.registry import new_task

RESERVE = 0.1
"""The share of a GPU's memory that a plan leaves free, for gaps of the allocator and errors of the estimate."""
AS_GOOD = 1.03
"""Step times within this factor count as equal; the plan that needs less memory is then the better one."""
MOST_TOKENS = 1 << 20
"""The largest micro-batch that the search for the largest one considers."""
SHOWN = 16
"""The most options that the table shows."""
GIB = 2**30
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class MicroBatches:
    """The memory of a recipe's micro-batches on one rank. `plan` and `finetune` ask it what fits."""

    recipe: Recipe
    """The recipe after `in_tokens`."""
    train: Examples
    numbers: ModelNumbers
    layout: Layout
    device: Device

    @property
    def longest(self) -> int:
        """Return the tokens of the longest training record. A micro-batch cannot be smaller."""
        return int(self.train.tokens.max())

    @property
    def padding(self) -> float:
        """Return the tokens with padding over the tokens without, where attention pads to the longest record."""
        return self.longest / float(self.train.tokens.mean(dtype=np.float64))

    @property
    def share(self) -> int:
        """Return the tokens of one rank in one step. Ranks that compute each layer together have the same ones."""
        return -(-self.recipe.batch.global_tokens // self.layout.data_size)

    @cached_property
    def head(self) -> Callable[[int], int]:
        """Return the bytes of the head as a function of a micro-batch's tokens."""
        return head_bytes(self.recipe.task, self.train.tokens, self.layout, self.numbers.n_logits)

    def largest(self, room: int, share: int | None = None) -> int:
        """Return the largest `batch.tokens_per_rank` that fits into `room` bytes; 0 if the longest record does not fit.

        The result is at most `share`, which is the rank's share of a step unless another number is given.
        """
        further = self.train.beside
        most = largest_micro_batch(
            self.numbers,
            self.layout,
            room,
            self.head,
            self.device,
            longest=self.longest + further,
            share=(self.share if share is None else share) + further,
            padding=self.padding,
        )
        return max(0, most - further)

    def need(self, tokens: int, micro_batches: int, scored_N: npt.NDArray[np.int32]) -> Memory:
        """Return the memory of a step, or of a validation if it needs more.

        Args:
            tokens: the tokens of the largest micro-batch.
            micro_batches: the micro-batches of a step.
            scored_N: the tokens of each validation and test record, which are taken whole.
        """
        longest, further = int(scored_N.max()), self.train.beside
        head = head_bytes(self.recipe.task, scored_N, self.layout, self.numbers.n_logits)
        step = memory(
            self.numbers,
            self.layout,
            tokens + further,
            self.head(tokens),
            self.device,
            micro_batches=micro_batches,
            padding=self.padding,
        )
        scoring = memory(
            self.numbers,
            self.layout,
            max(tokens, longest, SCORED_TOKENS) + further,
            head(max(tokens, longest)),
            self.device,
            padding=longest / float(scored_N.mean(dtype=np.float64)),
            scoring=True,
        )
        return max(step, scoring, key=lambda moment: moment.total)


@dataclass(frozen=True)
class Option:
    """One way to divide the run over the GPUs that is possible."""

    strategy: str
    checkpointing: str
    cpu_offload: bool
    tensor: int
    tokens: int
    """The tokens of the largest micro-batch of a step on one rank."""
    micro_batches: int
    largest: int
    """The largest `batch.tokens_per_rank` that fits; 0 if the longest record does not fit."""
    fits: bool
    memory: Memory
    cost: Cost


@dataclass(frozen=True)
class Plan:
    """The result of `plan`."""

    recipe: Recipe
    machines: Machines
    numbers: ModelNumbers
    precision: str
    room: int
    """The bytes of each GPU with which the plan may be made."""
    options: list[Option]
    """Those that fit, the fastest first; then the others, those that need the least memory first."""

    @property
    def best(self) -> Option | None:
        """Return the fastest option that fits; of those that are as fast, the one that needs the least memory."""
        fitting = [option for option in self.options if option.fits]
        equal = [option for option in fitting if option.cost.seconds <= AS_GOOD * fitting[0].cost.seconds]
        return min(equal, key=lambda option: option.memory.total, default=None)

    @property
    def keys(self) -> list[str]:
        """Return the recipe keys of the best option, to paste behind `esmshard finetune RECIPE`."""
        best = self.best
        if best is None:
            return []
        tokens = best.largest if self.recipe.batch.tokens_per_rank == "auto" else best.tokens
        lines = [
            f"parallel.strategy={best.strategy}",
            f"parallel.activation_checkpointing={best.checkpointing}",
            f"batch.tokens_per_rank={tokens}",
        ]
        lines += [f"parallel.tensor={best.tensor}"] * (best.tensor > 1)
        return [*lines, "parallel.cpu_offload=true"] if best.cpu_offload else lines

    @property
    def reason(self) -> str:
        """Return one sentence that says why the best option is the best."""
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
        head = ("strategy", "checkpointing", "weights", "grads", "optim", "gather", "activ", "head", "other", "total")
        rows: list[tuple[str, ...]] = [(*head, "fits", "most", "tokens", "ms/step", "exposed", "GiB")]
        for option in self.options[:SHOWN]:
            name = f"{option.strategy}, tensor {option.tensor}" if option.tensor > 1 else option.strategy
            sizes = [getattr(option.memory, kind) for kind in (*KINDS, "total")]
            times = (option.cost.seconds, option.cost.exposed)
            rows.append(
                (
                    *(name + ", cpu_offload" * option.cpu_offload, option.checkpointing),
                    *(f"{size / GIB:.2f}" for size in sizes),
                    *("yes" if option.fits else "no", f"{option.largest or '-'}"),
                    f"{option.micro_batches} x {option.tokens:,}",
                    *(f"{1e3 * seconds:.1f}" for seconds in times),
                    f"{option.cost.received / GIB:.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"machines  {machines}: {self.room / GIB:.1f} GiB a GPU to plan with, {machines.gpu.link / 1e9:.0f} GB/s "
            "within a machine"
            + (f", {machines.network * 8 / 1e9:g} Gbit/s a GPU between machines" if machines.nodes > 1 else ""),
            f"model     {self.recipe.model.name}: {numbers.parameters:,} parameters, {numbers.trained:,} learn, "
            f"{self.precision}; {self.recipe.batch.global_tokens:,} tokens a step",
            "",
            "GiB a rank at the peak of a step; most: largest batch.tokens_per_rank that fits; tokens: micro-batches of "
            "a step; GiB: received a step",
        ]
        for row in rows:
            cells = [
                f"{cell:<{width}}" if k < 2 else f"{cell:>{width}}"
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells))
        if best is not None:
            speed = best.cost.tokens_per_second
            lines += [
                "",
                f"take      {' '.join(self.keys)}",
                f"speed     {speed:,.0f} tokens/s a GPU, {speed * machines.world_size:,.0f} in all, MFU "
                f"{best.cost.mfu:.1%}",
            ]
        return "\n".join([*lines, f"because   {self.reason}"])

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, in bytes and seconds."""

        def row(option: Option) -> dict[str, Any]:
            values = asdict(option)
            values["memory"]["total"], values["cost"]["seconds"] = option.memory.total, option.cost.seconds
            return values

        return {
            "machines": {**asdict(self.machines), "world_size": self.machines.world_size},
            "room_bytes": self.room,
            "model": {"name": self.recipe.model.name, "parameters": self.numbers.parameters, **asdict(self.numbers)},
            "precision": self.precision,
            "options": [row(option) for option in self.options],
            "best": None if self.best is None else row(self.best),
            "keys": self.keys,
            "reason": self.reason,
        }


def plan(recipe: Recipe, machines: Machines) -> Plan:
    """Estimate every strategy and checkpointing mode; if nothing fits, estimate them with `cpu_offload` too.

    Unless the recipe sets `parallel.tensor` or `context`, this is done for each `parallel.tensor` that is a power of
    two and divides the GPUs of a machine, the heads and the feed-forward part of the model.

    Raises:
        InputError: if the training data or the model cannot be read, or there are fewer records than GPUs.
        UsageError: if the settings of `parallel` are possible under no strategy.
    """
    config, task = config_of(recipe.model.name), new_task(recipe.task, {})
    takes = family_of(config).tracks
    tracks = track_files(recipe.data.tracks, takes, recipe.model.name, "data.tracks.") if recipe.data.tracks else []
    train = open_split(recipe, "train", task.labels, tracks)
    recipe, task, parallel = in_tokens(recipe, train), task.learn(train), recipe.parallel
    tokens_N = train.tokens
    scored_N = np.concatenate([open_split(recipe, name, None, tracks).tokens for name in ("valid", "test")])
    if len(tokens_N) < machines.world_size // (parallel.tensor * parallel.context):
        raise InputError(
            f"{train.path}: train has {len(tokens_N)} records, fewer than the {machines.world_size} GPUs; take fewer"
        )
    attended = float(np.square(tokens_N, dtype=np.float64).sum() / tokens_N.sum(dtype=np.float64))
    precision = _precision(recipe, machines)
    packed = machines.gpu.has_bf16 and precision != "fp32"
    numbers, room = model_numbers(recipe, config, task), int(machines.room * (1 - RESERVE))
    refusals: list[UsageError] = []

    def options(tensor: int, offload: bool) -> Iterator[Option]:
        for strategy in STRATEGIES if machines.world_size > tensor else [parallel.strategy]:
            change: dict[str, Any] = {"strategy": strategy, "cpu_offload": offload, "tensor": tensor}
            change |= {} if strategy == "hybrid_shard" else {"group_size": None}
            for mode in MODES:
                settings = parallel.model_copy(update={**change, "activation_checkpointing": mode})
                try:
                    laid_out = layout(settings, machines.world_size, machines.per_machine, precision)
                except UsageError as error:
                    refusals.append(error)
                    break
                yield option(laid_out)

    def option(laid_out: Layout) -> Option:
        batches = MicroBatches(recipe, train, numbers, laid_out, "cuda" if packed else "cuda-padded")
        share, wanted, longest = batches.share, recipe.batch.tokens_per_rank, batches.longest
        parts = -(-share // max(batches.largest(room) if wanted == "auto" else wanted, longest))
        # Shares are balanced, so that no micro-batch is much larger than the mean; but the longest record stays whole.
        mean = -(-share // parts)
        tokens = max(longest, mean)
        need = batches.need(tokens, parts, scored_N)
        work = Work(
            tokens=mean + train.beside,
            micro_batches=parts,
            attended=attended if packed else float(longest),
            head_bytes=round(batches.head(tokens) * (mean + train.beside) / (tokens + train.beside)),
        )
        return Option(
            laid_out.strategy,
            laid_out.activation_checkpointing,
            laid_out.cpu_offload,
            laid_out.tensor,
            tokens=tokens,
            micro_batches=parts,
            largest=batches.largest(room, MOST_TOKENS - train.beside),
            fits=need.total <= room,
            memory=need,
            cost=cost(numbers, laid_out, work, machines),
        )

    tensors = _tensors(recipe, machines, numbers)
    possible = [found for tensor in tensors for found in options(tensor, parallel.cpu_offload)]
    if not possible:
        raise refusals[0]
    if not any(found.fits for found in possible) and not parallel.cpu_offload:
        possible += [found for tensor in tensors for found in options(tensor, True)]
    possible.sort(key=lambda found: (not found.fits, found.cost.seconds if found.fits else found.memory.total))
    return Plan(recipe, machines, numbers, precision, room, possible)


def _tensors(recipe: Recipe, machines: Machines, numbers: ModelNumbers) -> list[int]:
    """Return the numbers of `parallel.tensor` to estimate. `UsageError` if the recipe's does not divide the model."""

    def check(tensor: int) -> int:
        quantized = numbers.quantization is not None
        check_tensor(tensor, n_heads=numbers.n_heads, ffn_width=numbers.ffn_width, quantized=quantized)
        return tensor

    if "tensor" in recipe.parallel.model_fields_set or recipe.parallel.context > 1:
        return [check(recipe.parallel.tensor)]
    fitting, tensor = [1], 2
    while machines.per_machine % tensor == 0:
        with suppress(UsageError):
            fitting.append(check(tensor))
        tensor *= 2
    return fitting


def _precision(recipe: Recipe, machines: Machines) -> Literal["fp32", "bf16", "fp16"]:
    wanted, gpu = recipe.parallel.precision, machines.gpu
    if wanted == "auto":
        return "bf16" if gpu.has_bf16 else "fp16"
    if wanted == "bf16" and not gpu.has_bf16:
        raise UsageError(f"parallel.precision: {gpu.name} has no bf16; take auto, fp16 or fp32")
    return wanted


def head_bytes(
    task: TaskSettings, tokens_N: npt.NDArray[np.int32], layout: Layout, n_logits: int
) -> Callable[[int], int]:
    """Return the bytes that a task's head keeps of a micro-batch, as a function of its tokens.

    The micro-batch has the longest record, and is otherwise an average of all records.

    Args:
        task: the task, which gives the bytes in fp32.
        tokens_N: the tokens of each training record.
        layout: the layout of the model. The head computes in the precision of the arithmetic, too.
        n_logits: the columns of the logits of the model.
    """
    lengths, counts = np.unique(tokens_N, return_counts=True)
    each = np.array([task.head_bytes(int(length), n_logits) for length in lengths], dtype=np.float64)
    size = BYTES[layout.precision] / 4
    longest, per_token = int(lengths[-1]), float((each * counts).sum() / (lengths * counts).sum())
    return lambda tokens: round(size * (each[-1] + max(0, tokens - longest) * per_token))


def model_numbers(recipe: Recipe, config: ModelConfig, task: Task | None = None) -> ModelNumbers:
    """Count the parameters of a recipe's model, with the head of a task that has learned from the labels."""
    tracks, quantization = recipe.data.tracks or (), recipe.model.quantize
    with torch.device("meta"):
        model = FineTuner(build(config), LanguageModelHead() if task is None else task.head(config))
        model.adapt(recipe.adapt, recipe.train.seed, tracks, quantization)
    return numbers_of(model, config, tracks=tracks, quantization=quantization)


def config_of(name: str) -> ModelConfig:
    """Return the architecture of the model that a recipe names. Nothing is downloaded.

    Raises:
        InputError: if the model is not on this machine and not released, or if its file cannot be read.
    """
    if not Path(name).exists():
        if known := name if name in SIZES else released_name(name):
            return SIZES[known]
        if is_hub_name(name) and hub.find(name) is None:
            raise InputError(
                f"{name}: is not on this machine, and a plan downloads nothing; run `esmshard download {name}`"
            )
    return weights.read(name).config
