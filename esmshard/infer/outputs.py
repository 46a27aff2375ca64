"""What `embed` computes of each sequence, and what a file of it says of itself. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.errors import UsageError
from esmshard.vocab import VOCAB_SIZE

Pool = Literal["mean", "max", "cls", "residue", "logits", "contacts"]
POOLS: tuple[Pool, ...] = get_args(Pool)
LAYERLESS: tuple[Pool, ...] = ("logits", "contacts")
"""They come from the whole model, and from no one layer."""

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
NUMPY: Mapping[Dtype, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""numpy has no bfloat16: its bits are kept as uint16. See `as_float`."""

MAX_LENGTH, OVERLAP = 1022, 256
"""Residues that ESM-2 was trained on at once, and that neighbouring windows share."""


@dataclass(frozen=True)
class Output:
    """One array a sequence of L residues: `mean`, `max` and `cls` are [D], `residue` [L, D], `logits` [L, 33] over the
    tokens of `esmshard.vocab`, `contacts` [L, L] probabilities. `<cls>` and `<eos>` enter `cls` only.
    """

    pool: Pool
    layer: int | None
    """0 (embedding) to the number of layers; None for `logits` and `contacts`."""

    @property
    def name(self) -> str:
        """As in files.

        >>> Output("mean", 33).name, Output("contacts", None).name
        ('mean_33', 'contacts')
        """
        return self.pool if self.layer is None else f"{self.pool}_{self.layer}"

    @property
    def pooled(self) -> bool:
        """Whether there is one vector a sequence, whatever its length."""
        return self.pool in ("mean", "max", "cls")

    def shape(self, length: int, dim: int) -> tuple[int, ...]:
        """Of the array of a sequence of so many residues."""
        if self.pooled:
            return (dim,)
        return {"residue": (length, dim), "logits": (length, VOCAB_SIZE), "contacts": (length, length)}[self.pool]

    def numbers(self, length: npt.NDArray[np.int64], dim: int) -> npt.NDArray[np.int64]:
        """Size of that array, for many lengths."""
        if self.pooled:
            return np.full_like(length, dim)
        return length * (length if self.pool == "contacts" else dim if self.pool == "residue" else VOCAB_SIZE)


def choose(pools: Sequence[str], layers: Sequence[int] | None, n_layers: int, model: str) -> tuple[Output, ...]:
    """Every pool of every layer, in the order given; the last layer by default, which is -1, too. `UsageError` for what
    there is not.

    >>> [one.name for one in choose(["mean", "contacts"], [5, 6], 6, "x")]
    ['mean_5', 'mean_6', 'contacts']
    """
    wanted = [layer if layer >= 0 else n_layers + 1 + layer for layer in layers or [n_layers]]
    for layer in wanted:
        if not 0 <= layer <= n_layers:
            raise UsageError(f"--layers {layer}: {model} has layers 0 to {n_layers}")
    found: dict[Output, None] = {}
    for pool in pools:
        if pool not in POOLS:
            raise UsageError(f"--pool {pool}: one of {', '.join(POOLS)} is expected")
        of_pool: list[int | None] = [None] if pool in LAYERLESS else [*wanted]
        found |= dict.fromkeys(Output(pool, layer) for layer in of_pool)
    if layers and all(output.layer is None for output in found):
        raise UsageError(f"--layers: {' and '.join(pools)} come from the whole model; leave --layers out")
    return tuple(found)


@dataclass(frozen=True)
class About:
    """What a file of embeddings holds, and of what."""

    outputs: tuple[Output, ...]
    dim: int
    """D."""
    dtype: Dtype
    """Of the numbers as stored."""
    n_records: int
    """Records that have a row."""
    attributes: Mapping[str, Any]
    """For people and programs: model and its hash, layers, pools, dtypes, how long proteins were taken. Strings and
    ints."""


@dataclass(frozen=True)
class Row:
    """One record of a product."""

    id: str
    length: int
    """Residues of the record, and not of what was computed of it where it was truncated."""
    values: Mapping[str, npt.NDArray[Any]]
    """By the names of the outputs, each of `Output.shape`; the numbers of `NUMPY[About.dtype]`."""


def as_float(values: npt.NDArray[Any], dtype: Dtype) -> npt.NDArray[Any]:
    """Numbers that numpy can compute with: bf16 bits become float32, which is exact; others stay as they are."""
    if dtype != "bf16":
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Long:
    """What becomes of sequences of more residues than `window`.

    `full`: the model sees them whole; ESM-2 is rotary, but was trained on 1,022 residues. `window`: it sees overlapping
    windows, whose values are blended. `truncate`: it sees the first `window` residues, and there are no others.
    """

    mode: Literal["full", "window", "truncate"] = "full"
    window: int = MAX_LENGTH
    overlap: int = OVERLAP

    def check(self) -> "Long":
        """`UsageError` for what makes no sense."""
        if self.mode not in ("full", "window", "truncate"):
            raise UsageError(f"--long {self.mode}: full, window or truncate is expected")
        if self.window < 2 or (self.mode == "window" and not 0 <= self.overlap < self.window):
            raise UsageError(
                f"--window {self.window} --overlap {self.overlap}: windows of at least 2 residues are expected, which "
                "share fewer than they have"
            )
        return self

    def kept(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Residues of which there are values, for many lengths."""
        return np.minimum(length, self.window) if self.mode == "truncate" else length

    def starts(self, length: int) -> list[int]:
        """Where the windows of a sequence begin, spread evenly; neighbours share `overlap` residues or more.

        >>> Long("window", 100, 20).starts(250), Long().starts(250)
        ([0, 75, 150], [0])
        """
        if self.mode != "window" or length <= self.window:
            return [0]
        count = -(-(length - self.overlap) // (self.window - self.overlap))
        return [round(k * (length - self.window) / (count - 1)) for k in range(count)]
