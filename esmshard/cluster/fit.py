"""A recipe on this machine: are its data and weights here, does it fit into memory, and how will it compute?"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esmshard import recipe as recipes
from esmshard.cluster import gpus
from esmshard.cluster.findings import Finding, gib, guarded
from esmshard.errors import InputError, UsageError
from esmshard.parallel.machines import CUDA_CONTEXT, GPU, GPUS, Machines
from esmshard.settings import Recipe

if TYPE_CHECKING:
    from esmshard.model.config import EsmConfig

CHECK = "recipe"


@dataclass(frozen=True)
class Fit:
    """What is known of a recipe on this machine."""

    findings: list[Finding]
    needed: int
    """Bytes that the run writes: checkpoints and model."""


def check(name: str, overrides: Sequence[str], cards: Sequence[gpus.Card], processes: int, nodes: int) -> Fit:
    """Look at a recipe.

    Args:
        name: a file, or the name of a shipped one.
        overrides: of it.
        cards: GPUs of this machine, of which the first `processes` are used; none for CPUs.
        processes: of a machine.
        nodes: machines.

    Raises:
        UsageError: the recipe itself is wrong.
    """
    resolved = _one(name, overrides)
    findings = guarded(CHECK, "weights", partial(_weights, resolved))
    has_weights = all(finding.level != "error" for finding in findings)
    data = _data(resolved)
    findings += data
    if all(finding.level != "error" for finding in data):
        findings += guarded(CHECK, "memory", partial(_memory, resolved, cards, processes, nodes))
        if has_weights and not any(finding.name == "weights" and finding.level == "note" for finding in findings):
            findings += _prepared(resolved, processes, nodes)
    findings += _out(Path(resolved.out))
    return Fit(findings, _needed(resolved))


def _one(name: str, overrides: Sequence[str]) -> Recipe:
    """The recipe; of a table of variants, which is cross-validated, that of its first fold."""
    path = recipes.resolve(name)
    resolved = recipes.load(path, overrides)
    if resolved.task.name != "variant" or resolved.data.folds is not None:
        return resolved
    from esmshard.data.variant_records import FOLDS
    from esmshard.train.repeats import repeats

    folds = None if resolved.data.split in ("mutations", "given") else FOLDS
    several = repeats(resolved, 1, folds)
    return recipes.load(path, [*overrides, *several[0].overrides]) if several else resolved


def _weights(recipe: Recipe) -> Iterator[Finding]:
    """Whether they are here. Nothing is downloaded."""
    from esmshard.model import hub, weights
    from esmshard.model.config import SIZES, STARTER

    name, mend = recipe.model.name, "correct model.name: a path, a released model (docs/method.md), or starter"
    place = weights.place(name)
    if name not in SIZES and not place.exists():
        told = f"{name}: no such file or directory, and no model of that name"
        close = difflib.get_close_matches(name, [*SIZES, STARTER], 1)
        mend = f"pass model.name={close[0]}" if close else mend
        yield Finding(CHECK, "weights", "error", told, mend, {"model": name})
        return
    if recipe.init == "random" and name in SIZES:
        told = f"{name} starts from noise: no weights are needed"
        yield Finding(CHECK, "weights", "ok", told, values={"model": name})
        return
    if name not in hub.RELEASED or place.exists():
        try:
            weights.read(name)
        except InputError as error:
            yield Finding(CHECK, "weights", "error", str(error), mend, {"model": name})
        else:
            yield Finding(CHECK, "weights", "ok", f"{name} is here", values={"model": name})
        return
    found = hub.find(name)
    values = {"model": name, "path": str(found) if found else None}
    if found is not None:
        yield Finding(CHECK, "weights", "ok", f"{name} is in {found}", values=values)
        return
    offline = [one for one in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(one, "0") not in ("", "0")]
    mend = f"esmshard download {name}, where there is internet and the caches are shared"
    if offline:
        told = f"{name} is in no cache, and {offline[0]} forbids to download it"
        yield Finding(CHECK, "weights", "error", told, mend, values)
    else:
        told = f"{name} is in no cache: the run would download it at its start"
        yield Finding(CHECK, "weights", "note", told, mend, values)


def _data(recipe: Recipe) -> list[Finding]:
    """Whether the splits can be opened; FASTA files are read into the cache, as the run would."""
    from esmshard.train.splits import open_split

    counts: dict[str, int] = {}
    try:
        for name in ("train", "valid", "test"):
            counts[name] = len(open_split(recipe, name, None))
    except (InputError, OSError) as error:
        told = f"{name}: {error}"
        return [Finding(CHECK, "data", "error", told, "correct the path, or the file, under `data` of the recipe")]
    told = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return [Finding(CHECK, "data", "ok", f"records: {told}", values=counts)]


def _memory(recipe: Recipe, cards: Sequence[gpus.Card], processes: int, nodes: int) -> Iterator[Finding]:
    used = cards[:processes]
    try:
        yield from _on_gpus(recipe, used, nodes) if used else _on_cpu(recipe, processes, nodes)
    except UsageError:
        raise
    except InputError as error:
        yield Finding(
            CHECK, "memory", "error", str(error), "change what the sentence names, in the recipe or its files"
        )


def as_machines(cards: Sequence[gpus.Card], nodes: int) -> tuple[Machines, bool]:
    """The GPUs for the planner, with the memory that is free now on the fullest; and whether it has their data sheet.

    A GPU that it does not know is planned with the speeds of an A100, which change the advice and not what fits.
    """
    first = min(cards, key=lambda card: card.memory_total or 0)
    sheet = gpus.known(first.name, first.memory_total)
    room = min((_free(card) for card in cards if card.memory_total), default=sheet.memory_bytes if sheet else 0)
    has_bf16 = (first.capability or (8, 0)) >= (8, 0)
    gpu: GPU = replace(sheet or replace(GPUS["A100-40GB"], name=first.name), memory_bytes=room, has_bf16=has_bf16)
    return Machines(gpu, len(cards), nodes), sheet is not None


def _free(card: gpus.Card) -> int:
    assert card.memory_total is not None
    if card.memory_free is None or card.memory_free > 0.9 * card.memory_total:  # the rest is the driver's own
        return card.memory_total
    return card.memory_free + CUDA_CONTEXT


def _on_gpus(recipe: Recipe, cards: Sequence[gpus.Card], nodes: int) -> Iterator[Finding]:
    from esmshard.train.planning import keys, plan

    machines, is_known = as_machines(cards, nodes)
    found = plan(recipe, machines)
    asked = recipe.parallel
    own = next(
        (
            option
            for option in found.options
            if (option.strategy, option.checkpointing, option.cpu_offload)
            == (asked.strategy, asked.activation_checkpointing, asked.cpu_offload)
        ),
        None,
    )
    values: dict[str, Any] = {"machines": str(machines), "room": found.room, "known": is_known, "best": keys(found)}
    if own is not None and own.memory is not None:
        values |= {"strategy": own.strategy, "fits": own.fits, "total": own.memory.total, "tokens": own.tokens}
    guess = "" if is_known else " (its speeds are not in the planner's table)"
    if own is not None and own.fits and own.memory is not None:
        told = f"fits on {machines}{guess}: {own.strategy}, {own.tokens:,} tokens a rank at a time"
        told += f", {gib(own.memory.total)} of {gib(found.room)}"
        yield Finding(CHECK, "memory", "ok", told, values=values)
    elif found.best is not None:
        why = own.impossible if own is not None and own.impossible else "does not fit"
        told = f"{asked.strategy} with checkpointing {asked.activation_checkpointing} on {machines}{guess}: {why}"
        yield Finding(CHECK, "memory", "error", told, f"pass {' '.join(keys(found))}", values)
    else:
        told, _, mend = found.reasons()[0].partition("; ")
        yield Finding(CHECK, "memory", "error", f"{told}{guess}", mend or "take more or larger GPUs", values)


def _on_cpu(recipe: Recipe, processes: int, nodes: int) -> Iterator[Finding]:
    """As `finetune` chooses batch.tokens_per_rank, from the memory that is free now."""
    import torch

    from esmshard.parallel import plan
    from esmshard.parallel.layout import layout
    from esmshard.parallel.mesh import precision_on
    from esmshard.tasks.numbers import HEADS
    from esmshard.train.fitting import RESERVED
    from esmshard.train.planning import head_bytes
    from esmshard.train.splits import in_tokens, open_split
    from esmshard.train.trained import numbers_of

    device = torch.device("cpu")
    train = open_split(recipe, "train", None)
    recipe, lengths = in_tokens(recipe, train), train.tokens
    config, head = _config(recipe.model.name), HEADS[recipe.task.name](recipe.task)
    world = processes * nodes
    laid_out = layout(recipe.parallel, world, processes, precision_on(device, recipe.parallel.precision))
    numbers = numbers_of(config, head.parameters(config), recipe.adapt, logits=recipe.task.name == "mlm")
    room = int(RESERVED * plan.free_bytes(device, processes))
    longest, beside = int(lengths.max()), train.beside
    share = -(-recipe.batch.global_tokens // world)
    heads = head_bytes(head, lengths, laid_out)
    most = {"longest": longest + beside, "share": share + beside}
    largest = max(plan.largest_micro_batch(numbers, laid_out, room, heads, "cpu", **most) - beside, longest)
    asked = recipe.batch.tokens_per_rank
    tokens = largest if asked == "auto" else asked
    parts = -(-share // tokens)
    need = plan.memory(numbers, laid_out, tokens + beside, heads(tokens), "cpu", micro_batches=parts).total
    values = {"room": room, "total": need, "tokens": tokens, "strategy": laid_out.strategy, "fits": need <= room}
    of = f"{processes} process{'es' * (processes > 1)} of this CPU"
    told = f"{of}: {tokens:,} tokens at a time, {gib(need)} of {gib(room)} each"
    if need <= room:
        yield Finding(CHECK, "memory", "ok", f"fits into {told}", values=values)
    else:
        lower = "" if tokens <= largest else f"batch.tokens_per_rank={largest}, "
        mend = f"pass {lower}parallel.activation_checkpointing=full or a lower data.max_length, or take more machines"
        yield Finding(CHECK, "memory", "error", f"does not fit into {told}", mend, values)


def _prepared(recipe: Recipe, processes: int, nodes: int) -> list[Finding]:
    """Every mistake of the recipe that `finetune` would see before it starts processes."""
    from esmshard.parallel.mesh import own_device
    from esmshard.train.job import prepare

    try:
        job = prepare(recipe, processes * nodes, processes, own_device(0, processes))
    except (InputError, OSError) as error:
        told = str(error).replace("\n", "; ")
        return [Finding(CHECK, "checked", "error", told, "change what the sentence names, in the recipe or its files")]
    told = f"{job.recipe.task.name}, {job.weights.config.n_parameters:,} parameters, {job.steps} steps"
    return [Finding(CHECK, "checked", "ok", told, values={"steps": job.steps})]


def _out(out: Path) -> list[Finding]:
    from esmshard.train.job import check_out

    try:
        check_out(out, None, overwrite=False)
    except UsageError as error:
        told, _, mend = str(error).partition("; ")
        return [Finding(CHECK, "out", "note", told, mend, {"path": str(out)})]
    return []


def _needed(recipe: Recipe) -> int:
    """Bytes of checkpoints and model: fp32 weights, and two moments for each weight that learns.

    One more checkpoint than are kept is there while it is written.
    """
    from esmshard.tasks.numbers import HEADS
    from esmshard.train.trained import numbers_of

    try:
        config = _config(recipe.model.name)
    except (InputError, OSError):  # said with the weights
        return 0
    head = HEADS[recipe.task.name](recipe.task)
    numbers = numbers_of(config, head.parameters(config), recipe.adapt, logits=recipe.task.name == "mlm")
    each = 4 * numbers.parameters + 8 * numbers.trained
    return each * (recipe.checkpoint.keep + 1 + recipe.checkpoint.keep_best) + 4 * numbers.parameters


def _config(model: str) -> "EsmConfig":
    """Of a model by its name alone, or as its file says."""
    from esmshard.model import weights
    from esmshard.model.config import SIZES

    return SIZES[model] if model in SIZES and not Path(model).exists() else weights.read(model).config


def arithmetic(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """How a rank will compute, as it found out on its own device.

    Args:
        facts: of `ranks.facts`: device, precision, wanted, kernel; or `precision_error`.
    """
    if facts.get("precision_error"):
        mend = "set parallel.precision=auto"
        yield Finding(CHECK, "precision", "error", str(facts["precision_error"]), mend, {"wanted": facts["wanted"]})
        return
    device, precision, kernel = facts["device"], facts["precision"], facts["kernel"]
    values = {"device": device, "precision": precision, "wanted": facts["wanted"], "kernel": kernel}
    told = f"precision {facts['wanted']} is {precision} on {device}; attention kernel: {kernel}"
    if kernel == "padded" and device.startswith("cuda"):
        why = "which pads every batch to its longest protein; the packed one needs bf16 or fp16 from Ampere on"
        yield Finding(CHECK, "precision", "note", f"{told}, {why}", values=values)
    else:
        yield Finding(CHECK, "precision", "ok", told, values=values)
