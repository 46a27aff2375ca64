"""Computes the probabilities of amino acids that a language model predicts at masked or visible residues."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import pack, piece
from esmshard.devices import packs_at_once, side_by_side
from esmshard.model.families.family import Corruption
from esmshard.model.families.family_registry import window_of
from esmshard.model.trunk import Trunk
from esmshard.progress import Progress
from esmshard.vocab import MASK, RESIDUES, STANDARD, VOCAB_SIZE, encode

TOKENS = 4096
"""The maximum number of tokens in a batch of whole sequences. Larger batches are not faster on a CPU."""

_LETTERS = torch.from_numpy(encode(RESIDUES)[1:-1].astype(np.int64))
_COLUMN = np.zeros(VOCAB_SIZE, np.int64)
_COLUMN[_LETTERS.numpy()] = np.arange(len(RESIDUES))

Tracks = Mapping[str, npt.NDArray[Any]]  # a protein's further model inputs by name, [L + 2, ...]
Protein = tuple[npt.NDArray[np.uint8], Tracks]  # tokens, uint8 [L + 2], and tracks


class View(NamedTuple):
    """A window of a protein that a model reads in one forward pass, and the residues to predict in this window."""

    protein: int  # the index of the protein among all scored proteins
    tokens: npt.NDArray[np.uint8]
    tracks: Tracks
    places: npt.NDArray[np.int64]  # indices in `tokens` that the model predicts, [P]
    residues: npt.NDArray[np.uint8]  # the true tokens at these indices, [P]


def log_probabilities(
    model: Trunk,
    tokens: npt.NDArray[np.uint8],
    sites: Sequence[int],
    *,
    hidden: bool = True,
    window: int | None = None,
    tracks: Tracks | None = None,
) -> npt.NDArray[np.float32]:
    """Compute the log probability of each letter of `vocab.RESIDUES` at each site, float32 [S, A].

    Args:
        model: a model with an LM head.
        tokens: the tokens of a sequence, `<cls> ... <eos>`.
        sites: positions between `<cls>` and `<eos>`, from 0.
        hidden: whether `<mask>` replaces each site, which needs one forward pass per site. Otherwise nothing is masked,
            and a sequence that fits into the window needs one pass.
        window: the number of residues that the model reads at once; by default as many as in its training.
        tracks: the values of each track of the sequence, by the name of the track.
    """
    if window is None:
        window = window_of(model.config)
    protein = tokens, tracks or {}
    if sites and not hidden and len(tokens) - 2 <= window:
        views = [_part(0, protein, 0, window, np.array(sites))]
    else:
        views = [_around(0, protein, site, window, hidden) for site in sites]
    log_p_SA, done = np.empty((len(sites), len(RESIDUES)), np.float32), 0
    with Progress("score", len(sites)) as progress:
        for _, log_p_PA in _predicted(model, views):
            log_p_SA[done : done + len(log_p_PA)] = log_p_PA
            done += len(log_p_PA)
            progress.update(done, "sites")
    return log_p_SA


def pseudo_log_likelihoods(
    model: Trunk,
    proteins: Iterable[Protein],
    scored_N: npt.NDArray[np.int64],
    *,
    window: int,
    visible: Corruption | None = None,
) -> npt.NDArray[np.float64]:
    """Return the sum of log p over those residues of each protein that are one of the 20 amino acids, float64 [N].

    By default p is the probability of the residue when only this residue is masked, so each residue needs a forward
    pass. With `visible`, nothing is masked, and `as_masked` estimates p. Overlapping windows then cover a long protein,
    and each residue is predicted in the window whose middle is nearest.

    Args:
        model: a model with an LM head.
        proteins: N proteins.
        scored_N: how many residues of each protein are scored; see `scored_residues`.
        window: the number of residues that the model reads at once.
        visible: the shares of random and unchanged residues in the model's pre-training, from which `as_masked`
            estimates p while nothing is masked; None masks each residue in turn.
    """
    sum_N, done = np.zeros(len(scored_N)), 0
    with Progress("score", int(scored_N.sum())) as progress:
        views = (
            view
            for n, protein in enumerate(proteins)
            for view in (_hidden(n, protein, window) if visible is None else _visible(n, protein, window))
        )
        for view, log_p_PA in _predicted(model, views):
            log_p_P = log_p_PA[np.arange(len(view.places)), _COLUMN[view.residues]].astype(np.float64)
            if visible is not None:
                log_p_P = as_masked(torch.from_numpy(log_p_P), visible).numpy()
            sum_N[view.protein] += log_p_P.sum()
            done += len(log_p_P)
            progress.update(done, "residues")
    return sum_N


def scored_residues(tokens: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the indices of the tokens that are one of the 20 amino acids, int64 [S].

    >>> scored_residues(encode("MXK")).tolist()
    [1, 3]
    """
    return np.flatnonzero(np.isin(tokens, _LETTERS[: len(STANDARD)].numpy()))


def as_masked(log_p_P: torch.Tensor, training: Corruption) -> torch.Tensor:
    """Estimate log p of masked residues from log p of the same residues when they are visible, [P].

    In training, some residues to predict stayed visible: a share u (`unchanged`) as the true residue x, and a share
    `random` as a random one of `letters` letters. Let r be `random` / `letters`. Let m be the model's probability of x
    at a mask, and p where x is visible. Bayes' rule gives p = m (u + r) / (m u + r). Hence m = p r / (u + r - u p).

    This formula was derived for esmshard. It was not compared with the one-pass estimate of Gordon et al. 2024
    (doi:10.1101/2024.10.03.616542).

    >>> training = Corruption(random=0.1, unchanged=0.1, letters=20)
    >>> print(as_masked(torch.tensor([1.0, 0.525, 0.1]).log(), training).exp())
    tensor([1.0000, 0.0500, 0.0053])
    """
    return log_p_P - torch.log1p(-torch.expm1(log_p_P) * (training.unchanged * training.letters / training.random))


def _part(n: int, protein: Protein, start: int, window: int, sites: npt.NDArray[np.int64]) -> View:
    """Return the window of protein `n` that starts at residue `start`. No residue in the window is masked."""
    tokens, tracks = protein
    window_tokens = piece(tokens, start, window)
    tracks = {name: piece(values, start, window) for name, values in tracks.items()}
    return View(n, window_tokens, tracks, sites - start + 1, tokens[sites + 1])


def _around(n: int, protein: Protein, site: int, window: int, hidden: bool) -> View:
    """Return the window of protein `n` around a site. `hidden` masks the residue at the site, but not its tracks."""
    start = min(max(site - window // 2, 0), max(len(protein[0]) - 2 - window, 0))
    view = _part(n, protein, start, window, np.array([site]))
    if hidden:
        view.tokens[view.places] = MASK
    return view


def _hidden(n: int, protein: Protein, window: int) -> Iterator[View]:
    for place in scored_residues(protein[0]).tolist():
        yield _around(n, protein, place - 1, window, hidden=True)


def _visible(n: int, protein: Protein, window: int) -> Iterator[View]:
    """Yield as few windows as possible that cover protein `n` and overlap by half or more."""
    sites = scored_residues(protein[0]) - 1
    room = max(len(protein[0]) - 2 - window, 0)
    steps = -(-room // max(window // 2, 1))
    starts = np.arange(steps + 1) * room // max(steps, 1)
    nearest = np.searchsorted((starts[1:] + starts[:-1] + window) / 2, sites)
    for k, start in enumerate(starts.tolist()):
        if len(chosen := sites[nearest == k]):
            yield _part(n, protein, start, window, chosen)


def _predicted(model: Trunk, views: Iterable[View]) -> Iterator[tuple[View, npt.NDArray[np.float32]]]:
    """Yield each window with its log probabilities, float32 [P, A]. Windows are read as needed, to save memory."""
    device, threads = model.device, model.shared_on is None

    @torch.no_grad()
    def compute(views: Sequence[View]) -> npt.NDArray[np.float32]:
        _, tokens, tracks, places, _ = zip(*views, strict=True)
        batch = pack(tokens, logits_at=places, tracks=tracks).to(device)
        logits_PV = model(batch, logits_at=batch.logits_at_P).logits_PV
        assert logits_PV is not None
        log_p_PV = logits_PV.float().log_softmax(-1)
        log_p_PA: npt.NDArray[np.float32] = log_p_PV[:, _LETTERS.to(device)].cpu().numpy()
        return log_p_PA

    packs = _packs(views)
    while group := list(islice(packs, 8 * packs_at_once(device))):
        for members, log_p_PA in zip(group, side_by_side(compute, group, device, threads=threads), strict=True):
            ends = np.cumsum([len(view.places) for view in members])[:-1]
            yield from zip(members, np.split(log_p_PA, ends), strict=True)


def _packs(views: Iterable[View]) -> Iterator[list[View]]:
    members, tokens = list[View](), 0
    for view in views:
        if members and tokens + len(view.tokens) > TOKENS:
            yield members
            members, tokens = [], 0
        members.append(view)
        tokens += len(view.tokens)
    if members:
        yield members
