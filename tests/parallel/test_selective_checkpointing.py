"""What selective checkpointing keeps of a layer."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from esmshard.model.families.family_registry import SIZES
from esmshard.parallel import shard
from esmshard.parallel.layout import kept_products


def test_the_products_of_a_layer() -> None:
    """q, k and v; `out` on a rank of its own; fc1, of which a gated layer has two."""
    assert kept_products(SIZES["nano"].matrices, 1) == {(32, 32): 4, (32, 128): 1}
    assert kept_products(SIZES["esmc_nano"].matrices, 2) == {(32, 16): 3, (32, 128): 2}


class Products(TorchDispatchMode):
    """Counts products with a bias, of which a backward pass has none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_of_equal_shapes_the_first_are_kept() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]

    def layer(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.addmm(weight[0], x, weight).sin()
        return x

    x = torch.randn(3, 4, requires_grad=True)
    for kept in (0, 1, 2):
        contexts = partial(shard._selective, Counter({(4, 4): kept}))
        with Products() as products:
            out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            assert isinstance(out, torch.Tensor)
            out.sum().backward()
        assert products.count == 2 + (2 - kept)
