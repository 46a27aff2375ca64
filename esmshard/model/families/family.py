"""Defines `Family`, the description of a model family such as ESM-2 or ESM-C."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from esmshard.model.attention import inverse_frequencies
from esmshard.model.config import ModelConfig
from esmshard.model.trunk import Trunk
from esmshard.model.weight_reader import WeightReader
from esmshard.vocab import Track

Encoder = Callable[[Path, npt.NDArray[np.float32], torch.device], npt.NDArray[np.int64]]
"""The type of a function `encoder(weight_file, coordinates_L33 in Ångström, device)` that returns codes [L]."""


@dataclass(frozen=True)
class Released:
    """A released model."""

    repository: str
    """The repository on the Hugging Face hub, as OWNER/NAME."""
    licence: str
    """The licence of the weights: its SPDX name in lower case, as on the hub."""
    holder: str
    """The holder of the copyright."""
    paper: str
    """The publication: authors, year, journal and DOI or address."""
    untrained: tuple[str, ...] = ()
    """The parts in the files (`lm_head`, `contact_head`) that the authors did not train."""


class Piece(NamedTuple):
    """A part of a tensor in a file: esmshard's name of the part, and its rows in the file's tensor (by default all)."""

    name: str
    rows: slice = slice(None)


@dataclass(frozen=True)
class Names:
    """Translates between esmshard's tensor names ("our names") and the names in a file layout ("their names")."""

    block: str
    """The text before the index of a block in the names in files. In esmshard's names, this text is `layers.`."""
    in_block: Mapping[str, str]
    """The modules of a block: esmshard's names mapped to the names in files."""
    others: Mapping[str, str]
    """The prefixes of all other tensors: esmshard's prefixes mapped to the prefixes in files. The first
    prefix that matches is replaced."""

    def theirs(self, name: str) -> str | None:
        """Return the name in files for esmshard's name; None for a block's tensor that files lack."""
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name):
            module = self.in_block.get(match[2])
            return module and f"{self.block}{match[1]}.{module}.{match[3]}"
        return _moved(name, self.others)

    def ours(self, key: str) -> str:
        """Return esmshard's name for a name in files. An unknown name is returned unchanged."""
        names = {theirs: ours for ours, theirs in self.in_block.items()}
        match = re.fullmatch(rf"{re.escape(self.block)}(\d+)\.(.+)\.(\w+)", key)
        if match and match[2] in names:
            return f"layers.{match[1]}.{names[match[2]]}.{match[3]}"
        return _moved(key, {theirs: ours for ours, theirs in self.others.items()})


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the prefix of `name`. `prefixes` maps old to new prefixes; the first that matches is replaced."""
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


@dataclass(frozen=True)
class AuthorsFile:
    """A weight-file format, written by `torch.save`, for the code of a model's authors."""

    use: str
    """Python code that loads the weight file FILE. The model card shows this code."""
    code: str
    """The name and address of the authors' code in Markdown, for the model card."""
    lacks: tuple[str, ...] = ("head.",)
    """The prefixes of the names of tensors that the file cannot contain."""
    our_names: bool = False
    """Whether the file has esmshard's tensor names. Otherwise, it has the names in `Family.names`."""

    def path(self, directory: Path, stem: str, config: Any) -> Path:
        """Return the path in `directory` of a weight file for a model named `stem`."""
        return directory / f"{stem}.pth"

    def write(self, file: Path, config: Any, tensors: dict[str, torch.Tensor]) -> list[Path]:
        """Write `tensors`, whose keys are the names for the file. Return the paths of all written files."""
        torch.save(tensors, file)
        return [file]


class Corruption(NamedTuple):
    """How pre-training changed the residues to predict. All became `<mask>`, except for the two shares below."""

    random: float
    """The share of the residues to predict that became a random letter."""
    unchanged: float
    """The share of the residues to predict that did not change."""
    letters: int
    """The number of letters from which the random letter was drawn, with equal probabilities."""


class Opened(NamedTuple):
    """A model that was opened from files."""

    config: ModelConfig
    tensors: dict[str, WeightReader]
    """The reader of each tensor, by esmshard's name."""
    files: tuple[Path, ...]


def is_computed(name: str) -> bool:
    """Return whether a tensor is computed from the architecture, so that files may lack it (rotary frequencies)."""
    return name.endswith("inv_freq")


class Family(ABC):
    """A model family: architectures, files, initial values and publications. The methods `read_*` raise `ValueError`,
    with the reason, if a model cannot be read.
    """

    title: ClassVar[str]
    """The name of the model family in messages and documents."""
    config: ClassVar[type[ModelConfig]]
    trunk: ClassVar[type[Trunk]]
    """The class of the models. Its argument is an architecture."""
    sizes: ClassVar[Mapping[str, ModelConfig]]
    """The architectures by name, with and without released weights."""
    released: ClassVar[Mapping[str, Released]]
    """The released models, by a name in `sizes`."""
    paper: ClassVar[str]
    """The publication of the architecture: authors, year, journal and DOI or address."""
    window: ClassVar[int]
    """The length of the longest sequence in pre-training, in residues. `ModelConfig.window` may have another length for
    one model. Longer proteins are scored and embedded in windows of this length."""
    corruption: ClassVar[Corruption | None] = None
    """How pre-training changed residues; needed to estimate masked probabilities without masks. None if this is
    unknown, or if all residues to predict became `<mask>`."""
    tracks: ClassVar[tuple[Track, ...]] = ()
    """The tracks that all models of this family can read in addition to the amino acids."""
    encoders: ClassVar[Mapping[str, Encoder]] = {}
    """The functions that compute the codes of a track from coordinates, by track name."""
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {}
    """The file formats for the authors' code, by the value of the option `consolidate --to`."""

    # The following fields describe directories in the layout of `transformers`.
    model_types: ClassVar[tuple[str, ...]]
    """The values of `model_type` in `config.json`."""
    vocab_size: ClassVar[int | None] = None
    """The value of `vocab_size` in `config.json`, if other families have the same `model_type`; otherwise None."""
    names: ClassVar[Names]
    """The tensor names in the directories that esmshard writes."""
    prefix: ClassVar[str] = ""
    """The prefix of the trunk's tensors, such as `esm.`. Files of models without an LM head lack this prefix."""
    model_class: ClassVar[str] = ""
    """The class of `transformers` that reads the model directories; empty if only esmshard reads them."""
    remote_code: ClassVar[bool] = False
    """Whether the code of `model_class` comes from a repository on the hub (`auto_map` in `config.json`)."""

    @property
    def name(self) -> str:
        """The name of the family in checkpoints and in `family_registry.FAMILIES`."""
        return self.config.family

    def initial(self, config: Any, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Return initial values of the tensor `name`: 0 for biases, 1 for norms, and for matrices normally distributed
        numbers with standard deviation 0.02.
        """
        if is_computed(name):
            return inverse_frequencies(config.head_dim)
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return 0.02 * torch.randn(shape, generator=generator)

    @abstractmethod
    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the architecture from `raw`, the content of a `config.json` of this family."""

    def read_tokens(self, config: Any, directory: Path) -> ModelConfig:
        """Return the architecture with what the tokenizer files in the model's directory say about it."""
        return config  # type: ignore[no-any-return]

    def tracks_of(self, config: Any) -> tuple[Track, ...]:
        """Return the tracks that a model can read."""
        return self.tracks

    @abstractmethod
    def write_config(self, config: Any) -> dict[str, Any]:
        """Return the content of a `config.json` for this architecture."""

    @abstractmethod
    def pieces(self, key: str, config: Any) -> Sequence[Piece]:
        """Return the parts of the tensor that a file has under `key`. The result is empty for a key that is not needed.
        For an unknown key, the result is one part with the key as its name.
        """

    def tensors(self, readers: Mapping[str, WeightReader], config: Any) -> dict[str, WeightReader]:
        """Return a reader for each of esmshard's tensors, by name. `readers` has the readers by the keys of a file."""
        pieces = [(piece, reader) for key, reader in readers.items() for piece in self.pieces(key, config)]
        return {piece.name: reader.part(piece.rows) for piece, reader in pieces}

    def key(self, name: str) -> str | None:
        """Return the key of esmshard's tensor `name` in model directories; None for a tensor that files lack. Tensors
        with the same key are joined along the rows, in the order of `pieces`.
        """
        return self.names.theirs(name)

    def write_tokenizer(self, directory: Path) -> None:  # noqa: B027  # ESM3 has none
        """Write the tokenizer files of `transformers` to a directory."""

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Return the model in `data`, the content of the authors' file at `path`; None for other files."""
        return None


def check_settings(raw: Mapping[str, Any], fixed: Mapping[str, Any], place: str = "") -> None:
    """Raise `ValueError` with all settings in `raw` that differ from `fixed`, each after the text `place`."""
    if wrong := [
        f"{place}{key} is {raw[key]!r}, not {value!r}" for key, value in fixed.items() if raw.get(key, value) != value
    ]:
        raise ValueError("; ".join(wrong))


def renamed(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return values of the configuration `raw` by esmshard's names. `keys` maps esmshard's names to the names in `raw`.
    Raises `ValueError` if a value is missing.
    """
    if missing := [key for key in keys.values() if key not in raw]:
        raise ValueError(f"{missing[0]!r} is missing")
    return {ours: raw[key] for ours, key in keys.items()}


SIZE_KEYS = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
"""esmshard's names of a model's sizes, mapped to the names in `config.json` of `transformers`."""
