"""The options that several commands share, and the words that the shell offers to complete a command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from esmshard.io.paths import shipped


def recipes(ctx: Context, incomplete: str) -> list[str]:
    """Return the words that may complete `incomplete`: shipped recipes, YAML files in its directory (not for `recipes
    cp`), and the words `embed` and `doctor` (only for `launch`).
    """
    from esmshard.recipe import recipe_file

    files = [] if ctx.info_name == "cp" else sorted(map(str, Path(f"{incomplete}*").parent.glob("*.yaml")))
    return [*recipe_file.names(), *files, *(["embed", "doctor"] if ctx.info_name == "launch" else [])]


def models(ctx: Context) -> list[str]:
    """Return the names of released models and, except for the command `download`, of the shipped models."""
    from esmshard.model.config import RELEASED_NAMES

    return [*([] if ctx.info_name == "download" else ["starter", "demo"]), *RELEASED_NAMES.split()]


def recipe_keys(ctx: Context) -> list[str]:
    """Return all recipe keys, such as `optim.lr=`, from recipes/schema.json. While a value is typed, return []."""
    schema = json.loads((shipped("recipes") / "schema.json").read_text(encoding="utf-8"))

    def below(section: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, key in section["properties"].items():
            parts = [part["$ref"] for part in (key, *key.get("anyOf", ()), *key.get("oneOf", ())) if "$ref" in part]
            for part in parts:
                yield from below(schema["$defs"][part.rpartition("/")[2]], f"{prefix}{name}.")
            if not parts:
                yield f"{prefix}{name}="

    keys = list(dict.fromkeys(below(schema, "")))
    typed: list[str] = ctx.params.get("overrides") or ctx.params.get("arguments") or [""]
    return [] if typed[-1] == "=" or f"{typed[-1]}=" in keys else keys  # bash splits a word at =


AsJson = Annotated[bool, Option("--json", help="Print everything as JSON.")]
Complexes = Annotated[
    str | None,
    Option(
        metavar="all|FILE",
        help="For structures: all makes a record of all chains; FILE lists records such as 1abc_A:B.",
    ),
]
Device = Annotated[
    str | None,
    Option(metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:N or mps; by default the GPU, if there is one."),
]
IdColumn = Annotated[str | None, Option(metavar="COLUMN", help="Table column with the ids; by default id or similar.")]
Join = Annotated[
    str | None,
    Option(
        metavar="linker:N,gap:N",
        help="How to join the chains of a record A:B: N glycines (25) or linker:break, and a gap in positions (0).",
    ),
]
LocalProcesses = Annotated[
    int | None, Option(min=1, max=1_024, help="Local processes; by default one for each GPU, or one.")
]
MutantColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Table column with the mutations; by default mutant or similar.")
]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]...", help="Recipe keys to set, such as optim.lr=1e-4.", autocompletion=recipe_keys),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an earlier result.")]
Recipe = Annotated[
    str, Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).", autocompletion=recipes)
]
SequenceColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Table column with the sequences; by default sequence or similar.")
]
TargetColumn = Annotated[
    str | None,
    Option("--target", metavar="COLUMN", help="Column with the measured values; by default score or similar."),
]
TrackPaths = Annotated[
    list[str] | None,
    Option("--track", metavar="NAME=PATH", help="An extra input of the model, such as 3di=letters.fasta (repeatable)."),
]
