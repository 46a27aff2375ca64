"""The groups of commands: each function is a command, and `--help` lists the commands in a fixed order."""

import importlib
import inspect
import pkgutil

import typer.main

from esmshard import cli
from esmshard.cli import app, recipe_commands

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
