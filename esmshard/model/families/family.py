"""`Family`: everything that the rest of the package needs to know about a family of models."""

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
"""The type of `encoder(weight_file, coordinates_L33, device)`, which returns codes [L]. Coordinates are in Ångström."""


@dataclass(frozen=True)
class Released:
    """A model that its authors published."""

    repository: str
    """OWNER/NAME on the Hugging Face hub."""
    licence: str
    """Licence of the weights, by its SPDX name in lower case, as the hub writes it."""
    holder: str
    """Holder of the copyright."""
    paper: str
    """The publication: authors, year, journal and DOI or address."""


class Piece(NamedTuple):
    """One of our tensors in a file: the tensor of a key, or some rows of the tensor."""

    name: str
    rows: slice = slice(None)


@dataclass(frozen=True)
class Names:
    """The names of tensors in a layout of files, from our names."""

    block: str
    """The text before the number of a block, which is `layers.` in our names."""
    in_block: Mapping[str, str]
    """Names of the modules of a block, by our names."""
    others: Mapping[str, str]
    """Different beginnings of the names of other tensors, by our beginnings. The first match counts."""

    def theirs(self, name: str) -> str | None:
        """Return the name in the file of one of our tensors; None for a tensor of a block that the file lacks."""
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name):
            module = self.in_block.get(match[2])
            return module and f"{self.block}{match[1]}.{module}.{match[3]}"
        return _moved(name, self.others)

    def ours(self, key: str) -> str:
        """Return our name of a tensor in the file. An unknown key is returned unchanged."""
        names = {theirs: ours for ours, theirs in self.in_block.items()}
        match = re.fullmatch(rf"{re.escape(self.block)}(\d+)\.(.+)\.(\w+)", key)
        if match and match[2] in names:
            return f"layers.{match[1]}.{names[match[2]]}.{match[3]}"
        return _moved(key, {theirs: ours for ours, theirs in self.others.items()})


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    """Exchange the prefix of a name."""
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


@dataclass(frozen=True)
class AuthorsFile:
    """How `torch.save` writes a file for the authors' code."""

    use: str
    """Python code that opens FILE, for the model card."""
    code: str
    """Name and address of the authors' code in Markdown, for the model card."""
    lacks: tuple[str, ...] = ("head.",)
    """Prefixes of our tensors that the file cannot hold."""
    our_names: bool = False
    """Whether the file has our names of tensors, and not the names in the family's directories."""

    def path(self, directory: Path, stem: str, config: Any) -> Path:
        """Return the path of the file for a model with this name and architecture."""
        return directory / f"{stem}.pth"

    def write(self, file: Path, config: Any, tensors: dict[str, torch.Tensor]) -> list[Path]:
        """Write tensors without tied tensors, by their names in the file. Return the paths of all files."""
        torch.save(tensors, file)
        return [file]


class Corruption(NamedTuple):
    """How training corrupted the residues that a model had to predict and that were not `<mask>`."""

    random: float
    """Share of these residues that became a random letter."""
    unchanged: float
    """Share of these residues that stayed."""
    letters: int
    """Number of equally frequent random letters."""


class Opened(NamedTuple):
    """The content of a file of the authors' code."""

    config: ModelConfig
    tensors: dict[str, WeightReader]
    """Readers of the tensors, by our names."""
    files: tuple[Path, ...]
    """All files with tensors."""


def is_computed(name: str) -> bool:
    """Return whether a file may lack a tensor, since it follows from the architecture (rotary frequencies)."""
    return name.endswith("inv_freq")


class Family(ABC):
    """A family of models: architectures, files, initial values and publications.

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
    """The publication of the architecture, in the form of `Released.paper`."""
    window: ClassVar[int]
    """Residues that the models saw at once in training, unless the configuration of a model says another number. Longer
    proteins are scored and embedded in windows of this length."""
    corruption: ClassVar[Corruption | None] = None
    """How training corrupted residues, for estimates of masked probabilities from visible residues. None if this is
    unknown, or if all residues to predict were masked."""
    tracks: ClassVar[tuple[Track, ...]] = ()
    """The tracks that the models read in addition to amino acids, if the user gives them."""
    encoders: ClassVar[Mapping[str, Encoder]] = {}
    """Functions that compute a track of codes, by the name of the track."""
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {}
    """The files for the authors' code that can be written, by the word after `consolidate --to`."""

    # Directories in the layout of `transformers`.
    model_types: ClassVar[tuple[str, ...]]
    """The values of `model_type` in the `config.json` files of this family."""
    vocab_size: ClassVar[int | None] = None
    """The value of `vocab_size` in `config.json`, if other families have the same `model_type`."""
    names: ClassVar[Names]
    """The names of tensors in written directories."""
    prefix: ClassVar[str] = ""
    """The prefix of the keys of the trunk, such as `esm.`, which files of a model without LM head lack."""
    model_class: ClassVar[str] = ""
    """The class of `transformers` that reads written directories; empty if only esmshard reads them."""
    remote_code: ClassVar[bool] = False
    """Whether the class is in a repository on the hub, which `auto_map` in `config.json` names."""

    @property
    def name(self) -> str:
        """The name in checkpoints and in `FAMILIES`."""
        return self.config.family

    def initial(self, config: Any, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Draw a tensor of a new model: matrices are normal with deviation 0.02, biases 0, weights of norms 1."""
        if is_computed(name):
            return inverse_frequencies(config.head_dim)
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return 0.02 * torch.randn(shape, generator=generator)

    @abstractmethod
    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the architecture of a `config.json` with one of `model_types`."""

    @abstractmethod
    def write_config(self, config: Any) -> dict[str, Any]:
        """Return the content of a `config.json` for this architecture."""

    @abstractmethod
    def pieces(self, key: str, config: Any) -> Sequence[Piece]:
        """Return our tensors in a key of a directory or of the authors' files. An unused key has no tensors, and an
        unknown key has the tensor of the same name.
        """

    def tensors(self, readers: Mapping[str, WeightReader], config: Any) -> dict[str, WeightReader]:
        """Return readers by our names, from readers by the keys of a file."""
        pieces = [(piece, reader) for key, reader in readers.items() for piece in self.pieces(key, config)]
        return {piece.name: reader.part(piece.rows) for piece, reader in pieces}

    def key(self, name: str) -> str | None:
        """Return the key under which one of our tensors is written; None for a tensor that is not written, since it
        follows from the architecture. Tensors with the same key are joined along the rows in the order of `pieces`.
        """
        return self.names.theirs(name)

    def write_tokenizer(self, directory: Path) -> None:  # noqa: B027  # ESM3 has none
        """Write the tokenizer files of `transformers` to a directory."""

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Read the content of the authors' file at this path; None for another kind of file."""
        return None


def check_settings(raw: Mapping[str, Any], fixed: Mapping[str, Any], place: str = "") -> None:
    """Raise `ValueError` with all settings of a configuration that differ from the fixed values."""
    if wrong := [
        f"{place}{key} is {raw[key]!r}, not {value!r}" for key, value in fixed.items() if raw.get(key, value) != value
    ]:
        raise ValueError("; ".join(wrong))


def renamed(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return values of a configuration by our names; `keys` has the names in the configuration, by our names. Raises
    `ValueError` if a value is missing.
    """
    if missing := [key for key in keys.values() if key not in raw]:
        raise ValueError(f"{missing[0]!r} is missing")
    return {ours: raw[key] for ours, key in keys.items()}


SIZES_OF_TRANSFORMERS = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
"""The names of sizes in a `config.json` of `transformers`, by ours."""
