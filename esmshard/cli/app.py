"""The command line: its commands in the order of `--help`, and the exit codes and messages of all of them.

The commands are functions in the other modules of this folder. They import torch, and modules that need it, only when
they are called.
"""

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from esmshard import __version__
from esmshard.cli import (
    cluster_commands,
    data_commands,
    finetune_commands,
    help_text,
    inference_commands,
    model_commands,
    recipe_commands,
)
from esmshard.cli.addresses import with_addresses
from esmshard.cli.next_steps import with_next_step
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.progress import say

COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (
        finetune_commands.finetune,
        finetune_commands.plan,
        finetune_commands.status,
        finetune_commands.report,
    ),
    "Use a model": (
        inference_commands.embed,
        inference_commands.predict,
        inference_commands.score,
        inference_commands.evaluate,
    ),
    "Data": (
        data_commands.ingest,
        data_commands.split,
        data_commands.track,
    ),
    "Model files": (
        model_commands.consolidate,
        model_commands.download,
        model_commands.push,
    ),
    "Clusters": (
        cluster_commands.launch,
        cluster_commands.doctor,
    ),
}
"""The functions of the commands, by the part of `--help` that lists them. A command has the name of its function."""

app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part, commands in COMMANDS.items():
    for command in commands:
        declared = with_next_step(with_addresses(command))
        app.command(rich_help_panel=part, epilog=help_text.examples(command))(declared)
app.add_typer(recipe_commands.app, name="recipes", rich_help_panel="Train")
app.add_typer(inference_commands.embeddings, name="embeddings", rich_help_panel="Use a model")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"esmshard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(help_text.WELCOME, end="")


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
