"""Zero-shot effects of amino-acid substitutions: what a language model expects at a site, beside the wild type's residue.

Meier et al. 2021 (doi:10.1101/2021.07.09.450648). No labels and no training are needed; the model is any with an LM head.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import pack
from esmshard.data.substitutions import Mutation
from esmshard.errors import UsageError
from esmshard.infer.embed import packs_at_once, side_by_side
from esmshard.model.esm2 import ESM2
from esmshard.progress import Progress
from esmshard.vocab import MASK, RESIDUES, STANDARD, encode

Method = Literal["masked-marginals", "wild-type-marginals", "pseudo-perplexity"]
METHODS = get_args(Method)

WINDOW = 1022
"""Residues that ESM-2 saw at once in training."""
TOKENS = 4096
"""Of a pack: more do not go faster on a CPU, and take memory."""

_LETTERS = torch.from_numpy(encode(RESIDUES)[1:-1].astype(np.int64))

View = tuple[npt.NDArray[np.uint8], int]
"""Tokens as a model gets them, and the place in them at which it is asked."""


def all_singles(wild_type: str) -> list[tuple[Mutation, ...]]:
    """Every substitution of every residue by another of the 20: 19 L variants, by position and letter."""
    return [
        (Mutation(position, wild, mutant),)
        for position, wild in enumerate(wild_type)
        for mutant in STANDARD
        if mutant != wild
    ]


def score(
    model: ESM2,
    wild_type: str,
    variants: Sequence[tuple[Mutation, ...]],
    method: Method = "masked-marginals",
    window: int = WINDOW,
) -> npt.NDArray[np.float64]:
    """A number for each variant, float64 [N]; higher means that the model finds it more natural.

    `masked-marginals`: the sum over the mutated sites of log p(mutant) - log p(wild type), where p is what the model
    expects at the site when it is hidden and all else is the wild type's: one forward pass a site, however many the
    variants. `wild-type-marginals`: the same from one pass in which nothing is hidden. `pseudo-perplexity`: the mean of
    log p over all residues of the variant, each hidden in turn; minus the logarithm of the pseudo-perplexity, and a
    pass for each residue of each variant. (fair-esm's script for it reads the wrong site and skips the last.) The wild
    type is 0 in the first two.

    Args:
        model: with an LM head that has learned.
        wild_type: residues.
        variants: mutations of each; empty for the wild type.
        method: see above.
        window: of a longer protein the model sees so many residues, with the site in their middle as far as there are
            residues on both sides; in a pass that hides nothing, a site is asked for where it is nearest to the middle.

    Raises:
        UsageError: a method that there is not, or a window of less than one residue.
    """
    if method not in METHODS:
        raise UsageError(f"method is {method!r}; it is one of {', '.join(METHODS)}")
    if window < 1:
        raise UsageError(f"a window of {window} residues: give at least 1")
    if method == "pseudo-perplexity":
        return _pseudo_perplexity(model, wild_type, variants, window)
    sites = sorted({mutation.position for mutations in variants for mutation in mutations})
    hidden = method == "masked-marginals"
    log_p_SA = log_probabilities(model, wild_type, sites, hidden=hidden, window=window)
    row, letter = {site: n for n, site in enumerate(sites)}, {aa: n for n, aa in enumerate(RESIDUES)}

    def effect(mutation: Mutation) -> float:
        of_site = log_p_SA[row[mutation.position]]
        return float(of_site[letter[mutation.mutant]]) - float(of_site[letter[mutation.wild]])

    return np.array([sum(map(effect, mutations)) for mutations in variants], dtype=np.float64)


def log_probabilities(
    model: ESM2, sequence: str, sites: Sequence[int], *, hidden: bool = True, window: int = WINDOW
) -> npt.NDArray[np.float32]:
    """Logarithms of the probabilities of the residues, in the order of `vocab.RESIDUES`, float32 [S, A].

    Args:
        model: with an LM head.
        sequence: residues.
        sites: places in `sequence`, from 0.
        hidden: the model sees `<mask>` at the site it is asked for, in a pass of its own; else the residue, all sites
            of a window in one pass.
        window: see `score`.
    """
    tokens = encode(sequence)
    views = [_view(tokens, site, window, hidden) for site in sites]
    if hidden or len(sequence) > window:
        return _asked(model, views, "sites")
    if not views:
        return np.empty((0, len(RESIDUES)), np.float32)
    return _log_p(model, [tokens], [np.array([place for _, place in views])])


def _view(tokens: npt.NDArray[np.uint8], site: int, window: int, hidden: bool) -> View:
    """What the model sees of a protein when it is asked for a site."""
    residues = tokens[1:-1]
    start = min(max(site - window // 2, 0), max(len(residues) - window, 0))
    seen = np.concatenate([tokens[:1], residues[start : start + window], tokens[-1:]])
    place = site - start + 1
    if hidden:
        seen[place] = MASK
    return seen, place


def _pseudo_perplexity(
    model: ESM2, wild_type: str, variants: Sequence[tuple[Mutation, ...]], window: int
) -> npt.NDArray[np.float64]:
    letter = {aa: n for n, aa in enumerate(RESIDUES)}
    found = []
    for mutations in variants:
        residues = list(wild_type)
        for mutation in mutations:
            residues[mutation.position] = mutation.mutant
        sites = [n for n, residue in enumerate(residues) if residue in letter]
        log_p_SA = log_probabilities(model, "".join(residues), sites, window=window)
        own = [letter[residues[site]] for site in sites]
        found.append(log_p_SA[np.arange(len(sites)), own].mean(dtype=np.float64))
    return np.array(found, dtype=np.float64)


def _asked(model: ESM2, views: Sequence[View], what: str) -> npt.NDArray[np.float32]:
    """One row a view, in packs of about TOKENS; side by side on a CPU."""
    groups = list(_groups(views))
    device = next(model.parameters()).device
    found: list[npt.NDArray[np.float32]] = []
    at_once = max(1, 8 * packs_at_once(device))

    def one(group: Sequence[View]) -> npt.NDArray[np.float32]:
        return _log_p(model, [tokens for tokens, _ in group], [np.array([place]) for _, place in group])

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
    model: ESM2, tokens: Sequence[npt.NDArray[np.uint8]], places: Sequence[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float32]:
    device = next(model.parameters()).device
    batch = pack(tokens, logits_at=[np.asarray(place, np.int64) for place in places]).to(device)
    logits_PV = model(batch, logits_at=batch.logits_at_P).logits_PV
    assert logits_PV is not None
    log_p_PV = logits_PV.float().log_softmax(-1)
    return log_p_PV[:, _LETTERS.to(device)].cpu().numpy()
