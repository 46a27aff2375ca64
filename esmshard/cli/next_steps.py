"""The last line of a command: what to type next, on a terminal, and what Ctrl-C left and how to go on."""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from esmshard.errors import ExitCode
from esmshard.progress import say


def with_next_step(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command end with what to type next, where a person reads its messages. A log gets no such line.

    Ctrl-C ends every command with one sentence and exit code 130.
    """

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            command(**values)
        except KeyboardInterrupt:
            from esmshard.parallel.launch import LAUNCHER

            if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:  # else the launcher prints it
                say(f"interrupted: {_after_interrupt(command.__name__, values)}")
            raise SystemExit(ExitCode.INTERRUPTED) from None
        if sys.stderr.isatty() and command.__name__ in STEPS and (step := STEPS[command.__name__](values)):
            say(f"next: {step}")

    return run


def _after_interrupt(command: str, values: Mapping[str, Any]) -> str:
    """Return what an interrupted command has kept, and the command to type."""
    words, more = [word for word in sys.argv[1:] if word != "--overwrite"], ""
    kept = KEPT_AFTER_INTERRUPT.get(command)
    if kept is None or values.get("dry_run") or (command == "embed" and values["out"] is None):
        return f"no result was written; to start again: esmshard {shlex.join(sys.argv[1:])}"
    if command == "finetune":
        if "--resume" in words:
            at = words.index("--resume")
            words[at : at + 2] = []
        more = " --resume auto"
    return f"{kept}; to go on: esmshard {shlex.join(words)}{more}"


KEPT_AFTER_INTERRUPT = {
    "finetune": "the checkpoints that were written are kept",
    "embed": "the parts that were finished are kept",
    "ingest": "the pieces that were finished are kept",
    "download": "the files that were complete are kept",
}
"""What remains of an interrupted command. The others write nothing before the end."""


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
    return (
        f"esmshard embeddings merge {out} -o {out}.h5, for one file"
        if out is not None and not Path(out).suffix
        else None
    )


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
