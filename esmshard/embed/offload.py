"""Models that are larger than the GPU or the memory of one machine: layers stay in memory or on disk until they run.

`accelerate` decides where each layer is stored, and copies layers to the computing device in every forward pass. A pass
takes at least the time of this copying, so packs should be as large as memory allows.
"""

import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esmshard.batch import TokenBatch
from esmshard.errors import InputError, UsageError
from esmshard.model.attention import OnAttention
from esmshard.model.families import family_registry
from esmshard.model.trunk import Trunk, TrunkOutput
from esmshard.model.weights import Weights
from esmshard.progress import say

SHARE = 0.8
"""The share of free memory that layers may take. The rest is for activations."""

Place = int | str
"""A location in `accelerate`'s terms: the number of a GPU, `mps`, `cpu` or `disk`."""


def offloaded(found: Weights, folder: Path, dtype: torch.dtype, device: torch.device) -> Trunk:
    """Build a model in evaluation mode whose layers are on GPUs, in memory and on disk, in this order, as they fit.

    Its weights have no gradients. A batch may come from any device. Outputs, embedding, LM head and contact regression
    are on `device`. Calls from several threads run one after the other, since a layer is loaded for one call only.

    Weights are read tensor by tensor, and each goes to its location at once. So memory holds at most one tensor more
    than its share, and the disk holds one copy in `dtype`.

    Args:
        found: the weights of the model, see `esmshard.model.weights.read`.
        folder: an empty directory for the layers on disk; created if any are there. It must exist as long as the model
            is used. The caller removes it.
        dtype: dtype of weights and arithmetic, as for `weights.build`.
        device: the computing device. `cuda` without a number means all GPUs: each computes the layers that it stores.

    Raises:
        UsageError: if `accelerate` is not installed.
        InputError: if the disk has not enough room, or the weights cannot be read.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise UsageError("--offload needs accelerate; pip install 'esmshard[big]'") from None
    with torch.device("meta"):
        model = family_registry.build(found.config)
    model.to(dtype).requires_grad_(False).eval()
    main, places = _places(model, device, dtype)
    on_disk = sum(_bytes(model.get_submodule(name)) for name, place in places.items() if place == "disk")
    if on_disk:
        _make_room(folder, on_disk)
    _read_weights(model, found, places, main, folder)
    _dispatch(model, places, main, folder if on_disk else None)
    say(f"{found.source}: {_summary(places)}")
    where = torch.device("cuda", main) if isinstance(main, int) else torch.device(main)
    model.forward = _on(model.forward, where)  # type: ignore[method-assign]
    return model


def _places(model: Trunk, device: torch.device, dtype: torch.dtype) -> tuple[Place, dict[str, Place]]:
    """Return the computing location, and the location of each layer and of each other part of the model, by name."""
    from accelerate import infer_auto_device_map

    parts = [name for name, _ in model.named_children() if name != "layers"]
    main: Place = device.type if device.type != "cuda" else device.index or 0
    budget = _budget(device)
    if main in budget:
        budget[main] -= sum(_bytes(model.get_submodule(part)) for part in parts)
    # Keys are layer numbers. A layer is not split, because the projections of its attention are read without a call.
    block = type(model.layers[0]).__name__
    layers = infer_auto_device_map(
        model.layers, max_memory=budget, no_split_module_classes=[block], dtype=dtype, clean_result=False
    )
    return main, dict.fromkeys(parts, main) | {f"layers.{n}": place for n, place in layers.items()}


def _make_room(folder: Path, nbytes: int) -> None:
    """Create the directory for layers on disk. Refuse a disk without enough room."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InputError(
            f"{folder}: {nbytes / 1e9:.1f} GB of layers go to disk, and {free / 1e9:.1f} GB are free there; "
            "write the output to another disk, or give --precision bf16, which takes half of it"
        )


def _read_weights(model: Trunk, found: Weights, places: Mapping[str, Place], main: Place, folder: Path) -> None:
    """Read the weights one by one, each to the location of its layer or part."""
    from accelerate.utils import offload_weight, save_offload_index, set_module_tensor_to_device

    index: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if name in model.tied:
            continue
        place = places[".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])]
        value = found[name].to(tensor.dtype)
        if name.endswith("inv_freq"):  # a buffer, which stays where its layer is computed
            set_module_tensor_to_device(model, name, main if place in ("cpu", "disk") else place, value=value)
        elif place == "disk":
            index = offload_weight(value.contiguous(), name, str(folder), index)
        else:
            set_module_tensor_to_device(model, name, place, value=value)
    model.tie_weights()
    save_offload_index(index, str(folder))


def _dispatch(model: Trunk, places: dict[str, Place], main: Place, folder: Path | None) -> None:
    """Let `accelerate` copy each layer to where it is computed. `folder` holds the layers on disk, if there are any."""
    from accelerate import dispatch_model

    log = logging.getLogger("accelerate.big_modeling")
    before = log.level
    log.setLevel(logging.ERROR)  # it warns that some weights are elsewhere, which is intended here
    try:
        dispatch_model(
            model,
            places,
            main_device=main,
            offload_dir=None if folder is None else str(folder),
            preload_module_classes=[type(model.layers[0]).__name__],
        )
    finally:
        log.setLevel(before)


def _budget(device: torch.device) -> dict[Place, int]:
    """Return the bytes for layers by location: a share of what is free there."""
    from accelerate.utils import get_max_memory

    budget = {place: int(SHARE * size) for place, size in get_max_memory().items()}
    if device.type == "cuda" and device.index is None:
        return budget
    main = device.index if device.type == "cuda" else device.type
    return {place: size for place, size in budget.items() if place in (main, "cpu")}


def _bytes(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


def _summary(places: Mapping[str, Place]) -> str:
    """Describe in a sentence where the layers are."""
    counts = Counter(place for name, place in places.items() if name.startswith("layers."))
    names = {"cpu": "in memory", "disk": "on disk", "mps": "on the GPU"}
    return "layers: " + ", ".join(f"{n} {names.get(str(place), f'on GPU {place}')}" for place, n in counts.items())


def _on(forward: Callable[..., TrunkOutput], device: torch.device) -> Callable[..., TrunkOutput]:
    """Wrap `Trunk.forward` so that input and output are on one device, and calls run one at a time.

    With several GPUs, layers use each other's outputs, and an accumulator of contacts uses those of all layers.
    """
    turn = threading.Lock()

    def one_at_a_time(
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> TrunkOutput:
        def on_qk(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            assert on_attention is not None
            on_attention(layer, sequence, q_THK.to(device), k_THK.to(device))

        with turn:
            output = forward(
                batch.to(device),
                layers=layers,
                logits_at=None if logits_at is None else logits_at.to(device),
                on_attention=None if on_attention is None else on_qk,
            )
        return TrunkOutput({n: x_TD.to(device) for n, x_TD in output.representations.items()}, output.logits_PV)

    return one_at_a_time
