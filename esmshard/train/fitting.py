"""How much goes through the model at once, and what is said when memory did not suffice for it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from esmshard.checkpoint import manifest
from esmshard.errors import InputError
from esmshard.model.attention import kernel_name
from esmshard.parallel import plan as memory
from esmshard.parallel.mesh import Precision, World
from esmshard.parallel.out_of_memory import is_out_of_memory
from esmshard.parallel.shard import DTYPES
from esmshard.progress import say
from esmshard.settings import Recipe
from esmshard.tasks.numbers import HEADS
from esmshard.train.job import Job
from esmshard.train.planning import head_bytes

RESERVED = 0.9
"""Of the free memory, what a run plans to use. The rest is for the gaps of allocators, and other programs."""


@contextmanager
def out_of_memory_in_steps(
    tokens: int, longest: int, checkpointing: str, fitting: Callable[[], int], saved: Callable[[], bool]
) -> Iterator[None]:
    """Turn an out-of-memory error of a step into one sentence, with a number that then fits.

    It advises what `--resume auto` accepts: once there is a checkpoint, the recipe's mathematics may not change.

    Args:
        tokens: of the largest micro-batches of the run, a rank's share of a step at most.
        longest: tokens of the longest training record. A micro-batch cannot be smaller.
        checkpointing: as the recipe has it.
        fitting: asks the planner, see `largest_fitting`. The memory that was free at the start of the run counts, for
            now the run itself has taken it.
        saved: says whether there is a checkpoint to go on from.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fits = fitting()
        less = max(longest, min(3 * tokens // 4, fits))
        ways = []
        if fits > 0 and less < tokens:
            ways.append(f"batch.tokens_per_rank={less}")
        if checkpointing != "full":
            ways.append("parallel.activation_checkpointing=full")
        mend = f"set {', or '.join(ways)}, and go on with --resume auto"
        if not ways and not saved():
            mend = "lower data.max_length, and go on with --resume auto"
        elif not ways:
            mend = (
                "share the model among more GPUs (--nproc) or set parallel.cpu_offload=true, and go on with --resume "
                "auto; or start again with a lower data.max_length and --overwrite"
            )
        raise InputError(f"out of memory: micro-batches of {tokens} tokens do not fit; {mend}") from None


@contextmanager
def out_of_memory_in_evaluation(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error that comes after the last step into one sentence.

    Args:
        recipe: of the run.
        device: on which the model is scored.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        out = Path(recipe.out)
        newest = manifest.pointed(out / "checkpoints", "LATEST")
        kept = f"the model is trained, and {newest or out / 'checkpoints'} is kept"
        mend = "give it more memory, and --resume auto does what is left"
        if device.type != "cpu" and recipe.data.test is not None:  # a fold of another file is no file of its own
            model, labels = out / "model", f" --labels {recipe.data.labels}" if recipe.data.labels else ""
            mend += (
                f"; or score it without a GPU: `export CUDA_VISIBLE_DEVICES=`, `esmshard consolidate {out} -o {model} "
                f"--overwrite`, `esmshard evaluate {model} {recipe.data.test}{labels} -o {out}`"
            )
        raise InputError(f"out of memory in the evaluation on {device}; {kept}; {mend}") from None


@contextmanager
def out_of_memory_of_model(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error that comes before the first step into one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory: weights and optimizer state of the model do not fit on {device}; set adapt.method=lora or "
            "parallel.cpu_offload=true, or share the model among more GPUs (--nproc)"
        ) from None


def choose_tokens_per_rank(job: Job, saved: Mapping[str, Any] | None, fitting: Callable[[], int], ranks: World) -> int:
    """The number of the recipe; for `auto` that with which the run began, else what fits (see `largest_fitting`)."""
    asked = job.recipe.batch.tokens_per_rank
    if isinstance(asked, int):
        return asked
    if saved is not None:  # other micro-batches would add up gradients in another order
        return int(saved["recipe"]["batch"]["tokens_per_rank"])
    longest, fits = int(job.train.tokens.max()), fitting()
    if not fits and ranks.is_first:
        say(
            f"the longest training record, {longest} tokens, may not fit into memory; lower data.max_length, set "
            "parallel.activation_checkpointing=full, or see `esmshard plan`"
        )
    return max(fits, longest)


def largest_fitting(job: Job, numbers: memory.ModelNumbers, room: int, ranks: World) -> int:
    """Ask the planner for the tokens of the largest micro-batch that fits; 0 if not even the longest record does.

    Args:
        job: whose training records and layout they are.
        numbers: of the model with its head.
        room: bytes that may be planned with, weights included, on the rank with the least.
        ranks: over which a step is divided.
    """
    lengths, beside = job.train.tokens, job.train.beside
    longest = int(lengths.max())
    most = memory.largest_micro_batch(
        numbers,
        job.layout,
        room,
        head_bytes(HEADS[job.recipe.task.name](job.recipe.task), lengths, job.layout),
        planner_device(ranks.device, job.layout.precision),
        longest=longest + beside,
        share=-(-job.recipe.batch.global_tokens // ranks.size) + beside,
        padding=longest / float(lengths.mean()),
    )
    return max(0, most - beside)


def planner_device(device: torch.device, precision: Precision) -> memory.Device:
    """Which attention runs, in the planner's words."""
    kernels: dict[str, memory.Device] = {"slices": "cpu", "varlen": "cuda", "padded": "cuda-padded"}
    return kernels[kernel_name(device, DTYPES[precision])]
