"""What all comparisons with other libraries' models share; `esmshard.verify.certificate` makes the comparisons.

A family has a module of peers. Tensors are copied one by one into the other library's class. Tokens, padding, forward
pass and contacts are those of the other library. No other file imports it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

import torch
from torch import nn

from esmshard.model.config import ModelConfig
from esmshard.model.families import family_registry

BLOCK = 1024
"""The most tokens of a padded batch, with padding; a longer sequence is a batch of its own."""
MAP_BYTES = 8 << 30
"""The bytes of attention maps above which a peer computes no contacts, since it has maps of all layers at once."""
MAP_COPIES = 6
"""The copies of all maps that exist at the same time: computed, stacked, symmetrized, corrected. Measured: 6.1 in
fair-esm, 5.1 in `transformers`.
"""


class NamedSequence(Protocol):
    """A protein, such as a record of a FASTA file."""

    @property
    def id(self) -> str:
        """Its name."""
        ...

    @property
    def sequence(self) -> str:
        """Its residues."""
        ...


class ModelWeights(Protocol):
    """The weights of a model, by our names."""

    @property
    def config(self) -> ModelConfig:
        """Its architecture."""
        ...

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        ...


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for one sequence of L residues, fp32, on the CPU."""

    tokens: list[int]
    """The tokens of the sequence, L + 2."""
    layers: list[torch.Tensor]
    """The embeddings of each layer, [L + 2, D]; layer 0 is the input embedding."""
    means: list[torch.Tensor]
    """The mean over residues of each layer, [D]."""
    logits: torch.Tensor
    """The logits, [L + 2, V]."""
    contacts: torch.Tensor | None
    """The contact probabilities, [L, L]; None if the maps would take more than MAP_BYTES."""


class AbsentError(Exception):
    """No comparison with a peer is possible. The error has the reason and the fix."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)
        self.reason, self.fix = reason, fix


@dataclass(frozen=True)
class Peer:
    """Another library's model with our weights."""

    name: str
    """The name of the library, with its version."""
    run: Callable[[Sequence[NamedSequence]], Iterator[tuple[int, Outputs]]]
    """A function that yields the number and the outputs of each record, each record once, in any order."""


MakePeer = Callable[[ModelWeights, torch.device], Peer]
"""A function that makes a peer, or raises `AbsentError` if no comparison with it is possible."""


def maps_fit(config: ModelConfig, tokens_BT: torch.Tensor) -> bool:
    """Return whether a peer computes the contacts of this block. The tokens include padding."""
    rows, longest = tokens_BT.shape
    return 4 * MAP_COPIES * config.n_maps * rows * longest**2 <= MAP_BYTES


def version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def fill(
    module: nn.Module, found: ModelWeights, ours: Callable[[str], tuple[str, ...]], lacks: tuple[str, ...] = ()
) -> None:
    """Copy every tensor into a module of another library; `ours` returns our names of each of its tensors.

    The module has none of the tensors whose names begin with one of `lacks`.

    Parameters and buffers are used instead of the state_dict, which lacks the rotary table in some versions of
    `transformers`.
    """
    with torch.device("meta"):
        wanted = {name for name in family_registry.build(found.config).state_dict() if not name.startswith(lacks)}
    filled: set[str] = set()
    with torch.no_grad():
        for key, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            names = ours(key)
            for name in names:
                if name != names[0] and not torch.equal(found[name], found[names[0]]):
                    raise AbsentError(f"holds one {key} where these weights have several", "this cannot be fixed")
            if names:
                tensor.copy_(found[names[0]])
            filled.update(names)
    if filled != wanted:
        raise AbsentError(f"has other tensors ({', '.join(sorted(filled ^ wanted)[:3])})", "install another version")


def blocks(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield places of sequences, shortest first, in blocks of at most BLOCK tokens with padding. A longer sequence is
    alone.
    """
    group: list[int] = []
    for n in sorted(range(len(tokens)), key=lambda n: tokens[n]):
        if group and tokens[n] * (len(group) + 1) > BLOCK:
            yield group
            group = []
        group.append(n)
    yield group


def outputs_of(
    row: int,
    length: int,
    tokens_BT: torch.Tensor,
    layers: Sequence[torch.Tensor],
    logits: torch.Tensor,
    contacts: torch.Tensor | None,
) -> Outputs:
    """Return one row of a padded batch, without the padding."""
    own = [x[row, : length + 2] for x in layers]
    return Outputs(
        tokens_BT[row, : length + 2].tolist(),
        [x.cpu() for x in own],
        [x[1 : length + 1].mean(0).cpu() for x in own],
        logits[row, : length + 2].cpu(),
        None if contacts is None else contacts[row, :length, :length].cpu(),
    )
