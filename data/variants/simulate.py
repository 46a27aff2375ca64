"""Simulate the effects of variants of one protein: `simulate.py OUT_DIR`.

The script writes `wild_type.fasta`, `landscape.csv` (simulated measurements) and `truth.csv` (values without noise, of
every single substitution and of the measured double mutants). No value is a real measurement. The script needs numpy
and the chain `3CS1_A` of `data/contact/train.npz`. The same seed gives the same bytes.

The effect of a substitution of residue a by b at site i has arbitrary units. Higher is better, and the wild type has 0:

    additive = -s(i) d(a, b) + 0.5 (p(a) - p(b))
    d(a, b)  = 1.5 |hydropathy difference| / 9 + |volume difference| / 167.7 A^3 + |charge difference| / 2
    s(i)     = 0.1 + 0.9 / (1 + exp(-m(i)))

m(i) is the weighted mean hydropathy of the wild type at i-1, i and i+1 (weights 1, 3, 1; fewer sites at the ends). So
hydrophobic regions are sensitive, and polar regions are tolerant. A model can learn s from the sequence, even for sites
without measured variants. p is the helix propensity in kcal/mol; lower is better. Its term does not depend on the site.
It makes some substitutions better than the wild type, and proline bad.

The effects of two substitutions, a by b at site i and a' by b' at site j, add up. Sites in contact (Cb, or CA of
glycine, closer than 8 A; |i - j| >= 4) have one more term:

    pairwise = -0.5 q(b) q(b') + 0.7 (s(i) + s(j)) min(|dV|, |dV'|) / 167.7 A^3

q is the charge of a new residue. The second part is used only if one of the volume changes dV and dV' is positive and
the other is negative. It cancels 70% of the volume part of d, as far as the two volume changes compensate each other.

Sources: hydropathy, Kyte & Doolittle 1982; volumes, Zamyatnin 1972; helix propensities, Pace & Scholtz 1998. The
formulas and weights are invented.
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
"""The columns of TABLE. Units: none; A^3; kcal/mol relative to alanine; elementary charges."""

HYDROPATHY_RANGE, VOLUME_RANGE, CHARGE_RANGE = 9.0, 167.7, 2.0
"""The maximum difference between two residues, which makes the weights below comparable."""
HYDROPATHY_WEIGHT, VOLUME_WEIGHT, CHARGE_WEIGHT, PROPENSITY_WEIGHT = 1.5, 1.0, 1.0, 0.5
WINDOW = {-1: 1, 0: 3, 1: 1}
LEAST_SENSITIVE, MOST_SENSITIVE = 0.1, 1.0
CHARGE_PAIR, RESCUED = 0.5, 0.7
NOISE = 0.1
"""The standard deviation of the noise, relative to the standard deviation of the noise-free measured values."""

CONTACT_DA = 80
"""The contact distance, 8 A, in the units of the coordinates."""
SEPARATION = 4
MEASURED = (8, 9, 10)
"""The possible numbers of measured substitutions at a site, out of 19."""
DOUBLES_IN_CONTACT, DOUBLES_APART = 120, 80

Substitution = tuple[int, str]
"""The site (from 0) and the new residue."""


def chain(file: Path, name: str) -> tuple[str, npt.NDArray[np.int64]]:
    """Return the sequence of L residues, and the Cb coordinates [L, 3] in 0.1 A."""
    with np.load(file) as arrays:
        k = arrays["names"].tolist().index(name)
        first, end = arrays["offsets"][k : k + 2]
        return str(arrays["seqs"][k]), arrays["cb_dA"][first:end].astype(np.int64)


def contacts(cb_L3: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the pairs of sites i < j that are in contact."""
    square_LL = ((cb_L3[:, None] - cb_L3) ** 2).sum(-1)
    pairs = itertools.combinations(range(len(cb_L3)), 2)
    return [(i, j) for i, j in pairs if j - i >= SEPARATION and square_LL[i, j] < CONTACT_DA**2]


def sensitivity(sequence: str, site: int) -> float:
    """Return the sensitivity s of a site to substitutions, from 0.1 (polar region) to 1 (hydrophobic region)."""
    near = {site + step: weight for step, weight in WINDOW.items() if 0 <= site + step < len(sequence)}
    mean = sum(weight * HYDROPATHY[sequence[j]] for j, weight in near.items()) / sum(near.values())
    return LEAST_SENSITIVE + (MOST_SENSITIVE - LEAST_SENSITIVE) / (1 + math.exp(-mean))


def distance(one: str, other: str) -> float:
    """Return the difference d of two residues, from 0 (equal) to 3.5."""
    return (
        HYDROPATHY_WEIGHT * abs(HYDROPATHY[one] - HYDROPATHY[other]) / HYDROPATHY_RANGE
        + VOLUME_WEIGHT * abs(VOLUME[one] - VOLUME[other]) / VOLUME_RANGE
        + CHARGE_WEIGHT * abs(CHARGE[one] - CHARGE[other]) / CHARGE_RANGE
    )


def additive(sequence: str, site: int, new: str) -> float:
    """Return the additive effect of one substitution; 0 for the wild-type residue."""
    old = sequence[site]
    propensity = PROPENSITY_WEIGHT * (HELIX_PROPENSITY[old] - HELIX_PROPENSITY[new])
    return propensity - sensitivity(sequence, site) * distance(old, new)


def pairwise(sequence: str, first: Substitution, second: Substitution) -> float:
    """Return the pairwise effect of two substitutions at sites in contact."""
    (i, new_i), (j, new_j) = first, second
    grown_i, grown_j = VOLUME[new_i] - VOLUME[sequence[i]], VOLUME[new_j] - VOLUME[sequence[j]]
    effect = -CHARGE_PAIR * CHARGE[new_i] * CHARGE[new_j]
    if grown_i * grown_j < 0:
        shared = VOLUME_WEIGHT * min(abs(grown_i), abs(grown_j)) / VOLUME_RANGE
        effect += RESCUED * (sensitivity(sequence, i) + sensitivity(sequence, j)) * shared
    return effect


def drawn(rng: np.random.Generator, count: int, among: int) -> list[int]:
    """Return `count` different random integers below `among`. Only `rng.random` is the same in every numpy version."""
    order: list[int] = np.argsort(rng.random(among)).tolist()
    return order[:count]


def measured_singles(rng: np.random.Generator, sequence: str) -> list[list[str]]:
    """Draw the new residues that are measured at each site. Return them in alphabetical order."""
    found = []
    for old in sequence:
        others = RESIDUES.replace(old, "")
        count = MEASURED[drawn(rng, 1, len(MEASURED))[0]]
        found.append([others[k] for k in sorted(drawn(rng, count, len(others)))])
    return found


def measured_doubles(
    rng: np.random.Generator, singles: Sequence[Sequence[str]], pairs: Sequence[tuple[int, int]], count: int
) -> list[tuple[Substitution, ...]]:
    """Combine measured single substitutions to double mutants at `count` random pairs of sites.

    Every second mutant gets charged residues, if charged residues were measured at the site. A uniform draw would give
    two charges in only 1 of 25 pairs, too few to show the charge term.
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
    """Return the name of a variant, such as `A24G:V30L` with sites from 1; `WT` without substitutions."""
    return ":".join(f"{sequence[site]}{site + 1}{new}" for site, new in variant) or "WT"


def effects(
    sequence: str, in_contact: set[tuple[int, int]], variants: Sequence[tuple[Substitution, ...]]
) -> npt.NDArray[np.float64]:
    """Return the additive and the pairwise part of N variants, [N, 2].

    Both are rounded to the digits in the file, so that the written parts add up exactly.
    """
    parts_N2 = np.zeros((len(variants), 2))
    for n, variant in enumerate(variants):
        parts_N2[n, 0] = sum(round(additive(sequence, *substitution), 4) for substitution in variant)
        if tuple(site for site, _ in variant) in in_contact:
            parts_N2[n, 1] = round(pairwise(sequence, *variant), 4)
    return parts_N2


def cell(value: float) -> str:
    """Format a value with four decimals, never as `-0.0000`."""
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
