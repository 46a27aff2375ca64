"""Defines `Family`, which tells the rest of the package all about one model family, such as ESM-2 or ESM-C."""

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
    """A released model: the repository, licence, copyright holder and publication of the model."""

    repository: str
    """The repository on the Hugging Face hub, as OWNER/NAME."""
    licence: str
    """The licence of the weights: its SPDX name in lower case, as on the hub."""
    holder: str
    """The holder of the copyright of the weights."""
    paper: str
    """The publication about the model: authors, year, journal and DOI or address."""


class Piece(NamedTuple):
    """One of esmshard's tensors, and the rows of this tensor in a tensor of a file. By default, all rows."""

    name: str
    """esmshard's name of the tensor."""
    rows: slice = slice(None)


@dataclass(frozen=True)
class Names:
    """Translates between esmshard's names of tensors ("our names") and the names in one layout of files."""

    block: str
    """The text before the number of a block in the names of files. In esmshard's names, this text is `layers.`."""
    in_block: Mapping[str, str]
    """esmshard's names of the modules of a block, mapped to the names in files."""
    others: Mapping[str, str]
    """For tensors outside blocks, esmshard's prefixes mapped to the prefixes in files. The first match counts."""

    def theirs(self, name: str) -> str | None:
        """Return the name in files for esmshard's name of a tensor; None for a block's tensor that files lack."""
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name):
            module = self.in_block.get(match[2])
            return module and f"{self.block}{match[1]}.{module}.{match[3]}"
        return _moved(name, self.others)

    def ours(self, key: str) -> str:
        """Return esmshard's name for the name of a tensor in a file. An unknown name is returned unchanged."""
        names = {theirs: ours for ours, theirs in self.in_block.items()}
        match = re.fullmatch(rf"{re.escape(self.block)}(\d+)\.(.+)\.(\w+)", key)
        if match and match[2] in names:
            return f"layers.{match[1]}.{names[match[2]]}.{match[3]}"
        return _moved(key, {theirs: ours for ours, theirs in self.others.items()})


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first matching prefix of a name. `prefixes` maps old prefixes to new prefixes."""
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


@dataclass(frozen=True)
class AuthorsFile:
    """A format of weight files for the code of a model's authors. `torch.save` writes the file."""

    use: str
    """Python code that loads the weight file, with the word FILE for the path. The model card shows this code."""
    code: str
    """Name and address of the authors' code in Markdown, for the model card."""
    lacks: tuple[str, ...] = ("head.",)
    """Prefixes of the names of tensors that the file cannot contain."""
    our_names: bool = False
    """Whether the keys of the file are esmshard's names of tensors. Otherwise, the keys follow `Family.names`."""

    def path(self, directory: Path, stem: str, config: Any) -> Path:
        """Return the path in `directory` for the weight file of a model named `stem` with the architecture `config`."""
        return directory / f"{stem}.pth"

    def write(self, file: Path, config: Any, tensors: dict[str, torch.Tensor]) -> list[Path]:
        """Write `tensors`, which are named by the keys of the file. Return the paths of all written files."""
        torch.save(tensors, file)
        return [file]


class Corruption(NamedTuple):
    """How pre-training changed the residues to predict. They became `<mask>`, except for the two shares below."""

    random: float
    """Share of the residues to predict that became a random letter."""
    unchanged: float
    """Share of the residues to predict that kept their own letter."""
    letters: int
    """Number of letters from which a random letter was chosen. All letters were equally likely."""


class Opened(NamedTuple):
    """The architecture and tensors of a model that was opened from files for the authors' code or `transformers`."""

    config: ModelConfig
    tensors: dict[str, WeightReader]
    """The reader of each tensor, by esmshard's name of the tensor."""
    files: tuple[Path, ...]
    """The paths of the files that contain the tensors of the model."""


def is_computed(name: str) -> bool:
    """Return whether a tensor (rotary frequencies) can be computed from the architecture. Files may lack the tensor."""
    return name.endswith("inv_freq")


class Family(ABC):
    """A model family such as ESM-2 or ESM-C: architectures, files, initial values and publications.

    The methods `read_*` raise `ValueError`, with the reason, if a model cannot be read.
    """

    title: ClassVar[str]
    """The name of the model family in messages and documents."""
    config: ClassVar[type[ModelConfig]]
    trunk: ClassVar[type[Trunk]]
    """The class of the models. The argument of this class is an architecture."""
    sizes: ClassVar[Mapping[str, ModelConfig]]
    """The architectures of the family by name, also of sizes without released weights."""
    released: ClassVar[Mapping[str, Released]]
    """The released models of the family by name. The field `sizes` has an architecture for each of these names."""
    paper: ClassVar[str]
    """The publication of the architecture, in the form of `Released.paper`."""
    window: ClassVar[int]
    """Maximum number of residues of a sequence in training, if `ModelConfig.window` is None. Longer proteins are scored
    and embedded in windows of this length."""
    corruption: ClassVar[Corruption | None] = None
    """How pre-training changed residues. These numbers make it possible to estimate masked probabilities without masks.
    None if the numbers are unknown, or if all residues to predict became `<mask>`."""
    tracks: ClassVar[tuple[Track, ...]] = ()
    """The tracks (`Track`) that models of this family can read in addition to the amino acids."""
    encoders: ClassVar[Mapping[str, Encoder]] = {}
    """The functions that compute the codes of a track from coordinates, by the name of the track."""
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {}
    """The file formats for the authors' code that esmshard writes, by the value of the option `consolidate --to`."""

    # The following fields describe directories in the layout of `transformers`.
    model_types: ClassVar[tuple[str, ...]]
    """The values of `model_type` in the `config.json` files of this family."""
    vocab_size: ClassVar[int | None] = None
    """The value of `vocab_size` in `config.json`, if other families have the same `model_type`; otherwise None."""
    names: ClassVar[Names]
    """The names of tensors in the directories that esmshard writes."""
    prefix: ClassVar[str] = ""
    """The prefix of the keys of the trunk, such as `esm.`. Files of a model without LM head do not have this prefix."""
    model_class: ClassVar[str] = ""
    """The class of `transformers` that reads model directories of this family; empty if only esmshard reads them."""
    remote_code: ClassVar[bool] = False
    """Whether `model_class` gets its code from a repository on the hub, which `auto_map` in `config.json` names."""

    @property
    def name(self) -> str:
        """The name of the family in checkpoints and in the dictionary `family_registry.FAMILIES`."""
        return self.config.family

    def initial(self, config: Any, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Make the initial tensor `name`: matrices are normal with standard deviation 0.02, biases 0, norms 1."""
        if is_computed(name):
            return inverse_frequencies(config.head_dim)
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return 0.02 * torch.randn(shape, generator=generator)

    @abstractmethod
    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the architecture from `raw`, the content of a `config.json` with a `model_type` of this family."""

    @abstractmethod
    def write_config(self, config: Any) -> dict[str, Any]:
        """Return the content of a `config.json` for this architecture."""

    @abstractmethod
    def pieces(self, key: str, config: Any) -> Sequence[Piece]:
        """Return which of esmshard's tensors a file stores under a key, and in which rows. The result is empty for keys
        that are not needed. For an unknown key, the result is one tensor whose name is the key.
        """

    def tensors(self, readers: Mapping[str, WeightReader], config: Any) -> dict[str, WeightReader]:
        """Return a reader for each tensor by esmshard's name. `readers` has the readers by the keys of a file."""
        pieces = [(piece, reader) for key, reader in readers.items() for piece in self.pieces(key, config)]
        return {piece.name: reader.part(piece.rows) for piece, reader in pieces}

    def key(self, name: str) -> str | None:
        """Return the key under which model directories store our tensor `name`; None for a tensor that is not stored.
        Tensors with the same key are joined along the rows, in the order of `pieces`.
        """
        return self.names.theirs(name)

    def write_tokenizer(self, directory: Path) -> None:  # noqa: B027  # ESM3 has none
        """Write the tokenizer files of `transformers` to a directory."""

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Return the model in `data`, the content of the authors' file at `path`; None for another kind of file."""
        return None


def check_settings(raw: Mapping[str, Any], fixed: Mapping[str, Any], place: str = "") -> None:
    """Raise `ValueError` with a list of all settings in `raw` that differ from their values in `fixed`."""
    if wrong := [
        f"{place}{key} is {raw[key]!r}, not {value!r}" for key, value in fixed.items() if raw.get(key, value) != value
    ]:
        raise ValueError("; ".join(wrong))


def renamed(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return values of the configuration `raw` by esmshard's names, which `keys` maps to the names in `raw`. Raises
    `ValueError` if a value is missing.
    """
    if missing := [key for key in keys.values() if key not in raw]:
        raise ValueError(f"{missing[0]!r} is missing")
    return {ours: raw[key] for ours, key in keys.items()}


SIZES_OF_TRANSFORMERS = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
"""esmshard's names of the sizes of a model, mapped to the names in a `config.json` of `transformers`."""
