"""The element-wise work of a layer in the planner, against the bytes that operations of torch read and write."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esmshard.batch import pack
from esmshard.model.config import ModelConfig
from esmshard.model.families.esm2 import EsmConfig
from esmshard.model.families.esmc import EsmcConfig
from esmshard.model.families.family_registry import build
from esmshard.planner.cost import our_passes
from esmshard.planner.memory_model import numbers_of

TOKENS = 1024
SIZES = {"n_layers": 1, "dim": 256, "n_heads": 8}
OTHERS = ("mm", "attention", "view", "alias", "transpose", "slice", "select", "squeeze", "unbind", "split")
OTHERS += ("expand", "permute")
"""Matrix products and attention, which the planner counts apart, and operations that move nothing."""


class _Moved(TorchDispatchMode):
    """Counts the bytes of the large tensors that element-wise operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name not in ("t", "detach", "empty", "empty_like") and not any(other in name for other in OTHERS):
            touched = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in touched if x.numel() >= TOKENS * SIZES["n_heads"])
        return out


@pytest.mark.parametrize(
    ("config", "expected"),
    [(EsmConfig(**SIZES), 47), (EsmcConfig(ffn=768, **SIZES), 58)],
)
def test_a_layer_moves_what_is_planned(config: ModelConfig, expected: float) -> None:
    """AMPLIFY is left out: its norm is one operation on a GPU only."""
    model = build(config).to(torch.bfloat16)
    batch = pack([np.array([0, *[5] * (TOKENS - 2), 2], dtype=np.uint8)])
    x_TD = torch.randn(TOKENS, config.dim, dtype=torch.bfloat16, requires_grad=True)
    with _Moved() as moved:
        model.layers[0](x_TD, batch)
    passes = our_passes(numbers_of(model, config))
    assert passes == pytest.approx(expected)
    assert moved.bytes / (TOKENS * config.dim * 2) == pytest.approx(passes, rel=0.07)
