"""Zero-shot effects of amino-acid substitutions: what a language model expects at a site, compared with the wild type's
residue.

The method is from Meier et al. 2021 (doi:10.1101/2021.07.09.450648). It needs no labels and no training, only a model
with an LM head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.data.tracks import ProteinTracks, protein_tracks, track_files, with_paths
from esmshard.data.variants.mutations import TARGET_COLUMNS, protein_of
from esmshard.data.variants.substitutions import Mutation, name_of
from esmshard.devices import DeviceName
from esmshard.errors import UsageError
from esmshard.io.tables import MISSING, NUMBER, counted, first_three, read_table
from esmshard.io.writers import check, text
from esmshard.model import weights
from esmshard.model.families.family_registry import family_of, window_of
from esmshard.model.trunk import Trunk
from esmshard.predict import variant_tables
from esmshard.predict.known_variants import spearman_sentence
from esmshard.predict.language_models import check_finite, mean_and_sd, read_models
from esmshard.progress import say
from esmshard.tasks.finetuned import without_tracks
from esmshard.tasks.marginals import Tracks, log_probabilities, pseudo_log_likelihoods, scored_residues
from esmshard.tasks.metrics import variant_spearman
from esmshard.vocab import RESIDUES, STANDARD, TOKENS, encode

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
    ensemble: Sequence[str] = (),
    window: int | None = None,
    tracks: Mapping[str, str] | None = None,
    device: DeviceName = None,
    overwrite: bool = False,
) -> str:
    """Write a CSV file: the columns of the table, the score in a column named after the method, and for each row
    without a score the reason (`not scored because`). Several models give their mean score, and in a further column,
    `METHOD_sd`, its standard deviation over them. Return a message for the user.

    Rows that cannot be scored (a stop codon, a blank cell, a residue that is none of the 20 amino acids) keep their
    place with an empty score. If the table has measured values, the message has Spearman's correlation with them over
    the variants that have one, and its interval, or why it is undefined. A JSON file beside the table records how the
    table was made: method, numbering, and what was left out.

    Args:
        model: see `weights.read`.
        wild_type: FASTA file with one protein.
        table: table of variants; None for all single substitutions.
        out: a `.csv` file.
        method: see `score`.
        mutant: see `read_variants`.
        target: column of measured values; by default the one with a usual name, if there is one.
        offset: see `read_variants`.
        ensemble: further models.
        window: see `score`; for several models by default that of the model that saw the fewest residues.
        tracks: a path, or `inside`, by the name of each track of the wild type, which its variants have too.
        device: see `chosen_device`.
        overwrite: replace `out`.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: scores are written as .csv; give the file that ending")
    check(out, variant_tables.facts_file(out), overwrite=overwrite)
    column = method.replace("-", "_")
    known = _tracks(model, wild_type, tracks or {})
    if table is None:
        request = _singles(wild_type)
    else:
        request = _of_table(table, wild_type, mutant, target, offset)
        variant_tables.check_new(out, request.columns, [column, *([f"{column}_sd"] if ensemble else [])])
    models = read_models(model, ensemble, window=window, tracks=tracks or {}, device=device)
    missing = [notice for name in models.names for notice in without_tracks(name, tracks or {})]
    about_tracks = [*known.notices(), *missing]
    for notice in about_tracks:
        say(notice)
    of_protein = known.get(0, slice(None))

    def scores(esm: Trunk) -> npt.NDArray[np.float64]:
        return score(esm, request.protein, request.mutations, method, models.window, of_protein)

    score_N, sd_N = mean_and_sd(np.stack(models.each(scores)))
    scored_N = np.array([not unscored(one) for one in request.mutations], dtype=np.bool_)
    check_finite(score_N[scored_N], ", ".join(models.names))
    without, notices = _without_score(request), [*request.notices, *about_tracks]
    if without:
        reasons = list(dict.fromkeys(without.values()))
        notices = [*notices, f"not scored: {counted(len(without), 'variant')}, as {first_three(reasons, str)}"]
        say(notices[-1])
    why_not, rows = request.left_out | without, request.rows
    new = {column: request.cells(score_N)} | ({} if sd_N is None else {f"{column}_sd": request.cells(sd_N)})
    message = "" if request.values_N is None else _agreement(request, score_N, request.values_N)
    new[NOT_SCORED] = [why_not.get(row, "") for row in range(rows)]
    variant_tables.write(out, request.columns, new)
    scored = len(request.places) - len(without)
    facts: dict[str, Any] = models.facts()
    facts |= {"wild_type": str(wild_type), "table": None if table is None else str(table)}
    facts |= {"tracks": dict(tracks)} if tracks else {}
    facts |= {"method": method, "window": models.window, "offset": request.offset, "rows": rows, "scored": scored}
    variant_tables.write_facts(out, facts | {"notices": notices, "compared": message or None})
    variants = len({one for one in request.mutations if not unscored(one)})
    rows_of = "" if scored == variants else f"{counted(scored, 'row')} of "
    return f"{out}: {rows_of}{counted(variants, 'variant')}" + (f"; {message}" if message else "")


def _agreement(request: "_ScoringRequest", score_N: npt.NDArray[np.float64], values_N: npt.NDArray[np.float64]) -> str:
    """Say how the scores of variants agree with their measured values. The values of a variant in several rows are
    averaged.
    """
    values: dict[tuple[Mutation, ...], list[float]] = {}
    for one, score, value in zip(request.mutations, score_N, values_N, strict=True):
        if not np.isnan(score) and not np.isnan(value):
            values.setdefault(one, [float(score)]).append(float(value))
    score_V = np.array([score for score, *_ in values.values()])
    value_V = np.array([np.mean(measured) for _, *measured in values.values()])
    found, unit = variant_spearman(score_V, value_V, list(values))
    return f"{spearman_sentence(found, request.measured, unit)} over {counted(len(values), 'variant')}"


def _tracks(model: str, wild_type: Path, tracks: Mapping[str, str]) -> ProteinTracks:
    """Return the tracks of the protein."""
    if not tracks:
        return ProteinTracks([])
    files = track_files(tracks, family_of(weights.read(model).config).tracks, model, "--track ")
    return protein_tracks(with_paths(wild_type, files), wild_type)


@dataclass(frozen=True)
class _ScoringRequest:
    """N variants to score, and the R rows of the table that hold them."""

    protein: str
    mutations: list[tuple[Mutation, ...]]
    """The mutations of each variant, without synonymous changes."""
    places: list[int]
    """The row of each variant."""
    columns: dict[str, list[str]]
    """The columns of the table, R cells each."""
    notices: list[str] = field(default_factory=list)
    offset: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    """The rows without a variant, with the reasons."""
    measured: str = ""
    """The name of the column of measured values; empty if there is none."""
    values_N: npt.NDArray[np.float64] | None = None
    """The measured value of each variant, if there is such a column."""

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return len(next(iter(self.columns.values())))

    def cells(self, values_N: npt.NDArray[np.float64]) -> list[str]:
        """Return a column of R cells with a value for each variant."""
        found = [""] * self.rows
        for place, value in zip(self.places, values_N, strict=True):
            found[place] = text(float(value))
        return found


def _singles(wild_type: Path) -> _ScoringRequest:
    """Return all single substitutions of a protein."""
    protein = protein_of(wild_type)
    mutations = all_singles(protein)
    return _ScoringRequest(
        protein, mutations, list(range(len(mutations))), {"mutant": [name_of(one) for one in mutations]}
    )


def _of_table(
    table: Path, wild_type: Path, mutant: str | None, target: str | None, offset: int | Literal["auto"]
) -> _ScoringRequest:
    """Read the variants of a table, with measured values if only one column may hold them."""
    if target:
        names = [target]
    else:
        usual = {name.lower() for name in TARGET_COLUMNS}
        names = [name for name in read_table(table).columns if name.lower() in usual]
    found = variant_tables.read(table, wild_type, mutant=mutant, offset=offset)
    for notice in found.notices:
        say(notice)
    # A table may have the scores of another method already. The column of reasons is written again, for both methods.
    columns = {name: cells for name, cells in found.table.columns.items() if name != NOT_SCORED}
    places = [rows[0] for rows in found.rows]
    mutations = [tuple(m for m in one if m.mutant != m.wild) for one in found.mutations]
    measured, values_N = "", None
    if target or (len(names) == 1 and _has_numbers(found.table.columns[names[0]])):
        measured = names[0]
        values_N = found.table.numbers(measured)[places]
    return _ScoringRequest(
        found.wild_type, mutations, places, columns, found.notices, found.offset, found.left_out, measured, values_N
    )


def _without_score(request: _ScoringRequest) -> dict[int, str]:
    """Return the rows whose variant has no score, with the reasons."""
    return {place: why for place, one in zip(request.places, request.mutations, strict=True) if (why := unscored(one))}


def _has_numbers(cells: Sequence[str]) -> bool:
    """Return whether a column with a usual name of measured values has numbers: `effect` may also be `pathogenic`."""
    return all(NUMBER.fullmatch(cell.replace(",", ".")) or cell.lower() in MISSING for cell in cells)


def all_singles(wild_type: str) -> list[tuple[Mutation, ...]]:
    """Return every substitution of every residue by another of the 20, by position and letter: 19 L variants, and one
    more for each residue that is none of the 20 (X, U, O, B, Z).
    """
    return [
        (Mutation(position, wild, mutant),)
        for position, wild in enumerate(wild_type)
        for mutant in STANDARD
        if mutant != wild
    ]


def unscored(mutations: Sequence[Mutation]) -> str:
    """Explain why a variant has no score; empty if it has one.

    A language model was hardly trained on letters other than the 20, so that every other residue is far more likely:
    log p(mutant) - log p(X) says nothing about the mutant.

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
    model: Trunk,
    wild_type: str,
    variants: Sequence[tuple[Mutation, ...]],
    method: Method = "masked-marginals",
    window: int | None = None,
    tracks: Tracks | None = None,
) -> npt.NDArray[np.float64]:
    """Score each variant, float64 [N]. A higher score means that the model finds the variant more natural.

    `masked-marginals` is the sum over the mutated sites of log p(mutant) - log p(wild type), where p is what the model
    expects at the masked site of the wild type. This takes one forward pass for each site, for any number of variants.
    `wild-type-marginals` is the same from one pass in which nothing is masked. `pseudo-perplexity` is the mean of log p
    over the residues of the variant that are among the 20, each masked in turn: minus the logarithm of the
    pseudo-perplexity. This takes a pass for each residue of each variant. (fair-esm's script for it reads the wrong
    site and skips the last.) The wild type's score is 0 with the first two methods. NaN: see `unscored`.

    Args:
        model: a model with a trained LM head.
        wild_type: residues of the wild type.
        variants: mutations of each variant; empty for the wild type.
        method: see above.
        window: residues of a longer protein that the model sees, with the site in their middle unless an end of the
            protein is near; by default as many as it saw in training. In a pass that masks nothing,
            each site is read where it is nearest to the middle of a window.
        tracks: of the wild type, [L + 2, ...] by name; the variants have them too.

    Raises:
        UsageError: the method is not known, or the window has less than one residue.
    """
    if method not in METHODS:
        raise UsageError(f"method is {method!r}; it is one of {', '.join(METHODS)}")
    if window is None:
        window = window_of(model.config)
    if window < 1:
        raise UsageError(f"a window of {window} residues: give at least 1")
    known = [n for n, mutations in enumerate(variants) if not unscored(mutations)]
    score_N = np.full(len(variants), np.nan)
    score_N[known] = _score(model, wild_type, [variants[n] for n in known], method, window, tracks)
    return score_N


def _score(
    model: Trunk,
    wild_type: str,
    variants: Sequence[tuple[Mutation, ...]],
    method: Method,
    window: int,
    tracks: Tracks | None,
) -> npt.NDArray[np.float64]:
    if method == "pseudo-perplexity":
        return _pseudo_perplexity(model, wild_type, variants, window, tracks)
    sites = sorted({mutation.position for mutations in variants for mutation in mutations})
    hidden = method == "masked-marginals"
    log_p_SA = log_probabilities(model, wild_type, sites, hidden=hidden, window=window, tracks=tracks)
    row, letter = {site: n for n, site in enumerate(sites)}, {aa: n for n, aa in enumerate(RESIDUES)}

    def effect(mutation: Mutation) -> float:
        of_site = log_p_SA[row[mutation.position]]
        return float(of_site[letter[mutation.mutant]]) - float(of_site[letter[mutation.wild]])

    return np.array([sum(map(effect, mutations)) for mutations in variants], dtype=np.float64)


def _pseudo_perplexity(
    model: Trunk, wild_type: str, variants: Sequence[tuple[Mutation, ...]], window: int, tracks: Tracks | None
) -> npt.NDArray[np.float64]:
    tokens_NL = np.tile(encode(wild_type), (len(variants), 1))
    for tokens, mutations in zip(tokens_NL, variants, strict=True):
        for mutation in mutations:
            tokens[mutation.position + 1] = TOKENS.index(mutation.mutant)
    scored_N = np.array([len(scored_residues(tokens)) for tokens in tokens_NL])
    proteins = ((tokens, tracks or {}) for tokens in tokens_NL)
    sum_N = pseudo_log_likelihoods(model, proteins, scored_N, window=window)
    return sum_N / np.where(scored_N, scored_N, np.nan)
