"""Commands about recipes, `esmshard recipes ...`: list, copy, validate, and print the schema."""

from pathlib import Path
from typing import Annotated

import typer

from esmshard.cli.next_steps import with_next_step
from esmshard.cli.shared_options import Overrides, Overwrite, RecipeName
from esmshard.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="The shipped recipes.")


@app.command("ls")
def recipes_ls() -> None:
    """List the shipped recipes."""
    from esmshard.recipe import recipe_file

    for name in recipe_file.names():
        print(f"{name:14} {recipe_file.description(name)}")


@app.command("cp")
@with_next_step
def recipes_cp(
    name: Annotated[str, typer.Argument(help="A shipped recipe.")],
    to: Annotated[Path, typer.Argument(help="File to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Copy a shipped recipe to a file of your own."""
    from esmshard.recipe import recipe_file

    source = recipe_file.resolve(name)
    target = to / source.name if to.is_dir() else to
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists already; choose another name or pass --overwrite")
    target.write_text(recipe_file.copy_of(source), encoding="utf-8")
    print(target)


@app.command("validate")
def recipes_validate(
    recipe: RecipeName,
    overrides: Overrides = None,
) -> None:
    """Check a recipe, and print it with the values of all keys."""
    from esmshard.recipe import recipe_file

    print(recipe_file.dump(recipe_file.load(recipe_file.resolve(recipe), overrides or [])), end="")


@app.command("schema")
def recipes_schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    from esmshard.recipe import recipe_file

    print(recipe_file.schema_text(), end="")
