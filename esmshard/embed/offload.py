"""Models that are larger than the GPU: layers stay on other GPUs, in memory or on disk until they run.

`accelerate` decides where each layer is stored, and copies layers to the computing device in every forward pass. A pass
takes at least the time of this copying, so packs should be as large as memory allows.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from esmshard.batch import TokenBatch
from esmshard.errors import UsageError
from esmshard.model import weights
from esmshard.model.attention import OnAttention
from esmshard.model.trunk import Trunk, TrunkOutput
from esmshard.model.weights import Weights
from esmshard.progress import say

SHARE = 0.8
"""The share of free memory that layers may take. The rest is for activations."""


def offloaded(found: Weights, folder: Path, dtype: torch.dtype, device: torch.device) -> Trunk:
    """Build a model in evaluation mode whose layers are on GPUs, in memory and on disk, in this order, as they fit.

    While it is built, memory holds the whole model once. Outputs and all parts besides the layers are on `device`.

    Args:
        found: the weights of the model, see `esmshard.model.weights.read`.
        folder: a directory for the layers on disk. The caller removes it.
        dtype: dtype of weights and arithmetic, as for `weights.build`.
        device: the computing device. `cuda` without a number means all GPUs: each computes the layers that it stores.

    Raises:
        UsageError: if `accelerate` is not installed.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_max_memory
    except ImportError:
        raise UsageError("--offload needs accelerate; pip install 'esmshard[big]'") from None
    main = device.type if device.type != "cuda" else device.index or 0
    where = torch.device(device.type, 0 if device == torch.device("cuda") else device.index)
    memory = {place: int(SHARE * size) for place, size in get_max_memory().items()}
    if device != torch.device("cuda"):
        memory = {place: size for place, size in memory.items() if place in (main, "cpu")}
    model = weights.build(found, torch.device("cpu"), dtype).requires_grad_(False).eval()
    others = {name: part for name, part in model.named_children() if name != "layers"}
    if main in memory:
        memory[main] -= sum(x.numel() * x.element_size() for part in others.values() for x in part.parameters())
    # A layer is not split, because the projections of its attention are read without a call.
    block = [type(model.layers[0]).__name__]
    layers = infer_auto_device_map(model.layers, memory, block, dtype=dtype, clean_result=False)
    # It warns that some weights are elsewhere, which is intended here.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    places = dict.fromkeys(others, main) | {f"layers.{n}": place for n, place in layers.items()}
    dispatch_model(model, places, main_device=main, offload_dir=str(folder), preload_module_classes=block)
    counts = Counter({"cpu": "in memory", "disk": "on disk"}.get(str(one), f"on GPU {one}") for one in layers.values())
    say(f"{found.source}: layers: " + ", ".join(f"{n} {place}" for place, n in counts.items()))
    forward = model.forward

    def on_device(
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        """Bring input and output to one device, since layers use each other's outputs, and a listener those of all."""

        def on_qk(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            assert on_attention is not None
            on_attention(layer, sequence, q_THK.to(where), k_THK.to(where))

        at = None if logits_at is None else logits_at.to(where)
        hear = None if on_attention is None else on_qk
        output = forward(batch.to(where), layers=layers, logits_at=at, on_attention=hear)
        return TrunkOutput({n: x_TD.to(where) for n, x_TD in output.representations.items()}, output.logits_PV)

    model.forward = on_device  # type: ignore[method-assign]
    return model
