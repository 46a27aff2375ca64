"""The number of parameters of a model that learn, for planning. No torch."""

from esmshard.model.config import LINEAR, EsmConfig
from esmshard.planner.memory_model import MATRICES, ModelNumbers
from esmshard.recipe.sections import AdaptSettings
from esmshard.vocab import VOCAB_SIZE


def numbers_of(config: EsmConfig, head: int, adapt: AdaptSettings, *, logits: bool = False) -> ModelNumbers:
    """Return the planner's sizes for a trunk with a task head of `head` parameters.

    The contact regression does not learn. Of the LM head only the matrix that is shared with the embedding learns,
    unless the task needs its `logits`. Frozen biases and norms count as if they learned, since they are few.
    """
    d = config.dim
    layer = 12 * d * d + 13 * d
    root = config.n_parameters - config.n_layers * layer + head
    lm_head = d * d + 3 * d + VOCAB_SIZE
    lora, inputs, ranks = 0, set[str](), 0
    if adapt.method == "full":
        frozen = config.n_layers * config.n_heads + 1 + (0 if logits else lm_head)
        layer_trained, root_trained, inputs = layer, root - frozen, set(MATRICES.values())
        if "embedding" in adapt.freeze:
            root_trained -= d * (VOCAB_SIZE + (0 if config.rotary else config.position_rows))
        layers = {n for part in adapt.freeze if part.startswith("layers.") for n in _layers(part)}
        trained = layer * (config.n_layers - len(layers))
        layer_trained = trained // config.n_layers  # the average over layers
        root_trained += trained % config.n_layers
    else:
        layer_trained, root_trained = 0, head + (lm_head if logits and adapt.method == "head" else 0)
    if adapt.method == "lora":
        rank, _, targets = adapt.lora
        widths = {"fc1": (d, 4 * d), "fc2": (4 * d, d)}
        lora = sum(rank * sum(widths.get(target, (d, d))) for target in targets)
        inputs, ranks = {MATRICES[LINEAR[target]] for target in targets}, rank * len(targets)
        layer_trained = lora
        # biases of q, k, v, out, fc1, fc2 and two LayerNorms; and the LayerNorms around the layers
        if adapt.bias == "all":
            layer_trained += 11 * d
            root_trained += d * (1 + config.emb_layer_norm_before)
    return ModelNumbers(
        n_layers=config.n_layers,
        dim=d,
        n_heads=config.n_heads,
        layer_parameters=layer + lora,
        root_parameters=root,
        layer_trained=layer_trained,
        root_trained=root_trained,
        inputs=tuple(sorted(inputs)),
        lora=ranks,
    )


def _layers(part: str) -> range:
    """Return the layers of an entry of `adapt.freeze`, such as layers.0-10."""
    first, _, last = part.removeprefix("layers.").partition("-")
    return range(int(first), int(last or first) + 1)
