"""The program `esmshard`: its help texts, its exit codes, and what all commands do before and after their work.

The commands are functions in the other modules of this folder. They import torch only when they run, so that the
program starts fast.
"""

import atexit
import functools
import gc
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from esmshard import __version__
from esmshard.cli import cluster, data, infer, models, train
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.progress import say

Command = Callable[..., None]

COMMANDS: dict[str, tuple[Command, ...]] = {
    "Train": (train.finetune, train.plan, train.status, train.report),
    "Use a model": (infer.embed, infer.predict, infer.score, infer.evaluate),
    "Data": (data.ingest, data.split, data.track),
    "Model files": (models.consolidate, models.download, models.push),
    "Clusters": (cluster.launch, cluster.doctor),
    "Browser": (cluster.app,),
}
"""The command functions under each heading of `--help`. Each command has the name of its function."""
COPIED = {
    "predict": ("data",),
    "score": ("sequences", "table"),
    "evaluate": ("data", "labels"),
    "ingest": ("fasta", "verify"),
    "split": ("data", "sets", "clusters", "wild_type"),
    "track": ("structures", "weights"),
    "consolidate": ("source",),
    "finetune": ("resume",),
}
"""For each command, the arguments that may be bucket addresses (`s3://`, `gs://`). Before the command runs, their files
are copied into the local cache."""
UPLOADED = ("ingest", "split", "track", "consolidate", "predict", "score", "evaluate", "report")
"""The commands whose `-o` may be a bucket address. The result is first written on this machine, then uploaded."""
ADDRESSES = {
    "embed": ("model", "fasta", "reuse", "out"),
    "predict": ("model",),
    "score": ("model", "ensemble"),
    "evaluate": ("model",),
    "push": ("model",),
    "launch": ("arguments",),
}
"""For each command, the arguments that may be bucket addresses, and whose files the command itself opens."""


def with_addresses(command: Command, values: dict[str, Any]) -> None:
    """Copy the files of arguments in COPIED from buckets to this machine, and run the command with the copies. If `-o`
    is a bucket address, upload the result.
    """
    name, upload = command.__name__, None
    for key, value in list(values.items()):
        addresses = value if isinstance(value, list) else [value]
        if not any(str(each).startswith(("s3:/", "gs:/")) for each in addresses) or key in ADDRESSES.get(name, ()):
            continue
        from esmshard.io import remote

        if key == "out" and name in UPLOADED:
            upload = remote.address(value)
        elif key in COPIED.get(name, ()):
            copies = [remote.local(each) for each in addresses]
            values[key] = copies if isinstance(value, list) else type(value)(copies[0])
        else:
            raise UsageError(
                f"{remote.address(addresses[0])}: `esmshard {name.replace('_', ' ')}` needs a path on a disk for "
                f"{key.replace('_', ' ')}, not a bucket; pass a path, and copy the files with `aws s3 sync` or "
                "`gcloud storage rsync`"
            )
    if upload is None:
        return command(**values)
    exits: list[typer.Exit | SystemExit] = []

    def write(path: Path) -> None:
        try:
            command(**{**values, "out": path})
        except (typer.Exit, SystemExit) as leaving:  # --strict ends the command, but the result is uploaded.
            exits.append(leaving)

    remote.write_at(upload, bool(values.get("overwrite")), write)
    if exits:
        raise exits[0]


WELCOME = """\
esmshard fine-tunes protein language models on your proteins. Five examples:

  Train on contacts in structures    esmshard finetune contact
  Train on measured variants         esmshard finetune variants data.table=my.csv data.wild_type=wt.fasta out=runs/mine
  Predict with the trained model     esmshard predict runs/mine --propose 24 -o next.csv
  Embed any number of sequences      esmshard embed starter my.fasta -o my.h5
  See what fits on which GPUs        esmshard plan contact model.name=esm2_t36_3B_UR50D --gpus 8xA100-40GB

The first and the last command need no files of yours. For help, type: esmshard --help, or: esmshard embed --help.
"""
"""The text for a user who types `esmshard` without a command."""

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
esmshard app
esmshard app pages --port 8060
"""
"""The examples of all commands. The help of a command ends with its examples."""


def examples(command: str) -> str:
    """Return the examples of a command for its help."""
    lines = [line for line in EXAMPLES.splitlines() if line.split()[1] == command]
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)] if lines else [])


KEPT = {
    "finetune": "the checkpoints that were written are kept",
    "embed": "the parts that were finished are kept",
    "ingest": "the pieces that were finished are kept",
    "download": "the files that were complete are kept",
}
"""What each command has saved when Ctrl-C stops it. A command that is not in this dict saves nothing before its end."""


def after_interrupt(command: str, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return the message after Ctrl-C. It says what is saved, and which command continues the work or starts it again.
    `words` are the arguments of the stopped `esmshard`.
    """
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

    if not registered.cache_info().currsize:  # The recipe was not read before Ctrl-C.
        return "nothing was begun"
    out = Path(recipe_file.load(recipe_file.resolve(values["recipe"]), values["overrides"] or []).out)
    if checkpoints := sorted(out.glob("checkpoints/step_*")):
        return f"the checkpoint of step {int(checkpoints[-1].name.removeprefix('step_'))} is kept in {_near(out)}"
    return KEPT["finetune"] if any(out.glob("*/checkpoints/step_*")) else "no checkpoint was written yet"


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _finetune(values: Mapping[str, Any]) -> str:
    from esmshard.recipe import recipe_file
    from esmshard.tasks.registry import traits

    if values["dry_run"]:
        return "the same command without --dry-run"
    recipe = recipe_file.load(recipe_file.resolve(values["recipe"]), values["overrides"] or [])
    near = _near(out := Path(recipe.out))
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
"""For each command, a function that returns the suggested next command, or None. The function gets the arguments of the
command that has ended."""


def _declared(command: Command) -> Command:
    """Return `command` with additions: it accepts bucket addresses, suggests the next command if stderr is a terminal,
    and prints a message after Ctrl-C.
    """

    @functools.wraps(command)
    def run(**values: Any) -> None:
        name, given = command.__name__, dict(values)
        try:
            with_addresses(command, values)
        except KeyboardInterrupt:
            from esmshard.parallel.launch import LAUNCHER

            if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:  # Otherwise the launcher prints.
                say(f"interrupted: {after_interrupt(name, given, sys.argv[1:])}")
            raise SystemExit(ExitCode.INTERRUPTED) from None
        if sys.stderr.isatty() and name in NEXT and (step := NEXT[name](given)):
            say(f"next: {step}")

    return run


app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part, commands in COMMANDS.items():
    for function in commands:
        app.command(rich_help_panel=part, epilog=examples(function.__name__))(_declared(function))
recipes = typer.Typer(no_args_is_help=True, help="The shipped recipes.")
for function in (train.recipes_ls, train.recipes_cp, train.recipes_validate, train.recipes_schema):
    recipes.command(function.__name__.removeprefix("recipes_"))(_declared(function))
app.add_typer(recipes, name="recipes", rich_help_panel="Train")
app.add_typer(infer.embeddings, name="embeddings", rich_help_panel="Use a model")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"esmshard {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(WELCOME, end="")


def main() -> None:
    """Run the command line. For a mistake of the user, print one sentence on stderr and no traceback."""
    # At its end, Python searches half a million objects of torch for garbage, for a second. `gc.freeze` prevents this.
    atexit.register(gc.freeze)
    try:
        _main()
    except SystemExit as leaving:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise
        # `os._exit` ends a rank without the usual work of Python at its end. During this work, a thread of gloo could
        # end the process with SIGABRT, and launchers would see a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


def _main() -> None:
    from esmshard.parallel import launch, preemption

    try:
        app()
    except preemption.Preempted as stop:
        if os.environ.get("RANK", "0") == "0":
            say(str(stop))
        raise SystemExit(preemption.leaving_code(stop.unsaved)) from None
    except InputError as error:
        # A wrong command or recipe is wrong on every rank. Only rank 0 prints the message.
        if (error.shared or isinstance(error, UsageError)) and os.environ.get("RANK", "0") != "0":
            if launch.LAUNCHER in os.environ:
                raise SystemExit(error.exit_code) from None
            # If rank 0 fails with the same mistake, the launcher ends this process while it waits. Otherwise this
            # process prints the message.
            launch.wait_for_first(error.exit_code)
        say(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"error: {where}{(error.strerror or str(error)).lower()}")
        raise SystemExit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(ExitCode.CRASHED) from None
