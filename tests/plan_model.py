"""The model of the planner's tests, and the numbers of any other model, counted."""

from collections.abc import Iterable
from typing import Any

from esmshard.model.config import ModelConfig
from esmshard.planner.memory_model import ModelNumbers

# 10 layers of 12 million parameters and a root of 8 million, 1,000 wide, all of it trained: 240 and 16 MB in bf16, 512
# MB in all in fp32.
MODEL = ModelNumbers(
    n_layers=10,
    dim=1000,
    n_heads=10,
    ffn_width=4000,
    layer_parameters=12_000_000,
    root_parameters=8_000_000,
    layer_trained=12_000_000,
    root_trained=8_000_000,
)


def counted_numbers(model: Any, config: ModelConfig) -> ModelNumbers:
    """Count the parameters of a model with `layers`, which may be sharded or on the meta device.

    If some layers are frozen, each layer counts as the average, and keeps its inputs as a layer that learns.
    """
    n, all_of_it = len(model.layers), _counts(model.parameters())
    in_layers = [_counts(layer.parameters()) for layer in model.layers]
    in_layer = in_layers[0][0], sum(trained for _, trained in in_layers) // n
    most = max(range(n), key=lambda k: in_layers[k][1])
    learns = {name: p for name, p in model.layers[most].named_parameters() if p.requires_grad}
    learning = {name.removesuffix(".weight").removesuffix(".lora_A") for name in learns if name.endswith(".weight")}
    return ModelNumbers(
        n_layers=n,
        dim=config.dim,
        n_heads=config.n_heads,
        ffn_width=config.ffn_width,
        gated=config.gated,
        qk_norm=config.qk_norm,
        n_logits=config.n_logits,
        layer_parameters=in_layer[0],
        root_parameters=all_of_it[0] - n * in_layer[0],
        layer_trained=in_layer[1],
        root_trained=all_of_it[1] - n * in_layer[1],
        inputs=tuple(sorted({matrix.reads for matrix in config.matrices if matrix.path in learning})),
        lora=sum(p.shape[0] for name, p in learns.items() if name.endswith("lora_A.weight")),
    )


def _counts(parameters: Iterable[Any]) -> tuple[int, int]:
    known = list(parameters)
    return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)
