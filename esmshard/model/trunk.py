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
"""The logit of a token that a family lacks. It is finite, but gives a probability of zero in every precision."""


class ContactRegression(nn.Module):
    """The contact regression: one weight for each attention head of every layer. fair-esm has the same names."""

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)


def embedding(rows: int, dim: int, padding_idx: int | None = None) -> nn.Embedding:
    """Make an embedding table. On the meta device, initial values of `nn.Embedding` would import the compiler (2 s)."""
    return nn.Embedding(rows, dim, padding_idx, _weight=torch.empty(rows, dim).uniform_(-1, 1))


class TrunkOutput(NamedTuple):
    """The requested results of one forward pass; None for logits that were not requested. FSDP needs a tuple here."""

    representations: dict[int, torch.Tensor]
    """Representations x_TD by layer. Layer 0 is the embedding. Only the last layer's includes the final norm."""
    logits_PV: torch.Tensor | None


class Pack:
    """Selects the tokens of a pack that this process computes in the blocks: here, all tokens. If ranks divide the
    tokens, `esmshard.parallel` replaces this object by one of a subclass.
    """

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, D] of this rank's tokens from a tensor [T, D] that all ranks have."""
        return x_TD

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, D] of all ranks' tokens."""
        return x_RD

    def positions(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the positions of this rank's tokens."""
        return batch


class Trunk(nn.Module, ABC):
    """A language model with its LM head and its contact regression. Each family defines a subclass.

    `esmshard.parallel` relies on blocks `block(x_TD, batch, layer, on_attention) -> x_TD` in `layers`. Made under
    `torch.device("meta")`, the model takes no memory. `esmshard.model.weights` then loads its values.
    """

    tied: ClassVar[Mapping[str, str]] = {}
    """The second name of each shared tensor, mapped to the name under which files store the tensor."""
    never_learns: ClassVar[tuple[str, ...]] = ("contact_head.",)
    """Prefixes of parameters that no fine-tuning changes, because losses depend little or not at all on them."""
    learns_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """By name of a track, prefixes of parameters that learn if batches have this track, despite `never_learns`."""

    config: ModelConfig
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    lm_head: nn.Module
    contact_head: ContactRegression
    shared_on: torch.device | None = None
    """The device of this process while several processes share the model, or while the precision of the arithmetic is
    not the precision of the weights. Then only one call may run at a time. None otherwise.
    """
    called_through: Callable[..., TrunkOutput] | None = None
    """A function that replaces a call of the trunk by a call in which all processes take part
    (`esmshard.parallel.shard.shared_calls`). Its arguments are torch's `__call__` and the arguments of the trunk.
    """
    pack = Pack()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the trunk, through `called_through` if this function is set."""
        call = super().__call__
        return call(*args, **kwargs) if self.called_through is None else self.called_through(call, *args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device that computes. It is the device of the weights unless the weights stay in the CPU's memory."""
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
        """Make tied names share one tensor again. torch's `to_empty` gives each name a separate tensor."""

    def forward(
        self,
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Run the trunk over a packed batch. Raises `InputError` for a sequence longer than the learned positions.

        Args:
            batch: N sequences, T tokens in all.
            layers: the layers whose representations to return, from 0 (embedding) to `n_layers`; by default the last.
                Blocks after the highest of these layers run only for `logits_at` or an empty `layers`.
            logits_at: int64 [P], indices in the pack of the tokens that get LM logits; None for no logits.
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
        """Compile each block in place, once for packs of any size. Parameter names do not change."""
        for block in self.layers:
            block.compile(dynamic=True, backend=backend)


def as_read(batch: TokenBatch, chains: Chains) -> TokenBatch:
    """Return the batch that the embedding reads. `SEPARATOR` tokens become glycines, or stay as chain breaks, and each
    linker adds `chains.gap` to later positions. Heads and losses read the original batch.
    """
    if not batch.linked_N:
        return batch
    between_T = batch.tokens_T == SEPARATOR
    tokens_T, position_T = batch.tokens_T, batch.position_T
    if chains.linker != "break":
        tokens_T = tokens_T.masked_fill(between_T, GLYCINE)
    if chains.gap:
        # Count the linkers before each token in the pack, and subtract the linkers of earlier sequences.
        ends_T = F.pad(between_T[:-1] & ~between_T[1:], (1, 0)).long().cumsum(0)
        before_N = ends_T[batch.cu_seqlens[:-1].long()]
        lengths_N = batch.cu_seqlens.diff().long()
        before_T = torch.repeat_interleave(before_N, lengths_N, output_size=batch.bounds[-1])
        position_T = position_T + chains.gap * (ends_T - before_T)
    return replace(batch, tokens_T=tokens_T, position_T=position_T)
