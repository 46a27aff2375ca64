"""The attention maps of chosen layers and heads, computed a few heads at a time and collected in main memory."""

from collections.abc import Sequence

import torch

from esmshard.embed.compute.outputs import Output
from esmshard.model.attention import attention_map
from esmshard.model.contacts import MAP_NUMBERS


class AttentionMaps:
    """The requested maps of each of N sequences. `Trunk.forward` takes `add` as its `on_attention`.

    The softmax is over all tokens. The rows and columns of `<cls>` and `<eos>` are removed afterwards, without
    normalising again.

    Args:
        outputs: the outputs; those of other pools are ignored.
        n_sequences: N.
    """

    def __init__(self, outputs: Sequence[Output], n_sequences: int) -> None:
        self._of_layer = {one.layer: one for one in outputs if one.pool == "attentions"}
        self.found: list[dict[str, torch.Tensor]] = [{} for _ in range(n_sequences)]
        """The maps of each sequence by output name, fp32 [H, L, L] on the CPU, since those of many layers and heads are
        larger than a GPU's memory.
        """

    def add(self, layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        """Compute the maps of one sequence and of one block, counted from 0, if they are requested."""
        output = self._of_layer.get(layer + 1)
        if output is None:
            return
        length = len(q_THK) - 2
        maps_HLL = torch.empty(len(output.heads), length, length)
        at_once = max(1, MAP_NUMBERS // len(q_THK) ** 2)
        for start in range(0, len(output.heads), at_once):
            some = list(output.heads[start : start + at_once])
            maps_HTT = attention_map(q_THK[:, some], k_THK[:, some])
            maps_HLL[start : start + at_once] = maps_HTT[:, 1:-1, 1:-1]
        self.found[sequence][output.name] = maps_HLL
