"""The outputs that `embed` computes for each sequence, and the description that a file has of them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.errors import UsageError
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import window_of
from esmshard.vocab import VOCAB_SIZE

Pool = Literal["mean", "max", "cls", "residue", "logits", "contacts", "attentions"]
POOLS: tuple[Pool, ...] = get_args(Pool)
LAYERLESS: tuple[Pool, ...] = ("logits", "contacts")
"""The outputs that come from the whole model and belong to no layer."""

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
NUMPY: Mapping[Dtype, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""The numpy type of each dtype. numpy has no bfloat16, so its bits are kept as uint16; see `as_float`."""

OVERLAP = 256
"""The residues that neighbouring windows share."""


@dataclass(frozen=True)
class Output:
    """One array for each sequence of L residues.

    `mean`, `max` and `cls` are [D], `residue` [L, D], `logits` [L, 33] over the tokens of `esmshard.vocab`, `contacts`
    [L, L] probabilities, `attentions` [H, L, L] probabilities of H heads, a row for each residue that attends. `<cls>`
    and `<eos>` are used for `cls` only. The softmax of `attentions` is over them, too, so rows sum to less than 1.
    """

    pool: Pool
    layer: int | None
    """The layer, from 0 (embedding) to the number of layers; None for `logits` and `contacts`. `attentions` of layer n
    are those of the n-th block, whose output is representation n, so there are none of layer 0.
    """
    heads: tuple[int, ...] = ()
    """The heads of `attentions`, from 0; empty for every other pool."""

    @property
    def name(self) -> str:
        """Return the name that files use.

        >>> Output("mean", 33).name, Output("contacts", None).name
        ('mean_33', 'contacts')
        """
        return self.pool if self.layer is None else f"{self.pool}_{self.layer}"

    @property
    def title(self) -> str:
        """Return the name, with the heads if there are any, for messages.

        >>> Output("attentions", 6, (0, 3)).title
        'attentions_6 of heads 0,3'
        """
        return f"{self.name} of heads {','.join(map(str, self.heads))}" if self.heads else self.name

    @property
    def pooled(self) -> bool:
        """Whether each sequence has one vector, whatever its length."""
        return self.pool in ("mean", "max", "cls")

    @property
    def paired(self) -> bool:
        """Whether each pair of residues has a value."""
        return self.pool in ("contacts", "attentions")

    def shape(self, length: int, dim: int) -> tuple[int, ...]:
        """Return the shape of the array for a sequence of `length` residues."""
        if self.pooled:
            return (dim,)
        if self.paired:
            return (*([len(self.heads)] if self.pool == "attentions" else []), length, length)
        return (length, dim if self.pool == "residue" else VOCAB_SIZE)

    def numbers(self, length: npt.NDArray[np.int64], dim: int) -> npt.NDArray[np.int64]:
        """Return the number of values of the array, for many lengths."""
        if self.pooled:
            return np.full_like(length, dim)
        if self.paired:
            return length * length * max(1, len(self.heads))
        return length * (dim if self.pool == "residue" else VOCAB_SIZE)


def choose(
    pools: Sequence[str], layers: Sequence[int] | None, config: ModelConfig, model: str, heads: Sequence[int] = ()
) -> tuple[Output, ...]:
    """Return every pool of every layer, in the given order.

    Args:
        pools: see `Output`.
        layers: see `Output`; the last layer by default, which is also -1.
        config: the architecture of the model.
        model: its name, for messages.
        heads: the heads of `attentions`; all by default.

    Raises:
        UsageError: for an unknown pool, layer or head.

    >>> from esmshard.model.families.family_registry import SIZES
    >>> [one.name for one in choose(["mean", "contacts"], [5, 6], SIZES["esm2_t6_8M_UR50D"], "x")]
    ['mean_5', 'mean_6', 'contacts']
    """
    n_layers = config.n_layers
    if heads and "attentions" not in pools:
        raise UsageError("--heads: only --pool attentions has heads; leave --heads out")
    for head in heads:
        if not 0 <= head < config.n_heads:
            raise UsageError(f"--heads {head}: {model} has heads 0 to {config.n_heads - 1}")
    wanted = [layer if layer >= 0 else n_layers + 1 + layer for layer in layers or [n_layers]]
    for layer in wanted:
        if not 0 <= layer <= n_layers:
            raise UsageError(f"--layers {layer}: {model} has layers 0 to {n_layers}")
    found: dict[Output, None] = {}
    for pool in pools:
        if pool not in POOLS:
            raise UsageError(f"--pool {pool}: one of {', '.join(POOLS)} is expected")
        if pool == "attentions" and 0 in wanted:
            raise UsageError(
                f"--layers 0: attentions are of layers 1 to {n_layers}, and layer 0 is the embedding; leave 0 out"
            )
        of_pool: list[int | None] = [None] if pool in LAYERLESS else [*wanted]
        of_heads = tuple(dict.fromkeys(heads or range(config.n_heads))) if pool == "attentions" else ()
        found |= dict.fromkeys(Output(pool, layer, of_heads) for layer in of_pool)
    if layers and all(output.layer is None for output in found):
        raise UsageError(f"--layers: {' and '.join(pools)} come from the whole model; leave --layers out")
    return tuple(found)


@dataclass(frozen=True)
class About:
    """The description of a file of embeddings."""

    outputs: tuple[Output, ...]
    dim: int
    """The dimension D."""
    dtype: Dtype
    """The dtype of the stored numbers."""
    n_records: int
    """The number of records that have a row."""
    attributes: Mapping[str, Any]
    """Facts for people and programs: model and its hash, layers, pools, dtypes, treatment of long proteins. Strings and
    integers.
    """


@dataclass(frozen=True)
class Row:
    """One record of an embedding store."""

    id: str
    length: int
    """Residues of the record, also where it was truncated before it was computed."""
    chains: tuple[int, ...] = field(default=(), kw_only=True)
    """Residues of each chain of a record with several; empty for one chain. Rows are those of one chain after the
    other, without linkers."""
    values: Mapping[str, npt.NDArray[Any]]
    """The arrays by output name, each of `Output.shape` and of type `NUMPY[About.dtype]`."""
    residues: str = ""
    """The whole sequence, for formats that store rows by their sequences; empty for others."""


def as_float(values: npt.NDArray[Any], dtype: Dtype) -> npt.NDArray[Any]:
    """Convert to numbers that numpy can compute with. bf16 bits become float32; other types do not change."""
    if dtype != "bf16":
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Long:
    """The treatment of sequences of more than `window` residues.

    `full`: the model gets the whole sequence, which rotary positions allow, but models were trained on some 1,000 to
    2,000 residues. `window`: the model gets overlapping windows, whose values are blended. `truncate`: the model gets
    the first `window` residues, and the others have no values.
    """

    mode: Literal["full", "window", "truncate"] = "full"
    window: int = 0
    """Residues; 0 for as many as the model saw at once in training (`for_model`)."""
    overlap: int = OVERLAP

    def for_model(self, config: ModelConfig) -> "Long":
        """Put in the window of a model's training, if no other was asked for, and check the values."""
        return (self if self.window else replace(self, window=window_of(config))).check()

    def check(self) -> "Long":
        """Raise `UsageError` for impossible values."""
        if self.mode not in ("full", "window", "truncate"):
            raise UsageError(f"--long {self.mode}: full, window or truncate is expected")
        if self.window < 2 or (self.mode == "window" and not 0 <= self.overlap < self.window):
            raise UsageError(
                f"--window {self.window} --overlap {self.overlap}: windows of at least 2 residues are expected, which "
                "share fewer than they have"
            )
        return self

    def kept(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of residues that have values, for many lengths."""
        return np.minimum(length, self.window) if self.mode == "truncate" else length

    def starts(self, length: int) -> list[int]:
        """Return where the windows of a sequence begin. They are spread evenly, and neighbours share at least `overlap`
        residues.

        >>> Long("window", 100, 20).starts(250), Long("full").starts(250)
        ([0, 75, 150], [0])
        """
        if self.mode != "window" or length <= self.window:
            return [0]
        count = -(-(length - self.overlap) // (self.window - self.overlap))
        return [round(k * (length - self.window) / (count - 1)) for k in range(count)]
