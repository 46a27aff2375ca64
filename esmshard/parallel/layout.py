"""Defines `Layout`, which says how a model is divided over processes. This module does not import torch.

The function `layout` makes a `Layout` from the recipe section `parallel`. The function `shard` and the planner read it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from esmshard.errors import UsageError
from esmshard.model.config import Matrix
from esmshard.recipe.sections import ParallelSettings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def kept_products(matrices: Sequence[Matrix], tensor: int) -> Counter[tuple[int, int]]:
    """Count a layer's matrix products that selective checkpointing keeps, by (input width, output width on one rank).

    Checkpointing keeps the products with the matrices q, k, v, `out` and fc1. No gradient needs the product with fc2,
    and a LoRA is recomputed in almost no time. With tensor parallelism, the product with `out` is not kept, because
    each rank would keep all its columns. If fc1 and fc2 have the same shape, the first products of this shape are kept,
    because fc2 comes last.
    """
    left_out = ("fc2",) if tensor == 1 else ("out", "fc2")
    return Counter((matrix.columns, matrix.rows // tensor) for matrix in matrices if matrix.target not in left_out)


STRATEGIES: dict[str, Literal["one", "one a group", "one a rank"]] = {
    "full_shard": "one",  # ZeRO 3
    "shard_grad_op": "one",  # ZeRO 2: a layer's gathered weights stay in memory until its backward pass
    "hybrid_shard": "one a group",  # ZeRO 3 with MiCS
    # ZeRO 0. A layer's weights are freed here too: to gather them again costs a copy, but no communication.
    "no_shard": "one a rank",
}
"""How many copies of the model each FSDP strategy makes on all ranks together. A copy includes weights, gradients and
optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Says how a model is divided over `world_size` ranks (processes). By default, one process computes in fp32."""

    strategy: str = "full_shard"
    """A key of the dictionary `STRATEGIES`."""
    world_size: int = 1
    tensor: int = 1
    """The number of neighbouring ranks that compute each layer together (`esmshard.parallel.tensor_parallel`)."""
    context: int = 1
    """The number of neighbouring ranks that divide the tokens of each batch (`esmshard.parallel.context_parallel`)."""
    group: int = 0
    """The number of ranks over which FSDP shards one copy of the model. Only the strategy `hybrid_shard` needs a value.
    With `tensor` N, FSDP shards over every N-th rank."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    cpu_offload: bool = False
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    compile: bool = False

    def __post_init__(self) -> None:
        """Set the field `group` as the strategy requires. Raises `UsageError` if the given `group` does not fit."""
        if self.strategy not in STRATEGIES:
            raise UsageError(f"Layout: there is no strategy {self.strategy!r}; choose {', '.join(STRATEGIES)}")
        ranks, copies = self.world_size // self.tensor, STRATEGIES[self.strategy]
        group = 1 if ranks == 1 else {"one": ranks, "one a rank": 1}.get(copies, self.group)
        if not group or ranks % group or self.group not in (0, group):
            fix = (
                f"pass group={group}, or leave it out" if copies != "one a group" else "pass a group that divides them"
            )
            raise UsageError(f"Layout: {self.strategy} on {ranks} ranks cannot have group={self.group}; {fix}")
        object.__setattr__(self, "group", group)

    @property
    def frees_layers(self) -> bool:
        """Whether FSDP frees a layer's gathered weights after its forward pass. Weights outside layers always stay."""
        return self.strategy != "shard_grad_op"

    @property
    def sharded(self) -> bool:
        """Whether FSDP divides the model. A single process uses FSDP only for `cpu_offload`."""
        return self.world_size > 1 or self.cpu_offload

    @property
    def data_size(self) -> int:
        """The number of groups of ranks that compute different records. A group has `together` ranks."""
        return self.world_size // self.together

    @property
    def together(self) -> int:
        """The number of neighbouring ranks that compute the same records together."""
        return self.tensor * self.context

    @property
    def replicas(self) -> int:
        """The number of model copies on all ranks together."""
        return self.world_size // self.tensor // self.group


def layout(
    settings: ParallelSettings, world_size: int, per_machine: int, precision: Literal["fp32", "bf16", "fp16"]
) -> Layout:
    """Check the recipe section `parallel`, and return its `Layout` for `world_size` processes.

    `per_machine` is the number of processes on one machine. `precision` is the layout's precision, because the
    settings may have `auto`. Raises `UsageError` if settings contradict each other, or the number of processes.
    """
    for key, size in (("tensor", settings.tensor), ("context", settings.context)):
        if per_machine % size:
            raise UsageError(
                f"parallel.{key}: {size} does not divide the {per_machine} processes of one machine; choose a number "
                "that divides them, because a group exchanges activations in every layer and must stay on one machine"
            )
    if settings.tensor > 1 < settings.context:
        raise UsageError(
            "parallel.context: cannot be combined with parallel.tensor, because both divide the tokens; remove one key"
        )
    if settings.cpu_offload and settings.accumulate == "unsharded":
        raise UsageError(
            "parallel.accumulate: unsharded keeps gradients on the device, but parallel.cpu_offload moves them to the "
            "CPU; choose accumulate: sharded, or remove cpu_offload"
        )
    group = _group(settings, world_size // settings.tensor, max(1, per_machine // settings.tensor))
    same = {"strategy", "tensor", "context", "reduce_dtype", "activation_checkpointing"}
    same |= {"cpu_offload", "accumulate", "compile"}
    return Layout(world_size=world_size, group=group, precision=precision, **settings.model_dump(include=same))


def check_tensor(tensor: int, *, n_heads: int, ffn_width: int, quantized: bool) -> None:
    """Raise `UsageError` if `tensor` ranks cannot divide the layers of a model.

    `ffn_width` is the number of columns of the feed-forward part. If `quantized`, matrix values have 4 or 8 bits.
    """
    for what, count in (("attention heads", n_heads), ("columns of the feed-forward part", ffn_width)):
        if count % tensor:
            fitting = [n for n in range(2, 65) if n_heads % n == 0 and ffn_width % n == 0]
            raise UsageError(
                f"parallel.tensor: {tensor} does not divide the {count} {what} of this model; choose "
                f"{', '.join(map(str, fitting)) or 1}"
            )
    if tensor > 1 and quantized:
        raise UsageError(
            "parallel.tensor: quantised matrices cannot be divided over processes; remove model.quantize, or set "
            "parallel.tensor=1"
        )


def _group(settings: ParallelSettings, world_size: int, per_machine: int) -> int:
    """Return over how many ranks FSDP shards one model copy. Raises `UsageError` if the group size does not fit."""
    copies, size = STRATEGIES[settings.strategy], settings.group_size
    if copies != "one a group" or world_size == 1:
        if size is not None and copies != "one a group":
            raise UsageError(
                f"parallel.group_size is for strategy hybrid_shard, but the recipe has {settings.strategy}; remove "
                "group_size, or change the strategy"
            )
        return world_size if copies == "one" else 1
    group = size or per_machine
    if world_size % group or group in (1, world_size):
        which = "parallel.group_size" if size else "the processes of one machine"
        raise UsageError(
            f"strategy hybrid_shard: groups of {group} ({which}) do not divide {world_size} processes into at least 2 "
            "equal groups of at least 2; set a parallel.group_size that does, or parallel.strategy=full_shard"
        )
    return group
