"""The command line. One function a command; torch and all that needs it is imported inside them."""

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from esmshard import __version__
from esmshard.errors import InputError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fine-tune ESM-2 protein language models, sharded, from one recipe.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(no_args_is_help=True, help="The shipped recipes.")
app.add_typer(recipes_app, name="recipes")

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"esmshard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def finetune(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as optim.lr=1e-4.")
    ] = None,
    nproc: Annotated[Optional[int], typer.Option(min=1, help="Local processes; all GPUs, or one, by default.")] = None,
    resume: Annotated[Optional[str], typer.Option(help="auto, never, or the path of a run or checkpoint.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done, and stop.")
    ] = False,
) -> None:
    """Fine-tune a model as a recipe says: train, consolidate, evaluate."""
    from esmshard import recipe as recipes

    resume = None if resume == "never" else resume
    if resume and overwrite:
        raise UsageError("--resume goes on with a run, --overwrite removes it; give one of them")
    resolved = recipes.load(recipes.resolve(recipe), overrides or [])

    import torch

    from esmshard.parallel.mesh import is_launched

    if not is_launched():
        from esmshard.train.job import check_out, describe, prepare

        processes = nproc or max(1, torch.cuda.device_count())
        # Every mistake that can be seen is seen here, once, before any process is started.
        if not dry_run:
            check_out(Path(resolved.out), resume, overwrite)
        job = prepare(resolved, processes)
        if dry_run:
            print(describe(job, processes))
            return
        if processes > 1:
            from esmshard.parallel.launch import run_local

            flags = (["--resume", resume] if resume else []) + (["--overwrite"] if overwrite else [])
            code = run_local(["finetune", recipe, *(overrides or []), *flags], processes)
            if code:
                raise SystemExit(code)
            return
    elif nproc is not None or dry_run:
        raise UsageError(
            "--nproc and --dry-run belong to a single command; a launcher has started this process already"
        )

    from esmshard.train import finetune as training

    run = training.run(resolved, resume, overwrite)
    if run is not None:
        _figure(run, resolved)


def _figure(run: Path, resolved: "object") -> None:
    from esmshard.progress import say
    from esmshard.recipe import Recipe
    from esmshard.report.plots import contact_figure
    from esmshard.tasks import TASKS
    from esmshard.train.job import open_split

    assert isinstance(resolved, Recipe)
    try:
        say(f"figure in {contact_figure(run, open_split(resolved, TASKS[resolved.task.name](resolved.task), 'test'))}")
    except InputError as error:
        say(f"no figure: {error}")


@app.command()
def ingest(
    fasta: Annotated[list[Path], typer.Argument(help="FASTA files, plain or compressed.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory of the store to make.")],
) -> None:
    """Read FASTA files into a token store."""
    from esmshard.data.store import ingest as make
    from esmshard.progress import say

    store = make(fasta, out)
    for notice in store.notices:
        say(notice)
    print(f"{out}: {len(store):,} records, {store.manifest['residues']:,} residues")


@app.command()
def consolidate(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A run, one of its checkpoints, or a model to write in another layout."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    to: Annotated[str, typer.Option(help="hf (transformers, and all commands here) or fair-esm.")] = "hf",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    overwrite: Overwrite = False,
) -> None:
    """Make one model out of a sharded checkpoint, or of a model in another layout."""
    from esmshard.checkpoint.consolidate import consolidate as run
    from esmshard.model.export import DTYPES, Target
    from esmshard.progress import say

    if to not in ("hf", "fair-esm"):
        raise UsageError(f"--to {to}: hf or fair-esm is expected")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(DTYPES)} is expected")
    target: Target = "hf" if to == "hf" else "fair-esm"
    print(run(source, out, to=target, dtype=dtype, overwrite=overwrite, warn=say))


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Released models, as esm2_t33_650M_UR50D.")],
    to: Annotated[
        Optional[Path], typer.Option(help="Make DIR/NAME of plain files; the Hugging Face cache by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Download released models, to be used by name or, with --to, by path where there is no network."""
    from esmshard.model import hub

    hub.check(names, to, overwrite)
    for name in names:
        print(hub.fetch(name, to, overwrite))


@app.command()
def embed(
    model: Annotated[str, typer.Argument(help="A model directory, or a fair-esm .pt file.")],
    fasta: Annotated[Path, typer.Argument(help="Sequences, plain or compressed FASTA.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write: .h5 or .npy.")],
    fmt: Annotated[
        Optional[str], typer.Option("--format", help="h5 or npy; by the ending of the file by default.")
    ] = None,
    pool: Annotated[
        Optional[str], typer.Option(help="mean or residue; by default mean for npy, residue for h5.")
    ] = None,
    layer: Annotated[
        Optional[int], typer.Option(help="Layer to take, 0 for the embedding; the last by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write embeddings, without BOS and EOS, in input order."""
    from esmshard.infer.embed import embed as run

    if pool not in (None, "mean", "residue"):
        raise UsageError(f"--pool {pool}: mean or residue is expected")
    count = run(model, fasta, out, fmt=fmt, pool=pool, layer=layer, overwrite=overwrite)  # type: ignore[arg-type]
    print(f"{out}: {count:,} records")


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="A consolidated model directory with a fine-tuned head.")],
    fasta: Annotated[Path, typer.Argument(help="Sequences, plain or compressed FASTA.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write: .npz, one array a record under its id.")],
    overwrite: Overwrite = False,
) -> None:
    """Write what the fine-tuned head says: for contacts a matrix of probabilities a record."""
    from esmshard.infer.predict import predict as run

    print(f"{out}: {run(model, fasta, out, overwrite=overwrite):,} records")


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A consolidated model directory with a fine-tuned head.")],
    data: Annotated[str, typer.Argument(help="A labelled FASTA file, or sample:contact/test.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for evaluation.json and per_protein.csv.")],
    overwrite: Overwrite = False,
) -> None:
    """Score a model on labelled data, with intervals, beside the baselines."""
    from esmshard.data.loader import Examples
    from esmshard.data.store import cached
    from esmshard.progress import say
    from esmshard.recipe import sample
    from esmshard.tasks.finetuner import load_finetuned
    from esmshard.train.evaluate import report

    for name in ("evaluation.json", "per_protein.csv"):
        if (out / name).exists() and not overwrite:
            raise UsageError(f"{out / name}: exists already; choose another directory or pass --overwrite")
    path = sample(data)
    store = cached(path)
    examples = Examples(Path(data).name, path, store, load_finetuned(model).task.labels(path, store))
    out.mkdir(parents=True, exist_ok=True)
    print(report(model, examples, out, warn=say))


@recipes_app.command("ls")
def recipes_ls() -> None:
    """List the shipped recipes."""
    from esmshard import recipe as recipes

    for name in recipes.names():
        first = (recipes.shipped("recipes") / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:12} {first.removeprefix('#').strip()}")


@recipes_app.command("cp")
def recipes_cp(
    name: Annotated[str, typer.Argument(help="A shipped recipe.")],
    to: Annotated[Path, typer.Argument(help="File to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Copy a shipped recipe, to be changed."""
    from esmshard import recipe as recipes

    source = recipes.resolve(name)
    target = to / source.name if to.is_dir() else to
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists already; choose another name or pass --overwrite")
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    print(target)


@recipes_app.command("validate")
def recipes_validate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    overrides: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Check a recipe and print it with every key resolved."""
    from esmshard import recipe as recipes

    print(recipes.dump(recipes.load(recipes.resolve(recipe), overrides or [])), end="")


@recipes_app.command("schema")
def recipes_schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    import json

    from esmshard import recipe as recipes

    print(json.dumps(recipes.schema(), indent=1))


def main() -> None:
    """Entry point: a user's mistake is one sentence on stderr and an exit code, never a traceback."""
    try:
        app()
    except InputError as error:
        # A wrong command or recipe is wrong on every rank alike; one of them says so.
        everywhere = error.shared or isinstance(error, UsageError)
        if os.environ.get("RANK", "0") == "0" or not everywhere:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{(error.strerror or str(error)).lower()}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
