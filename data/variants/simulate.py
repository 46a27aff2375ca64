"""A simulated variant landscape of one protein, whose truth is known: `simulate.py OUT_DIR`.

Writes `wild_type.fasta`, `landscape.csv` (simulated measurements) and `truth.csv` (values without noise, of every
single substitution and of the measured double mutants). None of it was measured on a protein. Needs numpy, and the
chain `3CS1_A` of `data/contact/train.npz`. The same seed gives the same files, byte for byte.

A substitution of residue a at site i by b, in arbitrary units, higher being better and the wild type 0:

    additive = -s(i) d(a, b) + 0.5 (p(a) - p(b))
    d(a, b)  = 1.5 |hydropathy difference| / 9 + |volume difference| / 167.7 A^3 + |charge difference| / 2
    s(i)     = 0.1 + 0.9 / (1 + exp(-m(i)))

m(i) is the mean hydropathy of the wild type at i-1, i and i+1 with weights 1, 3, 1, over the sites that there are: a
site in a hydrophobic stretch is sensitive, one in a polar stretch tolerant. So s follows from what a model can read off
the sequence, also at a site that it has seen no variant of. p is the helix propensity in kcal/mol, lower being better;
since its term does not depend on the site, it lets some substitutions improve on the wild type, and makes proline bad.

Two substitutions, a by b at site i and a' by b' at site j, add up. Where the sites are in contact (Cb, or Ca of
glycine, closer than 8 A; |i - j| >= 4) there is one term more:

    pairwise = -0.5 q(b) q(b') + 0.7 (s(i) + s(j)) min(|dV|, |dV'|) / 167.7 A^3,

the first for the charges q of the new residues, the second only where one of the changes of volume dV and dV' is a gain
and the other a loss: 70% of the volume part of d is given back as far as the two make up for each other.

Sources: hydropathy, Kyte & Doolittle 1982; volumes, Zamyatnin 1972; helix propensities, Pace & Scholtz 1998. The forms
and weights of the terms are made up.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

CHAINS = Path(__file__).resolve().parents[1] / "contact" / "train.npz"
CHAIN = "3CS1_A"
SEED = 1

TABLE = """
A   1.8   88.6  0.00   0
C   2.5  108.5  0.68   0
D  -3.5  111.1  0.69  -1
E  -3.5  138.4  0.40  -1
F   2.8  189.9  0.54   0
G  -0.4   60.1  1.00   0
H  -3.2  153.2  0.61   0
I   4.5  166.7  0.41   0
K  -3.9  168.6  0.26   1
L   3.8  166.7  0.21   0
M   1.9  162.9  0.24   0
N  -3.5  114.1  0.65   0
P  -1.6  112.7  3.16   0
Q  -3.5  143.8  0.39   0
R  -4.5  173.4  0.21   1
S  -0.8   89.0  0.50   0
T  -0.7  116.1  0.66   0
V   4.2  140.0  0.61   0
W  -0.9  227.8  0.49   0
Y  -1.3  193.6  0.53   0
"""
RESIDUES = "".join(TABLE.split()[::5])
HYDROPATHY, VOLUME, HELIX_PROPENSITY, CHARGE = (
    {residue: float(value) for residue, value in zip(RESIDUES, TABLE.split()[k::5], strict=True)} for k in range(1, 5)
)
"""Without unit; A^3; kcal/mol relative to alanine; elementary charges."""

HYDROPATHY_RANGE, VOLUME_RANGE, CHARGE_RANGE = 9.0, 167.7, 2.0
"""Largest differences of two residues, so that the weights below compare."""
HYDROPATHY_WEIGHT, VOLUME_WEIGHT, CHARGE_WEIGHT, PROPENSITY_WEIGHT = 1.5, 1.0, 1.0, 0.5
WINDOW = {-1: 1, 0: 3, 1: 1}
LEAST_SENSITIVE, MOST_SENSITIVE = 0.1, 1.0
CHARGE_PAIR, RESCUED = 0.5, 0.7
NOISE = 0.1
"""Standard deviation of the noise as a share of that of the noise-free values of the measured variants."""

CONTACT_DA = 80
"""Cb (Ca of glycine) closer than 8 A, in units of the coordinates."""
SEPARATION = 4
MEASURED = (8, 9, 10)
"""Substitutions that are measured at a site, one of these numbers, of the 19 that there are."""
DOUBLES_IN_CONTACT, DOUBLES_APART = 120, 80

Substitution = tuple[int, str]
"""Site from 0, new residue."""


def chain(file: Path, name: str) -> tuple[str, npt.NDArray[np.int64]]:
    """Sequence of L residues, and Cb coordinates [L, 3] in 0.1 A."""
    with np.load(file) as arrays:
        k = arrays["names"].tolist().index(name)
        first, end = arrays["offsets"][k : k + 2]
        return str(arrays["seqs"][k]), arrays["cb_dA"][first:end].astype(np.int64)


def contacts(cb_L3: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Sites i < j, at least four apart in the sequence, whose Cb are closer than 8 A."""
    square_LL = ((cb_L3[:, None] - cb_L3) ** 2).sum(-1)
    pairs = itertools.combinations(range(len(cb_L3)), 2)
    return [(i, j) for i, j in pairs if j - i >= SEPARATION and square_LL[i, j] < CONTACT_DA**2]


def sensitivity(sequence: str, site: int) -> float:
    """How much a substitution costs at a site, from 0.1 (polar surroundings) to 1 (hydrophobic ones)."""
    near = {site + step: weight for step, weight in WINDOW.items() if 0 <= site + step < len(sequence)}
    mean = sum(weight * HYDROPATHY[sequence[j]] for j, weight in near.items()) / sum(near.values())
    return LEAST_SENSITIVE + (MOST_SENSITIVE - LEAST_SENSITIVE) / (1 + math.exp(-mean))


def distance(one: str, other: str) -> float:
    """How different two residues are: 0 for the same, at most 3.5."""
    return (
        HYDROPATHY_WEIGHT * abs(HYDROPATHY[one] - HYDROPATHY[other]) / HYDROPATHY_RANGE
        + VOLUME_WEIGHT * abs(VOLUME[one] - VOLUME[other]) / VOLUME_RANGE
        + CHARGE_WEIGHT * abs(CHARGE[one] - CHARGE[other]) / CHARGE_RANGE
    )


def additive(sequence: str, site: int, new: str) -> float:
    """Effect of one substitution; 0 for the residue that is there."""
    old = sequence[site]
    propensity = PROPENSITY_WEIGHT * (HELIX_PROPENSITY[old] - HELIX_PROPENSITY[new])
    return propensity - sensitivity(sequence, site) * distance(old, new)


def pairwise(sequence: str, first: Substitution, second: Substitution) -> float:
    """What two substitutions at sites in contact have beyond the sum of both."""
    (i, new_i), (j, new_j) = first, second
    grown_i, grown_j = VOLUME[new_i] - VOLUME[sequence[i]], VOLUME[new_j] - VOLUME[sequence[j]]
    effect = -CHARGE_PAIR * CHARGE[new_i] * CHARGE[new_j]
    if grown_i * grown_j < 0:
        shared = VOLUME_WEIGHT * min(abs(grown_i), abs(grown_j)) / VOLUME_RANGE
        effect += RESCUED * (sensitivity(sequence, i) + sensitivity(sequence, j)) * shared
    return effect


def drawn(rng: np.random.Generator, count: int, among: int) -> list[int]:
    """Different whole numbers below `among`; from `random` alone, whose stream is the same in every numpy."""
    order: list[int] = np.argsort(rng.random(among)).tolist()
    return order[:count]


def measured_singles(rng: np.random.Generator, sequence: str) -> list[list[str]]:
    """New residues that are measured at each site, in the order of the alphabet."""
    found = []
    for old in sequence:
        others = RESIDUES.replace(old, "")
        count = MEASURED[drawn(rng, 1, len(MEASURED))[0]]
        found.append([others[k] for k in sorted(drawn(rng, count, len(others)))])
    return found


def measured_doubles(
    rng: np.random.Generator, singles: Sequence[Sequence[str]], pairs: Sequence[tuple[int, int]], count: int
) -> list[tuple[Substitution, ...]]:
    """One double mutant, of two measured single substitutions, at each of some of the pairs of sites.

    In every second one both new residues are charged, if such were measured at the site. Of residues drawn alike one
    pair in 25 would be, too few to show the charge term.
    """
    found = []
    for n, k in enumerate(drawn(rng, count, len(pairs))):
        double = []
        for site in pairs[k]:
            charged = [residue for residue in singles[site] if CHARGE[residue]]
            choice = charged if n % 2 == 0 and charged else singles[site]
            double.append((site, choice[drawn(rng, 1, len(choice))[0]]))
        found.append(tuple(double))
    return found


def name(sequence: str, variant: Iterable[Substitution]) -> str:
    """`A24G:V30L`, counted from 1; `WT` without substitutions."""
    return ":".join(f"{sequence[site]}{site + 1}{new}" for site, new in variant) or "WT"


def effects(
    sequence: str, in_contact: set[tuple[int, int]], variants: Sequence[tuple[Substitution, ...]]
) -> npt.NDArray[np.float64]:
    """Additive and pairwise part of each of N variants [N, 2].

    Rounded here as they are written, so that the parts in the table add up to the digit.
    """
    parts_N2 = np.zeros((len(variants), 2))
    for n, variant in enumerate(variants):
        parts_N2[n, 0] = sum(round(additive(sequence, *substitution), 4) for substitution in variant)
        if tuple(site for site, _ in variant) in in_contact:
            parts_N2[n, 1] = round(pairwise(sequence, *variant), 4)
    return parts_N2


def cell(value: float) -> str:
    """Four decimals, never `-0.0000`."""
    return f"{round(value, 4) + 0.0:.4f}"


def main(out: Path) -> None:
    """Write the three files."""
    rng = np.random.default_rng(SEED)
    sequence, cb_L3 = chain(CHAINS, CHAIN)
    sites = range(len(sequence))
    near = contacts(cb_L3)
    apart = sorted(set(itertools.combinations(sites, 2)) - set(near))

    residues = measured_singles(rng, sequence)
    doubles = measured_doubles(rng, residues, near, DOUBLES_IN_CONTACT)
    doubles = sorted(doubles + measured_doubles(rng, residues, apart, DOUBLES_APART))
    every: list[tuple[Substitution, ...]] = [((i, new),) for i in sites for new in RESIDUES if new != sequence[i]]
    variants = [(), *every, *doubles]
    parts_N2 = effects(sequence, set(near), variants)
    value_N = parts_N2.sum(1)
    measured = [n for n, variant in enumerate(variants) if all(new in residues[site] for site, new in variant)]
    score = value_N[measured] + NOISE * value_N[measured].std() * rng.standard_normal(len(measured))

    names = [name(sequence, variant) for variant in variants]
    truth = [
        f"{text},{cell(sum(parts))},{','.join(map(cell, parts))}" for text, parts in zip(names, parts_N2, strict=True)
    ]
    landscape = [f"{names[n]},{cell(value)}" for n, value in zip(measured, score, strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    for file, lines in (
        ("wild_type.fasta", [f">{CHAIN}", sequence]),
        ("landscape.csv", ["mutant,score", *landscape]),
        ("truth.csv", ["mutant,effect,additive,pairwise", *truth]),
    ):
        (out / file).write_text("\n".join(lines) + "\n", newline="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
