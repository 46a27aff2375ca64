"""What `embed` computes: the outputs of each sequence, the treatment of long ones, and the request of a command."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from esmshard.data.tracks import TrackFile, track_files
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import UsageError
from esmshard.io import remote
from esmshard.io.array_formats import FORMATS, POOLS, Dtype, Output, Pool, suits
from esmshard.model import weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import family_of, window_of
from esmshard.model.weights import Weights, model_hash
from esmshard.parallel.process_group import precision_on
from esmshard.vocab import Chains, join_option

TORCH: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYERLESS: tuple[Pool, ...] = ("logits", "contacts")
"""The outputs that come from the whole model and belong to no layer."""

PARTS = "parts"
"""The format that is a directory of parts."""

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
    """Everything on which the values of embeddings depend, besides the sequences and their tracks."""

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

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Spec":
        """Read a spec back from the JSON of `dataclasses.asdict`."""
        return TypeAdapter(cls).validate_python(fields)

    @property
    def settings(self) -> dict[str, str]:
        """Return what a row depends on besides its sequence and the chosen outputs, as options of the command."""
        long = self.long.mode if self.long.mode == "full" else f"{self.long.mode} --window {self.long.window}"
        long += f" --overlap {self.long.overlap}" if self.long.mode == "window" else ""
        texts = {"model": self.model_hash[:16], "--dtype": self.dtype, "--precision": self.compute, "--long": long}
        return texts | {"--join": self.chains.text}

    def row_key(self, tokens: npt.NDArray[np.uint8], tracks: Mapping[str, bytes]) -> bytes:
        """Return the 16 bytes that name a row: a digest of all that its values depend on.

        Rows of the same key are equal except for rounding, and one of them may be copied for the other, also from
        another store. The key is over the settings; over the tokens, with those between chains; and over the tracks of
        which something is known. The outputs are no part of it, since a store may hold more than are asked for.

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
        return json.dumps(self.settings | {"model": self.model_hash}).encode()

    def numbers(self, kept_U: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many numbers each row has over all outputs, for rows of these residues, int64 [U]."""
        return sum((one.numbers(kept_U, self.dim) for one in self.outputs), np.zeros_like(kept_U))


def difference(known: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return, as a clause, the first setting in which two outputs differ; None if there is none."""
    for name in {**wanted, **known}:
        before, now = known.get(name, "without"), wanted.get(name, "without")
        if before != now:
            return f"another {name} ({before}, and now {now})"
    return None


@dataclass(frozen=True)
class EmbedRequest:
    """What to compute and where to write it, checked as far as is possible without reading the input."""

    model: str
    out: Path
    fmt: str
    spec: Spec
    found: Weights
    device: torch.device
    tracks: tuple[TrackFile, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of the spec and the outputs."""
        return self.spec.settings | {"--pool and --layers": ", ".join(one.title for one in self.spec.outputs)}


def request(
    model: str,
    out: Path,
    *,
    fmt: str | None = None,
    pools: Sequence[str] = (),
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    dtype: Dtype = "fp32",
    precision: str = "auto",
    device: DeviceName = None,
    long: Long = Long(),  # frozen
    tracks: Mapping[str, str] | None = None,
    join: str | None = None,
) -> EmbedRequest:
    """Check a request, and find the model.

    Args:
        model: see `esmshard.model.weights.read`.
        out: file or directory to write.
        fmt: a key of FORMATS, or `parts`; by default from the ending of `out`, and `parts` if there is none.
        pools: see `Output`; by default the usual pool of the format.
        layers: 0 (embedding) to the number of layers; the last, normed layer by default.
        heads: the heads of `attentions`, from 0; all by default.
        dtype: dtype of the numbers in the file.
        precision: precision of the arithmetic: fp32, bf16, fp16 or `auto`, which is fast on the device.
        device: see `chosen_device`. With `cuda` each process has a GPU of its own.
        long: the treatment of long sequences.
        tracks: a path, or `inside`, by the name of each track of the sequences (docs/tracks.md).
        join: how the chains of a record are joined (docs/chains.md); by default as the model says.

    Raises:
        UsageError: if the outputs cannot be computed or written.
        InputError: if the model cannot be read.
    """
    fmt = fmt or out.suffix.removeprefix(".") or PARTS
    if fmt not in (*FORMATS, PARTS):
        known = ", ".join([*FORMATS, f"{PARTS} (a directory)"])
        raise UsageError(f"{out}: no format '{fmt}'; there are {known} (by ending, or --format)")
    if fmt != PARTS and remote.address(out) is not None:
        raise UsageError(
            f"{remote.address(out)}: embed writes a directory of parts into a bucket; leave the ending out, and let "
            "`esmshard embeddings merge` make one file of it"
        )
    found = weights.joining(weights.read(model), join_option(join), f"--join: {model}")
    usual = "mean" if fmt == PARTS else FORMATS[fmt].default_pool
    outputs = choose(list(pools) or [usual], list(layers), found.config, model, heads)
    for pool, part in (("logits", "lm_head"), ("contacts", "contact_head")):
        if any(one.pool == pool for one in outputs) and part in found.unlearned:
            raise UsageError(f"--pool {pool}: {model} has no trained {part}, which they come from; take another model")
    if fmt != PARTS:
        suits(fmt, outputs, dtype, out)
    computing = chosen_device(device)
    compute: Dtype = precision_on(computing, precision, "--precision")  # type: ignore[assignment]
    longest, long = found.config.most_tokens, long.for_model(found.config)
    if longest is not None and long.mode != "full" and long.window > longest - 2:
        raise UsageError(f"--window {long.window}: {model} has positions for {longest - 2} residues")
    spec = Spec(model_hash(found), outputs, found.config.dim, dtype, compute, long, found.config.chains)
    files = track_files(tracks or {}, family_of(found.config).tracks, model, "--track ")
    return EmbedRequest(model, out, fmt, spec, found, computing, tuple(files))
