"""The trunk of a model and the head of a task as one module."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.batch import Inputs, TokenBatch, batch_of
from esmshard.devices import exact_convolutions
from esmshard.errors import UsageError
from esmshard.model import weights
from esmshard.model.config import Quantization
from esmshard.model.lora import add_lora
from esmshard.model.quantized import packed_of, quantize
from esmshard.model.trunk import Trunk
from esmshard.model.weight_reader import WeightReader
from esmshard.model.weights import Weights

if TYPE_CHECKING:
    from esmshard.recipe.sections import AdaptSettings


class LanguageModelHead(nn.Module):
    """A module in the place of a head, for tasks that use the language model's own head. It has no parameters."""


class FineTuner(nn.Module):
    """Trunk and task head as one module, so that one FSDP root holds both. `forward` returns one tensor a record.

    The head's output; with the language model's own head, the logits at `TokenBatch.logits_at_P`.
    """

    def __init__(self, trunk: Trunk, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self._drawn: Mapping[str, WeightReader] = {}
        self.remembered: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        """Outputs of a frozen model that a task keeps, by a name and a key of the task, so that they are not computed
        twice. Those that ranks have computed for the baselines of a task are joined here.
        """

    @property
    def layers(self) -> nn.ModuleList:
        """The layers that `esmshard.parallel` shards."""
        return self.trunk.layers

    def forward(self, batch: TokenBatch, instead: Callable[[], Any] | None = None) -> Any:
        """Return N outputs in fp32, whatever the precision of the arithmetic.

        `instead` is called in place of the model, with the parameters that the model computes with: where ranks share
        a model, these exist only during this call (`esmshard.parallel.shard.shared_calls`).
        """
        if instead is not None:
            return instead()
        read_attention = getattr(self.head, "attention", None)
        attention = None if read_attention is None else read_attention(batch)
        on_attention = None if attention is None else attention.add
        layers, logits_PV = self.trunk(batch, logits_at=batch.logits_at_P, on_attention=on_attention)
        if self.asks_logits and logits_PV is not None:
            return list(logits_PV.float().split(batch.logit_counts))
        # A head may also read the logits of the language model, or what its `attention` has collected.
        also_read = logits_PV if getattr(self.head, "reads_logits", False) else attention
        x_TD = layers[self.trunk.config.n_layers]
        outputs = self.head(x_TD, batch) if also_read is None else self.head(x_TD, batch, also_read)
        return [output.float() for output in outputs]

    @torch.no_grad()
    def outputs(self, inputs: Sequence[Inputs]) -> list[npt.NDArray[np.float32]]:
        """Return the outputs of the head for some examples, computed on the device of the weights."""
        dtype = self.trunk.embed_tokens.weight.dtype
        # A head keeps fp32 weights; where those of the trunk are shorter, autocast brings the two together.
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)
        with mixed, exact_convolutions(self.device):
            return [output.cpu().numpy() for output in self(batch_of(inputs).to(self.device))]

    @torch.no_grad()
    def representations(self, inputs: Sequence[Inputs]) -> list[npt.NDArray[np.float32]]:
        """Return the last-layer representations [L, D] of the residues of some sequences."""
        batch = batch_of(inputs).to(self.device)
        x_TD = self.trunk(batch).representations[self.trunk.config.n_layers].float()
        return [x_LD.cpu().numpy() for x_LD in batch.residues(x_TD)]

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.trunk.device

    @property
    def asks_logits(self) -> bool:
        """Whether the task's head is the language model's own."""
        return isinstance(self.head, LanguageModelHead)

    def adapt(
        self,
        settings: "AdaptSettings",
        seed: int,
        tracks: Collection[str] = (),
        quantization: Quantization | None = None,
    ) -> None:
        """Choose the parameters that learn: the head, and the parts of the trunk that the recipe's `adapt` section
        names.

        What no output depends on never does: `Trunk.never_learns`, but for what learns with one of the tracks, and the
        LM head (all but the tied embedding) of tasks that ask for no logits.

        Args:
            settings: of the recipe.
            seed: of new LoRA matrices.
            tracks: names of the tracks that all batches have besides the sequence.
            quantization: how the matrices of the layers are stored, which then do not learn.
        """
        if quantization is not None:
            quantize(self.trunk.layers, self.trunk.config.matrices, quantization)
        trunk = self.trunk.requires_grad_(settings.method == "full")
        if settings.method == "lora":
            added = add_lora(trunk.layers, trunk.config.matrices, *settings.lora)
            self._drawn = weights.drawn(trunk.config, added, seed)
            for name, parameter in trunk.named_parameters():
                parameter.requires_grad_(name in added or (settings.bias == "all" and name.endswith("bias")))
        with_tracks = tuple(start for track in tracks for start in trunk.learns_with.get(track, ()))
        for name, parameter in trunk.named_parameters():  # Tied ones come once, under their first name.
            if name.startswith("lm_head."):
                parameter.requires_grad_(self.asks_logits and settings.method in ("full", "head"))
            elif name.startswith(trunk.never_learns) and not name.startswith(with_tracks):
                parameter.requires_grad_(False)
        for part in settings.freeze:
            _freeze(trunk, part)

    def rows_of(self, found: Weights, head: nn.Module) -> Callable[[str, slice], torch.Tensor]:
        """Return a function that reads rows of this module's tensors by name: the trunk's from `found`, the head's from
        `head`; those of a LoRA are drawn, and those of a packed matrix are computed from the whole matrix.
        """
        state = head.state_dict()

        @lru_cache(maxsize=1)  # Its values and its scales are asked for in turn.
        def packed(linear: str) -> dict[str, torch.Tensor]:
            matrix = packed_of(self.trunk.get_submodule(linear))
            assert matrix is not None
            return matrix.pack(found[f"{linear}.weight"])

        def read(name: str, rows: slice) -> torch.Tensor:
            part, _, own = name.partition(".")
            if part == "trunk" and ".packed." in own:
                linear, _, buffer = own.rpartition(".packed.")
                return packed(linear)[buffer][rows]
            if part == "trunk":
                return self._drawn[own](rows) if own in self._drawn else found.rows(own, rows)
            mine: torch.Tensor = state[own][rows]
            return mine

        return read


def _freeze(trunk: Trunk, part: str) -> None:
    """Freeze the parameters that one entry of `adapt.freeze` names. `UsageError` if the model has no such part."""
    if part == "embedding":
        frozen = [p for n, p in trunk.named_parameters() if n.startswith("embed_")]
    elif part == "biases":
        frozen = [p for n, p in trunk.named_parameters() if n.endswith("bias")]
    elif part == "norms":
        frozen = [p for m in trunk.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()]
    elif part == "tracks":
        starts = tuple(start for starts in trunk.learns_with.values() for start in starts)
        if not starts:
            raise UsageError("adapt.freeze: tracks: the model has no part of its own for a track; leave it out")
        frozen = [p for n, p in trunk.named_parameters() if n.startswith(starts)]
    else:
        first, _, last = part.removeprefix("layers.").partition("-")
        layers = slice(int(first), int(last or first) + 1)
        if layers.stop > len(trunk.layers):
            raise UsageError(f"adapt.freeze: {part}: the model has layers.0 to layers.{len(trunk.layers) - 1}")
        frozen = [p for layer in trunk.layers[layers] for p in layer.parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
