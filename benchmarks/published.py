"""Training runs that others have published, and their predictions by `cost`.

The shares of `cost` are the same for all runs. Machine, shape, batch, and the number of element-wise passes of the
implementation differ. The passes are counted in the source code, and not fitted.
"""

from dataclasses import dataclass

from esmshard.model.families.esm2 import EsmConfig
from esmshard.parallel.layout import Layout
from esmshard.planner import GPUS, Cost, Machines, ModelNumbers, Work, cost

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
    """The unit: `mfu`, or `tokens` for tokens without padding per second and GPU."""
    published: float
    numbers: ModelNumbers
    layout: Layout
    work: Work
    machines: Machines
    real: float = 1.0
    """The share of the tokens that is not padding."""
    counted_flops: float | None = None
    """The FLOPs of one token, forward and backward, in the publisher's count for the MFU; None for our count."""

    def cost(self) -> Cost:
        """Return the cost of a step by `esmshard.planner`."""
        return cost(self.numbers, self.layout, self.work, self.machines)

    def predicted(self) -> float:
        """Return the figure that our cost model predicts."""
        found = self.cost()
        if self.measure == "tokens":
            return found.tokens_per_second * self.real
        if self.counted_flops is None:
            return found.mfu
        return found.tokens_per_second * self.counted_flops / self.machines.gpu.half_flops

    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted() / self.published - 1


def esm2(n_layers: int, dim: int, n_heads: int) -> ModelNumbers:
    """Return ESM-2 with its LM head, with all weights trained."""
    layer, root = 12 * dim * dim + 13 * dim, dim * dim + 38 * dim + 33
    return ModelNumbers(
        config=EsmConfig(n_layers=n_layers, dim=dim, n_heads=n_heads),
        layer_parameters=layer,
        root_parameters=root,
        layer_trained=layer,
        root_trained=root,
    )


# 32 layers, 32 query heads and 8 of keys and values, SwiGLU 14,336 wide, 128,256 symbols, no tied matrix.
LLAMA3_8B = ModelNumbers(
    config=EsmConfig(n_layers=32, dim=4096, n_heads=32),
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
        # for each step this is the traffic of shard_grad_op. Gradients are reduced in bf16.
        Layout(
            strategy="shard_grad_op",
            world_size=256,
            group=256,
            precision="bf16",
            reduce_dtype="bf16",
        ),
        # Each GPU has 16 sequences of 1,024 tokens, which an 80 GB card can hold (not published). Padding counts.
        Work(tokens=16 * 1024, attended=1024, passes=FUSED_PASSES),
        Machines(GPUS["A100-80GB"], 8, 32),
    ),
    Run(
        "ESM-2 15B on 8 H200, FlashAttention-2, padded",
        "BioNeMo Recipes, esm2_native_te: 15B performance",
        "tokens",
        1630,
        esm2(48, 5120, 40),
        # Checkpointing is not published. Their performance test has 12 sequences on a GPU. Our layer would keep 98 GB
        # of them; `transformers`' gelu keeps 8 vectors in addition to our 16: 147 GB, more than the card has.
        Layout(world_size=8, group=8, precision="bf16", activation_checkpointing="full"),
        # Packing alone gives 2.5 times the speed: 1 in 2.5 places has a residue. Attention runs without padding.
        Work(tokens=12 * 1024, attended=400, passes=TRANSFORMERS_PASSES),
        Machines(GPUS["H200-141GB"], 8),
        real=0.4,
    ),
    Run(
        "Llama 3 8B on 64 A100",
        "torchtitan, docs/performance.md: batch 1, selective op",
        "mfu",
        0.582,
        LLAMA3_8B,
        Layout(world_size=64, group=64, precision="bf16", activation_checkpointing="selective"),
        # One sequence has 8,192 tokens; a causal token attends to half. Every second matrix product is recomputed. Each
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
        # As in its train.py: 6 for each of the 8.03 billion parameters, and attention as if it were not causal.
        counted_flops=6 * 8.03e9 + 12 * 32 * 4096 * 8192,
    ),
)
