"""`Family`: everything that the rest of the package needs to know of a family of models."""

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
"""Computes a track of codes: of a file of weights, the coordinates [L, 3, 3] of one protein in Ångström and the
computing device it returns the codes [L]."""


@dataclass(frozen=True)
class Released:
    """A model that its authors published."""

    repository: str
    """OWNER/NAME on the Hugging Face hub."""
    licence: str
    """Licence of the weights, by its SPDX name in lower case, as the hub writes it."""
    holder: str
    """Who has the copyright."""
    paper: str
    """The publication of the model: authors, year, journal and DOI or address."""


class Piece(NamedTuple):
    """One of our tensors in a file: the whole tensor of a key, or some of its rows."""

    name: str
    rows: slice = slice(None)


@dataclass(frozen=True)
class Names:
    """The names of tensors in a layout of files."""

    block: str
    """What stands before the number of a block; `layers.` here."""
    in_block: Mapping[str, str]
    """Their names of the modules of a block, by ours."""
    others: Mapping[str, str]
    """What begins their names of the other tensors, by what begins ours, where the two differ; the first one counts."""

    def theirs(self, name: str) -> str | None:
        """Return their name of one of our tensors; None for a tensor of a block that they do not have."""
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name):
            module = self.in_block.get(match[2])
            return module and f"{self.block}{match[1]}.{module}.{match[3]}"
        return _moved(name, self.others)

    def ours(self, key: str) -> str:
        """Return our name of one of their tensors; an unknown key as it is."""
        names = {theirs: ours for ours, theirs in self.in_block.items()}
        match = re.fullmatch(rf"{re.escape(self.block)}(\d+)\.(.+)\.(\w+)", key)
        if match and match[2] in names:
            return f"layers.{match[1]}.{names[match[2]]}.{match[3]}"
        return _moved(key, {theirs: ours for ours, theirs in self.others.items()})


def _moved(name: str, beginnings: Mapping[str, str]) -> str:
    """Exchange the beginning of a name."""
    first = next((first for first in beginnings if name.startswith(first)), "")
    return beginnings.get(first, "") + name.removeprefix(first)


@dataclass(frozen=True)
class AuthorsFile:
    """How `torch.save` writes a file for the code of a family's authors."""

    use: str
    """Python code that opens a file FILE, for the model card."""
    code: str
    """The name and address of the authors' code, in Markdown, for the model card."""
    lacks: tuple[str, ...] = ("head.",)
    """Beginnings of our names of tensors that the file cannot hold."""
    our_names: bool = False
    """Whether the names in the file are ours, and not those of the family's directories."""

    def path(self, directory: Path, stem: str, config: Any) -> Path:
        """Return the path of the file for a model of a name and architecture."""
        return directory / f"{stem}.pth"

    def write(self, file: Path, config: Any, tensors: dict[str, torch.Tensor]) -> list[Path]:
        """Write tensors, by their names in the file and without the tied ones. Return all files."""
        torch.save(tensors, file)
        return [file]


class Corruption(NamedTuple):
    """What models saw in training in place of the residues that they were asked for, where it was not `<mask>`."""

    random: float
    """The share of these residues that were replaced by a letter drawn at random."""
    unchanged: float
    """The share of these residues that stayed."""
    letters: int
    """The number of letters that were drawn from, each as often."""


class Opened(NamedTuple):
    """The content of a file of the authors' own code."""

    config: ModelConfig
    tensors: dict[str, WeightReader]
    """Readers of the tensors, by our names."""
    files: tuple[Path, ...]
    """All files that hold them."""


def is_computed(name: str) -> bool:
    """Return whether a tensor follows from the architecture, so that a file may lack it. Rotary frequencies do."""
    return name.endswith("inv_freq")


class Family(ABC):
    """A family of models: shapes, files, initial values, and what may be said about its models.

    Functions that read raise `ValueError` with a reason for a model that cannot be read.
    """

    title: ClassVar[str]
    """The name in texts."""
    config: ClassVar[type[ModelConfig]]
    trunk: ClassVar[type[Trunk]]
    """The class of the models, which takes an architecture."""
    sizes: ClassVar[Mapping[str, ModelConfig]]
    """Architectures by name, released or not."""
    released: ClassVar[Mapping[str, Released]]
    """Released models by name. Their architectures are in `sizes`."""
    paper: ClassVar[str]
    """The publication of the architecture, in the same form."""
    window: ClassVar[int]
    """Residues that the models saw at once in training, unless their configuration says another number. Longer proteins
    are scored and embedded in such windows."""
    corruption: ClassVar[Corruption | None] = None
    """What the models saw in training, for estimates of masked probabilities from visible residues; None if that is not
    known, or all residues that they were asked for were masked."""
    tracks: ClassVar[tuple[Track, ...]] = ()
    """What the models read of each residue besides its amino acid, if the user gives it."""
    encoders: ClassVar[Mapping[str, Encoder]] = {}
    """Functions that compute a track of codes, by the name of the track."""
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {}
    """The files of the authors' own code that can be written, by their word in `consolidate --to`."""

    # Directories in the layout of `transformers`.
    model_types: ClassVar[tuple[str, ...]]
    """The values of `model_type` in the `config.json` files of this family."""
    vocab_size: ClassVar[int | None] = None
    """The value of `vocab_size` there, where other families have the same `model_type`."""
    names: ClassVar[Names]
    """The names of tensors in the directories that are written."""
    prefix: ClassVar[str] = ""
    """What begins the keys of the trunk, and is absent in the files of a model without LM head, such as `esm.`."""
    model_class: ClassVar[str] = ""
    """The class of `transformers` that reads what is written. Empty for a family that `transformers` does not have:
    only esmshard reads its directories."""
    remote_code: ClassVar[bool] = False
    """Whether the class is code in a repository on the hub, which `auto_map` in `config.json` names."""

    @property
    def name(self) -> str:
        """The name in checkpoints and in `FAMILIES`."""
        return self.config.family

    def initial(self, config: Any, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Draw a tensor of a new model: matrices and embeddings are normal with deviation 0.02, biases 0, and weights
        of norms 1.
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
        """Return the architecture that a `config.json` of one of `model_types` describes."""

    @abstractmethod
    def write_config(self, config: Any) -> dict[str, Any]:
        """Return the content of the `config.json` that is written."""

    @abstractmethod
    def pieces(self, key: str, config: Any) -> Sequence[Piece]:
        """Return our tensors in a key of a directory or of the authors' files; none for a key that the model does not
        use. An unknown key is returned as it is.
        """

    def tensors(self, readers: Mapping[str, WeightReader], config: Any) -> dict[str, WeightReader]:
        """Return readers by our names, of those of a file of this family by its keys."""
        pieces = [(piece, reader) for key, reader in readers.items() for piece in self.pieces(key, config)]
        return {piece.name: reader.part(piece.rows) for piece, reader in pieces}

    def key(self, name: str) -> str | None:
        """Return the key under which one of our tensors is written; None for a tensor that is not written, because it
        follows from the architecture. Tensors with the same key are joined, one below the other in the order of
        `pieces`.
        """
        return self.names.theirs(name)

    def write_tokenizer(self, directory: Path) -> None:  # noqa: B027  # ESM3 has none
        """Write the files from which `transformers` makes its tokenizer to a directory."""

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Read the content of a file of the authors' own code at this path; None if it is no such file."""
        return None


def check_settings(raw: Mapping[str, Any], fixed: Mapping[str, Any], place: str = "") -> None:
    """Check that a configuration says nothing else than what is fixed here.

    Raises:
        ValueError: a setting has another value; the message names all of them.
    """
    if wrong := [
        f"{place}{key} is {raw[key]!r}, not {value!r}" for key, value in fixed.items() if raw.get(key, value) != value
    ]:
        raise ValueError("; ".join(wrong))


def renamed(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a configuration under our names; `keys` has the names there, by ours.

    Raises:
        ValueError: one of them is missing.
    """
    if missing := [key for key in keys.values() if key not in raw]:
        raise ValueError(f"{missing[0]!r} is missing")
    return {ours: raw[key] for ours, key in keys.items()}


SIZES_OF_TRANSFORMERS = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
"""The names of sizes in a `config.json` of `transformers`, by ours."""
