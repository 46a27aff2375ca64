"""A whole small ESM-2 with its own LM head, laid out as the main job does, and its reference on the CPU."""

from collections.abc import Sequence

import torch
from shared import alone, apart, distance, masked_pack, random_weights, size

from esmshard.model.config import Quantization
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.shard import shard, trainable
from esmshard.recipe.sections import AdaptSettings

CONFIG = size(EsmConfig(n_layers=6, dim=320, n_heads=20), EsmConfig(n_layers=2, dim=32, n_heads=4))
LENGTHS = size([300, 1, 57, 128, 20], [30, 1, 17])
SCALE = 1024.0
"""Of the loss: gradients in fp16 would be too small without it."""
FULL, LORA = AdaptSettings(), AdaptSettings(method="lora", rank=4, alpha=8.0)  # type: ignore[call-arg]
OF_LOGITS = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
"""Of the largest logit. bf16 has 8 bits: 2^-8 for each of some layers. fp16 has 11."""
OF_GRADIENTS = {"fp32": 1e-4, "bf16": 1e-1, "fp16": 2e-2}
"""Norm of the difference over the norm, of the worst parameter. Errors of all layers behind it add up."""


def built(
    device: torch.device, adapt: AdaptSettings, laid: Layout, quantization: Quantization | None = None
) -> FineTuner:
    """As the main job builds it, with the language model's own head. A LoRA's B is not 0, or A had no gradient."""
    with torch.device("meta"):
        model = FineTuner(ESM2(CONFIG), LanguageModelHead())
    model.adapt(adapt, 0, (), quantization)
    shard(model, laid, alone(device))
    read = model.rows_of(random_weights(CONFIG), LanguageModelHead())

    def rows(name: str, part: slice) -> torch.Tensor:
        tensor = read(name, slice(None))
        if name.endswith("lora_B.weight"):
            tensor = 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        return tensor[part]

    materialise(model, rows, laid, alone(device))
    return model.train()


def computed(
    model: FineTuner, device: torch.device, lengths: Sequence[int] = LENGTHS
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits at hidden residues, and all gradients of the mean loss there."""
    batch, target_P = masked_pack(lengths)
    model.zero_grad()
    logits_PV = torch.cat(model(batch.to(device)))
    (SCALE * torch.nn.functional.cross_entropy(logits_PV, target_P.to(device))).backward()
    gradients = {name: p.grad / SCALE for name, p in trainable(model).items() if p.grad is not None}
    assert len(gradients) == len(trainable(model))
    return logits_PV.detach(), gradients


_expected: dict[AdaptSettings, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}


def expected(adapt: AdaptSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same without anything, in fp32 on the CPU."""
    if adapt not in _expected:
        cpu = torch.device("cpu")
        _expected[adapt] = computed(built(cpu, adapt, Layout()), cpu)
    return _expected[adapt]


def check(model: FineTuner, device: torch.device, adapt: AdaptSettings, precision: str) -> None:
    """Logits and gradients are those of fp32, as nearly as a precision can have them."""
    logits_PV, gradients = computed(model, device)
    reference_PV, reference = expected(adapt)
    assert logits_PV.dtype == torch.float32
    assert distance(logits_PV, reference_PV) <= OF_LOGITS[precision]
    assert apart(gradients, reference) <= OF_GRADIENTS[precision]
