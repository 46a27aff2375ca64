"""Write the page of `esmshard report RUN`: one HTML file about a run, which needs no network, script or server.

The function `run_page`, `variants_page` or `sweep_page` makes a dictionary from the files of a run. A template in the
folder `templates` contains the sentences of the page, and makes the page from this dictionary.
"""

import csv
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esmshard import __version__
from esmshard.data.mutations import Mutation, parse_name, parse_variant
from esmshard.errors import InputError, reading, writing
from esmshard.io.paths import memory_text, read_json, replace_text, without_directories
from esmshard.io.tables import counted
from esmshard.predict.pictures import LETTERS, substitution_grid
from esmshard.predict.variant_tables import better_baseline, rows_of_run
from esmshard.progress import duration, rate
from esmshard.recipe import recipe_file, sweep_file
from esmshard.recipe.sections import Recipe
from esmshard.report import charts
from esmshard.report.charts import Values, chart
from esmshard.tasks.base import BEFORE, MAIN
from esmshard.tasks.metrics import Interval, spearman_within
from esmshard.tasks.registry import new_task
from esmshard.train.cross_validation import AVERAGE, CURVE, HEADS, OF_PROTEINS, SUMMARY
from esmshard.train.evaluate import Comparison
from esmshard.train.run_dir import METRICS, SWEEP, goodput, is_step, metrics_of, read_status

RANKED = "ranked.csv"
MOST_TARGETS = 6
"""The maximum number of targets that get a chart."""
MOST_POSITIONS = 1000
"""The maximum number of positions in a substitution map."""
BEST = 20
"""The maximum number of rows in the table of ranked variants."""
MOST_TRIALS = 50
"""The maximum number of rows in the table of trials. The file sweep.json has all trials."""


def report(run: Path, out: Path | None = None) -> Path:
    """Write a page about a run, which may be done, running, preempted or failed. Return the path of the page.

    Args:
        run: the directory of a run, of a cross-validated run of variants, or of a sweep.
        out: the file to write; by default `report.html` in the directory of the run. An existing file is replaced.

    Raises:
        InputError: there is no run, a file of the run is damaged, matplotlib is missing, or `out` cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    out = out or run / "report.html"
    if not out.parent.is_dir():
        raise InputError(f"{out}: there is no directory {out.parent}; make it first")
    known = {f"{run.absolute().parent}/", f"{run.resolve().parent}/"}

    def shared(value: Any) -> Any:
        """Shorten each path in a text to its last part, so that a shared page shows no private directories. Remove
        the directories `known` first, because their names may contain spaces.
        """
        if type(value) is not str:
            return value
        ends = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        return without_directories(re.sub(rf"(?<![\w.:/~<&])(?:{ends})", "", value))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=shared,
    )
    environment.filters |= {"number": number_text, "unit": unit_text, "range": range_text, "cell": cell}
    environment.filters |= {"memory": memory_text, "duration": duration, "rate": rate}
    environment.filters |= {"counted": counted, "sentence": lambda text: f"{text[:1].upper()}{text[1:]}"}
    with reading(f"{run}: one of its JSON or CSV files", "remove it, or repeat the command that wrote it"):
        if (run / SWEEP).is_file():
            name, values = "sweep", sweep_page(run)
        elif "joint" in _json(run / SUMMARY):
            name, values = "variants", variants_page(run)
        else:
            name, values = "run", run_page(run)
        known.update(_directories(values))
        template = environment.get_template(f"{name}.html.jinja")
        page = template.render(title=run.resolve().name, version=__version__, main=MAIN, before=BEFORE, **values)
    with writing(out, "make room, or choose another place with -o FILE"):
        replace_text(out, page)
    return out


def _directories(node: Any) -> Iterator[str]:
    """Yield the parent directory of each absolute path among the values of a page."""
    node = node.model_dump() if isinstance(node, Recipe) else node
    if isinstance(node, str) and node.startswith("/") and ": " not in node:
        yield f"{Path(node).parent}/"
    elif isinstance(node, Mapping | list | tuple):
        for part in node.values() if isinstance(node, Mapping) else node:
            yield from _directories(part)


def run_page(run: Path) -> dict[str, Any]:
    """Return the values for the template `run.html.jinja`. The run may be unfinished."""
    known = ("recipe.yaml", "status.json", METRICS, "evaluation.json")
    if not any((run / name).is_file() for name in known):
        raise InputError(f"{run}: contains no run ({', '.join(known)} are missing); give the directory of a run")
    recipe = recipe_file.load(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else None
    versions, tested = _json(run / "versions.json"), _evaluation(run / "evaluation.json")
    # Entries that are dictionaries have a value for each rank. In a long run they would need gigabytes of memory.
    lines = [{key: value for key, value in line.items() if not isinstance(value, dict)} for line in metrics_of(run)]
    steps, valid = [line for line in lines if is_step(line)], [line for line in lines if line.get("split") == "valid"]
    headline = next((key for line in valid for key in line if key not in ("step", "split", "loss", "time")), "")
    lower = recipe is not None and new_task(recipe.task, {}).lower_is_better
    if tested:
        headline, lower = tested["columns"][0], tested["lower_is_better"]
    checked = [(number(line.get(headline)), int(line["step"])) for line in valid]
    checked = [pair for pair in checked if math.isfinite(pair[0])]
    best_valid = (min if lower else max)(checked, key=lambda pair: pair[0], default=None)
    residues, seconds = (float(np.nansum(_column(steps, key))) for key in ("residues", "step_s"))
    return {
        "recipe": recipe,
        "recipe_text": None if recipe is None else _recipe_text((run / "recipe.yaml").read_text(encoding="utf-8")),
        "command": None if recipe is None else _command(run, "recipe.yaml", versions.get("processes", 1)),
        "versions": {key: value for key, value in versions.items() if not isinstance(value, dict | list)},
        "data": versions.get("data", {}),
        "status": read_status(run),
        "tested": tested,
        "headline": headline,
        "best_valid": best_valid,
        "steps": len(steps) and int(steps[-1]["step"]),
        "not_finite": sum(not math.isfinite(number(line.get("loss"))) for line in steps),
        "residues": residues,
        "speed": residues / seconds if seconds else None,
        "memory": max((line["peak_memory_bytes"] for line in steps if line.get("peak_memory_bytes")), default=None),
        "time": goodput(lines),
        "curves": _curves(steps, valid, headline, best_valid),
        **(_results(run, tested) if tested else {}),
    }


def _evaluation(path: Path) -> dict[str, Any] | None:
    """Return the values of `evaluation.json`, and the best baseline; None if the file does not exist."""
    raw = _json(path)
    if not raw:
        return None
    metrics, differences = ({m: intervals(row) for m, row in raw[key].items()} for key in ("metrics", "differences"))
    headline, lower, name = raw["columns"][0], raw["lower_is_better"], next(iter(metrics))
    values, gains = (
        {method: row[headline] for method, row in rows.items() if headline in row} for rows in (metrics, differences)
    )
    comparison = Comparison(headline, values, gains, lower)
    return raw | {
        "metrics": metrics,
        "differences": differences,
        "groups": {
            f"{group} ({of_group['records']:,}): {method}": intervals(row)
            for group, of_group in raw.get("groups", {}).items()
            for method, row in of_group["metrics"].items()
        },
        "name": name,
        "best": comparison.best,
        "how": comparison.how,
        "few": raw.get("without_interval", []),
        "chart": chart(charts.intervals, values, name, headline, height=0.9 + 0.3 * len(values)),
    }


def _curves(
    steps: Sequence[Mapping[str, Any]],
    valid: Sequence[Mapping[str, Any]],
    headline: str,
    best: tuple[float, int] | None,
) -> dict[str, str]:
    """Return charts over the steps, such as losses. The metric `headline` has a star at `best` (value and step)."""
    step_S, step_V = _column(steps, "step"), _column(valid, "step")
    lines = {"loss": {"training": (step_S, _column(steps, "loss")), "validation": (step_V, _column(valid, "loss"))}}
    if headline:
        lines[headline] = {"validation": (step_V, _column(valid, headline))}
    for key, name, unit in (
        ("lr", "learning rate", 1),
        ("grad_norm", "gradient norm", 1),
        ("residues_per_s", "residues/s", 1),
        ("peak_memory_bytes", "peak memory (GiB)", 2**30),
    ):
        lines[name] = {"training": (step_S, _column(steps, key) / unit)}
    drawn = {}
    for name, of_name in lines.items():
        known = {label: line for label, line in of_name.items() if np.isfinite(line[1]).any()}
        if known:
            star = (best[1], best[0]) if best and name == headline else None
            drawn[name] = chart(charts.curves, name, known, star, from_zero=name not in ("loss", headline))
    return drawn


def _results(run: Path, tested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the charts of a tested model's predictions. A chart is left out if its values do not exist."""
    proteins: dict[str, Values] = {}
    if (run / "per_protein.csv").is_file():
        head, *body = _rows(run / "per_protein.csv")
        proteins = {name: np.array([number(row[k]) for row in body]) for k, name in enumerate(head)}
    targets = tested["facts"].get("targets", [])
    pairs: dict[str, tuple[Values, ...]] = {}
    for name in targets:
        of = f" {name}" if len(targets) > 1 else ""
        if f"target{of}" in proteins:
            pairs[name] = (proteins[f"target{of}"], proteins[f"prediction{of}"])
    scores = {name: proteins[name] for name in tested["columns"] if name in proteins}
    scores |= {f"absolute error of {name}": np.abs(a - b) for name, (a, b) in pairs.items()}
    scores = {name: score_N for name, score_N in scores.items() if np.isfinite(score_N).any()}
    if residues := tested.get("residues"):
        pairs["value of a residue"] = _numbers(residues, "observed", "predicted")
    classes = tested["facts"].get("classes", ())
    profiles = [
        (chart(charts.profile, *_numbers(protein, "observed", "predicted"), classes), protein)
        for protein in tested.get("profiles", ())
    ]
    values: dict[str, Any] = {
        "maps": [
            charts.data_uri(path.read_bytes(), "png") for path in sorted((run / "figures").glob("contacts_*.png"))
        ],
        "measured": _measured(pairs),
        "profiles": profiles,
        "weights": [
            (chart(charts.residue_weights, record["chains"], record["weights"]), record["id"])
            for record in tested.get("weights", ())
        ],
        "by_length": [
            (chart(charts.dots, proteins["length"], score_N, "length (residues)", name), name)
            for name, score_N in [*scores.items()][:1]
        ],
        "confusion": None,
        "calibration": None,
    }
    if counted_classes := tested.get("confusion"):
        names, counts_CC = counted_classes["classes"], np.array(counted_classes["counts"], dtype=np.float64)
        side = float(np.clip(1.6 + 0.28 * len(names), 2.8, 6))
        values["confusion"] = chart(charts.confusion, names, counts_CC, height=side, width=side + 0.6)
    if of_bins := tested.get("calibration"):
        count, confidence, accuracy = _numbers(of_bins, "count", "confidence", "accuracy")
        used = count > 0
        count, confidence, accuracy = count[used], confidence[used], accuracy[used]
        values["calibration"] = {
            "chart": chart(charts.reliability, count, confidence, accuracy, height=3.3),
            "error": float((count * np.abs(confidence - accuracy)).sum() / count.sum()),
            "count": int(count.sum()),
            "scaling": of_bins.get("scaling"),
        }
    return values


def _measured(pairs: Mapping[str, tuple[Values, ...]]) -> list[tuple[str, str, int]]:
    """Return charts of predicted against measured values, each with its target and the number of values."""
    drawn = []
    for name, (measured_N, predicted_N) in [*pairs.items()][:MOST_TARGETS]:
        known = np.isfinite(measured_N) & np.isfinite(predicted_N)
        if known.any():
            names = (f"measured {name}", f"predicted {name}")
            picture = chart(charts.dots, measured_N[known], predicted_N[known], *names, same_unit=True, height=3.3)
            drawn.append((picture, name, int(known.sum())))
    return drawn


def variants_page(run: Path) -> dict[str, Any]:
    """Return the values for the template `variants.html.jinja`, for a cross-validated run of variants."""
    summary = _json(run / SUMMARY)
    joint, folds = summary["joint"], summary["folds"]
    metrics, gains = intervals(joint["metrics"]), intervals(joint["differences"])
    recall, chosen = intervals(joint["best"]["recall"]), intervals(joint["best"]["mean_of_chosen"])
    of_baselines = {method: gain for method, gain in gains.items() if method not in (*HEADS.values(), AVERAGE)}
    comparison = Comparison("Spearman", metrics, of_baselines)
    best = comparison.best
    targets, names, measured_NT, predicted_NT, fold_N = _out_of_fold(run)
    proteins, mutations = zip(*map(parse_name, names), strict=True) if names else ((), ())
    several = any(proteins)
    within_N = np.unique(proteins, return_inverse=True)[1] if several else fold_N
    targets = targets or [joint["targets"]]
    pairs = dict(zip(targets, zip(measured_NT.T, predicted_NT.T, strict=True), strict=True))
    ranked = _ranked(run / RANKED)
    # The recipe of a run selects one fold. These options select all folds again.
    of_column = isinstance(summary["recipe"]["data"]["folds"], str)
    options = [] if of_column else ["data.folds=null"]
    options += ["data.fold=null"] + (["--folds", str(folds)] if folds and not of_column else [])
    options += ["--seeds", str(len(joint["seeds"]))] if len(joint["seeds"]) > 1 else []
    return {
        "summary": summary,
        "joint": joint,
        "metrics": metrics,
        "best": best,
        "gain": best and gains[best],
        "how": comparison.how,
        "recall": recall[MAIN],
        "chart": chart(charts.intervals, metrics, MAIN, "Spearman", height=0.9 + 0.3 * len(metrics)),
        "compared": [
            [method, cell(of_method), cell(gains.get(method), "+"), cell(recall.get(method)), cell(chosen.get(method))]
            + [number_text(number(value)) for value in joint["of_each_seed"].get(method, ())]
            for method, of_method in metrics.items()
        ],
        "over_runs": {
            method: {column: _mean(spread) for column, spread in row.items()}
            for method, row in summary["metrics"].items()
        },
        "measured": _measured(pairs),
        "rho": {name: spearman_within(b_N, a_N, within_N) for name, (a_N, b_N) in pairs.items()},
        "maps": None if several else _maps(targets, mutations, measured_NT, ranked),
        "proteins": _of_proteins(run / OF_PROTEINS) if several else None,
        "curve": _learning_curve(run / CURVE),
        "ranked": ranked,
        "better": better_baseline(summary),
        "run": shlex.quote(run.resolve().name),
        "recipe_text": _recipe_text(summary["recipe_yaml"]),
        "command": _command(run, f"{summary['runs'][0]}/recipe.yaml", 1, *options),
    }


def _of_proteins(path: Path) -> dict[str, Any]:
    """Return the rows of `proteins.csv`, best first, but at most `BEST` of them, and a chart of all rows."""
    head, *body = _rows(path)
    best = sorted(body, key=lambda row: -number(row[3]) if row[3] else math.inf)
    pairs = [(number(row[4]), number(row[3])) for row in body if row[3] and row[4]]
    drawn = chart(charts.dots, *np.array(pairs).T, head[4], head[3], same_unit=True, height=3.3) if pairs else None
    rows = [[*row[:3], *(unit_text(number(cell)) if cell else "" for cell in row[3:])] for row in best]
    return {"head": head, "rows": rows[:BEST], "count": len(body), "chart": drawn}


def _out_of_fold(run: Path) -> tuple[list[str], list[str], Values, Values, Any]:
    """Read from `variants.csv` the variants that have a prediction. Return the names of the targets (empty for a single
    target), and the name, measured values, predicted values and fold of each variant.
    """
    rows = rows_of_run(run)
    targets = [name.removeprefix("predicted ") for name in rows[0] if name.startswith("predicted ")] if rows else []
    of = [f" {name}" for name in targets] or [""]
    # All rows of a variant have the same values.
    once = {row["variant"]: row for row in rows if any(row[f"predicted{name}"] for name in of)}
    measured_NT, predicted_NT = (
        np.array([[number(row[f"{what}{name}"]) for name in of] for row in once.values()]).reshape(-1, len(of))
        for what in ("measured", "predicted")
    )
    fold_N = np.array([int(row["fold"]) for row in once.values()], dtype=np.int64)
    return targets, list(once), measured_NT, predicted_NT, fold_N


def _ranked(path: Path) -> dict[str, Any] | None:
    """Read single substitutions and their predictions from `ranked.csv`. Make a table of the first `BEST` rows."""
    if not path.is_file():
        return None
    head, *body = _rows(path)
    rows = sorted((dict(zip(head, row, strict=True)) for row in body), key=lambda row: int(row["rank"]))
    shown = [k for k in head if k.startswith(("prediction", "low 90%", "high 90%", "disagreement of models"))]
    names = [k for k in ("mutant", "mutant in table") if k in head]
    return {
        "count": len(rows),
        "mutations": [mutation for row in rows for mutation in parse_variant(row["mutant"])],
        "values": [[number(row[k]) for row in rows] for k in head if k.split(" ")[0] == "prediction"],
        "head": ["rank", *names, *shown, "measured"],
        "rows": [
            [row["rank"], *(row[k] for k in names), *(unit_text(number(row.get(k))) for k in (*shown, "measured"))]
            for row in rows[:BEST]
        ],
    }


def _maps(
    targets: Sequence[str],
    mutations: Sequence[tuple[Mutation, ...]],
    measured_NT: Values,
    ranked: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return maps of measured and predicted values for single substitutions, with one colour scale for each target.
    A map shows only the measured region of the protein, because predictions far from this region are unreliable.
    """
    measured = [mutation for variant in mutations for mutation in variant]
    every = measured + (ranked["mutations"] if ranked else [])
    changed = {mutation.position for mutation in measured or every}
    if not changed:
        return None
    first, last = min(changed), min(max(changed), min(changed) + MOST_POSITIONS - 1)
    wild = {mutation.position: mutation.wild for mutation in every}
    wild_P = np.array([LETTERS.find(wild.get(p, "?")) for p in range(first, last + 1)])
    singles = [n for n, variant in enumerate(mutations) if len(variant) == 1]
    figures = []
    for t, name in enumerate(targets[:MOST_TARGETS]):
        grids = {
            "measured": substitution_grid([mutations[n][0] for n in singles], measured_NT[singles, t], first, last)
        }
        if ranked and t < len(ranked["values"]):
            grids["predicted"] = substitution_grid(ranked["mutations"], ranked["values"][t], first, last)
        values = np.concatenate([grid_AP[np.isfinite(grid_AP)] for grid_AP in grids.values()])
        for what, grid_AP in grids.items():
            if count := int(np.isfinite(grid_AP).sum()):
                low, high = np.percentile(values, [2, 98]).tolist()
                label = f"{what} {name}"
                figures.append((charts.heat_map(grid_AP, first + 1, wild_P, LETTERS, (low, high), label), label, count))
    return {"figures": figures, "first": first + 1, "last": last + 1, "end": max(changed) + 1}


def _learning_curve(path: Path) -> dict[str, Any] | None:
    """Return the values of `learning_curve.json`, and a chart with Spearman on the y-axis and the number of training
    variants on the x-axis. Return None without this file.
    """
    raw = _json(path)
    if not raw:
        return None
    points = {point["variants"]: intervals(point["metrics"]) for point in raw["points"]}
    sizes, methods = sorted(points), dict.fromkeys(name for row in points.values() for name in row)
    rows = {name: {size: points[size][name] for size in sizes if name in points[size]} for name in methods}
    return raw | {
        "sizes": sizes,
        "rows": rows,
        "chart": chart(charts.learning_curve, sizes, rows, height=3, width=10),
    }


def sweep_page(out: Path) -> dict[str, Any]:
    """Return the values for the template `sweep.html.jinja`. The sweep may be unfinished."""
    sweep = _json(out / SWEEP)
    tested_run = out / (sweep["best_run"] or "")
    summary = _json(tested_run / SUMMARY)
    tested = summary or _json(tested_run / "evaluation.json")  # A run with one seed has no summary.
    keys, trials, lower = list(sweep["sweep"]["space"]), sweep["trials"], sweep["lower_is_better"]
    order = {"complete": 0, "running": 1, "pruned": 2, "failed": 3}

    def place(trial: Mapping[str, Any]) -> tuple[int, float]:
        value = number(trial["value"])
        return order[trial["state"]], (value if lower else -value) if math.isfinite(value) else math.inf

    complete = [trial for trial in trials if trial["state"] == "complete"]
    x_N, y_N = _column(complete, "number"), _column(complete, "value")
    best_N = (np.minimum if lower else np.maximum).accumulate(y_N)
    lines = {"trial": (x_N, y_N), "best so far": (x_N, best_N)}
    best = next((trial for trial in trials if trial["number"] == sweep["best"]), None)
    return {
        "sweep": sweep,
        "summary": summary,
        "verdict": tested.get("verdict", "The best settings are not tested yet."),
        "best": best and best | {"settings": sweep_file.shown(best["values"])},
        "counts": {state: sum(trial["state"] == state for trial in trials) for state in order},
        "tested": {m: {c: _mean(spread) for c, spread in row.items()} for m, row in summary.get("metrics", {}).items()},
        "history": chart(charts.curves, f"valid {sweep['metric']}", lines, x_name="trial") if complete else None,
        "head": ["trial", "state", f"valid {sweep['metric']}", "steps", *keys, ""],
        "rows": [
            [
                str(trial["number"]),
                trial["state"],
                unit_text(number(trial["value"])),
                str(trial["step"]),
                *(sweep_file.value_text(trial["values"][key]) if key in trial["values"] else "-" for key in keys),
                trial["message"] if trial["state"] in ("failed", "pruned") else "",
            ]
            for trial in sorted(trials, key=place)[:MOST_TRIALS]
        ],
        "search": json.dumps(sweep["sweep"], indent=1),
    }


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _rows(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> Values:
    return np.array([number(line.get(key)) for line in lines], dtype=np.float64)


def _numbers(lists: Mapping[str, Sequence[Any]], *keys: str) -> tuple[Values, ...]:
    return tuple(np.array([number(value) for value in lists[key]]) for key in keys)


def _recipe_text(text: str) -> str:
    """Shorten each absolute path in a recipe to its last part. A path may contain spaces."""
    return re.sub(r"""(?m)^(\s*(?:[\w.-]+:|-) ['"]?)/.*/""", r"\1", text)


def _command(run: Path, recipe: str, processes: int, *options: str) -> str:
    """Return the command that repeats a run, to be called in the parent of the run's directory."""
    name = run.resolve().name
    nproc = ["--nproc", str(processes)] if processes > 1 else []
    return shlex.join(["esmshard", "finetune", f"{name}/{recipe}", *nproc, *options, f"out={name}-again"])


def number(value: object) -> float:
    """Convert a value of a JSON or CSV file to a number; to NaN if this is impossible."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def intervals(row: Mapping[str, Mapping[str, Any]]) -> dict[str, Interval]:
    """Convert dictionaries with `value`, `low` and `high`, each a number or null, to `Interval` objects."""
    return {name: Interval(*(number(raw[key]) for key in ("value", "low", "high"))) for name, raw in row.items()}


def _mean(spread: Mapping[str, Any]) -> Interval:
    """Convert a dictionary with `mean`, `low` and `high` over several runs to an `Interval`."""
    return Interval(*(number(spread[key]) for key in ("mean", "low", "high")))


def number_text(value: float, sign: str = "") -> str:
    """Format a number with three decimals; with four significant digits if it is below 0.001, or 100 or more.

    >>> number_text(0.0941), number_text(0.0941, "+"), number_text(1234.56), number_text(2e-7), number_text(math.nan)
    ('0.094', '+0.094', '1235', '2e-07', 'undefined')
    """
    if not math.isfinite(value):
        return "undefined"
    return f"{value:{sign}.3f}" if value == 0 or 0.001 <= abs(value) < 100 else f"{value:{sign}.4g}"


def unit_text(value: float) -> str:
    """Format a value with four significant digits. A missing value (NaN) becomes `-`."""
    return f"{value:.4g}" if math.isfinite(value) else "-"


def range_text(interval: Interval) -> str:
    """Format the two ends of an interval, such as `[0.080, 0.125]`."""
    if not math.isfinite(interval.low) or not math.isfinite(interval.high):
        return "no interval"
    return f"[{number_text(interval.low)}, {number_text(interval.high)}]"


def cell(interval: Interval | None, sign: str = "") -> str:
    r"""Format a value, and its interval on a second line. With `sign`, a star marks an interval that excludes 0.

    >>> cell(Interval(0.056, 0.046, 0.067)), cell(Interval(0.056, 0.046, 0.067), "+"), cell(None)
    ('0.056\n[0.046, 0.067]', '+0.056*\n[0.046, 0.067]', '-')
    """
    if interval is None:
        return "-"
    if not math.isfinite(interval.value):
        return "undefined"
    star = "*" if sign and (interval.low > 0 or interval.high < 0) else ""
    return f"{number_text(interval.value, sign)}{star}\n{range_text(interval)}"
