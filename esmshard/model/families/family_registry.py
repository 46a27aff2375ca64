"""All families of models, and lookups over the families: sizes, released models, the family of a file."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import UsageError
from esmshard.model.config import ModelConfig
from esmshard.model.families import amplify, esm2, esm3, esmc, saprot
from esmshard.model.families.family import Encoder, Family, Opened, Released
from esmshard.model.trunk import Trunk
from esmshard.vocab import Chains, read_chains

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (esm2, esmc, esm3, amplify, saprot)}
"""The families by name. A new family is one more module in this line."""

SIZES: dict[str, ModelConfig] = {name: size for family in FAMILIES.values() for name, size in family.sizes.items()}
"""The architectures by name."""
RELEASED: dict[str, Released] = {name: model for family in FAMILIES.values() for name, model in family.released.items()}
"""The models that their authors published, by name."""

WINDOW = "trained_window"
"""The key of `config.json` for `ModelConfig.window`, which `transformers` ignores."""
CHAINS = "joined_chains"
"""The key of `config.json` for `ModelConfig.chains` other than the default."""


def released_name(name: str) -> str | None:
    """Return the name of a released model for this name or for the repository OWNER/NAME; None for other names."""
    return next((known for known, model in RELEASED.items() if name in (known, model.repository)), None)


def family_of(config: ModelConfig) -> Family:
    """Return the family of an architecture."""
    return FAMILIES[config.family]


def window_of(config: ModelConfig) -> int:
    """Return how many residues a model saw at once in training."""
    return family_of(config).window if config.window is None else config.window


def build(config: ModelConfig) -> Trunk:
    """Make a model with undefined values on the default device. On `torch.device("meta")` it takes no memory."""
    return family_of(config).trunk(config)


@cache
def n_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model without memory for them. A tied parameter counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def recorded_config(record: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture from `ModelConfig.recorded`. Raises `ValueError` for an unknown family, and `ValueError`
    or `TypeError` for other content.
    """
    sizes = dict(record)
    name = sizes.pop("family", None)
    if name not in FAMILIES:
        raise ValueError(f"the family {name!r} is not known here, only {', '.join(FAMILIES)}; update esmshard")
    chains = Chains(**sizes.pop("chains", {}))
    return FAMILIES[name].config(**sizes, chains=chains)


def transformers_config(raw: Any) -> ModelConfig:
    """Return the architecture of a `config.json` in the layout of `transformers`. Raises `ValueError` with the reason
    for a model that cannot be read.
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
    """Read the content of a file of any authors' code; None for another kind of file."""
    return next((opened for family in FAMILIES.values() if (opened := family.read_pickle(data, path))), None)


def encoder_of(track: str) -> Encoder:
    """Return the function that computes a track of codes, or raise `UsageError` if no family has one."""
    known = {name: encoder for family in FAMILIES.values() for name, encoder in family.encoders.items()}
    if track not in known:
        raise UsageError(f"{track}: no encoder of this track is known, only of {', '.join(known)}")
    return known[track]
