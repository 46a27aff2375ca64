"""The command line: its commands in the order of `--help`; addresses in buckets, exit codes and messages of them all.

The commands are functions in the other modules of this folder. They import torch, and modules that need it, only when
they are called.
"""

import atexit
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from esmshard import __version__
from esmshard.cli import cluster, data, infer, messages, models, train
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.progress import say

Command = Callable[..., None]

COMMANDS: dict[str, tuple[Command, ...]] = {
    "Train": (train.finetune, train.plan, train.status, train.report),
    "Use a model": (infer.embed, infer.predict, infer.score, infer.evaluate),
    "Data": (data.ingest, data.split, data.track),
    "Model files": (models.consolidate, models.download, models.push),
    "Clusters": (cluster.launch, cluster.doctor),
}
"""The functions of the commands, by the part of `--help` that lists them. A command has the name of its function."""
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
"""The arguments that may be addresses in buckets, and are copied into the local cache before the command runs."""
UPLOADED = ("ingest", "split", "track", "consolidate", "predict", "score", "evaluate", "report")
"""The commands whose `-o` may be an address. It is written on this machine, and uploaded when the command has ended."""
ADDRESSES = {
    "embed": ("model", "fasta", "reuse", "out"),
    "predict": ("model",),
    "score": ("model", "ensemble"),
    "evaluate": ("model",),
    "push": ("model",),
}
"""The arguments that may be addresses, which the code of the command opens itself."""


def with_addresses(command: Command, values: dict[str, Any]) -> None:
    """Run a command, whose arguments may be addresses in buckets where it can use them."""
    name, upload = command.__name__, None
    for key, value in list(values.items()):
        each = value if isinstance(value, list) else [value]
        if not any(str(one).startswith(("s3:/", "gs:/")) for one in each) or key in ADDRESSES.get(name, ()):
            continue
        from esmshard.io import remote

        if key == "out" and name in UPLOADED:
            upload = remote.address(value)
        elif key in COPIED.get(name, ()):
            copies = [remote.local(one) for one in each]
            values[key] = copies if isinstance(value, list) else type(value)(copies[0])
        else:
            raise UsageError(
                f"{remote.address(each[0])}: `esmshard {name.replace('_', ' ')}` takes no address in a bucket for "
                f"{key.replace('_', ' ')}; name a path on a disk, and copy it with `aws s3 sync` or `gcloud storage "
                "rsync`"
            )
    if upload is None:
        return command(**values)
    left: list[typer.Exit | SystemExit] = []

    def write(path: Path) -> None:
        try:
            command(**{**values, "out": path})
        except (typer.Exit, SystemExit) as leaving:  # the result is written, as with --strict
            left.append(leaving)

    remote.write_at(upload, bool(values.get("overwrite")), write)
    if left:
        raise left[0]


def _declared(command: Command) -> Command:
    """Return a command that ends with what to type next, where a person reads it, and on Ctrl-C with one sentence."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        name, given = command.__name__, dict(values)
        try:
            with_addresses(command, values)
        except KeyboardInterrupt:
            from esmshard.parallel.launch import LAUNCHER

            if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:  # else the launcher prints it
                say(f"interrupted: {messages.after_interrupt(name, given, sys.argv[1:])}")
            raise SystemExit(ExitCode.INTERRUPTED) from None
        if sys.stderr.isatty() and name in messages.NEXT and (step := messages.NEXT[name](given)):
            say(f"next: {step}")

    return run


app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part, commands in COMMANDS.items():
    for function in commands:
        app.command(rich_help_panel=part, epilog=messages.examples(function.__name__))(_declared(function))
recipes = typer.Typer(no_args_is_help=True, help="The shipped recipes.")
for function in (train.recipes_ls, train.recipes_cp, train.recipes_validate, train.recipes_schema):
    recipes.command(function.__name__.removeprefix("recipes_"))(_declared(function))
app.add_typer(recipes, name="recipes", rich_help_panel="Train")
app.add_typer(infer.embeddings, name="embeddings", rich_help_panel="Use a model")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"esmshard {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(messages.WELCOME, end="")


def main() -> None:
    """Run the command line. For a user's mistake, print one sentence on stderr, without a traceback."""
    # Python looks for garbage when it ends: for a second, among the half a million objects that torch's import makes.
    atexit.register(gc.freeze)
    try:
        _main()
    except SystemExit as leaving:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise
        # One of several processes exits without finalizing the interpreter. A thread of gloo that needs the interpreter
        # at that moment would end the process with SIGABRT, which launchers take for a failure of the run.
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
        everywhere = error.shared or isinstance(error, UsageError)
        if everywhere and os.environ.get("RANK", "0") != "0":
            if launch.LAUNCHER in os.environ:
                raise SystemExit(error.exit_code) from None
            # If rank 0 finds the same mistake, the launcher ends this process while it waits. Otherwise this process
            # prints the message.
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
