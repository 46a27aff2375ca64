"""Training runs that others have published, and what `cost` says of them. No torch.

The same shares of `cost` for all. What differs from run to run is the machine, the shape, the batch, and how many
element-wise passes the implementation makes: counted from its source, not fitted.
"""

from dataclasses import dataclass

from esmshard.planner.cost import Cost, Work, cost
from esmshard.planner.machines import GPUS, Machines
from esmshard.planner.memory_model import ModelNumbers
from esmshard.sharding.layout import Layout

FUSED_PASSES = 22
"""Megatron, TransformerEngine: LayerNorm 2 twice, rotation in one kernel 4, attention 4, bias with sum 3 twice, and the
bias with gelu in the matrix product's own kernel, 4 of 8."""
TITAN_PASSES = 42
"""torchtitan's Llama 3, eager: fused RMSNorm 2 twice, rotation in fp32 10 (queries and a quarter for keys), attention
4, sums 6, silu 7 and product 10.5 over a width of 3.5 D."""
TRANSFORMERS_PASSES = 92
"""`transformers`' ESM-2, eager: LayerNorm 2 twice, scaling of queries 2, rotation out of five kernels 20, unpadding and
padding again 10, attention 4, sums 6, and gelu written out in five kernels over a width of 4 D, 44."""


@dataclass(frozen=True)
class Run:
    """One published figure."""

    name: str
    source: str
    measure: str
    """`mfu`, or `tokens`: real tokens a second and GPU."""
    published: float
    numbers: ModelNumbers
    layout: Layout
    work: Work
    machines: Machines
    counted_flops: float | None = None
    """FLOPs of one token, forward and backward, as the publisher counts them for the MFU; None for ours."""

    def cost(self) -> Cost:
        """As `cost` reckons it."""
        return cost(self.numbers, self.layout, self.work, self.machines)

    def predicted(self) -> float:
        """The figure, by our model."""
        found = self.cost()
        if self.measure == "tokens":
            return found.tokens_per_second
        if self.counted_flops is None:
            return found.mfu
        return found.tokens_per_second * self.counted_flops / self.machines.gpu.half_flops

    def error(self) -> float:
        """Relative, of the prediction."""
        return self.predicted() / self.published - 1


def esm2(n_layers: int, dim: int, n_heads: int) -> ModelNumbers:
    """ESM-2 with its LM head, trained whole."""
    layer, root = 12 * dim * dim + 13 * dim, dim * dim + 38 * dim + 33
    return ModelNumbers(
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        layer_parameters=layer,
        root_parameters=root,
        layer_trained=layer,
        root_trained=root,
    )


# 32 layers, 32 query heads and 8 of keys and values, SwiGLU 14,336 wide, 128,256 symbols, no tied matrix.
LLAMA3_8B = ModelNumbers(
    n_layers=32,
    dim=4096,
    n_heads=32,
    layer_parameters=218_112_000,
    root_parameters=2 * 128_256 * 4096 + 4096,
    layer_trained=218_112_000,
    root_trained=2 * 128_256 * 4096 + 4096,
)

RUNS: tuple[Run, ...] = (
    Run(
        "ESM-2 3B on 256 A100",
        "BioNeMo Framework, docs/models/ESM-2: Device Scaling",
        "mfu",
        0.606,
        esm2(36, 2560, 40),
        # Megatron's distributed optimizer: each GPU has all weights and updates its share of them. With one micro-batch
        # a step that is the traffic of shard_grad_op. Gradients are reduced in bf16.
        Layout(
            strategy="shard_grad_op",
            world_size=256,
            group=256,
            free_layers=False,
            free_last=False,
            precision="bf16",
            reduce_dtype="bf16",
        ),
        # 1,024 tokens a sequence, 16 of them a GPU (not published; what an 80 GB card holds). Padding counts, too.
        Work(tokens=16 * 1024, attended=1024, passes=FUSED_PASSES),
        Machines(GPUS["A100-80GB"], 8, 32),
    ),
    Run(
        "ESM-2 15B on 8 H200, FlashAttention-2, padded",
        "BioNeMo Recipes, esm2_native_te: 15B performance",
        "tokens",
        1630,
        esm2(48, 5120, 40),
        # Checkpointing is not published. Their performance test takes 12 sequences a GPU. Our layer would keep 98 GB of
        # them; `transformers`' gelu keeps 8 vectors on top of our 16, which is 147 GB and more than there is.
        Layout(world_size=8, group=8, precision="bf16", activation_checkpointing="full"),
        # Two and a half times the speed by packing alone: 1 in 2.5 places holds a residue. Attention runs unpadded.
        Work(tokens=12 * 1024, attended=400, real=0.4, passes=TRANSFORMERS_PASSES),
        Machines(GPUS["H200-141GB"], 8),
    ),
    Run(
        "Llama 3 8B on 64 A100",
        "torchtitan, docs/performance.md: batch 1, selective op",
        "mfu",
        0.582,
        LLAMA3_8B,
        Layout(world_size=64, group=64, precision="bf16", activation_checkpointing="selective"),
        # One sequence of 8,192; a causal token attends to half. Every second matrix product is computed again. Each
        # token has 128,256 logits, in bf16 and in fp32.
        Work(
            tokens=8192,
            attended=4096,
            passes=TITAN_PASSES,
            recomputed_products=0.5,
            head_bytes=8192 * 128_256 * 6,
            head_products=128_256 * 4096,
        ),
        Machines(GPUS["A100-80GB"], 8, 8),
        # As its train.py does: 6 for each parameter, all 8.03 billion of them, and attention as if it were not causal.
        counted_flops=6 * 8.03e9 + 12 * 32 * 4096 * 8192,
    ),
)
