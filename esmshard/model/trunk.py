"""Defines `Trunk`, the base class of all models. `esmshard.batch` explains the letters of tensor names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError, UsageError
from esmshard.model.attention import OnAttention
from esmshard.model.config import ModelConfig
from esmshard.vocab import SEPARATOR, TOKENS, Chains

GLYCINE = TOKENS.index("G")
ABSENT = -1e4
"""The logit of a token that a model lacks. This number is finite, but its softmax is zero in every precision."""


class ContactRegression(nn.Module):
    """The parameters of the contact regression, with fair-esm's names: a weight for each attention head, and a bias."""

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)


def embedding(rows: int, dim: int, padding_idx: int | None = None) -> nn.Embedding:
    """Make an embedding table. Without `_weight`, `nn.Embedding` on `meta` would import torch's compiler (2 s)."""
    return nn.Embedding(rows, dim, padding_idx, _weight=torch.empty(rows, dim).uniform_(-1, 1))


class TrunkOutput(NamedTuple):
    """The result of a forward pass. It is a tuple, because FSDP does not find tensors in a dataclass."""

    representations: dict[int, torch.Tensor]
    """Representations [T, D] by layer. Layer 0 is the embedding. The final norm is applied only to the last layer."""
    logits_PV: torch.Tensor | None


class Pack:
    """Selects the tokens that this process computes in the blocks. This class selects all tokens. If several processes
    divide the tokens, `esmshard.parallel` uses a subclass.
    """

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, D] of this rank's tokens."""
        return x_TD

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Collect the rows [T, D] of all tokens from the rows [R, D] of each rank."""
        return x_RD

    def positions(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with `position_T` of this rank's tokens only."""
        return batch


class Trunk(nn.Module, ABC):
    """A language model with LM head and contact regression, if it has them. Each model family defines a subclass.

    For `esmshard.parallel`, each block in `layers` must accept `block(x_TD, batch, layer, on_attention)` and return
    x [T, D]. Models are made on the device `meta`, without memory for values. `esmshard.model.weights` loads the values
    later.
    """

    tied: ClassVar[Mapping[str, str]] = {}
    """For each tensor that has two names: the second name, mapped to the first name. Files have only the first name."""
    never_learns: ClassVar[tuple[str, ...]] = ("contact_head.",)
    """The prefixes of the names of parameters that are never trained, or only with a track of `learns_with`."""
    learns_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """By track name, the prefixes of parameters in `never_learns` that are trained if batches have this track."""

    config: ModelConfig
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    lm_head: nn.Module
    """The LM head. Models with `ModelConfig.only_represents` have neither an LM head nor a contact head."""
    contact_head: ContactRegression
    shared_on: torch.device | None = None
    """The device of this process while several processes share the model, or while the precisions of arithmetic and
    weights differ; otherwise None. If the device is set, only one call of the model may run at a time."""
    called_through: Callable[..., TrunkOutput] | None = None
    """A function that makes all processes call the trunk (`esmshard.parallel.shard.shared_calls`). Its arguments are
    torch's `__call__` and the arguments of the call. None if processes do not share the model."""
    pack = Pack()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the trunk, through `called_through` if it is set."""
        call = super().__call__
        return call(*args, **kwargs) if self.called_through is None else self.called_through(call, *args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes. The weights may stay on the CPU."""
        return self.shared_on or self.embed_tokens.weight.device

    @abstractmethod
    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Compute the input x [T, D] of the first block."""

    @abstractmethod
    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the norm after the last block to x [T, D]."""

    def for_blocks(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with what the blocks read in addition, such as `TokenBatch.distance_bias`."""
        return batch

    def run_block(
        self, index: int, x_TD: torch.Tensor, batch: TokenBatch, on_attention: OnAttention | None
    ) -> torch.Tensor:
        """Apply block `index` to x [T, D]."""
        return self.layers[index](x_TD, batch, index, on_attention)  # type: ignore[no-any-return]

    def tie_weights(self) -> None:
        """Let both names of a tensor in `tied` refer to one tensor again, after torch's `to_empty` has made two."""

    def forward(
        self,
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Run the trunk over a packed batch. Raises `InputError` if a sequence is too long for the position embeddings,
        and `UsageError` if a model that only computes representations gets `logits_at` or `on_attention`.

        Args:
            batch: N sequences with T tokens in total.
            layers: the layers to return representations for, from 0 (embedding) to `n_layers`; by default the last.
                Blocks after the highest of these run only if `logits_at` is given or `layers` is empty.
            logits_at: int64 [P], indices of the tokens that get LM logits; None for no logits.
            on_attention: see `esmshard.model.attention.OnAttention`.
        """
        if self.config.only_represents and not (logits_at is None and on_attention is None):
            raise UsageError(
                f"models of the family {self.config.family} compute representations only: they have no LM head, and "
                "their attention maps cannot be read; choose a model of another family"
            )
        wanted = {self.config.n_layers} if layers is None else set(layers)
        if wanted - set(range(self.config.n_layers + 1)):
            raise ValueError(f"layers {sorted(wanted)}: this model has layers 0 to {self.config.n_layers}")
        if (most := self.config.most_tokens) is not None and batch.max_seqlen > most:
            n = batch.token_counts.index(batch.max_seqlen)
            raise InputError(
                f"record {batch.record_ids[n]}: {batch.lengths[n]} residues, but this model has position embeddings "
                f"for only {most - 2} residues; cut the sequence, or use an ESM-2"
            )
        batch = as_read(batch, self.config.chains)
        x_TD = self.embed(batch)
        representations = {0: x_TD} if 0 in wanted else {}
        needed = self.config.n_layers
        if logits_at is None and wanted:
            needed = max(wanted)
        x_TD = self.pack.own(x_TD)
        batch = self.pack.positions(self.for_blocks(batch))
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
        """Compile each block in place, for batches of any size. Parameter names do not change."""
        for block in self.layers:
            block.compile(dynamic=True, backend=backend)


def as_read(batch: TokenBatch, chains: Chains) -> TokenBatch:
    """Return the batch with the tokens and positions that the trunk reads. The `SEPARATOR` tokens between chains become
    glycines, except with `linker:break`. Each linker adds `chains.gap` to the positions of all later tokens in its
    sequence. Heads and losses read the original batch.
    """
    if not batch.linked_N:
        return batch
    between_T = batch.tokens_T == SEPARATOR
    tokens_T, position_T = batch.tokens_T, batch.position_T
    if chains.linker != "break":
        tokens_T = tokens_T.masked_fill(between_T, GLYCINE)
    if chains.gap:
        # The linkers before each token in the pack, minus the linkers in earlier sequences.
        ends_T = F.pad(between_T[:-1] & ~between_T[1:], (1, 0)).long().cumsum(0)
        before_N = ends_T[batch.cu_seqlens[:-1].long()]
        lengths_N = batch.cu_seqlens.diff().long()
        before_T = torch.repeat_interleave(before_N, lengths_N, output_size=batch.bounds[-1])
        position_T = position_T + chains.gap * (ends_T - before_T)
    return replace(batch, tokens_T=tokens_T, position_T=position_T)
