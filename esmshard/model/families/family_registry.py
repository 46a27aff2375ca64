"""Lists all model families (ESM-2, ESM-C, ...), their sizes and their released models."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import UsageError
from esmshard.model.config import ModelConfig
from esmshard.model.families import amplify, bert, esm2, esm3, esmc, saprot, t5
from esmshard.model.families.family import Corruption, Encoder, Family, Opened, Released
from esmshard.model.trunk import Trunk
from esmshard.vocab import Chains, read_chains

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (esm2, esmc, esm3, amplify, saprot, bert, t5)
}
"""All model families by name. To add a family, write its module and add the module to this line."""

SIZES: dict[str, ModelConfig] = {name: size for family in FAMILIES.values() for name, size in family.sizes.items()}
"""All architectures by name."""
RELEASED: dict[str, Released] = {name: model for family in FAMILIES.values() for name, model in family.released.items()}
"""All released models by name."""

WINDOW = "trained_window"
"""The key for `ModelConfig.window` in `config.json`. `transformers` ignores this key."""
CHAINS = "joined_chains"
"""The key for `ModelConfig.chains` in `config.json`. The key is left out for the default value."""


def released_name(name: str) -> str | None:
    """Return a released model's name from its name or its repository OWNER/NAME; None for other names."""
    return next((key for key, model in RELEASED.items() if name in (key, model.repository)), None)


def family_of(config: ModelConfig) -> Family:
    """Return the model family of an architecture."""
    return FAMILIES[config.family]


def window_of(config: ModelConfig) -> int:
    """Return the length of the longest sequence that a model was trained on, in residues."""
    return family_of(config).window if config.window is None else config.window


def corruption_of(config: ModelConfig) -> Corruption | None:
    """Return how pre-training changed residues (`Family.corruption`); None for models trained by diffusion."""
    return None if getattr(config, "diffusion", False) else family_of(config).corruption


def build(config: ModelConfig) -> Trunk:
    """Make a model with undefined values on the default device. On the device `meta`, it needs no memory."""
    return family_of(config).trunk(config)


@cache
def n_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model. A shared parameter counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def recorded_config(record: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture from the result of `ModelConfig.recorded`. Raises `ValueError` or `TypeError` if
    `record` is invalid.
    """
    sizes = dict(record)
    name = sizes.pop("family", None)
    if name not in FAMILIES:
        raise ValueError(f"the family {name!r} is not one of {', '.join(FAMILIES)}; update esmshard")
    chains = Chains(**sizes.pop("chains", {}))
    return FAMILIES[name].config(**sizes, chains=chains)


def transformers_config(raw: Any) -> ModelConfig:
    """Return the architecture from `raw`, the content of `config.json` in `transformers`' layout. Raises `ValueError`
    with the reason if the model cannot be read.
    """
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    candidates = [family for family in FAMILIES.values() if kind in family.model_types]
    for family in candidates:
        if family.vocab_size in (None, raw.get("vocab_size")):
            chains = read_chains(str(raw.get(CHAINS, Chains().text)))
            return replace(family.read_config(raw), window=raw.get(WINDOW), chains=chains)
    if candidates:
        sizes = " or ".join(f"{family.vocab_size} ({family.title})" for family in candidates)
        raise ValueError(f"vocab_size is {raw.get('vocab_size')!r}, not {sizes}")
    kinds = ", ".join(dict.fromkeys(repr(name) for family in FAMILIES.values() for name in family.model_types))
    titles = ", ".join(family.title for family in FAMILIES.values())
    raise ValueError(f"model_type is {kind!r} and not one of {kinds}; models of {titles} can be read")


def read_pickle(data: Mapping[str, Any], path: Path) -> Opened | None:
    """Return the model in `data`, the content of any authors' file at `path`; None for other files."""
    return next((opened for family in FAMILIES.values() if (opened := family.read_pickle(data, path))), None)


def encoder_of(track: str) -> Encoder:
    """Return the function that computes the codes of a track. Raises `UsageError` if there is no function."""
    encoders = {name: encoder for family in FAMILIES.values() for name, encoder in family.encoders.items()}
    if track not in encoders:
        raise UsageError(f"{track}: there is no encoder for this track, only for {', '.join(encoders)}")
    return encoders[track]
