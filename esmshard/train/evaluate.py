"""Scores of a model on a split: per record, gathered, each record once; means with intervals beside baselines."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.data.loader import Examples
from esmshard.data.packing import deal
from esmshard.errors import InputError
from esmshard.parallel.mesh import World
from esmshard.settings import Recipe
from esmshard.tasks.finetuner import FineTuner, load_finetuned, load_untrained
from esmshard.tasks.protocol import Row, Task, collate
from esmshard.train.metrics import Interval, bootstrap

Outputs = Callable[[TokenBatch], Sequence[torch.Tensor]]
"""From a batch to one output a record."""


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


def evaluate(
    models: Mapping[str, Outputs], task: Task, data: Examples, known: Mapping[str, list[float]]
) -> dict[str, list[Row]]:
    """Rows of metrics for each model and each baseline of the task, in one process.

    Args:
        models: name to a function from a batch to one output a record.
        task: what they were trained for.
        data: the split; its records are taken whole.
        known: the numbers that the task's baselines took from the training split (`Task.baselines`).
    """
    table: dict[str, list[Row]] = {name: [] for name in models}
    for n in range(len(data)):
        batch, targets = collate(task, [data.get(n)])
        target: npt.NDArray[Any] = targets[0].numpy()
        with torch.no_grad():
            for name, outputs in models.items():
                table[name] += task.score([outputs(batch)[0].cpu().numpy()], [target])
        for name, output in task.baseline_outputs(target, known).items():
            row = task.base_rate(target) if output is None else task.score([output], [target])[0]
            table.setdefault(name, []).append(row)
    return table


def summarise(table: Mapping[str, Sequence[Row]], columns: Sequence[str]) -> dict[str, dict[str, Interval]]:
    """Mean and 95% bootstrap interval over records, for each method and metric."""
    return {name: {c: bootstrap([row[c] for row in rows]) for c in columns} for name, rows in table.items()}


def report(model: str, data: Examples, out: Path, warn: Callable[[str], None]) -> str:
    """Score a consolidated model on a split, beside the untrained model and the task's baselines.

    Writes `evaluation.json` and `per_protein.csv` to `out` and returns the table.
    """
    found = load_finetuned(model)
    methods: dict[str, FineTuner] = {"fine-tuned": found.model}
    try:
        methods["untrained"] = load_untrained(Recipe.model_validate(found.about["recipe"]))
    except InputError as error:
        warn(f"the untrained model is left out of the table: {error}")
    device = next(found.model.parameters()).device

    def on_device(module: FineTuner) -> Outputs:
        return lambda batch: module(batch.to(device))

    outputs = {name: on_device(module) for name, module in methods.items()}
    table = evaluate(outputs, found.task, data, found.about["baselines"])
    facts = {key: found.about[key] for key in ("esmshard", "step", "weights_sha256", "recipe")}
    return as_text(write(out, data, found.task, table, "fine-tuned", facts), found.task.columns)


def write(
    directory: Path, data: Examples, task: Task, table: Mapping[str, Sequence[Row]], main: str, about: Mapping[str, Any]
) -> dict[str, dict[str, Interval]]:
    """Write `evaluation.json` (intervals of every method) and `per_protein.csv` (every metric of the main model).

    Returns the intervals.
    """
    intervals = summarise(table, task.columns)
    skipped = {c: sum(bool(np.isnan(row[c])) for row in table[main]) for c in task.columns}
    evaluation = {
        **about,
        "split": data.name,
        "data": str(data.path),
        "records": len(data),
        "without_value": skipped,
        "interval": "95% percentile bootstrap over records",
        "metrics": {name: {c: asdict(i) for c, i in row.items()} for name, row in intervals.items()},
    }
    _replace(directory / "evaluation.json", json.dumps(_finite(evaluation), indent=1) + "\n")
    lines = [["id", "length", *table[main][0]]]
    for n, row in enumerate(table[main]):
        values = ["" if np.isnan(v) else f"{v:.6g}" for v in row.values()]
        lines.append([data.id(n), str(data.tokens[n] - 2), *values])
    temporary = directory / ".tmp-per_protein.csv"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    temporary.replace(directory / "per_protein.csv")
    return intervals


def as_text(intervals: Mapping[str, Mapping[str, Interval]], columns: Sequence[str]) -> str:
    """The table for the terminal: one line a method, mean and interval under each metric."""
    width = max(len(name) for name in intervals) + 2
    cells = {name: [str(row[c]) for c in columns] for name, row in intervals.items()}
    widths = [max(len(c), *(len(row[k]) for row in cells.values())) + 2 for k, c in enumerate(columns)]
    lines = ["".join(["".ljust(width), *(c.ljust(w) for c, w in zip(columns, widths, strict=True))]).rstrip()]
    for name, row in cells.items():
        lines.append("".join([name.ljust(width), *(c.ljust(w) for c, w in zip(row, widths, strict=True))]).rstrip())
    return "\n".join(lines)


def _finite(node: Any) -> Any:
    """NaN to null: JSON has no NaN."""
    if isinstance(node, dict):
        return {k: _finite(v) for k, v in node.items()}
    if isinstance(node, float) and np.isnan(node):
        return None
    return node


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
