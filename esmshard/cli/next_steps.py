"""The last line of a command on a terminal: what to type next."""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def with_next_step(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command end with what to type next, where a person reads its messages. A log gets no such line."""
    step = STEPS.get(command.__name__)
    if step is None:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**values)
        if sys.stderr.isatty() and (found := step(values)):
            print(f"next: {found}", file=sys.stderr)

    return run


def _finetune(values: Mapping[str, Any]) -> str:
    from esmshard.recipe import recipe_file
    from esmshard.tasks.registry import traits

    if values["dry_run"]:
        return "the same command without --dry-run"
    recipe = recipe_file.load(recipe_file.resolve(values["recipe"]), values["overrides"] or [])
    out = Path(recipe.out)
    near = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    if values["sweep"] is not None:
        return f"open {near}/report.html; {near}/best.yaml is the recipe of the best trial"
    if recipe.task.reads_table:
        return f"open {near}/report.html; esmshard predict {near} --propose 24 -o next.csv"
    ending = "npz" if traits(recipe.task.name).predicts_contacts else "csv"
    page = f"open {near}/report.html; " if (out / "report.html").is_file() else f"esmshard report {near}; "
    return f"{page}esmshard predict {near}/model my.fasta -o my.{ending}; esmshard embed {near}/model my.fasta -o my.h5"


def _embed(values: Mapping[str, Any]) -> str | None:
    out = values["out"]
    return f"esmshard embed verify {out}" if out is not None and not Path(out).suffix else None


def _split(values: Mapping[str, Any]) -> str:
    sets = " ".join(f"data.{name}={values['out']}/{name}.fasta" for name in ("train", "valid", "test"))
    return f"esmshard finetune my.yaml {sets}" if values["folds"] is None else "esmshard finetune my.yaml"


STEPS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "finetune": _finetune,
    "plan": lambda values: None if values["as_json"] else f"esmshard finetune {values['recipe']}, with the line `take`",
    "report": lambda values: f"open {values['out'] or values['run'] / 'report.html'} in a browser",
    "embed": _embed,
    "score": lambda values: (
        "esmshard finetune variants data.table=my.csv data.wild_type=wt.fasta, with measured values"
    ),
    "evaluate": lambda values: f"esmshard report {values['out']}",
    "ingest": lambda values: f"esmshard embed starter {values['out']} -o emb" if values["out"] is not None else None,
    "split": _split,
    "track": lambda values: f"esmshard embed MODEL my.fasta --track {values['name']}={values['out']} -o my.h5",
    "consolidate": lambda values: f"esmshard embed {values['out']} my.fasta -o my.h5",
    "download": lambda values: f"esmshard embed {values['names'][0]} my.fasta -o my.h5",
    "recipes_cp": lambda values: f"esmshard finetune {values['to']} --dry-run",
}
"""What to type after each command, from its arguments; None for nothing."""
