"""The memory of a training step on each rank, and the tokens that fit.

`memory` goes through the moments of a training step and adds up the bytes alive at each moment: what FSDP2 keeps and
gathers, and what a layer of `esmshard.model` keeps for its backward pass. The largest sum is the result. docs/plan.md
has the formulas and compares them with measured peaks; `benchmarks/peaks.py` measures. Letters: see `esmshard.batch`.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import nn

from esmshard.model.config import ModelConfig, Quantization
from esmshard.parallel import cpu_limits
from esmshard.parallel.layout import BYTES, Layout

Device = Literal["cpu", "cuda", "cuda-padded"]
"""The kind of attention: `cuda` has kernels for packed attention, `cuda-padded` (before Ampere, and fp32) pads."""

FP32 = 4
MIB = 2**20
WORKSPACE = {"cpu": 12 * MIB, "cuda": 96 * MIB, "cuda-padded": 96 * MIB}
"""Bytes that libraries use. CPU: packed blocks of the matrix product, small tensors, pages of the allocator. GPU:
cuBLAS's workspace (32 MiB for each handle on Hopper, 8 before) and rounding of the caching allocator. None of torch's
numbers includes the CUDA context.
"""


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """The sizes of a model for the planner: `n_layers` equal layers, and the root, which is all the rest.

    A tied matrix counts once.
    """

    n_layers: int
    dim: int
    n_heads: int
    layer_parameters: int
    root_parameters: int
    layer_trained: int
    """Parameters of a layer that have gradients and optimizer state."""
    root_trained: int
    ffn_width: int
    """The width of the feed-forward layer."""
    gated: bool = False
    """Whether the feed-forward layer multiplies two products of this width."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before they are rotated."""
    n_logits: int = 33
    """The columns of the logits."""
    inputs: tuple[str, ...] = ("fc1", "fc2", "out", "qkv")
    """The matrices that learn or have a LoRA, in this order. Their input is kept for its gradient."""
    lora: int = 0
    """The sum of the ranks of a layer's LoRA matrices."""
    track_kept: int = 0
    """Numbers that the first layer keeps of a token in addition, because batches have other tracks than the sequence.
    Recomputed layers do not keep them."""
    quantization: Quantization | None = None
    """How the matrices of the layers are stored."""
    layer_quantized: int = 0
    """Parameters of a layer that are stored so. They are whole on every rank."""
    layer_packed: int = 0
    """Their bytes."""

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.n_layers * self.layer_parameters + self.root_parameters

    @property
    def layer_in_full(self) -> int:
        """Return the parameters of a layer that are not quantised."""
        return self.layer_parameters - self.layer_quantized

    @property
    def in_full(self) -> int:
        """Return the number of all parameters that are not quantised."""
        return self.parameters - self.n_layers * self.layer_quantized

    @property
    def trained(self) -> int:
        """Return the number of parameters that learn."""
        return self.n_layers * self.layer_trained + self.root_trained

    def of_rank(self, tensor: int) -> "ModelNumbers":
        """Return the parameters of one of `tensor` ranks that compute each layer together: the whole root, and its part
        of each layer. Norms and summed biases, which are whole on each rank, are few and count as if they were divided.
        """
        layer, trained = -(-self.layer_parameters // tensor), -(-self.layer_trained // tensor)
        return replace(self, layer_parameters=layer, layer_trained=trained)


def numbers_of(
    model: nn.Module, config: ModelConfig, *, tracks: Collection[str] = (), quantization: Quantization | None = None
) -> ModelNumbers:
    """Count the parameters of a model with `layers` after `adapt`, on any device, the meta device too.

    If some layers are frozen, each layer counts as the average, and keeps its inputs as a layer that learns.

    Args:
        model: the model, not divided over ranks yet.
        config: its architecture.
        tracks: the names of the tracks that all batches have besides the sequence.
        quantization: how the matrices of the layers are stored. Their parameters are buffers of the model.
    """
    layers = cast("Sequence[nn.Module]", model.layers)
    n, trained = len(layers), [_count(layer, trained=True) for layer in layers]
    learns = {name: p for name, p in layers[trained.index(max(trained))].named_parameters() if p.requires_grad}
    learning = {name.removesuffix(".weight").removesuffix(".lora_A") for name in learns if name.endswith(".weight")}
    packed = config.matrices if quantization is not None else ()
    quantized = sum(matrix.rows * matrix.columns for matrix in packed)
    return ModelNumbers(
        n_layers=n,
        dim=config.dim,
        n_heads=config.n_heads,
        ffn_width=config.ffn_width,
        gated=config.gated,
        qk_norm=config.qk_norm,
        n_logits=config.n_logits,
        layer_parameters=_count(layers[0]) + quantized,
        root_parameters=_count(model) - n * _count(layers[0]),
        layer_trained=sum(trained) // n,
        root_trained=_count(model, trained=True) - n * (sum(trained) // n),
        inputs=tuple(sorted({matrix.reads for matrix in config.matrices if matrix.path in learning})),
        lora=sum(p.shape[0] for name, p in learns.items() if name.endswith("lora_A.weight")),
        track_kept=sum(map(config.kept_with, tracks)),
        quantization=quantization,
        layer_quantized=quantized,
        layer_packed=sum(matrix.packed_bytes(quantization) for matrix in packed if quantization is not None),
    )


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one rank at the peak of a training step, by purpose."""

    when: str
    """The moment of the peak."""
    parameters: int = 0
    """This rank's share of the weights, fp32, and all quantised weights."""
    gradients: int = 0
    """This rank's share of the gradients, whole gradients of the current layer, and gradients being sent."""
    optimizer: int = 0
    """Two fp32 moments for each trained parameter of the share."""
    gathered: int = 0
    """Whole weights of layers and root in the precision of the arithmetic, buffers of the all-gather, and quantised
    matrices while they are unpacked.
    """
    activations: int = 0
    """Tensors that the trunk keeps for the backward pass, and temporary tensors of the current layer."""
    head: int = 0
    """The same for the logits or the task's head."""
    workspace: int = 0
    """Memory that libraries take for themselves."""
    host: int = 0
    """Bytes outside the device, for `cpu_offload`: weights, gradients and optimizer state. `total` leaves them out."""

    @property
    def total(self) -> int:
        """Return the sum of all fields but `host`."""
        return sum(getattr(self, kind) for kind in KINDS)


KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace")
"""The fields of `Memory` that `total` adds up."""


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of one layer for one token."""

    kept: int
    """Bytes kept from the forward to the backward pass."""
    again: int
    """Further bytes while a checkpointed layer is recomputed, namely the bytes that are not kept."""
    passing: int
    """Further bytes while the backward pass of the layer runs: gradients of intermediate results."""


def layer_bytes(numbers: ModelNumbers, layout: Layout, device: Device, padding: float = 1.0) -> LayerBytes:
    """Return the bytes that one layer keeps of one token, as `esmshard.model` is written.

    Without checkpointing a layer keeps the input (for the first LayerNorm), its normalised form, q, k, v, the
    attention's output, the sum after attention, its normalised form, and the feed-forward layer before and after gelu.
    A gated layer keeps both of its products and what they make. Where queries and keys are normalised, they are kept
    before and after.
    Small tensors are the rotary angles, the attention's log-sum-exp and the LayerNorms' statistics. One more vector is
    needed on a CPU, where the outputs of several sequences are concatenated, and on a padded device, where q, k, v and
    output exist as blocks.

    With `tensor` ranks, each has its part of the tokens of sums, and of the width of q, k, v, attention's output and
    the feed-forward layer. The normalised forms are gathered: all ranks have all tokens of them. With `context` ranks,
    each has its part of the tokens of everything, and in addition the keys and values of all tokens.

    The input of a frozen matrix is not kept: normalised forms, the concatenated output, the output of gelu. If nothing
    in the layers learns, nothing is kept, and the feed-forward layer's vectors are the most at one moment.

    Args:
        numbers: the sizes of the model.
        layout: the layout, for its precision and checkpointing.
        device: the kind of device.
        padding: for attention's blocks on a padded device, tokens with padding over tokens without.
    """
    d, size, tensor, together = numbers.dim, BYTES[layout.precision], layout.tensor, layout.together
    stream = size * d // together
    own, whole, wide = d * size // together, d * size // layout.context, numbers.ffn_width * size // together
    blocks = padding if device == "cuda-padded" else 1.0
    inputs = numbers.inputs
    attended = own if device == "cuda" else round(own * (blocks + ("out" in inputs)))
    qkv = round(3 * own * blocks)
    if layout.context > 1:  # keys and values of all tokens
        qkv += 2 * d * size
    if numbers.qk_norm:  # divided norms keep two forms of queries and keys in fp32
        qkv += 2 * own if tensor == 1 else 4 * FP32 * d // tensor
    products = 2 if numbers.gated else 1
    small = 8 * d // numbers.n_heads // layout.context + (4 * numbers.n_heads + 16) // together
    normalised = whole * (("qkv" in inputs) + ("fc1" in inputs))
    everything = 2 * stream + normalised + qkv + attended + wide * (products + ("fc2" in inputs)) + small
    everything += numbers.lora * size
    gathered = whole if tensor > 1 else 0
    if not numbers.layer_trained:
        return LayerBytes(0, stream + max(wide * (1 + products), wide + gathered), 0)
    # In the backward pass of gelu, the gradients before and after gelu and the gradient of the sum exist. The output of
    # gelu, if it was kept, is freed already. A gate has gradients of both products, and one factor more. Divided ranks
    # first have the gradient of the sum for all tokens and the one after gelu.
    passing = max(wide * (2 * products - ("fc2" in inputs)), wide + gathered) + stream
    if layout.activation_checkpointing == "none":
        return LayerBytes(everything, 0, passing)
    if layout.activation_checkpointing == "full":
        return LayerBytes(stream, everything - stream, passing)
    # `kept_products` says which matrix products are kept. Attention is kept, too. After recomputation, q and k exist
    # with and without rotation; with a LoRA they exist only rotated, because the product was added to a sum. The output
    # of `out` is kept by no layer without checkpointing. Divided ranks keep the sums of out and fc2 for their own
    # tokens.
    sums, queries = whole if tensor == 1 else 2 * own, 3 * own
    kept = stream + queries + own + wide * products + sums + 4 * numbers.n_heads // together
    turned = 0 if numbers.qk_norm or (numbers.lora and "qkv" in inputs) else 2 * own
    return LayerBytes(kept, everything - kept + sums + turned, passing)


def memory(
    numbers: ModelNumbers,
    layout: Layout,
    tokens: int,
    head_bytes: int,
    device: Device,
    *,
    micro_batches: int = 1,
    padding: float = 1.0,
    scoring: bool = False,
) -> Memory:
    """Return the bytes of one rank at the peak of a training step.

    Args:
        numbers: the sizes of the model.
        layout: the division of the model over the ranks.
        tokens: the tokens of a rank's largest micro-batch.
        head_bytes: the bytes that logits or task head keep of it for the backward pass.
        device: the kind of device.
        micro_batches: the micro-batches of a step. From the second one on, gradients exist from the start.
        padding: see `layer_bytes`.
        scoring: whether records of the validation or test set are scored instead, without gradients. The optimizer's
            state is there during a validation; the final evaluation frees it, and each gathered layer, too.
    """
    own = numbers.of_rank(layout.tensor)
    learns = numbers.layer_trained > 0 and not scoring
    n, number, group = own.n_layers, BYTES[layout.precision], layout.group
    here = 0 if layout.cpu_offload and device != "cpu" else FP32  # on the device, for each number of this rank's share
    # The root is divided over the ranks that compute each layer together, too.
    elsewhere = 1 - 1 / layout.tensor
    stored, trained = (
        round(number - elsewhere * of_root) // group
        for number, of_root in ((own.in_full, own.root_parameters), (own.trained, own.root_trained))
    )
    weights = _Weights(own, layout, learns)
    layer = layer_bytes(numbers if learns else replace(numbers, layer_trained=0), layout, device, padding)
    ends = 2 * own.dim * number  # the embedding and the last LayerNorm
    if learns and layout.activation_checkpointing == "none":
        ends += own.track_kept * number

    def at(
        when: str, gradients: int, gathered: int = 0, kept: int | None = None, head: int = 0, gloo: int = 0
    ) -> Memory:
        """Return one moment. `kept` is bytes of a token inside layers; None if there are no activations."""
        return Memory(
            when=when,
            parameters=here * stored + n * own.layer_packed,
            gradients=gradients,
            optimizer=2 * here * trained,
            gathered=gathered,
            activations=0 if kept is None else tokens * (kept + ends),
            head=head,
            workspace=WORKSPACE[device] + gloo,
            host=0 if here else FP32 * (stored + 3 * trained),
        )

    if scoring:
        return at("validation and evaluation", 0, weights.forward(n), layer.kept + layer.again, head_bytes)

    # Gradients: this rank's share of all and of a layer; those of a whole layer while its backward pass runs, and in
    # the precision of the reduction until they are reduced; the root's, which are reduced at the very end.
    share, layer_share = here * trained, here * own.layer_trained // group
    sharded = int(layout.sharded)
    whole, root = sharded * own.layer_trained * number, sharded * own.root_trained * number
    reduce = sharded * own.layer_trained * BYTES[layout.reduce_dtype]
    # The sums over copies stay until the backward pass ends. In fp32 they use the memory of the gradients themselves.
    held = reduce // group if layout.replicas > 1 and layout.reduce_dtype != "fp32" else 0
    before = share if micro_batches > 1 else 0  # those of earlier micro-batches
    if micro_batches > 1 and layout.sharded and layout.accumulate == "unsharded":
        before = own.trained * BYTES[layout.reduce_dtype]

    moments = [
        at(f"forward pass of layer {n} of {n}", before, weights.forward(n), n * layer.kept + layer.again),
        at(
            "backward pass of the head",
            before + (0 if learns else root),
            weights.backward(n, at_work=False),
            n * layer.kept,
            head_bytes,
        ),
        at("optimizer step", share),
    ]
    # Between these moments all sums grow or fall linearly. Without a layer that learns, the backward pass ends at the
    # head.
    for done in sorted({0, min(1, n - 1), max(0, n - 2), n - 1}) if learns else ():
        to_do = n - done
        left = root + done * held + max(before, done * layer_share)
        if before > share:  # shards replace whole gradients
            left = root + done * held + before - done * (before - share) // n
        running, waiting = left + (reduce if done else 0), (to_do - 1) * layer.kept
        gathered, name = weights.backward(to_do, at_work=True), f"layer {to_do} of {n}"
        kept = to_do * layer.kept + layer.again + layer.passing
        # Gloo's reduce-scatter is an all-reduce of a copy.
        gloo = reduce if device == "cpu" and group > 1 else 0
        moments += [
            at(f"backward pass of {name}", running + whole // 3, gathered, kept),
            at(f"end of the backward pass of {name}", running + whole, gathered, waiting),
            at(
                f"reduction of the gradients of {name}",
                left + reduce + whole + layer_share + held,
                weights.backward(to_do - 1, at_work=False),
                waiting,
                gloo=gloo,
            ),
        ]
    return max(moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class _Weights:
    """The bytes of weights in the precision of the arithmetic, besides this rank's share of all weights."""

    numbers: ModelNumbers
    """The parameters of this rank, see `of_rank`."""
    layout: Layout
    learns: bool
    """Whether the backward pass goes through the layers."""

    @property
    def _layer(self) -> int:
        return self.numbers.layer_in_full * BYTES[self.layout.precision]

    @property
    def _root(self) -> int:
        return self.numbers.root_parameters * BYTES[self.layout.precision]

    @property
    def _unpacked(self) -> int:
        """Return the bytes of quantised matrices while a product uses them.

        One matrix is unpacked at a time, and the largest belongs to the feed-forward part. bitsandbytes unpacks int8 to
        two fp32 matrices, one after the other.
        """
        numbers, size = self.numbers, BYTES[self.layout.precision]
        if numbers.quantization is None:
            return 0
        return numbers.dim * numbers.ffn_width * (size if numbers.quantization == "nf4" else 2 * FP32)

    def _copies(self, layers: int, at_work: bool) -> int:
        """Return the bytes of the copies in half precision that one device without FSDP computes with: those of the
        root, and of layers between their forward and their backward pass.

        The copy of a layer that is recomputed is made again. A compiled layer takes its copy as an argument.
        """
        if self.layout.precision == "fp32":
            return 0
        stay = self.learns and (self.layout.activation_checkpointing == "none" or self.layout.compile)
        return self._root + (layers if stay else int(at_work)) * self._layer

    def forward(self, k: int) -> int:
        """Return the bytes in the forward pass of layer k, counted from 1.

        FSDP frees the buffer from which it copied a layer's weights only when the next layer's weights have arrived.
        """
        if not self.layout.sharded:
            return self._copies(k, at_work=True) + self._unpacked
        buffers = 1 if self.layout.group > 1 else 0
        behind = 0 if self.layout.frees_layers else (k - 1) * self._layer
        return self._unpacked + self._root + (1 + buffers) * self._layer + behind

    def backward(self, to_do: int, at_work: bool) -> int:
        """Return the bytes in the backward pass.

        Args:
            to_do: the layers whose backward pass has not ended.
            at_work: whether the backward pass of one of these layers has begun.
        """
        unpacked = self._unpacked if at_work else 0
        if not self.layout.sharded:
            return self._copies(to_do, at_work) + unpacked
        if not self.layout.frees_layers:
            return unpacked + self._root + to_do * self._layer
        # One layer is gathered in advance. A group of one rank copies each weight when it is needed.
        ahead = min(1, to_do - int(at_work)) if self.layout.group > 1 else 0
        return unpacked + self._root + (int(at_work) + ahead) * self._layer


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
    """Return the tokens of the largest micro-batch that fits, at most `share`; 0 if the longest record does not fit.

    Args:
        numbers: the sizes of the model.
        layout: the division of the model over the ranks.
        room: bytes for everything that `memory` counts, weights included.
        head_bytes: returns the bytes of the head for a number of tokens.
        device: the kind of device.
        longest: tokens of the longest record, which must fit into one micro-batch.
        share: tokens of one rank in one step, which a micro-batch never exceeds.
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


def free_bytes(device: torch.device, local_processes: int) -> int:
    """Return the bytes that one process may use: the free memory of its GPU, or its share of the machine's memory.

    The machine's memory is the free memory, limited by what the job or container may still use (`cpu_limits.memory`).
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that this process's allocator holds without use is free, too
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":  # a part of the machine's memory, with Metal's recommended limit
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if not hasattr(os, "sysconf"):  # Windows has no such call; use a share of the memory of small machines
        return 8 * 2**30 // local_processes
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    if (limit := cpu_limits.memory()) is not None:  # a job or container that exceeds its limit is killed
        free = min(free, max(0, limit[0] - limit[1]))
    return free // local_processes
