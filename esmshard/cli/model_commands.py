"""Commands about models as files: consolidate checkpoints, download released weights, and verify what is computed."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from esmshard.cli.shared_options import Overwrite, Trust
from esmshard.errors import InputError, UsageError


def consolidate(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A run, one of its checkpoints, or a model to write in another layout."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    to: Annotated[str, typer.Option(help="hf (transformers, and all commands here) or fair-esm.")] = "hf",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    best: Annotated[bool, typer.Option("--best", help="The checkpoint of the best validation, if kept.")] = False,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Of a LoRA run: the adapter for PEFT and the head, without the base model."),
    ] = False,
    base: Annotated[
        Optional[str], typer.Option(metavar="MODEL", help="Where the base model of a LoRA or head run lies now.")
    ] = None,
    trust: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Make one model out of a sharded checkpoint, or of a model in another layout, and compare the two."""
    from esmshard.checkpoint import consolidate as consolidation
    from esmshard.model.weights.export import DTYPES, Target
    from esmshard.progress import say
    from esmshard.tasks.registry import head_of

    if to not in ("hf", "fair-esm"):
        raise UsageError(f"--to {to}: hf or fair-esm is expected")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(DTYPES)} is expected")
    target: Target = "hf" if to == "hf" else "fair-esm"
    how: dict[str, Any] = {"overwrite": overwrite, "best": best, "trust": trust, "base": base, "warn": say}
    if adapter and (to, dtype) != ("hf", "fp32"):
        raise UsageError("--adapter: is written in fp32 and for PEFT; leave --to and --dtype out")
    if adapter:
        print(consolidation.consolidate_adapter(Path(source), out, **how))
        return
    print(consolidation.consolidate(source, out, to=target, dtype=dtype, new_head=head_of, **how))


def download(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Released models, as esm2_t33_650M_UR50D.")],
    to: Annotated[
        Optional[Path], typer.Option(help="Make DIR/NAME of plain files; the Hugging Face cache by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Download released models, to be used by name or, with --to, by path where there is no network."""
    from esmshard.model.weights import hub

    hub.check(names, to, overwrite)
    for name in names:
        print(hub.fetch(name, to, overwrite))


def verify(
    model: Annotated[str, typer.Argument(help="A model directory, a fair-esm .pt file, a released name, or starter.")],
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="JSON file to write as well.")] = None,
    fasta: Annotated[
        Optional[Path], typer.Option(help="Compare on its first 8 records; built-in proteins by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Certify that a model says here what it says in fair-esm and transformers, alone or in any batch."""
    from esmshard.verify.certificate import certify

    certificate = certify(model, out, fasta=fasta, overwrite=overwrite)
    print(certificate.as_text())
    if verdict := certificate.verdict():
        raise InputError(verdict)
