"""Maps of measured and predicted variants along a protein, and of the errors of predictions."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from esmshard.data.splits.variant_records import OUT_OF_FOLD
from esmshard.report.draw import charts
from esmshard.report.read.run_directory import Values
from esmshard.report.read.variant_run_directory import AGAIN, RANKED, CrossValidated
from esmshard.report.text.page_parts import Figure, PageTable, Section, count_text, unit_text
from esmshard.report.text.scores import MOST_TARGETS

LETTERS = "GAVLIMCFYWPSTNQHKRDE"
"""The rows of a map, with similar amino acids together: aliphatic, aromatic, proline, polar, positive, negative."""
MOST_POSITIONS = 1000
"""The most positions of a map, which are ten blocks."""
WORST = 10
"""The number of rows of the table of positions."""


def numbering(found: CrossValidated) -> str:
    """Explain in a sentence or two which residue is number 1."""
    text = "Positions count the residues of the wild type from 1"
    offset = found.given.offset if found.given is not None else 0
    if not offset:
        return f"{text}, on this page and in all files."
    return (
        f"{text}, on this page and in all files. The table counts otherwise: its positions {offset:+d} are those of "
        f"the wild type. {RANKED} has both, in the columns 'mutant' and 'mutant in table'."
    )


def substitutions(found: CrossValidated) -> Section:
    """Draw maps of the measured and predicted values of each single substitution."""
    section = ("map", "Map of substitutions")
    tested, ranked = found.tested, found.ranked
    if tested is None and ranked is None:
        return Section(*section, missing=f"{OUT_OF_FOLD} and {RANKED} are missing; {AGAIN}.")
    # Of a long protein only the measured region is drawn, since predictions far from it are unreliable.
    changed = {m.position for one in tested.mutations for m in one} if tested else set()
    changed = changed or ({m.position for m in ranked.mutations} if ranked else set())
    if not changed:
        return Section(*section, missing="No variant changes a residue.")
    first, last = min(changed), min(max(changed), min(changed) + MOST_POSITIONS - 1)
    wild_type = found.wild_type
    wild_P = [LETTERS.find(wild_type.get(p, "?")) for p in range(first, last + 1)]
    texts = [
        f"Residues {first + 1:,} to {last + 1:,}: a dot marks that of the wild type, grey is what has no value. "
        "Measured: single substitutions of the table. Predicted: mean over the models of all runs, most "
        "of which were trained on the measured variants, so that this is no test of them. Both have one "
        "colour scale; values beyond its ends, the 2nd and 98th percentile, have the colours of the ends."
    ]
    if found.given is not None and found.given.offset:
        texts.append(numbering(found))
    if last < max(changed):
        texts.append(f"Changed residues after {last + 1:,}, up to {max(changed) + 1:,}, are not shown.")
    figures = []
    for t, name in enumerate(found.targets[:MOST_TARGETS]):
        maps = {}
        if tested is not None:
            singles = [
                (one[0], value)
                for one, value in zip(tested.mutations, tested.measured_NT[:, t], strict=True)
                if len(one) == 1
            ]
            maps["Measured"] = _grid(singles, first, last)
        if ranked is not None and t < ranked.prediction_NT.shape[1]:
            pairs = list(zip(ranked.mutations, ranked.prediction_NT[:, t], strict=True))
            maps["Predicted"] = _grid(pairs, first, last)
        every = np.concatenate([grid_AP[np.isfinite(grid_AP)] for grid_AP in maps.values()])
        if not len(every):
            continue
        low, high = np.percentile(every, [2, 98]).tolist()
        for what, grid_AP in maps.items():

            def draw(
                axes: Any,
                grid_AP: Values = grid_AP,
                label: str = f"{what.lower()} {name}",
                ends: tuple[float, float] = (low, high),
            ) -> None:
                wild = [letter if letter >= 0 else None for letter in wild_P]
                charts.heat_map(axes, grid_AP, first + 1, wild, LETTERS, ends, label)

            lines = -(-grid_AP.shape[1] // 100)
            count = int(np.isfinite(grid_AP).sum())
            if not count:  # a library of multiple mutants, for example
                texts.append(f"No single substitution has a {what.lower()} {name}.")
                continue
            picture = charts.chart(f"{what}{t}", draw, height=0.3 + 2.3 * lines, width=10)
            figures.append(Figure(f"{what} {name} of {count_text(count, 'substitution')}.", picture, wide=True))
    for name, there in ((OUT_OF_FOLD, tested), (RANKED, ranked)):
        if there is None:
            texts.append(f"{name} is missing; {AGAIN}.")
    return Section(*section, texts, figures, missing="" if figures else "No single substitution has a value.")


def _grid(pairs: Sequence[tuple[Any, float]], first: int, last: int) -> Values:
    """Return the values of single substitutions, [letters, positions]; NaN where there is none."""
    grid_AP = np.full((len(LETTERS), last - first + 1), np.nan)
    for mutation, value in pairs:
        if first <= mutation.position <= last and mutation.mutant in LETTERS:
            grid_AP[LETTERS.index(mutation.mutant), mutation.position - first] = value
    return grid_AP


def positions(found: CrossValidated) -> Section:
    """Show the positions at which predictions are wrong."""
    section = ("positions", "Error by position")
    tested = found.tested
    if tested is None:
        return Section(*section, missing=f"{OUT_OF_FOLD} is missing; {AGAIN}.")
    wild_type, figures, tables = found.wild_type, [], []
    for t, name in enumerate(found.targets[:MOST_TARGETS]):
        values: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for one, measured, predicted in zip(
            tested.mutations, tested.measured_NT[:, t], tested.predicted_NT[:, t], strict=True
        ):
            if math.isfinite(measured) and math.isfinite(predicted):
                for mutation in one:
                    values[mutation.position].append((measured, predicted))
        if not values:
            continue
        place_P = np.array(sorted(values))
        pairs_P = [np.array(values[p]) for p in place_P]
        count_P = np.array([len(pairs) for pairs in pairs_P], dtype=np.float64)
        error_P = np.array([np.abs(pairs[:, 1] - pairs[:, 0]).mean() for pairs in pairs_P])

        def draw(axes: Any, place_P: Any = place_P, value_P: Values = error_P, label: str = f"error of {name}") -> None:
            charts.along(axes, place_P + 1, value_P)
            charts.name_axes(axes, "position", label)

        def counts(axes: Any, place_P: Any = place_P, value_P: Values = count_P) -> None:
            charts.along(axes, place_P + 1, value_P, charts.GREY)
            charts.name_axes(axes, "position", "variants")

        said = f"Mean absolute error of the out-of-fold {name} over the variants that change a position."
        figures.append(Figure(said, charts.chart(f"error{t}", draw, height=2.2, width=10), wide=True))
        said = f"Variants with a measured {name} that change a position."
        figures.append(Figure(said, charts.chart(f"count{t}", counts, height=1.5, width=10), wide=True))
        worst = sorted(range(len(place_P)), key=lambda n: (-error_P[n], place_P[n]))[:WORST]
        rows = []
        for n in worst:
            measured, predicted = pairs_P[n].mean(0)
            at = f"{wild_type.get(int(place_P[n]), '')}{place_P[n] + 1}"
            rows.append([at, unit_text(error_P[n]), f"{len(pairs_P[n]):,}", unit_text(measured), unit_text(predicted)])
        head = ["position", "mean absolute error", "variants", "mean measured", "mean predicted"]
        tables.append(PageTable(head, rows, f"{name}: the positions with the greatest errors."))
    if not figures:
        return Section(*section, missing="No changed position has both a measured and a predicted value.")
    texts = ["A variant with several changes counts at each of their positions."]
    if found.given is not None and found.given.offset:
        texts.append(numbering(found))
    return Section(*section, texts, figures, tables)
