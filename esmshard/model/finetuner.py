"""Joins the language model (trunk) and a task head in one torch module, and defines the dropout of task heads.

torch's dropout masks depend on the rank and on the order of the records. Here each number of a mask is a hash of record
seed, layer, position in the record, and column. So the masks stay the same in a resumed run, in a run on another
number of ranks, and in a layer that activation checkpointing computes again.

`esmshard.batch` explains the letters of tensor names. R is the number of rows of the tensor that dropout changes.
"""

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
from esmshard.model.lora import add_lora, packed_of, quantize
from esmshard.model.trunk import Trunk
from esmshard.model.weight_reader import WeightReader
from esmshard.model.weights import Weights

if TYPE_CHECKING:
    from esmshard.recipe.sections import AdaptSettings


class LanguageModelHead(nn.Module):
    """Stands in the place of a task head if the task uses the trunk's LM head."""


class FineTuner(nn.Module):
    """Joins the language model (trunk) and the task head, so that FSDP treats both as one model."""

    def __init__(self, trunk: Trunk, head: nn.Module) -> None:
        super().__init__()
        if trunk.config.only_represents:
            name = trunk.config.family
            if isinstance(head, LanguageModelHead):
                raise UsageError(
                    f"model.name: models of the family {name} have no LM head; choose a model of another family"
                )
            if getattr(head, "reads_logits", False):
                raise UsageError(
                    f"model.name: models of the family {name} have no LM head, and so no zero-shot score; set "
                    "task.zero_shot=false and task.head=network or gp, or choose a model of another family"
                )
            if hasattr(head, "attention"):
                raise UsageError(
                    f"task.head: the attention maps of models of the family {name} cannot be read; set "
                    "task.head=pairwise, or choose a model of another family"
                )
        self.trunk = trunk
        self.head = head
        self._drawn: Mapping[str, WeightReader] = {}
        self.remembered: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        """Outputs of a frozen model that a task saves for later calls, by a name and a key of the task's choice. Before
        `Task.baselines` is called, the first rank also gets the outputs that other ranks have saved."""
        self.origin: str | None = None
        """A hash of the weights files of a frozen model; None if they are not known, or if the model is trained."""

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks of the trunk."""
        return self.trunk.layers

    def forward(self, batch: TokenBatch, substitute: Callable[[], Any] | None = None) -> Any:
        """Return the task head's outputs for each record, or the logits at `TokenBatch.logits_at_P`, in fp32.

        If the function `substitute` is given, return its result instead. `esmshard.parallel.shard.shared_calls` needs
        this, because FSDP gathers the parameters only during a call of this module.
        """
        if substitute is not None:
            return substitute()
        read_attention = getattr(self.head, "attention", None)
        attention = None if read_attention is None else read_attention(batch)
        on_attention = None if attention is None else attention.add
        layers, logits_PV = self.trunk(batch, logits_at=batch.logits_at_P, on_attention=on_attention)
        if self.asks_logits and logits_PV is not None:
            return list(logits_PV.float().split(batch.logit_counts))
        # Some heads also read the language model's logits, or the object from their method `attention`.
        more_input = logits_PV if getattr(self.head, "reads_logits", False) else attention
        x_TD = layers[self.trunk.config.n_layers]
        outputs = self.head(x_TD, batch) if more_input is None else self.head(x_TD, batch, more_input)
        return [output.float() for output in outputs]

    @torch.no_grad()
    def outputs(self, inputs: Sequence[Inputs]) -> list[npt.NDArray[np.float32]]:
        """Return the task head's outputs for each of the inputs."""
        dtype = self.trunk.embed_tokens.weight.dtype
        # The task head has fp32 weights. With autocast, it also accepts the output of a trunk in half precision.
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)
        with mixed, exact_convolutions(self.device):
            return [output.cpu().numpy() for output in self(batch_of(inputs).to(self.device))]

    @torch.no_grad()
    def representations(self, inputs: Sequence[Inputs]) -> list[npt.NDArray[np.float32]]:
        """Return the last-layer representations [L, D] of each sequence, without `<cls>` and `<eos>`."""
        batch = batch_of(inputs).to(self.device)
        x_TD = self.trunk(batch).representations[self.trunk.config.n_layers].float()
        return [x_LD.cpu().numpy() for x_LD in batch.residues(x_TD)]

    @property
    def device(self) -> torch.device:
        """The device on which the model computes (`Trunk.device`)."""
        return self.trunk.device

    @property
    def asks_logits(self) -> bool:
        """Whether the task uses the trunk's LM head."""
        return isinstance(self.head, LanguageModelHead)

    def adapt(
        self,
        settings: "AdaptSettings",
        seed: int,
        tracks: Collection[str] = (),
        quantization: Quantization | None = None,
    ) -> None:
        """Quantise the trunk's matrices if `quantization` is given. Add LoRA matrices, made with `seed`, if
        `settings.method` is lora. Then choose the parameters to train: the task head, and the trunk's parameters that
        `settings` selects, except for `Trunk.never_learns`. `tracks` names the tracks that all batches have.
        """
        if quantization is not None:
            quantize(self.trunk.layers, self.trunk.config.matrices, quantization)
        trunk = self.trunk.requires_grad_(settings.method == "full")
        if settings.method == "lora":
            added = add_lora(trunk.layers, trunk.config.matrices, *settings.lora)
            self._drawn = weights.drawn(trunk.config, added, seed)
            for name, parameter in trunk.named_parameters():
                parameter.requires_grad_(name in added or (settings.bias == "all" and name.endswith("bias")))
        with_tracks = tuple(prefix for track in tracks for prefix in trunk.learns_with.get(track, ()))
        for name, parameter in trunk.named_parameters():  # A tied parameter is listed once, under its first name.
            if name.startswith("lm_head."):
                parameter.requires_grad_(self.asks_logits and settings.method in ("full", "head"))
            elif name.startswith(trunk.never_learns) and not name.startswith(with_tracks):
                parameter.requires_grad_(False)
        for part in settings.freeze:
            _freeze(trunk, part)

    def rows_of(self, base: Weights, head: nn.Module) -> Callable[[str, slice], torch.Tensor]:
        """Return a function `(name, rows)` that returns rows of the tensor `name` as they are before training.
        The trunk's tensors come from `base`, and are quantised if necessary. The task head's tensors come from `head`.
        New LoRA matrices get the initial values of `esmshard.model.weights.drawn`.
        """
        state = head.state_dict()

        @lru_cache(maxsize=1)  # The values and the scales of one matrix are read directly after each other.
        def packed(linear: str) -> dict[str, torch.Tensor]:
            matrix = packed_of(self.trunk.get_submodule(linear))
            assert matrix is not None
            return matrix.pack(base[f"{linear}.weight"])

        def read(name: str, rows: slice) -> torch.Tensor:
            part, _, inner = name.partition(".")
            if part == "head":
                return state[inner][rows]  # type: ignore[no-any-return]
            if ".packed." in inner:
                linear, _, buffer = inner.rpartition(".packed.")
                return packed(linear)[buffer][rows]
            return self._drawn[inner](rows) if inner in self._drawn else base.rows(inner, rows)

        return read


def _freeze(trunk: Trunk, part: str) -> None:
    """Freeze the parameters that an entry `part` of the recipe key `adapt.freeze` names. Raises `UsageError` if the
    model lacks them.
    """
    if part == "embedding":
        frozen = [p for n, p in trunk.named_parameters() if n.startswith("embed_")]
    elif part == "biases":
        frozen = [p for n, p in trunk.named_parameters() if n.endswith("bias")]
    elif part == "norms":
        frozen = [p for m in trunk.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()]
    elif part == "tracks":
        prefixes = tuple(prefix for prefixes in trunk.learns_with.values() for prefix in prefixes)
        if not prefixes:
            raise UsageError("adapt.freeze: tracks: the model has no parameters for tracks; remove this entry")
        frozen = [p for n, p in trunk.named_parameters() if n.startswith(prefixes)]
    else:
        name, count = part.removeprefix("layers."), len(trunk.layers)
        if name.startswith("all-but-"):
            layers = slice(0, count - int(name.removeprefix("all-but-")))
        else:
            first, _, last = name.partition("-")
            layers = slice(int(first), int(last or first) + 1)
        if not 0 <= layers.stop <= count:
            raise UsageError(f"adapt.freeze: {part}: the model has layers.0 to layers.{count - 1}")
        frozen = [p for layer in trunk.layers[layers] for p in layer.parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)


_PLACE, _LAYER, _COLUMN = 0x27D4EB2F, 0x165667B1, 0x61C88647
"""Odd factors that multiply position, layer and column before the hash. So neighbouring values differ in many bits."""


class RecordDropout(nn.Module):
    """Sets the share `share` (from 0 to below 1) of the input numbers to zero in training, and divides all others by
    1 - `share`. Does nothing in evaluation. Each dropout layer of a head needs a different index `layer`, so that the
    masks differ.
    """

    def __init__(self, share: float, layer: int = 0) -> None:
        super().__init__()
        self.share, self.layer = share, layer

    def forward(self, x_RF: torch.Tensor, draw_R: torch.Tensor | None) -> torch.Tensor:
        """Apply dropout to x [R, F]. `draw_R`, int32 [R], has a random seed for each row, from `of_tokens`,
        `of_changes` or `TokenBatch.draw_N`. It may be None only in evaluation or if the share is 0.
        """
        if not self.training or not self.share:
            return x_RF
        if draw_R is None:
            raise ValueError("dropout needs a seed for each record; make the batch with `collate` and an epoch")
        row_R = _hashed(draw_R + ((self.layer * _LAYER + 2**31) % 2**32 - 2**31))  # The added number fits an int32.
        column_F = torch.arange(x_RF.shape[1], dtype=torch.int32, device=x_RF.device) * _COLUMN
        left_out_RF = _hashed(row_R[:, None] + column_F) < int(self.share * 2**32) - 2**31
        return (x_RF / (1 - self.share)).masked_fill(left_out_RF, 0.0)


def of_tokens(batch: TokenBatch) -> torch.Tensor | None:
    """Return a dropout seed for each token, int32 [T]; None if `batch.draw_N` is None. Both chains of a pair have the
    seed of their record.
    """
    if batch.draw_N is None:
        return None
    counts_N = batch.cu_seqlens.diff().long()
    # With `output_size`, the CPU does not wait for the GPU.
    record_T = torch.repeat_interleave(counts_N, output_size=batch.bounds[-1])
    record_T = record_T // (len(batch) // len(batch.draw_N))
    return batch.draw_N[record_T] + batch.position_T.int() * _PLACE


def of_changes(batch: TokenBatch) -> torch.Tensor | None:
    """Return a dropout seed for each changed residue, int32 [M]; None if `batch.draw_N` is None."""
    if batch.draw_N is None:
        return None
    assert batch.changes_4M is not None
    record_M, _, _, wild_M = batch.changes_4M
    return batch.draw_N[record_M] + batch.position_T[wild_M].int() * _PLACE


def _hashed(h: torch.Tensor) -> torch.Tensor:
    """Hash int32 numbers in place with `lowbias32` by Wellons (github.com/skeeto/hash-prospector)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):  # factors as int32
        h = h.bitwise_xor_((h >> shift) & (2 ** (32 - shift) - 1)).mul_(factor)
    return h.bitwise_xor_((h >> 16) & 0xFFFF)
