"""What commands say beside their results: the greeting, examples in the help, what to type next, what Ctrl-C left."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

WELCOME = """\
esmshard fine-tunes protein language models on your own proteins. Five things to do with it:

  Learn contacts from structures     esmshard finetune contact
  Learn from measured variants       esmshard finetune variants data.table=my.csv data.wild_type=wt.fasta out=runs/mine
  Predict with what was learned      esmshard predict runs/mine --propose 24 -o next.csv
  Embed any number of sequences      esmshard embed starter my.fasta -o my.h5
  See what fits on which GPUs        esmshard plan contact model.name=esm2_t36_3B_UR50D --gpus 8xA100-40GB

The first and the last need no data of yours. All commands: esmshard --help. Examples of one: esmshard embed --help.
"""
"""What `esmshard` alone prints."""

EXAMPLES = """\
esmshard finetune contact --nproc 2
esmshard finetune my.yaml optim.lr=1e-4 out=runs/mine --resume auto
esmshard plan my.yaml --gpus 8xA100-40GB
esmshard plan contact model.name=esm2_t36_3B_UR50D --gpus 2xMine --memory 24
esmshard status runs/mine
esmshard status runs/mine --json
esmshard report runs/mine
esmshard report runs/mine -o mine.html
esmshard embed starter my.fasta -o my.npy
esmshard embed runs/mine/model uniref50.store -o emb --dtype fp16 --nproc 8
esmshard predict runs/contact/model my.fasta -o my.npz --png maps
esmshard predict runs/variants --propose 24 -o next.csv
esmshard score starter wt.fasta variants.csv -o scores.csv
esmshard score starter my.fasta -o naturalness.csv --method one-pass
esmshard evaluate runs/contact/model sample:contact/test -o scores
esmshard evaluate runs/mine/model test.fasta --labels test.csv -o scores
esmshard ingest uniref50.fasta.gz -o uniref50.store --workers 8
esmshard ingest a.fasta b.fasta -o both.store --on-duplicate first
esmshard split all.fasta -o data --by cluster --clusters clusters.tsv
esmshard split variants.csv -o folds --by position --wild-type wt.fasta --folds 5
esmshard track structure_tokens structures --weights encoder.pth -o tokens.npz
esmshard consolidate runs/mine -o exported
esmshard consolidate runs/mine -o esm2_mine --to fair-esm
esmshard download esm2_t33_650M_UR50D
esmshard download esm2_t33_650M_UR50D --to weights
esmshard push runs/mine/model me/my-model
esmshard push runs/mine/model me/my-model --private
esmshard launch my.yaml --target slurm --nodes 2 --gpus-per-node 4 --dry-run
esmshard launch embed --target slurm --array 16 -- runs/mine/model uniref50.store -o emb
esmshard doctor
esmshard doctor my.yaml --nproc 8
"""
"""The examples at the end of the help of each command."""


def examples(command: str) -> str:
    """Return the end of the help of a command; each example becomes a line."""
    lines = [line for line in EXAMPLES.splitlines() if line.split()[1] == command]
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)] if lines else [])


KEPT = {
    "finetune": "the checkpoints that were written are kept",
    "embed": "the parts that were finished are kept",
    "ingest": "the pieces that were finished are kept",
    "download": "the files that were complete are kept",
}
"""What remains of an interrupted command. The others write nothing before the end."""


def after_interrupt(command: str, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return what an interrupted command, which was typed as `words`, has kept, and what to type to go on."""
    if command not in KEPT or values.get("dry_run") or (command == "embed" and values["out"] is None):
        return f"no result was written; to start again: esmshard {shlex.join(words)}"
    words = [word for word in words if word != "--overwrite"]
    if command == "finetune":
        if "--resume" in words:
            at = words.index("--resume")
            words[at : at + 2] = []
        words += ["--resume", "auto"]
    kept = _checkpoint(values) if command == "finetune" else KEPT[command]
    return f"{kept}; to go on: esmshard {shlex.join(words)}"


def _checkpoint(values: Mapping[str, Any]) -> str:
    from esmshard.recipe import recipe_file
    from esmshard.tasks.registry import registered

    if not registered.cache_info().currsize:  # imports were interrupted, before the recipe was read
        return "nothing was begun"
    out = Path(recipe_file.load(recipe_file.resolve(values["recipe"]), values["overrides"] or []).out)
    if found := sorted(out.glob("checkpoints/step_*")):
        return f"the checkpoint of step {int(found[-1].name.removeprefix('step_'))} is kept in {_near(out)}"
    return KEPT["finetune"] if any(out.glob("*/checkpoints/step_*")) else "no checkpoint was written yet"


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _finetune(values: Mapping[str, Any]) -> str:
    from esmshard.recipe import recipe_file
    from esmshard.tasks.registry import traits

    if values["dry_run"]:
        return "the same command without --dry-run"
    recipe = recipe_file.load(recipe_file.resolve(values["recipe"]), values["overrides"] or [])
    out = Path(recipe.out)
    near = _near(out)
    if values["sweep"] is not None:
        return f"open {near}/report.html; {near}/best.yaml is the recipe of the best trial"
    if recipe.task.reads_table:
        return f"open {near}/report.html; esmshard predict {near} --propose 24 -o next.csv"
    ending = "npz" if traits(recipe.task.name).predicts_contacts else "csv"
    page = f"open {near}/report.html" if (out / "report.html").is_file() else f"esmshard report {near}"
    model = f"{near}/model my.fasta -o my"
    return f"{page}; esmshard predict {model}.{ending}; esmshard embed {model}.h5"


def _split(values: Mapping[str, Any]) -> str:
    sets = [f" data.{name}={values['out']}/{name}.fasta" for name in ("train", "valid", "test")]
    return f"esmshard finetune my.yaml{''.join(sets) if values['folds'] is None else ''}"


NEXT: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "finetune": _finetune,
    "plan": lambda values: None if values["as_json"] else f"esmshard finetune {values['recipe']}, with the line `take`",
    "report": lambda values: f"open {values['out'] or values['run'] / 'report.html'} in a browser",
    "embed": lambda values: (
        f"esmshard embeddings merge {values['out']} -o {values['out']}.h5, for one file"
        if values["out"] and not values["out"].suffix
        else None
    ),
    "score": lambda _: "esmshard finetune variants data.table=my.csv data.wild_type=wt.fasta, with measured values",
    "evaluate": lambda values: f"esmshard report {values['out']}",
    "ingest": lambda values: f"esmshard embed starter {values['out']} -o emb" if values["out"] is not None else None,
    "split": _split,
    "track": lambda values: f"esmshard embed MODEL my.fasta --track {values['name']}={values['out']} -o my.h5",
    "consolidate": lambda values: f"esmshard embed {values['out']} my.fasta -o my.h5",
    "download": lambda values: f"esmshard embed {values['names'][0]} my.fasta -o my.h5",
    "recipes_cp": lambda values: f"esmshard finetune {values['to']} --dry-run",
}
"""What to type after each command, from its arguments; None for nothing."""
