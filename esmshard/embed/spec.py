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
"""The kinds of output that come from the whole model and belong to no layer."""

PARTS = "parts"
"""The name of the output format that is a directory of parts."""


def choose(
    pools: Sequence[str], layers: Sequence[int] | None, config: ModelConfig, model: str, heads: Sequence[int] = ()
) -> tuple[Output, ...]:
    """Return the outputs to compute: every kind of output (pool) for every layer, in the given order.

    Args:
        pools: the kinds of output, such as `mean`; see the class `Output`.
        layers: 0 (embedding) to the number of layers. The default is the last, normed layer, which is also called -1.
        config: the architecture of the model.
        model: the name of the model, for messages.
        heads: the attention heads of the output `attentions`, counted from 0; all heads by default.

    Raises:
        UsageError: if a pool, layer or head does not exist, or layers or heads are given to pools that have none.

    >>> from esmshard.model.families.family_registry import SIZES
    >>> [output.name for output in choose(["mean", "contacts"], [5, 6], SIZES["esm2_t6_8M_UR50D"], "x")]
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
    outputs: dict[Output, None] = {}
    for pool in pools:
        if pool not in POOLS:
            raise UsageError(f"--pool {pool}: one of {', '.join(POOLS)} is expected")
        if pool == "attentions" and 0 in wanted:
            raise UsageError(
                f"--layers 0: attentions are of layers 1 to {n_layers}, and layer 0 is the embedding; leave 0 out"
            )
        of_pool: list[int | None] = [None] if pool in LAYERLESS else [*wanted]
        of_heads = tuple(dict.fromkeys(heads or range(config.n_heads))) if pool == "attentions" else ()
        outputs |= dict.fromkeys(Output(pool, layer, of_heads) for layer in of_pool)
    if layers and all(output.layer is None for output in outputs):
        raise UsageError(f"--layers: {' and '.join(pools)} come from the whole model; leave --layers out")
    return tuple(outputs)


@dataclass(frozen=True)
class Long:
    """The treatment of sequences of more than `window` residues.

    `full`: the model gets the whole sequence. Rotary positions allow this, but models were trained on sequences of some
    1,000 to 2,000 residues. `window`: the model gets overlapping windows of the protein, whose values are blended.
    `truncate`: the model gets the first `window` residues, and further residues have no values.
    """

    mode: Literal["full", "window", "truncate"] = "full"
    window: int = 0
    """The number of residues of a window; 0 means the maximum length of the inputs in the training of the model."""
    overlap: int = 256
    """The number of residues that neighbouring windows share."""

    def for_model(self, config: ModelConfig) -> "Long":
        """Return this treatment with the model's window if `window` is 0. Raise `UsageError` for impossible values."""
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
        """Return how many residues have values in the output, for each sequence length in `length`."""
        return np.minimum(length, self.window) if self.mode == "truncate" else length

    def starts(self, length: int) -> list[int]:
        """Return the first residue of each window of a sequence, counted from 0. Windows are spread evenly over the
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
    """Everything that determines the values of embeddings, except the sequences and their tracks."""

    model_hash: str
    """One sha256 of the weight files and the architecture of the model."""
    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype
    """The dtype of the numbers in the output."""
    compute: Dtype
    """The dtype of the arithmetic."""
    long: Long
    chains: Chains
    """How the chains of a record are joined if the record has several chains."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Spec":
        """Make a spec from the dictionary that `dataclasses.asdict` made of a spec, perhaps read from JSON."""
        return TypeAdapter(cls).validate_python(fields)

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that determine the values of a sequence, as texts by option of the command."""
        long = self.long.mode if self.long.mode == "full" else f"{self.long.mode} --window {self.long.window}"
        long += f" --overlap {self.long.overlap}" if self.long.mode == "window" else ""
        texts = {"model": self.model_hash[:16], "--dtype": self.dtype, "--precision": self.compute, "--long": long}
        return texts | {"--join": self.chains.text}

    def row_key(self, tokens: npt.NDArray[np.uint8], tracks: Mapping[str, bytes]) -> bytes:
        """Return the key of a row (all values of one sequence), 16 bytes: a digest of settings, tokens and tracks.

        Rows with equal keys are equal except for rounding, so that a row may be copied from an earlier output. The
        kinds of output are no part of the key, since an earlier output may hold more kinds than a request needs.

        Args:
            tokens: the residues of the record, with the linkers between its chains, uint8 [L].
            tracks: the values of each track of the record, as bytes, by the name of the track.
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
        """Return how many numbers each row has in all outputs, int64 [U]. `kept_U`: the residue count of each row."""
        return sum((output.numbers(kept_U, self.dim) for output in self.outputs), np.zeros_like(kept_U))


def difference(known: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return a phrase on the first setting in which two embedding jobs differ; None if all settings are equal."""
    for name in {**wanted, **known}:
        before, now = known.get(name, "without"), wanted.get(name, "without")
        if before != now:
            return f"another {name} ({before}, and now {now})"
    return None


@dataclass(frozen=True)
class EmbedRequest:
    """The embeddings to compute, and the place to write them. All settings are checked, but not the input file."""

    model: str
    out: Path
    fmt: str
    spec: Spec
    weights: Weights
    device: torch.device
    tracks: tuple[TrackFile, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of `spec` and the titles of its outputs, as texts by option of the command."""
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

    The arguments are the options of `esmshard embed` (docs/embed.md). For `pools` and `layers` see `choose`; for
    `device` see `chosen_device` (with `cuda` each process has its own GPU). `tracks`: path or `inside` for each track.

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
    source = weights.joining(weights.read(model), join_option(join), f"--join: {model}")
    config = source.config
    outputs = choose(pools or ["mean" if fmt == PARTS else FORMATS[fmt].default_pool], layers, config, model, heads)
    for pool, part in (("logits", "lm_head"), ("contacts", "contact_head")):
        if any(output.pool == pool for output in outputs) and part in source.unlearned:
            raise UsageError(f"--pool {pool}: {model} has no trained {part}, which computes them; take another model")
    if fmt != PARTS:
        suits(fmt, outputs, dtype, out)
    computing = chosen_device(device)
    compute: Dtype = precision_on(computing, precision, "--precision")  # type: ignore[assignment]
    longest, long = config.most_tokens, long.for_model(config)
    if longest is not None and long.mode != "full" and long.window > longest - 2:
        raise UsageError(f"--window {long.window}: {model} has positions for {longest - 2} residues")
    spec = Spec(model_hash(source), outputs, config.dim, dtype, compute, long, config.chains)
    files = track_files(tracks or {}, family_of(config).tracks, model, "--track ")
    return EmbedRequest(model, out, fmt, spec, source, computing, tuple(files))
