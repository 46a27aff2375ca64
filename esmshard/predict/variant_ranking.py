"""Ranks variants by the predictions of fine-tuned models or of a baseline, with intervals, and proposes variants to
measure next.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples
from esmshard.data.splits.variant_records import VariantRecords
from esmshard.data.variants.mutations import is_library
from esmshard.data.variants.substitutions import Mutation, name_of, parse_variant, renumbered
from esmshard.devices import DeviceName, packs_at_once, side_by_side
from esmshard.errors import InputError, UsageError, reading
from esmshard.io.tables import counted, first_three
from esmshard.io.writers import check, text
from esmshard.predict import known_variants, proposals, variant_tables
from esmshard.predict.known_variants import Known, baseline_of, baseline_predictions, better_baseline
from esmshard.predict.language_models import check_finite
from esmshard.predict.proposals import DIVERSITY, KAPPA
from esmshard.predict.zero_shot import all_singles as list_singles
from esmshard.predict.zero_shot import unscored
from esmshard.progress import Progress, say
from esmshard.tasks.finetuned import FineTuned, load_finetuned
from esmshard.tasks.registry import traits
from esmshard.tasks.variant_features import PACKED
from esmshard.tasks.variants import FROZEN, SHORT, VariantTask

NOT_RANKED = "not ranked because"
"""The last column of a ranked table: why a row has no rank."""
IN_TABLE, IN_WILD_TYPE = "mutant in table", "mutant in wild type"
"""The columns of names in the other numbering, if the table of the run and its wild type are numbered differently."""
OUT_OF_FOLD, SEEN, VARIED = "out-of-fold prediction", "seen in training", "sites varied in training"
DISAGREEMENT = "disagreement of models"
"""The standard deviation over the models of folds and seeds, in the unit of the target. It is no error bar."""
LEVEL, RESIDUALS = 0.9, 50
"""The share of the values that an interval is to hold, and the least residuals that intervals are made of."""
LOW, HIGH = f"low {LEVEL:.0%}", f"high {LEVEL:.0%}"
TOGETHER = 2048
"""The number of variants that one pass of the wild type serves."""


@dataclass(frozen=True)
class RankingRequest:
    """N variants to rank, and rows that cannot be ranked."""

    columns: dict[str, list[str]]
    """The columns of the output, with the N variants first."""
    mutations: list[tuple[Mutation, ...]]
    """The mutations of each variant, without synonymous changes."""
    not_ranked: list[str]
    """The reason why each row after the variants is not ranked."""
    values_N: npt.NDArray[np.float64] | None
    """The measured values of the first target, if the table has this column; NaN where a cell has none."""
    offset: int
    """The number that was added to the positions of the table."""
    notices: list[str]
    about: str | None = None
    """What the variants are, if they are candidates that nobody listed."""


def models_of(run: str) -> list[Path]:
    """Return the models of a cross-validation of variants, of a single run, or the model itself; none for another task.

    Raises:
        InputError: runs of the cross-validation have no model yet.
    """
    path = Path(run)
    summary = known_variants.json_of(path / known_variants.SUMMARY)
    if summary is not None and traits(summary.get("task")).reads_table:
        with reading(f"{path / 'summary.json'}", "repeat its finetune command with --resume auto"):
            found = [path / name / "model" for name in summary["runs"]]
        missing = [model for model in found if not (model / "esmshard.json").is_file()]
        if missing:
            raise InputError(f"{missing[0]}: there is no model; repeat the finetune command with --resume auto")
        return found
    for model in (path / "model", path):
        about = known_variants.json_of(model / "esmshard.json")
        with reading(f"{model / 'esmshard.json'}", "consolidate the run again"):
            if about is not None and traits(about.get("recipe", {}).get("task", {}).get("name")).reads_table:
                return [model]
    return []


def predict(
    run: str,
    table: Path | None,
    out: Path,
    *,
    mutant: str | None = None,
    offset: int | None = None,
    propose: int | None = None,
    kappa: float = KAPPA,
    diversity: float = DIVERSITY,
    sites: str | None = None,
    baseline: str | None = None,
    all_singles: bool = True,
    device: DeviceName = None,
    overwrite: bool = False,
) -> int:
    """Rank variants, best first, write a CSV file, and return the number of rows. A JSON file beside it records how it
    was made, and how far it can be trusted.

    The first columns are those of `table`, or `mutant` and `measured` of all single substitutions; then the names in
    the other numbering, if table and wild type are numbered differently; then `prediction` (mean over the models, in
    the unit of the target), the limits of its interval (see `_Intervals`), the disagreement of the models (standard
    deviation over folds and seeds) and `rank`; then `out-of-fold prediction` (by the models that had not seen the
    variant), `seen in training` and `sites varied in training` (yes or no); for a table also `not ranked because`. With
    several targets, prediction columns carry the target's name, and rank and interval are those of the first target.
    Rows of the table that cannot be used are at the end, without these values.

    If the wild type was measured, a row that is the wild type (`WT`, or a synonymous change) is not predicted, since
    its value is known.

    Args:
        run: a run of task `variant`; see `models_of`.
        table: table of variants to rank; None for all single substitutions.
        out: a `.csv` file.
        mutant: column of the mutations.
        offset: number added to the positions of `table`; by default the offset of the run's own table.
        propose: write only so many rows, chosen by `proposals.choose` among variants that were not measured.
        kappa: see `proposals.choose`.
        diversity: see `proposals.choose`.
        sites: the sites that proposals may change: positions in the numbering of the table, divided by commas, or
            `all`; by default those that the training has varied.
        baseline: rank by this baseline (`known_variants.baseline_of`), fitted to all measured variants of the run.
        all_singles: without a table, rank all single substitutions; otherwise the candidates of
            `proposals.candidates`.
        device: see `chosen_device`.
        overwrite: replace `out`.

    Raises:
        InputError: the run or table cannot be used, or the table does not fit the numbering.
        UsageError: arguments contradict each other, or files exist.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: variants are ranked in a .csv file; give it that ending")
    if table is None and offset is not None:
        raise UsageError("--offset is added to the positions of a table, and all single substitutions have none")
    if sites is not None and propose is None:
        raise UsageError("--sites names the sites that proposals may change; pass --propose N as well")
    method = None if baseline is None else baseline_of(baseline)
    check(out, variant_tables.facts_file(out), overwrite=overwrite)
    paths = models_of(run)
    models = [load_finetuned(str(model), device) for model in paths]
    task = _same_task(run, models)
    known = known_variants.read(Path(run), paths, task.names)
    own = _OwnVariants(task, known)
    if table is not None:
        request = _of_table(task, known, table, mutant, offset)
    elif all_singles:
        request = _listed(task, known, list_singles(str(task.facts["protein"])))
    else:
        request = _candidates(task, known, own, sites, method)
    for notice in request.notices:
        say(notice)
    sign = -1.0 if task.names[0] in task.facts["lower_is_better"] else 1.0
    if method is None:
        scores_MNT = np.stack([predictions(model, [*request.mutations, ()]) for model in models])
        scores = _Predictions(scores_MNT[:, :-1], float(scores_MNT[:, -1, 0].mean()), sign, len(task.names))
        check_finite(np.moveaxis(scores.values_MNT, 1, -1), run)
    else:
        values_N = baseline_predictions(method, models[0], own.measured, [*request.mutations, ()], device)
        scores = _Predictions(values_N[None, :-1, None], float(values_N[-1]), sign, 1)
        baseline_values = known.baselines.get(method, {})
        known = replace(known, out_of_fold={name: [value] for name, value in baseline_values.items()}, baselines={})
    intervals = _Intervals(known, own)
    ranking = _Ranking(task, known, own, request, scores, intervals)
    if propose is None:
        rows = ranking.every_row(of_table=table is not None)
    else:
        if len(models) < 2 and method is None:
            raise UsageError(f"--propose needs several models, and {run} has one; pass the run of a cross-validation")
        rows = ranking.proposed(own.allowed(sites, request.offset), propose, kappa, diversity)
        if method is not None:
            rows.messages.append(f"these proposals are by {method}, a single model, so that --kappa has no effect")
    variants = len(request.mutations)
    places = [*rows.order.tolist(), *range(variants, variants + len(rows.not_ranked))]
    columns = {name: [cells[n] for n in places] for name, cells in request.columns.items()}
    facts = {"run": run, "models": len(models), "target": task.names[0], "lower_is_better": scores.sign < 0}
    facts |= {"table": None if table is None else str(table), "offset": request.offset, "verdict": known.verdict}
    facts |= {"device": str(models[0].model.device), "ranked_by": method or "fine-tuned models"}
    facts |= {"interval": intervals.facts}
    measured = known.measured.get(name_of(()))
    wild_type = {"measured": None if measured is None else float(measured), "predicted": scores.wild_type}
    facts |= rows.facts | {"wild_type": wild_type, "rows": len(places), "ranked": len(rows.order)}
    variant_tables.write(out, columns, rows.new)
    variant_tables.write_facts(out, facts | {"notices": request.notices})
    better = better_baseline(known_variants.json_of(Path(run) / known_variants.SUMMARY) or {})
    advice = (
        [f"{SHORT[better]} was better than the fine-tuned models on the test folds: to rank by it, add --with {better}"]
        if better and method is None
        else []
    )
    for sentence in [*rows.messages, intervals.sentence(), *advice]:
        say(sentence)
    return len(places)


class _OwnVariants:
    """The variants that a run has measured or trained on."""

    def __init__(self, task: VariantTask, known: Known) -> None:
        self._task = task
        variants = {name: parse_variant(name) for name in {*known.measured, *(known.seen or ())}}
        inside = set(_inside(task, list(variants.values())))
        self.measured = {
            variants[name]: float(value) for name, value in known.measured.items() if variants[name] in inside
        }
        self.variants = list(variants.values())
        self.sites = frozenset(mutation.position for one in self.variants for mutation in one)
        """The positions that they change, from 0."""
        self._most = max(map(len, self.variants), default=0)

    def varied(self, variant: tuple[Mutation, ...]) -> bool:
        """Whether they change all sites of a variant."""
        return all(mutation.position in self.sites for mutation in variant)

    def resembled(self, variant: tuple[Mutation, ...]) -> bool:
        """Whether a variant is like them: of the same sites, and with no more changes than they have."""
        return self.varied(variant) and len(variant) <= self._most

    def allowed(self, sites: str | None, offset: int) -> Collection[int]:
        """Return the positions, from 0, that proposals may change; see `predict`."""
        protein = str(self._task.facts["protein"])
        if sites == "all" or (sites is None and not self.sites):
            return range(len(protein))
        if sites is None:
            return self.sites
        try:
            places = {int(word) - 1 + offset for word in sites.split(",")}
        except ValueError:
            raise UsageError(f"--sites {sites}: positions are expected, as 39,40,41, or all") from None
        if outside := [place + 1 - offset for place in sorted(places) if not 0 <= place < len(protein)]:
            raise UsageError(
                f"--sites {sites}: {outside[0]} is outside of the wild type, whose {len(protein):,} residues have the "
                f"numbers {1 - offset} to {len(protein) - offset}"
            )
        return places


class _Intervals:
    """Intervals of predictions of the first target, from the errors of predictions out of fold (split conformal; Vovk
    et al. 2005, Algorithmic Learning in a Random World).

    An interval reaches from the prediction plus the 5% quantile of these errors to the prediction plus the 95%
    quantile, with the correction for their number. It is meant for variants like the measured ones. Its coverage is
    measured: the intervals of each fold are made of the errors of the other folds.

    Args:
        known: the facts of the run.
        own: the variants of the run.
    """

    def __init__(self, known: Known, own: _OwnVariants) -> None:
        self._own = own
        names = [name for name in known.out_of_fold if name in known.measured and name in known.fold]
        error_N = np.array([float(known.measured[name]) - known.out_of_fold[name][0] for name in names])
        fold_N = np.array([known.fold[name] for name in names])[~np.isnan(error_N)]
        error_N = error_N[~np.isnan(error_N)]
        self._limits: tuple[float, float] | None = None
        self.facts: dict[str, Any] = {"level": LEVEL, "predictions_out_of_fold": len(error_N), "coverage": None}
        folds = np.unique(fold_N).tolist()
        if len(folds) < 2 or len(error_N) < RESIDUALS:
            self.facts["why"] = (
                f"intervals take {RESIDUALS} measured variants that were predicted out of fold, in two folds or more; "
                f"there are {counted(len(error_N), 'variant')} in {counted(len(folds), 'fold')}"
            )
            return
        held = {}
        for fold in folds:
            low, high = _error_limits(error_N[fold_N != fold])
            held[fold] = (low <= error_N[fold_N == fold]) & (error_N[fold_N == fold] <= high)
        self._limits = _error_limits(error_N)
        self.facts["coverage"] = float(np.concatenate(list(held.values())).mean())
        self.facts["coverage_of_each_fold"] = {str(fold): float(values.mean()) for fold, values in held.items()}
        self.facts["covers"] = (
            "variants that change only sites that the training has varied, and no more of them at once than a measured "
            "variant does; others have no interval"
        )

    def columns(self, of: str, mean_N: npt.NDArray[np.floating], variants: Sequence[tuple[Mutation, ...]]) -> Any:
        """Return the two columns of the limits; empty where a variant is not like the measured ones."""
        low, high = self._limits or (np.nan, np.nan)
        like_N = [self._own.resembled(one) for one in variants]
        return {
            f"{name}{of}": [text(float(mean) + by) if like else "" for mean, like in zip(mean_N, like_N, strict=True)]
            for name, by in ((LOW, low), (HIGH, high))
        }

    def sentence(self) -> str:
        """Say what the intervals are worth, or why there are none."""
        if self._limits is None:
            return f"no {LOW} and {HIGH}: {self.facts['why']}"
        each = self.facts["coverage_of_each_fold"].values()
        return (
            f"{LOW} and {HIGH}: intervals made from the other folds held {self.facts['coverage']:.0%} of the "
            f"{self.facts['predictions_out_of_fold']:,} measured values ({min(each):.0%} to {max(each):.0%} of a "
            f"fold); they cover {self.facts['covers']}"
        )


def _error_limits(error_N: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the limits between which LEVEL of further errors lie, if these are exchangeable with N known ones."""
    count = len(error_N)
    above = min(int(np.ceil((count + 1) * (1 + LEVEL) / 2)), count)
    sorted_N = np.sort(error_N)
    return float(sorted_N[count - above]), float(sorted_N[above - 1])


@dataclass(frozen=True)
class _Predictions:
    """Predictions of M models, or of one baseline, for N variants, float32 [M, N, T]."""

    values_MNT: npt.NDArray[np.float32]
    wild_type: float
    """The mean over the models of the wild type's first target, for comparison with the variants."""
    sign: float
    """The sign of better values of the first target: -1 if lower values are better, else 1."""
    targets: int
    """The number T of targets that are predicted: a baseline predicts the first."""

    @property
    def mean_N(self) -> npt.NDArray[np.float32]:
        """The first target, mean over the models, float32 [N]."""
        mean_N: npt.NDArray[np.float32] = self.values_MNT.mean(0)[:, 0]
        return mean_N

    @property
    def order_N(self) -> npt.NDArray[np.int64]:
        """Numbers of the variants, best first, int64 [N]."""
        return np.argsort(-self.sign * self.mean_N, kind="stable")


@dataclass(frozen=True)
class _Rows:
    """The rows of the output."""

    order: npt.NDArray[np.int64]
    """The numbers of the ranked variants, in the order of their rows."""
    not_ranked: list[str]
    """The reason why each row after the variants has no rank."""
    new: dict[str, list[str]]
    """The new columns of all these rows."""
    facts: dict[str, Any]
    """The facts that are added to the JSON file."""
    messages: list[str]
    """The messages for the user after everything is written."""


@dataclass(frozen=True)
class _Ranking:
    """All that the rows of the output are made of."""

    task: VariantTask
    known: Known
    own: _OwnVariants
    request: RankingRequest
    scores: _Predictions
    intervals: _Intervals

    def every_row(self, of_table: bool) -> _Rows:
        """Return rows of all variants, best first, and after them rows that cannot be ranked."""
        request, order, not_ranked = self.request, self.scores.order_N, self.request.not_ranked
        new = self._predicted(order) | self._trained_on([request.mutations[n] for n in order])
        new = {name: [*cells, *[""] * len(not_ranked)] for name, cells in new.items()}
        if of_table:
            new[NOT_RANKED] = [*[""] * len(order), *not_ranked]
        if request.values_N is None:
            return _Rows(order, not_ranked, new, {}, [])
        names, mean_N = [name_of(one) for one in request.mutations], self.scores.mean_N.astype(np.float64)
        compared, messages = known_variants.compared(self.known, names, mean_N, request.values_N, self.task.names[0])
        return _Rows(order, not_ranked, new, {"compared": compared}, messages)

    def proposed(self, allowed: Collection[int], count: int, kappa: float, diversity: float) -> _Rows:
        """Choose the variants to measure next, in the order of choice.

        Args:
            allowed: the positions, from 0, that they may change.
            count: see `proposals.choose`, like the others.
            kappa: see there.
            diversity: see there.
        """
        request = self.request
        better_MN = self.scores.sign * self.scores.values_MNT[:, :, 0]
        # A table may have a variant in several rows.
        first = {one: n for n, one in reversed(list(enumerate(request.mutations)))}
        new = {one: n for one, n in first.items() if one and name_of(one) not in self.known.measured}
        free = sorted(n for one, n in new.items() if all(mutation.position in allowed for mutation in one))
        elsewhere = len(new) - len(free)
        if len(free) < count:
            fix = f"pass --propose {len(free)}" if free else "pass other variants, or --propose without --all-singles"
            if elsewhere:
                fix = f"{fix}, or --sites all for {elsewhere:,} more at sites that the training has not varied"
            raise UsageError(f"--propose {count}: only {len(free):,} of the variants have not been measured yet; {fix}")
        if elsewhere:
            say(
                f"not proposed: {counted(elsewhere, 'variant')} at other sites than those varied in training; --sites "
                "names others"
            )
        variants = [request.mutations[n] for n in free]
        chosen = proposals.choose(better_MN[:, free], variants, count, kappa, diversity)
        how: dict[str, Any] = {"count": count, "candidates": len(free), "kappa": kappa, "diversity": diversity}
        how |= {"sites": [place + 1 - request.offset for place in sorted(allowed)], "about_candidates": request.about}
        how |= {"objective": proposals.OBJECTIVE, **proposals.composition([variants[n] for n in chosen])}
        verdict = self.known.verdict or "not known, as the run has not been concluded"
        order = np.array(free)[chosen]
        new_columns = self._predicted(order) | {VARIED: self._varied([request.mutations[n] for n in order])}
        return _Rows(order, [], new_columns, {"proposed": how}, [f"how far to trust these proposals: {verdict}"])

    def _predicted(self, order: npt.NDArray[np.int64]) -> dict[str, list[str]]:
        """Make the columns with mean, interval and standard deviation over the models of each target, and the rank."""
        values_MNT = self.scores.values_MNT[:, order]
        mean_NT = values_MNT.mean(0)
        sd_NT = values_MNT.std(0, ddof=1) if len(values_MNT) > 1 else np.full_like(mean_NT, np.nan)
        new: dict[str, list[str]] = {}
        for t, of in enumerate(self._endings()):
            new[f"prediction{of}"] = list(map(text, mean_NT[:, t]))
            if t == 0:
                new |= self.intervals.columns(of, mean_NT[:, 0], [self.request.mutations[n] for n in order])
            new[f"{DISAGREEMENT}{of}"] = list(map(text, sd_NT[:, t]))
        rank_N = np.empty(len(self.scores.order_N), np.int64)
        rank_N[self.scores.order_N] = np.arange(1, len(rank_N) + 1)
        return new | {"rank": list(map(str, rank_N[order].tolist()))}

    def _trained_on(self, variants: Sequence[tuple[Mutation, ...]]) -> dict[str, list[str]]:
        """Make the columns that separate predictions of variants which training has seen from others."""
        names, nothing = [name_of(one) for one in variants], [np.nan] * len(self.task.names)
        new = {
            f"{OUT_OF_FOLD}{of}": [text(self.known.out_of_fold.get(name, nothing)[t]) for name in names]
            for t, of in enumerate(self._endings())
        }
        seen = self.known.seen
        new[SEEN] = ["" if seen is None else "yes" if name in seen else "no" for name in names]
        return new | {VARIED: self._varied(variants)}

    def _varied(self, variants: Sequence[tuple[Mutation, ...]]) -> list[str]:
        return ["" if not self.own.sites else "yes" if self.own.varied(one) else "no" for one in variants]

    def _endings(self) -> list[str]:
        """Return the endings of the column names of each predicted target."""
        names = self.task.names
        return [f" {name}" for name in names][: self.scores.targets] if len(names) > 1 else [""]


def _candidates(
    task: VariantTask, known: Known, own: _OwnVariants, sites: str | None, method: str | None
) -> RankingRequest:
    """Return the candidates for proposals of a run; see `proposals.candidates`."""
    allowed = own.allowed(sites, int(task.facts.get("offset", 0)))
    if sites == "all" and is_library(own.variants):
        raise UsageError("--sites all: too many combinations; name the sites, or add --all-singles")
    passes = method == FROZEN or (method is None and task.settings.pool != "wild_type")
    most = proposals.MOST_PASSES if passes else proposals.MOST
    variants, about = proposals.candidates(str(task.facts["protein"]), allowed, own.variants, most)
    request = _listed(task, known, variants)
    return replace(request, about=about, notices=[*request.notices, about])


def _listed(task: VariantTask, known: Known, variants: Sequence[tuple[Mutation, ...]]) -> RankingRequest:
    """Return those of some variants that are in the part that the model sees."""
    offset = int(task.facts.get("offset", 0))
    every = _inside(task, list(variants))
    mutations = [one for one in every if not unscored(one)]
    notices = []
    if foreign := sorted({f"{one[0].wild}{one[0].position + 1}" for one in every if unscored(one)}):
        what = first_three(foreign, str)
        notices.append(f"not ranked, as the wild type has none of the 20 amino acids there: {what}")
    columns = {"mutant": [name_of(one) for one in mutations]}
    columns["measured"] = [known.measured.get(name, "") for name in columns["mutant"]]
    if offset:
        notices.append(
            f"the column 'mutant' counts residues of the wild type from 1, '{IN_TABLE}' counts them as the table of "
            f"the run does: its positions {offset:+d} are those of the wild type"
        )
        own = [name_of(renumbered(one, -offset)) for one in mutations]
        columns = {"mutant": columns["mutant"], IN_TABLE: own, "measured": columns["measured"]}
    return RankingRequest(columns, mutations, [], None, offset, notices)


def _of_table(task: VariantTask, known: Known, path: Path, mutant: str | None, offset: int | None) -> RankingRequest:
    """Read the variants of a table, numbered as the run's own table unless an offset is passed."""
    own = task.facts.get("offset")
    used: int | Literal["auto"] = offset if offset is not None else "auto" if own is None else int(own)
    protein = str(task.facts["protein"])
    try:
        variants = variant_tables.read(path, protein, mutant=mutant, offset=used)
    except UsageError:
        if offset is not None or not used:
            raise
        used = 0  # A column of mutated sequences has no numbering to shift.
        variants = variant_tables.read(path, protein, mutant=mutant, offset=used)
    notices = list(variants.notices)
    if own is None and offset is None:
        notices.append(
            f"{path}: the run does not record how its own table was numbered; this one is read with an offset of "
            f"{variants.offset}"
        )
    elif used == own and own:
        notices.append(f"{path}: positions were shifted by {own:+d}, as those of the run's own table were")
    elif own is not None and offset is not None and used != own:
        notices.append(f"{path}: positions were shifted by {used:+d}, and those of the run's own table by {own:+d}")
    changed = [tuple(m for m in one if m.mutant != m.wild) for one in variants.mutations]
    inside = set(_inside(task, changed))
    rows, mutations, why = list[int](), list[tuple[Mutation, ...]](), dict(variants.left_out)
    wild_type = known.measured.get(name_of(()))
    for (row, *_), one in zip(variants.rows, changed, strict=True):
        if one not in inside:
            why[row] = "the model does not see the residue that it changes"
        elif not one and wild_type is not None:
            why[row] = f"it is the wild type, whose measured value is {wild_type}"
        else:
            rows.append(row)
            mutations.append(one)
    for reason in dict.fromkeys(why[row] for row in sorted(set(why) - set(variants.left_out))):
        such = [row for row in sorted(why) if why[row] == reason]
        named = first_three(such, variants.table.at)
        notices.append(f"{path}: not ranked, as {reason}: {counted(len(such), 'row')} ({named})")
    if not rows:
        reasons = list(dict.fromkeys(why[row] for row in sorted(why)))
        raise InputError(f"{path}: no row can be ranked, as {first_three(reasons, str)}; give other variants")
    left = sorted(set(range(len(variants.table))) - set(rows))
    columns = {name: [cells[row] for row in [*rows, *left]] for name, cells in variants.table.columns.items()}
    if variants.offset:
        names = {row: name for (row, *_), name in zip(variants.rows, variants.names(), strict=True)}
        columns[IN_WILD_TYPE] = [names.get(row, "") for row in [*rows, *left]]
    values_N, target = None, task.names[0]
    if target in variants.table.columns:
        values_N = variants.table.numbers(target)[rows]
    return RankingRequest(columns, mutations, [why[row] for row in left], values_N, variants.offset, notices)


def predictions(found: FineTuned, mutations: Sequence[tuple[Mutation, ...]]) -> npt.NDArray[np.float32]:
    """Predict the targets of variants with one model, float32 [N, T]."""
    task, model = found.task, found.model
    assert isinstance(task, VariantTask)
    records = VariantRecords(Path("variants"), task.wild_type, list(mutations), int(task.facts["first"]))
    examples = Examples("input", records.path, records, None)
    alone = task.question(examples.get(0)).wild_type_alone
    each = TOGETHER if alone else max(1, PACKED // (len(task.wild_type) + 2))
    parts = [range(n, min(n + each, len(records))) for n in range(0, len(records), each)]

    def one(part: range) -> list[npt.NDArray[np.float32]]:
        return [task.predict(output) for output in model.outputs([task.question(examples.get(n)) for n in part])]

    at_once, values = max(1, 4 * packs_at_once(model.device)), list[npt.NDArray[np.float32]]()
    with Progress("predict", len(records)) as progress:
        for first in range(0, len(parts), at_once):
            for outputs in side_by_side(one, parts[first : first + at_once], model.device):
                values += outputs
            progress.update(len(values), "variants")
    return np.stack(values)


def _same_task(run: str, models: Sequence[FineTuned]) -> VariantTask:
    if not models:
        raise InputError(f"{run}: holds no model of variants; give a run of task variant, or its model")
    first = models[0].task
    assert isinstance(first, VariantTask)
    for other in models[1:]:
        if (other.task.facts["protein"], other.task.names) != (first.facts["protein"], first.names):
            raise InputError(f"{run}: its runs are of different proteins or targets; fine-tune them again")
    return first


def _inside(task: VariantTask, mutations: list[tuple[Mutation, ...]]) -> list[tuple[Mutation, ...]]:
    """Return the variants whose mutations are all in the part of the protein that the model sees."""
    first, length = int(task.facts["first"]), int(task.facts["length"])
    return [one for one in mutations if all(first <= mutation.position < first + length for mutation in one)]
