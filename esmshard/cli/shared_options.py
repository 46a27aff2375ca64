"""The options that several commands share."""

from typing import Annotated, Optional

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Device = Annotated[
    Optional[str],
    typer.Option(
        metavar="DEVICE",
        help="Where to compute: cpu, cuda, cuda:N or mps; by default on the GPU, if there is one.",
    ),
]
LocalProcesses = Annotated[
    Optional[int], typer.Option(min=1, max=1_024, help="Local processes; by default one for each GPU, or one.")
]
MutantColumn = Annotated[
    Optional[str], typer.Option(metavar="COLUMN", help="Column of mutations in a table; by default found by its name.")
]
Overrides = Annotated[
    Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Overrides such as optim.lr=1e-4.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result.")]
RecipeName = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).")]
Trust = Annotated[bool, typer.Option("--trust", help="Read a checkpoint that another user wrote.")]
TrackPaths = Annotated[
    Optional[list[str]],
    typer.Option(
        "--track",
        metavar="NAME=PATH",
        help="What the model reads besides amino acids, such as 3di=letters.fasta; may be given again.",
    ),
]
