"""The groups of commands: each function is a command, and `--help` lists the commands in a fixed order."""

import importlib
import inspect
import pkgutil

import typer.main
from typer.testing import CliRunner

from esmshard import cli
from esmshard.cli import app, help_text, recipe_commands

ORDER = (
    "finetune plan status report embed predict score evaluate ingest split track consolidate download push verify "
    "launch doctor bundle recipes"
)


def functions(module: str) -> set[str]:
    """The public functions that a module defines."""
    members = inspect.getmembers(importlib.import_module(f"esmshard.cli.{module}"), inspect.isfunction)
    return {name for name, found in members if found.__module__ == f"esmshard.cli.{module}" and name[0] != "_"}


def test_the_order_of_commands() -> None:
    command = typer.main.get_command(app.app)
    assert " ".join(command.commands) == ORDER  # type: ignore[attr-defined]
    recipes = command.commands["recipes"]  # type: ignore[attr-defined]
    assert " ".join(recipes.commands) == "ls cp validate schema"


def test_every_function_of_a_group_is_a_command() -> None:
    groups = [module.name for module in pkgutil.iter_modules(cli.__path__) if module.name.endswith("_commands")]
    assert len(groups) == 6
    registered = {command.__name__ for commands in app.COMMANDS.values() for command in commands}
    registered |= {command.callback.__name__ for command in recipe_commands.app.registered_commands if command.callback}
    assert set().union(*map(functions, groups)) == registered


def test_help_of_a_command_with_many_options_groups_them_and_ends_with_examples() -> None:
    commands = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
    panels = {option.opts[-1]: option.rich_help_panel for option in commands["embed"].params}
    assert panels["--nproc"] == panels["--precision"] == "How fast"
    assert panels["--format"] == "Where the result goes"
    assert panels["--pool"] is None
    names = {name for command in commands.values() for option in command.params for name in option.opts}
    assert set().union(*help_text.GROUPS.values()) <= names
    shown = CliRunner().invoke(app.app, ["status", "-h"]).output
    assert shown.rstrip().endswith("esmshard status runs/mine --json")


def test_examples_can_be_typed() -> None:
    assert set(help_text.EXAMPLES) == set(ORDER.split()) - {"recipes"}
    for name, examples in help_text.EXAMPLES.items():
        assert len(examples) == 2
        # The first example is of the command itself; the second may be of one that uses the result.
        assert examples[0].startswith(f"esmshard {name}")
