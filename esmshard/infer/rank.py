"""Variants in the order of what fine-tuned models say of them, with how far these disagree; and which to make next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import spreadsheet
from esmshard.data.loader import Examples
from esmshard.data.mutations import Variants
from esmshard.data.substitutions import Mutation, name_of
from esmshard.data.tables import counted, first_three
from esmshard.data.variant_records import OUT_OF_FOLD, VariantRecords
from esmshard.errors import InputError, UsageError, reading
from esmshard.files import read_json
from esmshard.infer import variant_tables
from esmshard.infer.score import all_singles
from esmshard.infer.variant_tables import text
from esmshard.infer.writers import check
from esmshard.model.threads import packs_at_once, side_by_side
from esmshard.progress import Progress, say
from esmshard.tasks.finetuner import FineTuned, load_finetuned
from esmshard.tasks.frozen_variants import PACKED
from esmshard.tasks.variant import VariantTask

VARIANT = "variant"
KAPPA = 1.0
"""Standard deviations that are added to a mean, of the upper confidence bound."""
TOGETHER = 2048
"""Variants that one pass of the wild type serves."""


def models_of(run: str) -> list[Path]:
    """The models of a cross-validation of variants, of a single run, or the model itself; none if it is another task's.

    Raises:
        InputError: runs of the cross-validation have no model yet.
    """
    path = Path(run)
    summary = _json(path / "summary.json")
    if summary is not None and summary.get("task") == "variant":
        with reading(f"{path / 'summary.json'}", "go on with finetune --resume auto"):
            found = [path / name / "model" for name in summary["runs"]]
        missing = [model for model in found if not (model / "esmshard.json").is_file()]
        if missing:
            raise InputError(f"{missing[0]}: there is no model; go on with finetune --resume auto")
        return found
    for model in (path / "model", path):
        about = _json(model / "esmshard.json")
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
    propose: int | None = None,
    kappa: float = KAPPA,
    overwrite: bool = False,
) -> int:
    """Rank variants, best first, and write a CSV file; the number of rows.

    Columns: those of `table`, or `mutant` and `measured` of all singles; then `prediction` (mean over the models, in
    the unit of the target), `sd` (standard deviation over them: folds and seeds) and `rank`; of several targets the
    first two by name, and the rank of the first. Rows of the table that cannot be used stand at the end, without.

    Args:
        run: of variants; see `models_of`.
        table: of variants to rank; None for all single substitutions.
        out: `.csv`.
        mutant: column of the mutations.
        propose: write so many rows only, chosen by `batch`, of those that were not measured.
        kappa: of `batch`.
        overwrite: replace `out`.
    """
    if out.suffix != ".csv":
        raise UsageError(f"{out}: variants are ranked in a .csv file; give it that ending")
    check(out, overwrite=overwrite)
    models = [load_finetuned(str(model)) for model in models_of(run)]
    task = _same_task(run, models)
    protein = str(task.facts["protein"])
    measured = _measured(Path(run))
    if table is None:
        mutations = _inside(task, all_singles(protein))
        columns = {"mutant": [name_of(one) for one in mutations]}
        columns["measured"] = [measured.get(name, "") for name in columns["mutant"]]
        rows, left = list(range(len(mutations))), list[int]()
    else:
        variants = variant_tables.read(table, protein, mutant=mutant)
        for notice in variants.notices:
            say(notice)
        rows, mutations, left = _rows(task, variants)
        columns = {name: [cells[row] for row in [*rows, *left]] for name, cells in variants.table.columns.items()}
    values_N = None
    if table is not None and task.names[0] in variants.table.columns and propose is None:
        values_N = variants.table.numbers(task.names[0])[rows]
    values_MNT = np.stack([predictions(model, mutations) for model in models])
    mean_NT = values_MNT.mean(0)
    sd_NT = values_MNT.std(0, ddof=1) if len(models) > 1 else np.full_like(mean_NT, np.nan)
    sign = -1.0 if task.names[0] in task.facts["lower_is_better"] else 1.0
    order = np.argsort(-sign * mean_NT[:, 0], kind="stable")
    rank_N = np.empty(len(order), np.int64)
    rank_N[order] = np.arange(1, len(order) + 1)
    if propose is not None:
        if len(models) < 2:
            raise UsageError(f"--propose needs several models, to know where they disagree, and {run} has one")
        first = {one: n for n, one in reversed(list(enumerate(mutations)))}  # a table may have it in several rows
        free = sorted(n for one, n in first.items() if one and name_of(one) not in measured)
        if len(free) < propose:
            raise UsageError(f"--propose {propose}: {counted(len(free), 'variant')} not measured yet")
        chosen = batch(sign * values_MNT[:, free, 0], propose, kappa)
        order, left = np.array(free)[chosen], []
    new: dict[str, list[str]] = {}
    several = len(task.names) > 1
    for t, name in enumerate(task.names):
        of = f" {name}" if several else ""
        new |= {f"prediction{of}": [text(v) for v in mean_NT[order, t]], f"sd{of}": [text(v) for v in sd_NT[order, t]]}
    new["rank"] = [str(rank_N[n]) for n in order]
    places = [*order.tolist(), *range(len(rows), len(rows) + len(left))]
    columns = {name: [cells[n] for n in places] for name, cells in columns.items()}
    variant_tables.write(out, columns, {name: [*cells, *[""] * len(left)] for name, cells in new.items()})
    if values_N is not None:
        say(variant_tables.spearman(mean_NT[:, 0], values_N, task.names[0]))
    return len(places)


def batch(values_MN: npt.NDArray[np.floating], count: int, kappa: float = KAPPA) -> list[int]:
    """Variants to measure together: high upper confidence bounds, and not all for the same reason.

    One after the other, the one of the highest mean + kappa * deviation. Then the deviations of the others shrink by
    what its measurement would tell of them, which the models say: variants in which they err together count as one
    question (GP-BUCB: Desautels et al. 2014, JMLR 15:3873, the models in place of a Gaussian process). Half of each
    variance is its own.

    Args:
        values_MN: predictions of M models, two at least, higher being better.
        count: of variants.
        kappa: see above.

    Returns:
        Their numbers, in the order of choice.
    """
    mean_N = values_MN.mean(0, dtype=np.float64)
    spread_MN = (values_MN - mean_N) / np.sqrt(len(values_MN) - 1)
    own_N = 0.5 * (spread_MN**2).sum(0)  # of each variant alone
    shared_MN = np.sqrt(0.5) * spread_MN
    chosen: list[int] = []
    for _ in range(count):
        bound_N = mean_N + kappa * np.sqrt(own_N + (shared_MN**2).sum(0))
        bound_N[chosen] = -np.inf
        best = int(bound_N.argmax())
        chosen.append(best)
        direction_M = shared_MN[:, best].copy()
        total = direction_M @ direction_M + own_N[best]
        if total > 0:  # condition on it: a rank-one update of the covariance in the space of the models
            length = direction_M @ direction_M
            share = (1 - np.sqrt(max(0.0, 1 - length / total))) / length if length > 0 else 0.0
            shared_MN = shared_MN - share * np.outer(direction_M, direction_M @ shared_MN)
    return chosen


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


def _rows(task: VariantTask, variants: Variants) -> tuple[list[int], list[tuple[Mutation, ...]], list[int]]:
    """Rows of the table that can be ranked, their variants, and the other rows."""
    inside = set(_inside(task, variants.mutations))
    found = [(rows[0], one) for rows, one in zip(variants.rows, variants.mutations, strict=True) if one in inside]
    outside = [rows[0] for rows, one in zip(variants.rows, variants.mutations, strict=True) if one not in inside]
    if outside:
        named = first_three(outside, variants.table.at)
        say(
            f"{variants.table.path}: not ranked, as the model does not see the residue that they change: "
            f"{counted(len(outside), 'row')} ({named})"
        )
    if not found:
        raise InputError(f"{variants.table.path}: changes no residue that the model sees; give variants that do")
    found.sort()
    rows = [row for row, _ in found]
    changed = [tuple(m for m in one if m.mutant != m.wild) for _, one in found]
    return rows, changed, sorted(set(range(len(variants.table))) - set(rows))


def _measured(run: Path) -> dict[str, str]:
    """Values of the first target by the names of variants, as a cross-validation left them."""
    path = run / OUT_OF_FOLD
    if not path.is_file():
        return {}
    with open(path, encoding="utf-8", newline="") as file:
        rows = spreadsheet.named_rows(file)
    own = ""
    while rows and f"esmshard {own}{VARIANT}" in rows[0]:  # the table had such a column itself
        own += "esmshard "
    return {row[f"{own}{VARIANT}"]: row[f"{own}measured"] for row in rows if row[f"{own}measured"]}


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: damaged ({error}); make it anew") from None
    return found if isinstance(found, dict) else None
