"""The scores of a model on a split: metrics of each record, with intervals, beside baselines."""

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
from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import assign
from esmshard.devices import DeviceName
from esmshard.errors import InputError
from esmshard.files import is_hub_name, replace_json, replace_text, replacing, shared_place
from esmshard.launch.process_group import World
from esmshard.model.weights import hub, open_weights
from esmshard.progress import Progress
from esmshard.recipe.data_section import EVERY
from esmshard.recipe.section_base import listed
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import MAIN, Row, Task, collate
from esmshard.tasks.finetuner import FineTuner, load_base, load_finetuned, without_tracks
from esmshard.tasks.intervals import BIASED, LEAST, Interval, bootstrap, count_units, difference, interval
from esmshard.tasks.metrics import records_with
from esmshard.train.records.verdict import aligned, verdict
from esmshard.vocab import chain_spans

CHUNK = 4096
"""The number of tokens whose records the model scores at once. Larger records are scored one by one, since pair maps
[L, L] need the most memory.
"""

BASELINES = "baselines.npz"


def validate(
    model: nn.Module,
    task: Task,
    data: Examples,
    tokens_per_rank: int,
    world: World,
    stop: Callable[[], object] = lambda: False,
) -> tuple[float, list[Row]] | None:
    """Compute the loss and one row of metrics for each record, in the order of the split, on every rank.

    Records are taken whole, and no gradient is computed. `stop` is called before each micro-batch, and must return the
    same on all ranks. The result is None if `stop` returned something true.
    """
    model.eval()
    longest = max(tokens_per_rank, int(data.tokens.max()))
    mine: list[tuple[int, Row]] = []
    sums, stopped = np.zeros(2), False
    with torch.no_grad():
        for micro in assign(range(len(data)), data.tokens, longest, world.data_rank, world.data_size):
            if stopped := bool(stop()):
                break
            batch, targets = collate(task, [data.get(n) for n in micro.records])
            outputs = model(batch.to(world.device))
            if micro.is_dummy:
                continue
            part = task.loss(outputs, targets)
            sums += [float(part.sum), float(part.count)]
            rows = task.score([o.cpu().numpy() for o in outputs], [t.numpy() for t in targets])
            mine += zip(micro.records, rows, strict=True)
    model.train()
    if stopped:
        return None
    # Ranks that work together have scored the same records.
    loss, count = (sum(column) for column in zip(*world.rows(sums.tolist())[:: world.together], strict=True))
    everyone = dict(pair for part in world.gather(mine) for pair in part)
    assert sorted(everyone) == list(range(len(data))), "each record is scored once"
    return loss / count if count else float("nan"), [everyone[n] for n in range(len(data))]


def fit_baselines(task: Task, train: Examples, base: FineTuner, path: Path) -> None:
    """Fit the task's baselines on training records and save their parameters as `.npz`. One process calls this."""
    some = range(0, len(train), -(-len(train) // task.baseline_records))
    known = task.baselines([train.get(n) for n in some], base)
    with replacing(path, binary=True) as file:
        np.savez(file, **known)  # type: ignore[arg-type]


def keep_seen(task: Task, train: Examples, valid: Examples, path: Path) -> None:
    """Save the ids of the training and validation records, one per line, where the task requires this file."""
    if task.keeps_ids:
        replace_text(path, "".join(f"{one.id(n)}\n" for one in (train, valid) for n in range(len(one))))


def read_baselines(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays that `fit_baselines` saved. The result is empty if there is no such file."""
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
    """Compute rows of metrics for the model and for each baseline of the task, in one process.

    Args:
        model: the fine-tuned model.
        task: the task that the model was trained for.
        data: the split. Its records are taken whole.
        known: the arrays that the baselines learned from the training split (`fit_baselines`).
        base: the model before the first step. Without this model, baselines that need it are left out.
    """
    table: dict[str, list[Row]] = {MAIN: []}
    if base is not None and known:
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


def report(
    model: str,
    data: Examples,
    out: Path,
    warn: Callable[[str], None],
    device: DeviceName = None,
    leakage: Sequence[str] = (),
    labels: str | None = None,
    tracks: Mapping[str, str] | None = None,
    complexes: str | None = None,
) -> str:
    """Score a consolidated model on a split, beside the model before fine-tuning and the task's baselines.

    Writes `evaluation.json` and `per_protein.csv` to `out`. Returns the table as text, followed by the reasons for
    missing intervals and by the verdict: whether fine-tuning was better than the strongest baseline.

    Args:
        model: a directory that `consolidate` wrote.
        data: the split.
        out: the directory for the results.
        warn: called with a sentence for each thing that is left out.
        device: see `chosen_device`.
        leakage: sentences on what the split shares with the training records, for `evaluation.json`.
        labels: the file of the labels, for `evaluation.json`, if they do not lie beside the records.
        tracks: the paths of the tracks of the split, for `evaluation.json`, if they are not those of the recipe.
        complexes: which chains of structures were joined, for `evaluation.json`.
    """
    found = load_finetuned(model, device)
    base, why = None, ""
    # Without `tracks` the data are a split of the model's own recipe, with the tracks of the recipe.
    left_out = [] if data.tracks and tracks is None else without_tracks(model, tracks or ())
    recipe = Recipe.model_validate(found.about["recipe"])
    name = Path(recipe.model.name)
    on_hub = is_hub_name(recipe.model.name) and not name.exists() and hub.find(recipe.model.name) is not None
    if not name.is_absolute() and len(name.parts) > 1 and not on_hub:
        # The weights come from where their publisher has them, and not from a file of that name on this machine. What a
        # stranger's file names is not downloaded.
        why = f"{model} comes without the model that it was fine-tuned from"
    else:
        try:
            base = load_base(recipe, found.task, device)
        except InputError as error:
            why = f"the model that {model} was fine-tuned from cannot be read ({error})"
    if why and found.task.of_base:
        left_out.append(f"baselines left out of the table: {listed(found.task.of_base)}, because {why}")
    known = read_baselines(open_weights.place(model) / BASELINES)
    if not (open_weights.place(model) / BASELINES).is_file():
        left_out.append(
            f"baselines left out of the table: all that learn from training records; no {model}/{BASELINES}"
        )
    for sentence in left_out:
        warn(sentence)
    table = evaluate(found.model, found.task, data, known, base)
    facts = {key: found.about[key] for key in ("esmshard", "step", "weights_sha256", "recipe")}

    def place(path: str | Path) -> str:  # from the directory of the evaluation, which may be shared
        return shared_place(str(Path(path).absolute()), out) if Path(path).exists() else str(path)

    facts |= {"model": place(open_weights.place(model)), "labels": None if labels is None else place(labels)}
    facts |= {"tokens_sha256": data.digest, "device": str(found.model.device)}
    facts |= {"tracks": {name: place(path) for name, path in tracks.items()}} if tracks else {}
    if complexes is not None:
        facts["complexes"] = complexes if complexes == EVERY else place(complexes)
    groups = [found.task.group(data.get(n), known) for n in range(len(data))]
    return write(out, data, found.task, table, facts | {"leakage": list(leakage), "left_out": left_out}, groups)


def write(
    directory: Path,
    data: Examples,
    task: Task,
    table: Mapping[str, Sequence[Row]],
    about: Mapping[str, Any],
    groups: Sequence[str] = (),
) -> str:
    """Write `evaluation.json` and `per_protein.csv`, and return a text: the table, what is missing, and the verdict.

    `evaluation.json` holds the intervals of every method and of the model's gains over the baselines, and the verdict.
    `per_protein.csv` holds every number of the model's rows.

    Args:
        directory: an existing directory.
        data: the split.
        task: the task.
        table: the rows of every method.
        about: more entries for `evaluation.json`.
        groups: of each record (`Task.group`); empty for no groups.
    """
    block_N, columns = data.blocks(), task.columns_of(table[MAIN])
    unit = "record" if block_N is None else task.in_common
    samples = {name: _resampled(task, rows, block_N) for name, rows in table.items()}
    intervals = {name: {m: interval(values, m) for m, values in found.items()} for name, found in samples.items()}
    differences = {
        name: {m: difference(samples[MAIN][m], found[m], m) for m in columns if m in found}
        for name, found in samples.items()
        if name != MAIN
    }
    counts = {metric: _units(table[MAIN], metric, block_N) for metric in columns}
    without = {
        metric: f"{count} {unit}{'' if count == 1 else 's'} with a value; an interval takes {LEAST}"
        for metric, count in counts.items()
        if count < LEAST
    }
    of_groups = _groups(task, table, block_N, groups)
    headline = task.columns[0]
    count = counts[headline]
    said = verdict(
        headline,
        {name: found[headline] for name, found in intervals.items() if headline in found},
        {name: found[headline] for name, found in differences.items() if headline in found},
        f"paired over {count:,} {unit}{'' if count == 1 else 's'}",
        lower_is_better=task.lower_is_better,
    )
    numbers = _numbers(table[MAIN])
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
        "interval": _method(unit, intervals[MAIN]),
        "without_interval": without,
        "verdict": said,
        "metrics": {name: {c: asdict(i) for c, i in row.items()} for name, row in intervals.items()},
        "differences": {name: {c: asdict(i) for c, i in row.items()} for name, row in differences.items()},
        "facts": task.facts,
        "groups": of_groups,
        "calibration": _calibration(table[MAIN]),
        "confusion": _confusion(table[MAIN], task),
    }
    replace_json(directory / "evaluation.json", evaluation)
    _write_rows(directory / "per_protein.csv", data, task, table, groups)
    return "\n".join([as_text(intervals | _lines_of(of_groups), columns), *without_interval(without), said])


def _write_rows(
    path: Path, data: Examples, task: Task, table: Mapping[str, Sequence[Row]], groups: Sequence[str]
) -> None:
    """Write a line for each record: id, lengths, block and group, if there are any, and the numbers of its row."""
    block_N, numbers = data.blocks(), _numbers(table[MAIN])
    # Where records are resampled in blocks the predictions of every baseline are saved, because the folds of a table of
    # variants are tested together.
    others = (
        []
        if block_N is None
        else [(name, key) for name in table if name != MAIN for key in numbers if key.startswith("prediction")]
    )
    head = ["id", "length", *(["length_a", "length_b"] if task.settings.pairs else [])]
    head += [*([] if block_N is None else ["block"]), *(["group"] if any(groups) else [])]
    lines = [[*head, *numbers, *(f"{key} of {name}" for name, key in others)]]
    for n, row in enumerate(table[MAIN]):
        values = [*(row.get(key, math.nan) for key in numbers), *(table[name][n][key] for name, key in others)]
        cells = ["" if math.isnan(v := float(value)) else f"{v:.6g}" for value in values]
        if task.settings.pairs:
            lengths = [end - start for start, end in chain_spans(data.whole(n))]
            lengths = [sum(lengths), *lengths]
        else:
            lengths = [data.length(n)]
        places = [*lengths, *([] if block_N is None else [block_N[n]]), *([groups[n]] if any(groups) else [])]
        lines.append([data.id(n), *map(str, places), *cells])
    with replacing(path) as file:
        spreadsheet.writer(file).writerows(lines)


def _numbers(rows: Sequence[Row]) -> list[str]:
    """Return the keys of the numbers of the rows. Records of several chains have more of them than others."""
    return [*dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, np.ndarray))]


def without_interval(reasons: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reason why metrics have no interval. Metrics with the same reason share a sentence.

    >>> without_interval({"MCC": "2 records", "ECE": "2 records", "Q3": "3 records"})
    ['No interval for MCC, ECE: 2 records.', 'No interval for Q3: 3 records.']
    """
    of: dict[str, list[str]] = {}
    for metric, reason in reasons.items():
        of.setdefault(reason, []).append(metric)
    return [f"No interval for {', '.join(metrics)}: {reason}." for reason, metrics in of.items()]


def _resampled(task: Task, rows: Sequence[Row], block_N: npt.NDArray[np.int64] | None) -> dict[str, list[float]]:
    """Call `bootstrap`, without resamples for a metric that too few records have a value of."""
    ready = task.prepared(rows)
    found = bootstrap(task.summary, ready, block_N=block_N)
    return {
        metric: values if _units(rows, metric, block_N) >= LEAST else values[:1] for metric, values in found.items()
    }


def _groups(
    task: Task, table: Mapping[str, Sequence[Row]], block_N: npt.NDArray[np.int64] | None, groups: Sequence[str]
) -> dict[str, Any]:
    """Count the records of each group, and compute the metrics of every method on them, unless they are all records."""
    found: dict[str, Any] = {}
    for group in sorted(set(groups) - {""}):
        members = [n for n, one in enumerate(groups) if one == group]
        found[group] = {"records": len(members), "metrics": {}}
        if len(members) == len(groups):
            continue
        part = None if block_N is None else block_N[members]
        samples = {name: _resampled(task, [rows[n] for n in members], part) for name, rows in table.items()}
        found[group]["metrics"] = {
            name: {m: asdict(interval(values, m)) for m, values in one.items()} for name, one in samples.items()
        }
    return found


def _lines_of(groups: Mapping[str, Any]) -> dict[str, dict[str, Interval]]:
    """Return the model's metrics on each group, by the name of a line of the table."""
    return {
        f"{MAIN}, {name}: {group['records']:,}": {m: Interval(**one) for m, one in group["metrics"][MAIN].items()}
        for name, group in groups.items()
        if group["metrics"]
    }


def _units(rows: Sequence[Row], metric: str, block_N: npt.NDArray[np.int64] | None) -> int:
    """Count the records, or the blocks of records, that have a value of a metric."""
    with_value_N = records_with(rows, metric)
    return count_units(int(with_value_N.sum()), None if block_N is None else block_N[with_value_N])


def _method(unit: str, found: Mapping[str, Interval]) -> str:
    """Describe in a phrase how the intervals were computed."""
    biased = [metric for metric in found if metric in BIASED]
    of_biased = f"; of {', '.join(biased)}, which noise raises, basic bootstrap, widened to its value" if biased else ""
    return f"95% percentile bootstrap over {unit}s{of_biased}; of differences, paired"


def _calibration(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Sum up the `calibration` [3, bins] of all rows, by bin of confidence.

    The result holds for each bin the number of predictions, their mean confidence, and the share that is correct.
    """
    if "calibration" not in rows[0]:
        return None
    count, confidence, right = np.sum([np.asarray(row["calibration"]) for row in rows], axis=0)
    with np.errstate(invalid="ignore"):
        shares = {"confidence": (confidence / count).tolist(), "accuracy": (right / count).tolist()}
    return {"edges": np.linspace(0, 1, len(count) + 1).tolist(), "count": count.tolist(), **shares}


def _confusion(rows: Sequence[Row], task: Task) -> dict[str, Any] | None:
    """Sum up the `confusion` [C, C] of all rows: true classes on the first axis, predicted classes on the second."""
    if "confusion" not in rows[0]:
        return None
    counts = np.sum([np.asarray(row["confusion"]) for row in rows], axis=0)
    return {"classes": list(task.facts["classes"]), "counts": counts.tolist()}


def as_text(intervals: Mapping[str, Mapping[str, Interval]], columns: Sequence[str]) -> str:
    """Format the table for the terminal: one line for each method, with mean and interval under each metric."""
    rows = [[name, *(str(row[c]) if c in row else "-" for c in columns)] for name, row in intervals.items()]
    return aligned([["", *columns], *rows])
