"""The commands for model files: `consolidate`, `download` and `push`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from esmshard.cli.options import Overwrite, models
from esmshard.errors import UsageError


def consolidate(
    source: Annotated[
        str, Argument(metavar="SOURCE", help="A run, a checkpoint, or a model to convert.", autocompletion=models)
    ],
    out: Annotated[Path, Option("-o", "--out", help="Directory to make.")],
    to: Annotated[
        Literal["hf", "fair-esm", "esm3-pth"] | None,
        Option(help="For transformers, or the authors' file of ESM-2 or ESM3; by default for esmshard."),
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], Option(help="Type of the numbers in the file.")] = "fp32",
    best: Annotated[bool, Option("--best", help="Use the checkpoint with the best validation, if it exists.")] = False,
    adapter: Annotated[
        bool, Option("--adapter", help="For a LoRA run: write only the adapter (for PEFT) and the head.")
    ] = False,
    base: Annotated[str | None, Option(metavar="MODEL", help="New path of the base model of a LoRA run.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a model directory from a sharded checkpoint, or convert a model to another file layout."""
    from esmshard.checkpoint import consolidate as consolidation
    from esmshard.progress import say

    if adapter and (to not in (None, "hf") or dtype != "fp32"):
        raise UsageError("--adapter: the file is always in fp32 and for PEFT; leave --to and --dtype out")
    how: dict[str, Any] = {"overwrite": overwrite, "best": best, "adapter": adapter, "base": base, "warn": say}
    print(consolidation.consolidate(source, out, to=to, dtype=dtype, **how))


def download(
    names: Annotated[
        list[str], Argument(metavar="NAME", help="Released models, or OWNER/NAME on the hub.", autocompletion=models)
    ],
    to: Annotated[Path | None, Option(help="Directory for NAME/; by default the Hugging Face cache.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Download released models, or repositories of the Hugging Face hub. Other commands then need no network:
    they find a model by its name or, after download --to, by its path.
    """
    from esmshard.model import hub

    hub.check(names, to, overwrite)
    for name in names:
        print(hub.fetch(name, to, overwrite))


def push(
    model: Annotated[str, Argument(metavar="MODEL", help="A finished run, or a model directory.")],
    name: Annotated[str, Argument(metavar="OWNER/NAME", help="The repository to make on the hub.")],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Add a commit to a repository that exists already.")] = False,
) -> None:
    """Upload a model and its model card to the Hugging Face hub. Log in first (HF_TOKEN, or `hf auth login`)."""
    from esmshard.model.export import push as upload

    print(upload(model, name, private=private, overwrite=overwrite))
