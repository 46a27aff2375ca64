"""Compares the choice of `esmshard predict --propose` with other choices, on data where all candidates were measured.

    python benchmarks/proposals.py TABLE.csv WILD_TYPE.fasta [--target activity] > results.md

From the single substitutions of a table 300 are drawn for training, 20 times. Five ridge regressions, each without the
positions of one fold, represent the models of a run. Their inputs are the wild type's representation at the position
(by the frozen starter) and both letters, like those of the head `wild_type` with a frozen trunk. All other
substitutions are candidates, of which 24 are chosen. This takes about a minute on one core.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from esmshard.batch import pack
from esmshard.data.variants import Mutation, read_variants
from esmshard.model import weights
from esmshard.predict.proposals import DIVERSITY, KAPPA, choose
from esmshard.vocab import STANDARD, encode

DRAWS, TRAINED_ON, FOLDS, CHOSEN = 20, 300, 5, 24
PENALTY = 1.0
"""The penalty of the ridge regressions."""
HEAD = (
    *("choice", "mean", "best", "in the best tenth", "positions", "wild-type residues", "mutant residues"),
    *("most of one wild-type residue", "most of one mutant residue"),
)


def main() -> None:
    """Read the table, choose in all ways, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("wild_type", type=Path)
    parser.add_argument("--target", default="activity")
    given = parser.parse_args()
    table = read_variants(
        given.table, wild_type=given.wild_type, targets=[given.target], offset="auto", unusable="drop"
    )
    variants = [one for one in table.mutations if len(one) == 1]
    value_N = np.array([y for y, one in zip(table.target_NT[:, 0], table.mutations, strict=True) if len(one) == 1])
    seen_NF = features(table.wild_type, [one[0] for one in variants])
    rows: dict[str, list[list[float]]] = {}
    correlations = []
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        order = rng.permutation(len(variants))
        train, free = order[:TRAINED_ON], order[TRAINED_ON:]
        said_MN = models(seen_NF, value_N, [one[0].position for one in variants], train, rng)[:, free]
        correlations.append(spearmanr(said_MN.mean(0), value_N[free]).statistic)
        candidates = [variants[n] for n in free]
        choices = {
            "random": rng.choice(len(free), CHOSEN, replace=False).tolist(),
            "highest mean": np.argsort(-said_MN.mean(0), kind="stable")[:CHOSEN].tolist(),
        }
        for diversity in (0, 0.05, 0.1, DIVERSITY, 0.2, 0.3, 0.5, 1):
            mark = " (default)" if diversity == DIVERSITY else ""
            choices[f"diversity {diversity:g}{mark}"] = choose(said_MN, candidates, CHOSEN, KAPPA, diversity)
        for name, chosen in choices.items():
            rows.setdefault(name, []).append(facts(value_N[free], [candidates[n][0] for n in chosen], chosen))
    print(f"Spearman of the mean of the models with the candidates' values: {np.mean(correlations):.3f}.\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name, found in rows.items():
        mean_K, error_K = np.mean(found, 0), np.std(found, 0, ddof=1) / np.sqrt(DRAWS)
        cells = [f"{mean_K[k]:.3f} ± {error_K[k]:.3f}" for k in range(3)] + [f"{value:.1f}" for value in mean_K[3:]]
        print(f"| {name} | {' | '.join(cells)} |")


def features(wild_type: str, mutations: list[Mutation]) -> np.ndarray:
    """Return [N, F]: the wild type's representation at the position, and both letters."""
    trunk = weights.build(weights.read("starter"), torch.device("cpu")).eval()
    with torch.no_grad():
        x_LD = trunk(pack([encode(wild_type)])).representations[trunk.config.n_layers][1:-1].float().numpy()
    x_LD = (x_LD - x_LD.mean(0)) / (x_LD.std(0) + 1e-6) / np.sqrt(x_LD.shape[1])
    letter = np.eye(len(STANDARD))
    both_N = [np.concatenate([letter[STANDARD.index(m.wild)], letter[STANDARD.index(m.mutant)]]) for m in mutations]
    return np.concatenate([x_LD[[m.position for m in mutations]], np.stack(both_N)], 1)


def models(
    seen_NF: np.ndarray, value_N: np.ndarray, positions: list[int], train: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return predictions of all variants, [FOLDS, N], each by a model trained without one fold of the positions."""
    at_N = np.array(positions)
    fold = {position: n % FOLDS for n, position in enumerate(rng.permutation(sorted(set(at_N[train].tolist()))))}
    fold_T = np.array([fold[position] for position in at_N[train]])
    said = []
    for n in range(FOLDS):
        rows = train[fold_T != n]
        mean_F, mean = seen_NF[rows].mean(0), value_N[rows].mean()
        x_TF = seen_NF[rows] - mean_F
        weight_F = np.linalg.solve(x_TF.T @ x_TF + PENALTY * np.eye(x_TF.shape[1]), x_TF.T @ (value_N[rows] - mean))
        said.append((seen_NF - mean_F) @ weight_F + mean)
    return np.stack(said)


def facts(value_N: np.ndarray, mutations: list[Mutation], chosen: list[int]) -> list[float]:
    """Return the columns after the first one for one batch."""
    value_C = value_N[chosen]
    wild, mutant = Counter(m.wild for m in mutations), Counter(m.mutant for m in mutations)
    numbers = [value_C.mean(), value_C.max(), (value_C >= np.quantile(value_N, 0.9)).mean()]
    numbers += [len({m.position for m in mutations}), len(wild), len(mutant)]
    return [*map(float, numbers), float(max(wild.values())), float(max(mutant.values()))]


if __name__ == "__main__":
    main()
