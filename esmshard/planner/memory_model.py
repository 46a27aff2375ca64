"""The memory of a training step on each rank.

`memory` adds up the bytes alive at each moment of a step: what FSDP2 keeps and gathers, and what a layer of
`esmshard.model` keeps for its backward pass. docs/plan.md has the formulas and compares them with measured peaks;
`benchmarks/peaks.py` measures. Letters: see `esmshard.batch`.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from esmshard.model.config import ModelConfig, Quantization
from esmshard.parallel import cpu_limits
from esmshard.parallel.layout import BYTES, Layout

# The kind of attention: `cuda` has kernels for packed attention, `cuda-padded` (before Ampere, and fp32) pads.
Device = Literal["cpu", "cuda", "cuda-padded"]
FP32 = 4
# What libraries use. CPU: packed blocks of the matrix product, small tensors, pages of the allocator. GPU: cuBLAS's
# workspace (32 MiB for each handle on Hopper) and rounding of the caching allocator, without the CUDA context.
WORKSPACE = {"cpu": 12 << 20, "cuda": 96 << 20, "cuda-padded": 96 << 20}  # bytes


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """The parameters of a model: its equal layers, and the root, which is all the rest. A tied matrix counts once."""

    config: ModelConfig
    layer_parameters: int
    root_parameters: int
    layer_trained: int  # those with gradients and optimizer state
    root_trained: int
    inputs: tuple[str, ...] = ("fc1", "fc2", "out", "qkv")  # `Matrix.reads` of matrices that learn or have a LoRA
    lora: int = 0  # the sum of the ranks of a layer's LoRA matrices
    track_kept: int = 0  # numbers that the first layer keeps of a token because batches have further tracks
    quantization: Quantization | None = None
    layer_quantized: int = 0  # those of `layer_parameters` in 4 or 8 bits, which are whole on every rank
    layer_packed: int = 0  # the bytes of these

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.config.n_layers * self.layer_parameters + self.root_parameters

    @property
    def trained(self) -> int:
        """The number of parameters that learn."""
        return self.config.n_layers * self.layer_trained + self.root_trained

    def of_rank(self, tensor: int) -> "ModelNumbers":
        """Return the whole root and one of `tensor` parts of a layer. Norms and summed biases, which each rank holds in
        full, are few and count as if they were divided.
        """
        layer, trained = -(-self.layer_parameters // tensor), -(-self.layer_trained // tensor)
        return replace(self, layer_parameters=layer, layer_trained=trained)


def numbers_of(
    model: nn.Module, config: ModelConfig, *, tracks: Collection[str] = (), quantization: Quantization | None = None
) -> ModelNumbers:
    """Count the parameters of a model with `layers` after `adapt` and before it is divided, on the meta device too.

    `tracks` are those that all batches have besides the sequence. If some layers are frozen, each layer counts as the
    average, and keeps its inputs as a layer that learns. Quantised matrices are buffers of the model.
    """

    def count(module: nn.Module, trained: bool = False) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)

    layers = cast("Sequence[nn.Module]", model.layers)
    n, trained = len(layers), [count(layer, trained=True) for layer in layers]
    learns = {name: p for name, p in layers[trained.index(max(trained))].named_parameters() if p.requires_grad}
    learning = {name.removesuffix(".weight").removesuffix(".lora_A") for name in learns if name.endswith(".weight")}
    quantized = sum(matrix.rows * matrix.columns for matrix in config.matrices) if quantization else 0
    return ModelNumbers(
        config=config,
        layer_parameters=count(layers[0]) + quantized,
        root_parameters=count(model) - n * count(layers[0]),
        layer_trained=sum(trained) // n,
        root_trained=count(model, trained=True) - n * (sum(trained) // n),
        inputs=tuple(sorted({matrix.reads for matrix in config.matrices if matrix.path in learning})),
        lora=sum(p.shape[0] for name, p in learns.items() if name.endswith("lora_A.weight")),
        track_kept=sum(map(config.kept_with, tracks)),
        quantization=quantization,
        layer_quantized=quantized,
        layer_packed=sum(matrix.packed_bytes(quantization) for matrix in config.matrices) if quantization else 0,
    )


KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one rank at the peak of a training step, by purpose."""

    when: str  # the moment of the peak
    parameters: int  # this rank's share of the weights, fp32, and all quantised weights
    gradients: int  # this rank's share, whole gradients of the current layer, and those being sent
    optimizer: int  # two fp32 moments for each trained parameter of the share
    gathered: int  # whole weights in the precision of the arithmetic, gather buffers, unpacked quantised matrices
    activations: int  # what the trunk keeps for the backward pass, and temporary tensors of the current layer
    head: int  # the same for the logits or the task's head
    workspace: int  # what libraries take for themselves
    total: int = field(init=False)  # the sum of KINDS
    host: int  # weights, gradients and optimizer state outside the device, for `cpu_offload`

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(getattr(self, kind) for kind in KINDS))


class LayerBytes(NamedTuple):
    """The bytes of one layer for one token."""

    kept: int  # from the forward to the backward pass
    again: int  # further ones while a checkpointed layer is recomputed, namely what is not kept
    passing: int  # further ones in the backward pass of the layer: gradients of intermediate results


def layer_bytes(numbers: ModelNumbers, layout: Layout, device: Device, padding: float = 1.0) -> LayerBytes:
    """Return the bytes that one layer keeps of one token. docs/plan.md lists the vectors.

    The input of a frozen matrix is not kept: normalised forms, the concatenated output, the output of gelu. If nothing
    in the layers learns, nothing is kept, and the feed-forward layer's vectors are the most at one moment. `padding` is
    the number of tokens with padding over the number without, for attention on a padded device.
    """
    config, inputs, size = numbers.config, numbers.inputs, BYTES[layout.precision]
    d, n_heads, tensor, together = config.dim, config.n_heads, layout.tensor, layout.together
    own, whole, wide = d * size // together, d * size // layout.context, config.ffn_width * size // together
    products, output = 2 if config.gated else 1, int("fc2" in inputs)
    blocks = padding if device == "cuda-padded" else 1.0
    # The layer's input and the sum after attention; their normalised forms, which divided ranks gather; the part of
    # feed-forward; q, k, v and attention's output, which a CPU concatenates and a padded device has as blocks, too.
    everything = 2 * own + whole * (("qkv" in inputs) + ("fc1" in inputs)) + wide * (products + output)
    everything += round(3 * own * blocks) + (own if device == "cuda" else round(own * (blocks + ("out" in inputs))))
    if layout.context > 1:  # keys and values of all tokens
        everything += 2 * d * size
    if config.qk_norm:  # divided norms keep two forms of queries and keys in fp32
        everything += 2 * own if tensor == 1 else 4 * FP32 * d // tensor
    # The rotary angles, the log-sum-exp and the statistics of norms; the products of LoRA.
    everything += 8 * d // n_heads // layout.context + (4 * n_heads + 16) // together + numbers.lora * size
    gathered = whole if tensor > 1 else 0
    if not numbers.layer_trained:
        return LayerBytes(0, own + max(wide * (1 + products), wide + gathered), 0)
    # In gelu's backward pass there are the gradients before and after it and that of the sum; a kept output of gelu is
    # freed already. A gate has gradients of both products, and one factor more. Divided ranks first have the one after
    # gelu and that of the sum for all tokens.
    passing = max(wide * (2 * products - output), wide + gathered) + own
    if layout.activation_checkpointing == "none":
        return LayerBytes(everything, 0, passing)
    if layout.activation_checkpointing == "full":
        return LayerBytes(own, everything - own, passing)
    # Kept are attention and the products that `kept_products` names; divided ranks keep the sums of `out` and fc2 for
    # their own tokens. After recomputation, q and k exist with and without rotation; with a LoRA only rotated, because
    # the product was added to a sum.
    sums = whole if tensor == 1 else 2 * own
    kept = 5 * own + wide * products + sums + 4 * n_heads // together
    turned = 0 if config.qk_norm or (numbers.lora and "qkv" in inputs) else 2 * own
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

    `tokens` and `head_bytes` are those of the largest micro-batch; the head keeps its bytes for the backward pass. From
    the second one of `micro_batches` on, gradients exist from the start. `padding` is that of `layer_bytes`. With
    `scoring`, validation or test records are scored instead: without gradients, beside the optimizer's state.
    """
    own, config, sharded = numbers.of_rank(layout.tensor), numbers.config, int(layout.sharded)
    n, size, group = config.n_layers, BYTES[layout.precision], layout.group
    learns, recomputes = numbers.layer_trained > 0 and not scoring, layout.activation_checkpointing != "none"
    layer = layer_bytes(numbers if learns else replace(numbers, layer_trained=0), layout, device, padding)
    here = 0 if layout.cpu_offload and device != "cpu" else FP32  # on the device, for each number of this rank's share
    in_full = own.layer_parameters - own.layer_quantized
    # The root is divided over the ranks that compute each layer together, too.
    stored = round(n * in_full + own.root_parameters / layout.tensor) // group
    trained = round(n * own.layer_trained + own.root_trained / layout.tensor) // group
    # The embedding and the last LayerNorm, and what tracks add to the first layer.
    ends = (2 * config.dim + (own.track_kept if learns and not recomputes else 0)) * size
    # A product unpacks one quantised matrix at a time, and the largest belongs to the feed-forward part. bitsandbytes
    # unpacks int8 to two fp32 matrices, one after the other.
    unpacked = config.dim * config.ffn_width * {None: 0, "nf4": size, "int8": 2 * FP32}[own.quantization]

    def gathered(to_do: int, *, at_work: bool, forward: bool = False) -> int:
        """Return the bytes of whole weights: the root's, and of so many layers. The backward pass of `to_do` layers has
        not ended, and `at_work` says whether one of them computes.
        """
        if not sharded and layout.precision == "fp32":
            return unpacked * at_work
        if not sharded:
            # One device computes with copies. That of a layer stays until the backward pass, unless it is made again. A
            # compiled layer takes its copy as an argument.
            layers = to_do if learns and (not recomputes or layout.compile) else int(at_work)
        elif forward:  # a layer's buffer, from which its weights were copied, stays until the next layer has arrived
            layers = 1 + (group > 1) + (0 if layout.frees_layers else n - 1)
        elif layout.frees_layers:  # one more is gathered in advance; a group of one rank copies a weight when needed
            layers = at_work + (min(1, to_do - at_work) if group > 1 else 0)
        else:
            layers = to_do
        return unpacked * at_work + (own.root_parameters + layers * in_full) * size

    # Gradients: this rank's share of all and of a layer; those of a whole layer while its backward pass runs, and in
    # the precision of the reduction until they are reduced; the root's, which are reduced at the very end.
    share, layer_share = here * trained, here * own.layer_trained // group
    whole, root = sharded * own.layer_trained * size, sharded * own.root_trained * size
    reduce = sharded * own.layer_trained * BYTES[layout.reduce_dtype]
    gloo = reduce if device == "cpu" and group > 1 else 0  # gloo's reduce-scatter is an all-reduce of a copy
    # The sums over copies stay until the backward pass ends. In fp32 they use the memory of the gradients themselves.
    held = reduce // group if layout.replicas > 1 and layout.reduce_dtype != "fp32" else 0
    before = share if micro_batches > 1 else 0  # those of earlier micro-batches
    if micro_batches > 1 and sharded and layout.accumulate == "unsharded":
        before = own.trained * BYTES[layout.reduce_dtype]

    at_head = before + (0 if learns else root)  # without a layer that learns, the backward pass ends at the head

    def kept(of_layers: int) -> int:
        return tokens * (of_layers + ends)

    in_forward = gathered(n, at_work=True, forward=True)
    # Of each moment the bytes that differ: gradients, gathered weights, activations, head, gloo's copy.
    moments = [
        (f"forward pass of layer {n} of {n}", before, in_forward, kept(n * layer.kept + layer.again), 0, 0),
        ("backward pass of the head", at_head, gathered(n, at_work=False), kept(n * layer.kept), head_bytes, 0),
        ("optimizer step", share, 0, 0, 0, 0),
    ]
    if scoring:
        moments = [("validation and evaluation", 0, in_forward, kept(layer.kept + layer.again), head_bytes, 0)]
    # Between these moments all sums grow or fall linearly.
    for done in sorted({0, min(1, n - 1), max(0, n - 2), n - 1}) if learns else ():
        to_do, name = n - done, f"layer {n - done} of {n}"
        left = root + done * held + max(before, done * layer_share)
        if before > share:  # shards replace whole gradients
            left = root + done * held + before - done * (before - share) // n
        running, at_work = left + (reduce if done else 0), gathered(to_do, at_work=True)
        sent, waiting = left + reduce + whole + layer_share + held, kept((to_do - 1) * layer.kept)
        recomputed = kept(to_do * layer.kept + layer.again + layer.passing)
        moments += [
            (f"backward pass of {name}", running + whole // 3, at_work, recomputed, 0, 0),
            (f"end of the backward pass of {name}", running + whole, at_work, waiting, 0, 0),
            (f"reduction of the gradients of {name}", sent, gathered(to_do - 1, at_work=False), waiting, 0, gloo),
        ]
    when, gradients, whole_weights, activations, head, copied = max(moments, key=lambda moment: sum(moment[1:]))
    return Memory(
        when=when,
        parameters=here * stored + n * own.layer_packed,
        gradients=gradients,
        optimizer=2 * here * trained,
        gathered=whole_weights,
        activations=activations,
        head=head,
        workspace=WORKSPACE[device] + copied,
        host=0 if here else FP32 * (stored + 3 * trained),
    )


def free_bytes(device: torch.device, local_processes: int) -> int:
    """Return the bytes that one process may use: the free memory of its GPU, or its share of what the machine, and the
    job or container in it, may still use.
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
