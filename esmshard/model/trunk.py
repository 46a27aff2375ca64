"""What the models of all families have in common: blocks over packed sequences, between an embedding and an LM head.

`esmshard.batch` explains the letters of tensor names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.attention import OnAttention
from esmshard.model.config import ModelConfig
from esmshard.vocab import SEPARATOR, TOKENS, Chains

GLYCINE = TOKENS.index("G")
ABSENT = -1e4
"""The logit of a token that a family lacks. Its probability is zero in every precision, and it is finite."""


class ContactRegression(nn.Module):
    """The holder of `contact_head.regression`, fair-esm's name: one weight for each attention head of every layer."""

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)


def embedding(rows: int, dim: int, padding_idx: int | None = None) -> nn.Embedding:
    """Make a table. The normal draw of `nn.Embedding` is avoided: on the meta device it imports the compiler, two
    seconds of every start.
    """
    return nn.Embedding(rows, dim, padding_idx, _weight=torch.empty(rows, dim).uniform_(-1, 1))


class TrunkOutput(NamedTuple):
    """The requested results of one forward pass. A tuple, so that FSDP finds the tensors in it."""

    representations: dict[int, torch.Tensor]
    """Representations x_TD by layer. Layer 0 is the scaled embedding; only the last layer includes the
    LayerNorm after the blocks.
    """
    logits_PV: torch.Tensor | None


class Pack:
    """The part of a pack's tokens that the blocks of a trunk compute: all of them. Where ranks divide the tokens,
    `esmshard.parallel` gives the trunk a subclass.
    """

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of a tensor that all ranks have computed alike."""
        return x_TD

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the tokens [T, D] of all ranks."""
        return x_RD

    def positions(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the positions of the tokens whose queries a block computes."""
        return batch


class Trunk(nn.Module, ABC):
    """A language model with its LM head and its contact regression. A family has a subclass.

    `layers` is a ModuleList of blocks `block(x_TD, batch, layer, on_attention) -> x_TD`, on which `esmshard.parallel`
    relies. Under `torch.device("meta")` the model has shapes and takes no memory;
    `esmshard.model.weights` fills it.
    """

    tied: ClassVar[Mapping[str, str]] = {}
    """Names that mean the tensor of another name, which alone is stored."""
    never_learns: ClassVar[tuple[str, ...]] = ("contact_head.",)
    """Beginnings of the names of parameters that no fine-tuning changes, since no loss depends on them, or too little.
    """
    learns_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """By the name of a track (`esmshard.vocab.Track`), beginnings of the names of parameters that `never_learns` names,
    too, and that learn nevertheless where batches have this track.
    """

    config: ModelConfig
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    lm_head: nn.Module
    contact_head: ContactRegression
    shared_on: torch.device | None = None
    """The device of this process while several processes compute the model together, or in another precision than that
    of its weights. Calls then come one after the other. None for a model that this process has for itself.
    """

    called_through: Callable[..., TrunkOutput] | None = None
    """A function that makes a call of the trunk one of all processes (`esmshard.parallel.shard.shared_calls`): its
    arguments are the call of the module and what the trunk is called with.
    """

    pack = Pack()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Call the module, as torch does, or as `called_through` says."""
        call = super().__call__
        return call(*given, **options) if self.called_through is None else self.called_through(call, *given, **options)

    @property
    def device(self) -> torch.device:
        """The device that computes, which is that of the weights, unless these are kept elsewhere."""
        return self.shared_on or self.embed_tokens.weight.device

    @abstractmethod
    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Compute the input x [T, D] of the first block."""

    @abstractmethod
    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the LayerNorm after the last block to x [T, D]."""

    def run_block(
        self, index: int, x_TD: torch.Tensor, batch: TokenBatch, on_attention: OnAttention | None
    ) -> torch.Tensor:
        """Apply block `index` to x [T, D]."""
        return self.layers[index](x_TD, batch, index, on_attention)  # type: ignore[no-any-return]

    def tie_weights(self) -> None:
        """Make the names in `tied` share their tensor again; `to_empty` gives each name a separate tensor."""

    def forward(
        self,
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Run the trunk over a packed batch.

        Args:
            batch: N sequences, T tokens in all.
            layers: which representations to return, 0 (embedding) to `n_layers`; by default the last. Blocks after the
                highest are not run, unless logits are asked for or `layers` is empty.
            logits_at: int64 [P], places in the pack at which to compute LM logits. None computes none.
            on_attention: called as `on_attention(layer, sequence, q_THK, k_THK)`; see `esmshard.model.attention`.

        Raises:
            InputError: a sequence is longer than a model with learned positions allows.
        """
        wanted = {self.config.n_layers} if layers is None else set(layers)
        if wanted - set(range(self.config.n_layers + 1)):
            raise ValueError(f"layers {sorted(wanted)}: this model has 0 to {self.config.n_layers}")
        batch = as_read(batch, self.config.chains)
        x_TD = self.embed(batch)
        representations = {0: x_TD} if 0 in wanted else {}
        needed = self.config.n_layers
        if logits_at is None and wanted:
            needed = max(wanted)  # Layers that no result needs are not computed.
        x_TD = self.pack.own(x_TD)
        batch = self.pack.positions(batch)
        for index in range(len(self.layers)):
            if index == needed:
                return TrunkOutput(representations, None)
            x_TD = self.run_block(index, x_TD, batch, on_attention)
            if index + 1 in wanted and index + 1 < self.config.n_layers:
                representations[index + 1] = self.pack.all(x_TD)
        x_TD = self.finish(self.pack.all(x_TD))
        if self.config.n_layers in wanted:
            representations[self.config.n_layers] = x_TD
        logits_PV = self.lm_head(x_TD[logits_at]) if logits_at is not None else None
        return TrunkOutput(representations, logits_PV)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile each block in place, once for all lengths. Parameter names do not change."""
        for block in self.layers:
            block.compile(dynamic=True, backend=backend)


def as_read(batch: TokenBatch, chains: Chains) -> TokenBatch:
    """Return a batch with the linkers between chains as a model reads them: glycines, or tokens of a chain break, and
    positions with a gap. Heads and losses get the batch with `SEPARATOR` tokens.
    """
    if not batch.linked_N:
        return batch
    between_T = batch.tokens_T == SEPARATOR
    tokens_T, position_T = batch.tokens_T, batch.position_T
    if chains.linker != "break":
        tokens_T = tokens_T.masked_fill(between_T, GLYCINE)
    if chains.gap:
        # The chains before each token, counted by the ends of linkers over the pack, less those of earlier sequences.
        ends_T = F.pad(between_T[:-1] & ~between_T[1:], (1, 0)).long().cumsum(0)
        before_N = ends_T[batch.cu_seqlens[:-1].long()]
        lengths_N = batch.cu_seqlens.diff().long()
        before_T = torch.repeat_interleave(before_N, lengths_N, output_size=batch.bounds[-1])
        position_T = position_T + chains.gap * (ends_T - before_T)
    return replace(batch, tokens_T=tokens_T, position_T=position_T)
