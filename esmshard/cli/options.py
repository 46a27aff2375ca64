"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

AsJson = Annotated[bool, Option("--json", help="Print everything as JSON.")]
Complexes = Annotated[
    str | None,
    Option(
        metavar="all|FILE",
        help="For structures: make one record of all chains of a file, or records of a list with lines as 1abc_A:B.",
    ),
]
Device = Annotated[
    str | None,
    Option(metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:N or mps; by default the GPU, if there is one."),
]
IdColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Column of ids in a table; by default found by its name.")
]
Join = Annotated[
    str | None,
    Option(
        metavar="linker:N,gap:N",
        help="How the chains of a record A:B become one sequence: by a linker of N glycines (25), or linker:break; and "
        "a gap in positions (0).",
    ),
]
LocalProcesses = Annotated[
    int | None, Option(min=1, max=1_024, help="Local processes; by default one for each GPU, or one.")
]
MutantColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Column of mutations in a table; by default found by its name.")
]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Overrides such as optim.lr=1e-4.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an earlier result.")]
Recipe = Annotated[str, Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).")]
SequenceColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Column of sequences in a table; by default found by its name.")
]
SweepFile = Annotated[
    Path | None,
    Option("--sweep", metavar="FILE", help="Search the settings that this file names, by the validation set."),
]
SweepTrials = Annotated[
    int | None,
    Option("--trials", min=1, max=100_000, metavar="N", help="Trials of --sweep; by default 20, or the whole grid."),
]
TargetColumn = Annotated[
    str | None, Option("--target", metavar="COLUMN", help="Column of measured values; by default found by its name.")
]
TrackPaths = Annotated[
    list[str] | None,
    Option(
        "--track",
        metavar="NAME=PATH",
        help="What the model reads besides amino acids, such as 3di=letters.fasta; may be given again.",
    ),
]
