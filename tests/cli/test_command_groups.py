"""The groups of commands: each function is a command, and `--help` lists the commands in a fixed order."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from esmshard import cli
from esmshard.cli import app, help_text, next_steps, recipe_commands

ORDER = (
    "finetune plan status report embed predict score evaluate ingest split track consolidate download push "
    "launch doctor recipes"
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


def test_a_command_ends_with_what_to_type_next_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    typer.main.get_command(app.app).main(["recipes", "cp", "mlm", "my.yaml"], standalone_mode=False)
    assert capsys.readouterr().err == "next: esmshard finetune my.yaml --dry-run\n"
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n")
    typer.main.get_command(app.app).main(["ingest", "a.fasta", "-o", "a.store"], standalone_mode=False)
    assert capsys.readouterr().err == "next: esmshard embed starter a.store -o emb\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    typer.main.get_command(app.app).main(["recipes", "cp", "mlm", "other.yaml"], standalone_mode=False)
    assert capsys.readouterr().err == ""


def test_what_comes_after_a_run_follows_from_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"dry_run": False, "overrides": ["out=runs/mine"], "sweep": None}
    after = {name: next_steps.STEPS["finetune"](values | {"recipe": name}) for name in ("contact", "sequence")}
    assert after["contact"] is not None
    assert after["contact"].startswith("esmshard report runs/mine; esmshard predict runs/mine/model my.fasta -o my.npz")
    assert after["sequence"] is not None
    assert "-o my.csv; esmshard embed runs/mine/model" in after["sequence"]
    assert "--propose" in str(next_steps.STEPS["finetune"](values | {"recipe": "variants"}))
    assert "without --dry-run" in str(next_steps.STEPS["finetune"](values | {"recipe": "contact", "dry_run": True}))
