"""A recipe on this machine: whether its data and weights are present, whether it fits into memory, how it computes."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from esmshard.cluster.doctor import gpus
from esmshard.cluster.doctor.findings import Finding, guarded
from esmshard.errors import InputError, UsageError
from esmshard.files import is_hub_name, memory_text
from esmshard.planner.machines import CUDA_CONTEXT, GPUS, Machines, data_sheet
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

CORRECT = "correct what this names, in the recipe or its files"


def check(name: str, overrides: Sequence[str], cards: Sequence[gpus.Card], processes: int, nodes: int) -> list[Finding]:
    """Return all findings about a recipe, by file or name, on `nodes` such machines. Nothing is downloaded, but the
    `config.json` of a repository of the hub that is in no local cache.

    Each machine runs so many processes, on the first of its `cards`, or on its CPU if there are none. `UsageError` if
    the recipe itself is wrong.
    """
    from esmshard.data.splits.variant_records import FOLDS

    path = recipe_file.resolve(name)
    recipe = recipe_file.load(path, overrides)
    if recipe.divides_table and recipe.data.split not in ("mutations", "given"):  # the first fold of several
        recipe = recipe_file.load(path, [*overrides, f"data.folds={FOLDS}", "data.fold=0"])
    fix = "correct the path or the file (`data` of the recipe)"
    weights, data = guarded("recipe", partial(_weights, recipe)), guarded("recipe", partial(_data, recipe), "data", fix)
    memory = partial(_on_gpus, recipe, cards[:processes]) if cards else partial(_on_cpu, recipe, processes)
    findings = weights + data
    if all(finding.level == "ok" for finding in data):
        findings += guarded("recipe", partial(memory, nodes), "memory", CORRECT)
    if all(finding.level == "ok" for finding in weights + data):
        findings += guarded("recipe", partial(_prepared, recipe, processes, nodes), "checked", CORRECT)
    return findings + guarded("recipe", partial(_out, Path(recipe.out)))


def _weights(recipe: Recipe) -> Iterator[Finding]:
    """Check whether the weights are on this machine."""
    from huggingface_hub import constants

    from esmshard.model.families.family_registry import RELEASED, SIZES
    from esmshard.model.weights import hub, open_weights

    name = recipe.model.name
    values: dict[str, Any] = {"model": name}
    of_hub = (name in RELEASED or is_hub_name(name)) and not open_weights.place(name).exists()
    cached = hub.find(name) if of_hub else None
    if recipe.init == "random" and name in SIZES:
        found = f"{name} starts from random weights: none are needed"
        yield Finding("weights", "ok", found, values=values)
    elif not of_hub or (cached is not None and is_hub_name(name)):
        try:
            open_weights.read(name)
        except InputError as error:
            close = difflib.get_close_matches(name, SIZES, 1)
            fix = "correct model.name: a path, a released model (README.md), OWNER/NAME, starter or demo"
            yield Finding("weights", "error", str(error), f"pass model.name={close[0]}" if close else fix, values)
        else:
            yield Finding("weights", "ok", f"{name} is present", values=values)
    elif cached is not None:
        yield Finding("weights", "ok", f"{name} is in {cached}", values=values | {"path": str(cached)})
    else:
        offline = constants.HF_HUB_OFFLINE
        fix = f"esmshard download {name}, where there is internet and the caches are shared"
        then = "and HF_HUB_OFFLINE forbids to download it" if offline else "and the run would download it at its start"
        found = f"{name} is in no cache, {then}"
        yield Finding("weights", "error" if offline else "note", found, fix, values | {"path": None})


def _data(recipe: Recipe) -> Iterator[Finding]:
    """Check whether the splits can be opened. FASTA files are read into the cache, as the run would do."""
    from esmshard.data.splits.recipe_splits import open_split
    from esmshard.planner.recipe_plan import planned_tracks

    counts: dict[str, int] = {}
    for name in ("train", "valid", "test"):
        try:
            counts[name] = len(open_split(recipe, name, None, planned_tracks(recipe)))
        except (InputError, OSError) as error:
            raise InputError(f"{name}: {error}") from None
    found = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    yield Finding("data", "ok", f"records: {found}", values=counts)


def _on_gpus(recipe: Recipe, cards: Sequence[gpus.Card], nodes: int) -> Iterator[Finding]:
    """Ask the planner, with the least memory that is free now on one of the GPUs.

    A GPU without a data sheet is planned with the speeds of an A100. They change the advice, and not what fits.
    """
    from esmshard.planner.plan_text import keys
    from esmshard.planner.recipe_plan import plan

    first = min(cards, key=lambda card: card.memory_total or 0)
    sheet = data_sheet(first.name, first.memory_total)
    known = [(card.memory_total, card.memory_free or card.memory_total) for card in cards if card.memory_total]
    # The driver itself takes up to a tenth of an idle GPU.
    rooms = [total if free > 0.9 * total else free + CUDA_CONTEXT for total, free in known]
    gpu = replace(
        sheet or replace(GPUS["A100-40GB"], name=first.name),
        memory_bytes=min(rooms, default=sheet.memory_bytes if sheet else 0),
        has_bf16=(first.capability or (8, 0)) >= (8, 0),
    )
    machines, is_known = Machines(gpu, len(cards), nodes), sheet is not None
    planned, wanted = plan(recipe, machines), recipe.parallel
    choice = (wanted.strategy, wanted.activation_checkpointing, wanted.cpu_offload, wanted.tensor)
    options = {(o.strategy, o.checkpointing, o.cpu_offload, o.tensor): o for o in planned.options}
    own = options.get(choice)
    where = str(machines) if is_known else f"{machines} (its speeds are not in the planner's table)"
    values: dict[str, Any] = {"machines": str(machines), "room": planned.room, "known": is_known, "best": keys(planned)}
    if own is not None and own.memory is not None:
        values |= {"strategy": own.strategy, "fits": own.fits, "total": own.memory.total, "tokens": own.tokens}
        if own.fits:
            found = f"fits on {where}: {own.strategy}, {own.tokens:,} tokens a rank at a time, "
            found += f"{memory_text(own.memory.total)} of {memory_text(planned.room)}"
            yield Finding("memory", "ok", found, values=values)
            return
    found, _, fix = planned.reasons()[0].partition("; ")
    if planned.best is not None:
        why = (own.impossible if own else "") or "does not fit"
        found = f"{wanted.strategy} with checkpointing {wanted.activation_checkpointing} on {where}: {why}"
        fix = f"pass {' '.join(keys(planned))}"
    yield Finding("memory", "error", found, fix, values)


def _on_cpu(recipe: Recipe, processes: int, nodes: int) -> Iterator[Finding]:
    """Ask the planner as `finetune` does for batch.tokens_per_rank, with the memory that is free now."""
    import torch

    from esmshard.data.splits.recipe_splits import in_tokens, open_split
    from esmshard.launch.process_group import precision_on
    from esmshard.planner import memory_model
    from esmshard.planner.recipe_plan import MicroBatches, model_numbers, planned_tracks
    from esmshard.sharding.layout import layout
    from esmshard.train.token_budget import RESERVED

    device, train = torch.device("cpu"), open_split(recipe, "train", None, planned_tracks(recipe))
    recipe = in_tokens(recipe, train)
    precision = precision_on(device, recipe.parallel.precision)
    laid_out = layout(recipe.parallel, processes * nodes, processes, precision)
    batches = MicroBatches(recipe, train, model_numbers(recipe), laid_out, "cpu")
    room = int(RESERVED * memory_model.free_bytes(device, processes))
    largest, wanted = max(batches.largest(room), batches.longest), recipe.batch.tokens_per_rank
    tokens = largest if wanted == "auto" else wanted
    need = batches.memory(tokens, -(-batches.share // tokens)).total
    found = f"{processes} process{'es' * (processes > 1)} of this CPU: {tokens:,} tokens at a time, "
    found += f"{memory_text(need)} of {memory_text(room)} each"
    values = {"room": room, "total": need, "tokens": tokens, "strategy": laid_out.strategy, "fits": need <= room}
    if need <= room:
        yield Finding("memory", "ok", f"fits into {found}", values=values)
        return
    lower = "" if tokens <= largest else f"batch.tokens_per_rank={largest}, "
    fix = f"pass {lower}parallel.activation_checkpointing=full or a lower data.max_length, or take more machines"
    yield Finding("memory", "error", f"does not fit into {found}", fix, values)


def _prepared(recipe: Recipe, processes: int, nodes: int) -> Iterator[Finding]:
    """Find every mistake of the recipe that `finetune` finds before it starts processes."""
    from esmshard.launch.process_group import own_device
    from esmshard.train.run_inputs import prepare

    job = prepare(recipe, processes * nodes, processes, own_device(0, processes))
    found = f"{job.recipe.task.name}, {job.weights.config.n_parameters:,} parameters, {job.steps} steps"
    yield Finding("checked", "ok", found, values={"steps": job.steps})


def _out(out: Path) -> Iterator[Finding]:
    from esmshard.train.run_inputs import check_out

    try:
        check_out(out, None, overwrite=False)
    except UsageError as error:
        found, _, fix = str(error).partition("; ")
        yield Finding("out", "note", found, fix, {"path": str(out)})


def written_bytes(recipe: Recipe) -> int:
    """Return the bytes of checkpoints and model: fp32 weights, and two moments for each weight that learns.

    While a checkpoint is written, there is one more than are kept.
    """
    from esmshard.planner.recipe_plan import model_numbers

    try:
        numbers = model_numbers(recipe)
    except (InputError, OSError):  # `_weights` reports it
        return 0
    each = 4 * numbers.parameters + 8 * numbers.trained
    return each * (recipe.checkpoint.keep + 1 + recipe.checkpoint.keep_best) + 4 * numbers.parameters


def arithmetic(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Say how a rank computes on its own device, from its `doctor_ranks.facts`."""
    values = {key: facts[key] for key in ("device", "precision", "wanted", "kernel")}
    found = "precision {wanted} is {precision} on {device}; attention kernel: {kernel}".format(**values)
    if "precision_error" in facts:
        yield Finding("precision", "error", facts["precision_error"], "set parallel.precision=auto", values)
    elif facts["kernel"] == "padded" and facts["device"].startswith("cuda"):
        found += ", which pads every batch to its longest protein; the packed one needs bf16 or fp16 from Ampere on"
        yield Finding("precision", "note", found, values=values)
    else:
        yield Finding("precision", "ok", found, values=values)
