"""`esmshard report RUN`: one HTML page on a run, for people. It needs no network, script or server."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esmshard import __version__
from esmshard.errors import InputError, UsageError, reading, writing
from esmshard.files import memory_text, replace_text
from esmshard.progress import duration, rate
from esmshard.recipe import recipe_file
from esmshard.report.read.run_directory import RunFiles, json_object, read
from esmshard.report.read.sweep_directory import is_sweep, read_sweep
from esmshard.report.read.variant_run_directory import is_cross_validated, read_variants
from esmshard.report.text import scores, sweep_report, training, variant_report
from esmshard.report.text.page_parts import PageTable, Section, range_text, value_text
from esmshard.report.text.path_hiding import Places
from esmshard.train.evaluate import comparison

SENTENCES = ("notices", "left_out", "leakage", "verdict", "message")
"""The keys of a run's files that hold sentences for the user."""


def report(run: Path, out: Path | None = None) -> Path:
    """Write a page about a run, whether it is done, running, preempted or failed. The file appears complete.

    Args:
        run: the directory of the run, of a cross-validated run of variants, or of a sweep.
        out: the file to write; by default `report.html` in that directory. An existing file is replaced.

    Returns:
        The file.

    Raises:
        InputError: if there is no run, a file of it is damaged, or a package is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise InputError("a report needs jinja2 and matplotlib; pip install 'esmshard[plots]'") from None
    names = "evaluation.json, status.json, versions.json, metrics.jsonl, summary.json, sweep.json"
    files, states = f"{run}: one of its files ({names})", list[str]()
    with reading(files, "remove it, or make it anew with `esmshard evaluate MODEL DATA -o DIR`, to see the rest"):
        if is_sweep(run):
            swept = read_sweep(run)
            about, facts = sweep_report.about(swept), sweep_report.facts(swept)
            lead = sweep_report.states(swept)
            sections = [part(swept) for part in sweep_report.SECTIONS]
        elif is_cross_validated(run):
            several = read_variants(run)
            about, facts = variant_report.about(several), variant_report.facts(several)
            lead = [variant_report.verdict(several)]
            sections = [section(several) for section in variant_report.SECTIONS]
        else:
            found = read(run)
            about, facts = _about(found), _facts(found)
            lead, states = scores.achieved(found), [_state(found)]
            sections = [part(found) for part in SECTIONS]
    hidden = Places(run, *_named(run))
    source = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=hidden.shown
    )
    page = environment.from_string(source).render(
        title=run.resolve().name,
        about=about,
        lead=lead,
        states=states,
        facts=facts,
        sections=sections,
        version=__version__,
    )
    out = out or run / "report.html"
    if not out.parent.is_dir():
        raise InputError(f"{out}: there is no directory {out.parent}; make it first")
    with writing(out, "make room, or choose another place with -o FILE"):
        replace_text(out, page)
    return out


def _named(run: Path) -> Iterator[str]:
    """Yield the paths that the files of a run name."""
    for name in ("versions.json", "evaluation.json", "summary.json"):
        found = json_object(run / name) or {}
        yield from _paths(found)
    try:
        yield from _paths(recipe_file.load(run / "recipe.yaml", of_run=True).model_dump())
    except UsageError:  # a cross-validation has no such file, or another version wrote it
        pass


def _paths(found: object) -> Iterator[str]:
    if isinstance(found, str) and found.startswith("/"):
        yield found
    elif isinstance(found, dict | list | tuple):
        # A sentence may begin with a path, and is no path itself.
        for part in [one for key, one in found.items() if key not in SENTENCES] if isinstance(found, dict) else found:
            yield from _paths(part)


def _about(run: RunFiles) -> str:
    """Describe model, task and data in a line."""
    if run.recipe is None:
        return f"Task {run.task or 'unknown'}."
    recipe = run.recipe
    return f"Task {recipe.task.name}, model {recipe.model.name} ({recipe.init}), adaptation {recipe.adapt.method}."


def _state(run: RunFiles) -> str:
    if run.status is None:
        return "There is no status.json: how the run ended is not known."
    found = run.status
    words = {"done": "Done", "running": "Still running when this page was made", "preempted": "Preempted"}
    state = words.get(found["state"], "Failed")
    return f"{state}; step {found['step']:,} of {found['steps']:,}: {found['message'].rstrip('.')}."


def _facts(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the numbers on top of the page: name, value and explanation."""
    facts, steps, head, tested = [], run.steps, run.headline, run.evaluation
    if tested is not None and head is not None:
        ours = tested.metrics[tested.main][head.name]
        of = f"{tested.raw['records']:,} {tested.raw['split']} records"
        facts.append((head.name, value_text(ours.value), f"{range_text(ours)}, {of}"))
        if (name := scores.strongest(run)) is not None:
            gain = tested.differences[name][head.name]
            how = comparison(gain, lower_is_better=bool(head.lower_is_better))
            note = f"{range_text(gain)}, {how} the best baseline"
            facts.append((f"against {name}", value_text(gain.value, "+"), note))
    elif head is not None and (best := training.best(run)) is not None:
        facts.append((f"best validation {head.name}", value_text(best[1]), f"at step {best[0]:,}; not tested yet"))
    if len(steps["step"]):
        seen = rate(float(np.nansum(steps["residues"])))
        facts.append(("steps", f"{int(np.nanmax(steps['step'])):,}", f"{seen} residues seen"))
    if math.isfinite(speed := training.speed(run)):
        facts.append(("speed", rate(speed), "residues/s over all steps"))
    if np.isfinite(steps["peak_memory_bytes"]).any():
        facts.append(("memory", memory_text(float(np.nanmax(steps["peak_memory_bytes"]))), "peak of a process"))
    if run.goodput["goodput"] is not None:
        note = f"{run.goodput['goodput']:.0%} of it in steps that count"
        facts.append(("time", duration(run.goodput["allocated_s"]), note))
    return facts


def _data(run: RunFiles) -> Section:
    splits: Mapping[str, Mapping[str, Any]] = run.versions.get("data", {})
    leakage = (
        [str(s).removeprefix("leakage: ") for s in run.evaluation.raw.get("leakage", ())] if run.evaluation else []
    )
    texts = leakage or ["What the splits share has not been recorded: evaluation.json has no leakage check."]
    changed = dict.fromkeys(str(notice) for s in splits.values() for notice in s.get("notices", ()))
    texts += [f"Changed or left out: {notice}" for notice in changed]
    head = ["split", "file", "records", "residues", "sha256 of the tokens"]
    rows = [
        [
            name,
            str(s.get("path", "-")),
            *(_count(s.get(k)) for k in ("records", "residues")),
            s.get("tokens_sha256", "-"),
        ]
        for name, s in splits.items()
    ]
    tables = [PageTable(head, rows, "What went in. The digest is of all sequences in their order.")] if rows else []
    if not rows:
        texts = ["Which data went in is not recorded: versions.json is missing.", *texts]
    return Section("data", "Data and leakage", texts, tables=tables)


def _versions(run: RunFiles) -> Section:
    facts = [[name, str(value)] for name, value in run.versions.items() if not isinstance(value, dict | list)]
    if not facts:
        return Section("versions", "Versions", missing="versions.json is missing.")
    return Section("versions", "Versions", tables=[PageTable(["", ""], facts)])


def _recipe(run: RunFiles) -> Section:
    if run.recipe_text is None:
        return Section("recipe", "Recipe", missing="recipe.yaml is missing.")
    texts = ["With every key resolved, as recipe.yaml holds it."]
    if run.recipe_problem is not None:
        texts.append(f"This version of esmshard cannot use it: {run.recipe_problem}")
    return Section("recipe", "Recipe", texts, code=run.recipe_text)


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _reproduce(run: RunFiles) -> Section:
    section = ("reproduce", "Command to reproduce")
    if run.recipe_text is None and run.evaluation is not None and run.evaluation.raw.get("model"):
        raw = run.evaluation.raw
        model, data, labels, complexes = (
            Path(str(raw.get(key) or "")).name for key in ("model", "data", "labels", "complexes")
        )
        more = [*(["--labels", labels] if labels else []), *(["--complexes", complexes] if complexes else [])]
        command = ["esmshard", "evaluate", model, data, *more, "-o", f"{run.path.resolve().name}-again"]
        text = (
            "The test of a model that is there already. Files are named without directories; evaluation.json has them."
        )
        return Section(*section, [text], code=shlex.join(command))
    if run.recipe_text is None:
        return Section(*section, missing="recipe.yaml is missing, so there is none.")
    directory = Path(run.path.resolve().name)
    processes = run.versions.get("processes", 1)
    nproc = ["--nproc", str(processes)] if isinstance(processes, int) and processes > 1 else []
    commands = [["esmshard", "finetune", str(directory / "recipe.yaml"), *nproc, f"out={directory}-again"]]
    if run.evaluation is not None and run.evaluation.raw.get("data"):
        data, out = str(run.evaluation.raw["data"]), f"{directory}-test"
        data = data if data.startswith("sample:") else Path(data).name
        commands.append(["esmshard", "evaluate", str(directory / "model"), data, "-o", out])
    text = (
        "Training again, and the test alone, from the directory in which that of the run lies. Files are named here "
        "without their directories; recipe.yaml has them. The same versions, data and number of processes give the "
        "same model on a CPU; on GPUs the same up to rounding."
    )
    return Section(*section, [text], code="\n".join(map(shlex.join, commands)))


SECTIONS: Sequence[Callable[[RunFiles], Section]] = (
    scores.predictions,
    scores.metrics,
    training.curves,
    scores.lengths,
    scores.calibration,
    training.throughput,
    training.time,
    _data,
    _versions,
    _recipe,
    _reproduce,
)
"""The sections of the page from top to bottom."""
