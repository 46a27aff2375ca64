"""The needs of a recipe on given machines for each strategy, and the best strategy, for `esmshard plan`. No torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import SCORED_TOKENS
from esmshard.data.splits.recipe_splits import in_tokens, open_split
from esmshard.data.tracks.track_files import TrackFile, track_files
from esmshard.errors import InputError, UsageError
from esmshard.files import is_hub_name
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import SIZES, family_of, released_name, transformers_config
from esmshard.parallel.layout import BYTES, STRATEGIES, Layout, check_tensor, layout
from esmshard.planner.cost import Cost, Work, cost
from esmshard.planner.machines import Machines
from esmshard.planner.memory_model import Device, Memory, ModelNumbers, largest_micro_batch, memory, scoring_memory
from esmshard.planner.parameter_counts import numbers_of
from esmshard.recipe import recipe_file
from esmshard.recipe.recipe_file import sample
from esmshard.recipe.sections import Recipe
from esmshard.recipe.task_section import TaskSettings

RESERVE = 0.1
"""The share of a GPU's memory that a plan leaves free, for gaps of the allocator and errors of the estimate."""
AS_GOOD = 1.03
"""Step times within this factor count as equal; the plan that needs less memory is then the better one."""
MOST_TOKENS = 1 << 20
"""The largest micro-batch that the search for the largest one considers."""
GIB = 2**30

Checkpointing = Literal["none", "selective", "full"]
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class MicroBatches:
    """The memory of a recipe's micro-batches on one rank. `plan`, `finetune` and `doctor` all ask it what fits."""

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
        beside = self.train.beside
        found = largest_micro_batch(
            self.numbers,
            self.layout,
            room,
            self.head,
            self.device,
            longest=self.longest + beside,
            share=(self.share if share is None else share) + beside,
            padding=self.padding,
        )
        return max(0, found - beside)

    def memory(self, tokens: int, micro_batches: int) -> Memory:
        """Return the memory of a step of `micro_batches`, of which the largest has so many tokens of records."""
        return memory(
            self.numbers,
            self.layout,
            tokens + self.train.beside,
            self.head(tokens),
            self.device,
            micro_batches=micro_batches,
            padding=self.padding,
        )

    def scoring(self, tokens: int, scored_N: npt.NDArray[np.int32]) -> Memory:
        """Return the memory of a validation with micro-batches of so many tokens, and of the final evaluation.

        Args:
            tokens: the tokens of the largest micro-batch of training.
            scored_N: the tokens of each validation and test record, which are taken whole.
        """
        longest = int(scored_N.max())
        head = head_bytes(self.recipe.task, scored_N, self.layout, self.numbers.n_logits)
        return scoring_memory(
            self.numbers,
            self.layout,
            max(tokens, longest, SCORED_TOKENS) + self.train.beside,
            head(max(tokens, longest)),
            self.device,
            padding=longest / float(scored_N.mean(dtype=np.float64)),
        )


@dataclass(frozen=True)
class Lengths:
    """The lengths of the user's own training records, in tokens with `<cls>` and `<eos>`, as training crops them."""

    records: int
    longest: int
    mean: float
    attended: float
    """The tokens that a token attends to, averaged over tokens."""
    beside: int
    """Further tokens that go through the model with every micro-batch."""
    scored: int
    """The tokens of the longest validation or test record, which is taken whole."""
    assumed: str = ""
    """Why training records stand for those of validation and test; empty where these were read."""


@dataclass(frozen=True)
class Option:
    """One way to divide the run over the GPUs."""

    strategy: str
    checkpointing: str
    cpu_offload: bool
    tensor: int = 1
    impossible: str = ""
    """The reason why this option is not possible; the other fields are then empty."""
    tokens: int = 0
    """The tokens of the largest micro-batch of a step on one rank."""
    micro_batches: int = 0
    largest: int = 0
    """The largest `batch.tokens_per_rank` that fits; 0 if the longest record does not fit."""
    fits: bool = False
    memory: Memory | None = None
    cost: Cost | None = None


@dataclass(frozen=True)
class RecipePlan:
    """The result of `plan`."""

    recipe: Recipe
    machines: Machines
    numbers: ModelNumbers
    lengths: Lengths
    precision: Literal["fp32", "bf16", "fp16"]
    room: int
    """The bytes of each GPU with which the plan may be made."""
    options: list[Option]
    best: Option | None
    left_out: list[Option]
    """Options with `parallel.tensor` that fit nothing more and are not faster than those without."""

    def reasons(self) -> list[str]:
        """Return the reasons why the best option is the best, one sentence each."""
        from esmshard.planner.plan_reasons import reasons  # which imports this module

        return list(reasons(self))


def plan(recipe: Recipe, machines: Machines) -> RecipePlan:
    """Estimate every strategy and checkpointing mode; if nothing fits, estimate them with `cpu_offload` too.

    Unless the recipe sets `parallel.tensor` or `context`, this is done for several numbers of `tensor` (`_tensors`).

    Raises:
        InputError: if the training data or the model cannot be read, or there are fewer records than GPUs.
        UsageError: if the settings of `parallel` are possible under no strategy.
    """
    if far := recipe_file.far_inputs(recipe):
        raise InputError(
            f"{', '.join(far)}: a plan sends nothing over a network; copy it to this machine, or, to plan without the "
            "data, pass data.train=sample:contact/train"
        )
    named = None if recipe.task.reads_table else recipe.data.train
    if named is not None and not sample(named).exists():
        raise InputError(
            f"{named}: no such file or directory, which data.train of the recipe names; to plan without "
            "the data, pass data.train=sample:contact/train"
        )
    train = open_split(recipe, "train", None, planned_tracks(recipe))
    recipe, tokens_N = in_tokens(recipe, train), train.tokens
    if len(tokens_N) < machines.world_size // (recipe.parallel.tensor * recipe.parallel.context):
        raise InputError(
            f"{train.path}: train has {len(tokens_N)} records, fewer than the {machines.world_size} GPUs; take fewer"
        )
    total = float(tokens_N.sum(dtype=np.int64))
    attended = float(np.square(tokens_N, dtype=np.float64).sum()) / total
    scored_N, assumed = _scored(recipe, tokens_N)
    lengths = Lengths(
        len(tokens_N),
        int(tokens_N.max()),
        total / len(tokens_N),
        attended,
        train.beside,
        scored=int(scored_N.max()),
        assumed=assumed,
    )
    precision, room = _precision(recipe, machines), int(machines.room * (1 - RESERVE))
    found = RecipePlan(recipe, machines, model_numbers(recipe), lengths, precision, room, [], None, [])
    asked, *more = _tensors(found)

    def options(tensor: int, offload: bool) -> list[Option]:
        strategies = STRATEGIES if machines.world_size > tensor else [recipe.parallel.strategy]
        return [
            _option(found, train, scored_N, strategy, mode, offload, tensor)
            for strategy in strategies
            for mode in MODES
        ]

    every, divided = options(asked, recipe.parallel.cpu_offload), list[Option]()
    if all(option.impossible for option in every):
        raise UsageError(every[0].impossible)
    for tensor in more:
        divided += [option for option in options(tensor, recipe.parallel.cpu_offload) if not option.impossible]
    if not any(option.fits for option in every + divided) and not recipe.parallel.cpu_offload:
        every += options(asked, True)
        for tensor in more:
            divided += [option for option in options(tensor, True) if not option.impossible]
    shortest = min((seconds(option) for option in every if option.fits), default=float("inf"))
    better = [option for option in divided if option.fits and AS_GOOD * seconds(option) < shortest]
    left_out = [option for option in divided if option not in better]
    return replace(found, options=every + better, best=_best(every + better), left_out=left_out)


def _scored(recipe: Recipe, train_N: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], str]:
    """Return the tokens of each validation and test record. Training records stand for a file that cannot be read: the
    second result then says why.
    """
    try:
        splits = [open_split(recipe, name, None, planned_tracks(recipe)) for name in ("valid", "test")]
    except (InputError, UsageError) as error:
        return train_N, str(error)
    return np.concatenate([split.tokens for split in splits]), ""


def _tensors(found: RecipePlan) -> list[int]:
    """Return the numbers of `parallel.tensor` to estimate: the recipe's, or else 1 and each power of two that divides
    the GPUs of a machine, the heads and the feed-forward part of the model.

    Raises:
        UsageError: if the recipe's number does not divide the model.
    """
    numbers, parallel = found.numbers, found.recipe.parallel

    def check(tensor: int) -> None:
        quantized = numbers.quantization is not None
        check_tensor(tensor, n_heads=numbers.n_heads, ffn_width=numbers.ffn_width, quantized=quantized)

    if "tensor" in parallel.model_fields_set or parallel.context > 1:
        check(parallel.tensor)
        return [parallel.tensor]
    fitting, tensor = [1], 2
    while found.machines.per_machine % tensor == 0:
        with suppress(UsageError):
            check(tensor)
            fitting.append(tensor)
        tensor *= 2
    return fitting


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


def planned_tracks(recipe: Recipe) -> list[TrackFile]:
    """Return the tracks that a recipe names. `UsageError` if its model does not take one of them."""
    if not recipe.data.tracks:
        return []
    takes = family_of(_config(Path(recipe.model.name))).tracks
    return track_files(recipe.data.tracks, takes, recipe.model.name, "data.tracks.")


def model_numbers(recipe: Recipe) -> ModelNumbers:
    """Return the sizes of the model that a recipe names, with its head. No weight is read or downloaded; of a
    repository of the hub that is in no local cache, `config.json` is downloaded.

    Raises:
        InputError: if the model's file or directory cannot be read.
    """
    config = _config(Path(recipe.model.name))
    head, logits = recipe.task.head_parameters(config), recipe.task.trains_lm_head
    tracks, quantization = recipe.data.tracks or (), recipe.model.quantize
    return numbers_of(config, head, recipe.adapt, logits=logits, tracks=tracks, quantization=quantization)


def _config(model: Path) -> ModelConfig:
    known = str(model) if str(model) in SIZES else released_name(str(model))
    if known and not model.exists():
        return SIZES[known]
    # These modules import torch, which a released model does without.
    from esmshard.model import hub, weight_reader, weights

    file = model / "config.json"
    if not model.exists() and is_hub_name(str(model)) and hub.find(str(model)) is None:
        raise InputError(
            f"{model}: is not on this machine, and a plan sends nothing over a network; run `esmshard download {model}`"
        )
    if file.is_file():
        try:
            return transformers_config(weight_reader.read_json(file))
        except ValueError as error:
            raise InputError(f"{file}: not a model that can be read: {error}") from None
    return weights.read(str(model)).config


def _precision(recipe: Recipe, machines: Machines) -> Literal["fp32", "bf16", "fp16"]:
    wanted, gpu = recipe.parallel.precision, machines.gpu
    if wanted == "auto":
        return "bf16" if gpu.has_bf16 else "fp16"
    if wanted == "bf16" and not gpu.has_bf16:
        raise UsageError(f"parallel.precision: {gpu.name} has no bf16; take auto, fp16 or fp32")
    return wanted


def layout_of(found: RecipePlan, strategy: str, mode: str, offload: bool, tensor: int) -> Layout:
    """Return the layout of one option. `UsageError` if it is impossible."""
    change: dict[str, Any] = {"strategy": strategy, "activation_checkpointing": mode, "cpu_offload": offload}
    change["tensor"] = tensor
    if strategy != "hybrid_shard":
        change["group_size"] = None
    settings, machines = found.recipe.parallel.model_copy(update=change), found.machines
    return layout(settings, machines.world_size, machines.per_machine, found.precision)


def _option(
    found: RecipePlan,
    train: Examples,
    scored_N: npt.NDArray[np.int32],
    strategy: str,
    mode: Checkpointing,
    offload: bool,
    tensor: int,
) -> Option:
    recipe, machines, lengths = found.recipe, found.machines, found.lengths
    try:
        laid_out = layout_of(found, strategy, mode, offload, tensor)
    except UsageError as error:
        return Option(strategy, mode, offload, tensor, impossible=str(error))
    packed = machines.gpu.has_bf16 and found.precision != "fp32"
    batches = MicroBatches(recipe, train, found.numbers, laid_out, "cuda" if packed else "cuda-padded")
    share, wanted = batches.share, recipe.batch.tokens_per_rank
    most = max(batches.largest(found.room) if wanted == "auto" else wanted, lengths.longest)
    parts = -(-share // most)
    # Shares are balanced, so that no micro-batch is much larger than the mean; but the longest record stays whole.
    tokens = max(lengths.longest, -(-share // parts))
    need = max(batches.memory(tokens, parts), batches.scoring(tokens, scored_N), key=lambda moment: moment.total)
    mean_tokens = -(-share // parts) + lengths.beside
    work = Work(
        tokens=mean_tokens,
        micro_batches=parts,
        attended=lengths.attended if packed else float(lengths.longest),
        head_bytes=round(batches.head(tokens) * mean_tokens / (tokens + lengths.beside)),
    )
    return Option(
        strategy,
        mode,
        offload,
        tensor,
        tokens=tokens,
        micro_batches=parts,
        largest=batches.largest(found.room, MOST_TOKENS - lengths.beside),
        fits=need.total <= found.room,
        memory=need,
        cost=cost(found.numbers, laid_out, work, machines),
    )


def seconds(option: Option) -> float:
    """Return the seconds of a step."""
    assert option.cost is not None
    return option.cost.seconds


def total_bytes(option: Option) -> int:
    """Return the bytes of a rank at the peak."""
    assert option.memory is not None
    return option.memory.total


def _best(options: list[Option]) -> Option | None:
    """Return the fastest option that fits; of the options that are as fast, the one that needs the least memory."""
    fitting = [option for option in options if option.fits]
    if not fitting:
        return None
    fastest = min(map(seconds, fitting))
    return min((o for o in fitting if seconds(o) <= AS_GOOD * fastest), key=total_bytes)
