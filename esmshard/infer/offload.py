"""Models bigger than a GPU, or than memory, on one machine: layers wait in memory or on disk until they are run.

`accelerate` decides where each layer lies and brings it to the device that computes, layer by layer in every forward
pass. So a pass costs at least the time to read what lies elsewhere: packs should be as large as memory allows.
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
from esmshard.model import weights
from esmshard.model.attention import OnAttention
from esmshard.model.esm2 import ESM2, EsmOutput
from esmshard.model.layouts import TIED
from esmshard.model.weights import Weights
from esmshard.progress import say

SHARE = 0.8
"""Of free memory, what layers may take; the rest is for what is computed."""

Place = int | str
"""As `accelerate` says it: the number of a GPU, `mps`, `cpu` or `disk`."""


def offloaded(
    found: Weights,
    *,
    folder: Path,
    memory: Mapping[Place, str | int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> ESM2:
    """A model in evaluation mode whose layers lie on GPUs, in memory and on disk, in this order, as they find room.

    Its weights take no gradients. A batch may come from any device and outputs lie on `device`, as do embedding, LM
    head and contact regression. Calls from several threads take turns, since a layer is there for one of them only.

    Weights are read tensor by tensor, and each goes where it belongs at once: at most one of them is in memory besides
    what the map below says, and on disk there is one copy in `dtype`.

    Args:
        found: of the model, see `esmshard.model.weights.read`.
        folder: for the layers on disk; made if any are. It must be empty, stay for as long as the model is used, and
            whoever made the model removes it.
        memory: bytes (`20GB`, `8GiB` or a number) that layers may take by place: GPU number, `mps`, `cpu`. By default
            0.8 of what is free on the GPUs and in memory. What finds no room goes to disk.
        dtype: of weights and arithmetic, as for `weights.build`.
        device: that computes; the first GPU, else the CPU, by default. `cuda` without a number means all GPUs: each
            computes the layers that lie on it.

    Raises:
        UsageError: if `accelerate` is not installed, `memory` names what is not there, or `folder` is not empty.
        InputError: if the disk has not enough room, or the weights cannot be read.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import offload_weight, save_offload_index, set_module_tensor_to_device
    except ImportError:
        raise UsageError("--offload needs accelerate; pip install 'esmshard[big]'") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is not an empty directory; give another one for the layers on disk")

    with torch.device("meta"):
        model = ESM2(found.config)
    model.to(dtype).requires_grad_(False).eval()
    parts = [name for name, _ in model.named_children() if name != "layers"]
    main, budget = _budget(memory, device or weights.default_device())
    if main in budget:
        budget[main] -= sum(_bytes(model.get_submodule(part)) for part in parts)
    # Keys are layers' numbers. A layer is not split: the projections of its attention are read without being called.
    layers = infer_auto_device_map(
        model.layers, max_memory=budget, no_split_module_classes=["TransformerLayer"], dtype=dtype, clean_result=False
    )
    places: dict[str, Place] = dict.fromkeys(parts, main) | {f"layers.{n}": place for n, place in layers.items()}
    on_disk = sum(_bytes(model.get_submodule(name)) for name, place in places.items() if place == "disk")
    if on_disk:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if on_disk > free:
            raise InputError(
                f"{folder}: {on_disk / 1e9:.1f} GB of layers go to disk, and {free / 1e9:.1f} GB are free there; give "
                "another directory, or bf16 weights, which take half of it"
            )

    index: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if name == TIED:
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

    log = logging.getLogger("accelerate.big_modeling")
    before = log.level
    log.setLevel(logging.ERROR)  # it warns of what it is here for: that some weights are elsewhere
    try:
        dispatch_model(
            model,
            places,
            main_device=main,
            offload_dir=str(folder) if on_disk else None,
            preload_module_classes=["TransformerLayer"],
        )
    finally:
        log.setLevel(before)
    say(f"{found.source}: {_told(places)}")
    where = torch.device("cuda", main) if isinstance(main, int) else torch.device(main)
    model.forward = _on(model.forward, where)  # type: ignore[method-assign]
    return model


def _budget(memory: Mapping[Place, str | int] | None, device: torch.device) -> tuple[Place, dict[Place, int]]:
    """The place that computes, and bytes for layers by place."""
    from accelerate.utils import get_max_memory

    main: Place = device.type if device.type != "cuda" else device.index or 0
    if memory is None:
        free = {place: int(SHARE * size) for place, size in get_max_memory().items()}
        if device.type != "cuda" or device.index is not None:
            free = {place: size for place, size in free.items() if place in (main, "cpu")}
        return main, free
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    for place in memory:
        if isinstance(place, int) and not 0 <= place < gpus:
            there = f"GPUs 0 to {gpus - 1} are there" if gpus else f"the model is to run on {device.type}"
            raise UsageError(f"memory: names GPU {place}, and {there}; leave it out")
    if device.type == "cuda" and device.index is None:
        main = min((place for place in memory if isinstance(place, int)), default=0)
    try:
        return main, dict(get_max_memory(dict(memory)))
    except (ValueError, TypeError) as error:
        raise UsageError(f"memory: {str(error).rstrip('.')}; write it like cpu=20GB") from None


def _bytes(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


def _told(places: Mapping[str, Place]) -> str:
    """Where layers lie, in a sentence."""
    counts = Counter(place for name, place in places.items() if name.startswith("layers."))
    names = {"cpu": "in memory", "disk": "on disk", "mps": "on the GPU"}
    return "layers: " + ", ".join(f"{n} {names.get(str(place), f'on GPU {place}')}" for place, n in counts.items())


def _on(forward: Callable[..., EsmOutput], device: torch.device) -> Callable[..., EsmOutput]:
    """`ESM2.forward` from and to one device, one call at a time.

    With several GPUs layers see each other's outputs, and an accumulator of contacts those of all layers.
    """
    turn = threading.Lock()

    def one_at_a_time(
        batch: TokenBatch,
        layers: Sequence[int] | None = None,
        logits_at: torch.Tensor | None = None,
        on_attention: OnAttention | None = None,
    ) -> EsmOutput:
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
        return EsmOutput({n: x_TD.to(device) for n, x_TD in output.representations.items()}, output.logits_PV)

    return one_at_a_time
