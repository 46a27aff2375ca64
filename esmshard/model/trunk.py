"""`Trunk`, the common base of all models: an embedding, blocks over packed sequences, and an LM head.

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
"""The logit of a token that a family lacks. The logit is finite, and the probability is zero in every precision."""


class ContactRegression(nn.Module):
    """Holds `contact_head.regression`, as fair-esm names it: one weight for each attention head of every layer."""

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)


def embedding(rows: int, dim: int, padding_idx: int | None = None) -> nn.Embedding:
    """Make a table without the draw of `nn.Embedding`, which on the meta device imports the compiler (2 seconds)."""
    return nn.Embedding(rows, dim, padding_idx, _weight=torch.empty(rows, dim).uniform_(-1, 1))


class TrunkOutput(NamedTuple):
    """The requested results of one forward pass. FSDP finds the tensors in a tuple."""

    representations: dict[int, torch.Tensor]
    """Representations x_TD by layer. Layer 0 is the scaled embedding. Only the last layer has the final norm."""
    logits_PV: torch.Tensor | None


class Pack:
    """The tokens of a pack that the blocks of a trunk compute: all tokens. If ranks divide the tokens,
    `esmshard.parallel` gives the trunk a subclass.
    """

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of a tensor that all ranks have."""
        return x_TD

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the tokens [T, D] of all ranks."""
        return x_RD

    def positions(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the positions of this rank's tokens."""
        return batch


class Trunk(nn.Module, ABC):
    """A language model with its LM head and its contact regression. A family has a subclass.

    `esmshard.parallel` relies on blocks `block(x_TD, batch, layer, on_attention) -> x_TD` in `layers`. Under
    `torch.device("meta")` the model has shapes and takes no memory. `esmshard.model.weights` fills the model.
    """

    tied: ClassVar[Mapping[str, str]] = {}
    """Names of tied tensors. The value is the name under which the same tensor is stored."""
    never_learns: ClassVar[tuple[str, ...]] = ("contact_head.",)
    """Prefixes of parameters that no fine-tuning changes, since losses depend little or not at all on them."""
    learns_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Exceptions from `never_learns`: prefixes of parameters that learn if batches have a track, by track name."""

    config: ModelConfig
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    lm_head: nn.Module
    contact_head: ContactRegression
    shared_on: torch.device | None = None
    """The device of this process while several processes share the model, or while the arithmetic has another precision
    than the weights. Calls then must follow each other. None otherwise.
    """
    called_through: Callable[..., TrunkOutput] | None = None
    """A function that makes a call of the trunk a call of all processes (`esmshard.parallel.shard.shared_calls`). Its
    arguments are the module's own `__call__` and the arguments of the trunk.
    """
    pack = Pack()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as torch does, or through `called_through`."""
        call = super().__call__
        return call(*args, **kwargs) if self.called_through is None else self.called_through(call, *args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device that computes: the device of the weights, unless the weights are kept on another device."""
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
        """Make tied names share a tensor again, after `to_empty` has given each name a separate tensor."""

    def forward(
        self,
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Run the trunk over a packed batch. Raises `InputError` for a sequence with too many learned positions.

        Args:
            batch: N sequences, T tokens in all.
            layers: representations to return, from 0 (embedding) to `n_layers`; by default the last. Blocks after the
                highest requested layer are skipped, unless logits are requested or `layers` is empty.
            logits_at: int64 [P], places in the pack at which to compute LM logits; None for no logits.
            on_attention: see `esmshard.model.attention.OnAttention`.
        """
        wanted = {self.config.n_layers} if layers is None else set(layers)
        if wanted - set(range(self.config.n_layers + 1)):
            raise ValueError(f"layers {sorted(wanted)}: this model has 0 to {self.config.n_layers}")
        batch = as_read(batch, self.config.chains)
        x_TD = self.embed(batch)
        representations = {0: x_TD} if 0 in wanted else {}
        needed = self.config.n_layers
        if logits_at is None and wanted:
            needed = max(wanted)
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
    """Return the batch that the embedding reads: linkers between chains become glycines or chain breaks, and positions
    get gaps. Heads and losses see the batch with `SEPARATOR` tokens.
    """
    if not batch.linked_N:
        return batch
    between_T = batch.tokens_T == SEPARATOR
    tokens_T, position_T = batch.tokens_T, batch.position_T
    if chains.linker != "break":
        tokens_T = tokens_T.masked_fill(between_T, GLYCINE)
    if chains.gap:
        # Linkers before each token in the pack, minus the linkers of earlier sequences.
        ends_T = F.pad(between_T[:-1] & ~between_T[1:], (1, 0)).long().cumsum(0)
        before_N = ends_T[batch.cu_seqlens[:-1].long()]
        lengths_N = batch.cu_seqlens.diff().long()
        before_T = torch.repeat_interleave(before_N, lengths_N, output_size=batch.bounds[-1])
        position_T = position_T + chains.gap * (ends_T - before_T)
    return replace(batch, tokens_T=tokens_T, position_T=position_T)
