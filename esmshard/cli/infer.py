"""The commands that use a model: `embed`, `embeddings`, `predict`, `score` and `evaluate`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from esmshard.cli.options import (
    Complexes,
    Device,
    Join,
    LocalProcesses,
    MutantColumn,
    Overwrite,
    TargetColumn,
    TrackPaths,
    models,
)
from esmshard.errors import InputError, UsageError


def embed(
    model: Annotated[str, Argument(help="A model.", autocompletion=models)],
    fasta: Annotated[
        Path, Argument(help="FASTA file or table, - for standard input, token store, structures, or bucket address.")
    ],
    out: Annotated[
        Path | None, Option("-o", "--out", help="File; without an ending, a directory of parts, also in a bucket.")
    ] = None,
    fmt: Annotated[
        Literal["h5", "npy", "npz", "csv", "parquet", "zarr", "h5ad", "safetensors", "biotrainer-h5", "parts"] | None,
        Option("--format", help="File format; by default the ending of OUT tells it."),
    ] = None,
    pool: Annotated[
        str,
        Option(
            metavar="POOL,...",
            help="mean, max, cls, residue, logits, contacts, attentions; default: mean or residue, to fit the format.",
        ),
    ] = "",
    layers: Annotated[
        str, Option(metavar="N,...", help="Layers: 0 for the embedding, -1 for the last layer (the default).")
    ] = "",
    heads: Annotated[str, Option(metavar="N,...", help="Heads for --pool attentions, from 0; by default all.")] = "",
    dtype: Annotated[Literal["fp32", "fp16", "bf16"], Option(help="Type of the numbers in the file.")] = "fp32",
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], Option(help="Precision; auto is the fastest.")
    ] = "auto",
    long: Annotated[
        Literal["full", "window", "truncate"], Option(help="What to do with proteins longer than --window.")
    ] = "full",
    window: Annotated[
        int | None, Option(min=2, help="Residues of a window, or kept by truncate; by default as in training.")
    ] = None,
    overlap: Annotated[int, Option(help="Residues that neighbouring windows share.")] = 256,
    tokens: Annotated[
        int | None, Option(min=1, max=10**9, help="Tokens computed at once; by default 2,048 (CPU) or 16,384 (GPU).")
    ] = None,
    track: TrackPaths = None,
    join: Join = None,
    nproc: LocalProcesses = None,
    device: Device = None,
    reuse: Annotated[Path | None, Option(metavar="DIR", help="Copy embeddings from DIR, an earlier output.")] = None,
    engine: Annotated[
        Literal["local", "array", "ray"],
        Option(help="Processes of this machine, workers of a job array that all run this command, or a Ray cluster."),
    ] = "local",
    worker: Annotated[
        str | None, Option(metavar="I/N", help="For --engine array: this is worker I (from 0) of N.")
    ] = None,
    ray_address: Annotated[str, Option(metavar="auto|local|ADDRESS", help="For --engine ray: the cluster.")] = "auto",
    offload: Annotated[
        bool, Option("--offload", help="Divide a large model over all GPUs, the memory and the disk.")
    ] = False,
    strict: Annotated[bool, Option("--strict", help="Exit code 1 if a record failed.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only print the size of input and output.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write embeddings of sequences in input order. Residue embeddings have no rows for the tokens <cls> and <eos>."""
    from esmshard.data.tracks import named_tracks

    if out is None:
        raise UsageError("-o: name the file to write, or the directory, such as -o my.h5")
    from esmshard.embed import engines
    from esmshard.embed.spec import Long, request
    from esmshard.io import remote

    how: dict[str, Any] = {"fmt": fmt, "pools": [name.strip() for name in pool.split(",") if name.strip()]}
    how |= {"layers": _integers("--layers", layers), "heads": _integers("--heads", heads)}
    how |= {"dtype": dtype, "precision": precision, "device": device, "long": Long(long, window or 0, overlap)}
    how |= {"tracks": named_tracks(track or []), "join": join}
    if dry_run:
        from esmshard.model import weights

        if weights.is_far(model):
            raise UsageError(f"--dry-run does not download the model; run `esmshard download {model}` first")
    asked = request(model, out, **how)
    if dry_run:
        print(engines.forecast(asked, fasta, reuse))
        return
    how = {"nproc": nproc, "tokens": tokens, "reuse": reuse, "overwrite": overwrite, "offload": offload}
    manifest = engines.embed(asked, fasta, engine=engine, worker=worker, ray_address=ray_address, **how)
    if manifest is None:  # Worker 0 of the job array prints the summary.
        return
    place, failed = remote.address(out) or out, manifest["failed_records"]
    print(engines.summary(place, manifest))
    if failed == manifest["records"]:
        text = remote.local(manifest["failed_file"]).read_text(encoding="utf-8")
        record_id, _, reason = text.split("\n")[1].split("\t")
        raise InputError(
            f"{place}: has no values, because every record failed, see {manifest['failed_file']}; the first record, "
            f"{record_id}: {reason}; change the model or the options, and run the command again with --overwrite"
        )
    if failed and strict:
        raise SystemExit(1)


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise UsageError(f"{option} {text}: whole numbers with commas between them are expected, such as 5,6") from None


embeddings = typer.Typer(help="Show and merge outputs of embed.", no_args_is_help=True)


@embeddings.command("status")
def embeddings_status(out: Annotated[Path, Argument(help="An output of embed, finished or not.")]) -> None:
    """Print the progress and the content of an output of embed."""
    from esmshard.embed import engines

    print(engines.status(out))


@embeddings.command("merge")
def embeddings_merge(
    directory: Annotated[Path, Argument(help="A finished directory of parts.")],
    out: Annotated[Path, Option("-o", "--out", help="File to write, also in a bucket (s3://, gs://).")],
    fmt: Annotated[
        Literal["h5", "npy", "npz", "csv", "parquet", "zarr", "h5ad", "safetensors"] | None,
        Option("--format", help="File format; by default the ending of OUT tells it."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge the parts in a finished output of embed into one file. The directory is kept."""
    from esmshard.embed import engines
    from esmshard.io import remote

    if (url := remote.address(out)) is not None:
        remote.write_at(url, overwrite, lambda path: print(engines.merge(directory, path, fmt, overwrite=overwrite)))
    else:
        print(engines.merge(directory, out, fmt, overwrite))


def predict(
    model: Annotated[str, Argument(help="A fine-tuned model directory; for variants, also a run.")],
    data: Annotated[
        Path | None,
        Argument(help="FASTA file or table, - for standard input, token store, or structures; for variants, a table."),
    ] = None,
    out: Annotated[
        Path | None,
        Option("-o", "--out", help="File: .npz, .h5, .zarr or .safetensors (one array per record), .csv or .parquet."),
    ] = None,
    all_singles: Annotated[
        bool, Option("--all-singles", help="For variants: rank all single substitutions; pass no table.")
    ] = False,
    combine: Annotated[
        int | None,
        Option(min=2, max=6, metavar="K", help="For variants: rank combinations of 2 to K single substitutions."),
    ] = None,
    best_singles: Annotated[
        int, Option("--from", min=2, max=100_000, metavar="F", help="For --combine: combine the F best substitutions.")
    ] = 20,
    propose: Annotated[
        int | None, Option(min=1, max=1_000_000, metavar="N", help="For variants: choose N to measure next.")
    ] = None,
    acquisition: Annotated[
        Literal["ucb", "greedy", "thompson", "ei"],
        Option(
            help="For --propose: maximise mean + kappa x sd, the mean, a random model, or the expected improvement."
        ),
    ] = "ucb",
    kappa: Annotated[float, Option(min=0, help="For ucb: standard deviations to add to a prediction.")] = 1.0,
    diversity: Annotated[float, Option(min=0, help="For --propose: penalty for positions chosen already.")] = 0.15,
    sites: Annotated[
        str | None,
        Option(
            metavar="39,40,41", help="For --propose, --combine: positions to change, or all; by default as in training."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        Option("--with", metavar="BASELINE", help="For variants: rank by one-hot, zero-shot, augmented or embedding."),
    ] = None,
    wild_type: Annotated[
        Path | None,
        Option("--wild-type", metavar="FASTA", help="For models of several proteins: the protein of the variants."),
    ] = None,
    mutant: MutantColumn = None,
    offset: Annotated[int | None, Option(help="Added to the positions of a table; by default as in training.")] = None,
    png: Annotated[Path | None, Option(metavar="DIR", help="For contacts: directory for pictures.")] = None,
    weights: Annotated[
        Path | None,
        Option(metavar="FILE", help="For task.pooling=attention or light_attention: file for the weights of residues."),
    ] = None,
    track: TrackPaths = None,
    complexes: Complexes = None,
    device: Device = None,
    strict: Annotated[bool, Option("--strict", help="Exit code 1 if a record of a FASTA file failed.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the predictions of a fine-tuned head: contact maps, classes, values, or variants (the best first)."""
    from esmshard.data.tracks import named_tracks
    from esmshard.io.tables import counted
    from esmshard.predict.variant_tables import models_of

    tracks = named_tracks(track or [])
    if out is None:
        raise UsageError("-o: name the file to write")
    if models_of(model):
        sources = [data is not None, all_singles, combine is not None].count(True)
        if sources > 1 or (sources == 0 and not propose):
            raise UsageError(
                "a model of variants needs either a table, --combine, --all-singles or --propose; pass one of them"
            )
        if png or weights or strict or complexes:
            raise UsageError(
                "--png, --weights, --strict and --complexes are for proteins, not for variants; leave them out"
            )
        if tracks:
            raise UsageError("--track: a model of variants already has the tracks of its wild type; leave --track out")
        how: dict[str, Any] = {"mutant": mutant, "offset": offset, "propose": propose, "overwrite": overwrite}
        how |= {"kappa": kappa, "diversity": diversity, "device": device, "sites": sites, "baseline": baseline}
        how |= {"all_singles": all_singles, "combine": combine, "best_singles": best_singles}
        how |= {"acquisition": acquisition, "wild_type": wild_type}
        from esmshard.predict.variants import rank

        print(f"{out}: {counted(rank(model, data, out, **how), 'row')}")
        return

    from esmshard.predict import heads

    if all_singles or combine or propose or mutant or sites or baseline or wild_type or offset is not None:
        raise UsageError(
            "--all-singles, --combine, --propose, --sites, --with, --wild-type, --mutant and --offset are for models "
            f"of variants, but {model} was trained for another task; leave them out"
        )
    if data is None:
        raise UsageError("there is no input; name a FASTA file or a token store")
    given: dict[str, Any] = {"tracks": tracks, "complexes": complexes, "device": device}
    written, failures = heads.predict(model, data, out, png=png, weights_out=weights, overwrite=overwrite, **given)
    failed = f"; {len(failures):,} failed, see {out}.failed.tsv" if failures else ""
    print(f"{out}: {counted(written, 'record')}{failed}")
    if failures and strict:
        raise typer.Exit(1)


def score(
    model: Annotated[str, Argument(help="A model with an LM head; no fine-tuning is needed.", autocompletion=models)],
    sequences: Annotated[
        Path, Argument(metavar="FASTA", help="FASTA of the wild type; without variants, any sequences, a store, or -.")
    ],
    table: Annotated[Path | None, Argument(help="Table of variants of the wild type.")] = None,
    out: Annotated[Path | None, Option("-o", "--out", help="CSV file to write; for sequences, also Parquet.")] = None,
    all_singles: Annotated[
        bool, Option("--all-singles", help="Score every single substitution, without a table.")
    ] = False,
    propose: Annotated[
        int | None, Option(min=1, max=1_000_000, metavar="N", help="Choose N single substitutions for a first plate.")
    ] = None,
    sites: Annotated[
        str | None, Option(metavar="39,40,41", help="For --propose: positions that may change; by default all.")
    ] = None,
    png: Annotated[
        Path | None, Option(metavar="FILE", help="For --all-singles and --propose: picture of the scores.")
    ] = None,
    method: Annotated[
        Literal["masked-marginals", "wild-type-marginals", "pseudo-perplexity", "one-pass"] | None,
        Option(help="For variants the first (default), second or third; for sequences the third (default) or fourth."),
    ] = None,
    ensemble: Annotated[
        list[str] | None, Option(metavar="MODEL", help="Another model, for average scores (repeatable).")
    ] = None,
    mutant: MutantColumn = None,
    target: TargetColumn = None,
    offset: Annotated[
        int | None, Option(help="Number to add to the positions; by default, one that fits the wild type.")
    ] = None,
    window: Annotated[
        int | None, Option(min=1, max=1_000_000, help="Residues read at once; by default as many as in training.")
    ] = None,
    track: TrackPaths = None,
    join: Join = None,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Score variants or sequences with a language model, without training (zero-shot). Higher means more natural."""
    from esmshard.data.tracks import named_tracks
    from esmshard.predict import zero_shot

    if out is None:
        raise UsageError("-o: name the file to write")
    how: dict[str, Any] = {"ensemble": ensemble or [], "window": window, "tracks": named_tracks(track or [])}
    how |= {"device": device, "overwrite": overwrite} | ({} if method is None else {"method": method})
    singles = all_singles or propose is not None
    if sites is not None and propose is None:
        raise UsageError("--sites names the positions that proposals may change; pass --propose N as well")
    if png is not None and not singles:
        raise UsageError("--png is for --all-singles and --propose; leave it out")
    if table is None and not singles:
        if mutant or target or offset is not None:
            raise UsageError(
                "--mutant, --target and --offset are for tables of variants; name a table after the FASTA file"
            )
        print(zero_shot.score_sequences(model, sequences, out, **how, join=join))
        return
    if join is not None:
        raise UsageError("--join is for sequences of several chains, and variants have one chain; leave --join out")
    if (table is not None and singles) or (all_singles and propose):
        raise UsageError("pass one of a table of variants, --all-singles and --propose")
    how |= {"mutant": mutant, "target": target, "offset": "auto" if offset is None else offset}
    how |= {"propose": propose, "sites": sites, "png": png}
    print(zero_shot.score_table(model, sequences, table, out, **how))


def evaluate(
    model: Annotated[str, Argument(help="A fine-tuned model directory.")],
    data: Annotated[str, Argument(help="A labelled FASTA file or table, structures, or sample:contact/test.")],
    out: Annotated[Path, Option("-o", "--out", help="Directory for evaluation.json and per_protein.csv.")],
    labels: Annotated[str | None, Option(metavar="FILE", help="Labels, if DATA has none.")] = None,
    png: Annotated[
        Path | None, Option(metavar="DIR", help="For contacts: directory for pictures, predicted and true.")
    ] = None,
    track: TrackPaths = None,
    complexes: Complexes = None,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Compute metrics of a fine-tuned model and of baselines on labelled data, with confidence intervals."""
    from esmshard.data.splits.recipe_splits import joined, open_tested
    from esmshard.data.tracks import named_tracks, track_files
    from esmshard.model.families.family_registry import family_of
    from esmshard.predict import pictures
    from esmshard.progress import say
    from esmshard.recipe.sections import Recipe
    from esmshard.report.charts import draw_maps
    from esmshard.tasks.finetuned import load_finetuned
    from esmshard.train import evaluate as evaluation

    for name in ("evaluation.json", "per_protein.csv"):
        if (out / name).exists() and not overwrite:
            raise UsageError(f"{out / name}: exists already; choose another directory or pass --overwrite")
    if png is not None:
        pictures.check(png, overwrite=overwrite)
    tuned = load_finetuned(model, device)
    recipe, config = Recipe.model_validate(tuned.about["recipe"]), tuned.model.trunk.config
    if recipe.task.reads_table:
        raise UsageError(
            f"{model}: is a model of variants, which `esmshard finetune` has tested already; for another table, "
            "run `esmshard predict MODEL TABLE -o FILE`, which prints Spearman's correlation with the measured values"
        )
    if png is not None and tuned.task.names:
        raise UsageError(f"--png {png}: is for contact maps, but {model} predicts none; leave --png out")
    tracks = named_tracks(track or [])
    files = track_files(tracks, family_of(config).tracks_of(config), model, "--track ")
    examples = open_tested(data, labels, joined(recipe, config.chains), tuned.task.labels, files, complexes)
    for notice in examples.notices:
        say(f"{examples.path}: {notice}")
    out.mkdir(parents=True, exist_ok=True)
    print(evaluation.report(model, tuned, examples, out, labels, tracks, complexes))
    if png is not None:
        draw_maps(tuned, examples, png)
        say(f"maps in {png}: predictions are above the diagonal, true contacts below it")
