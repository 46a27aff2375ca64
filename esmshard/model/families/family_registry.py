"""All families, and what is found in all of them: sizes, released models, the family of a file. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esmshard.errors import UsageError
from esmshard.joined_chains import Chains, read_chains
from esmshard.model.config import ModelConfig
from esmshard.model.families.amplify import amplify_family
from esmshard.model.families.esm2 import esm2_family
from esmshard.model.families.esm3 import esm3_family
from esmshard.model.families.esmc import esmc_family
from esmshard.model.families.family import AuthorsFile, Family, Released
from esmshard.model.families.saprot import saprot_family

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from esmshard.model.trunk import Trunk
    from esmshard.model.weight_reader import WeightReader

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        esm2_family.FAMILY,
        esmc_family.FAMILY,
        esm3_family.FAMILY,
        amplify_family.FAMILY,
        saprot_family.FAMILY,
    )
}
"""The families by name. A new family is one more record here."""

UNNAMED = esm2_family.FAMILY
"""The family of checkpoints that name none: they were written when there was only one."""

SIZES: dict[str, ModelConfig] = {name: size for family in FAMILIES.values() for name, size in family.sizes.items()}
"""The architectures that a name stands for."""
RELEASED: dict[str, Released] = {name: one for family in FAMILIES.values() for name, one in family.released.items()}
"""The models that their authors published, by name."""

WINDOW = "trained_window"
"""The key of `config.json` for `ModelConfig.window`, which esmshard writes and `transformers` ignores."""

CHAINS = "joined_chains"
"""The key of `config.json` for `ModelConfig.chains`, if they are not the default."""


def released_name(name: str) -> str | None:
    """Return the name of a released model for this name, or for its repository OWNER/NAME; None for other names."""
    return next((known for known, one in RELEASED.items() if name in (known, one.repository)), None)


def family_of(config: ModelConfig) -> Family:
    """Return the family of an architecture."""
    return FAMILIES[config.family]


def window_of(config: ModelConfig) -> int:
    """Return how many residues a model saw at once in training."""
    return family_of(config).window if config.window is None else config.window


def build(config: ModelConfig) -> "Trunk":
    """Make a model of an architecture, on the current default device, with values that are not defined."""
    trunk: Trunk = _imported(family_of(config).trunk)(config)
    return trunk


def recorded_config(record: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture that `ModelConfig.recorded` wrote.

    Raises:
        ValueError, TypeError: it is no architecture, or that of a family that is not known here.
    """
    sizes = dict(record)
    name = sizes.pop("family", UNNAMED.name)
    if name not in FAMILIES:
        raise ValueError(f"the family {name!r} is not known here, only {', '.join(FAMILIES)}; update esmshard")
    chains = Chains(**sizes.pop("chains", {}))
    return FAMILIES[name].config(**sizes, chains=chains)


def transformers_config(raw: Any) -> ModelConfig:
    """Return the architecture that a `config.json` in the layout of `transformers` describes.

    Raises:
        ValueError: it is not an architecture that can be read; the message says why.
    """
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    of_this_kind = [family for family in FAMILIES.values() if kind in family.files.model_types]
    for family in of_this_kind:
        if family.files.vocab_size in (None, raw.get("vocab_size")):
            chains = read_chains(str(raw.get(CHAINS, Chains().text)))
            return replace(family.files.read_config(raw), window=raw.get(WINDOW), chains=chains)
    if of_this_kind:
        sizes = " or ".join(f"{family.files.vocab_size} ({family.title})" for family in of_this_kind)
        raise ValueError(f"vocab_size is {raw.get('vocab_size')!r}, not {sizes}")
    if raw == {}:
        raise ValueError("it is empty, so that it does not say which model it is of")
    kinds = ", ".join(dict.fromkeys(repr(name) for family in FAMILIES.values() for name in family.files.model_types))
    titles = ", ".join(family.title for family in FAMILIES.values())
    raise ValueError(f"model_type is {kind!r} and not one of {kinds}; models of {titles} can be read")


def authors_files(family: Family) -> dict[str, AuthorsFile]:
    """Return how files of the authors' own code are written, by their word in `consolidate --to`."""
    return {word: _imported(place) for word, place in family.pickles.items()}


def read_pickle(
    data: Mapping[str, Any], path: Path
) -> tuple[ModelConfig, dict[str, "WeightReader"], tuple[Path, ...]] | None:
    """Read the content of a file of any authors' own code; see `Family.read_pickle`."""
    for family in FAMILIES.values():
        if family.read_pickle and (found := _imported(family.read_pickle)(data, path)):
            config, tensors, files = found
            return config, tensors, files
    return None


def encoder_of(track: str) -> "Callable[[Path, npt.NDArray[np.float32], torch.device], npt.NDArray[np.int64]]":
    """Return the function that computes a track of codes from coordinates; see `Family.encoders`.

    Raises:
        UsageError: no family computes this track.
    """
    known = {name: place for family in FAMILIES.values() for name, place in family.encoders.items()}
    if track not in known:
        raise UsageError(f"{track}: no encoder of this track is known, only of {', '.join(known)}")
    return _imported(known[track])  # type: ignore[no-any-return]


@cache
def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
