"""`Family`, the record of everything that the rest of the package needs to know of a family of models. No torch.

What needs torch is behind functions, which import it when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from esmshard.model.config import ModelConfig
from esmshard.vocab import Track

if TYPE_CHECKING:
    import torch


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
    """The publication of the model, as BibTeX."""


class Piece(NamedTuple):
    """One of our tensors in a file: the whole tensor of a key, or some of its rows."""

    name: str
    rows: slice = slice(None)


@dataclass(frozen=True)
class TransformersFiles:
    """How directories in the layout of `transformers` name the tensors and sizes of a family.

    All functions raise `ValueError` with a reason.
    """

    model_types: tuple[str, ...]
    """The values of `model_type` in the `config.json` files of this family."""
    vocab_size: int | None = field(default=None, kw_only=True)
    """The value of `vocab_size` there, where other families have the same `model_type`."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """Return the architecture that a `config.json` of one of these types describes."""
    pieces: Callable[[str, Any], Sequence[Piece]]
    """Return our tensors in a key of a `transformers` directory; none for a key that the model does not use. An unknown
    key is returned as it is."""
    write_config: Callable[[Any], dict[str, Any]]
    """Return the content of the `config.json` that is written."""
    key: Callable[[str], str | None]
    """Return the key under which one of our tensors is written to a `transformers` directory; None for a tensor that is
    not written, because it follows from the architecture. Tensors with the same key are joined, one below the other in
    the order of `pieces`."""
    write_tokenizer: Callable[[Path], None]
    """Write the files from which `transformers` makes its tokenizer to a directory."""
    model_class: str
    """The class of `transformers` that reads what is written. Empty for a family that `transformers` does not have:
    only esmshard reads its directories."""
    model_module: str
    """The module of this class."""
    prefix: str = ""
    """What begins the keys of the trunk, and is absent in the files of a model without LM head, such as `esm.`."""
    remote_code: bool = False
    """Whether the class is code in a repository on the hub, which `auto_map` in `config.json` names."""

    @property
    def call(self) -> str:
        """The call that reads what is written, for texts."""
        more = "(DIRECTORY, trust_remote_code=True)" if self.remote_code else ""
        return f"transformers.{self.model_class}.from_pretrained{more}"


@dataclass(frozen=True)
class AuthorsFile:
    """How `torch.save` writes a file for the code of a family's authors."""

    path: Callable[[Path, str, Any], Path]
    """Return the path of the file for a model of a name and architecture: `path(directory, name, config)`."""
    write: Callable[[Path, Any, dict[str, torch.Tensor]], list[Path]]
    """Write tensors, by our names and without the tied ones: `write(path, config, tensors)`. Return all files."""
    use: str
    """Python code that opens a file FILE, for the model card."""
    code: str
    """The name and address of the authors' code, in Markdown, for the model card."""
    joined: Callable[[Any], Mapping[str, tuple[str, ...]]] = lambda config: {}
    """Return, for an architecture, the tensors of the file that are several of ours, one below the other: our names, by
    the name under which `write` gets the whole."""
    lacks: tuple[str, ...] = ("head.",)
    """Beginnings of our names of tensors that the file cannot hold."""


class Corruption(NamedTuple):
    """What models saw in training in place of the residues that they were asked for, where it was not `<mask>`."""

    random: float
    """The share of these residues that were replaced by a letter drawn at random."""
    unchanged: float
    """The share of these residues that stayed."""
    letters: int
    """The number of letters that were drawn from, each as often."""


@dataclass(frozen=True)
class Family:
    """A family of models: shapes, files, initial values, and what may be said about its models."""

    name: str
    """The name in checkpoints and in `FAMILIES`."""
    title: str
    """The name in texts."""
    config: type[ModelConfig]
    sizes: Mapping[str, ModelConfig]
    """Architectures by name, released or not."""
    released: Mapping[str, Released]
    """Released models by name. Their architectures are in `sizes`."""
    paper: str
    """The publication of the architecture, as BibTeX."""
    window: int
    """Residues that the models saw at once in training, unless their configuration says another number. Longer proteins
    are scored and embedded in such windows."""
    corruption: Corruption | None = field(default=None, kw_only=True)
    """What the models saw in training, for estimates of masked probabilities from visible residues; None if that is not
    known, or all residues that they were asked for were masked."""
    trunk: str
    """The subclass of `esmshard.model.trunk.Trunk`, as `module:Class`, which takes an architecture."""
    initial: Callable[[Any, str, torch.Size, torch.Generator], torch.Tensor]
    """Return the initial values of a tensor of a new model: `initial(config, name, shape, generator)`."""
    files: TransformersFiles
    read_pickle: str | None
    """The function that reads files of the authors' own code, as `module:function`; None if they publish none. Of the
    content of a file and its path, it returns the architecture, readers of the tensors by our names, and all files that
    hold them; or None if it is no such file. It raises `ValueError` or `InputError` for a model that cannot be read."""
    pickles: Mapping[str, str]
    """The `AuthorsFile` objects of the files that can be written, as `module:name`, by their word in
    `consolidate --to`."""
    computed: Callable[[str], bool] = lambda name: name.endswith("inv_freq")
    """Whether a tensor follows from the architecture, so that a file may lack it. Rotary frequencies do."""
    tracks: tuple[Track, ...] = ()
    """What the models read of each residue besides its amino acid, if the user gives it."""
    encoders: Mapping[str, str] = field(default_factory=dict)
    """Functions that compute a track of codes, by its name, as `module:function`: of a file of weights, the
    coordinates [L, 3, 3] of one protein and the computing device they return the codes [L]."""
