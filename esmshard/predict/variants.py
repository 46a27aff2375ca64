"""Ranks variants by fine-tuned models or a baseline, with intervals, and proposes variants to measure."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from esmshard.data.batching.loader import Examples
from esmshard.data.mutations import name_of, parse_variant, renumbered
from esmshard.data.splits.variant_records import VariantRecords
from esmshard.data.variants import is_library, read_wild_type
from esmshard.devices import DeviceName
from esmshard.errors import InputError, UsageError
from esmshard.io.tables import counted, first_three
from esmshard.io.writers import check, facts_file, text
from esmshard.predict import heads, proposals
from esmshard.predict.proposals import DIVERSITY, FROM, KAPPA, Acquisition
from esmshard.predict.variant_tables import (
    SUMMARY,
    Array,
    Known,
    Variant,
    VariantRows,
    better_baseline,
    listed,
    models_of,
    not_of_the_20,
    positions,
    read_known,
    read_rows,
    single_substitutions,
    spearman_sentence,
    summary_of,
    write_table,
)
from esmshard.progress import Progress, say
from esmshard.recipe.sections import Recipe
from esmshard.tasks.finetuned import FineTuned, load_base, load_finetuned
from esmshard.tasks.metrics import PREDICTIVE, coverage, variant_spearman
from esmshard.tasks.variant_baselines import FROZEN, ONE_HOT, SHORT
from esmshard.tasks.variants import VariantTask, fit_scale

NOT_RANKED = "not ranked because"
IN_TABLE, IN_WILD_TYPE = "mutant in table", "mutant in wild type"
"""A column with the mutations in the numbering of the run's table or of the wild type, if these numberings differ."""
PROTEINS = ("protein", "proteins", "breaks", "first")
"""The facts of `VariantTask` that describe its proteins."""
OUT_OF_FOLD, SEEN, VARIED = "out-of-fold prediction", "seen in training", "sites varied in training"
DISAGREEMENT = "disagreement of models"
"""The column with the standard deviation of the predictions over the models of all folds and seeds, in the unit of the
target. This standard deviation is not an error bar."""
LEVEL, RESIDUALS = 0.9, 50
"""The share of measured values that intervals should contain, and how many out-of-fold errors an interval needs."""
LOW, HIGH = f"low {LEVEL:.0%}", f"high {LEVEL:.0%}"


def rank(
    run: str,
    table: Path | None,
    out: Path,
    *,
    wild_type: Path | None = None,
    mutant: str | None = None,
    offset: int | None = None,
    propose: int | None = None,
    acquisition: Acquisition = "ucb",
    kappa: float = KAPPA,
    diversity: float = DIVERSITY,
    sites: str | None = None,
    combine: int | None = None,
    best_singles: int = FROM,
    baseline: str | None = None,
    all_singles: bool = True,
    device: DeviceName = None,
    overwrite: bool = False,
) -> int:
    """Rank variants, best first, write a CSV file, and return the number of rows. The file `OUT.json` records how the
    CSV file was made, and how far the ranking can be trusted.

    The first columns are the columns of `table`, or `mutant` and `measured`. If table and wild type are numbered
    differently, there is also IN_WILD_TYPE or IN_TABLE. Then come the columns from `_columns`, for a table
    `not ranked because`, and for proposals `well` (`proposals.wells`). Rows that cannot be used are at the end, without
    ranks. If the wild type was measured, rows of the wild type (`WT`, or a synonymous change) are not ranked, since
    their value is known.

    Args:
        run: the directory of a run of task `variant`; see `models_of`.
        table: a table of variants to rank; if None, see `all_singles`.
        out: the `.csv` file to write.
        wild_type: for a run of several proteins, a FASTA file with the protein whose variants are ranked. It may be one
            of the run's proteins or another.
        mutant: the column with the mutations.
        offset: a number to add to the positions of `table`; by default the offset of the run's table.
        propose: how many variants to propose. `proposals.choose` chooses them among variants that were not measured.
        acquisition: what proposals maximise; see `proposals.choose`.
        kappa: the weight of the uncertainty, for acquisition `ucb`.
        diversity: the cost of shared traits; see `proposals.choose`.
        sites: the sites that proposals and combinations may change: positions in the numbering of the table, divided
            by commas, or `all`; by default the sites at which measured or training variants differ from the wild type.
        combine: without a table, rank combinations of 2 to this number of single substitutions.
        best_singles: how many single substitutions are combined: those with the best predictions, measured or not.
        baseline: rank by this baseline (a short name in SHORT, or a full name), fitted to measured variants.
        all_singles: without a table and `combine`, rank all single substitutions; if False, the variants of
            `proposals.candidates`.
        device: the name of the device; see `chosen_device`.
        overwrite: replace `out`.

    Raises:
        InputError: the run or the table cannot be used, or the table does not fit the numbering of the wild type.
        UsageError: two arguments contradict each other, or the files to write exist already.
    """
    for is_wrong, sentence in (
        (out.suffix != ".csv", f"{out}: the ranking is written as CSV; give a name that ends in .csv"),
        (table is None and offset is not None, "--offset is added to the positions of a table; pass a table too"),
        (
            sites and not propose and not combine,
            "--sites is for proposals and combinations; pass --propose or --combine",
        ),
        (acquisition != "ucb" and not propose, f"--acquisition {acquisition} chooses proposals; pass --propose N too"),
        (acquisition != "ucb" and kappa != KAPPA, f"--kappa has no effect on --acquisition {acquisition}; remove it"),
        (best_singles != FROM and not combine, "--from is the number of substitutions to combine; pass --combine too"),
    ):
        if is_wrong:
            raise UsageError(sentence)
    if baseline is not None and baseline not in (*SHORT, *SHORT.values()):
        raise UsageError(f"--with {baseline}: choose one of {', '.join(SHORT)}")
    baseline = baseline or summary_of(Path(run)).get("ranked_by")  # the choice of task.head auto, if it is a baseline
    method = None if baseline is None else SHORT.get(baseline, baseline)
    check(out, facts_file(out), overwrite=overwrite)
    paths = models_of(run)
    models, known, of_run = _opened(run, paths, method, wild_type, device)
    task = models[0].task
    assert isinstance(task, VariantTask)
    of_one = ("greedy",) if method is None else ("greedy", "ucb")  # what a model without uncertainty can do
    has_deviations = method is None and all(_is_gp(model) for model in models)
    is_sure = method or (len(models) == 1 and not has_deviations)
    if propose is not None and acquisition not in of_one and is_sure:
        raise UsageError(
            f"--propose with --acquisition {acquisition} needs several models, and {method or run} is one; pass the "
            f"run of a cross-validation{', without --with' if method else ''}, or --acquisition greedy"
        )
    # Without a forward pass for each variant, the effects of mutations add up; see `VariantHead` and `log_odds`.
    few_passes = additive = method != FROZEN
    if method is None:
        few_passes = additive = all(model.task.settings.wild_type_alone for model in models)
    if table is not None:
        rows = _of_table(task, known, table, mutant, offset)
    elif all_singles or combine is not None:
        allowed = _allowed(task, known, sites if combine else "all", int(task.facts["offset"]))
        singles = single_substitutions(task.facts["protein"])
        rows = _of_protein(task, known, [single for single in singles if single[0].position in allowed])
    else:
        rows = _of_candidates(task, known, sites, proposals.MOST if few_passes else proposals.MOST_PASSES)
    for notice in rows.notices:
        say(notice)
    predict = _by_models(models) if method is None else _by_baseline(method, models[0], known, device)
    values_MNT, target = predict([*rows.mutations, ()]), task.names[0]
    values_MNT, of_wild_type = values_MNT[:, :-1], float(values_MNT[:, -1, 0].mean())
    sign = -1.0 if target in task.facts["lower_is_better"] else 1.0
    combined: dict[str, Any] | None = None
    if combine is not None:
        best = np.argsort(-sign * values_MNT.mean(0)[:, 0], kind="stable")[:best_singles]
        parts = [rows.mutations[n][0] for n in best]
        most = proposals.MOST_COMBINED if few_passes else proposals.MOST_PASSES
        combinations, values_MNT, combined, notice = proposals.combinations(parts, combine, most, predict, sign)
        rows = replace(_of_protein(task, known, combinations), notices=[*rows.notices, notice])
        say(notice)
    deviation_MN, sd_N = None, None
    if has_deviations:  # of the mean, and of a measurement
        deviation_MN, measurement_MN, values_MNT = values_MNT[..., 1], values_MNT[..., 2], values_MNT[..., :1]
        sd_N = np.sqrt((measurement_MN**2).mean(0) + values_MNT[..., 0].var(0)).astype(np.float64)
    mean_N = np.asarray(values_MNT.mean(0)[:, 0], np.float64)
    order: list[int] = np.argsort(-sign * mean_N, kind="stable").tolist()
    rank_of = {n: str(place) for place, n in enumerate(order, 1)}
    limits, interval, coverage = interval_of(of_run, sd_N)
    facts: dict[str, Any] = {"run": run, "models": len(models), "target": target, "lower_is_better": sign < 0}
    facts |= {"table": None if table is None else str(table), "offset": rows.offset, "verdict": known.verdict}
    facts |= {"device": str(models[0].model.device), "ranked_by": method or "fine-tuned models", "interval": interval}
    facts |= {"additive": additive, "combined": combined}
    facts["wild_type"] = {"measured": float(known.measured.get(name_of(()), "nan")), "predicted": of_wild_type}
    facts["protein"] = None if wild_type is None else str(wild_type)
    not_ranked, messages = sorted(rows.left_out) if propose is None else [], list[str]()
    if propose is not None:
        allowed = _allowed(task, known, sites, rows.offset)
        free = _proposable(known, rows, propose, allowed)
        free_variants = [rows.mutations[n] for n in free]
        best_measured = max((sign * float(value) for value in known.measured.values()), default=np.inf)
        values_MN = sign * values_MNT[:, free, 0]
        how = (kappa, diversity, acquisition, None if deviation_MN is None else deviation_MN[:, free], best_measured)
        order = [free[k] for k in proposals.choose(values_MN, free_variants, propose, *how)]
        facts["proposed"] = {"count": propose, "acquisition": acquisition, "kappa": kappa, "diversity": diversity}
        facts["proposed"]["candidates"] = len(free)
        facts["proposed"]["sites"] = [place + 1 - rows.offset for place in sorted(allowed)]
        messages = [f"how far to trust these proposals: {known.verdict or f'not known, as there is no {SUMMARY}'}"]
        if method is not None and acquisition == "ucb":
            messages.append(f"these proposals are by {method}, which is one model, so --kappa has no effect")
    elif rows.table is not None and target in rows.columns:
        names = [name_of(variant) for variant in rows.mutations]
        facts["compared"], messages = compared(known, names, mean_N, rows.measured(target), target)
    places = [*(rows.rows[n] for n in order), *not_ranked]
    variants, values = [rows.mutations[n] for n in order], values_MNT[:, order]
    if sd_N is not None:
        sd_N, limits = sd_N[order], (limits[0][order], limits[1][order])
    anywhere = sd_N is not None or wild_type is not None  # errors out of fold are then those at new sites
    new = _columns(known, variants, [rank_of[n] for n in order], task.names, values, limits, sd_N, anywhere)
    new = {name: [*cells, *[""] * len(not_ranked)] for name, cells in new.items()}
    if table is not None:
        new[NOT_RANKED] = [rows.left_out.get(row, "") for row in places]
    new |= {} if propose is None else proposals.wells(len(places), rows.columns)
    facts |= {"rows": len(places), "ranked": len(order), "notices": rows.notices}
    write_table(out, {name: [cells[row] for row in places] for name, cells in rows.columns.items()}, new, facts)
    messages.append(coverage)
    if additive and any(len(variant) > 1 for variant in variants):
        messages.append(
            f"{method or 'the model'} adds the effects of mutations, so it knows no epistasis: the best combinations "
            "are those of the best single substitutions"
        )
    if method is None and wild_type is None and (short := better_baseline(summary_of(Path(run)))):
        messages.append(
            f"{SHORT[short]} was better than the fine-tuned models on the test folds: add --with {short} to rank by it"
        )
    for sentence in messages:
        say(sentence)
    return len(places)


def _opened(
    run: str, paths: Sequence[Path], method: str | None, wild_type: Path | None, device: DeviceName
) -> tuple[list[FineTuned], Known, Known]:
    """Open the models of a run, and read what its files say about the variants of the protein to rank, and about all
    variants. If the run learned several proteins, `wild_type` has the protein to rank, and the models become models of
    this protein.
    """
    models = [load_finetuned(str(model), device) for model in paths]
    facts = models[0].task.facts
    if len({(json.dumps(list(map(model.task.facts.get, PROTEINS))), model.task.names) for model in models}) != 1:
        raise InputError(f"{run}: its models have different proteins or targets; repeat the finetune command")
    known = read_known(Path(run), paths, models[0].task.names, method or "predicted")
    if "proteins" not in facts:
        if wild_type is not None:
            raise UsageError("--wild-type is for a run of several proteins, and this run has one; leave it out")
        return models, known, known
    if wild_type is None:
        raise UsageError(f"{run}: learned several proteins; name the protein to rank, as --wild-type wt.fasta")
    if method is not None:
        raise UsageError("--with: the baselines of a run of several proteins rank no other variants; leave it out")
    given = read_wild_type(wild_type)
    of_given: dict[str, Any] = {"protein": given.residues, "breaks": list(given.breaks)}
    of_given |= {"first": 0, "length": len(given.residues), "offset": 0}
    each = [{key: value for key, value in model.task.facts.items() if key != "proteins"} for model in models]
    pairs = zip(models, each, strict=True)
    models = [replace(model, task=VariantTask(model.task.settings, own | of_given)) for model, own in pairs]
    names = [name for name, text in facts["proteins"].items() if text == given.mutated(())]
    return models, known.of_proteins(names), known


def _of_protein(task: VariantTask, known: Known, variants: Sequence[Variant]) -> VariantRows:
    """Return a table of the variants that change only residues that the model reads, from and to the 20 amino acids."""
    offset = int(task.facts["offset"])
    rows = listed(task.facts["protein"], [variant for variant in variants if _inside(task, variant)])
    rows = rows.leave_out(not_of_the_20, "not ranked")
    kept = rows.mutations
    columns = {"mutant": [name_of(variant) for variant in kept]}
    if offset:
        columns[IN_TABLE] = [name_of(renumbered(variant, -offset)) for variant in kept]
    columns["measured"] = [known.measured.get(name, "") for name in columns["mutant"]]
    return replace(rows, columns=columns, rows=list(range(len(kept))), left_out={}, offset=offset)


def _of_table(task: VariantTask, known: Known, path: Path, mutant: str | None, offset: int | None) -> VariantRows:
    """Read the variants of the table at `path`. By default this table and the run's table have the same numbering."""
    of_run = int(task.facts["offset"])
    protein, indels = task.facts["protein"], task.reads_whole
    try:
        rows = read_rows(path, protein, mutant, of_run if offset is None else offset, indels=indels)
    except UsageError:
        if offset is not None:
            raise
        rows = read_rows(path, protein, mutant, 0, indels=indels)  # a table of whole sequences has no positions
    if rows.offset or offset not in (None, of_run):
        rows.notices.append(f"{path}: positions were shifted by {rows.offset:+d}, but the run's table by {of_run:+d}")
    if rows.offset:
        names = dict(zip(rows.rows, map(name_of, rows.mutations), strict=True))
        rows.columns[IN_WILD_TYPE] = [names.get(row, "") for row in range(len(names) + len(rows.left_out))]
    wild_type = known.measured.get(name_of(()))

    def why(variant: Variant) -> str:
        if not variant and wild_type is not None:
            return f"it is the wild type, whose measured value is {wild_type}"
        return "" if _inside(task, variant) else "it changes a residue that the model does not read"

    rows = rows.leave_out(why, f"{path}: not ranked")
    if not rows.mutations:
        reasons = list(dict.fromkeys(rows.left_out.values()))
        raise InputError(f"{path}: no row can be ranked, as {first_three(reasons, str)}; give other variants")
    return rows


def _of_candidates(task: VariantTask, known: Known, sites: str | None, most: int) -> VariantRows:
    if sites == "all" and is_library(known.variants):
        raise UsageError("--sites all: too many combinations; pass a few sites, as 39,40,41, or add --all-singles")
    allowed = _allowed(task, known, sites, int(task.facts["offset"]))
    variants, notice = proposals.candidates(task.facts["protein"], allowed, known.variants, most)
    rows = _of_protein(task, known, variants)
    return replace(rows, notices=[*rows.notices, notice])


def _allowed(task: VariantTask, known: Known, sites: str | None, offset: int) -> Collection[int]:
    """Convert the argument `sites` of `rank` to positions, counted from 0, which proposed variants may change."""
    length = len(task.facts["protein"])
    if sites is None:
        return known.sites or range(length)
    return positions(sites, length, offset)


def _inside(task: VariantTask, variant: Variant) -> bool:
    """Return whether all changes of a variant lie in the part of the protein that the model reads."""
    first, length = int(task.facts["first"]), int(task.facts["length"])
    return all(first <= mutation.position < first + length for mutation in variant)


def _columns(
    known: Known,
    variants: Sequence[Variant],
    ranks: list[str],
    targets: Sequence[str],
    values_MNT: npt.NDArray[np.float32],
    limits: tuple[Array, Array],
    sd_N: Array | None = None,
    anywhere: bool = False,
) -> dict[str, list[str]]:
    """Return the columns that are added to the table of N ranked variants.

    These are `prediction` (the mean over the models, in the unit of the target), two columns with the limits of the
    prediction's interval, `disagreement of models` and `rank`. Then come `out-of-fold prediction` (by models that were
    not trained on the variant), `seen in training` and `sites varied in training` (yes or no). With several targets,
    names of prediction columns end with the target's name. Rank and interval belong to the first target. `sd_N`, the
    standard deviations that a Gaussian process expects of measurements, becomes the column PREDICTIVE. Unless
    `anywhere` is true, only variants that are like the measured ones get limits.
    """
    names = [name_of(variant) for variant in variants]
    varied = [all(mutation.position in known.sites for mutation in variant) for variant in variants]
    most = max(map(len, known.variants), default=0)
    like = [is_varied and len(variant) <= most for is_varied, variant in zip(varied, variants, strict=True)]
    mean_NT = values_MNT.mean(0)
    sd_NT = values_MNT.std(0, ddof=1) if len(values_MNT) > 1 else np.full_like(mean_NT, np.nan)
    new: dict[str, list[str]] = {}
    keys = [f" {name}" if len(targets) > 1 else "" for name in targets][: mean_NT.shape[1]]
    for t, key in enumerate(keys):
        new[f"prediction{key}"] = list(map(text, mean_NT[:, t]))
        for limit, by in zip((LOW, HIGH), limits, strict=True) if t == 0 else ():
            ends = zip((mean_NT[:, 0] + by).tolist(), like, strict=True)
            new[f"{limit}{key}"] = [text(end) if is_like or anywhere else "" for end, is_like in ends]
        new[f"{DISAGREEMENT}{key}"] = list(map(text, sd_NT[:, t]))
    if sd_N is not None:
        new[PREDICTIVE] = list(map(text, sd_N))
    new["rank"] = ranks
    for t, key in enumerate(keys):
        values = [known.out_of_fold[name][t] if name in known.out_of_fold else np.nan for name in names]
        new[f"{OUT_OF_FOLD}{key}"] = list(map(text, values))
    new[SEEN] = ["" if known.seen is None else "yes" if name in known.seen else "no" for name in names]
    new[VARIED] = ["" if not known.sites else "yes" if is_varied else "no" for is_varied in varied]
    return new


def _proposable(known: Known, rows: VariantRows, count: int, allowed: Collection[int]) -> list[int]:
    """Return the indices of distinct variants that were not measured and change only `allowed` positions."""
    number_of = {variant: n for n, variant in reversed(list(enumerate(rows.mutations)))}  # rows may have equal variants
    new = [variant for variant in number_of if variant and name_of(variant) not in known.measured]
    free = sorted(number_of[variant] for variant in new if all(mutation.position in allowed for mutation in variant))
    if len(free) < count:
        raise UsageError(
            f"--propose {count}: only {len(free):,} of the variants at these sites have not been measured; pass "
            f"--propose {len(free)} at most, more sites to --sites, a longer table, or a higher --from with --combine"
        )
    if len(free) < len(new):
        say(f"not proposed: {counted(len(new) - len(free), 'variant')} at other sites; --sites allows other sites")
    return free


def interval_of(known: Known, sd_N: Array | None = None) -> tuple[tuple[Array, Array], dict[str, Any], str]:
    """Return the lower and upper limit of prediction errors, facts for a JSON file, and a sentence about the coverage.

    A prediction of the first target plus the two limits is its interval. If a Gaussian process expects measurements
    with the standard deviations `sd_N`, the limits belong to its normal distributions [N]. Otherwise they are numbers:
    the 5% and 95% quantiles of the out-of-fold errors, corrected for the number of errors (split conformal; Vovk et al.
    2005, Algorithmic Learning in a Random World). They hold for variants that are like the measured variants. They are
    NaN with fewer than RESIDUALS errors, or with one fold. The coverage of each fold is measured with limits from the
    other folds.
    """
    if sd_N is not None:
        half_N = float(ndtri((1 + LEVEL) / 2)) * sd_N
        tested = [name for name in known.deviation if name in known.measured]
        errors = [abs(float(known.measured[name]) - known.out_of_fold[name][0]) for name in tested]
        share = coverage(np.array(errors), np.array([known.deviation[name] for name in tested]), LEVEL)
        held = f"such intervals contained {share:.0%} of {len(tested):,} measured values out of fold"
        facts: dict[str, Any] = {"level": LEVEL, "predictions_out_of_fold": len(tested), "coverage": share}
        return (-half_N, half_N), facts, f"{LOW} and {HIGH}: of the Gaussian process; {held if tested else 'untested'}"
    names = [name for name in known.out_of_fold if name in known.measured and name in known.fold]
    error_N = np.array([float(known.measured[name]) - known.out_of_fold[name][0] for name in names])
    fold_N = np.array([known.fold[name] for name in names])[~np.isnan(error_N)]
    error_N = error_N[~np.isnan(error_N)]
    facts = {"level": LEVEL, "predictions_out_of_fold": len(error_N), "coverage": None}
    folds = np.unique(fold_N).tolist()
    if len(folds) < 2 or len(error_N) < RESIDUALS:
        size = f"{counted(len(error_N), 'variant')} in {counted(len(folds), 'fold')}"
        facts["why"] = (
            f"intervals need {RESIDUALS} measured variants with out-of-fold predictions, in two folds or more; the run "
            f"has {size}"
        )
        return (np.array(np.nan), np.array(np.nan)), facts, f"no {LOW} and {HIGH}: {facts['why']}"
    held_N = np.zeros(len(error_N), dtype=bool)
    for fold in folds:
        low, high = _error_limits(error_N[fold_N != fold])
        held_N[fold_N == fold] = (low <= error_N[fold_N == fold]) & (error_N[fold_N == fold] <= high)
    facts["coverage"] = float(held_N.mean())
    each = facts["coverage_of_each_fold"] = {str(fold): float(held_N[fold_N == fold].mean()) for fold in folds}
    sentence = (
        f"{LOW} and {HIGH}: limits from the other folds contained {held_N.mean():.0%} of {len(error_N):,} measured "
        f"values ({min(each.values()):.0%} to {max(each.values()):.0%} in each fold)"
    )
    return _error_limits(error_N), facts, sentence


def _error_limits(error_N: Array) -> tuple[Array, Array]:
    """Return limits that contain a share LEVEL of future errors, if future and given errors are exchangeable."""
    count = len(error_N)
    above = min(int(np.ceil((count + 1) * (1 + LEVEL) / 2)), count)
    sorted_N = np.sort(error_N)
    return sorted_N[count - above], sorted_N[above - 1]


# Predictions


def predictions(finetuned: FineTuned, mutations: Sequence[Variant]) -> npt.NDArray[np.float32]:
    """Predict T targets of N variants with one model, float32 [N, T], or with head `gp` the result of
    `VariantTask.with_deviations`, [N, 3]. `InputError` if a variant cannot be predicted.
    """
    task, values = finetuned.task, list[npt.NDArray[np.float32]]()
    assert isinstance(task, VariantTask)
    examples = _examples(task, mutations)
    # Batches are large, since each batch also computes the wild type. With pool `wild_type` a variant costs almost
    # nothing, so it counts as one token.
    tokens_N = np.ones_like(examples.tokens) if task.settings.wild_type_alone else examples.tokens
    convert = task.with_deviations if task.settings.head == "gp" else task.predict
    results = heads.predictions(finetuned, tokens_N, lambda n: task.question(examples.get(n)), heads.TOKENS, convert)
    with Progress("predict", len(examples)) as progress:
        for value in results:
            if isinstance(value, str):
                raise InputError(f"{name_of(mutations[len(values)])}: {value}")
            values.append(value)
            progress.update(len(values), "variants")
    return np.stack(values)


def _by_models(models: Sequence[FineTuned]) -> Callable[[Sequence[Variant]], npt.NDArray[np.float32]]:
    """Return a function that predicts T targets of N variants with M models, float32 [M, N, T]; with Gaussian processes
    alone the last dimension is that of `predictions`.
    """
    columns = None if all(map(_is_gp, models)) else len(models[0].task.names)
    return lambda variants: np.stack([predictions(model, variants)[:, :columns] for model in models])


def _is_gp(model: FineTuned) -> bool:
    return isinstance(model.task, VariantTask) and model.task.settings.head == "gp"


def _by_baseline(
    name: str, finetuned: FineTuned, known: Known, device: DeviceName
) -> Callable[[Sequence[Variant]], npt.NDArray[np.float32]]:
    """Fit a baseline, and return a function that predicts the first target of N variants, float32 [1, N, 1].

    `finetuned` is any model of the run. The baseline is fitted to at most `VariantTask.baseline_records` measured
    variants, as in the cross-validation.
    """
    task, target = finetuned.task, finetuned.task.names[0]
    assert isinstance(task, VariantTask)
    measured = {parse_variant(variant): float(value) for variant, value in known.measured.items()}
    measured = {variant: value for variant, value in measured.items() if _inside(task, variant)}
    if len(set(measured.values())) < 2:
        raise InputError(f"--with {name}: the run has no measured variants; name the directory of a cross-validation")
    if name not in (ONE_HOT, FROZEN) and not task.settings.zero_shot:
        raise InputError(
            f"--with {name}: the run has no zero-shot scores (task.zero_shot is false); choose one-hot or embedding"
        )
    values = list(measured.values())
    scale = fit_scale(np.array(values), task.facts["scales"][0]["kind"])
    facts = {"targets": [target], "scales": [asdict(scale)]}
    facts |= {"lower_is_better": [target] if target in task.facts["lower_is_better"] else []}
    task = VariantTask(task.settings, dict(task.facts) | facts).uncalibrated()
    base = None if name == ONE_HOT else load_base(Recipe.model_validate(finetuned.about["recipe"]), task, device)
    train = _examples(task, list(measured))
    sampled = range(0, len(train), -(-len(train) // task.baseline_records))
    labelled = [replace(train.get(n), labels={"target": np.array([values[n]], np.float32)}) for n in sampled]
    fitted = task.baselines(labelled, base, name)

    def predict(variants: Sequence[Variant]) -> npt.NDArray[np.float32]:
        predicted, examples = list[np.float32](), _examples(task, variants)
        with Progress("predict", len(examples)) as progress:
            for first in range(0, len(examples), 1000):
                part = [examples.get(n) for n in range(first, min(first + 1000, len(examples)))]
                outputs = task.baseline_outputs(part, fitted, base)[name]
                predicted += [task.predict(np.asarray(output))[0] for output in outputs]
                progress.update(first + len(part), "variants")
        return np.array(predicted, np.float32)[None, :, None]

    return predict


def _examples(task: VariantTask, variants: Sequence[Variant]) -> Examples:
    records = VariantRecords(Path("variants"), task.wild_types, list(variants), linker=int(task.facts["linker"]))
    return Examples("input", records.path, records, None)


def compared(
    known: Known, names: Sequence[str], predicted_N: Array, measured_N: Array, target: str
) -> tuple[dict[str, Any], list[str]]:
    """Compare predictions of N variants with measured values. Return facts for a JSON file, and messages for the user.

    `measured_N` is NaN for a variant without a value. Variants that were used in training are compared by their
    out-of-fold predictions, in each fold separately. Other variants are compared by `predicted_N`, the means over all
    models.
    """
    has_N = ~np.isnan(measured_N)
    facts: dict[str, Any] = {"target": target, "rows_with_values": int(has_N.sum())}
    facts |= {"seen_in_training": None, "unseen": None}
    if known.seen is None:
        facts["why"] = f"Spearman with {target}: unknown, since the run has no list of its training rows"
        return facts, [facts["why"]]

    def spearman(rows_K: list[int], values_K: Array, fold_K: npt.NDArray[np.int64] | None) -> tuple[Any, str]:
        variants = [parse_variant(names[n]) for n in rows_K]
        rho, unit = variant_spearman(values_K, measured_N[rows_K], variants, fold_K)
        return asdict(rho), f"{spearman_sentence(rho, target, unit)} over {counted(len(rows_K), 'row')}"

    messages, seen_N = list[str](), np.array([name in known.seen for name in names], dtype=bool)
    if seen_K := np.flatnonzero(seen_N & has_N).tolist():
        tested = [n for n in seen_K if not np.isnan(known.out_of_fold.get(names[n], [np.nan])[0])]
        values, sentence = None, f"Spearman with {target}: no out-of-fold prediction"
        if tested:
            out_of_fold = np.array([known.out_of_fold[names[n]][0] for n in tested])
            values, sentence = spearman(tested, out_of_fold, np.array([known.fold[names[n]] for n in tested]))
        messages.append(f"{sentence} of {len(seen_K):,} in training, with out-of-fold predictions and within folds")
        facts["seen_in_training"] = {"rows": len(seen_K), "rows_out_of_fold": len(tested)}
        facts["seen_in_training"]["spearman_out_of_fold"] = values
    if new_K := np.flatnonzero(~seen_N & has_N).tolist():
        trained = {mutation.position for name in known.seen for mutation in parse_variant(name)}
        varied = sum(all(mutation.position in trained for mutation in parse_variant(names[n])) for n in new_K)
        values, sentence = spearman(new_K, predicted_N[new_K], None)
        messages.append(f"{sentence} that are not in training; {varied:,} change only sites that training varied")
        facts["unseen"] = {"rows": len(new_K), "rows_at_varied_sites": varied, "spearman": values}
    return facts, messages
