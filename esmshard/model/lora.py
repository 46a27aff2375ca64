"""LoRA (Hu et al. 2021, arXiv:2106.09685): a trained low-rank matrix beside each frozen matrix of the trunk's layers.

    y = x W' + bias + alpha / rank * (x A') B'        A [rank, in], B [out, rank]

B starts at zero, so the first forward pass is that of the base model. The two matrices are parameters of the linear
layer itself, `layers.N.self_attn.q_proj.lora_A.weight`, so that sharding, checkpoints and compilation of a block
include them. The names are those of PEFT without its prefixes (`esmshard.model.adapters`).
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.model.config import Matrix
from esmshard.model.quantized import frozen_product, packed_of


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank matrix beside its own matrix. `weight` and `bias` stay its parameters; a packed
    matrix (`esmshard.model.quantized`) stays packed.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        packed = packed_of(base)
        device = base.weight.device if packed is None else packed.values.device
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias, self.packed = base.weight, base.bias, packed
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device)
        self.scale = scale

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out]."""
        if self.packed is None:
            y_TD = F.linear(x_TD, self.weight, self.bias)
        else:
            y_TD = frozen_product(x_TD, self.bias, self.packed)
        return torch.addmm(y_TD, F.linear(x_TD, self.lora_A.weight), self.lora_B.weight.t(), alpha=self.scale)


def add_lora(
    layers: nn.ModuleList, matrices: Sequence[Matrix], rank: int, alpha: float, targets: Collection[str]
) -> dict[str, torch.Size]:
    """Add a LoRA to those linear layers of each block that `targets` names (`Matrix.target`), in place, on any device.

    Returns:
        Shapes of the new matrices, by the trunk's names. `esmshard.model.weights.drawn` gives their first
        values; the values in the model are not defined yet.
    """
    added: dict[str, torch.Size] = {}
    for n, layer in enumerate(layers):
        for place in (matrix.path for matrix in matrices if matrix.target in targets):
            base = layer.get_submodule(place)
            assert isinstance(base, nn.Linear)
            linear = LoraLinear(base, rank, alpha / rank)
            layer.set_submodule(place, linear)
            names = lora_names(f"layers.{n}.{place}.weight")
            added |= zip(names, (linear.lora_A.weight.shape, linear.lora_B.weight.shape), strict=True)
    return added


def merged(name: str, tensors: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Return a weight with its LoRA added, in fp32: W + scale * B A, where scale is alpha / rank. `tensors` has the
    weight and the tensors `lora_names(name)`; without these the weight is returned unchanged.
    """
    a, b = lora_names(name)
    if a not in tensors:
        return tensors[name]
    return torch.addmm(tensors[name].float(), tensors[b].float(), tensors[a].float(), alpha=scale)


def lora_names(name: str) -> tuple[str, str]:
    """Return the names of A and B beside a weight.

    >>> lora_names("layers.0.fc1.weight")
    ('layers.0.fc1.lora_A.weight', 'layers.0.fc1.lora_B.weight')
    """
    stem = name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
