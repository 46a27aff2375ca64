"""The number of parameters of a model that learn, for planning. No torch."""

from collections.abc import Collection

from esmshard.model.config import ModelConfig, Quantization
from esmshard.planner.memory_model import ModelNumbers
from esmshard.recipe.sections import AdaptSettings


def numbers_of(
    config: ModelConfig,
    head: int,
    adapt: AdaptSettings,
    *,
    logits: bool = False,
    tracks: Collection[str] = (),
    quantization: Quantization | None = None,
) -> ModelNumbers:
    """Return the planner's sizes for a trunk with a task head of `head` parameters.

    What `config.frozen_parameters` counts does not learn, but for what learns with one of the `tracks` of the batches.
    Of the LM head only the matrix that is shared with the embedding learns, unless the task needs its `logits`. Frozen
    biases and norms count as if they learned, since they are few.
    """
    layer, lm_head = config.layer_parameters, config.lm_head_parameters
    root = config.n_parameters - config.n_layers * layer + head
    lora, inputs, ranks = 0, set[str](), 0
    if adapt.method == "full":
        learned = 0 if "tracks" in adapt.freeze else sum(map(config.learned_with, tracks))
        frozen = config.frozen_parameters - learned + (0 if logits else lm_head)
        layer_trained, root_trained, inputs = layer, root - frozen, {matrix.reads for matrix in config.matrices}
        if "embedding" in adapt.freeze:
            root_trained -= config.embedding_parameters
        layers = {n for part in adapt.freeze if part.startswith("layers.") for n in _layers(part)}
        trained = layer * (config.n_layers - len(layers))
        layer_trained = trained // config.n_layers  # the average over layers
        root_trained += trained % config.n_layers
    else:
        layer_trained, root_trained = 0, head + (lm_head if logits and adapt.method == "head" else 0)
    if adapt.method == "lora":
        rank, _, targets = adapt.lora
        adapted = [matrix for matrix in config.matrices if matrix.target in targets]
        lora = sum(rank * (matrix.columns + matrix.rows) for matrix in adapted)
        inputs, ranks = {matrix.reads for matrix in adapted}, rank * len(adapted)
        layer_trained = lora
        if adapt.bias == "all":
            layer_trained += config.layer_biases
            root_trained += config.end_biases
    packed = config.matrices if quantization is not None else ()
    return ModelNumbers(
        n_layers=config.n_layers,
        dim=config.dim,
        n_heads=config.n_heads,
        ffn_width=config.ffn_width,
        gated=config.gated,
        qk_norm=config.qk_norm,
        n_logits=config.n_logits,
        layer_parameters=layer + lora,
        root_parameters=root,
        layer_trained=layer_trained,
        root_trained=root_trained,
        inputs=tuple(sorted(inputs)),
        lora=ranks,
        track_kept=sum(map(config.kept_with, tracks)),
        quantization=quantization,
        layer_quantized=sum(matrix.rows * matrix.columns for matrix in packed),
        layer_packed=sum(matrix.packed_bytes(quantization) for matrix in packed if quantization is not None),
    )


def _layers(part: str) -> range:
    """Return the layers of an entry of `adapt.freeze`, such as layers.0-10."""
    first, _, last = part.removeprefix("layers.").partition("-")
    return range(int(first), int(last or first) + 1)
