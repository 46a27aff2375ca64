"""The request of an `embed` job, checked before the input is read, and the disk space that it takes."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices
from esmshard.data.tracks import TrackFile, track_files, with_paths
from esmshard.devices import DeviceName, chosen_device
from esmshard.embed import plan as plans
from esmshard.embed.spec import Long, Spec, choose
from esmshard.embed.store import Parts
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import DTYPES, FORMATS, NUMPY, Dtype, suits
from esmshard.io.paths import size_text
from esmshard.model import weights
from esmshard.model.families.family_registry import family_of
from esmshard.model.weights import Weights, model_hash
from esmshard.parallel.process_group import precision_on
from esmshard.tasks.finetuned import without_tracks
from esmshard.vocab import join_option

PARTS = "parts"
"""The format that is a directory, namely the embedding store itself."""


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
        fasta, sentences = path, tuple[str, ...]()
        if holds_structures(path):
            fasta = cached_split(path)
            of_chains = (f"{path}: {text}" for text in notices(fasta))
            sentences = (f"{path}: the sequences of its chains were read", *of_chains)
        return replace(self, tracks=tuple(with_paths(path, self.tracks)), of_structures=sentences), fasta

    def begin(self, directory: Path, fasta: Path, workers: int, **how: Any) -> dict[str, Any]:
        """Write the plan of the store at `directory`, or read the existing one; see `plan.begin`."""
        limit, architecture = self.found.config.most_tokens, self.found.config.recorded()
        facts = {"model": self.model, "notices": self.notices, "architecture": architecture}
        how["longest"] = None if limit is None or self.spec.long.mode != "full" else limit - 2
        how |= {"device": self.device.type, "workers": workers, "tracks": self.tracks}
        return plans.begin(directory, fasta, self.spec, facts, **how)


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


def check_fits(place: Path, need: int) -> None:
    """Raise `InputError` if so many bytes are not free on the disk of a directory."""
    free = shutil.disk_usage(place).free
    if need > free:
        raise InputError(
            f"{place}: {size_text(need)} will be written and {size_text(free)} are free; make room, choose another "
            "place, or store less (--format parts, --dtype fp16, --pool mean), and run the command again"
        )


def numbers_bytes(asked: EmbedRequest, parts: Parts, some: Sequence[int]) -> int:
    """Return the bytes of the numbers of some parts."""
    spec = asked.spec
    numbers = sum(int(spec.numbers(spec.long.kept(parts.index.lengths_of(part))).sum()) for part in some)
    return numbers * np.dtype(NUMPY[spec.dtype]).itemsize


def file_bytes(asked: EmbedRequest, parts: Parts) -> int:
    """Return about the bytes of the file that is made from the parts; 0 if none is made. Checks the format's limits."""
    if asked.fmt == PARTS:
        return 0
    spec, index, writer = asked.spec, parts.index, FORMATS[asked.fmt]
    ids = int(index.ids[-1])
    suits(asked.fmt, spec.outputs, spec.dtype, asked.out, records=len(index.lengths), id_bytes=ids)
    numbers, step = 0, 1 << 16
    length = index.lengths if not writer.by_sequence else index.lengths[index.first]
    for start in range(0, len(length), step):
        numbers += int(spec.numbers(spec.long.kept(length[start : start + step].astype(np.int64))).sum())
    return numbers * writer.number_bytes(spec.dtype) + ids
