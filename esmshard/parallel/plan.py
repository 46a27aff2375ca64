"""How much memory a training step takes on each rank, and how many tokens fit. No torch until `free_bytes` is called.

`memory` goes through a training step and adds up, moment by moment, what is alive: what FSDP2 keeps and gathers, and
what a layer of `esmshard.model` keeps for its backward pass. The largest moment is the answer. The formulas are in
docs/plan.md, and how near they come to measured peaks; `benchmarks/peaks.py` measures. Letters: see `esmshard.batch`.

It is a little longer than other files: each moment of a step counts what the others count, and is checked against them.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from esmshard.parallel import allowed
from esmshard.parallel.layout import BYTES, Layout

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda", "cuda-padded"]
"""Where the arithmetic runs: `cuda` has kernels for packed attention, `cuda-padded` (before Ampere, and fp32) pads."""

FP32 = 4
MIB = 2**20
WORKSPACE = {"cpu": 12 * MIB, "cuda": 96 * MIB, "cuda-padded": 96 * MIB}
"""CPU: packed blocks of the matrix product, small tensors, pages of the allocator. GPU: cuBLAS's own workspace (32 MiB
a handle on Hopper, 8 before), rounding of the caching allocator. The CUDA context is in none of torch's numbers."""


MATRICES = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.out_proj": "out",
    "fc1": "fc1",
    "fc2": "fc2",
}
"""Linear layers of a block of `esmshard.model`, by the input that they share."""


class _Parameter(Protocol):
    requires_grad: bool
    shape: Sequence[int]

    def numel(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """What the planner wants to know of a model: `n_layers` equal layers, and the root, which is all the rest.

    A tied matrix counts once.
    """

    n_layers: int
    dim: int
    n_heads: int
    layer_parameters: int
    root_parameters: int
    layer_trained: int
    """Parameters of a layer that get gradients and optimizer state."""
    root_trained: int
    ffn: int = 4
    """Width of the feed-forward layer over `dim`."""
    inputs: tuple[str, ...] = ("fc1", "fc2", "out", "qkv")
    """Of these, in this order, those that learn or have a LoRA: their input is kept for its gradient."""
    lora: int = 0
    """Ranks of a layer's LoRA matrices added up."""

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.n_layers * self.layer_parameters + self.root_parameters

    @property
    def trained(self) -> int:
        """Those that learn."""
        return self.n_layers * self.layer_trained + self.root_trained


def of_model(model: Any, dim: int, n_heads: int) -> ModelNumbers:
    """Count the parameters of a model with `layers`; sharded or not, on the meta device or not.

    Where some layers are frozen, each counts as the average one, and keeps its inputs as one that learns.
    """
    n, all_of_it = len(model.layers), _counts(model.parameters())
    in_layers = [_counts(layer.parameters()) for layer in model.layers]
    in_layer = in_layers[0][0], sum(trained for _, trained in in_layers) // n
    most = max(range(n), key=lambda k: in_layers[k][1])
    learns = {name: p for name, p in model.layers[most].named_parameters() if p.requires_grad}
    matrices = {name.removesuffix(".weight").removesuffix(".lora_A") for name in learns if name.endswith(".weight")}
    return ModelNumbers(
        n_layers=n,
        dim=dim,
        n_heads=n_heads,
        layer_parameters=in_layer[0],
        root_parameters=all_of_it[0] - n * in_layer[0],
        layer_trained=in_layer[1],
        root_trained=all_of_it[1] - n * in_layer[1],
        inputs=tuple(sorted({MATRICES[name] for name in matrices & MATRICES.keys()})),
        lora=sum(p.shape[0] for name, p in learns.items() if name.endswith("lora_A.weight")),
    )


def _counts(parameters: Iterable[_Parameter]) -> tuple[int, int]:
    known = list(parameters)
    return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at the peak of a training step, by what they are."""

    when: str
    """The moment of the peak."""
    parameters: int = 0
    """This rank's share of the weights, fp32."""
    gradients: int = 0
    """Its share of the gradients, whole ones of the layer at work, and what is on its way to the other ranks."""
    optimizer: int = 0
    """Two fp32 moments for each trained parameter of its share."""
    gathered: int = 0
    """Whole weights of layers and root in the precision of the arithmetic, and buffers of the all-gather."""
    activations: int = 0
    """What the trunk keeps for the backward pass, and the temporaries of the layer at work."""
    head: int = 0
    """The same for the logits or the task's head."""
    workspace: int = 0
    """What libraries take for themselves."""
    host: int = 0
    """Outside the device, for `cpu_offload`: weights, gradients and optimizer state. Not in `total`."""

    @property
    def total(self) -> int:
        """All but `host`."""
        return sum(getattr(self, kind) for kind in KINDS)


KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace")
"""Fields of `Memory` that `total` adds up."""


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer for one token."""

    kept: int
    """From the forward to the backward pass."""
    again: int
    """More of them while it is computed, with checkpointing: what is not kept."""
    passing: int
    """More of them while its backward pass runs: gradients on their way through."""


def layer_bytes(numbers: ModelNumbers, layout: Layout, device: Device, padding: float = 1.0) -> LayerBytes:
    """What one layer keeps of one token, as `esmshard.model` is written.

    Without checkpointing: the input (which the first LayerNorm keeps), its normalised form, q, k, v, the attention's
    output, the sum after attention, its normalised form, and the feed-forward layer before and after gelu; and of small
    things the rotary angles, the attention's log-sum-exp and the LayerNorms' statistics. On a CPU the outputs of
    several sequences are laid together, on a padded device q, k, v and output exist as blocks: one more vector.

    Where a matrix is frozen, its input is not kept: normalised forms, the laid-together output, what leaves gelu. If
    nothing in the layers learns, nothing of them is kept, and the feed-forward layer's vectors are the most at a time.

    Args:
        numbers: of the model.
        layout: of its precision and checkpointing.
        device: where it runs.
        padding: of attention's blocks on a padded device: tokens with padding over tokens without.
    """
    d, size = numbers.dim, BYTES[layout.precision]
    # Autocast leaves the sum of all layers in fp32; FSDP casts it.
    stream = FP32 if not layout.sharded else size
    wide = numbers.ffn * d * size
    blocks = padding if device == "cuda-padded" else 1.0
    inputs = numbers.inputs
    attended = d * size if device == "cuda" else round(d * size * (blocks + ("out" in inputs)))
    qkv = round(3 * d * size * blocks)
    small = 4 * d // numbers.n_heads + 4 * numbers.n_heads + 16
    normalised = size * d * (("qkv" in inputs) + ("fc1" in inputs))
    everything = 2 * stream * d + normalised + qkv + attended + wide * (1 + ("fc2" in inputs)) + small
    everything += numbers.lora * size
    if not numbers.layer_trained:
        return LayerBytes(0, stream * d + wide * 2, 0)
    # Backward through gelu: gradients before and after it are both there, and that of the sum; the output, if it was
    # kept, is not.
    passing = wide * (1 if "fc2" in inputs else 2) + stream * d
    if layout.activation_checkpointing == "none":
        return LayerBytes(everything, 0, passing)
    if layout.activation_checkpointing == "full":
        return LayerBytes(stream * d, everything - stream * d, passing)
    # Outputs of three matrix products (q, k, v are one) and of attention; not of fc2. Once the rest is computed again,
    # q, k, v are there turned and not turned; with a LoRA turned only, the product having gone into a sum.
    kept = stream * d + 3 * size * d + size * d + wide + size * d + 4 * numbers.n_heads
    turned = 0 if numbers.lora and "qkv" in inputs else 3 * size * d
    return LayerBytes(kept, everything - kept + size * d + turned, passing)


def memory(
    numbers: ModelNumbers,
    layout: Layout,
    tokens: int,
    head_bytes: int,
    device: Device,
    *,
    micro_batches: int = 1,
    padding: float = 1.0,
) -> Memory:
    """Bytes of one rank at the peak of a training step.

    Args:
        numbers: of the model.
        layout: of the model over the ranks.
        tokens: of the largest micro-batch of a rank.
        head_bytes: what logits or task head keep of it for the backward pass, bytes.
        device: where the arithmetic runs.
        micro_batches: of a step. From the second one on gradients are there from the start.
        padding: see `layer_bytes`.
    """
    found = _moments(numbers, layout, tokens, head_bytes, device, micro_batches, padding)
    peak = max(found, key=lambda moment: moment.total)
    if not layout.cpu_offload or device == "cpu":
        return peak
    group = layout.group
    host = FP32 * (numbers.parameters + numbers.trained) // group + 2 * FP32 * numbers.trained // group
    return replace(peak, host=host)


def _moments(
    numbers: ModelNumbers,
    layout: Layout,
    tokens: int,
    head_bytes: int,
    device: Device,
    micro_batches: int,
    padding: float,
) -> list[Memory]:
    """The moments of a step at which the peak can be. Between them everything grows or falls in a straight line."""
    n, group, size = numbers.n_layers, layout.group, BYTES[layout.precision]
    here = 0 if layout.cpu_offload and device != "cpu" else FP32  # bytes a number of this rank's share
    share, layer_share = here * numbers.trained // group, here * numbers.layer_trained // group

    # Gradients of a layer while its backward pass runs, and from then on until they have been reduced.
    whole = numbers.layer_trained * (size if layout.sharded else 0)
    reduce = numbers.layer_trained * BYTES[layout.reduce_dtype] if layout.sharded else 0
    before = share if micro_batches > 1 else 0
    if micro_batches > 1 and layout.sharded and layout.accumulate == "unsharded":
        before = numbers.trained * BYTES[layout.reduce_dtype]
    # With several copies, FSDP keeps what it added up over them until the backward pass ends; in fp32 that is where the
    # gradients themselves lie.
    held = reduce // group if layout.replicas > 1 and layout.reduce_dtype != "fp32" else 0
    root = numbers.root_trained * size if layout.sharded else 0  # reduced at the very end

    each = layer_bytes(numbers, layout, device, padding)
    kept, again, passing = each.kept * tokens, each.again * tokens, each.passing * tokens
    ends = 2 * numbers.dim * tokens * (size if layout.sharded else FP32)  # embedding, and the last LayerNorm
    # Gloo reduces and scatters by way of an all-reduce of a copy.
    gloo = reduce if device == "cpu" and group > 1 else 0

    always = Memory(
        when="",
        parameters=here * numbers.parameters // group,
        optimizer=2 * here * numbers.trained // group,
        workspace=WORKSPACE[device],
    )

    def left(layers_done: int) -> int:
        """Gradients when so many layers are done."""
        extra = root + layers_done * held
        if before > share:  # unsharded ones give way to shards
            return extra + before - layers_done * (before - share) // n
        return extra + max(before, layers_done * layer_share)

    k = max(1, n - layout.prefetch_forward)
    moments = [
        replace(
            always,
            when=f"forward pass of layer {k} of {n}",
            gradients=before,
            gathered=_gathered_forward(numbers, layout, k),
            activations=k * kept + again + ends,
        ),
        replace(
            always,
            when="backward pass of the head",
            gradients=before + (0 if numbers.layer_trained else root),
            gathered=_gathered(numbers, layout, n, at_work=False),
            activations=n * kept + ends,
            head=head_bytes,
        ),
        replace(always, when="optimizer step", gradients=share),
    ]
    if not numbers.layer_trained:  # the backward pass ends at the head
        return moments
    for done in sorted({0, min(1, n - 1), max(0, n - 1 - layout.prefetch_backward), n - 1}):
        sent, name = reduce if done else 0, f"layer {n - done} of {n}"
        moments += [
            replace(
                always,
                when=f"backward pass of {name}",
                gradients=left(done) + sent + whole // 3,
                gathered=_gathered(numbers, layout, n - done, at_work=True),
                activations=(n - done) * kept + again + passing + ends,
            ),
            replace(
                always,
                when=f"end of the backward pass of {name}",
                gradients=left(done) + sent + whole,
                gathered=_gathered(numbers, layout, n - done, at_work=True),
                activations=(n - done - 1) * kept + ends,
            ),
            replace(
                always,
                when=f"reduction of the gradients of {name}",
                gradients=left(done) + reduce + whole + layer_share + held,
                gathered=_gathered(numbers, layout, n - done - 1, at_work=False),
                activations=(n - done - 1) * kept + ends,
                workspace=WORKSPACE[device] + gloo,
            ),
        ]
    return moments


def _gathered_forward(numbers: ModelNumbers, layout: Layout, k: int) -> int:
    """Bytes of gathered weights in the forward pass of layer k, counted from 1.

    FSDP frees the buffer from which it copied a layer's weights only when the next layer's have come.
    """
    layer, root = (p * BYTES[layout.precision] for p in (numbers.layer_parameters, numbers.root_parameters))
    if not layout.sharded:
        return 0 if layout.precision == "fp32" else k * layer * 3 // 4
    buffers = 1 + min(layout.prefetch_forward, numbers.n_layers - k) if layout.group > 1 else 0
    behind = 0 if layout.free_layers is True else (k - 1) * layer // (int(layout.free_layers) or 1)
    return root + (1 + buffers) * layer + behind


def _gathered(numbers: ModelNumbers, layout: Layout, to_do: int, at_work: bool) -> int:
    """Bytes of gathered weights in the backward pass.

    Args:
        numbers: of the model.
        layout: of the model.
        to_do: layers whose backward pass has not ended.
        at_work: whether one of these is at it.
    """
    size = BYTES[layout.precision]
    layer, root = numbers.layer_parameters * size, numbers.root_parameters * size
    if not layout.sharded:
        # Autocast keeps a copy of each matrix that it cast until the forward pass ends, and what is not computed again
        # until the backward pass has used it. q, k, v are not cast one by one.
        half = 0 if layout.precision == "fp32" else layer * 3 // 4
        kept = layout.activation_checkpointing == "none" or (to_do == numbers.n_layers and not at_work)
        return half * (to_do if kept else int(at_work))
    if layout.free_layers is False:
        return root + to_do * layer
    waiting = to_do - int(at_work)
    # A group of one copies each weight when it is wanted, and nothing is asked for ahead of time.
    ahead = min(layout.prefetch_backward, waiting) if layout.group > 1 else 0
    resting = 0 if layout.free_layers is True else (waiting - ahead) * layer // layout.free_layers
    return root + (int(at_work) + ahead) * layer + resting


def largest_micro_batch(
    numbers: ModelNumbers,
    layout: Layout,
    room: int,
    head_bytes: Callable[[int], int],
    device: Device,
    *,
    longest: int,
    share: int,
    padding: float = 1.0,
) -> int:
    """Tokens of the largest micro-batch that fits, at most `share`; 0 if not even the longest record does.

    Args:
        numbers: of the model.
        layout: of the model over the ranks.
        room: bytes for all that `memory` counts, weights included.
        head_bytes: of a micro-batch of so many tokens.
        device: where the arithmetic runs.
        longest: tokens of the longest record, which must fit into one micro-batch.
        share: tokens of one rank in one step: more are never there.
        padding: see `layer_bytes`.
    """

    def fits(tokens: int) -> bool:
        parts = -(-share // tokens)
        found = memory(numbers, layout, tokens, head_bytes(tokens), device, micro_batches=parts, padding=padding)
        return found.total <= room

    most = max(longest, share)
    if fits(most):
        return most
    low, high = longest, most  # fits, does not fit
    if not fits(longest):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def free_bytes(device: "torch.device", local_processes: int) -> int:
    """Memory that one process may count on: that of its GPU that is free, or its share of the machine's.

    Of the machine it is what is free, and what the job or container may still have (`allowed.memory`).
    """
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator of this process holds and does not use is free, too
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":  # a part of the machine's memory; Metal says how much it is meant to take
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if not hasattr(os, "sysconf"):  # Windows does not say; a share of what small machines have
        return 8 * 2**30 // local_processes
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    if (limit := allowed.memory()) is not None:  # a job or container that takes more is killed
        free = min(free, max(0, limit[0] - limit[1]))
    return free // local_processes
