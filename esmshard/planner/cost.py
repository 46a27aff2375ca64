"""The cost of a training step: seconds that a rank computes, waits and updates.

The model is a roofline: matrix products and attention run at a share of the data sheet's FLOP/s, element-wise
operations at a share of the memory's speed, collectives at a share of the slowest link on their way. FSDP gathers the
weights of the next layer and reduces the gradients of the last layer while a layer computes; communication that takes
longer than the layer is exposed. The exchange of activations between ranks that compute a layer together overlaps with
nothing. Only the shares below were fitted. They are the same for every model and machine, and
`benchmarks/published.py` compares the result with published runs. Letters: see `esmshard.batch`.
"""

from dataclasses import dataclass, replace

from esmshard.parallel.layout import BYTES, Layout
from esmshard.planner.machines import Machines
from esmshard.planner.memory_model import ModelNumbers

MATMUL_SHARE = 0.68
"""The share of the data sheet's FLOP/s that large matrix products reach, with launch gaps and lower clocks included."""
ATTENTION_SHARE = 0.4
"""The same share for FlashAttention-2, forward and backward (Dao 2023, arXiv:2307.08691, figures 4 to 6, A100)."""
HBM_SHARE = 0.8
"""The share of the data sheet's bytes/s that element-wise kernels reach."""
LINK_SHARE = 0.75
"""The share of a link's bytes/s that large collectives reach (nccl-tests, bus bandwidth)."""
LATENCY = 30e-6
"""Seconds of an empty collective within a machine. Each further machine adds `HOP`."""
HOP = 5e-6
LAUNCH = 4e-4
"""Seconds that the host needs for one forward pass of an eager layer: about 40 kernels and FSDP's hooks."""
PCIE = 20e9
"""Bytes/s between a GPU and pinned memory of its machine."""
HOST_OPTIMIZER = 20e9
"""Bytes/s that one process's AdamW reads and writes in the machine's memory, for `cpu_offload`."""
ADAMW_BYTES = 40
"""Bytes moved for each parameter: weight, gradient and two moments are read, three of them are written, and clipping
reads and writes the gradient.
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one rank in one step. Ranks that compute each layer together have the same work."""

    tokens: int
    """The tokens of one micro-batch, with padding if there is any."""
    micro_batches: int = 1
    attended: float = 0.0
    """The tokens that a token attends to, averaged over tokens: sum of squared lengths over sum of lengths."""
    head_bytes: int = 0
    """Bytes that logits or task head keep for the backward pass of a micro-batch. Moving them takes the head's time."""
    head_products: int = 0
    """Parameters of a matrix after the layers that every token goes through, such as that of a large vocabulary."""
    real: float = 1.0
    """The share of the tokens that is not padding."""
    passes: float | None = None
    """The element-wise passes of a layer; None for ours, see `our_passes`. Another implementation has its own number.
    """
    recomputed_products: float = 0.0
    """The share of the matrix products that another implementation's selective checkpointing recomputes."""


@dataclass(frozen=True)
class Cost:
    """The seconds of one step on one rank, and figures derived from them."""

    compute: float
    """Forward and backward passes, without recomputation."""
    recompute: float
    exposed: float
    """The part of the collectives' time that does not overlap with computation."""
    optimizer: float
    tokens_per_second: float
    """Tokens per second of one GPU, without padding."""
    mfu: float
    """The FLOPs that the model needs for all tokens, without recomputation, over the data sheet's FLOPs in the same
    time.
    """
    received: int
    """The bytes that this rank receives from others."""

    @property
    def seconds(self) -> float:
        """Return the seconds of one step."""
        return self.compute + self.recompute + self.exposed + self.optimizer


def our_passes(numbers: ModelNumbers) -> float:
    """Return how many vectors of width D element-wise kernels of one of our layers read or write in the forward pass
    for a token, in the precision of the arithmetic.

    In every layer these are 4 for norms, 29 for the rotation (in fp32, with its casts), and 6 for sums. Norms of
    queries and keys have 4 more. The activation is as wide as the feed-forward part: gelu reads one such vector and
    writes one, and a gate moves five, two of them for silu. A compiled layer needs about half of all this.
    """
    wide = numbers.ffn_width / numbers.dim
    return 39 + (5 if numbers.gated else 2) * wide + (4 if numbers.qk_norm else 0)


def training_flops(numbers: ModelNumbers, attended: float) -> float:
    """Return the FLOPs of one token's forward and backward pass.

    The forward pass takes two FLOPs for each parameter of a layer, and attention's two products. The gradients of
    inputs take as much, if anything in the layers learns. The gradients of the matrices that learn take their share. If
    all matrices learn, the total is three times the forward pass.
    """
    through = 1 if numbers.layer_trained else 0
    products = 2 * ((1 + through) * numbers.layer_parameters + numbers.layer_trained)
    return numbers.n_layers * (products + (1 + 2 * through) * 4 * numbers.dim * attended)


def cost(numbers: ModelNumbers, layout: Layout, work: Work, machines: Machines) -> Cost:
    """Return time and received bytes of one training step.

    Args:
        numbers: the sizes of the model.
        layout: the division of the model over `machines.world_size` ranks.
        work: the work of one rank.
        machines: the machines on which the run computes.
    """
    gpu, n, m = machines.gpu, numbers.n_layers, work.micro_batches
    half, tensor, together = layout.precision != "fp32", layout.tensor, layout.together
    size, peak = BYTES[layout.precision], gpu.half_flops if half else gpu.fp32_flops

    products = work.tokens * 2 * numbers.layer_parameters / together / (MATMUL_SHARE * peak)
    attention = work.tokens * 4 * numbers.dim * work.attended / together / (ATTENTION_SHARE * peak)
    passes = our_passes(numbers) if work.passes is None else work.passes
    moved = work.tokens * passes * numbers.dim * size / together / (HBM_SHARE * gpu.hbm)
    forward = max(products + attention + moved, LAUNCH)
    # The gradients of inputs and of weights take two products for each product of the forward pass, and fewer where
    # weights are frozen.
    through, learning = numbers.layer_trained > 0, numbers.layer_trained / numbers.layer_parameters
    backward = through * (2 * forward - (1 - learning) * products)
    # Divided ranks keep the sum of the product of `out`, and compute the product itself again.
    summed = numbers.dim**2 / numbers.layer_parameters if tensor > 1 else 0.0
    again = (
        through
        * {
            "none": 0.0,
            "selective": max(moved + (work.recomputed_products + summed) * products, LAUNCH),
            "full": forward,
        }[layout.activation_checkpointing]
    )
    head = 3 * work.head_bytes / (HBM_SHARE * gpu.hbm)
    head += 6 * work.tokens * work.head_products / (MATMUL_SHARE * peak)

    # Of `tensor` neighbours FSDP sees one.
    own, seen = numbers.of_rank(tensor), replace(machines, per_machine=machines.per_machine // tensor)
    layer = _group(own.layer_in_full, own.layer_trained, through and layout.frees_layers, layout, seen)
    # All ranks of a copy divide the root.
    of_root = replace(layout, strategy="hybrid_shard", tensor=1, group=layout.group * tensor)
    root = _group(own.root_parameters, own.root_trained, False, of_root, machines)
    syncs = 1 if layout.accumulate == "unsharded" else m
    weights, seconds = exchanged(numbers, layout, machines, work.tokens)
    received = m * (n * (layer.gathered + layer.gathered_again) + root.gathered + weights)
    received += syncs * (n * layer.reduced + root.reduced) + n * layer.all_reduced + root.all_reduced

    # The first gather of a pass and the last reduction overlap with nothing, so the root's time counts fully.
    shown = m * (root.gather + layer.gather + (n - 1) * max(0.0, layer.gather - forward))
    for micro_batch in range(m):
        last = micro_batch == m - 1
        sent = (layer.reduce if last or syncs == m else 0.0) + (layer.all_reduce if last else 0.0)
        shown += (n - 1) * max(0.0, layer.gather_again + sent - backward - again) + layer.gather_again
        shown += sent + (root.reduce if last or syncs == m else 0.0) + (root.all_reduce if last else 0.0)
    exposed = shown + m * seconds

    share = (n * own.layer_trained + own.root_trained / tensor) / layout.group
    optimizer = share * ADAMW_BYTES / (HOST_OPTIMIZER if layout.cpu_offload else HBM_SHARE * gpu.hbm)
    compute, recompute = m * (n * (forward + backward) + head), m * n * again
    total = compute + recompute + exposed + optimizer
    flops = m * work.tokens * (training_flops(numbers, work.attended) + 6 * work.head_products) / together
    return Cost(
        compute=compute,
        recompute=recompute,
        exposed=exposed,
        optimizer=optimizer,
        tokens_per_second=m * work.tokens * work.real / total / together,
        mfu=flops / total / peak,
        received=received,
    )


def exchanged(numbers: ModelNumbers, layout: Layout, machines: Machines, tokens: int) -> tuple[int, float]:
    """Return what one rank receives for a micro-batch from those with which it computes each layer: bytes and seconds.

    A layer gathers [T, D] twice and scatters sums of it twice in each pass. A recomputed layer needs no sum of its last
    product, and under selective checkpointing none at all. Norms of queries and keys add four sums of a number for each
    token, and norms and biases that are whole have one sum of gradients in a layer: their bytes are few, but each takes
    the time of an empty collective. Outside the layers, the last norm needs all tokens, and its gradient is scattered.

    Where ranks divide the tokens, a layer gathers keys and values, [T, 2 D], and scatters the sums of their gradients.

    Args:
        numbers: the sizes of the model.
        layout: the division of the model over the ranks.
        machines: the machines, whose link carries all this.
        tokens: the tokens T of a micro-batch.
    """
    if layout.together == 1:
        return 0, 0.0
    backward = int(numbers.layer_trained > 0)
    again = backward * int(layout.activation_checkpointing != "none")
    if layout.context > 1:
        passes = numbers.n_layers * (1 + backward + again)
        received = (2 * passes + 1 + backward) * _received(
            tokens * numbers.dim * BYTES[layout.precision], layout.context
        )
        return received, (passes + 1 + backward) * LATENCY + received / (LINK_SHARE * machines.gpu.link)
    recomputed = {"none": 0, "selective": 2, "full": 3}[layout.activation_checkpointing]
    large = numbers.n_layers * (4 + (4 + recomputed) * backward) + 1 + backward
    small = numbers.n_layers * (backward + 4 * int(numbers.qk_norm) * (1 + backward + again))
    received = large * _received(tokens * numbers.dim * BYTES[layout.precision], layout.tensor)
    return received, (large + small) * LATENCY + received / (LINK_SHARE * machines.gpu.link)


def _received(whole: int, ranks: int) -> int:
    return whole * (ranks - 1) // ranks


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The collectives of parameters that FSDP gathers as one group: seconds, and bytes that one rank receives."""

    gather: float
    gather_again: float
    """For the backward pass, where the weights were freed."""
    reduce: float
    all_reduce: float
    """The sum of the gradients of all copies, once a step."""
    gathered: int
    gathered_again: int
    reduced: int
    all_reduced: int


def _group(parameters: int, trained: int, freed: bool, layout: Layout, machines: Machines) -> _Group:
    """Return the collectives of so many parameters, of which `trained` have gradients."""
    gpu, ranks, per_machine = machines.gpu, layout.group, machines.per_machine
    weights, gradients = parameters * BYTES[layout.precision], trained * BYTES[layout.reduce_dtype]
    # A part that is kept on the host is fetched from there, and its gradients are moved there.
    moving = 4 / ranks / PCIE if layout.cpu_offload else 0.0
    spanned = max(1, ranks // per_machine)

    def collective(whole: int) -> float:
        """A machine receives the parts of the others once, over all its ports together."""
        if ranks == 1:
            return 0.0
        inside = _received(whole, min(ranks, per_machine)) / gpu.link
        outside = whole * (spanned - 1) / spanned / per_machine / machines.network
        return LATENCY + HOP * (spanned - 1) + max(inside, outside) / LINK_SHARE

    gather = 0.0
    if layout.sharded:  # with the copy out of the collective's buffer; a group of one rank has the copy only
        gather = parameters * moving + collective(weights) + 2 * weights / (HBM_SHARE * gpu.hbm)
    all_reduce = 0.0
    if layout.replicas > 1:
        # A machine with several copies sums them first; each of its ports then carries its part of one copy.
        near, held_by = max(1, per_machine // ranks), max(ranks, per_machine)
        apart = layout.replicas * ranks // held_by
        inside = 2 * gradients / ranks * (near - 1) / near / gpu.link
        outside = 2 * gradients / held_by * (apart - 1) / apart / machines.network
        all_reduce = LATENCY + HOP * (apart - 1) + (inside + outside) / LINK_SHARE
    return _Group(
        gather=gather,
        gather_again=gather if freed else 0.0,
        reduce=trained * moving + collective(gradients),
        all_reduce=all_reduce,
        gathered=_received(weights, ranks),
        gathered_again=_received(weights, ranks) if freed else 0,
        reduced=_received(gradients, ranks),
        all_reduced=2 * _received(gradients // ranks, layout.replicas),
    )
