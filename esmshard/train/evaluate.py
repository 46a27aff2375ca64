"""The evaluation of a model and its baselines on a split: metrics for each record, and joint metrics with intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.checkpoint.consolidate import BASELINES
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.batching.packing import SCORED_TOKENS, assign, undivided
from esmshard.data.splits.leakage import ComparedRecords, hashes
from esmshard.errors import InputError
from esmshard.io.paths import found_place, is_hub_name, replace_json, replacing, shared_place
from esmshard.io.tables import counted, write_rows
from esmshard.model import hub, weights
from esmshard.model.config import SHIPPED
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shared_calls
from esmshard.progress import Progress, say
from esmshard.recipe.sections import EVERY, Recipe, listed
from esmshard.tasks.base import BEFORE, MAIN, Task, collate
from esmshard.tasks.finetuned import FineTuned, load_base, without_tracks
from esmshard.tasks.metrics import (
    BIASED,
    LEAST,
    Interval,
    Row,
    bootstrap,
    count_units,
    difference,
    interval,
    means,
    ranked,
    records_with,
)
from esmshard.vocab import BETWEEN, chain_spans, decode

R = TypeVar("R")

LOWER_IS_BETTER = ("RMSE", "log loss")
"""Metrics for which a lower value is better. The first metric in `Task.columns` is the headline metric, for which
`Task.lower_is_better` decides instead."""
LONGEST_PROFILE, MOST_RESIDUES = 1000, 2000
"""The maximum length (residues) of a protein that a report draws along its sequence, and the maximum number of dots in
the report's plot of observed and predicted values."""
TRAINED_ON, MOST_TRAINED_ON = "training sequences", 1_000_000
"""The name of the array in `baselines.npz` with a hash of each training sequence. It is left out if there are more than
MOST_TRAINED_ON training records."""
ALONE = World(0, 1, torch.device("cpu"), None)
"""The `World` of a process that has the complete model in fp32 and works without other ranks."""


def validate(
    model: nn.Module,
    task: Task,
    data: Examples,
    tokens_per_rank: int,
    world: World,
    stop: Callable[[], object] = lambda: False,
) -> tuple[float, list[Row]] | None:
    """Return the loss of a split and one row of metrics for each record, in the order of the split, on every rank.

    Records are not cropped, and no gradient is computed. A micro-batch has at most `tokens_per_rank` tokens, or more if
    the longest record has more. `stop` is called before each micro-batch, and must return the same value on all ranks.
    A true value ends the validation, which then returns None.
    """
    model.eval()
    longest = max(tokens_per_rank, int(data.tokens.max()))
    mine: list[tuple[int, Row]] = []
    sums, stopped = np.zeros(2), False
    with torch.no_grad():
        parts = (
            undivided(range(len(data)), world.data_rank)
            if task.settings.whole_steps
            else assign(range(len(data)), data.tokens, longest, world.data_rank, world.data_size)
        )
        for micro in parts:
            if stopped := bool(stop()):
                break
            batch, targets = collate(task, [data.get(n) for n in micro.records])
            outputs = model(batch.to(world.device))
            if micro.is_dummy:
                continue
            part = task.loss(outputs, targets)
            sums += [float(part.sum), float(part.count)]
            rows = [task.score(o.cpu().numpy(), t.numpy()) for o, t in zip(outputs, targets, strict=True)]
            mine += zip(micro.records, rows, strict=True)
    model.train()
    if stopped:
        return None
    # Ranks that compute the same records together (`world.together`) have the same sums.
    loss, count = (sum(column) for column in zip(*world.rows(sums.tolist())[:: world.together], strict=True))
    row_of = dict(pair for part in world.gather(mine) for pair in part)
    assert sorted(row_of) == list(range(len(data))), "each record is scored once"
    return loss / count if count else float("nan"), [row_of[n] for n in range(len(data))]


def fit_baselines(task: Task, train: Examples, base: FineTuner, ranks: World) -> dict[str, npt.NDArray[Any]]:
    """Fit the baselines of a task to training records, and return the fitted arrays by name, on every rank.

    All `ranks` call this function: they divide the forward passes, and the first rank fits the baselines. `base` is the
    model before fine-tuning. If each process has the complete model in fp32, `ranks` is ALONE, and each process does
    all the work.
    """
    examples = [train.get(n) for n in range(0, len(train), -(-len(train) // task.baseline_records))]
    with _together(base, ranks):
        task.look_ahead(examples, range(ranks.data_rank, len(examples), ranks.data_size), base)
    for remembered in ranks.gather_on_first(base.remembered):
        for name, outputs in remembered.items():
            base.remembered[name].update(outputs)
    patient = ranks.patient()
    with _together(base, patient):  # ranks that share the first rank's layers call this, too
        known = task.baselines(examples, base) if ranks.data_rank == 0 else {}
    base.remembered.clear()
    learned: dict[str, npt.NDArray[Any]] = patient.gather(known if ranks.is_first else None)[0]
    return learned


def _together(model: FineTuner | None, ranks: World) -> AbstractContextManager[None]:
    return nullcontext() if model is None or ranks is ALONE else shared_calls(model, ranks)


def sequence_hashes(data: Examples) -> npt.NDArray[np.uint64]:
    """Return a hash for the sequence of each record, uint64 [N]."""
    return hashes(ComparedRecords(len(data), data.whole, data.id))


def seen_before(
    model: str, trained_on: Mapping[str, Any], trained: npt.NDArray[np.uint64] | None, data: Examples
) -> tuple[list[str], int]:
    """Return at most one warning about records in `data` that `model` was trained on, and their number (0 if unknown).

    `trained_on` is the entry `data` of the model's `esmshard.json`. `trained` has the hashes of the training sequences,
    or is None if no hashes were stored.
    """
    digests = {split: facts.get("tokens_sha256") for split, facts in trained_on.items()}
    if data.digest in (digests.get("train"), digests.get("valid")):
        sentence = f"leakage: {model} was trained on these records or selected with them, so their scores are no test"
        return [sentence], len(data)
    if trained is not None:
        same = int(np.isin(sequence_hashes(data), trained).sum())
        meaning = "scores on these are no test" if same else "some may still be similar to training records"
        return [f"leakage: {same:,} of {len(data):,} records are training records of {model}; {meaning}"], same
    if "train" not in digests or data.digest == digests.get("test"):
        return [], 0
    train = trained_on["train"]
    return [
        f"leakage: {model} was trained on {train['records']} records of {Path(train['path']).name}, with which these "
        f"{len(data):,} records were not compared; scores on training records are no test"
    ], 0


def read_baselines(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of `fit_baselines`, and TRAINED_ON if it exists, from the file `baselines.npz`."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def score(model: FineTuner, task: Task, data: Examples, ranks: World = ALONE) -> list[Row]:
    """Return the fine-tuned model's row of metrics for each record of a split (`data`). Records are not cropped.

    The result is the same on every rank, and for every number of ranks. For `ranks` see `fit_baselines`.
    """

    def rows(examples: Sequence[Example]) -> list[Row]:
        inputs = [task.inputs(example) for example in examples]
        outputs = zip(model.outputs(inputs), inputs, strict=True)
        return [task.score(output, task_input.target) for output, task_input in outputs]

    return _of_each_record("evaluate", model, task, data, ranks, rows)


def score_baselines(
    task: Task,
    data: Examples,
    known: Mapping[str, npt.NDArray[Any]],
    base: FineTuner | None,
    ranks: World = ALONE,
) -> dict[str, list[Row]]:
    """Return a row of metrics for each record, by the name of the baseline. Records are not cropped.

    `known` has the arrays from `fit_baselines`. `base` is the model before fine-tuning; if it is None, baselines that
    need this model are left out. For `ranks` see `fit_baselines`.
    """
    uncalibrated = task.uncalibrated()

    def rows(examples: Sequence[Example]) -> list[dict[str, Row]]:
        record_rows: list[dict[str, Row]] = [{} for _ in examples]
        targets = [task.inputs(example).target for example in examples]
        for name, outputs in task.baseline_outputs(examples, known, base).items():
            for rows_of, target, output in zip(record_rows, targets, outputs, strict=True):
                rows_of[name] = uncalibrated.score(output, target) if isinstance(output, np.ndarray) else output
        return record_rows

    by_record = _of_each_record("baselines", base, task, data, ranks, rows)
    return {name: [rows_of[name] for rows_of in by_record] for name in by_record[0]}


def _of_each_record(
    title: str,
    model: FineTuner | None,
    task: Task,
    data: Examples,
    ranks: World,
    compute: Callable[[Sequence[Example]], Sequence[R]],
) -> list[R]:
    """Call `compute` on batches of records, which do not depend on the number of ranks. Return each record's result."""
    each = max(1, SCORED_TOKENS // int(data.tokens.max())) if task.names else 1
    firsts = range(0, len(data), each)
    mine: dict[int, Sequence[R]] = {}
    with Progress(title, len(data), show=ranks.is_first) as progress, _together(model, ranks):
        for first in firsts[ranks.data_rank :: ranks.data_size]:
            examples = [data.get(n) for n in range(first, min(first + each, len(data)))]
            mine[first] = compute(examples)
            progress.update(min(first + each * ranks.data_size, len(data)), "")
    packs = dict(pair for part in ranks.gather(mine) for pair in part.items())
    return [result for first in firsts for result in packs[first]]


def report(
    model: str,
    tuned: FineTuned,
    data: Examples,
    out: Path,
    labels: str | None = None,
    tracks: Mapping[str, str] | None = None,
    complexes: str | None = None,
) -> str:
    """Score a fine-tuned model, the model before fine-tuning and the baselines of the task on a split (`data`).

    Writes `evaluation.json` and `per_protein.csv` to `out`, and returns the text of `write`. Prints which baselines are
    left out, and how many of the records the model was trained on.

    `tuned` is the opened model of the directory `model`. `labels` is the file with the labels, if it is not the file
    with the records. `tracks` has the paths of tracks by name, or is None for those in the model's recipe. `complexes`
    is the file that says which chains were joined, EVERY if all were, or None if no chains were joined.
    """
    base, why = None, ""
    shown_name = model if model in SHIPPED else Path(model).name  # without the directory, because users share results
    # Without `tracks`, the split is from the model's recipe, and has the tracks in this recipe.
    left_out = [] if data.tracks and tracks is None else without_tracks(model, tracks or ())
    recipe = Recipe.model_validate(tuned.about["recipe"])
    name = Path(recipe.model.name)
    on_hub = is_hub_name(recipe.model.name) and not name.exists() and hub.find(recipe.model.name) is not None
    if not name.is_absolute() and len(name.parts) > 1 and not on_hub:
        # A relative path of another machine names another file here, and somebody else's file must start no download.
        why = f"{shown_name} comes without the model that it was fine-tuned from"
    else:
        try:
            base = load_base(recipe, tuned.task, tuned.model.device)
        except InputError as error:
            why = f"the base model of {shown_name} cannot be read ({error})"
    if why and tuned.task.of_base:
        left_out.append(f"baselines left out of the table: {listed(tuned.task.of_base)}, because {why}")
    file = weights.place(model) / BASELINES
    if not file.is_file():
        left_out.append(
            f"baselines fitted to training records are left out of the table, because {shown_name} has no {BASELINES}"
        )
    known = read_baselines(file) if file.is_file() else {}
    leakage, n_trained_on = seen_before(shown_name, tuned.about.get("data", {}), known.pop(TRAINED_ON, None), data)
    for sentence in [*left_out, *leakage]:
        say(sentence)
    table = {MAIN: score(tuned.model, tuned.task, data), **score_baselines(tuned.task, data, known, base)}
    about = described(model, tuned.about, data, out) | {
        "device": str(tuned.model.device),
        "precision": "fp32",
        "labels": None if labels is None else _place(labels, out),
        "in_sample": n_trained_on,
        "left_out": left_out,
        "leakage": leakage,
    }
    if tracks:
        about["tracks"] = {track: _place(path, out) for track, path in tracks.items()}
    if complexes is not None:
        about["complexes"] = complexes if complexes == EVERY else _place(complexes, out)
    groups = tuned.task.groups(data, known)
    return write(out, data, tuned.task, table, about, groups, name=model if model in SHIPPED else MAIN)


def _place(path: str | Path, out: Path) -> str:
    """Return `path` relative to `out`, so that a shared evaluation has no absolute paths of this machine. If nothing
    exists at `path`, return it unchanged.
    """
    return shared_place(str(Path(path).absolute()), out) if Path(path).exists() else str(path)


def described(model: str, about: Mapping[str, Any], data: Examples, out: Path) -> dict[str, Any]:
    """Return the entries of `evaluation.json` that describe the model and the records on which it was evaluated. Paths
    are relative to `out` (see `shared_place`). `about` is the model's `esmshard.json`.
    """
    facts = {key: about[key] for key in ("esmshard", "step", "weights_sha256")}
    base = about["recipe"]["model"]
    name = shared_place(found_place(base["name"], weights.directory(model)), out)
    facts["recipe"] = about["recipe"] | {"model": base | {"name": name}}
    return facts | {"model": _place(weights.place(model), out), "tokens_sha256": data.digest}


def write(
    directory: Path,
    data: Examples,
    task: Task,
    table: Mapping[str, Sequence[Row]],
    about: Mapping[str, Any],
    groups: Sequence[str] = (),
    name: str = MAIN,
) -> str:
    """Write `evaluation.json` and `per_protein.csv` to `directory`, and return metrics, notes and verdict as text.

    `table` has the rows of metrics for each method: the model (MAIN) and the baselines. `about` has the entries of
    `evaluation.json` that are not computed here. `groups` has the group of each record (`Task.groups`); empty without
    groups. `name` names the model in the results. Contact-map figures of an earlier evaluation are removed.
    """
    block_N, unit = task.units(data)
    samples = {method: _resampled(task, rows, block_N) for method, rows in table.items()}
    columns = tuple(column for column in task.columns if column in samples[MAIN])
    intervals = {method: {m: interval(values, m) for m, values in row.items()} for method, row in samples.items()}
    differences = {
        method: {m: difference(samples[MAIN][m], row[m], m) for m in columns if m in row}
        for method, row in samples.items()
        if method != MAIN
    }
    counts = {metric: _units(table[MAIN], metric, block_N) for metric in columns}
    without_interval = [
        f"No interval for {', '.join(metric for metric in columns if counts[metric] == count)}: {counted(count, unit)} "
        f"with a value; an interval needs {LEAST}."
        for count in dict.fromkeys(counts.values())
        if count < LEAST
    ]
    group_results = _groups(task, table, block_N, groups)
    comparisons = []
    for metric in columns:
        values, gains = ({m: row[metric] for m, row in t.items() if metric in row} for t in (intervals, differences))
        lower = task.lower_is_better if metric == columns[0] else metric in LOWER_IS_BETTER
        comparisons.append(Comparison(metric, values, gains, lower))
    basis = f"paired over {counted(counts[columns[0]], unit)}"
    text = in_sample(about.get("in_sample", 0), len(data)) + comparisons[0].verdict(basis) + _others(comparisons)
    if name != MAIN:
        text = text.replace("Fine-tuning", f"The training of {name}").replace("the fine-tuned model", name)
    numbers = _numbers(table[MAIN])
    scaling = _scaling(task.facts, intervals[MAIN])
    intervals = {name if method == MAIN else method: row for method, row in intervals.items()}
    evaluation = {
        **about,
        "task": about["recipe"]["task"]["name"],
        "split": data.name,
        "data": shared_place(str(data.path.absolute()), directory),
        "records": len(data),
        "columns": columns,
        "lower_is_better": task.lower_is_better,
        "without_value": {
            c: sum(math.isnan(float(row.get(c, math.nan))) for row in table[MAIN]) for c in columns if c in numbers
        },
        "interval": _method(unit, {column: intervals[name][column] for column in columns}),
        "without_interval": without_interval,
        "verdict": text,
        "metrics": {method: {c: asdict(i) for c, i in row.items()} for method, row in intervals.items()},
        "differences": {method: {c: asdict(i) for c, i in row.items()} for method, row in differences.items()},
        "facts": task.facts,
        "groups": group_results,
        **_summed(table[MAIN], task, scaling),
        **_profiles(table[MAIN], data, task),
        **_weights(table[MAIN], data),
    }
    for old in (directory / "figures").glob("contacts_*.png"):
        old.unlink()
    replace_json(directory / "evaluation.json", evaluation)
    _write_rows(directory / "per_protein.csv", data, task, table, groups)
    rows = intervals | {
        f"{MAIN}, {group}: {entry['records']:,}": {m: Interval(**cell) for m, cell in entry["metrics"][MAIN].items()}
        for group, entry in group_results.items()
        if entry["metrics"]
    }
    lines = [[method, *(str(row[c]) if c in row else "-" for c in columns)] for method, row in rows.items()]
    notes = [*without_interval, *([scaling] if scaling else [])]
    return "\n".join([aligned([["", *columns], *lines]), *notes, text])


def _write_rows(
    path: Path, data: Examples, task: Task, table: Mapping[str, Sequence[Row]], groups: Sequence[str]
) -> None:
    """Write a CSV line for each record: id, lengths, group (if any) and metrics of the fine-tuned model. For a table of
    variants, also write the block that the bootstrap resamples, and the predictions of the baselines.
    """
    block_N, numbers, classes = data.blocks(), _numbers(table[MAIN]), task.facts.get("classes")
    head = ["id", "length", *(["length_a", "length_b"] if task.settings.pairs else [])]
    head += [*([] if block_N is None else ["block"]), *(["group"] if any(groups) else [])]
    keys = [(MAIN, key, key) for key in numbers]
    if block_N is not None:  # `cross_validation.conclude` reads the predictions of all methods
        predictions = [key for key in numbers if key.startswith("prediction")]
        keys += [(name, key, f"{key} of {name}") for name in table if name != MAIN for key in predictions]
    lines = [[*head, *(title for _, _, title in keys)]]
    for n in range(len(data)):
        lengths = [data.length(n)]
        if task.settings.pairs:
            lengths = [end - start for start, end in chain_spans(data.whole(n))]
            lengths = [sum(lengths), *lengths]
        places = [*lengths, *([] if block_N is None else [block_N[n]]), *([groups[n]] if any(groups) else [])]
        cells = []
        for name, column, _ in keys:
            value = float(table[name][n].get(column, math.nan))
            if classes is not None and column in ("target", "prediction"):
                cells.append(classes[int(value)])
            else:
                cells.append("" if math.isnan(value) else f"{value:.6g}")
        lines.append([data.id(n), *map(str, places), *cells])
    with replacing(path) as file:
        write_rows(file, lines)


def _numbers(rows: Sequence[Row]) -> list[str]:
    """Return the names of all values in the rows that are numbers. Records of several chains have additional values."""
    return [*dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, np.ndarray))]


def _resampled(task: Task, rows: Sequence[Row], block_N: npt.NDArray[np.int64] | None) -> dict[str, list[float]]:
    """Return each metric's value on all rows. If LEAST or more units have a value, add its values on resamples."""
    if task.averages_units and block_N is not None:
        each = [
            task.summary([rows[n] for n in np.flatnonzero(block_N == block).tolist()]) for block in np.unique(block_N)
        ]
        samples = bootstrap(lambda units: means(units, list(each[0])), each)
    else:
        samples = bootstrap(task.summary, ranked(rows), block_N=block_N)
    return {m: values if _units(rows, m, block_N) >= LEAST else values[:1] for m, values in samples.items()}


def _groups(
    task: Task, table: Mapping[str, Sequence[Row]], block_N: npt.NDArray[np.int64] | None, groups: Sequence[str]
) -> dict[str, Any]:
    """Return each group's size and the metrics of every method on it. A group with all records has no metrics."""
    group_results: dict[str, Any] = {}
    for group in sorted(set(groups) - {""}):
        members = [n for n, name in enumerate(groups) if name == group]
        group_results[group] = {"records": len(members), "metrics": {}}
        if len(members) == len(groups):
            continue
        part = None if block_N is None else block_N[members]
        for method, rows in table.items():
            samples = _resampled(task, [rows[n] for n in members], part)
            group_results[group]["metrics"][method] = {m: asdict(interval(values, m)) for m, values in samples.items()}
    return group_results


def _units(rows: Sequence[Row], metric: str, block_N: npt.NDArray[np.int64] | None) -> int:
    """Count the units with a value for a metric. A unit is a block of records or, without blocks, a record."""
    with_value_N = records_with(rows, metric)
    return count_units(int(with_value_N.sum()), None if block_N is None else block_N[with_value_N])


def _method(unit: str, intervals: Mapping[str, Interval]) -> str:
    """Return a phrase on how the intervals were computed. `unit` is the noun for a resampled unit, such as `record`."""
    if all(math.isnan(limits.low) for limits in intervals.values()):
        return "none"
    biased = [metric for metric in intervals if metric in BIASED]
    other = f"; for {', '.join(biased)}, which noise raises, basic bootstrap widened to the value" if biased else ""
    return f"95% percentile bootstrap over {unit}s{other}; for differences, paired"


def _profiles(rows: Sequence[Row], data: Examples, task: Task) -> dict[str, Any]:
    """Return the data for the figures of a task with a value for each residue; empty for other tasks.

    `profiles` has observed and predicted values along three records: those with the highest, median and lowest score.
    If the task predicts numbers, `residues` has these values for every n-th residue of all records.
    """
    score = next((column for column in task.columns if column in rows[0]), None)
    if "profile" not in rows[0] or score is None:
        return {}
    profile_of = [np.asarray(row["profile"], np.float64).round(5) for row in rows]  # [2, L] each
    value_N = np.array([row[score] for row in rows], dtype=np.float64)
    usable = np.isfinite(value_N) & (np.array([data.length(n) for n in range(len(data))]) <= LONGEST_PROFILE)
    order = sorted(np.flatnonzero(usable).tolist(), key=lambda n: -value_N[n])
    drawn: dict[str, Any] = {"profiles": []}
    for n in dict.fromkeys(order[:1] + order[len(order) // 2 :][:1] + order[-1:]):
        values = dict(zip(("observed", "predicted"), profile_of[n].tolist(), strict=True))
        drawn["profiles"].append({"id": data.id(n), "score": score, "value": value_N[n], **values})
    if not task.one_of_names:
        all_2M = np.concatenate(profile_of, axis=1)
        all_2M = all_2M[:, ~np.isnan(all_2M[0])]
        sample_2M = all_2M[:, :: max(1, -(-all_2M.shape[1] // MOST_RESIDUES))]
        drawn["residues"] = dict(zip(("observed", "predicted"), sample_2M.tolist(), strict=True))
    return drawn


def _weights(rows: Sequence[Row], data: Examples) -> dict[str, Any]:
    """Return the data for the figures of a head with weights of residues; empty for other heads.

    `weights` has the chains and the weights of each chain's residues for three records of at most LONGEST_PROFILE
    residues, spread evenly over the split.
    """
    if "weights" not in rows[0]:
        return {}
    usable = [n for n, row in enumerate(rows) if np.size(row["weights"]) <= LONGEST_PROFILE]
    drawn = []
    for n in dict.fromkeys(usable[(2 * k + 1) * len(usable) // 6] for k in range(3 if usable else 0)):
        chains = decode(data.get(n).tokens).split(BETWEEN)
        weights = np.split(np.asarray(rows[n]["weights"]), np.cumsum([len(chain) for chain in chains])[:-1])
        drawn.append({"id": data.id(n), "chains": chains, "weights": [w_L.round(5).tolist() for w_L in weights]})
    return {"weights": drawn}


def _scaling(facts: Mapping[str, Any], ours: Mapping[str, Interval]) -> str | None:
    """Return a sentence on the temperature that scales the probabilities; None if the task fits no temperature."""
    if "temperature" not in facts:
        return None
    records = f"{facts['validation_records']:,} validation records"
    if facts["temperature"] is None:
        return f"The probabilities are not calibrated: {records} have labels, and a temperature needs {LEAST}."
    changes = ", ".join(f"{m} {ours[f'{m} before scaling']} before and {ours[m]} after" for m in ("ECE", "log loss"))
    return f"The probabilities are scaled by a temperature of {facts['temperature']:.2f}, from {records}: {changes}."


def _summed(rows: Sequence[Row], task: Task, scaling: str | None) -> dict[str, Any]:
    """Return the data for the figures of a task with classes; empty for other tasks.

    `confusion` has counts [C, C], with true classes on the first axis. `calibration` has three lists with a value for
    each bin of confidence: the number of predictions, their mean confidence and the share of correct ones. It also has
    the sentence `scaling` of `_scaling`.
    """
    summed: dict[str, Any] = {}
    if "confusion" in rows[0]:
        counts = np.sum([np.asarray(row["confusion"]) for row in rows], axis=0)
        summed["confusion"] = {"classes": list(task.facts["classes"]), "counts": counts.tolist()}
    if "calibration" in rows[0]:
        count, confidence, right = np.sum([np.asarray(row["calibration"]) for row in rows], axis=0)
        with np.errstate(invalid="ignore"):
            shares = {"confidence": (confidence / count).tolist(), "accuracy": (right / count).tolist()}
        summed["calibration"] = {"count": count.tolist(), **shares, "scaling": scaling}
    return summed


def aligned(rows: Sequence[Sequence[str]]) -> str:
    r"""Format a table for the terminal, with columns aligned to the left.

    >>> aligned([["", "MCC"], ["fine-tuned", "0.5"]])
    '            MCC\nfine-tuned  0.5'
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True)
class Comparison:
    """The comparison of a model with its baselines by one metric."""

    metric: str
    values: Mapping[str, Interval]
    """The metric's value for each method: the model (MAIN) and the baselines."""
    gains: Mapping[str, Interval]
    """For each baseline, the model's value minus the baseline's value. Each resample has the same units for both."""
    lower_is_better: bool = False

    @property
    def best(self) -> str | None:
        """The name of the baseline with the best value; None if no baseline has a value."""
        sign = -1 if self.lower_is_better else 1
        known = [name for name in self.gains if name in self.values and math.isfinite(self.values[name].value)]
        return max(known, key=lambda name: sign * self.values[name].value, default=None)

    @property
    def how(self) -> str:
        """A phrase such as `better than` that compares the model with the best baseline; empty without a baseline."""
        if self.best is None:
            return ""
        gain, sign = self.gains[self.best], -1 if self.lower_is_better else 1
        if math.isnan(gain.value):
            return "not comparable with"
        if math.isnan(gain.low):
            how = "equal" if gain.value == 0 else "better" if sign * gain.value > 0 else "worse"
            return f"{how} in this sample {'to' if how == 'equal' else 'than'}"
        low, high = sorted((sign * gain.low, sign * gain.high))
        return "better than" if low > 0 else "worse than" if high < 0 else "not clearly apart from"

    def verdict(self, basis: str) -> str:
        """Say whether fine-tuning beat the best baseline. `basis` is a phrase such as `paired over 12 positions`."""
        if not self.gains:
            return f"There is no baseline to compare the {self.metric} of the fine-tuned model with."
        ours = self.values[MAIN].value
        if self.best is None or not math.isfinite(ours):
            return f"{self.metric} is undefined for the model or for every baseline, so they cannot be compared."
        gain, theirs = self.gains[self.best], self.values[self.best].value
        name = "the model before fine-tuning" if self.best == BEFORE else self.best
        values = f"{self.metric} {ours:.3f} against {theirs:.3f}, a difference of {gain.value:+.3f}"
        if math.isnan(gain.low):
            return (
                f"Fine-tuning was {self.how} the best baseline, {name}: {values}. Without an interval, chance cannot "
                f"be excluded ({basis}; an interval needs {LEAST})."
            )
        consequence = {
            "better than": "",
            "worse than": f"; without training, {name} is better",
            "not clearly apart from": f"; no advantage over {name} is shown",
        }[self.how]
        limits = f"[{gain.low:+.3f}, {gain.high:+.3f}] (95%, {basis})"
        verb = "beat" if self.how == "better than" else f"was {self.how}"
        return f"Fine-tuning {verb} the best baseline, {name}: {values} {limits}{consequence}."


def _others(comparisons: Sequence[Comparison]) -> str:
    """Name the metrics, except the first, in which the model is clearly better or worse than the best baseline.

    Metrics with the same result as the first are left out. ECE is left out, because a prediction of the class
    frequencies for each record already has the best ECE.
    """
    clear: dict[str, list[str]] = {"better than": [], "worse than": []}
    for other in comparisons[1:]:
        if other.best is not None and other.how in clear.keys() - {comparisons[0].how} and other.metric != "ECE":
            gain = other.gains[other.best]
            values = f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] against {other.best}"
            clear[other.how].append(f"{other.metric} ({values})")
    parts = [f"clearly {how} the best baseline in {listed(metrics)}" for how, metrics in clear.items() if metrics]
    return f" In other metrics it is {', and '.join(parts)}." if parts else ""


def in_sample(trained_on: int, records: int) -> str:
    """Return a warning for the start of a verdict; empty if none of the test records were used in training."""
    if not trained_on:
        return ""
    return f"In sample: {trained_on:,} of {records:,} test records were in training, and the values count them. "
