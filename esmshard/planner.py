"""Estimates memory and time of a run before it starts, and finds the best strategy, for `esmshard plan`.

The function `memory` adds up the memory at each moment of a step: the weights that FSDP2 keeps and gathers, and the
tensors that a layer keeps for its backward pass. docs/plan.md has the formulas, and compares the estimates with peaks
that `benchmarks/peaks.py` measured.

The function `cost` is a roofline model. While a layer computes, FSDP gathers the weights of the next layer and reduces
the gradients of the previous layer. Communication is called exposed while nothing is computed. Ranks that compute a
layer together exchange activations, which is always exposed. Only the constants `*_SHARE` were fitted, once for all
models and machines. `benchmarks/published.py` compares `cost` with published runs.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import SCORED_TOKENS
from esmshard.data.splits.recipe_splits import in_tokens, open_split
from esmshard.data.tracks import track_files
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import is_hub_name
from esmshard.model import hub, weights
from esmshard.model.config import ModelConfig, Quantization
from esmshard.model.families.family_registry import SIZES, build, family_of, released_name
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.parallel import cpu_limits
from esmshard.parallel.layout import BYTES, STRATEGIES, Layout, check_tensor, layout
from esmshard.recipe.sections import Recipe, TaskSettings
from esmshard.tasks.base import Task
from esmshard.tasks.registry import new_task

MIB, GIB = 2**20, 2**30

# A real program reaches these shares of the speeds in a data sheet. MATMUL: large matrix products, with launch gaps and
# lower clocks. ATTENTION: FlashAttention-2, forward and backward (Dao 2023, arXiv:2307.08691, figures 4 to 6, A100).
# HBM: memory traffic of element-wise kernels. LINK: large collectives (nccl-tests, bus bandwidth).
MATMUL_SHARE, ATTENTION_SHARE, HBM_SHARE, LINK_SHARE = 0.68, 0.4, 0.8, 0.75
LATENCY, HOP = 30e-6, 5e-6  # seconds that an empty collective takes in a machine, and for each additional machine
LAUNCH = 4e-4  # seconds in which a CPU launches the kernels of a layer's forward pass, without compilation
HOST = 20e9  # bytes/s with `cpu_offload`: for copies over PCIe, and for AdamW in the CPU's memory
# AdamW's memory traffic in bytes per parameter: it reads weight, gradient and two moments, and writes weight and
# moments. Clipping reads and writes the gradient.
ADAMW_BYTES = 40
RESERVE = 0.1  # the share of a GPU's memory that a plan leaves free, because the estimate has errors
AS_GOOD = 1.03  # step times within this factor count as equal; then the option with the smallest memory is best
MOST_TOKENS = 1 << 20  # the maximum size of a micro-batch, in tokens
SHOWN = 16  # the maximum number of options in the printed table
HEAD = "strategy checkpointing weights grads optim gather activ head other total fits most tokens ms/step exposed GiB"

# A `cuda-padded` GPU (before Ampere, or in fp32) has only attention kernels that need padded sequences.
Device = Literal["cpu", "cuda", "cuda-padded"]
FP32 = 4
# The memory that libraries use, in bytes. CPU: matrix products and the allocator. GPU: cuBLAS (32 MiB for each handle
# on Hopper) and rounding by the caching allocator, without the CUDA context.
WORKSPACE = {"cpu": 12 << 20, "cuda": 96 << 20, "cuda-padded": 96 << 20}


@dataclass(frozen=True)
class GPU:
    """Describes a kind of GPU. The speeds are from the data sheet, for dense products (without sparsity)."""

    name: str
    memory_bytes: int  # the memory that the driver reports, in bytes
    half_flops: float  # FLOP/s of the tensor cores in bf16 (in fp16 if there is no bf16), with sums in fp32
    fp32_flops: float  # FLOP/s of fp32 products with torch's default settings, which do not use TF32
    hbm: float  # bytes/s that the GPU can read from and write to its own memory
    link: float  # bytes/s that a GPU can receive from the other GPUs of its machine, over NVLink or else PCIe
    has_bf16: bool = True  # whether the compute capability is at least 8.0, which attention without padding also needs

    def flops(self, precision: str) -> float:
        """Return the peak FLOP/s of matrix products in a precision."""
        return self.fp32_flops if precision == "fp32" else self.half_flops


# Sources. Memory: `nvidia-smi`, with ECC on. Speeds: NVIDIA's data sheets (half of the figures "with sparsity"); for
# GeForce cards the architecture white papers, fp16 with fp32 sums. Links: NVLink 2, 3, 4, 5 have 300, 600, 900, 1800
# GB/s in both directions together; PCIe 3, 4, 5 x16 have 16, 32, 64 GB/s each way.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("V100-16GB", 16160 * MIB, 125e12, 15.7e12, 0.9e12, 150e9, has_bf16=False),
        GPU("V100-32GB", 32510 * MIB, 125e12, 15.7e12, 0.9e12, 150e9, has_bf16=False),
        GPU("T4-16GB", 15109 * MIB, 65e12, 8.1e12, 0.32e12, 16e9, has_bf16=False),
        GPU("RTX3090-24GB", 24268 * MIB, 71e12, 35.6e12, 0.936e12, 32e9),
        GPU("RTX4090-24GB", 24564 * MIB, 165.2e12, 82.6e12, 1.008e12, 32e9),
        GPU("RTX5090-32GB", 32607 * MIB, 209.6e12, 104.8e12, 1.792e12, 64e9),
        GPU("A10G-24GB", 23028 * MIB, 70e12, 35e12, 0.6e12, 32e9),
        GPU("L4-24GB", 23034 * MIB, 121e12, 30.3e12, 0.3e12, 32e9),
        GPU("A6000-48GB", 48685 * MIB, 154.8e12, 38.7e12, 0.768e12, 32e9),
        GPU("L40S-48GB", 46068 * MIB, 362e12, 91.6e12, 0.864e12, 32e9),
        GPU("A100-40GB", 40536 * MIB, 312e12, 19.5e12, 1.555e12, 300e9),
        GPU("A100-80GB", 81251 * MIB, 312e12, 19.5e12, 2.039e12, 300e9),
        GPU("H100-80GB", 81559 * MIB, 989e12, 67e12, 3.35e12, 450e9),
        GPU("H200-141GB", 143771 * MIB, 989e12, 67e12, 4.8e12, 450e9),
        GPU("B200-180GB", 183359 * MIB, 2250e12, 75e12, 7.7e12, 900e9),
    )
}


def data_sheet(name: str, memory_bytes: int | None = None) -> GPU | None:
    """Return the GPU in the table `GPUS` for a `name` from the driver, or None if the table has no such GPU.

    If the table has several such GPUs, return the GPU whose memory is nearest to `memory_bytes`.
    """
    joined = re.sub(r"\bRTX (?=\d)|(?<=\d) (?=(?:TI|PCIE|NVL)\b)", lambda part: part[0].strip(), name.upper())
    words = re.findall(r"[A-Z]+\d*[A-Z]*", joined)
    rows = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    return min(rows, key=lambda gpu: abs(gpu.memory_bytes - (memory_bytes or gpu.memory_bytes)), default=None)


@dataclass(frozen=True)
class Machines:
    """Describes the machines of a plan. All machines are equal, all GPUs are equal, and each GPU has one process."""

    gpu: GPU
    per_machine: int
    nodes: int = 1
    network: float = 25e9  # bytes/s that a GPU can receive from other machines; by default an InfiniBand HDR port

    @property
    def world_size(self) -> int:
        """The number of GPUs on all machines together, which is also the number of processes."""
        return self.per_machine * self.nodes

    @property
    def room(self) -> int:
        """The memory of one GPU for tensors, in bytes: all except 1 GiB, which NCCL, CUDA and kernels use."""
        return self.gpu.memory_bytes - 1024 * MIB

    def __str__(self) -> str:
        on = f" on each of {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.per_machine} x {self.gpu.name}{on}"


def parse(text: str, nodes: int = 1, network_gbit: float = 200, memory_gb: float | None = None) -> Machines:
    """Read the GPUs of one machine from a text such as `8xA100-40GB`, `A100-80GB` or `4xL4`.

    `network_gbit` is the network speed for each GPU, in Gbit/s. With `memory_gb`, any name is allowed. The plan then
    assumes the speeds of an A10G, so only the order of strategies is useful. Raises `UsageError` if the name fits
    no GPU or several GPUs of `GPUS`, or a number is too small.
    """
    count, name = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text.strip(), re.IGNORECASE).groups()  # type: ignore[union-attr]
    per_machine, plain = int(count or 1), name.upper().replace(" ", "")
    if min(per_machine, nodes) < 1 or network_gbit <= 0 or (memory_gb is not None and memory_gb <= 1):
        raise UsageError("--gpus, --nodes, --network and --memory: each number must be at least 1")
    rows = [gpu for gpu in GPUS.values() if plain in (gpu.name, gpu.name.partition("-")[0])]
    if memory_gb is not None:  # drivers report up to 3% less memory than a GPU's name says
        rows = [replace(GPUS["A10G-24GB"], name=name, memory_bytes=int(memory_gb * 2**30 * 0.97))]
    if len(rows) != 1:
        known = ", ".join(gpu.name for gpu in rows or GPUS.values())
        raise UsageError(f"--gpus {text}: choose one of {known}; for another GPU add its memory: --memory 24")
    return Machines(rows[0], per_machine, nodes, network_gbit * 1e9 / 8)


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """Counts the parameters of a model: in each layer (all layers are equal), and in the root (outside layers)."""

    config: ModelConfig
    layer_parameters: int
    root_parameters: int
    layer_trained: int  # parameters of a layer that are trained, so they have gradients and optimizer state
    root_trained: int
    inputs: tuple[str, ...] = ("fc1", "fc2", "out", "qkv")  # `Matrix.reads` of the trained matrices
    lora: int = 0  # the sum of all LoRA ranks in a layer
    track_kept: int = 0  # numbers per token that the first layer keeps for additional tracks, such as 3Di letters
    quantization: Quantization | None = None
    layer_quantized: int = 0  # parameters of a layer in 4 or 8 bits, which every rank has
    layer_packed: int = 0  # the size of a layer's quantised parameters, in bytes

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return self.config.n_layers * self.layer_parameters + self.root_parameters

    @property
    def trained(self) -> int:
        """The number of trained parameters of the model."""
        return self.config.n_layers * self.layer_trained + self.root_trained

    def of_rank(self, tensor: int) -> "ModelNumbers":
        """Return the numbers for one of `tensor` ranks that divide each layer but not the root.

        The few parameters of norms and biases count as divided, though some are not.
        """
        layer, trained = -(-self.layer_parameters // tensor), -(-self.layer_trained // tensor)
        return replace(self, layer_parameters=layer, layer_trained=trained)


def numbers_of(
    model: nn.Module, config: ModelConfig, *, tracks: Collection[str] = (), quantization: Quantization | None = None
) -> ModelNumbers:
    """Count the parameters of a model with `layers`. Call this function after `FineTuner.adapt` and before `shard`.

    `tracks` are the tracks that all batches have in addition to the sequence. If some layers are frozen, the result's
    `layer_trained` is the mean over all layers, and its `inputs` describes the layer with the most trained parameters.
    """

    def count(module: nn.Module, trained: bool = False) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)

    layers = cast("Sequence[nn.Module]", model.layers)
    n, trained = len(layers), [count(layer, trained=True) for layer in layers]
    most_trained = layers[trained.index(max(trained))]
    trained_matrices = [n for n, p in most_trained.named_parameters() if p.requires_grad and n.endswith(".weight")]
    paths = {name.removesuffix(".weight").removesuffix(".lora_A") for name in trained_matrices}
    quantized = sum(matrix.rows * matrix.columns for matrix in config.matrices) if quantization else 0
    return ModelNumbers(
        config=config,
        layer_parameters=count(layers[0]) + quantized,
        root_parameters=count(model) - n * count(layers[0]),
        layer_trained=sum(trained) // n,
        root_trained=count(model, trained=True) - n * (sum(trained) // n),
        inputs=tuple(sorted({matrix.reads for matrix in config.matrices if matrix.path in paths})),
        lora=sum(len(most_trained.get_parameter(n)) for n in trained_matrices if n.endswith("lora_A.weight")),
        track_kept=sum(map(config.kept_with, tracks)),
        quantization=quantization,
        layer_quantized=quantized,
        layer_packed=sum(buffer.nbytes for name, buffer in layers[0].named_buffers() if ".packed." in name),
    )


KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one rank at the peak of a step, by purpose, in bytes."""

    when: str  # the moment of the peak, such as "optimizer step"
    parameters: int  # this rank's share of the fp32 weights, and all quantised weights
    gradients: int  # this rank's share of the gradients, the current layer's full gradients, and gradients being sent
    optimizer: int  # two fp32 moments for each trained parameter in this rank's share
    gathered: int  # gathered weights in the precision of computation, gather buffers, unpacked quantised matrices
    activations: int  # tensors that the trunk keeps for the backward pass, and temporary tensors of the current layer
    head: int  # tensors that the LM head or the task's head keeps for the backward pass
    workspace: int  # memory that libraries use, and attention maps of models that add a bias to scores
    total: int = field(init=False)  # the sum of the fields in KINDS
    host: int  # weights, gradients and optimizer state in the CPU's memory with `cpu_offload`; not in `total`

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(getattr(self, kind) for kind in KINDS))


class LayerBytes(NamedTuple):
    """The memory of one layer for one token, in bytes."""

    kept: int  # memory from the forward to the backward pass
    again: int  # additional memory while a checkpointed layer is recomputed
    passing: int  # additional memory in the layer's backward pass, for gradients of intermediate results


def layer_bytes(numbers: ModelNumbers, layout: Layout, device: Device, padding: float = 1.0) -> LayerBytes:
    """Return the memory of one layer for one token, in bytes. docs/plan.md lists the vectors that need memory.

    `padding` is the number of tokens with padding, divided by the number of tokens without padding. It has an effect
    only on a device that pads sequences for attention.
    """
    config, inputs, size = numbers.config, numbers.inputs, BYTES[layout.precision]
    d, n_heads, tensor, together = config.dim, config.n_heads, layout.tensor, layout.together
    inner = config.inner * size // together
    vector, whole, wide = d * size // together, d * size // layout.context, config.ffn_width * size // together
    products, output = 2 if config.gated else 1, int("fc2" in inputs and not config.relu)  # relu keeps its output only
    blocks = padding if device == "cuda-padded" else 1.0
    # A layer keeps its input and the sum after attention, both also in normalised form (for all tokens, if ranks divide
    # the layer); the vectors of the feed-forward part; q, k, v and attention's output. A layer does not keep the input
    # of a frozen matrix. A CPU also concatenates attention's outputs, and a device that pads has padded copies.
    everything = 2 * vector + whole * (("qkv" in inputs) + ("fc1" in inputs)) + wide * (products + output)
    everything += round(3 * inner * blocks)
    everything += inner if device == "cuda" else round(inner * (blocks + ("out" in inputs)))
    if layout.context > 1:  # gathered keys and values
        everything += 2 * config.inner * size
    if config.qk_norm:  # divided norms keep queries and keys in fp32, with and without normalisation
        everything += 2 * vector if tensor == 1 else 4 * FP32 * d // tensor
    # These are rotary angles, attention's log-sum-exp, statistics of norms, and the inner vectors of LoRAs.
    rotary = config.most_tokens is None and not config.distance_bias
    angles = rotary * 8 * config.head_dim // layout.context
    everything += angles + (4 * n_heads + 16) // together + numbers.lora * size
    gathered = whole if tensor > 1 else 0
    if not numbers.layer_trained:  # the layer keeps nothing, and its peak is in the feed-forward part
        return LayerBytes(0, vector + max(wide * (1 + products), wide + gathered), 0)
    # gelu's backward pass needs the gradients before and after gelu, and the gradient of the residual sum. It has freed
    # gelu's output. A gate has gradients of both products, and one more factor. Ranks that divide a layer first have
    # the gradient after gelu, and the sum's gradient for all tokens.
    passing = max(wide * (2 * products - output), wide + gathered) + vector
    if layout.activation_checkpointing == "none":
        return LayerBytes(everything, 0, passing)
    if layout.activation_checkpointing == "full":
        return LayerBytes(vector, everything - vector, passing)
    # Selective checkpointing keeps attention and `kept_products`. Ranks that divide a layer keep the sums of `out` and
    # fc2 for their own tokens. After recomputation, q and k exist with and without rotation. With a LoRA, q and k exist
    # only with rotation.
    sums = whole if tensor == 1 else 2 * vector
    kept = vector + 4 * inner + wide * products + sums + 4 * n_heads // together
    turned = 0 if config.qk_norm or not rotary or (numbers.lora and "qkv" in inputs) else 2 * inner
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
    longest: int = 0,
    scoring: bool = False,
) -> Memory:
    """Return the memory of one rank at the peak of a training step, or with `scoring` at the peak of a validation.

    `tokens` is the size of the largest micro-batch. The head keeps `head_bytes` for this micro-batch until the backward
    pass. `padding` is as in the function `layer_bytes`. `longest` is the number of tokens of the longest sequence. It
    has an effect only on models that add a bias to attention scores.
    """
    part, config, sharded = numbers.of_rank(layout.tensor), numbers.config, int(layout.sharded)
    n, size, group = config.n_layers, BYTES[layout.precision], layout.group
    learns, recomputes = numbers.layer_trained > 0 and not scoring, layout.activation_checkpointing != "none"
    layer = layer_bytes(numbers if learns else replace(numbers, layer_trained=0), layout, device, padding)
    stored_size = 0 if layout.cpu_offload and device != "cpu" else FP32  # bytes of each stored number on the device
    in_full = part.layer_parameters - part.layer_quantized
    # FSDP divides the root also over the ranks that compute a layer together.
    stored = round(n * in_full + part.root_parameters / layout.tensor) // group
    trained = round(n * part.layer_trained + part.root_trained / layout.tensor) // group
    # The output of the embedding and of the last norm, and the numbers that the first layer keeps for tracks.
    ends = (2 * config.dim + (part.track_kept if learns and not recomputes else 0)) * size
    # A product unpacks one quantised matrix. bitsandbytes unpacks int8 in two steps, each to a new fp32 matrix.
    unpacked = config.dim * config.ffn_width * {None: 0, "nf4": size, "int8": 2 * FP32}[part.quantization]

    # With a bias, a CPU computes the attention maps of one sequence at a time, in fp32, and a device that pads those of
    # all sequences. In the backward pass there are four such maps: bias, probabilities, and two gradients.
    maps = 0
    if config.distance_bias and device != "cuda":
        sequences = 1 if device == "cpu" else max(1.0, tokens * padding / max(1, longest))
        maps = round((2 if scoring else 4) * FP32 * config.n_heads // layout.tensor * longest**2 * sequences)

    def gathered(to_do: int, *, at_work: bool, forward: bool = False) -> int:
        """Return the size of gathered weights in bytes, while `to_do` layers have not finished their backward pass.

        `at_work` says whether a layer computes at this moment, and `forward` whether this is a forward pass.
        """
        if not sharded and layout.precision == "fp32":
            return unpacked * at_work
        if not sharded:
            # One device computes with copies of the weights. A layer's copy stays until the backward pass, unless the
            # layer is recomputed. A compiled layer's copy always stays, because the copy is an argument.
            layers = to_do if learns and (not recomputes or layout.compile) else int(at_work)
        elif forward:  # the buffer from which a layer's weights were copied stays until the next layer is gathered
            layers = 1 + (group > 1) + (0 if layout.frees_layers else n - 1)
        elif layout.frees_layers:  # several ranks gather one more layer in advance
            layers = at_work + (min(1, to_do - at_work) if group > 1 else 0)
        else:
            layers = to_do
        return unpacked * at_work + (part.root_parameters + layers * in_full) * size

    # These are sizes of gradients: of this rank's share of the model and of a layer; of a layer in its backward pass;
    # of the root, whose gradients stay until the end; and of a layer while its gradients are reduced.
    share, layer_share = stored_size * trained, stored_size * part.layer_trained // group
    whole, root = sharded * part.layer_trained * size, sharded * part.root_trained * size
    reduce = sharded * part.layer_trained * BYTES[layout.reduce_dtype]
    gloo = reduce if device == "cpu" and group > 1 else 0  # gloo's reduce-scatter is an all-reduce of a copy
    # Gradients that ranks sum over model copies stay until the backward pass ends. Only bf16 needs additional memory.
    held = reduce // group if layout.replicas > 1 and layout.reduce_dtype != "fp32" else 0
    before = share if micro_batches > 1 else 0  # gradients of earlier micro-batches
    if micro_batches > 1 and sharded and layout.accumulate == "unsharded":
        before = part.trained * BYTES[layout.reduce_dtype]

    at_head = before + (0 if learns else root)  # if all layers are frozen, the backward pass ends at the head

    def kept(of_layers: int) -> int:
        return tokens * (of_layers + ends)

    in_forward = gathered(n, at_work=True, forward=True)
    # A moment has a name and sizes in bytes: gradients, gathered weights, activations, head, gloo's copy.
    moments = [
        (f"forward pass of layer {n} of {n}", before, in_forward, kept(n * layer.kept + layer.again), 0, 0),
        ("backward pass of the head", at_head, gathered(n, at_work=False), kept(n * layer.kept), head_bytes, 0),
        ("optimizer step", share, 0, 0, 0, 0),
    ]
    if scoring:
        moments = [("validation and evaluation", 0, in_forward, kept(layer.kept + layer.again), head_bytes, 0)]
    # Between the moments below, the total changes linearly, so no other moment can be the peak.
    for done in sorted({0, min(1, n - 1), max(0, n - 2), n - 1}) if learns else ():
        to_do, name = n - done, f"layer {n - done} of {n}"
        left = root + done * held + max(before, done * layer_share)
        if before > share:  # layer by layer, this rank's shares replace full gradients
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
        parameters=stored_size * stored + n * part.layer_packed,
        gradients=gradients,
        optimizer=2 * stored_size * trained,
        gathered=whole_weights,
        activations=activations,
        head=head,
        workspace=WORKSPACE[device] + copied + maps,
        host=0 if stored_size else FP32 * (stored + 3 * trained),
    )


def free_bytes(device: torch.device, local_processes: int) -> int:
    """Return the free memory for this process in bytes.

    On a CPU, `local_processes` processes share the free memory of the machine, or of the job or container if it has
    less.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # so that the allocator's unused memory counts as free
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":  # Apple's Metal recommends a limit
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if not hasattr(os, "sysconf"):  # on Windows, assume the memory of a small machine
        return 8 * 2**30 // local_processes
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    if (limit := cpu_limits.memory()) is not None:  # a job or container that exceeds its limit is killed
        free = min(free, max(0, limit[0] - limit[1]))
    return free // local_processes


@dataclass(frozen=True, kw_only=True)
class Work:
    """Describes what one rank computes in one step. Ranks that compute a layer together have equal `Work`."""

    tokens: int  # the tokens of one micro-batch, including padding
    micro_batches: int = 1
    attended: float = 0.0  # how many tokens a token attends to on average: sum of squared lengths / sum of lengths
    head_bytes: int = 0  # the memory that LM head or task head keeps for a micro-batch; the head's time is proportional
    # Three fields for other implementations:
    passes: float | None = None  # see `our_passes`
    head_products: int = 0  # the parameters of a matrix after the layers
    recomputed_products: float = 0.0  # the share of matrix products that selective checkpointing recomputes


@dataclass(frozen=True)
class Cost:
    """Describes the time of one training step on one rank. Times are in seconds."""

    seconds: float  # the sum of the next four times
    compute: float  # forward and backward passes, without recomputation
    recompute: float
    exposed: float  # collectives while nothing is computed
    optimizer: float
    tokens_per_second: float  # the speed of one GPU
    mfu: float  # the model's FLOPs, without recomputation, divided by the GPU's peak FLOPs in the same time
    received: int  # how many bytes this rank receives from other ranks


def our_passes(numbers: ModelNumbers) -> float:
    """Return how many vectors of width D a layer's element-wise kernels read or write for a token in a forward pass.

    These are 4 for norms, 6 for sums, 29 for a rotation (in fp32), and 4 if queries and keys have norms. A gelu adds 2
    vectors of the feed-forward width, and a gate 5. The result is for a layer that is not compiled; a compiled layer
    needs about half.
    """
    config = numbers.config
    rotation = 29 if config.most_tokens is None and not config.distance_bias else 0
    return 10 + rotation + (5 if config.gated else 2) * config.ffn_width / config.dim + (4 if config.qk_norm else 0)


def training_flops(numbers: ModelNumbers, attended: float) -> float:
    """Return the model's FLOPs for one token in forward and backward pass, without recomputation.

    The forward pass needs two FLOPs for each parameter of a layer, plus attention. If layers are trained, the gradients
    of inputs need two FLOPs for each parameter, and the gradients of attention twice its forward FLOPs. The gradients
    of matrices need two FLOPs for each trained parameter. `attended` is as in `Work`.
    """
    through, config = int(numbers.layer_trained > 0), numbers.config
    products = 2 * ((1 + through) * numbers.layer_parameters + numbers.layer_trained)
    return config.n_layers * (products + (1 + 2 * through) * 4 * config.inner * attended)


def cost(numbers: ModelNumbers, layout: Layout, work: Work, machines: Machines) -> Cost:
    """Estimate the time of one training step on all GPUs of `machines`, and how many bytes each rank receives."""
    gpu, config, tensor, together = machines.gpu, numbers.config, layout.tensor, layout.together
    n, m, peak, hbm = config.n_layers, work.micro_batches, gpu.flops(layout.precision), HBM_SHARE * gpu.hbm

    products = work.tokens * 2 * numbers.layer_parameters / together / (MATMUL_SHARE * peak)
    attention = work.tokens * 4 * config.inner * work.attended / together / (ATTENTION_SHARE * peak)
    passes = our_passes(numbers) if work.passes is None else work.passes
    moved = work.tokens * passes * config.dim * BYTES[layout.precision] / together / hbm
    forward = max(products + attention + moved, LAUNCH)
    # The backward pass has two products for each forward product, for the gradients of input and weights.
    through, trained_share = numbers.layer_trained > 0, numbers.layer_trained / numbers.layer_parameters
    backward = through * (2 * forward - (1 - trained_share) * products)
    # With selective checkpointing, ranks that divide a layer keep the sum after `out`, and recompute the product.
    summed = config.dim * config.inner / numbers.layer_parameters if tensor > 1 else 0.0
    selective = max(moved + (work.recomputed_products + summed) * products, LAUNCH)
    again = through * {"none": 0.0, "selective": selective, "full": forward}[layout.activation_checkpointing]
    head = 3 * work.head_bytes / hbm + 6 * work.tokens * work.head_products / (MATMUL_SHARE * peak)

    # One of `tensor` neighbours takes part in a collective for a layer, and all ranks in a collective for the root.
    part, divided = numbers.of_rank(tensor), replace(machines, per_machine=machines.per_machine // tensor)
    in_full = part.layer_parameters - part.layer_quantized
    gather, reduce, add = _collectives(in_full, part.layer_trained, layout.group, layout, divided)
    root = _collectives(part.root_parameters, part.root_trained, layout.group * tensor, layout, machines)
    gathers_again, every = through and layout.frees_layers, layout.accumulate == "sharded"
    exchange = exchanged(numbers, layout, machines, work.tokens)
    received = m * (n * (1 + gathers_again) * gather.received + root[0].received + exchange.received)
    received += (m if every else 1) * (n * reduce.received + root[1].received) + n * add.received + root[2].received

    # The first gather of a pass, the last reduction, and the root's collectives are exposed.
    exposed = m * (exchange.seconds + root[0].seconds + gather.seconds + (n - 1) * max(0.0, gather.seconds - forward))
    gather_again = gathers_again * gather.seconds
    for last in [False] * (m - 1) + [True]:
        sent = (last or every) * reduce.seconds + last * add.seconds
        exposed += (n - 1) * max(0.0, gather_again + sent - backward - again) + gather_again + sent
        exposed += (last or every) * root[1].seconds + last * root[2].seconds

    share = (n * part.layer_trained + part.root_trained / tensor) / layout.group
    optimizer = share * ADAMW_BYTES / (HOST if layout.cpu_offload else hbm)
    compute, recompute = m * (n * (forward + backward) + head), m * n * again
    seconds = compute + recompute + exposed + optimizer
    flops = m * work.tokens * (training_flops(numbers, work.attended) + 6 * work.head_products) / together
    speed, mfu = m * work.tokens / seconds / together, flops / seconds / peak
    return Cost(seconds, compute, recompute, exposed, optimizer, speed, mfu, received)


class Transfer(NamedTuple):
    """The time of collectives in seconds, and how many bytes one rank receives."""

    seconds: float
    received: int


def exchanged(numbers: ModelNumbers, layout: Layout, machines: Machines, tokens: int) -> Transfer:
    """Return what one rank exchanges, for a micro-batch, with the other ranks that compute the same records.

    With `tensor`, each pass of a layer gathers [T, D] twice and scatters sums of [T, D] twice. A recomputed layer needs
    no sum of its last product, and with selective checkpointing no sum at all. Small sums take the time of an empty
    collective: four in a pass for norms of queries and keys, and one for gradients of norms and biases. With `context`,
    a layer gathers keys and values, [T, 2 D], and scatters the sums of their gradients. In both cases, the last norm
    needs all tokens, and its gradient is scattered.
    """
    if layout.together == 1:
        return Transfer(0.0, 0)
    n, backward = numbers.config.n_layers, int(numbers.layer_trained > 0)
    passes = n * (1 + backward * (1 if layout.activation_checkpointing == "none" else 2))
    if layout.context > 1:
        vectors, collectives = 2 * passes, passes
    else:
        recomputed = {"none": 0, "selective": 2, "full": 3}[layout.activation_checkpointing]
        vectors = n * (4 + (4 + recomputed) * backward)
        collectives = vectors + n * backward + 4 * passes * int(numbers.config.qk_norm)
    whole = tokens * numbers.config.dim * BYTES[layout.precision]
    received = (vectors + 1 + backward) * _received(whole, layout.together)
    seconds = (collectives + 1 + backward) * LATENCY + received / (LINK_SHARE * machines.gpu.link)
    return Transfer(seconds, received)


def _received(whole: int, ranks: int) -> int:
    return whole * (ranks - 1) // ranks


def _collectives(
    parameters: int, trained: int, ranks: int, layout: Layout, machines: Machines
) -> tuple[Transfer, Transfer, Transfer]:
    """Return three transfers: the gather of `parameters` that `ranks` ranks divide, the reduction of the `trained`
    gradients, and the sum of these gradients over all model copies.
    """
    gpu, per_machine, replicas = machines.gpu, machines.per_machine, machines.world_size // ranks
    weights, gradients = parameters * BYTES[layout.precision], trained * BYTES[layout.reduce_dtype]
    # With offload, each rank copies its part of weights and gradients between the memory of CPU and GPU.
    moving = 4 / ranks / HOST if layout.cpu_offload else 0.0
    spanned = max(1, ranks // per_machine)

    def collective(whole: int) -> float:
        """Return the seconds of a collective for `whole` bytes. A machine receives each byte only once."""
        if ranks == 1:
            return 0.0
        inside = _received(whole, min(ranks, per_machine)) / gpu.link
        outside = whole * (spanned - 1) / spanned / per_machine / machines.network
        return LATENCY + HOP * (spanned - 1) + max(inside, outside) / LINK_SHARE

    gather = all_reduce = 0.0
    if layout.sharded:  # the last summand is the copy out of the collective's buffer
        gather = parameters * moving + collective(weights) + 2 * weights / (HBM_SHARE * gpu.hbm)
    if replicas > 1:
        # A machine with several model copies first sums their gradients. Each network port then sends a part.
        near, held_by = max(1, per_machine // ranks), max(ranks, per_machine)
        apart = replicas * ranks // held_by
        inside = 2 * gradients / ranks * (near - 1) / near / gpu.link
        outside = 2 * gradients / held_by * (apart - 1) / apart / machines.network
        all_reduce = LATENCY + HOP * (apart - 1) + (inside + outside) / LINK_SHARE
    return (
        Transfer(gather, _received(weights, ranks)),
        Transfer(trained * moving + collective(gradients), _received(gradients, ranks)),
        Transfer(all_reduce, 2 * _received(gradients // ranks, replicas)),
    )


class MicroBatches:
    """Estimates the memory of micro-batches on one rank.

    `recipe` is a recipe that the function `in_tokens` has returned, and `train` contains the training records.
    """

    def __init__(self, recipe: Recipe, train: Examples, numbers: ModelNumbers, layout: Layout, device: Device) -> None:
        self.longest, self._extra = int(train.tokens.max()), train.beside  # every micro-batch has `_extra` more tokens
        self.share = -(-recipe.batch.global_tokens // layout.data_size)  # a rank's tokens in a step
        self._head_of = partial(head_bytes, recipe.task, layout=layout, config=numbers.config)
        self.head = self._head_of(train.tokens)
        padding = self.longest / float(train.tokens.mean(dtype=np.float64))
        self._memory = partial(memory, numbers, layout, device=device, padding=padding, longest=self.longest)

    def largest(self, room: int, share: int | None = None) -> int:
        """Return the largest `batch.tokens_per_rank` that fits into `room` bytes; 0 if the longest record does not fit.

        The result is at most `share` tokens (by default a rank's tokens in a step), but at least the longest record.
        """
        whole, longest = (share or self.share) + self._extra, self.longest + self._extra

        def too_large(tokens: int) -> bool:
            return self._memory(tokens, self.head(tokens), micro_batches=-(-whole // tokens)).total > room

        if not too_large(max(longest, whole)):
            return max(longest, whole) - self._extra
        n_fitting = bisect_left(range(longest, whole), True, key=too_large)
        return self.longest + n_fitting - 1 if n_fitting else 0

    def need(self, tokens: int, micro_batches: int, scored_N: npt.NDArray[np.int32]) -> Memory:
        """Return the memory of a step with a largest micro-batch of `tokens`, or of a validation if it needs more.

        `scored_N` are the lengths of the validation and test records in tokens.
        """
        step = self._memory(tokens + self._extra, self.head(tokens), micro_batches=micro_batches)
        longest, mean = int(scored_N.max()), float(scored_N.mean(dtype=np.float64))
        head = self._head_of(scored_N)(max(tokens, longest))
        scored = max(tokens, longest, SCORED_TOKENS) + self._extra
        scoring = self._memory(scored, head, padding=longest / mean, longest=longest, scoring=True)
        return max(step, scoring, key=lambda moment: moment.total)


def head_bytes(
    task: TaskSettings, tokens_N: npt.NDArray[np.int32], layout: Layout, config: ModelConfig
) -> Callable[[int], int]:
    """Return a function from a micro-batch's number of tokens to the memory that the task's head keeps, in bytes.

    The function assumes a micro-batch of the longest record and average records. `tokens_N` are the lengths of all
    records in tokens.
    """
    lengths, counts = np.unique(tokens_N, return_counts=True)
    sizes = config.n_logits, config.dim
    each = np.array([task.head_bytes(int(length), *sizes) for length in lengths], dtype=np.float64)
    size = BYTES[layout.precision] / 4  # `task.head_bytes` assumes fp32
    longest, per_token = int(lengths[-1]), float((each * counts).sum() / (lengths * counts).sum())
    return lambda tokens: round(size * (each[-1] + max(0, tokens - longest) * per_token))


@dataclass(frozen=True)
class Option:
    """Describes a possible way to divide a run over the GPUs, with its memory and its time."""

    layout: Layout
    tokens: int  # the tokens of the largest micro-batch on one rank
    micro_batches: int
    largest: int  # the largest `batch.tokens_per_rank` that fits; 0 if the longest record does not fit
    fits: bool
    memory: Memory
    cost: Cost


@dataclass(frozen=True)
class Plan:
    """Contains the possible options for a recipe on given machines, and the best option."""

    recipe: Recipe
    machines: Machines
    numbers: ModelNumbers
    room: int  # the memory of each GPU that the plan may use, in bytes
    options: list[Option]  # options that fit, fastest first; then options that do not fit, smallest memory first

    @property
    def best(self) -> Option | None:
        """The option with the least memory among the fastest options (see `AS_GOOD`); None if no option fits."""
        fitting = [option for option in self.options if option.fits]
        equal = [option for option in fitting if option.cost.seconds <= AS_GOOD * fitting[0].cost.seconds]
        return min(equal, key=lambda option: option.memory.total, default=None)

    @property
    def keys(self) -> list[str]:
        """The recipe keys of the best option, as arguments of `esmshard finetune`. Empty if no option fits."""
        if (best := self.best) is None:
            return []
        tokens = best.largest if self.recipe.batch.tokens_per_rank == "auto" else best.tokens
        return [
            f"parallel.strategy={best.layout.strategy}",
            f"parallel.activation_checkpointing={best.layout.activation_checkpointing}",
            f"batch.tokens_per_rank={tokens}",
            *[f"parallel.tensor={best.layout.tensor}"] * (best.layout.tensor > 1),
            *["parallel.cpu_offload=true"] * best.layout.cpu_offload,
        ]

    @property
    def reason(self) -> str:
        """A sentence that says why an option is the best, or that no option fits."""
        best, room = self.best, self.room / GIB
        if best is None:
            return (
                f"no option fits: the smallest option needs {self.options[0].memory.total / GIB:.1f} GiB per GPU, but "
                f"only {room:.1f} GiB are available; use more or larger GPUs, or lower data.max_length or "
                "batch.tokens_per_rank"
            )
        host = best.memory.host * self.machines.per_machine / GIB
        return (
            f"none of the {sum(option.fits for option in self.options)} options that fit is {AS_GOOD - 1:.0%} faster; "
            f"this option needs {best.memory.total / GIB:.1f} of {room:.1f} GiB at the peak ({best.memory.when})"
            + (f" and {host:.0f} GiB of each machine's memory" if host else "")
        )

    def as_text(self) -> str:
        """Return a text with a table of the options, and the keys, the speed and the reason of the best option."""
        machines, numbers, best = self.machines, self.numbers, self.best
        rows = [HEAD.split()]
        for option in self.options[:SHOWN]:
            laid_out, need, spent = option.layout, option.memory, option.cost
            name = laid_out.strategy + f", tensor {laid_out.tensor}" * (laid_out.tensor > 1)
            row = [name + ", cpu_offload" * laid_out.cpu_offload, laid_out.activation_checkpointing]
            row += [f"{getattr(need, kind) / GIB:.2f}" for kind in (*KINDS, "total")]
            row += ["yes" if option.fits else "no", f"{option.largest or '-'}"]
            row += [f"{option.micro_batches} x {option.tokens:,}", f"{1e3 * spent.seconds:.1f}"]
            rows.append([*row, f"{1e3 * spent.exposed:.1f}", f"{spent.received / GIB:.2f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        network = f", {machines.network * 8 / 1e9:g} Gbit/s per GPU between machines" if machines.nodes > 1 else ""
        lines = [
            f"machines  {machines}: {self.room / GIB:.1f} GiB available per GPU{network}",
            f"model     {self.recipe.model.name}: {numbers.parameters:,} parameters, {numbers.trained:,} trained, "
            f"{self.options[0].layout.precision}; {self.recipe.batch.global_tokens:,} tokens per step",
            "\nmemory: GiB per rank at the peak of a step; most: largest batch.tokens_per_rank that fits; tokens: "
            "micro-batches of a step; last column: GiB received per step",
        ]
        for row in rows:
            lines.append("  ".join(f"{cell:{'<' if k < 2 else '>'}{widths[k]}}" for k, cell in enumerate(row)))
        if best is not None:
            speed, total = best.cost.tokens_per_second, best.cost.tokens_per_second * machines.world_size
            lines.append(f"\nbest      {' '.join(self.keys)}")
            lines.append(f"speed     {speed:,.0f} tokens/s per GPU, {total:,.0f} in total, MFU {best.cost.mfu:.1%}")
        return "\n".join([*lines, f"reason    {self.reason}"])

    def as_json(self) -> dict[str, Any]:
        """Return the plan as values for JSON. Sizes are in bytes, and times in seconds."""
        numbers, rows = self.numbers, [asdict(option) for option in self.options]
        sizes = {"parameters": numbers.parameters, "trained": numbers.trained, **numbers.config.recorded()}
        return {
            "machines": {**asdict(self.machines), "world_size": self.machines.world_size},
            "room_bytes": self.room,
            "model": {"name": self.recipe.model.name, **sizes},
            "options": rows,
            "best": None if self.best is None else rows[self.options.index(self.best)],
            "keys": self.keys,
            "reason": self.reason,
        }


def plan(recipe: Recipe, machines: Machines) -> Plan:
    """Estimate every strategy with every checkpointing mode. If no option fits, estimate all with `cpu_offload` too.

    If the recipe sets neither `parallel.tensor` nor `parallel.context`, the options contain 1, 2, 4, ... as
    `parallel.tensor`.

    Raises:
        InputError: the data or the model cannot be read, or there are fewer training records than
            `world_size // (tensor * context)`.
        UsageError: no strategy is possible with the other settings of `parallel`, or the recipe has `precision: bf16`
            and the GPU has no bf16.
    """
    config, task, data = config_of(recipe.model.name), new_task(recipe.task, {}), recipe.data
    named = (family_of(config).tracks_of(config), recipe.model.name, "data.tracks.")
    tracks = track_files(data.tracks, *named) if data.tracks else []
    train = open_split(recipe, "train", task.labels, tracks)
    recipe, task, parallel = in_tokens(recipe, train), task.learn(train), recipe.parallel
    tokens_N, gpu, precision = train.tokens, machines.gpu, parallel.precision
    scored_N = np.concatenate([open_split(recipe, name, None, tracks).tokens for name in ("valid", "test")])
    if len(tokens_N) < machines.world_size // (parallel.tensor * parallel.context):
        raise InputError(
            f"{train.path}: train has only {len(tokens_N)} records for {machines.world_size} GPUs; use fewer GPUs"
        )
    if precision == "auto":
        precision = "bf16" if gpu.has_bf16 else "fp16"
    if precision == "bf16" and not gpu.has_bf16:
        raise UsageError(f"parallel.precision: {gpu.name} has no bf16; choose auto, fp16 or fp32")
    device: Literal["cuda", "cuda-padded"] = "cuda" if gpu.has_bf16 and precision != "fp32" else "cuda-padded"
    attended = float(np.square(tokens_N, dtype=np.float64).sum() / tokens_N.sum(dtype=np.float64))
    numbers, room = model_numbers(recipe, config, task), int(machines.room * (1 - RESERVE))
    is_given = "tensor" in parallel.model_fields_set or parallel.context > 1
    tensors = [parallel.tensor] if is_given else [2**k for k in range(9) if machines.per_machine % 2**k == 0]
    refusals: list[UsageError] = []

    def layouts(tensor: int, offload: bool) -> Iterator[Layout]:
        for strategy in STRATEGIES if machines.world_size > tensor else [parallel.strategy]:
            change: dict[str, Any] = {"strategy": strategy, "cpu_offload": offload, "tensor": tensor}
            if strategy != "hybrid_shard":
                change["group_size"] = None
            for mode in ("none", "selective", "full"):
                settings = parallel.model_copy(update={**change, "activation_checkpointing": mode})
                try:
                    check_tensor(tensor, n_heads=config.n_heads, ffn_width=config.ffn_width, quantized=is_quantized)
                    yield layout(settings, machines.world_size, machines.per_machine, precision)
                except UsageError as error:
                    refusals.append(error)
                    break

    def option(laid_out: Layout) -> Option:
        batches = MicroBatches(recipe, train, numbers, laid_out, device)
        wanted, longest, extra = recipe.batch.tokens_per_rank, batches.longest, train.beside
        parts = -(-batches.share // max(batches.largest(room) if wanted == "auto" else wanted, longest))
        # Micro-batches have about equal sizes, but the longest record is never divided.
        mean = -(-batches.share // parts)
        tokens = max(longest, mean)
        need = batches.need(tokens, parts, scored_N)
        work = Work(
            tokens=mean + extra,
            micro_batches=parts,
            attended=attended if device == "cuda" else float(longest),
            head_bytes=round(batches.head(tokens) * (mean + extra) / (tokens + extra)),
        )
        largest, time = batches.largest(room, MOST_TOKENS - extra), cost(numbers, laid_out, work, machines)
        return Option(laid_out, tokens, parts, largest, need.total <= room, need, time)

    is_quantized = recipe.model.quantize is not None
    possible: list[Option] = []
    for offload in [True] if parallel.cpu_offload else [False, True]:
        if not any(candidate.fits for candidate in possible):
            possible += [option(laid_out) for tensor in tensors for laid_out in layouts(tensor, offload)]
    if not possible:
        raise refusals[0]
    possible.sort(key=lambda way: (not way.fits, way.cost.seconds if way.fits else way.memory.total))
    return Plan(recipe, machines, numbers, room, possible)


def model_numbers(recipe: Recipe, config: ModelConfig, task: Task | None = None) -> ModelNumbers:
    """Count the parameters of a recipe's model with the head of `task`, or with the LM head if `task` is None.

    `task` is a result of the method `Task.learn`.
    """
    tracks, quantization = recipe.data.tracks or (), recipe.model.quantize
    with torch.device("meta"):
        model = FineTuner(build(config), LanguageModelHead() if task is None else task.head(config))
        model.adapt(recipe.adapt, recipe.train.seed, tracks, quantization)
    return numbers_of(model, config, tracks=tracks, quantization=quantization)


def config_of(name: str) -> ModelConfig:
    """Return the architecture of a model by its name or path.

    Raises `InputError` if the model cannot be read, or must be downloaded first.
    """
    if not Path(name).exists():
        if known := name if name in SIZES else released_name(name):
            return SIZES[known]
        if is_hub_name(name) and hub.find(name) is None:
            raise InputError(
                f"{name}: is not on this machine, and plans download nothing; first run `esmshard download {name}`"
            )
    return weights.read(name).config
