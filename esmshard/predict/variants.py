"""Ranks variants by fine-tuned models or a baseline, with intervals, and proposes variants to measure."""

import csv
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from esmshard.data.batching.loader import SEEN as SEEN_FILE
from esmshard.data.batching.loader import Examples
from esmshard.data.mutations import Mutation, name_of, parse_variant, renumbered
from esmshard.data.splits.variant_records import OUT_OF_FOLD as OUT_OF_FOLD_FILE
from esmshard.data.splits.variant_records import VariantRecords
from esmshard.data.variants import is_library, read_variants, read_wild_type
from esmshard.devices import DeviceName
from esmshard.errors import InputError, UsageError, reading, writing
from esmshard.io.paths import read_json, replace_json, without_directories
from esmshard.io.tables import Table, counted, first_three
from esmshard.io.writers import TableWriter, check, facts_file, text
from esmshard.predict import heads, proposals
from esmshard.predict.proposals import DIVERSITY, FROM, KAPPA, Acquisition
from esmshard.progress import Progress, say
from esmshard.recipe.sections import Recipe
from esmshard.tasks.finetuned import FineTuned, load_base, load_finetuned
from esmshard.tasks.metrics import LEAST, PREDICTIVE, Interval, coverage, variant_spearman
from esmshard.tasks.registry import traits
from esmshard.tasks.variant_baselines import FROZEN, ONE_HOT, SHORT
from esmshard.tasks.variants import VariantTask, fit_scale
from esmshard.vocab import STANDARD

Array = npt.NDArray[np.float64]
Variant = tuple[Mutation, ...]

SUMMARY = "summary.json"
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


# Tables of variants


@dataclass(frozen=True)
class VariantRows:
    """N variants of a protein, read from N of the R rows in a table."""

    protein: str
    columns: dict[str, list[str]]  # the columns of the table by name; each column has R cells
    mutations: list[Variant]  # the mutations of each variant, without synonymous changes
    rows: list[int]  # the index of each variant's row in the table, from 0
    left_out: dict[int, str]  # by the index of a row without a usable variant: the reason why
    notices: list[str]
    offset: int  # the number that was added to the table's positions to fit the wild type
    table: Table | None = None

    def leave_out(self, why: Callable[[Variant], str], what: str) -> "VariantRows":
        """Return a copy without the variants for which `why` returns a reason. The last notice of the copy begins with
        `what` and tells the reasons.
        """
        variant_of = dict(zip(self.rows, self.mutations, strict=True))
        reasons = {row: reason for row, variant in variant_of.items() if (reason := why(variant))}
        if not reasons:
            return self
        kept = {row: variant for row, variant in variant_of.items() if row not in reasons}
        places = f" ({first_three(list(reasons), self.table.at)})" if self.table else ""
        because = first_three(list(dict.fromkeys(reasons.values())), str)
        notices = [*self.notices, f"{what}: {counted(len(reasons), 'variant')}{places}, as {because}"]
        rows, mutations, left_out = list(kept), list(kept.values()), self.left_out | reasons
        return replace(self, rows=rows, mutations=mutations, left_out=left_out, notices=notices)

    def measured(self, column: str) -> Array:
        """Return the number that each variant has in the given column, float64 [N]; NaN for an empty cell."""
        assert self.table is not None
        return self.table.numbers(column)[self.rows]


def listed(protein: str, variants: Sequence[Variant]) -> VariantRows:
    """Return a table with a row for each of the given variants, which do not come from a file."""
    columns = {"mutant": [name_of(variant) for variant in variants]}
    return VariantRows(protein, columns, list(variants), list(range(len(variants))), {}, [], 0)


def read_rows(
    path: Path, protein: str | Path, mutant: str | None, offset: int | Literal["auto"], *, indels: bool = False
) -> VariantRows:
    """Read the variants of a table. Equal variants are not merged, and unusable rows are left out (`read_variants`)."""
    rules: Any = {"unusable": "drop", "keep_synonymous": True, "replicates": "keep", "indels": indels}
    read = read_variants(path, wild_type=protein, mutant=mutant, targets=None, offset=offset, **rules)
    mutations = [tuple(m for m in variant if m.mutant != m.wild) for variant in read.mutations]
    rows, columns = [row for (row,) in read.rows], dict(read.table.columns)
    return VariantRows(read.wild_type, columns, mutations, rows, read.left_out, read.notices, read.offset, read.table)


def single_substitutions(protein: str) -> list[Variant]:
    """Return all single substitutions of residues by one of the 20 amino acids, sorted by position and then letter."""
    return [(Mutation(n, wild, to),) for n, wild in enumerate(protein) for to in STANDARD if to != wild]


def not_of_the_20(variant: Variant) -> str:
    """Return the reason why a variant cannot be scored, or an empty text.

    Language models hardly ever predict letters other than the 20 amino acids, so log p(mutant) - log p(X) would be high
    for every mutant.

    >>> not_of_the_20((Mutation(10, "X", "L"),))
    'the wild type has X at residue 11, which is none of the 20 amino acids'
    """
    for mutation in variant:
        if mutation.wild not in STANDARD:
            site = f"{mutation.wild} at residue {mutation.position + 1}"
            return f"the wild type has {site}, which is none of the 20 amino acids"
        if not set(mutation.mutant) <= set(STANDARD):
            return f"{mutation} puts {mutation.mutant} at the site, which is none of the 20 amino acids"
    return ""


def check_new(out: Path, columns: Mapping[str, object], new: Collection[str]) -> None:
    """Refuse to add columns with the names `new` to a table that already has one of these names."""
    if twice := [name for name in new if name in columns]:
        raise InputError(f"{out}: the table has a column '{twice[0]}' already; rename it in the input")


def write_table(
    out: Path, columns: dict[str, list[str]], new: Mapping[str, Sequence[str]], facts: Mapping[str, Any]
) -> None:
    """Write a table with `new` columns at its end, and write `facts` to the table's JSON file (`facts_file`)."""
    check_new(out, columns, new)
    cells = {**columns, **new}
    quoted = any("\r" in cell for name, column in cells.items() for cell in (name, *column))
    with writing(out), TableWriter(out, dict.fromkeys(cells, "string"), quoted=quoted) as writer:
        writer.add(cells)
        replace_json(facts_file(writer.work), without_directories(facts))


# The records of a run about variants


@dataclass(frozen=True)
class Known:
    """What the files of a run say about variants. Variants are named in the numbering of the wild type."""

    measured: Mapping[str, str]  # the first target's measured value for each variant, as text
    out_of_fold: Mapping[str, Sequence[float]]
    """For each variant, the predictions of T targets by models that were not trained on the variant."""
    fold: Mapping[str, int]  # the fold in which each variant of `out_of_fold` was tested
    deviation: Mapping[str, float]
    """For the head `gp`: the standard deviations that were expected of measurements out of fold, by variant."""
    seen: frozenset[str] | None
    """The variants that were used to train or select at least one model; None if a model has no list of them."""
    verdict: str | None
    """The run's sentence on whether fine-tuning was better than the best baseline; None before the run is finished."""

    def of_proteins(self, names: Collection[str]) -> "Known":
        """Return what is known about the variants of one protein. `names` are its names in a table of several proteins,
        which the names of variants then lack.
        """

        def part(values: Mapping[str, Any]) -> dict[str, Any]:
            return {of[1]: value for name, value in values.items() if (of := name.rpartition("/")[::2])[0] in names}

        seen = None if self.seen is None else frozenset(part(dict.fromkeys(self.seen)))
        found = replace(self, measured=part(self.measured), out_of_fold=part(self.out_of_fold), seen=seen)
        return replace(found, fold=part(self.fold), deviation=part(self.deviation))

    @cached_property
    def variants(self) -> list[Variant]:
        """The variants that were measured or used in training."""
        return [parse_variant(name) for name in dict.fromkeys([*self.measured, *sorted(self.seen or ())])]

    @cached_property
    def sites(self) -> frozenset[int]:
        """The positions, counted from 0, that at least one variant in `variants` changes."""
        return frozenset(mutation.position for variant in self.variants for mutation in variant)


def models_of(run: str) -> list[Path]:
    """Return the paths of the models of task `variant` in the directory `run` of a cross-validation, a run or a model.
    If there are none, return []. Raises `InputError` if a cross-validation lacks a model.
    """
    path = Path(run)
    if traits((summary := _summary(path)).get("task")).reads_table:
        models = [path / name / "model" for name in summary["runs"]]
        if missing := [model for model in models if not (model / "esmshard.json").is_file()]:
            raise InputError(f"{missing[0]}: there is no model; repeat the finetune command with --resume auto")
        return models
    for model in (path / "model", path):
        if (about := model / "esmshard.json").is_file():
            with reading(str(about), "consolidate the run again"):
                recipe = read_json(about).get("recipe", {"task": {"name": None}})  # a converted model has no recipe
                return [model] if traits(recipe["task"]["name"]).reads_table else []
    return []


def _summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = read_json(run / SUMMARY) if (run / SUMMARY).is_file() else {}
    return summary


def read_known(run: Path, models: Sequence[Path], targets: Sequence[str], method: str = "predicted") -> Known:
    """Read what the files of a run and of its models say about variants. With `method` = `predicted`, `out_of_fold` has
    predictions of the models; with the name of a baseline, its predictions of the first target.
    """
    files = [model / SEEN_FILE for model in models]
    trained_on = None
    if all(file.is_file() for file in files):
        trained_on = frozenset(name for file in files for name in file.read_text(encoding="utf-8").splitlines())
    rows = rows_of_run(run)
    columns = [f"{method} {name}" if len(targets) > 1 else method for name in targets]
    columns = columns if method == "predicted" else columns[:1]
    tested = [row for row in rows if any(row.get(column) for column in columns)]
    return Known(
        {row["variant"]: row["measured"] for row in rows if row["measured"]},
        {row["variant"]: [float(row[column] or "nan") for column in columns] for row in tested},
        {row["variant"]: int(row["fold"]) for row in tested if row["fold"]},
        {row["variant"]: float(row[PREDICTIVE]) for row in tested if row.get(PREDICTIVE)},
        trained_on,
        _summary(run).get("verdict"),
    )


def rows_of_run(run: Path) -> list[dict[str, str]]:
    """Read the rows with a variant from the file `variants.csv` of a run; return an empty list without this file.

    Only the columns that the run added after the columns of the user's table are returned. If the user's table has the
    same names, the file has a prefix before the added names. The prefix is removed.
    """
    if not (path := run / OUT_OF_FOLD_FILE).is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        head, *body = csv.reader(file)
    prefix = ""
    while f"esmshard {prefix}variant" in head:
        prefix += "esmshard "
    first = len(head) - 1 - head[::-1].index(f"{prefix}variant")
    names = [name.removeprefix(prefix) for name in head[first:]]
    return [dict(zip(names, row[first:], strict=True)) for row in body if row[first]]


def better_baseline(summary: Mapping[str, Any]) -> str | None:
    """Return the short name of the best baseline that was better than the fine-tuned model, or None.

    `summary` is the content of `summary.json`. A baseline was better if the interval of the difference (model minus
    baseline) is below 0. Without an interval, the difference itself must be below 0.
    """
    scores = summary.get("joint", {})
    better = {
        short: scores["metrics"][name]["value"]
        for short, name in SHORT.items()
        if (gain := scores.get("differences", {}).get(name))
        and ((gain["value"] if gain["high"] is None else gain["high"]) or 0.0) < 0
    }
    return max(better, key=better.__getitem__, default=None)


# The ranking


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
    differently, there is also IN_WILD_TYPE or IN_TABLE. Then come the columns from `_columns`, and for a table
    `not ranked because`. Rows that cannot be used are at the end, without ranks. If the wild type was measured, rows of
    the wild type (`WT`, or a synonymous change) are not ranked, since their value is known.

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
    baseline = baseline or _summary(Path(run)).get("ranked_by")  # the choice of task.head auto, if it is a baseline
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
    facts |= {"rows": len(places), "ranked": len(order), "notices": rows.notices}
    write_table(out, {name: [cells[row] for row in places] for name, cells in rows.columns.items()}, new, facts)
    messages.append(coverage)
    if additive and any(len(variant) > 1 for variant in variants):
        messages.append(
            f"{method or 'the model'} adds the effects of mutations, so it knows no epistasis: the best combinations "
            "are those of the best single substitutions"
        )
    if method is None and wild_type is None and (short := better_baseline(_summary(Path(run)))):
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


def positions(sites: str, length: int, offset: int = 0) -> Collection[int]:
    """Convert `--sites`, such as `39,40,41` or `all`, to positions of a protein, counted from 0. `offset` is added."""
    if sites == "all":
        return range(length)
    try:
        places = {int(word) - 1 + offset for word in sites.split(",")}
    except ValueError:
        raise UsageError(f"--sites {sites}: is not a list of positions; pass positions as 39,40,41, or all") from None
    if missing := [place + 1 - offset for place in sorted(places) if not 0 <= place < length]:
        numbers = f"residues have the numbers {1 - offset} to {length - offset}"
        raise UsageError(f"--sites {sites}: {missing[0]} is not in the wild type, whose {numbers}")
    return places


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


def spearman_sentence(rho: Interval, target: str, unit: str) -> str:
    """Return a text about Spearman's correlation: its value and interval, or the reason why it is undefined."""
    if np.isnan(rho.value):
        return f"Spearman with {target} undefined: it needs two different values and two different predictions"
    note = f"no interval, which needs {LEAST} {unit}s" if np.isnan(rho.low) else f"95% over {unit}s"
    return f"Spearman with {target} {rho} ({note})"
