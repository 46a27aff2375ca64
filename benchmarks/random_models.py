"""Models of the published shapes with random weights, drawn on the device: speed does not depend on the values.

To draw 15 billion numbers on one CPU core and to copy them takes minutes; a GPU draws them in seconds.
"""

from dataclasses import replace

import torch
from torch import nn

from esmshard.model.attention import inverse_frequencies
from esmshard.model.config import ModelConfig
from esmshard.model.families.esmc import EsmcConfig
from esmshard.model.families.family_registry import SIZES, build
from esmshard.model.finetuner import FineTuner
from esmshard.model.trunk import Trunk

SHORT = {"8M": "esm2_t6_8M_UR50D", "35M": "esm2_t12_35M_UR50D", "150M": "esm2_t30_150M_UR50D"}
SHORT |= {"650M": "esm2_t33_650M_UR50D", "3B": "esm2_t36_3B_UR50D", "15B": "esm2_t48_15B_UR50D"}
SHORT |= {"ESM-C-6": "esmc_six_layers", "ProtT5-2": "prot_t5_two_layers", "nano": "nano"}
"""The short names of models, and their keys in CONFIGS."""
CONFIGS: dict[str, ModelConfig] = {
    **SIZES,
    "esmc_six_layers": EsmcConfig(n_layers=6, dim=960, n_heads=15),
    "prot_t5_two_layers": replace(SIZES["prot_t5_xl"], n_layers=2),
}
"""The architectures by name. Six layers of the shape of ESM-C 300M do a fifth of the work of the whole model, and two
of ProtT5 XL a twelfth."""
DEVIATION = 0.02


def trunk(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Trunk:
    """Make a random model in evaluation mode. In another precision it has the same numbers, rounded."""
    with torch.device("meta"):
        model = build(CONFIGS[name])
    fill(model, device, dtype)
    return model.eval()


@torch.no_grad()
def fill(model: Trunk | FineTuner, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Give a model on the meta device random weights. They are the same each time on the same kind of device.

    Args:
        model: a model for one device.
        device: the device of the weights.
        dtype: the dtype of the weights. They are drawn in fp32, one tensor at a time.
    """
    esm = model.trunk if isinstance(model, FineTuner) else model
    model.to(dtype).to_empty(device=device)
    esm.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    norms = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.InstanceNorm2d | nn.GroupNorm) and module.weight is not None
    }
    for parameter in model.parameters():
        drawn = torch.empty(parameter.shape, device=device).normal_(0, DEVIATION, generator=generator)
        parameter.copy_(drawn + 1 if id(parameter) in norms else drawn)
    for name, buffer in model.named_buffers():
        buffer.copy_(inverse_frequencies(esm.config.head_dim) if name.endswith("inv_freq") else torch.zeros(()))
