"""The request of an `embed` job, checked before the input is read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices
from esmshard.data.tracks.track_files import TrackFile, track_files, with_paths
from esmshard.devices import DeviceName, chosen_device
from esmshard.embed.compute.outputs import DTYPES, Dtype, Long, choose
from esmshard.embed.formats.format_registry import FORMATS, suits
from esmshard.embed.store.part_plan import Spec
from esmshard.embed.store.row_index import RowIndex
from esmshard.errors import UsageError
from esmshard.files import check_replaced
from esmshard.joined_chains import join_option
from esmshard.model import weights
from esmshard.model.families.family_registry import family_of
from esmshard.model.weights import Weights, model_hash
from esmshard.parallel.process_group import precision_on
from esmshard.tasks.finetuned import without_tracks

PARTS = "parts"
"""The format that is a directory, namely the embedding store itself."""
HASH_BYTES = 64
"""Bytes of the name of a sequence, in formats that store rows by their sequences."""


@dataclass(frozen=True)
class EmbedRequest:
    """What to compute and where to write it, checked as far as is possible without reading the input."""

    model: str
    out: Path
    fmt: str
    spec: Spec
    found: Weights
    device: torch.device
    named: DeviceName
    """The device that the user named; None if `device` is the one that is taken by default."""
    tracks: tuple[TrackFile, ...] = ()
    of_structures: tuple[str, ...] = ()
    """Sentences about structures whose chains are the input."""

    @property
    def notices(self) -> list[str]:
        """Return sentences about the model, about tracks that it does not get, and about structures."""
        of_tracks = without_tracks(self.model, [one.track.name for one in self.tracks])
        return [*self.found.notices, *of_tracks, *self.of_structures]

    def of_input(self, path: Path) -> "tuple[EmbedRequest, Path]":
        """Return the request with a path for each track, and the file of the sequences.

        Args:
            path: the input. Structures are read into a FASTA file of their chains.
        """
        fasta, tracks = path, with_paths(path, self.tracks)
        told: tuple[str, ...] = ()
        if holds_structures(path):
            fasta = cached_split(path)
            told = (f"{path}: the sequences of its chains were read", *(f"{path}: {text}" for text in notices(fasta)))
        return replace(self, tracks=tuple(tracks), of_structures=told), fasta

    @property
    def facts(self) -> dict[str, Any]:
        """Return further facts that are written to the plan."""
        return {"model": self.model, "architecture": self.found.config.recorded(), "notices": self.notices}

    @property
    def longest(self) -> int | None:
        """Return the residues for which the model has positions; None if there is no limit, or sequences are cut."""
        limit = self.found.config.most_tokens
        return None if limit is None or self.spec.long.mode != "full" else limit - 2


def request(
    model: str,
    out: Path,
    *,
    fmt: str | None = None,
    pools: Sequence[str] = (),
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    dtype: str = "fp32",
    precision: str = "auto",
    device: DeviceName = None,
    long: Long = Long(),  # noqa: B008  # frozen
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
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(DTYPES)} is expected")
    found = weights.joining(weights.read(model), join_option(join), f"--join: {model}")
    usual = "mean" if fmt == PARTS else FORMATS[fmt].default_pool
    outputs = choose(list(pools) or [usual], list(layers), found.config, model, heads)
    for pool, part in (("logits", "lm_head"), ("contacts", "contact_head")):
        if any(one.pool == pool for one in outputs) and part in found.unlearned:
            raise UsageError(f"--pool {pool}: {model} has no trained {part}, which they come from; take another model")
    if fmt != PARTS:
        suits(fmt, outputs, dtype, out)  # type: ignore[arg-type]
    computing = chosen_device(device)
    if precision not in ("auto", *DTYPES):
        raise UsageError(f"--precision {precision}: auto, {', '.join(DTYPES)} are expected")
    compute: Dtype = precision_on(computing, precision, "--precision")  # type: ignore[arg-type]
    longest, long = found.config.most_tokens, long.for_model(found.config)
    if longest is not None and long.mode != "full" and long.window > longest - 2:
        raise UsageError(f"--window {long.window}: {model} has positions for {longest - 2} residues")
    spec = Spec(model_hash(found), outputs, found.config.dim, dtype, compute, long, found.config.chains)  # type: ignore[arg-type]
    files = track_files(tracks or {}, family_of(found.config).tracks, model, "--track ")
    return EmbedRequest(model, out, fmt, spec, found, computing, device, tuple(files))


def check_output(asked: EmbedRequest, *, overwrite: bool) -> None:
    """Refuse to replace an existing output without `overwrite`."""
    out = asked.out
    if asked.fmt != PARTS:
        FORMATS[asked.fmt].check_place(out, overwrite=overwrite)
    elif out.exists():
        if not overwrite:
            raise UsageError(f"{out}: exists already; choose another name or pass --overwrite")
        check_replaced(out, ["manifest.json", "failed.tsv", "index/*", "parts/*"], marker="manifest.json")


def file_bytes(fmt: str, spec: Spec, index: RowIndex) -> int:
    """Return the bytes of numbers and ids in the file of a format that is made from an embedding store. Each format
    adds a little.

    If the format is not `exact`, these are the most bytes. `docs/embed.md` has a table of what the formats add.
    """
    step, names = 1 << 16, index.id_bytes
    blocks = (index.lengths[start : start + step].astype("int64") for start in range(0, len(index.lengths), step))
    if FORMATS[fmt].by_sequence:
        blocks = (index.lengths_of(part) for part in range(len(index.bounds) - 1))
        names += HASH_BYTES * len(index.first)
    stored = sum(spec.kind.numbers_bytes(spec.long.kept(block)) for block in blocks)
    return names + stored // spec.kind.itemsize * FORMATS[fmt].number_bytes(spec.dtype)


def rows_bytes(spec: Spec, index: RowIndex, parts: Iterable[int]) -> int:
    """Return the bytes of some parts of an embedding store."""
    return sum(spec.kind.part_bytes(spec.long.kept(index.lengths_of(part))) for part in parts)
