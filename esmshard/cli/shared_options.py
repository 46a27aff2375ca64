"""The options that several commands share."""

from pathlib import Path
from typing import Annotated, Optional

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Complexes = Annotated[
    Optional[str],
    typer.Option(
        metavar="all|FILE",
        help="For structures: make one record of all chains of a file, or records of a list with lines as 1abc_A:B.",
    ),
]
Device = Annotated[
    Optional[str],
    typer.Option(
        metavar="DEVICE",
        help="Where to compute: cpu, cuda, cuda:N or mps; by default on the GPU, if there is one.",
    ),
]


Join = Annotated[
    Optional[str],
    typer.Option(
        metavar="linker:N,gap:N",
        help="How the chains of a record A:B become one sequence: by a linker of N glycines (25), or linker:break; and "
        "a gap in positions (0).",
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
SweepFile = Annotated[
    Optional[Path],
    typer.Option("--sweep", metavar="FILE", help="Search the settings that this file names, by the validation set."),
]
SweepTrials = Annotated[
    Optional[int],
    typer.Option(
        "--trials", min=1, max=100_000, metavar="N", help="Trials of --sweep; by default 20, or the whole grid."
    ),
]
TrackPaths = Annotated[
    Optional[list[str]],
    typer.Option(
        "--track",
        metavar="NAME=PATH",
        help="What the model reads besides amino acids, such as 3di=letters.fasta; may be given again.",
    ),
]
