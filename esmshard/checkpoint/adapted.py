"""Checkpoints that hold only the trained part and not the base model: LoRA, biases, head."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError, UsageError
from esmshard.files import shared_place
from esmshard.model import adapters, weights
from esmshard.model.config import ModelConfig
from esmshard.model.export import Source
from esmshard.model.families import family_registry
from esmshard.model.lora import add_lora, lora_names, merged
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks import registry

Sizes = Mapping[str, torch.Size]


def on_base(
    checkpoint: Path, state: Mapping[str, Any], sizes: Sizes, read: Source, base: str | None = None
) -> tuple[Sizes, Source]:
    """Read the whole model: the base model, found and identified, with the trained part inserted.

    Each LoRA is added to its weight when this weight is read, so only requested tensors are in memory.

    Args:
        checkpoint: the checkpoint, for messages.
        state: its state.
        sizes: the shapes of its tensors, by our names.
        read: reads its tensors.
        base: the path of the base model; by default its path when the run began.

    Returns:
        The shapes of the whole model, a tied tensor once, and a function that reads its tensors.

    Raises:
        InputError: if the base model is missing or different, or the checkpoint does not match its recipe.
    """
    config = family_registry.recorded_config(state["config"])
    settings = AdaptSettings.model_validate(state["recipe"]["adapt"])
    whole = weights.stored_shapes(config)
    whole |= {name: size for name, size in sizes.items() if name.startswith("head.")}
    _account(checkpoint, config, settings, sizes, whole)
    found = _base(state["base"], str(checkpoint), base)
    scale = settings.lora[1] / settings.lora[0] if settings.method == "lora" else 0.0

    def read_whole(names: Sequence[str]) -> dict[str, torch.Tensor]:
        beside = [part for name in names for part in lora_names(name) if part in sizes]
        trained = dict(read([name for name in names if name in sizes] + beside))
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            own = trained[name] if name in sizes else found[name]
            tensors[name] = merged(name, trained | {name: own}, scale)
        return tensors

    return whole, read_whole


def _base(before: Mapping[str, Any], where: str, model: str | None) -> weights.Weights:
    """Open the base that a checkpoint was trained on, and compare it with the recorded identity."""
    if before["seed"] is not None:
        return weights.fresh(family_registry.recorded_config(before["config"]), before["seed"])
    name = model or before["name"]
    try:
        found = weights.read(name)
    except InputError as error:
        raise InputError(f"{error}; {where} needs this base model: say with --base where it lies now") from None
    weights.check(weights.identity(found, name), before, where)
    return found


def write_adapter(
    directory: Path,
    checkpoint: Path,
    state: Mapping[str, Any],
    sizes: Sizes,
    read: Source,
    base: str | None = None,
    out: Path | None = None,
) -> dict[str, str]:
    """Write the trained part as a PEFT adapter and a head; see `esmshard.model.adapters`. The base is not read.

    Arguments and errors are those of `on_base`. `base` is written unchanged; without it, the base's path is written as
    seen from `out`, the final path of `directory`. Raises `UsageError` for a checkpoint without a LoRA. Returns the
    sha256 of each file of weights, by name.
    """
    config = family_registry.recorded_config(state["config"])
    settings = AdaptSettings.model_validate(state["recipe"].get("adapt", {}))
    if settings.method != "lora":
        raise UsageError(f"{checkpoint}: has no LoRA (adapt.method is {settings.method}); leave --adapter out")
    _account(checkpoint, config, settings, sizes, weights.shapes(config))
    rank, alpha, targets = settings.lora
    name = base or shared_place(state["base"]["name"], out or directory)
    written = adapters.adapter_config(name, config, rank, alpha, targets, str(settings.bias))
    tensors = read(sorted(sizes))
    for part, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"{checkpoint}: {part} holds a value that is not finite; the run diverged, take an earlier checkpoint"
            )
    return adapters.write_adapter(directory, written, config, targets, tensors)


def _account(checkpoint: Path, config: ModelConfig, settings: AdaptSettings, sizes: Sizes, whole: Sizes) -> None:
    """Check that every LoRA matrix exists in its shape, with only biases of the trunk and the head besides.

    The head of masked-language-model training is the LM head.
    """
    wanted: dict[str, torch.Size] = {}
    if settings.method == "lora":
        with torch.device("meta"):
            wanted = add_lora(family_registry.build(config).layers, config.matrices, *settings.lora)
    trunk = {name: size for name, size in sizes.items() if not name.startswith("head.")}
    learned = {n for n in trunk if n.endswith("bias") or (settings.method == "head" and n.startswith("lm_head."))}
    problems = {
        "lacks": wanted.keys() - trunk.keys(),
        "holds besides what learned": trunk.keys() - wanted.keys() - learned,
        "holds in another shape": {n for n in trunk if trunk[n] != (wanted.get(n) or whole.get(n))},
    }
    refuse(checkpoint, problems)


def refuse(checkpoint: Path, problems: Mapping[str, Set[str]]) -> None:
    """Raise `InputError` for the first problem that has tensors, and name these tensors."""
    for problem, names in problems.items():
        if names:
            raise InputError(
                f"{checkpoint}: {problem} {weights.some(sorted(names))}; it is no checkpoint of its recipe, take "
                "another"
            )


_REGRESSION = "contact_head.regression."


def is_regression(state: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> bool:
    """Return whether the trained head is a regression over attention maps, and the model has no other that learned."""
    if (
        "contact_head" not in state.get("unlearned", ())
        or not registry.traits(state["recipe"]["task"]["name"]).predicts_contacts
    ):
        return False
    head = {name: size for name, size in sizes.items() if name.startswith("head.")}
    own = {name: size for name, size in sizes.items() if name.startswith(_REGRESSION)}
    return head == {name.replace(_REGRESSION, "head.regression."): size for name, size in own.items()}


def with_regression(read: Source) -> Source:
    """Return a function that reads the head's tensors for the contact regression, so that it is part of the model."""

    def read_both(names: Sequence[str]) -> dict[str, torch.Tensor]:
        theirs = {name: name.replace(_REGRESSION, "head.regression.") for name in names}
        found = read(sorted(set(theirs.values())))
        return {name: found[source] for name, source in theirs.items()}

    return read_both
