"""The probabilities of a language model at the residues of a protein, which are masked one at a time or visible."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import pack, piece
from esmshard.model.families.family_registry import window_of
from esmshard.model.threads import packs_at_once, side_by_side
from esmshard.model.trunk import Trunk
from esmshard.progress import Progress
from esmshard.vocab import MASK, RESIDUES, encode

TOKENS = 4096
"""The tokens of a pack. Larger packs are no faster on a CPU, and need more memory."""

_LETTERS = torch.from_numpy(encode(RESIDUES)[1:-1].astype(np.int64))

Tracks = Mapping[str, npt.NDArray[Any]]
"""What a model reads of each token besides, [L + 2, ...] by the name of the track."""
View = tuple[npt.NDArray[np.uint8], Tracks, int]
"""Tokens and tracks as a model gets them, and the place in them whose residue is predicted."""


def log_probabilities(
    model: Trunk,
    sequence: str,
    sites: Sequence[int],
    *,
    hidden: bool = True,
    window: int | None = None,
    tracks: Tracks | None = None,
) -> npt.NDArray[np.float32]:
    """Compute the logarithms of the probabilities of the residues, in the order of `vocab.RESIDUES`, float32 [S, A].

    Args:
        model: with an LM head.
        sequence: residues.
        sites: places in `sequence`, from 0.
        hidden: the model sees `<mask>` at the site that is predicted, in a pass of its own; else the residue, all sites
            of a window in one pass.
        window: residues of a longer sequence that the model sees at once; by default as many as in training.
        tracks: of the sequence.
    """
    tracks = tracks or {}
    if window is None:
        window = window_of(model.config)
    tokens = encode(sequence)
    views = [_view(tokens, tracks, site, window, hidden) for site in sites]
    if hidden or len(sequence) > window:
        return _rows_of(model, views, "sites")
    if not views:
        return np.empty((0, len(RESIDUES)), np.float32)
    return _log_p(model, [tokens], [tracks], [np.array([place for _, _, place in views])])


def _view(tokens: npt.NDArray[np.uint8], tracks: Tracks, site: int, window: int, hidden: bool) -> View:
    """Return what the model sees of a protein when a site is predicted. Its tracks are not hidden."""
    start = min(max(site - window // 2, 0), max(len(tokens) - 2 - window, 0))
    seen, place = piece(tokens, start, window), site - start + 1
    if hidden:
        seen[place] = MASK
    return seen, {name: piece(values, start, window) for name, values in tracks.items()}, place


def _rows_of(model: Trunk, views: Sequence[View], what: str) -> npt.NDArray[np.float32]:
    """Compute one row a view, in packs of about TOKENS, side by side on a CPU."""
    groups = list(_groups(views))
    device = next(model.parameters()).device
    found: list[npt.NDArray[np.float32]] = []
    at_once = max(1, 8 * packs_at_once(device))

    def one(group: Sequence[View]) -> npt.NDArray[np.float32]:
        tokens, tracks, places = zip(*group, strict=True)
        return _log_p(model, tokens, tracks, [np.array([place]) for place in places])

    with Progress("score", len(views)) as progress:
        for first in range(0, len(groups), at_once):
            found += side_by_side(one, groups[first : first + at_once], device)
            progress.update(sum(map(len, found)), what)
    return np.concatenate(found) if found else np.empty((0, len(RESIDUES)), np.float32)


def _groups(views: Sequence[View]) -> Iterator[Sequence[View]]:
    each = max(1, TOKENS // len(views[0][0])) if views else 1
    for first in range(0, len(views), each):
        yield views[first : first + each]


@torch.no_grad()
def _log_p(
    model: Trunk,
    tokens: Sequence[npt.NDArray[np.uint8]],
    tracks: Sequence[Tracks],
    places: Sequence[npt.NDArray[np.int64]],
) -> npt.NDArray[np.float32]:
    device = next(model.parameters()).device
    batch = pack(tokens, logits_at=[np.asarray(place, np.int64) for place in places], tracks=tracks).to(device)
    logits_PV = model(batch, logits_at=batch.logits_at_P).logits_PV
    assert logits_PV is not None
    log_p_PV = logits_PV.float().log_softmax(-1)
    log_p_PA: npt.NDArray[np.float32] = log_p_PV[:, _LETTERS.to(device)].cpu().numpy()
    return log_p_PA
