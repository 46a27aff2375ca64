"""The number of tokens that go through the model at once, and the messages after an out-of-memory error."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from esmshard.checkpoint import manifest
from esmshard.devices import is_out_of_memory
from esmshard.errors import InputError
from esmshard.model.attention import kernel_name
from esmshard.parallel.process_group import Precision, World
from esmshard.parallel.shard import DTYPES
from esmshard.planner import memory_model
from esmshard.planner.recipe_plan import MicroBatches
from esmshard.progress import say
from esmshard.recipe.sections import Recipe
from esmshard.train.run_inputs import RunInputs

RESERVED = 0.9
"""The share of the free memory that a run plans to use. The rest is for gaps of the allocator and for other programs.
"""


@contextmanager
def _explained(advice: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into an `InputError` with this advice. Other errors are raised unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(advice()) from None


def out_of_memory_in_steps(
    tokens: int, longest: int, checkpointing: str, fitting: Callable[[], int], saved: Callable[[], bool]
) -> AbstractContextManager[None]:
    """Turn an out-of-memory error of a step into a message with a number of tokens that fits.

    The message proposes only changes that `--resume auto` accepts: once there is a checkpoint, settings that change the
    computed result may not change.

    Args:
        tokens: size in tokens of the largest micro-batches of the run, at most a rank's share of a step.
        longest: tokens of the longest training record. A micro-batch cannot be smaller.
        checkpointing: the recipe's activation checkpointing.
        fitting: calls the planner, see `largest_fitting`, with the memory that was free before the run began.
        saved: returns whether there is a checkpoint to continue from.
    """

    def advice() -> str:
        fits = fitting()
        less = max(longest, min(3 * tokens // 4, fits))
        ways = [f"batch.tokens_per_rank={less}"] if fits > 0 and less < tokens else []
        ways += ["parallel.activation_checkpointing=full"] if checkpointing != "full" else []
        fix = f"set {', or '.join(ways)}, and go on with --resume auto"
        if not ways and not saved():
            fix = "lower data.max_length, and go on with --resume auto"
        elif not ways:
            fix = (
                "share the model among more GPUs (--nproc) or set parallel.cpu_offload=true, and go on with --resume "
                "auto; or start again with a lower data.max_length and --overwrite"
            )
        return f"out of memory: micro-batches of {tokens} tokens do not fit; {fix}"

    return _explained(advice)


def out_of_memory_in_evaluation(recipe: Recipe, device: torch.device) -> AbstractContextManager[None]:
    """Turn an out-of-memory error after the last step, while the model is scored on `device`, into a message."""

    def advice() -> str:
        out = Path(recipe.out)
        newest = manifest.pointed(out / "checkpoints", "LATEST")
        kept = f"the model is trained, and {newest or out / 'checkpoints'} is kept"
        fix = "give it more memory, and --resume auto does what is left"
        if device.type != "cpu" and recipe.data.test is not None:  # a fold has no file of its own that could be scored
            model, labels = out / "model", f" --labels {recipe.data.labels}" if recipe.data.labels else ""
            fix += (
                f"; or score it without a GPU: `export CUDA_VISIBLE_DEVICES=`, `esmshard consolidate {out} -o {model} "
                f"--overwrite`, `esmshard evaluate {model} {recipe.data.test}{labels} -o {out}`"
            )
        return f"out of memory in the evaluation on {device}; {kept}; {fix}"

    return _explained(advice)


def out_of_memory_of_model(device: torch.device) -> AbstractContextManager[None]:
    """Turn an out-of-memory error before the first step into a message."""
    return _explained(
        lambda: (
            f"out of memory: weights and optimizer state of the model do not fit on {device}; set adapt.method=lora or "
            "parallel.cpu_offload=true, or share the model among more GPUs (--nproc)"
        )
    )


def choose_tokens_per_rank(
    job: RunInputs, saved: Mapping[str, Any] | None, fitting: Callable[[], int], ranks: World
) -> int:
    """Return the recipe's number; for `auto` what fits (`largest_fitting`), or the checkpoint's number where the run
    goes on in the layout that it had.

    A step has the same records in any micro-batches, but gradients are summed in another order, so that numbers agree
    up to rounding.

    Args:
        job: the run.
        saved: `state.json` of the checkpoint that the run goes on from; None for a new run.
        fitting: see `largest_fitting`.
        ranks: all processes of the run.
    """
    asked = job.recipe.batch.tokens_per_rank
    if isinstance(asked, int):
        return asked
    if saved is not None and _layout_of(saved) == [ranks.size, _gpu(ranks.device), _memory_keys(job.recipe)]:
        return int(saved["recipe"]["batch"]["tokens_per_rank"])
    longest, fits = int(job.train.tokens.max()), fitting()
    if not fits and ranks.is_first:
        say(
            f"the longest training record, {longest} tokens, may not fit into memory; lower data.max_length, set "
            "parallel.activation_checkpointing=full, or see `esmshard plan`"
        )
    return max(fits, longest)


def _layout_of(saved: Mapping[str, Any]) -> list[Any]:
    """Return what decided on the memory of each rank of the run that wrote a checkpoint."""
    return [saved["world_size"], saved["versions"].get("gpu"), _memory_keys(Recipe.model_validate(saved["recipe"]))]


def _gpu(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _memory_keys(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of `parallel` that decide on memory. Time-outs do not; the precision may not change."""
    return recipe.parallel.model_dump(exclude={"start_timeout", "step_timeout", "precision"})


def largest_fitting(job: RunInputs, numbers: memory_model.ModelNumbers, room: int, ranks: World) -> int:
    """Return the largest `batch.tokens_per_rank` that fits, as the planner says; 0 if the longest record does not fit.

    Args:
        job: the run, with its training records and layout.
        numbers: the sizes of the model with its head.
        room: bytes that may be planned with, weights included, on the rank with the least memory.
        ranks: the ranks over which a step is divided.
    """
    device = planner_device(ranks.device, job.layout.precision)
    return MicroBatches(job.recipe, job.train, numbers, job.layout, device).largest(room)


def planner_device(device: torch.device, precision: Precision) -> memory_model.Device:
    """Return the planner's name of the attention kernel that runs."""
    kernels: dict[str, memory_model.Device] = {"slices": "cpu", "varlen": "cuda", "padded": "cuda-padded"}
    return kernels[kernel_name(device, DTYPES[precision])]
