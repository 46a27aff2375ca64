"""The command line. One function a command; torch and all that needs it is imported inside them.

It is as long as the commands have options: each is declared and explained here, and nothing is computed.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Optional

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
Trust = Annotated[bool, typer.Option("--trust", help="Read a checkpoint that another user wrote.")]

_STARTED = time.time()


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
    nproc: Annotated[
        Optional[int], typer.Option(min=1, max=1_024, help="Local processes; all GPUs, or one, by default.")
    ] = None,
    resume: Annotated[Optional[str], typer.Option(help="auto, never, or the path of a run or checkpoint.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done, and stop.")
    ] = False,
    profile: Annotated[
        int,
        typer.Option(
            min=0, max=1_000_000, metavar="N", help="Record N steps with torch's profiler, and say where time goes."
        ),
    ] = 0,
    stop_after: Annotated[
        Optional[str], typer.Option(metavar="TIME", help="Save and leave with exit code 75 after so long, as 3h50m.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000,
            metavar="N",
            help="Start all processes again, up to N times, when one or a machine was lost.",
        ),
    ] = 0,
    nnodes: Annotated[
        Optional[str],
        typer.Option(
            metavar="N|MIN:MAX",
            help="Machines; start the same command once on each. MIN:MAX: go on without those that are lost, and take "
            "in those that come.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        Optional[str],
        typer.Option(metavar="HOST:PORT", help="Where the machines meet: one of them, and a free port there."),
    ] = None,
    rdzv_id: Annotated[
        Optional[str], typer.Option(metavar="ID", help="Name of the run; the scheduler's job id by default.")
    ] = None,
    rdzv_conf: Annotated[
        str,
        typer.Option(
            metavar="KEY=S,...", help="Seconds: join_timeout=600, last_call_timeout=15, keep_alive_interval=5."
        ),
    ] = "",
    local_addr: Annotated[
        Optional[str], typer.Option(metavar="ADDRESS", help="Of this machine for the others; found by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1_000, metavar="N", help="Train N times, from as many seeds.")] = 1,
    folds: Annotated[
        Optional[int],
        typer.Option(
            min=3,
            max=10_000,
            metavar="K",
            help="Cross-validate: K runs, each tested on another part of data.train; of variants 5 by default.",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Draw report.html at the end; esmshard report does it later.")
    ] = True,
    trust: Trust = False,
) -> None:
    """Fine-tune a model as a recipe says: train, consolidate, evaluate."""
    from esmshard.command import RunFailed
    from esmshard.command import finetune as run
    from esmshard.parallel import srun

    if nnodes is None:  # else srun has started the launcher of each machine
        srun.join()
    try:
        run(
            recipe,
            overrides or [],
            nproc=nproc,
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            profile=profile,
            stop_after=stop_after,
            max_restarts=max_restarts,
            nnodes=nnodes,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            rdzv_conf=rdzv_conf,
            local_addr=local_addr,
            seeds=seeds,
            folds=folds,
            page=page,
            trust=trust,
            started=_STARTED,
        )
    except RunFailed as failed:  # the processes have said why
        raise SystemExit(failed.exit_code) from None


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as optim.lr=1e-4.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="GPUs of one machine, as 8xA100-40GB.")] = "",
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    network: Annotated[float, typer.Option(metavar="GBIT", help="Gbit/s of each GPU between machines.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and seconds for programs.")] = False,
) -> None:
    """Say what a recipe needs on given GPUs, and which strategy to choose. Needs no GPU and reads no weights."""
    import json

    from esmshard import recipe as recipes
    from esmshard.parallel import machines

    if not gpus:
        raise UsageError(f"--gpus: say for which GPUs, as 8xA100-40GB; known are {', '.join(machines.GPUS)}")
    there = machines.parse(gpus, nodes, network)
    resolved = recipes.load(recipes.resolve(recipe), overrides or [])

    from esmshard.train import planning

    found = planning.plan(resolved, there)
    print(json.dumps(planning.as_json(found), indent=1) if as_json else planning.as_text(found))


@app.command()
def ingest(
    fasta: Annotated[
        Optional[list[Path]], typer.Argument(help="FASTA files, plain or compressed; - is the standard input.")
    ] = None,
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="Directory of the store to make.")] = None,
    on_unknown: Annotated[
        str, typer.Option(help="Symbols that are no residues: error, mask (read as <mask>) or drop (the record).")
    ] = "error",
    on_duplicate: Annotated[
        str, typer.Option(help="An id that comes again: error (unless it is the same record), first or suffix.")
    ] = "error",
    on_nucleotides: Annotated[
        str, typer.Option(help="Records that look like DNA or RNA: error, or keep, as they are proteins nevertheless.")
    ] = "error",
    max_length: Annotated[Optional[int], typer.Option(min=8, max=1_000_000, help="Residues; see --long.")] = None,
    long: Annotated[
        str, typer.Option(help="Sequences over --max-length: full, crop, window, skip or error.", show_default=False)
    ] = "",
    a3m: Annotated[bool, typer.Option("--a3m", help="Lower-case letters are insertions; remove them.")] = False,
    keep_gaps: Annotated[bool, typer.Option("--keep-gaps", help="Keep - and . as tokens.")] = False,
    workers: Annotated[int, typer.Option(min=1, max=1_024, help="Processes.")] = 1,
    part: Annotated[
        Optional[str], typer.Option(metavar="I/N", help="Read the I-th of N parts, for array jobs; then --merge.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Make the store of parts that are all done.")] = False,
    verify: Annotated[
        Optional[Path], typer.Option(metavar="STORE", help="Compare the files of a store with their sha256.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Read FASTA files into a token store."""
    from esmshard.data import ingest as ingestion
    from esmshard.data.store import TokenStore
    from esmshard.data.symbols import Rules
    from esmshard.progress import say

    ruled = long or max_length or a3m or keep_gaps or {on_unknown, on_duplicate, on_nucleotides} != {"error"}
    if verify is not None and (fasta or out or merge or part or ruled or workers > 1 or overwrite):
        raise UsageError("--verify looks at a store and makes none; give it alone")
    if merge and (ruled or workers > 1):
        raise UsageError("--merge goes by the rules of the parts, in one process; give it -o and --overwrite only")
    if part is not None and (workers > 1 or overwrite):
        raise UsageError("--part runs in one process and replaces nothing; give --overwrite to --merge")
    if verify is not None:
        TokenStore(verify).verify()
        print(f"{verify}: every file is as it was written")
        return
    if out is None:
        raise UsageError("-o: name the directory of the store to make")
    files = fasta or []
    if bool(files) == merge:
        raise UsageError("--merge takes no FASTA files, they are known from the parts" if merge else "no FASTA file")
    if merge and part is not None:
        raise UsageError("--part reads a part, --merge makes the store of all of them; give one of them")
    for option, value, known in (
        ("--on-unknown", on_unknown, ("error", "mask", "drop")),
        ("--on-duplicate", on_duplicate, ("error", "first", "suffix")),
        ("--on-nucleotides", on_nucleotides, ("error", "keep")),
        ("--long", long or "full", ("full", "crop", "window", "skip", "error")),
    ):
        if value not in known:
            raise UsageError(f"{option} {value}: one of {', '.join(known)} is expected")
    if max_length is not None and not long:
        raise UsageError("--max-length: say what becomes of longer ones: --long crop, window, skip or error")
    rules = Rules(on_unknown, a3m, keep_gaps, long or "full", max_length, on_nucleotides)  # type: ignore[arg-type]
    if part is not None:
        number, _, parts = part.partition("/")
        if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
            raise UsageError(f"--part {part}: I/N is expected, as 3/16")
        mine, pieces = ingestion.ingest_part(files, out, int(number), int(parts), rules, on_duplicate)  # type: ignore[arg-type]
        print(
            f"{out}.partial: {mine} of {pieces} pieces are this part's; when all parts are done: "
            f"esmshard ingest --merge -o {out}"
        )
        return
    if merge:
        store = ingestion.merge(out, overwrite)
    else:
        store = ingestion.ingest(files, out, rules, on_duplicate, workers, overwrite, say)  # type: ignore[arg-type]
    for notice in store.notices:
        say(notice)
    print(f"{out}: {len(store):,} records, {store.manifest['residues']:,} residues")


@app.command()
def split(
    data: Annotated[Path, typer.Argument(help="FASTA file or token store; with --wild-type a table of variants.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    by: Annotated[
        Optional[str],
        typer.Option(
            help="Sequences: cluster, ratio, given. Variants: position, contiguous, modulo, mutations, low-to-high, "
            "ratio, given. The first of each by default."
        ),
    ] = None,
    sets: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE", help="With --by given: a table (set, validation) or label FASTA (SET=) that gives the sets."
        ),
    ] = None,
    clusters: Annotated[
        Optional[list[Path]],
        typer.Option(metavar="FILE.tsv", help="MMseqs2's _cluster.tsv; without it mmseqs is run. May come again."),
    ] = None,
    ratios: Annotated[Optional[str], typer.Option(help="Of train, valid and test; 0.8,0.1,0.1 by default.")] = None,
    folds: Annotated[Optional[int], typer.Option(help="K folds instead of one train, valid and test.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="Of random choices; 0 by default.")] = None,
    wild_type: Annotated[
        Optional[Path], typer.Option(metavar="FILE.fasta", help="The protein whose variants DATA has.")
    ] = None,
    mutant: Annotated[
        Optional[str], typer.Option(metavar="COLUMN", help="Mutations; found by its name by default.")
    ] = None,
    offset: Annotated[Optional[int], typer.Option(help="Added to the positions of the table.")] = None,
    target: Annotated[
        Optional[str], typer.Option(metavar="COLUMN", help="Values of low-to-high; found by its name by default.")
    ] = None,
    train_max: Annotated[
        Optional[str],
        typer.Option(
            help="Most mutations to train on (1), or highest value (the wild type's); 50% is a share of the values."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Divide sequences or variants into training, validation and test set, and say what the sets share."""
    from esmshard.data.fasta_split import FastaRecords
    from esmshard.data.split_files import counts_table, divide, may_write
    from esmshard.data.split_method import OF_SEQUENCES, OF_VARIANTS, chosen, parse_ratios
    from esmshard.data.variant_split import VariantRows
    from esmshard.progress import say

    known = OF_SEQUENCES if wild_type is None else OF_VARIANTS
    parts = None if ratios is None else parse_ratios(ratios)
    method = chosen(
        known, by, ratios=parts, folds=folds, seed=seed, clusters=clusters, train_max=train_max, target=target
    )
    if sets is not None and (method.by != "given" or wild_type is not None):
        raise UsageError("--sets is read by --by given for sequences; pass --by given, or leave --sets out")
    may_write(out, overwrite)
    if wild_type is not None:
        targets = None if method.by != "low-to-high" else (target,) if target else ()
        found = divide(VariantRows(data, wild_type, mutant, targets, offset or 0), method, out, overwrite, say)
    elif mutant is not None or offset is not None:
        raise UsageError("--mutant and --offset are for variants of one protein; pass --wild-type FILE.fasta too")
    else:
        found = divide(FastaRecords(data, sets), method, out, overwrite, say)
    for notice in found.notices:
        say(notice)
    print(f"{out}\n{counts_table(found.counts, 'set' if folds is None else 'fold')}")


@app.command()
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
    from esmshard.checkpoint.consolidate import consolidate as run
    from esmshard.checkpoint.consolidate import consolidate_adapter
    from esmshard.model.export import DTYPES, Target
    from esmshard.progress import say
    from esmshard.tasks import head_of

    if to not in ("hf", "fair-esm"):
        raise UsageError(f"--to {to}: hf or fair-esm is expected")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(DTYPES)} is expected")
    target: Target = "hf" if to == "hf" else "fair-esm"
    how: dict[str, Any] = {"overwrite": overwrite, "best": best, "trust": trust, "base": base, "warn": say}
    if adapter and (to, dtype) != ("hf", "fp32"):
        raise UsageError("--adapter: is written in fp32 and for PEFT; leave --to and --dtype out")
    if adapter:
        print(consolidate_adapter(Path(source), out, **how))
        return
    print(run(source, out, to=target, dtype=dtype, new_head=head_of, **how))


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
def bundle(
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make; an unfinished one is gone on with.")],
    weights: Annotated[
        Optional[list[str]], typer.Option(metavar="NAME,...", help="Released models to put in. May come again.")
    ] = None,
    extras: Annotated[
        str, typer.Option(metavar="PART,...", help="Optional parts, as h5,plots,structure; all, or none.")
    ] = "all",
    torch: Annotated[
        str, typer.Option(help="Build of torch: cpu, a CUDA as cu126 or cu130, or default, that of the package index.")
    ] = "default",
    torch_version: Annotated[Optional[str], typer.Option(help="As 2.11.0; by default that of here.")] = None,
    torch_index: Annotated[
        Optional[str], typer.Option(metavar="URL", help="A mirror of https://download.pytorch.org/whl.")
    ] = None,
    python: Annotated[Optional[str], typer.Option(help="Of the site, as 3.12; the one here by default.")] = None,
    platform: Annotated[
        Optional[str], typer.Option(help="Of the site, as manylinux_2_28_x86_64; like this machine by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a directory that installs esmshard where there is no internet: wheels, weights, sums, install.sh."""
    from esmshard.cluster import wheelhouse
    from esmshard.cluster.bundle import TORCH_INDEX, Request
    from esmshard.cluster.bundle import bundle as run

    parts = [part.strip() for part in extras.split(",") if part.strip()]
    request = Request(
        weights=tuple(dict.fromkeys(one.strip() for given in weights or [] for one in given.split(",") if one.strip())),
        extras=() if parts == ["none"] else tuple(parts),
        torch=torch,
        torch_version=torch_version,
        torch_index=torch_index or TORCH_INDEX,
        python=python or wheelhouse.RUNNING,
        platform=platform,
    )
    print(run(out, request, overwrite))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A model directory, a fair-esm .pt file, a released name, or starter.")],
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="JSON file to write as well.")] = None,
    fasta: Annotated[
        Optional[Path], typer.Option(help="Compare on its first 8 records; built-in proteins by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Certify that a model says here what it says in fair-esm and transformers, alone or in any batch."""
    from esmshard.infer.certificate import certify

    certificate = certify(model, out, fasta=fasta, overwrite=overwrite)
    print(certificate.as_text())
    if verdict := certificate.verdict():
        raise InputError(verdict)


@app.command()
def embed(
    model: Annotated[
        str, typer.Argument(help="A model; or status, verify or merge, of what was written as OUT before.")
    ],
    fasta: Annotated[
        Path,
        typer.Argument(
            help="FASTA, plain or compressed, - for the standard input, or a token store; after status and so on, OUT."
        ),
    ],
    out: Annotated[
        Optional[Path], typer.Option("-o", "--out", help="File to write; without an ending, a directory of parts.")
    ] = None,
    fmt: Annotated[
        Optional[str],
        typer.Option(
            "--format",
            help="h5, npy, parquet, h5ad, safetensors, fair-esm-pt or parts; by the ending of OUT by default.",
        ),
    ] = None,
    pool: Annotated[
        str,
        typer.Option(
            metavar="POOL,...",
            help="mean, max, cls, residue, logits, contacts; by default residue for h5, mean for most.",
        ),
    ] = "",
    layers: Annotated[
        str, typer.Option(metavar="N,...", help="Layers, 0 for the embedding, -1 for the last, which is the default.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Numbers in the file: fp32, fp16 or bf16.")] = "fp32",
    precision: Annotated[
        str, typer.Option(help="Of the arithmetic: fp32, bf16, fp16, or auto, which is what the device is fast in.")
    ] = "auto",
    long: Annotated[
        str, typer.Option(help="Proteins over --window residues: full, window (overlapping, blended) or truncate.")
    ] = "full",
    window: Annotated[int, typer.Option(help="Residues of a window, or that are left by truncate.")] = 1022,
    overlap: Annotated[int, typer.Option(help="Residues that neighbouring windows share.")] = 256,
    tokens: Annotated[
        Optional[int],
        typer.Option(min=1, max=1_000_000_000, help="Computed at once; 2,048 on a CPU and 16,384 on a GPU by default."),
    ] = None,
    nproc: Annotated[
        Optional[int], typer.Option(min=1, max=1_024, help="Local processes; all GPUs, or one, by default.")
    ] = None,
    reuse: Annotated[
        Optional[Path], typer.Option(metavar="DIR", help="Take equal sequences from an earlier directory of parts.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on, or join other workers on OUT; begin where there is nothing.")
    ] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep what the GPU has no memory for in the machine's, or on its disk.")
    ] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="The processes hold one model together, which is bigger than a GPU.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if a record failed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how long it would take and how large it would be, and stop.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write embeddings, without BOS and EOS, in input order; or look at what was written."""
    from esmshard.infer.outputs import Long

    if model in ("status", "verify", "merge") and not Path(model).exists():
        import esmshard.infer.embed_left as left

        if model == "merge":
            print(left.merge(fasta, out, fmt, overwrite))
        else:
            print(left.status(fasta) if model == "status" else left.verify(fasta))
        return
    if out is None:
        raise UsageError("-o: name the file to write, or the directory")
    try:
        chosen = [int(layer) for layer in layers.split(",") if layer.strip()]
    except ValueError:
        raise UsageError(f"--layers {layers}: numbers with commas between them are expected, as 5,6") from None
    from esmshard.infer.embed import embed as run
    from esmshard.infer.embed_request import request

    how: dict[str, Any] = {"fmt": fmt, "pools": [one.strip() for one in pool.split(",") if one.strip()]}
    how |= {"layers": chosen, "dtype": dtype, "precision": precision, "long": Long(long, window, overlap)}  # type: ignore[arg-type]
    asked = request(model, out, **how)
    if dry_run and (shard or offload):
        raise UsageError("--dry-run times a model that each process holds whole; leave --shard and --offload out")
    if dry_run:
        from esmshard.infer.embed_plan import dry_run as look

        print(look(asked, fasta, nproc=nproc, tokens=tokens, reuse=reuse))
        return
    if shard and nproc is None:
        from esmshard.parallel import srun

        srun.join()
    report = run(
        asked,
        fasta,
        nproc=nproc,
        tokens=tokens,
        reuse=reuse,
        resume=resume,
        overwrite=overwrite,
        offload=offload,
        shard=shard,
    )
    if not shard or os.environ.get("RANK", "0") == "0":  # else the ranks of a launcher have made one output
        print(report)
    report.check()
    if report.failed and strict:
        raise SystemExit(1)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="A consolidated model with a fine-tuned head; of variants also a run.")],
    data: Annotated[
        Optional[Path],
        typer.Argument(
            help="FASTA, - for the standard input, a token store, or structures (PDB, mmCIF); of variants their table."
        ),
    ] = None,
    out: Annotated[
        Optional[Path],
        typer.Option("-o", "--out", help="File to write: .npz, one array a record under its id, .csv or .parquet."),
    ] = None,
    all_singles: Annotated[
        bool, typer.Option("--all-singles", help="Of variants: every single substitution, in place of a table.")
    ] = False,
    propose: Annotated[
        Optional[int],
        typer.Option(
            min=1, max=1_000_000, metavar="N", help="Of variants: N to measure next, promising and not all of one kind."
        ),
    ] = None,
    kappa: Annotated[
        float, typer.Option(min=0, help="Of --propose: standard deviations that uncertainty is worth.")
    ] = 1.0,
    diversity: Annotated[
        float, typer.Option(min=0, help="Of --propose: what a position or residue costs that was chosen already.")
    ] = 0.15,
    mutant: Annotated[
        Optional[str], typer.Option(metavar="COLUMN", help="Of a table: mutations; found by its name by default.")
    ] = None,
    offset: Annotated[
        Optional[int],
        typer.Option(help="Of a table: added to its positions; by default what was added to those of the run's table."),
    ] = None,
    png: Annotated[
        Optional[Path], typer.Option(metavar="DIR", help="Of contacts: a picture of each map, besides.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Of FASTA: exit with 1 if a record failed, as listed in OUT.failed.tsv.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write what the fine-tuned head says: contact maps, classes and values; variants in their order."""
    from esmshard.infer.rank import models_of
    from esmshard.infer.rank import predict as rank

    if out is None:
        raise UsageError("-o: name the file to write")
    if models_of(model):
        if (data is None) != all_singles:
            raise UsageError("of variants, give either a table or --all-singles")
        if png or strict:
            raise UsageError("--png and --strict are for FASTA files, and these are variants")
        how: dict[str, Any] = {"mutant": mutant, "offset": offset, "propose": propose, "overwrite": overwrite}
        how |= {"kappa": kappa, "diversity": diversity}
        print(f"{out}: {rank(model, data, out, **how):,} variants")
        return

    from esmshard.infer.predict import predict as run

    if all_singles or propose or mutant or offset is not None:
        raise UsageError(
            f"--all-singles, --propose, --mutant and --offset are for models of variants, and {model} is none"
        )
    if data is None:
        raise UsageError("give a FASTA file, or a token store, to predict")
    done = run(model, data, out, png=png, overwrite=overwrite)
    failed = f"; {len(done.failures):,} failed, see {out}.failed.tsv" if done.failures else ""
    print(f"{out}: {done.records:,} records{failed}")
    if done.failures and strict:
        raise typer.Exit(1)


@app.command()
def score(
    model: Annotated[str, typer.Argument(help="A model with an LM head; no fine-tuning is needed.")],
    wild_type: Annotated[Path, typer.Argument(metavar="WILD_TYPE", help="FASTA file with one protein.")],
    table: Annotated[Optional[Path], typer.Argument(help="Variants of it, in a table.")] = None,
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="CSV file to write.")] = None,
    all_singles: Annotated[
        bool, typer.Option("--all-singles", help="Every single substitution, in place of a table.")
    ] = False,
    method: Annotated[
        str, typer.Option(help="masked-marginals, wild-type-marginals or pseudo-perplexity.")
    ] = "masked-marginals",
    mutant: Annotated[
        Optional[str], typer.Option(metavar="COLUMN", help="Mutations; found by its name by default.")
    ] = None,
    target: Annotated[
        Optional[str],
        typer.Option(metavar="COLUMN", help="Measured values, to compare with; found by its name by default."),
    ] = None,
    offset: Annotated[
        Optional[int], typer.Option(help="Added to the positions of the table; what fits the wild type by default.")
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Residues of a long protein that the model sees at once.")
    ] = 1022,
    overwrite: Overwrite = False,
) -> None:
    """Score variants with the language model alone (zero-shot), higher being more natural."""
    from esmshard.infer.score import score_table

    if out is None:
        raise UsageError("-o: name the CSV file to write")
    if (table is None) != all_singles:
        raise UsageError("give either a table of variants or --all-singles")
    how: dict[str, Any] = {"mutant": mutant, "target": target, "offset": "auto" if offset is None else offset}
    how |= {"method": method, "window": window, "overwrite": overwrite}
    print(score_table(model, wild_type, table, out, **how))


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A consolidated model directory with a fine-tuned head.")],
    data: Annotated[str, typer.Argument(help="A labelled FASTA file, structures, or sample:contact/test.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for evaluation.json and per_protein.csv.")],
    labels: Annotated[
        Optional[str], typer.Option(metavar="FILE", help="Labels of DATA, if they are not in it or beside it.")
    ] = None,
    png: Annotated[
        Optional[Path],
        typer.Option(metavar="DIR", help="Of contacts: a picture of each predicted map beside the true contacts."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Score a model on labelled data, with intervals, beside the baselines."""
    from esmshard.infer import map_png
    from esmshard.progress import say
    from esmshard.report.plots import draw_maps
    from esmshard.settings import Recipe
    from esmshard.tasks.finetuner import load_finetuned
    from esmshard.train.evaluate import report
    from esmshard.train.splits import open_tested

    for name in ("evaluation.json", "per_protein.csv"):
        if (out / name).exists() and not overwrite:
            raise UsageError(f"{out / name}: exists already; choose another directory or pass --overwrite")
    if png is not None:
        map_png.check(png, overwrite=overwrite)
    found = load_finetuned(model)
    recipe = Recipe.model_validate(found.about["recipe"])
    if recipe.task.name == "variant":
        raise UsageError(
            f"{model}: is of variants; finetune tests on folds of their table, and `esmshard predict MODEL TABLE` "
            "says Spearman's correlation with the measured values of another one"
        )
    if png is not None and found.task.names:
        raise UsageError(f"--png {png}: is for pair maps, and {model} predicts none; leave --png out")
    examples = open_tested(data, labels, recipe, found.task.labels)
    for notice in examples.notices:
        say(f"{examples.path}: {notice}")
    out.mkdir(parents=True, exist_ok=True)
    print(report(model, examples, out, warn=say, labels=labels))
    if png is not None:
        draw_maps(found, examples, png)
        say(f"maps in {png}: above the diagonal what is predicted, below it the true contacts")


@app.command()
def status(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, or of several: folds, seeds, a table's runs.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything for programs.")] = False,
) -> None:
    """Say how a run stands, and whether it lives. Exit code 0 done, 3 running, 75 preempted, 1 failed, 2 no run."""
    from esmshard.train import standing

    found = standing.standings(run)
    print(standing.as_json(found) if as_json else standing.as_text(found))
    if code := standing.exit_code(found):
        raise SystemExit(code)


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, done or not, or of a table's cross-validation.")
    ],
    out: Annotated[
        Optional[Path], typer.Option("-o", "--out", help="File to write; RUN/report.html by default.")
    ] = None,
) -> None:
    """Write one HTML page about a run: curves, metrics beside baselines, predictions, speed, memory, time."""
    from esmshard.report.html import report as write

    print(write(run, out))


@app.command()
def launch(
    ctx: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe file, or the name of a shipped one; or embed, or doctor, to run these."
        ),
    ],
    arguments: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as optim.lr=1e-4; of embed, after --, its own."),
    ] = None,
    target: Annotated[str, typer.Option(help="The scheduler: slurm or kubernetes.")] = "",
    nodes: Annotated[
        Optional[str],
        typer.Option(metavar="N|MIN:MAX", help="Machines, 1 by default; 1:2 also runs, and goes on, with fewer."),
    ] = None,
    gpus_per_node: Annotated[
        Optional[int], typer.Option(min=0, max=1_024, metavar="N", help="By default those of the site profile.")
    ] = None,
    nproc: Annotated[
        Optional[int], typer.Option(min=1, max=1_024, help="Processes of a machine; one a GPU by default, or one.")
    ] = None,
    time_limit: Annotated[
        Optional[str], typer.Option("--time", metavar="TIME", help="Of Slurm, as 24:00:00; by default the profile's.")
    ] = None,
    array: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            max=1_000_000,
            metavar="N",
            help="Of embed: workers, each with a GPU. Of a recipe: runs, from as many seeds.",
        ),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="Of the job; the recipe's by default.")] = None,
    out: Annotated[
        Optional[Path], typer.Option("-o", "--out", help="File to write; NAME.sbatch or NAME.job.yaml by default.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file, and stop.")] = False,
) -> None:
    """Run a recipe, or workers of embed, on a cluster: write the scheduler's file, and submit it where there is one."""
    from esmshard.cluster import launch as jobs
    from esmshard.cluster import site as sites
    from esmshard.cluster.submit import submit, write
    from esmshard.progress import say

    options = jobs.Options(
        target=jobs.chosen_target(target),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        nproc=nproc,
        time=time_limit,
        array=array,
        name=name,
    )
    profile = sites.found()
    site = jobs.merged(sites.load(), options)
    if site.python is None:
        site = site.model_copy(update={"python": sys.executable})
    given = arguments or []
    if what == "embed":
        # Its own parser looks at what is for it now: a mistake is not to be found in the queue.
        assert ctx.parent is not None
        parser = ctx.parent.command.get_command(ctx.parent, "embed")  # type: ignore[attr-defined]
        with parser.make_context("embed", list(given), parent=ctx.parent) as parsed:
            job = jobs.embed_job(given, parsed.params, options, site)
    elif what == "doctor":
        job = jobs.doctor_job(given, options, site)
    else:
        job = jobs.finetune_job(what, given, options, site)
    text = jobs.render(job, site, options.target)
    say(f"site profile: {profile or f'none at {sites.path()}; all its keys have their defaults'}")
    for path in jobs.not_here(job) if target == "slurm" else ():
        say(f"{path}: is not here; see to it that the nodes have it")
    if dry_run:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        return
    place = out or jobs.default_file(job, options.target)
    write(text, place, overwrite, job.reads)
    print(place)
    print(submit(place, options.target))


@app.command()
def doctor(
    recipe: Annotated[
        Optional[str], typer.Argument(help="A recipe that is to run here: does it fit, are data and weights here?")
    ] = None,
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as optim.lr=1e-4.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything for programs.")] = False,
    nproc: Annotated[
        Optional[int],
        typer.Option(min=1, max=1_024, help="Processes to measure between; all GPUs, or two, by default."),
    ] = None,
    nnodes: Annotated[
        Optional[str], typer.Option(metavar="N", help="Machines; start the same command on each of them.")
    ] = None,
    rdzv_endpoint: Annotated[Optional[str], typer.Option(metavar="HOST:PORT", help="Where they meet.")] = None,
    rdzv_id: Annotated[Optional[str], typer.Option(metavar="ID", help="What they have in common.")] = None,
    rdzv_conf: Annotated[
        str, typer.Option(metavar="KEY=SECONDS,...", help="Times of the launcher, such as join_timeout=60.")
    ] = "",
    local_addr: Annotated[Optional[str], typer.Option(help="Address of this machine for the others.")] = None,
    out: Annotated[
        Optional[Path], typer.Option(metavar="DIR", help="Where a run would be written; here, or as the recipe says.")
    ] = None,
) -> None:
    """Say what is wrong with this machine: versions, GPUs, links, disks, clocks; each with the mend."""
    from esmshard.cluster.doctor import Request, run
    from esmshard.parallel import nodes as machines
    from esmshard.parallel import srun

    if nnodes is None and (rdzv_endpoint or rdzv_id or rdzv_conf or local_addr):
        raise UsageError("--rdzv-... and --local-addr are for several machines; give --nnodes N too")
    together = None if nnodes is None else machines.parse(nnodes, rdzv_endpoint, rdzv_id, local_addr, rdzv_conf)
    if nnodes is None and nproc is None:
        srun.join()
    request = Request(recipe, tuple(overrides or ()), nproc, together, out)
    code = run(request, as_json)
    if code:
        raise SystemExit(code)


@recipes_app.command("ls")
def recipes_ls() -> None:
    """List the shipped recipes."""
    from esmshard import recipe as recipes

    for name in recipes.names():
        print(f"{name:14} {recipes.description(name)}")


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
    target.write_text(recipes.copy_of(source), encoding="utf-8")
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
    from esmshard import recipe as recipes

    print(recipes.schema_text(), end="")


def main() -> None:
    """Entry point: a user's mistake is one sentence on stderr and an exit code, never a traceback."""
    try:
        _main()
    except SystemExit as leaving:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise
        # One of several processes leaves without taking the interpreter down: a thread of gloo that wants it at that
        # moment would end the process with SIGABRT, and launchers take that for a failure of the run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


def _main() -> None:
    from esmshard.parallel import preemption, worker

    try:
        app()
    except preemption.Preempted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(stop, file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except InputError as error:
        worker.tell_launcher(error)
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
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
