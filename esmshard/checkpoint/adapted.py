"""Checkpoints that hold what was trained and not its base: LoRA, biases, head."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError, UsageError
from esmshard.files import shared_place
from esmshard.model import adapter, origin, weights
from esmshard.model.config import EsmConfig
from esmshard.model.esm2 import ESM2
from esmshard.model.export import Source
from esmshard.model.layouts import TIED
from esmshard.model.lora import add_lora, lora_names, merged
from esmshard.settings import AdaptSettings

Sizes = Mapping[str, torch.Size]


def on_base(
    checkpoint: Path, state: Mapping[str, Any], sizes: Sizes, read: Source, base: str | None = None
) -> tuple[Sizes, Source]:
    """The whole model: the base, which is found and recognised, with what was trained put in; each LoRA is added to
    its weight when that is read, so that no more than the tensors asked for is ever in memory.

    Args:
        checkpoint: for messages.
        state: its state.
        sizes: shapes of what it holds, by our names.
        read: reads it.
        base: where the base model lies now; by default where it lay when the run began.

    Returns:
        Shapes of the whole model, without the tied `lm_head.weight`, and what reads it.

    Raises:
        InputError: if the base is not there or another, or the checkpoint does not hold what its recipe says.
    """
    config, settings = EsmConfig(**state["config"]), AdaptSettings.model_validate(state["recipe"]["adapt"])
    whole = {name: size for name, size in weights.shapes(config).items() if name != TIED}
    whole |= {name: size for name, size in sizes.items() if name.startswith("head.")}
    _account(checkpoint, config, settings, sizes, whole)
    found = origin.reopen(state["base"], str(checkpoint), base)
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


def write_adapter(
    directory: Path,
    checkpoint: Path,
    state: Mapping[str, Any],
    sizes: Sizes,
    read: Source,
    base: str | None = None,
    out: Path | None = None,
) -> dict[str, str]:
    """Write what was trained as a PEFT adapter and a head; see `esmshard.model.adapter`. The base is not read.

    Arguments and errors as of `on_base`; `base` is written as it is, else the base's place as seen from `out`, which
    `directory` is going to be, if it is not that already. `UsageError` for a checkpoint without a LoRA. Returns the
    sha256 of each file of weights, by name.
    """
    config, settings = EsmConfig(**state["config"]), AdaptSettings.model_validate(state["recipe"].get("adapt", {}))
    if settings.method != "lora":
        raise UsageError(f"{checkpoint}: has no LoRA (adapt.method is {settings.method}); leave --adapter out")
    _account(checkpoint, config, settings, sizes, weights.shapes(config))
    rank, alpha, targets = settings.lora
    name = base or shared_place(state["base"]["name"], out or directory)
    written = adapter.adapter_config(name, config.n_layers, rank, alpha, targets, str(settings.bias))
    tensors = read(sorted(sizes))
    for part, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"{checkpoint}: {part} holds a value that is not finite; the run diverged, take an earlier checkpoint"
            )
    return adapter.write_adapter(directory, written, targets, tensors)


def _account(checkpoint: Path, config: EsmConfig, settings: AdaptSettings, sizes: Sizes, whole: Sizes) -> None:
    """Every LoRA matrix is there in its shape, and besides them only biases of the trunk, and the head.

    The head of masked-language-model training is the LM head.
    """
    wanted: dict[str, torch.Size] = {}
    if settings.method == "lora":
        with torch.device("meta"):
            wanted = add_lora(ESM2(config).layers, *settings.lora)
    trunk = {name: size for name, size in sizes.items() if not name.startswith("head.")}
    others = ("bias", "lm_head.dense.weight", "lm_head.layer_norm.weight")[: 3 if settings.method == "head" else 1]
    for problem, names in (
        ("lacks", sorted(wanted.keys() - trunk.keys())),
        ("holds besides what learned", sorted(n for n in trunk.keys() - wanted.keys() if not n.endswith(others))),
        ("holds in another shape", sorted(n for n in trunk if trunk[n] != (wanted.get(n) or whole.get(n)))),
    ):
        if names:
            raise InputError(
                f"{checkpoint}: {problem} {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}; "
                "it is no checkpoint of its recipe, take another"
            )
