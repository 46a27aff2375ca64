"""What `embed` computes: the outputs of each sequence, the treatment of long ones, and the key of a stored row."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from esmshard.errors import UsageError
from esmshard.io.array_formats import POOLS, Dtype, Output, Pool
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import window_of
from esmshard.vocab import Chains

TORCH: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYERLESS: tuple[Pool, ...] = ("logits", "contacts")
"""The outputs that come from the whole model and belong to no layer."""

OVERLAP = 256
"""The residues that neighbouring windows share."""


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


@dataclass(frozen=True)
class Spec:
    """Everything on which the values of an embedding store depend, besides the sequences and their tracks."""

    model_hash: str
    """The sha256 over the weight files and the architecture."""
    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype
    """The dtype of the stored numbers."""
    compute: Dtype
    """The dtype of the arithmetic."""
    long: Long
    chains: Chains
    """How several chains of a record are joined."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self) | {"outputs": [asdict(one) for one in self.outputs]}

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> "Spec":
        """Read a spec back from JSON."""
        spec = dict(plan["spec"])
        spec["outputs"] = tuple(Output(**{**one, "heads": tuple(one["heads"])}) for one in spec["outputs"])
        spec["long"], spec["chains"] = Long(**spec["long"]), Chains(**spec["chains"])
        return cls(**spec)

    def row_key(self, tokens: npt.NDArray[np.uint8], tracks: Mapping[str, bytes]) -> bytes:
        """Return the 16 bytes that name a row: a digest of all that its values depend on.

        Rows of the same key are equal except for rounding, and one of them may be copied for the other, also from
        another store. The key is over the tokens, with those between chains; over the tracks of which something is
        known; and over this spec, but for its outputs, since a store may hold more outputs than are asked for.

        Args:
            tokens: the residues of the record and what joins its chains, uint8 [L].
            tracks: the bytes of each known track, by name.
        """
        digest = hashlib.blake2b(self._salt, digest_size=16)
        digest.update(tokens.data)
        for name, values in tracks.items():
            digest.update(name.encode() + values)
        return digest.digest()

    @functools.cached_property
    def _salt(self) -> bytes:
        fields = {name: value for name, value in self.as_json().items() if name != "outputs"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()

    def numbers(self, kept_U: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many numbers each row has over all outputs, for rows of these residues, int64 [U]."""
        return sum((one.numbers(kept_U, self.dim) for one in self.outputs), np.zeros_like(kept_U))

    def differs(self, other: "Spec", model: str, other_model: str) -> str | None:
        """Return, as a clause, how another store differs; None if it does not."""
        if self.model_hash != other.model_hash:
            same = f"other weights than now at {model}" if model == other_model else f"the model {other_model}"
            return f"with {same}"
        for what in ("outputs", "dtype", "compute", "long", "chains"):
            here, there = getattr(self, what), getattr(other, what)
            if here != there:
                return f"with {_described(what, there)}, and not with {_described(what, here)}"
        return None


def _described(what: str, value: Any) -> str:
    if what == "outputs":
        return ", ".join(one.title for one in value)
    if what == "long":
        shared = f" --overlap {value.overlap}" if value.mode == "window" else ""
        return f"--long {value.mode}" + (f" --window {value.window}{shared}" if value.mode != "full" else "")
    if what == "chains":
        return f"--join {value.text}"
    return f"{'numbers stored' if what == 'dtype' else 'arithmetic'} in {value}"
