"""Synthetic proteins whose contacts can be told from the sequence, and from nothing else.

Each protein has 64 residues. Eight disjoint pairs, six or more residues apart and at places drawn anew for each
protein, share a key residue: one of eight amino acids that stand nowhere else. All other residues are drawn from the
other twelve. A model that finds the two equal key residues has found the contacts; separation, length and composition
say nothing.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.coordinates import MIN_SEPARATION

LENGTH, PAIRS = 64, 8
KEYS, OTHERS = "ACDEFGHI", "KLMNPQRSTVWY"

Pairs = list[tuple[int, int]]


def protein(draw: random.Random) -> tuple[str, Pairs]:
    """Sequence and pairs i < j."""
    while True:
        places = draw.sample(range(LENGTH), 2 * PAIRS)
        pairs = [(min(p), max(p)) for p in zip(places[::2], places[1::2], strict=True)]
        if all(j - i >= MIN_SEPARATION for i, j in pairs):
            break
    residues = draw.choices(OTHERS, k=LENGTH)
    for key, pair in zip(KEYS, pairs, strict=True):
        for place in pair:
            residues[place] = key
    return "".join(residues), pairs


def write(path: Path, name: str, count: int, seed: int, *, shuffled: bool = False) -> list[Pairs]:
    """`name.fasta` and `name.npz`; the true pairs. Shuffled, each protein gets the pairs of another one.

    Residues lie 100 A apart on a line, but for the second of each pair, which lies 3 A from the first.
    """
    draw = random.Random(seed)
    sequences, pairs = zip(*(protein(draw) for _ in range(count)), strict=True)
    labelled: Sequence[Pairs] = [*pairs[1:], pairs[0]] if shuffled else pairs
    (path / f"{name}.fasta").write_text("".join(f">{name}{n}\n{s}\n" for n, s in enumerate(sequences)))
    np.savez(
        path / f"{name}.npz",
        names=np.array([f"{name}{n}" for n in range(count)]),
        seqs=np.array(sequences),
        offsets=np.arange(count + 1, dtype=np.int32) * LENGTH,
        cb_dA=np.concatenate([_coordinates(p) for p in labelled]),
    )
    return list(pairs)


def _coordinates(pairs: Pairs) -> npt.NDArray[np.uint16]:
    cb_dA_L3 = np.zeros((LENGTH, 3), dtype=np.uint16)
    cb_dA_L3[:, 0] = np.arange(LENGTH) * 1000
    for i, j in pairs:
        cb_dA_L3[j] = cb_dA_L3[i] + np.array([0, 30, 0], dtype=np.uint16)
    return cb_dA_L3


def precision(scores: Sequence[npt.NDArray[np.float32]], pairs: Sequence[Pairs]) -> float:
    """Mean share of true pairs among the eight that are scored highest, six or more residues apart."""
    found = []
    for scores_LL, true in zip(scores, pairs, strict=True):
        i, j = np.triu_indices(LENGTH, MIN_SEPARATION)
        best = np.argsort(-scores_LL[i, j], kind="stable")[:PAIRS]
        found.append(len(set(zip(i[best].tolist(), j[best].tolist(), strict=True)) & set(true)) / PAIRS)
    return float(np.mean(found))
