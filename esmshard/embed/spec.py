"""The request of an `embed` command: the outputs of each sequence, and the treatment of long sequences."""

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
"""The kinds of output that belong to no layer."""

PARTS = "parts"
"""The output format for a directory of parts."""


def choose(
    pools: Sequence[str], layers: Sequence[int] | None, config: ModelConfig, model: str, heads: Sequence[int] = ()
) -> tuple[Output, ...]:
    """Return the outputs to compute: every kind of output (pool) for every layer, in the given order.

    Args:
        pools: the kinds of output, such as `mean`; see the class `Output`.
        layers: 0 (embedding) to the number of layers; negative numbers count from the last layer, -1. The values of the
            last layer are those after the final LayerNorm. The default is the last layer.
        config: the architecture of the model.
        model: the name of the model, for messages.
        heads: the attention heads of the output `attentions`, counted from 0; all heads by default.

    Raises:
        UsageError: if a pool, layer or head does not exist, or no pool uses the given layers or heads.
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
    outputs: dict[Output, None] = {}
    for pool in pools:
        if pool not in POOLS:
            raise UsageError(f"--pool {pool}: one of {', '.join(POOLS)} is expected")
        if pool in ("attentions", "contacts", "logits") and config.only_represents:
            raise UsageError(
                f"--pool {pool}: {model} computes representations only; choose mean, max or residue, or another model"
            )
        if pool == "cls" and not config.has_cls:
            raise UsageError(f"--pool cls: {model} has no token <cls>; choose mean or max")
        if pool == "attentions" and 0 in wanted:
            raise UsageError(
                f"--layers 0: layers 1 to {n_layers} have attentions, and layer 0 is the embedding; leave 0 out"
            )
        of_pool: list[int | None] = [None] if pool in LAYERLESS else [*wanted]
        of_heads = tuple(dict.fromkeys(heads or range(config.n_heads))) if pool == "attentions" else ()
        outputs |= dict.fromkeys(Output(pool, layer, of_heads) for layer in of_pool)
    if layers and all(output.layer is None for output in outputs):
        raise UsageError(f"--layers: {' and '.join(pools)} belong to no layer; leave --layers out")
    return tuple(outputs)


@dataclass(frozen=True)
class Long:
    """The treatment of sequences with more than `window` residues.

    `full`: the model gets the whole sequence. Rotary positions allow this, but models were trained on sequences of up
    to 1,000 or 2,000 residues. `window`: the model gets overlapping windows, and the output is their weighted mean.
    `truncate`: the model gets the first `window` residues, and the other residues have no values.
    """

    mode: Literal["full", "window", "truncate"] = "full"
    window: int = 0
    """The number of residues of a window; 0 means the maximum length of the model's training inputs."""
    overlap: int = 256
    """The minimum number of residues that neighbouring windows share."""

    def for_model(self, config: ModelConfig) -> "Long":
        """Replace a `window` of 0 by the model's longest training length. Raise `UsageError` for impossible values."""
        long = self if self.window else replace(self, window=window_of(config))
        if long.mode not in ("full", "window", "truncate"):
            raise UsageError(f"--long {long.mode}: full, window or truncate is expected")
        if long.window < 2 or (long.mode == "window" and not 0 <= long.overlap < long.window):
            raise UsageError(
                f"--window {long.window} --overlap {long.overlap}: a window of at least 2 residues and a "
                "smaller overlap are expected"
            )
        return long

    def kept(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of residues that have values in the output, for each sequence length."""
        return np.minimum(length, self.window) if self.mode == "truncate" else length

    def starts(self, length: int) -> list[int]:
        """Return the first residue (from 0) of each window of a sequence. The windows are spread evenly over the
        sequence, and neighbouring windows share at least `overlap` residues.

        >>> Long("window", 100, 20).starts(250), Long("full").starts(250)
        ([0, 75, 150], [0])
        """
        if self.mode != "window" or length <= self.window:
            return [0]
        count = -(-(length - self.overlap) // (self.window - self.overlap))
        return [round(k * (length - self.window) / (count - 1)) for k in range(count)]


@dataclass(frozen=True)
class Spec:
    """The settings that determine the values of embeddings, for given sequences and tracks."""

    model_hash: str
    """A sha256 of the model's weight files and architecture."""
    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype
    """The dtype of the numbers in the output."""
    compute: Dtype
    """The dtype of the arithmetic."""
    long: Long
    chains: Chains
    """How the chains of a record are joined."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Spec":
        """Make a spec from the dictionary that `dataclasses.asdict` has made, which may come from JSON."""
        return TypeAdapter(cls).validate_python(fields)

    @property
    def settings(self) -> dict[str, str]:
        """Return a dict from options of `esmshard embed` to values as strings, without `--pool` and `--layers`."""
        long = self.long.mode if self.long.mode == "full" else f"{self.long.mode} --window {self.long.window}"
        long += f" --overlap {self.long.overlap}" if self.long.mode == "window" else ""
        texts = {"model": self.model_hash[:16], "--dtype": self.dtype, "--precision": self.compute, "--long": long}
        return texts | {"--join": self.chains.text}

    def row_key(self, tokens: npt.NDArray[np.uint8], tracks: Mapping[str, bytes]) -> bytes:
        """Return the key of a row (all values of one sequence), 16 bytes: a digest of settings, tokens and tracks.

        Rows with equal keys are equal except for rounding, so a row may be copied from an earlier output. The key does
        not depend on the kinds of output, because an earlier output may have more kinds than a request needs. `tokens`
        [L] are the residues of the record, with the linkers between its chains.
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
        """Return how many numbers each row has over all outputs, int64 [U]. A row has values for `kept_U` residues."""
        return sum((output.numbers(kept_U, self.dim) for output in self.outputs), np.zeros_like(kept_U))


def difference(known: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return a phrase about one setting that differs between the jobs `known` and `wanted`; None if all are equal."""
    for name in {**wanted, **known}:
        before, now = known.get(name, "without"), wanted.get(name, "without")
        if before != now:
            return f"another {name} ({before}, and now {now})"
    return None


@dataclass(frozen=True)
class EmbedRequest:
    """The embeddings to compute, and the output path. All settings were checked, but not the input file."""

    model: str
    out: Path
    fmt: str
    spec: Spec
    weights: Weights
    device: torch.device
    tracks: tuple[TrackFile, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of `spec`, with `--pool` and `--layers`, as strings by option of `esmshard embed`."""
        return self.spec.settings | {"--pool and --layers": ", ".join(output.title for output in self.spec.outputs)}


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
    long: Long = Long(),  # a frozen dataclass
    tracks: Mapping[str, str] | None = None,
    join: str | None = None,
) -> EmbedRequest:
    """Check the options of an embedding job, open the weights of the model, and return the request.

    The arguments are the options of `esmshard embed` (docs/embed.md). For `pools` and `layers` see `choose`, for
    `device` see `chosen_device`. `tracks` has a path for each track name, or `inside` for the coordinates of the input
    structures. Raise `UsageError` if an output cannot be computed or written, `InputError` if the model cannot be read.
    """
    fmt = fmt or out.suffix.removeprefix(".") or PARTS
    if fmt not in (*FORMATS, PARTS):
        known = ", ".join([*FORMATS, f"{PARTS} (a directory)"])
        raise UsageError(
            f"{out}: no format '{fmt}'; the formats are {known}; use one as the ending of OUT, or pass it as --format"
        )
    if fmt != PARTS and remote.address(out) is not None:
        raise UsageError(
            f"{remote.address(out)}: embed can only write a directory of parts into a bucket; leave the ending out, "
            "and run `esmshard embeddings merge` afterwards to make one file"
        )
    source = weights.joining(weights.read(model), join_option(join), f"--join: {model}")
    config = source.config
    outputs = choose(pools or ["mean" if fmt == PARTS else FORMATS[fmt].default_pool], layers, config, model, heads)
    for pool, part in (("logits", "lm_head"), ("contacts", "contact_head")):
        if any(output.pool == pool for output in outputs) and part in source.unlearned:
            raise UsageError(f"--pool {pool}: {model} has no trained {part} for this output; take another model")
    if fmt != PARTS:
        suits(fmt, outputs, dtype, out)
    computing = chosen_device(device)
    compute: Dtype = precision_on(computing, precision, "--precision")  # type: ignore[assignment]
    longest, long = config.most_tokens, long.for_model(config)
    if longest is not None and long.mode != "full" and long.window > longest - 2:
        raise UsageError(
            f"--window {long.window}: {model} has positions for {longest - 2} residues; pass at most {longest - 2}"
        )
    spec = Spec(model_hash(source), outputs, config.dim, dtype, compute, long, config.chains)
    files = track_files(tracks or {}, family_of(config).tracks_of(config), model, "--track ")
    return EmbedRequest(model, out, fmt, spec, source, computing, tuple(files))
