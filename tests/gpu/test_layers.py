"""A whole small ESM-2 in mixed precision, checkpointed and with a LoRA, against plain fp32 on the CPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from small_model import CONFIG, FULL, LORA, built, check, computed
from torch.utils._python_dispatch import TorchDispatchMode

from esmshard.parallel.layout import Layout
from esmshard.recipe.sections import AdaptSettings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("adapt", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_logits_and_gradients_are_those_of_fp32(
    device: torch.device, varlen: None, adapt: AdaptSettings, precision: Any, checkpointing: Any
) -> None:
    laid = Layout(precision=precision, activation_checkpointing=checkpointing)
    check(built(device, adapt, laid), device, adapt, precision)


class Count(TorchDispatchMode):
    """Counts what is really computed: what a checkpoint gives back out of its memory does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_computes_attention_once(
    device: torch.device, varlen: None, checkpointing: Any, times: int
) -> None:
    model = built(device, FULL, Layout(precision="bf16", activation_checkpointing=checkpointing))
    with Count() as count:
        computed(model, device)
    assert count.calls["torch_attn._varlen_attn.default"] == times * CONFIG.n_layers
    assert count.calls["torch_attn._varlen_attn_backward.default"] == CONFIG.n_layers
    gelus = {"none": 1, "selective": 2, "full": 2}[checkpointing]
    assert count.calls["aten.gelu.default"] == gelus * CONFIG.n_layers + 1, "and that of the LM head"
