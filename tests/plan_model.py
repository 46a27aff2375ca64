"""The model of the planner's tests."""

from typing import Any

from esmshard.model.families.esm2 import EsmConfig
from esmshard.parallel.layout import Layout
from esmshard.planner import ModelNumbers

# 10 layers of 12 million parameters and a root of 8 million, 1,000 wide, all of it trained: 240 and 16 MB in bf16, 512
# MB in all in fp32.
MODEL = ModelNumbers(
    config=EsmConfig(n_layers=10, dim=1000, n_heads=10),
    layer_parameters=12_000_000,
    root_parameters=8_000_000,
    layer_trained=12_000_000,
    root_trained=8_000_000,
)


def bf16(**options: Any) -> Layout:
    return Layout(precision="bf16", **options)
