"""Scores of a model on a split: per record, gathered, each record once; metrics with intervals beside baselines."""

import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard import spreadsheet
from esmshard.data.loader import Examples
from esmshard.data.packing import deal
from esmshard.errors import InputError
from esmshard.files import replacing
from esmshard.model import weights
from esmshard.parallel.mesh import World
from esmshard.progress import Progress
from esmshard.settings import Recipe
from esmshard.tasks.finetuner import FineTuner, load_finetuned, load_untrained
from esmshard.tasks.protocol import Row, Task, collate
from esmshard.train.metrics import Interval, bootstrap, difference, interval

BASELINE_RECORDS = 2000
"""Training records, evenly spread, that the baselines learn from: enough for a histogram or a linear fit, and minutes
at any size."""

CHUNK = 4096
"""Tokens of the records that the model scores at once, where it says no pair maps, which are what memory goes to."""

BASELINES = "baselines.npz"
MAIN = "fine-tuned"


def validate(
    model: nn.Module,
    task: Task,
    data: Examples,
    tokens_per_rank: int,
    world: World,
    stop: Callable[[], object] = lambda: False,
) -> tuple[float, list[Row]] | None:
    """Loss and one row of metrics a record, in the order of the split, on every rank. Whole records, no gradient.

    `stop` is asked before each micro-batch, and must answer alike on all ranks. None if it said so.
    """
    model.eval()
    longest = max(tokens_per_rank, int(data.tokens.max()))
    mine: list[tuple[int, Row]] = []
    sums, stopped = np.zeros(2), False
    with torch.no_grad():
        for micro in deal(range(len(data)), data.tokens, longest, world.rank, world.size):
            if stopped := bool(stop()):
                break
            batch, targets = collate(task, [data.get(n) for n in micro.records])
            outputs = model(batch.to(world.device))
            if micro.ghost:
                continue
            part = task.loss(outputs, targets)
            sums += [float(part.sum), float(part.count)]
            rows = task.score([o.cpu().numpy() for o in outputs], [t.numpy() for t in targets])
            mine += zip(micro.records, rows, strict=True)
    model.train()
    if stopped:
        return None
    loss, count = world.sum(sums.tolist())
    everyone = dict(pair for part in world.gather(mine) for pair in part)
    assert sorted(everyone) == list(range(len(data))), "each record is scored once"
    return loss / count if count else float("nan"), [everyone[n] for n in range(len(data))]


def fit_baselines(task: Task, train: Examples, base: FineTuner, path: Path) -> None:
    """Fit the task's baselines on training records and keep what they learned as `.npz`. One process."""
    most = getattr(task, "baseline_records", BASELINE_RECORDS)
    some = range(0, len(train), -(-len(train) // most))
    known = task.baselines([train.get(n) for n in some], base)
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "wb") as file:
        np.savez(file, **known)  # type: ignore[arg-type]
    temporary.replace(path)


def read_baselines(path: Path) -> dict[str, npt.NDArray[Any]]:
    """What `fit_baselines` kept; nothing where there is no such file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: damaged ({error}); remove it, and the baselines are left out") from None


def evaluate(
    model: FineTuner,
    task: Task,
    data: Examples,
    known: Mapping[str, npt.NDArray[Any]],
    base: FineTuner | None,
) -> dict[str, list[Row]]:
    """Rows of metrics for the model and each baseline of the task, in one process.

    Args:
        model: fine-tuned.
        task: what it was trained for.
        data: the split; its records are taken whole.
        known: what the baselines learned from the training split (`fit_baselines`).
        base: the model before the first step; without it, baselines that ask it are left out.
    """
    table: dict[str, list[Row]] = {MAIN: []}
    if base is not None and known and hasattr(task, "look_ahead"):
        task.look_ahead(data, base)
    with Progress("evaluate", len(data)) as progress:
        each = max(1, CHUNK // int(data.tokens.max())) if task.names else 1
        for first in range(0, len(data), each):
            examples = [data.get(n) for n in range(first, min(first + each, len(data)))]
            inputs = [task.inputs(example) for example in examples]
            table[MAIN] += task.score(model.outputs(inputs), [one.target for one in inputs])
            for example, asked in zip(examples, inputs, strict=True):
                for name, output in task.baseline_outputs(example, known, base).items():
                    row = task.score([output], [asked.target])[0] if isinstance(output, np.ndarray) else output
                    table.setdefault(name, []).append(row)
            progress.update(first + len(examples), "")
    return table


def report(model: str, data: Examples, out: Path, warn: Callable[[str], None], leakage: Sequence[str] = ()) -> str:
    """Score a consolidated model on a split, beside the untrained model and the task's baselines.

    Writes `evaluation.json` and `per_protein.csv` to `out` and returns the table.

    Args:
        model: a directory of `consolidate`.
        data: the split.
        out: directory.
        warn: called with a sentence for whatever is left out.
        leakage: what the split shares with the training records, to be written down.
    """
    found = load_finetuned(model)
    base = None
    try:
        base = load_untrained(Recipe.model_validate(found.about["recipe"]), found.task)
    except InputError as error:
        warn(f"baselines that need the model before training are left out of the table: {error}")
    known = read_baselines(weights.place(model) / BASELINES)
    if not known:
        warn(f"{model}: has no {BASELINES}, so baselines that learn from the training records are left out")
    table = evaluate(found.model, found.task, data, known, base)
    facts = {key: found.about[key] for key in ("esmshard", "step", "weights_sha256", "recipe")}
    return as_text(write(out, data, found.task, table, facts | {"leakage": list(leakage)}), found.task.columns)


def write(
    directory: Path, data: Examples, task: Task, table: Mapping[str, Sequence[Row]], about: Mapping[str, Any]
) -> dict[str, dict[str, Interval]]:
    """Write `evaluation.json` (intervals of every method, and of what the model is better by) and `per_protein.csv`
    (every number of the model's rows).

    Returns the intervals.
    """
    block_N = data.blocks()
    samples = {name: bootstrap(task.summary, rows, block_N=block_N) for name, rows in table.items()}
    intervals = {name: {metric: interval(v) for metric, v in found.items()} for name, found in samples.items()}
    differences = {
        name: {metric: difference(samples[MAIN][metric], found[metric]) for metric in task.columns if metric in found}
        for name, found in samples.items()
        if name != MAIN
    }
    numbers = [key for key, value in table[MAIN][0].items() if not isinstance(value, np.ndarray)]
    # Of variants, what every baseline says is kept: the folds of a table are tested together.
    others = (
        []
        if block_N is None
        else [(name, key) for name in table if name != MAIN for key in numbers if key.startswith("prediction")]
    )
    evaluation = {
        **about,
        "task": about["recipe"]["task"]["name"],
        "split": data.name,
        "data": str(data.path),
        "records": len(data),
        "columns": task.columns,
        "lower_is_better": task.lower_is_better,
        "without_value": {
            c: sum(math.isnan(float(row[c])) for row in table[MAIN]) for c in task.columns if c in numbers
        },
        "interval": f"95% percentile bootstrap over {'records' if block_N is None else 'positions'}; of differences, "
        "paired",
        "metrics": {name: {c: asdict(i) for c, i in row.items()} for name, row in intervals.items()},
        "differences": {name: {c: asdict(i) for c, i in row.items()} for name, row in differences.items()},
        "facts": task.facts,
        "calibration": _calibration(table[MAIN]),
        "confusion": _confusion(table[MAIN], task),
    }
    _replace(directory / "evaluation.json", json.dumps(_finite(evaluation), indent=1) + "\n")
    blocks = [] if block_N is None else ["block"]
    lines = [["id", "length", *blocks, *numbers, *(f"{key} of {name}" for name, key in others)]]
    for n, row in enumerate(table[MAIN]):
        values = [*(row[key] for key in numbers), *(table[name][n][key] for name, key in others)]
        told = ["" if math.isnan(v := float(value)) else f"{v:.6g}" for value in values]
        lines.append([data.id(n), str(data.length(n)), *([] if block_N is None else [str(block_N[n])]), *told])
    with replacing(directory / "per_protein.csv") as file:
        spreadsheet.writer(file).writerows(lines)
    return intervals


def _calibration(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Of rows with `calibration` [3, bins]: how many predictions lie in each bin of confidence, the mean confidence
    there, and the share that is right.
    """
    if "calibration" not in rows[0]:
        return None
    count, confidence, right = np.sum([np.asarray(row["calibration"]) for row in rows], axis=0)
    with np.errstate(invalid="ignore"):
        shares = {"confidence": (confidence / count).tolist(), "accuracy": (right / count).tolist()}
    return {"edges": np.linspace(0, 1, len(count) + 1).tolist(), "count": count.tolist(), **shares}


def _confusion(rows: Sequence[Row], task: Task) -> dict[str, Any] | None:
    """Of rows with `confusion` [C, C]: how many of each class (first axis) were called what."""
    if "confusion" not in rows[0]:
        return None
    counts = np.sum([np.asarray(row["confusion"]) for row in rows], axis=0)
    return {"classes": list(task.facts["classes"]), "counts": counts.tolist()}


def as_text(intervals: Mapping[str, Mapping[str, Interval]], columns: Sequence[str]) -> str:
    """The table for the terminal: one line a method, mean and interval under each metric."""
    width = max(len(name) for name in intervals) + 2
    cells = {name: [str(row[c]) if c in row else "-" for c in columns] for name, row in intervals.items()}
    widths = [max(len(c), *(len(row[k]) for row in cells.values())) + 2 for k, c in enumerate(columns)]
    lines = ["".join(["".ljust(width), *(c.ljust(w) for c, w in zip(columns, widths, strict=True))]).rstrip()]
    for name, row in cells.items():
        lines.append("".join([name.ljust(width), *(c.ljust(w) for c, w in zip(row, widths, strict=True))]).rstrip())
    return "\n".join(lines)


def _finite(node: Any) -> Any:
    """NaN to null: JSON has no NaN."""
    if isinstance(node, Mapping):
        return {k: _finite(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(v) for v in node]
    if isinstance(node, float) and math.isnan(node):
        return None
    return node


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
