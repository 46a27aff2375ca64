"""The machines of a plan, and the cost of a training step on them: seconds that a rank computes, waits and updates.

The model is a roofline. FSDP gathers the weights of the next layer and reduces the gradients of the last layer while a
layer computes; communication that takes longer than the layer is exposed. Ranks that compute a layer together exchange
activations, which overlaps with nothing. Only the shares below were fitted. They are the same for every model and
machine, and `benchmarks/published.py` compares the result with published runs. Letters: see `esmshard.batch`. No torch.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from esmshard.errors import UsageError
from esmshard.parallel.layout import BYTES, Layout

if TYPE_CHECKING:
    from esmshard.planner.memory_model import ModelNumbers

MIB = 2**20

# The shares of the data sheet's figures that are reached: by large matrix products, with launch gaps and lower clocks;
# by FlashAttention-2, forward and backward (Dao 2023, arXiv:2307.08691, figures 4 to 6, A100); by element-wise kernels;
# by the links in large collectives (nccl-tests, bus bandwidth).
MATMUL_SHARE, ATTENTION_SHARE, HBM_SHARE, LINK_SHARE = 0.68, 0.4, 0.8, 0.75
LATENCY, HOP = 30e-6, 5e-6  # seconds of an empty collective within a machine, and more for each further machine
LAUNCH = 4e-4  # seconds of the host for one forward pass of an eager layer: about 40 kernels and FSDP's hooks
HOST = 20e9  # bytes/s over PCIe to pinned memory, and of one process's AdamW in the machine's memory, for `cpu_offload`
# Bytes moved for each parameter: weight, gradient and two moments are read, three of them are written, and clipping
# reads and writes the gradient.
ADAMW_BYTES = 40


@dataclass(frozen=True)
class GPU:
    """One kind of GPU. Speeds are those of the data sheet, dense, without sparsity."""

    name: str
    memory_bytes: int  # as the driver reports, slightly less than the name says
    half_flops: float  # FLOP/s of the tensor cores in bf16 (fp16 where there is no bf16), with sums in fp32
    fp32_flops: float  # FLOP/s of fp32 products with torch's defaults, without TF32
    hbm: float  # bytes/s of the GPU's own memory
    link: float  # bytes/s that one GPU can receive from the others of its machine: over NVLink, or else PCIe
    has_bf16: bool = True  # from compute capability 8.0 on; kernels for packed attention require the same

    def flops(self, precision: str) -> float:
        """Return the FLOP/s of matrix products at a precision."""
        return self.fp32_flops if precision == "fp32" else self.half_flops


# Memory: `nvidia-smi`, ECC on. The rest: NVIDIA data sheets of each product, dense figures (half of those "with
# sparsity"); GeForce cards: the architecture white papers, fp16 with fp32 accumulation. Links: NVLink 2, 3, 4, 5 are
# 300, 600, 900, 1800 GB/s in both directions together; PCIe 3, 4, 5 x16 are 16, 32, 64 GB/s each way.
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
    """Return the row of GPUS for the name that the driver gives a GPU; None if there is none. `memory_bytes` chooses
    between rows of one name, which differ mainly in memory.
    """
    joined = re.sub(r"\bRTX (?=\d)|(?<=\d) (?=(?:TI|PCIE|NVL)\b)", lambda part: part[0].strip(), name.upper())
    words = re.findall(r"[A-Z]+\d*[A-Z]*", joined)
    rows = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    return min(rows, key=lambda gpu: abs(gpu.memory_bytes - (memory_bytes or gpu.memory_bytes)), default=None)


@dataclass(frozen=True)
class Machines:
    """Equal machines with equal GPUs, with one process for each GPU."""

    gpu: GPU
    per_machine: int
    nodes: int = 1
    network: float = 25e9  # bytes/s that one GPU can receive from other machines: one InfiniBand HDR port for each

    @property
    def world_size(self) -> int:
        """The number of all GPUs."""
        return self.per_machine * self.nodes

    @property
    def room(self) -> int:
        """The bytes of one GPU that tensors can use, without 1 GiB for NCCL's buffers and CUDA with its kernels."""
        return self.gpu.memory_bytes - 1024 * MIB

    def __str__(self) -> str:
        on = f" on each of {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.per_machine} x {self.gpu.name}{on}"


def parse(text: str, nodes: int = 1, network_gbit: float = 200, memory_gb: float | None = None) -> Machines:
    """Read the GPUs of one machine from `8xA100-40GB`, `4xL4` where GPUS has one row for the card, or `A100-80GB`.

    `network_gbit` is for each GPU between machines. `memory_gb` is for a card that is not in GPUS. The card gets the
    speeds of an A10G, which compare strategies and say little about times. `UsageError` for an unknown card.
    """
    count, name = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text.strip(), re.IGNORECASE).groups()  # type: ignore[union-attr]
    per_machine, plain = int(count or 1), name.upper().replace(" ", "")
    if min(per_machine, nodes) < 1 or network_gbit <= 0 or (memory_gb is not None and memory_gb <= 1):
        raise UsageError("--gpus, --nodes, --network and --memory: each number must be at least 1")
    rows = [gpu for gpu in GPUS.values() if plain in (gpu.name, gpu.name.partition("-")[0])]
    if memory_gb is not None:  # Drivers report up to 3% less than the name of a card says.
        rows = [replace(GPUS["A10G-24GB"], name=name, memory_bytes=int(memory_gb * 2**30 * 0.97))]
    if len(rows) != 1:
        known = ", ".join(gpu.name for gpu in rows or GPUS.values())
        raise UsageError(f"--gpus {text}: choose one of {known}; for another card give its memory, as --memory 24")
    return Machines(rows[0], per_machine, nodes, network_gbit * 1e9 / 8)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one rank in one step. Ranks that compute each layer together have the same work."""

    tokens: int  # of one micro-batch, with padding if there is any
    micro_batches: int = 1
    attended: float = 0.0  # tokens that a token attends to on average: sum of squared lengths over sum of lengths
    head_bytes: int = 0  # kept by logits or task head for a micro-batch; moving them takes the head's time
    # Other implementations: element-wise passes of a layer, see `our_passes`; parameters of a matrix after the layers
    # that every token goes through; the share of matrix products that selective checkpointing recomputes.
    passes: float | None = None
    head_products: int = 0
    recomputed_products: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The time of one step on one rank, and figures derived from it."""

    seconds: float  # the sum of the next four
    compute: float  # forward and backward passes, without recomputation
    recompute: float
    exposed: float  # the part of the collectives' time that does not overlap with computation
    optimizer: float
    tokens_per_second: float  # of one GPU
    mfu: float  # the FLOPs that the model needs, without recomputation, over the data sheet's in the same time
    received: int  # bytes that this rank receives from others


def our_passes(numbers: "ModelNumbers") -> float:
    """Return how many vectors of width D element-wise kernels of one of our layers read or write for a token in the
    forward pass: 4 for norms, 29 for the rotation (in fp32, with its casts), 6 for sums, 4 for norms of queries and
    keys. As wide as the feed-forward part are 2 for gelu, or 5 for a gate. A compiled layer needs about half of these.
    """
    config = numbers.config
    return 39 + (5 if config.gated else 2) * config.ffn_width / config.dim + (4 if config.qk_norm else 0)


def training_flops(numbers: "ModelNumbers", attended: float) -> float:
    """Return the FLOPs of one token's forward and backward pass.

    The forward pass takes two FLOPs for each parameter of a layer, and attention's two products. The gradients of
    inputs take as much, if anything in the layers learns, and those of the matrices that learn take their share.
    """
    through, config = int(numbers.layer_trained > 0), numbers.config
    products = 2 * ((1 + through) * numbers.layer_parameters + numbers.layer_trained)
    return config.n_layers * (products + (1 + 2 * through) * 4 * config.dim * attended)


def cost(numbers: "ModelNumbers", layout: Layout, work: Work, machines: Machines) -> Cost:
    """Return time and received bytes of one training step of a model that is divided over all GPUs of the machines."""
    gpu, config, tensor, together = machines.gpu, numbers.config, layout.tensor, layout.together
    n, m, peak, hbm = config.n_layers, work.micro_batches, gpu.flops(layout.precision), HBM_SHARE * gpu.hbm

    products = work.tokens * 2 * numbers.layer_parameters / together / (MATMUL_SHARE * peak)
    attention = work.tokens * 4 * config.dim * work.attended / together / (ATTENTION_SHARE * peak)
    passes = our_passes(numbers) if work.passes is None else work.passes
    moved = work.tokens * passes * config.dim * BYTES[layout.precision] / together / hbm
    forward = max(products + attention + moved, LAUNCH)
    # The gradients of inputs and of weights take two products for each product of the forward pass, and fewer where
    # weights are frozen.
    through, learning = numbers.layer_trained > 0, numbers.layer_trained / numbers.layer_parameters
    backward = through * (2 * forward - (1 - learning) * products)
    # Divided ranks keep the sum of the product of `out`, and compute the product itself again.
    summed = config.dim**2 / numbers.layer_parameters if tensor > 1 else 0.0
    selective = max(moved + (work.recomputed_products + summed) * products, LAUNCH)
    again = through * {"none": 0.0, "selective": selective, "full": forward}[layout.activation_checkpointing]
    head = 3 * work.head_bytes / hbm + 6 * work.tokens * work.head_products / (MATMUL_SHARE * peak)

    # Of `tensor` neighbours FSDP sees one; all ranks of a copy divide the root.
    own, seen = numbers.of_rank(tensor), replace(machines, per_machine=machines.per_machine // tensor)
    in_full = own.layer_parameters - own.layer_quantized
    gather, reduce, add = _collectives(in_full, own.layer_trained, layout.group, layout, seen)
    root = _collectives(own.root_parameters, own.root_trained, layout.group * tensor, layout, machines)
    gathers_again, every = through and layout.frees_layers, layout.accumulate == "sharded"
    exchange = exchanged(numbers, layout, machines, work.tokens)
    received = m * (n * (1 + gathers_again) * gather.received + root[0].received + exchange.received)
    received += (m if every else 1) * (n * reduce.received + root[1].received) + n * add.received + root[2].received

    # The first gather of a pass and the last reduction overlap with nothing, so the root's time counts fully.
    exposed = m * (exchange.seconds + root[0].seconds + gather.seconds + (n - 1) * max(0.0, gather.seconds - forward))
    gather_again = gathers_again * gather.seconds
    for last in [False] * (m - 1) + [True]:
        sent = (last or every) * reduce.seconds + last * add.seconds
        exposed += (n - 1) * max(0.0, gather_again + sent - backward - again) + gather_again + sent
        exposed += (last or every) * root[1].seconds + last * root[2].seconds

    share = (n * own.layer_trained + own.root_trained / tensor) / layout.group
    optimizer = share * ADAMW_BYTES / (HOST if layout.cpu_offload else hbm)
    compute, recompute = m * (n * (forward + backward) + head), m * n * again
    seconds = compute + recompute + exposed + optimizer
    flops = m * work.tokens * (training_flops(numbers, work.attended) + 6 * work.head_products) / together
    speed, mfu = m * work.tokens / seconds / together, flops / seconds / peak
    return Cost(seconds, compute, recompute, exposed, optimizer, speed, mfu, received)


class Transfer(NamedTuple):
    """A collective: its seconds, and the bytes that one rank receives."""

    seconds: float
    received: int


def exchanged(numbers: "ModelNumbers", layout: Layout, machines: Machines, tokens: int) -> Transfer:
    """Return what one rank receives for a micro-batch from those with which it computes each layer.

    A layer gathers [T, D] twice and scatters sums of it twice in each pass. A recomputed layer needs no sum of its last
    product, and under selective checkpointing none at all. Small sums take the time of an empty collective: four for
    norms of queries and keys in a pass, and one for the gradients of norms and biases that are whole. Outside the
    layers, the last norm needs all tokens, and its gradient is scattered. Where ranks divide the tokens, a layer
    gathers keys and values, [T, 2 D], and scatters the sums of their gradients.
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
    """Return the gather of parameters over `ranks`, the reduction of the gradients of those `trained`, and the sum of
    these gradients over all copies of the model.
    """
    gpu, per_machine, replicas = machines.gpu, machines.per_machine, machines.world_size // ranks
    weights, gradients = parameters * BYTES[layout.precision], trained * BYTES[layout.reduce_dtype]
    # A part that is kept on the host is fetched from there, and its gradients are moved there.
    moving = 4 / ranks / HOST if layout.cpu_offload else 0.0
    spanned = max(1, ranks // per_machine)

    def collective(whole: int) -> float:
        """Return seconds. A machine receives the parts of the others once, over all its ports together."""
        if ranks == 1:
            return 0.0
        inside = _received(whole, min(ranks, per_machine)) / gpu.link
        outside = whole * (spanned - 1) / spanned / per_machine / machines.network
        return LATENCY + HOP * (spanned - 1) + max(inside, outside) / LINK_SHARE

    gather = all_reduce = 0.0
    if layout.sharded:  # with the copy out of the collective's buffer; a group of one rank has the copy only
        gather = parameters * moving + collective(weights) + 2 * weights / (HBM_SHARE * gpu.hbm)
    if replicas > 1:
        # A machine with several copies sums them first; each of its ports then carries its part of one copy.
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
