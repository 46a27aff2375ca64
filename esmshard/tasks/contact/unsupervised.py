"""Contacts from a model that was never shown any: a regression over its attention maps, fitted on 20 proteins.

The protocol of Rao et al. 2021 (doi:10.1101/2020.12.15.422761), with which contacts of all ESM models are reported: an
L1 logistic regression with C = 0.15 from the symmetrised and corrected maps of all heads of all layers to the contacts
of pairs at least six apart. The 20 proteins are drawn from the training split.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import pack
from esmshard.data.batching.loader import Example
from esmshard.errors import InputError
from esmshard.model.contacts import ContactAccumulators, corrected_maps
from esmshard.model.trunk import Trunk
from esmshard.tasks.contact.contact_precision import valid_pairs

PROTEINS = 20
C = 0.15
"""Inverse strength of the L1 penalty; chosen by the authors on 20 further proteins."""
PREFERRED = 256
"""Residues. A longer protein is used only if there are too few others, because pairs grow with the square."""
MOST_NUMBERS = 40_000_000
"""The most numbers of features. liblinear needs about 36 bytes for each (fp32, then two copies of 16 bytes): 1.4 GB."""


def fit(
    trunk: Trunk, examples: Sequence[Example], labels: Sequence[npt.NDArray[np.int8]], seed: int
) -> tuple[npt.NDArray[np.float32], float]:
    """Fit the weight of each map [C], layer-major, and the bias, in the order of `contact_head.regression`.

    Where all pairs of the 20 proteins are more than MOST_NUMBERS features, all contacts are taken and as many of the
    other pairs, at random, as there is room for; each of these then counts for several, so that the expected loss, and
    with it the meaning of C, stays the same.

    Args:
        trunk: on any device, in evaluation mode.
        examples: from which 20 are drawn.
        labels: of each example, int8 [L, L]: 1 contact, 0 none, -1 undefined.
        seed: of the choice of proteins and pairs.

    Raises:
        InputError: no example has a contact.
    """
    from sklearn.linear_model import LogisticRegression  # a second that only those pay who fit

    rng = np.random.default_rng(seed)
    chosen = choose(labels, rng)
    pairs = [valid_pairs(labels[n], "all") for n in chosen]
    contacts = [labels[n][ij] == 1 for n, ij in zip(chosen, pairs, strict=True)]
    keep, weights = thin(np.concatenate(contacts), trunk.config.n_layers * trunk.config.n_heads, rng)
    features, start = [], 0
    for n, (i, j) in zip(chosen, pairs, strict=True):
        kept = keep[start : start + len(i)]
        features.append(pair_features(trunk, examples[n], i[kept], j[kept]))
        start += len(i)
    # Both say L1; scikit-learn 1.8 renamed it.
    l1 = {"l1_ratio": 1.0} if LogisticRegression().penalty == "deprecated" else {"penalty": "l1"}
    regression = LogisticRegression(C=C, solver="liblinear", max_iter=1000, random_state=seed, **l1)
    regression.fit(np.concatenate(features), np.concatenate(contacts)[keep], weights[keep])
    return regression.coef_[0].astype(np.float32), float(regression.intercept_[0])


def choose(labels: Sequence[npt.NDArray[np.int8]], rng: np.random.Generator) -> list[int]:
    """Choose at most 20 examples with both contacts and other pairs, in random order. Those of at most PREFERRED
    residues come before longer ones. `InputError` if there is none.
    """
    order = sorted(rng.permutation(len(labels)), key=lambda n: len(labels[n]) > PREFERRED)
    chosen: list[int] = []
    for n in order:
        if len(chosen) < PROTEINS and len(np.unique(labels[n][valid_pairs(labels[n], "all")])) == 2:
            chosen.append(int(n))
    if not chosen:
        raise InputError(
            "no training record has contacts between residues at least six apart, and a regression needs some; give "
            "records with coordinates of whole domains"
        )
    return chosen


def thin(
    contacts_P: npt.NDArray[np.bool_], n_maps: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Choose the pairs to fit, bool [P], and the number of pairs that each of them stands for, fp64 [P]."""
    keep, weights = np.ones(len(contacts_P), dtype=bool), np.ones(len(contacts_P))
    room = max(MOST_NUMBERS // n_maps - int(contacts_P.sum()), int(contacts_P.sum()))
    others = np.flatnonzero(~contacts_P)
    if len(others) > room:
        keep[rng.permutation(others)[room:]] = False
        weights[others] = len(others) / room
    return keep, weights


@torch.no_grad()
def pair_features(
    trunk: Trunk, example: Example, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]
) -> npt.NDArray[np.float32]:
    """Return the features of some pairs of one protein, fp32 [P, C]. Maps of one layer are in memory at a time."""
    device = trunk.device
    rows, columns = torch.from_numpy(i).to(device), torch.from_numpy(j).to(device)
    found: list[npt.NDArray[np.float32]] = []

    def add(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        found.append(corrected_maps(q_THK, k_THK)[:, rows, columns].T.cpu().numpy())

    trunk(pack([example.tokens], tracks=[example.tracks]).to(device), layers=(), on_attention=add)
    return np.concatenate(found, axis=1)


@torch.no_grad()
def logits(trunk: Trunk, example: Example, weight_C: npt.NDArray[np.float32], bias: float) -> npt.NDArray[np.float32]:
    """Return the logits of the regression for one protein, fp32 [L, L]."""
    device = trunk.device
    sums = ContactAccumulators(1, torch.from_numpy(weight_C)[None].to(device), torch.tensor([bias], device=device))
    trunk(pack([example.tokens], tracks=[example.tracks]).to(device), layers=(), on_attention=sums.add)
    return sums.logits()[0][0].cpu().numpy()
