"""Zero-shot effects of amino-acid substitutions: what a language model expects at a site, beside the wild type's.

Meier et al. 2021 (doi:10.1101/2021.07.09.450648). No labels and no training are needed; any model with an LM head will
do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.data.mutations import TARGET_COLUMNS, protein_of
from esmshard.data.numbering import Misnumbered
from esmshard.data.substitutions import Mutation, name_of
from esmshard.data.tables import MISSING, NUMBER, counted, first_three, read_table
from esmshard.errors import InputError, UsageError
from esmshard.infer import variant_tables
from esmshard.infer.variant_tables import text
from esmshard.infer.writers import check
from esmshard.model import recorded, weights
from esmshard.model.esm2 import ESM2
from esmshard.progress import say
from esmshard.tasks.marginals import WINDOW, log_probabilities
from esmshard.vocab import RESIDUES, STANDARD

Method = Literal["masked-marginals", "wild-type-marginals", "pseudo-perplexity"]
METHODS = get_args(Method)
NOT_SCORED = "not scored because"
"""The last column: why a row has no score."""


def score_table(
    model: str,
    wild_type: Path,
    table: Path | None,
    out: Path,
    *,
    method: Method = "masked-marginals",
    mutant: str | None = None,
    target: str | None = None,
    offset: int | Literal["auto"] = "auto",
    window: int = WINDOW,
    overwrite: bool = False,
) -> str:
    """Write a CSV file: the columns of the table, the score under the name of the method, and for each row without a
    score the reason (`not scored because`); returns what to say.

    Rows that cannot be scored (a stop codon, a blank cell, a residue that is none of the 20 amino acids) keep their
    place with an empty score. Where the table has measured values, Spearman's correlation with them is said, and why
    there is none where it is undefined. A JSON file beside the table says how it was made: method, numbering, what was
    left out.

    Args:
        model: see `weights.read`.
        wild_type: FASTA file with one protein.
        table: of variants; None for all single substitutions.
        out: `.csv`.
        method: see `score`.
        mutant: see `read_variants`.
        target: column of measured values; by default the one with a usual name, if there is one.
        offset: see `read_variants`.
        window: see `score`.
        overwrite: replace `out`.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: scores are written as .csv; give the file that ending")
    check(out, variant_tables.facts_file(out), overwrite=overwrite)
    values_N: npt.NDArray[np.float64] | None = None
    measured = ""
    if table is None:
        protein = protein_of(wild_type)
        mutations = all_singles(protein)
        columns = {"mutant": [name_of(one) for one in mutations]}
        places = list(range(len(mutations)))
        notices, offset_used, left_out = list[str](), 0, dict[int, str]()
    else:
        names = [target] if target else None
        if names is None:
            usual = {name.lower() for name in TARGET_COLUMNS}
            names = [name for name in read_table(table).columns if name.lower() in usual]
        try:
            found = variant_tables.read(table, wild_type, mutant=mutant, offset=offset)
        except Misnumbered as error:
            raise InputError(error.spelled("--offset ")) from None
        for notice in found.notices:
            say(notice)
        protein, columns = found.wild_type, dict(found.table.columns)
        notices, offset_used, left_out = found.notices, found.offset, dict(found.left_out)
        # A second method goes beside the first: the reason why a row has no score is written anew, for both.
        columns.pop(NOT_SCORED, None)
        variant_tables.check_new(out, columns, [method.replace("-", "_")])
        places = [rows[0] for rows in found.rows]
        mutations = [tuple(m for m in one if m.mutant != m.wild) for one in found.mutations]
        if target or (len(names) == 1 and _has_numbers(found.table.columns[names[0]])):
            measured = names[0]
            values_N = found.table.numbers(measured)[places]
    read = weights.read(model)
    if "lm_head" in read.unlearned:
        raise InputError(f"{model}: has no trained LM head, which scores are read from; take another model")
    with recorded.compared(read.files, say):
        esm = weights.build(read, weights.default_device()).eval()
    score_N = score(esm, protein, mutations, method, window)
    without = {place: why for place, one in zip(places, mutations, strict=True) if (why := unscored(one))}
    if without:
        reasons = list(dict.fromkeys(without.values()))
        notices = [*notices, f"not scored: {counted(len(without), 'variant')}, as {first_three(reasons, str)}"]
        say(notices[-1])
    left_out |= without
    rows = len(next(iter(columns.values())))
    cells = [""] * rows
    for place, value in zip(places, score_N, strict=True):
        cells[place] = text(float(value))
    why_not = [left_out.get(row, "") for row in range(rows)]
    scored = len(places) - len(without)
    said = "" if values_N is None else variant_tables.spearman(score_N, values_N, measured)
    variant_tables.write(out, columns, {method.replace("-", "_"): cells, NOT_SCORED: why_not})
    facts: dict[str, Any] = {
        "model": model,
        "wild_type": str(wild_type),
        "table": None if table is None else str(table),
    }
    facts |= {"method": method, "window": window, "offset": offset_used, "rows": rows, "scored": scored}
    variant_tables.write_facts(out, facts | {"notices": notices, "compared": said or None})
    return f"{out}: {scored:,} variants" + (f"; {said}" if said else "")


def _has_numbers(cells: Sequence[str]) -> bool:
    """Whether a column whose name may mean measured values has such: `effect` may also be `pathogenic`."""
    return all(NUMBER.fullmatch(cell.replace(",", ".")) or cell.lower() in MISSING for cell in cells)


def all_singles(wild_type: str) -> list[tuple[Mutation, ...]]:
    """Every substitution of every residue by another of the 20: 19 L variants, by position and letter, and of a residue
    that is none of the 20 (X, U, O, B, Z) one more.
    """
    return [
        (Mutation(position, wild, mutant),)
        for position, wild in enumerate(wild_type)
        for mutant in STANDARD
        if mutant != wild
    ]


def unscored(mutations: Sequence[Mutation]) -> str:
    """Why a variant has no score; empty if it has one.

    A language model was hardly trained on letters other than the 20, so that it finds every other residue far more
    likely: log p(mutant) - log p(X) says nothing of the mutant.

    >>> unscored([Mutation(10, "X", "L")])
    'the wild type has X at residue 11, which is none of the 20 amino acids'
    """
    for one in mutations:
        if one.wild not in STANDARD:
            return f"the wild type has {one.wild} at residue {one.position + 1}, which is none of the 20 amino acids"
        if one.mutant not in STANDARD:
            return f"{one} puts {one.mutant} there, which is none of the 20 amino acids"
    return ""


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
    type is 0 in the first two. NaN: see `unscored`.

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
    known = [n for n, mutations in enumerate(variants) if not unscored(mutations)]
    score_N = np.full(len(variants), np.nan)
    score_N[known] = _score(model, wild_type, [variants[n] for n in known], method, window)
    return score_N


def _score(
    model: ESM2, wild_type: str, variants: Sequence[tuple[Mutation, ...]], method: Method, window: int
) -> npt.NDArray[np.float64]:
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
