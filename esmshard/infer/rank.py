"""Variants in the order of what fine-tuned models say of them, with how far these disagree; and which to make next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.loader import Examples
from esmshard.data.numbering import Misnumbered
from esmshard.data.substitutions import Mutation, name_of, renumbered
from esmshard.data.tables import counted, first_three
from esmshard.data.variant_records import VariantRecords
from esmshard.errors import InputError, UsageError, reading
from esmshard.infer import known_variants, proposals, variant_tables
from esmshard.infer.known_variants import Known
from esmshard.infer.proposals import DIVERSITY, KAPPA
from esmshard.infer.score import all_singles, unscored
from esmshard.infer.variant_tables import text
from esmshard.infer.writers import check
from esmshard.model.threads import packs_at_once, side_by_side
from esmshard.progress import Progress, say
from esmshard.tasks.finetuner import FineTuned, load_finetuned
from esmshard.tasks.frozen_variants import PACKED
from esmshard.tasks.variant import VariantTask

NOT_RANKED = "not ranked because"
"""The last column of a table that was predicted."""
IN_TABLE, IN_WILD_TYPE = "mutant in table", "mutant in wild type"
"""Columns with the other numbering, where the table of the run counts otherwise than its wild type does."""
OUT_OF_FOLD, SEEN = "out-of-fold prediction", "seen in training"
TOGETHER = 2048
"""Variants that one pass of the wild type serves."""


@dataclass(frozen=True)
class Asked:
    """N variants that are to be ranked, and rows that cannot be."""

    columns: dict[str, list[str]]
    """Of the output, with the N variants first."""
    mutations: list[tuple[Mutation, ...]]
    """Of each of them, without synonymous changes."""
    not_ranked: list[str]
    """Why, of each row after them."""
    values_N: npt.NDArray[np.float64] | None
    """Measured values of the first target, where the table has that column; NaN where it has none."""
    offset: int
    """Added to the positions of the table."""
    notices: list[str]


def models_of(run: str) -> list[Path]:
    """The models of a cross-validation of variants, of a single run, or the model itself; none if it is another task's.

    Raises:
        InputError: runs of the cross-validation have no model yet.
    """
    path = Path(run)
    summary = known_variants.json_of(path / known_variants.SUMMARY)
    if summary is not None and summary.get("task") == "variant":
        with reading(f"{path / 'summary.json'}", "go on with finetune --resume auto"):
            found = [path / name / "model" for name in summary["runs"]]
        missing = [model for model in found if not (model / "esmshard.json").is_file()]
        if missing:
            raise InputError(f"{missing[0]}: there is no model; go on with finetune --resume auto")
        return found
    for model in (path / "model", path):
        about = known_variants.json_of(model / "esmshard.json")
        with reading(f"{model / 'esmshard.json'}", "consolidate the run again"):
            if about is not None and about.get("recipe", {}).get("task", {}).get("name") == "variant":
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
    overwrite: bool = False,
) -> int:
    """Rank variants, best first, and write a CSV file; the number of rows. A JSON file beside it says how it was made,
    and how far it can be trusted.

    Columns: those of `table`, or `mutant` and `measured` of all singles; the names in the other numbering where table
    and wild type count differently; then `prediction` (mean over the models, in the unit of the target), `sd` (standard
    deviation over them: folds and seeds) and `rank`; `out-of-fold prediction` (by the models that had not seen the
    variant) and `seen in training` (yes or no); of a table also `not ranked because`. Of several targets the first two
    kinds by name, and the rank of the first. Rows of the table that cannot be used stand at the end, without.

    Where the wild type was measured, a row that is the wild type (`WT`, or a synonymous change) is not predicted: its
    value is known.

    Args:
        run: of variants; see `models_of`.
        table: of variants to rank; None for all single substitutions.
        out: `.csv`.
        mutant: column of the mutations.
        offset: added to the positions of `table`; by default what was added to those of the run's own table.
        propose: write so many rows only, chosen by `proposals.choose`, of those that were not measured.
        kappa: of `proposals.choose`.
        diversity: the same.
        overwrite: replace `out`.

    Raises:
        InputError: a run or table that cannot be used, or a table that does not fit the numbering.
        UsageError: arguments that do not fit each other, or files that exist.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: variants are ranked in a .csv file; give it that ending")
    if table is None and offset is not None:
        raise UsageError("--offset is added to the positions of a table, and all single substitutions have none")
    check(out, variant_tables.facts_file(out), overwrite=overwrite)
    paths = models_of(run)
    models = [load_finetuned(str(model)) for model in paths]
    task = _same_task(run, models)
    known = known_variants.read(Path(run), paths, task.names)
    asked = _singles(task, known) if table is None else _of_table(task, known, table, mutant, offset)
    for notice in asked.notices:
        say(notice)
    # The wild type besides, which predictions of variants are to be compared with.
    said_MNT = np.stack([predictions(model, [*asked.mutations, ()]) for model in models])
    values_MNT, wild_type = said_MNT[:, :-1], float(said_MNT[:, -1, 0].mean())
    mean_N, sign = values_MNT.mean(0)[:, 0], -1.0 if task.names[0] in task.facts["lower_is_better"] else 1.0
    order = np.argsort(-sign * mean_N, kind="stable")
    rank_N = np.empty(len(order), np.int64)
    rank_N[order] = np.arange(1, len(order) + 1)
    facts = {"run": run, "models": len(models), "target": task.names[0], "lower_is_better": sign < 0}
    facts |= {"table": None if table is None else str(table), "offset": asked.offset, "verdict": known.verdict}
    names, not_ranked = [name_of(one) for one in asked.mutations], asked.not_ranked
    if propose is not None:
        order, facts["proposed"] = _proposed(run, asked, sign * values_MNT[:, :, 0], known, propose, kappa, diversity)
        not_ranked = []
    new = _predicted(task, values_MNT[:, order])
    new["rank"] = [str(rank_N[n]) for n in order]
    if propose is None:
        new |= _trained_on(task, known, [names[n] for n in order])
    new = {name: [*cells, *[""] * len(not_ranked)] for name, cells in new.items()}
    if propose is None and table is not None:
        new[NOT_RANKED] = [*[""] * len(order), *not_ranked]
    places = [*order.tolist(), *range(len(names), len(names) + len(not_ranked))]
    columns = {name: [cells[n] for n in places] for name, cells in asked.columns.items()}
    told: list[str] = []
    if asked.values_N is not None and propose is None:
        facts["compared"], told = known_variants.compared(
            known, names, mean_N.astype(np.float64), asked.values_N, task.names[0]
        )
    measured = known.measured.get(name_of(()))
    facts["wild_type"] = {"measured": None if measured is None else float(measured), "predicted": wild_type}
    variant_tables.write(out, columns, new)
    facts |= {"rows": len(places), "ranked": len(order), "notices": asked.notices}
    variant_tables.write_facts(out, facts)
    for sentence in told:
        say(sentence)
    if propose is not None:
        say(f"how far to trust these proposals: {known.verdict or 'not known, as the run has not been concluded'}")
    return len(places)


def _singles(task: VariantTask, known: Known) -> Asked:
    """All single substitutions of the part that the model sees."""
    offset = int(task.facts.get("offset", 0))
    every = _inside(task, all_singles(str(task.facts["protein"])))
    mutations = [one for one in every if not unscored(one)]
    notices = []
    if foreign := sorted({f"{one[0].wild}{one[0].position + 1}" for one in every if unscored(one)}):
        what = first_three(foreign, str)
        notices.append(f"not ranked, as the wild type has none of the 20 amino acids there: {what}")
    columns = {"mutant": [name_of(one) for one in mutations]}
    columns["measured"] = [known.measured.get(name, "") for name in columns["mutant"]]
    if offset:
        notices.append(_numbering(offset, "mutant", IN_TABLE))
        own = [name_of(renumbered(one, -offset)) for one in mutations]
        columns = {"mutant": columns["mutant"], IN_TABLE: own, "measured": columns["measured"]}
    return Asked(columns, mutations, [], None, offset, notices)


def _numbering(offset: int, wild_type: str, table: str) -> str:
    return (
        f"the column '{wild_type}' counts residues of the wild type from 1, '{table}' counts them as the table of the "
        f"run does: its positions {offset:+d} are those of the wild type"
    )


def _of_table(task: VariantTask, known: Known, path: Path, mutant: str | None, offset: int | None) -> Asked:
    """The variants of a table, numbered as that of the run unless an offset says otherwise."""
    own = task.facts.get("offset")
    used: int | Literal["auto"] = offset if offset is not None else "auto" if own is None else int(own)
    protein = str(task.facts["protein"])
    try:
        try:
            variants = variant_tables.read(path, protein, mutant=mutant, offset=used)
        except UsageError:
            if offset is not None or not used:
                raise
            used = 0  # a column of mutated sequences has no numbering to shift
            variants = variant_tables.read(path, protein, mutant=mutant, offset=used)
    except Misnumbered as error:
        asked = f"; {own:+d} is what was added to the positions of the run's own table" if used == own else ""
        if used and _fits_unshifted(task, path, mutant):
            asked += ", and this one fits as it is: pass --offset 0 if it counts as the wild type does"
        raise InputError(f"{error.spelled('--offset ')}{asked}") from None
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
    return Asked(columns, mutations, [why[row] for row in left], values_N, variants.offset, notices)


def _fits_unshifted(task: VariantTask, path: Path, mutant: str | None) -> bool:
    try:
        variant_tables.read(path, str(task.facts["protein"]), mutant=mutant, offset=0)
    except Misnumbered:
        return False
    return True


def _proposed(
    run: str,
    asked: Asked,
    values_MN: npt.NDArray[np.floating],
    known: Known,
    count: int,
    kappa: float,
    diversity: float,
) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Numbers of the variants to measure next, in the order of choice, and how they were chosen."""
    if len(values_MN) < 2:
        raise UsageError(f"--propose needs several models, to know where they disagree, and {run} has one")
    first = {one: n for n, one in reversed(list(enumerate(asked.mutations)))}  # a table may have it in several rows
    free = sorted(n for one, n in first.items() if one and name_of(one) not in known.measured)
    if len(free) < count:
        fix = f"pass --propose {len(free)}" if free else "give others, or all with --all-singles"
        raise UsageError(f"--propose {count}: of those asked for {len(free):,} have not been measured yet; {fix}")
    variants = [asked.mutations[n] for n in free]
    chosen = proposals.choose(values_MN[:, free], variants, count, kappa, diversity)
    how: dict[str, Any] = {"count": count, "candidates": len(free), "kappa": kappa, "diversity": diversity}
    how |= {"objective": proposals.OBJECTIVE, **proposals.composition([variants[n] for n in chosen])}
    return np.array(free)[chosen], how


def _predicted(task: VariantTask, values_MNT: npt.NDArray[np.float32]) -> dict[str, list[str]]:
    """Columns with the mean and the standard deviation over the models, of each target."""
    mean_NT = values_MNT.mean(0)
    sd_NT = values_MNT.std(0, ddof=1) if len(values_MNT) > 1 else np.full_like(mean_NT, np.nan)
    new: dict[str, list[str]] = {}
    for t, of in enumerate(_of(task)):
        new |= {f"prediction{of}": list(map(text, mean_NT[:, t])), f"sd{of}": list(map(text, sd_NT[:, t]))}
    return new


def _trained_on(task: VariantTask, known: Known, names: Sequence[str]) -> Mapping[str, list[str]]:
    """Columns that tell predictions of variants which training has seen from others."""
    nothing = [np.nan] * len(task.names)
    new = {
        f"{OUT_OF_FOLD}{of}": [text(known.out_of_fold.get(name, nothing)[t]) for name in names]
        for t, of in enumerate(_of(task))
    }
    seen = known.seen
    return new | {SEEN: ["" if seen is None else "yes" if name in seen else "no" for name in names]}


def _of(task: VariantTask) -> list[str]:
    """What the columns of each target end in."""
    return [f" {name}" for name in task.names] if len(task.names) > 1 else [""]


def predictions(found: FineTuned, mutations: Sequence[tuple[Mutation, ...]]) -> npt.NDArray[np.float32]:
    """What one model says, float32 [N, T]."""
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
            for told in side_by_side(one, parts[first : first + at_once], model.device):
                values += told
            progress.update(len(values), "variants")
    return np.stack(values)


def _same_task(run: str, models: Sequence[FineTuned]) -> VariantTask:
    if not models:
        raise InputError(
            f"{run}: holds no model of variants; give the directory of a run of task variant, or its model"
        )
    first = models[0].task
    assert isinstance(first, VariantTask)
    for other in models[1:]:
        if (other.task.facts["protein"], other.task.names) != (first.facts["protein"], first.names):
            raise InputError(f"{run}: its runs are of different proteins or targets; fine-tune them again")
    return first


def _inside(task: VariantTask, mutations: list[tuple[Mutation, ...]]) -> list[tuple[Mutation, ...]]:
    """Those of the part of the protein that the model sees."""
    first, length = int(task.facts["first"]), int(task.facts["length"])
    return [one for one in mutations if all(first <= mutation.position < first + length for mutation in one)]
