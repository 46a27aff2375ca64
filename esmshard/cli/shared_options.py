"""The options that several commands share."""

from typing import Annotated

import typer

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result.")]
Trust = Annotated[bool, typer.Option("--trust", help="Read a checkpoint that another user wrote.")]
