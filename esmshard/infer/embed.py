"""Embeddings of every record of a FASTA file, in input order, in one process."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.batch import pack
from esmshard.data.ingest import ingest
from esmshard.data.loader import Examples
from esmshard.data.store import TokenStore, is_store
from esmshard.errors import UsageError
from esmshard.infer.writers import DEFAULT_POOL, WRITERS, Pool, check, ids_file
from esmshard.model import weights
from esmshard.model.esm2 import ESM2
from esmshard.model.threads import packs_at_once, side_by_side
from esmshard.progress import Progress, rate, say

WINDOW = 512
"""Records that are sorted by length together; their embeddings wait in memory until the window is done."""


def embed(
    model: str,
    fasta: Path,
    out: Path,
    *,
    fmt: str | None = None,
    pool: Pool | None = None,
    layer: int | None = None,
    tokens: int = 4096,
    overwrite: bool = False,
) -> int:
    """Write embeddings; the number of records.

    Args:
        model: see `esmshard.model.weights.read`.
        fasta: plain or compressed, `-` for the standard input, or a token store.
        out: the file to write.
        fmt: a key of WRITERS; by default the ending of `out`.
        pool: `mean` over residues ([D] a record) or `residue` ([L, D]); by default `mean` for npy, `residue` for h5.
            `<cls>` and `<eos>` never enter.
        layer: 0 (embedding) to the number of layers; the last, normed one by default.
        tokens: computed at once, in one pack on a GPU and in one a core on the CPU; a longer record goes alone.
        overwrite: replace `out`.
    """
    fmt = fmt or out.suffix.removeprefix(".")
    if fmt not in WRITERS:
        raise UsageError(f"{out}: no format '{fmt}'; there are {', '.join(WRITERS)} (by ending, or --format)")
    pool = pool or DEFAULT_POOL[fmt]
    if fmt == "npy" and pool == "residue":
        raise UsageError(f"{out}: records differ in length, so one .npy matrix cannot hold every residue; write .h5")
    check(*([out, ids_file(out)] if fmt == "npy" else [out]), overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="esmshard-embed-") as scratch:
        # The whole input is read before the model: a bad record at the end costs seconds, not a night.
        store = TokenStore(fasta) if is_store(fasta) else ingest([fasta], Path(scratch) / "store")
        for notice in store.notices:
            say(f"{fasta}: {notice}")
        examples = Examples("input", fasta, store, None)
        esm = weights.build(weights.read(model), weights.default_device()).eval()
        layer = esm.config.n_layers if layer is None else layer
        if not 0 <= layer <= esm.config.n_layers:
            raise UsageError(f"--layer {layer}: {model} has layers 0 to {esm.config.n_layers}")
        attributes = {"model": model, "layer": layer, "pool": pool, "dtype": "float32"}
        began, residues = time.monotonic(), 0
        with (
            WRITERS[fmt](out, len(store), esm.config.dim, attributes) as writer,
            Progress("embed", len(store)) as progress,
        ):
            for n, values in enumerate(_embeddings(esm, examples, layer, pool, tokens)):
                writer.add(store.id(n), values)
                residues += int(store.lengths[n])
                progress.update(n + 1, f"{rate(residues / (time.monotonic() - began))} residues/s")
        return len(store)


def _embeddings(
    esm: ESM2, examples: Examples, layer: int, pool: Pool, tokens: int
) -> Iterator[npt.NDArray[np.float32]]:
    """One array a record, in order. Within a window records are batched by length, so that batches fill evenly."""
    device = next(esm.parameters()).device
    most = max(tokens // packs_at_once(device), 1024)  # smaller packs are slower

    def values(members: list[int]) -> list[npt.NDArray[np.float32]]:
        batch = pack([examples.get(n).tokens for n in members]).to(device)
        x_TD = esm(batch, layers=(layer,)).representations[layer]
        # .clone(): a view would keep the whole batch alive for the length of the window.
        return [
            (x_LD.mean(0) if pool == "mean" else x_LD.clone()).float().cpu().numpy() for x_LD in batch.residues(x_TD)
        ]

    for first in range(0, len(examples), WINDOW):
        window = range(first, min(first + WINDOW, len(examples)))
        groups = list(by_length([int(examples.tokens[n]) for n in window], most))
        packs = [[window[k] for k in group] for group in groups]
        done: dict[int, npt.NDArray[np.float32]] = {}
        for members, arrays in zip(packs, side_by_side(values, packs, device), strict=True):
            done |= zip(members, arrays, strict=True)
        for n in window:
            yield done.pop(n)


def by_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places in `lengths`, shortest first, in groups of at most `most` tokens; a longer one stands alone.

    >>> list(by_length([5, 2, 9, 3], 6))
    [[1, 3], [0], [2]]
    """
    group: list[int] = []
    total = 0
    for n in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        if group and total + lengths[n] > most:
            yield group
            group, total = [], 0
        group.append(n)
        total += lengths[n]
    yield group
