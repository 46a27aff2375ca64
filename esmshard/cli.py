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
    nproc: Annotated[Optional[int], typer.Option(min=1, help="Local processes; all GPUs, or one, by default.")] = None,
    resume: Annotated[Optional[str], typer.Option(help="auto, never, or the path of a run or checkpoint.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done, and stop.")
    ] = False,
    profile: Annotated[
        int, typer.Option(min=0, metavar="N", help="Record N steps with torch's profiler, and say where time goes.")
    ] = 0,
    stop_after: Annotated[
        Optional[str], typer.Option(metavar="TIME", help="Save and leave with exit code 75 after so long, as 3h50m.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start the processes again, up to N times, when one was lost.")
    ] = 0,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Train N times, from as many seeds.")] = 1,
    folds: Annotated[
        Optional[int],
        typer.Option(
            min=3,
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
    from esmshard import recipe as recipes
    from esmshard.parallel import preemption, worker

    if stop_after is not None:
        os.environ[preemption.STOP_AT] = str(time.time() + preemption.seconds(stop_after))
    resume = None if resume == "never" else resume
    if resume and overwrite:
        raise UsageError("--resume goes on with a run, --overwrite removes it; give one of them")
    if max_restarts and resume not in (None, "auto"):
        raise UsageError("--max-restarts goes on from the newest checkpoint of the run: give --resume auto with it")
    with preemption.Preemption():
        worker.follow_launcher()
        resolved = recipes.load(recipes.resolve(recipe), overrides or [])

        import torch

        from esmshard.parallel.mesh import is_launched, own_device

        of_table = resolved.task.name == "variant" and resolved.data.folds is None
        processes = nproc or (1 if resolved.adapt.method == "probe" else max(1, torch.cuda.device_count()))
        runs: list[tuple[str, ...]] = [()]  # overrides of each
        if not is_launched():
            from esmshard.data.variant_records import FOLDS
            from esmshard.train.cross_validated import conclude, curve_runs
            from esmshard.train.job import check_out, describe, prepare
            from esmshard.train.repeats import is_done, repeats, summarise

            if of_table and resolved.data.split not in ("mutations", "given"):
                folds = folds or FOLDS
            several = repeats(resolved, seeds, folds) if seeds > 1 or folds or of_table else []
            # Of a table, the first set is learned from in parts as well, for a learning curve.
            curve = curve_runs(resolved, several[0]) if of_table and resolved.adapt.method != "probe" else []
            if several and resume not in (None, "auto"):
                raise UsageError("--seeds and --folds go on with --resume auto; a path is that of one run")
            if several:
                all_runs = [*several, *curve]
                runs = [run.overrides for run in all_runs if resume != "auto" or not is_done(run.out)]
            # Every mistake that can be seen is seen here, once, before any process is started.
            for n, options in enumerate(runs or [several[-1].overrides]):
                one = recipes.load(recipes.resolve(recipe), [*(overrides or []), *options])
                if not dry_run:
                    check_out(Path(one.out), resume, overwrite)
                if n == 0:
                    job = prepare(one, processes, processes, own_device(0, processes))
            if dry_run:
                print(describe(job, processes) + (f"\nruns      {len(runs)}" if several else ""))
                return
        elif of_table and resolved.data.split not in ("mutations", "given"):
            raise UsageError(
                "a launcher has started this process, which trains one fold; set data.folds=5 and data.fold, or start "
                "the cross-validation with a single command and --nproc"
            )
        elif nproc is not None or dry_run or max_restarts or seeds > 1 or folds:
            raise UsageError(
                "--nproc, --max-restarts, --seeds, --folds and --dry-run belong to a single command; a launcher has "
                "started this process already"
            )
        elif stop_after is not None and worker.restarts_allowed():
            raise UsageError(
                "--stop-after would count anew when the launcher starts this process again; for the launcher, set "
                f"{preemption.STOP_AT}=$(($(date +%s) + {preemption.seconds(stop_after)})) instead"
            )
        elif worker.attempt() and resume is None:
            from esmshard.train.status import begun_by_this_launch

            # Started again: what it has done so far must not be lost. But what --overwrite is to remove, and did not
            # come to, is not what it has done.
            if not overwrite or begun_by_this_launch(Path(resolved.out)):
                resume, overwrite = "auto", False
        if is_launched() or (processes == 1 and not max_restarts and not several):
            from esmshard.train import finetune as training

            run = training.run(resolved, resume, overwrite, profile, trust=trust, started=_STARTED)
            if run is not None and page:
                _pictures(run, resolved)
            return

    from esmshard.parallel.launch import run_local  # outside: signals are for the processes now
    from esmshard.progress import say
    from esmshard.train.start import TOLD

    flags = (["--resume", resume] if resume else []) + (["--overwrite"] if overwrite else [])
    flags += (["--profile", str(profile)] if profile else []) + (["--trust"] if trust else [])
    flags += [] if page and not of_table else ["--no-report"]
    for n, options in enumerate(runs):
        arguments = ["-m", "esmshard", "finetune", recipe, *(overrides or []), *options, *flags]
        if several:
            say(f"{' '.join(options)}")
            if n and of_table:
                os.environ[TOLD] = "1"
        if code := run_local(arguments, processes, max_restarts=max_restarts):
            if code != preemption.Preempted.exit_code:
                from esmshard.train.status import mark_failed

                one = recipes.load(recipes.resolve(recipe), [*(overrides or []), *options])
                mark_failed(Path(one.out), "the processes were ended from outside; go on with --resume auto", code)
            raise SystemExit(code)
    if several:
        told = summarise(Path(resolved.out), several, folds)
        print(told if not of_table else conclude(resolved, several, curve))
    if of_table:
        from esmshard.infer.rank import predict as rank

        out = Path(resolved.out)
        count = rank(str(out), None, out / "ranked.csv", overwrite=True)
        say(f"all {count:,} single substitutions, best first, in {out / 'ranked.csv'}")
        if page:
            _pictures(out, resolved)


def _pictures(run: Path, resolved: Any) -> None:
    """Figure and report of a run, as far as what they need is installed."""
    from esmshard.progress import say
    from esmshard.report.html import report as write
    from esmshard.report.plots import contact_figure
    from esmshard.tasks import TASKS
    from esmshard.train.splits import open_split

    try:
        if resolved.task.name == "contact":
            labels = TASKS["contact"](resolved.task, {}).labels
            say(f"figure in {contact_figure(run, open_split(resolved, 'test', labels))}")
        say(f"report in {write(run)}")
    except InputError as error:
        say(f"no figures: {error}")


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
    max_length: Annotated[Optional[int], typer.Option(min=8, help="Residues; see --long.")] = None,
    long: Annotated[
        str, typer.Option(help="Sequences over --max-length: full, crop, window, skip or error.", show_default=False)
    ] = "",
    a3m: Annotated[bool, typer.Option("--a3m", help="Lower-case letters are insertions; remove them.")] = False,
    keep_gaps: Annotated[bool, typer.Option("--keep-gaps", help="Keep - and . as tokens.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
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

    ruled = long or max_length or a3m or keep_gaps or (on_unknown, on_duplicate) != ("error", "error")
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
        ("--long", long or "full", ("full", "crop", "window", "skip", "error")),
    ):
        if value not in known:
            raise UsageError(f"{option} {value}: one of {', '.join(known)} is expected")
    if max_length is not None and not long:
        raise UsageError("--max-length: say what becomes of longer ones: --long crop, window, skip or error")
    rules = Rules(on_unknown, a3m, keep_gaps, long or "full", max_length)  # type: ignore[arg-type]
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
    may_write(out, overwrite)
    if wild_type is not None:
        targets = None if method.by != "low-to-high" else (target,) if target else ()
        found = divide(VariantRows(data, wild_type, mutant, targets, offset or 0), method, out, overwrite, say)
    elif mutant is not None or offset is not None:
        raise UsageError("--mutant and --offset are for variants of one protein; pass --wild-type FILE.fasta too")
    else:
        found = divide(FastaRecords(data), method, out, overwrite, say)
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
def embed(
    model: Annotated[str, typer.Argument(help="A model directory, or a fair-esm .pt file.")],
    fasta: Annotated[
        Path, typer.Argument(help="FASTA, plain or compressed, - for the standard input, or a token store.")
    ],
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
    model: Annotated[str, typer.Argument(help="A consolidated model with a fine-tuned head; of variants also a run.")],
    data: Annotated[
        Optional[Path],
        typer.Argument(help="FASTA, - for the standard input, or a token store; of variants their table."),
    ] = None,
    out: Annotated[
        Optional[Path],
        typer.Option("-o", "--out", help="File to write: .npz, one array a record under its id, or .csv."),
    ] = None,
    all_singles: Annotated[
        bool, typer.Option("--all-singles", help="Of variants: every single substitution, in place of a table.")
    ] = False,
    propose: Annotated[
        Optional[int],
        typer.Option(min=1, metavar="N", help="Of variants: N to measure next, promising and unlike each other."),
    ] = None,
    kappa: Annotated[
        float, typer.Option(min=0, help="Of --propose: standard deviations that uncertainty is worth.")
    ] = 1.0,
    mutant: Annotated[
        Optional[str], typer.Option(metavar="COLUMN", help="Of a table: mutations; found by its name by default.")
    ] = None,
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
        how: dict[str, Any] = {"mutant": mutant, "propose": propose, "kappa": kappa, "overwrite": overwrite}
        print(f"{out}: {rank(model, data, out, **how):,} variants")
        return

    from esmshard.infer.predict import predict as run

    if all_singles or propose or mutant:
        raise UsageError(f"--all-singles, --propose and --mutant are for models of variants, and {model} is none")
    if data is None:
        raise UsageError("give a FASTA file, or a token store, to predict")
    print(f"{out}: {run(model, data, out, overwrite=overwrite):,} records")


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
    window: Annotated[int, typer.Option(min=1, help="Residues of a long protein that the model sees at once.")] = 1022,
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
    overwrite: Overwrite = False,
) -> None:
    """Score a model on labelled data, with intervals, beside the baselines."""
    from esmshard.data.ingest import cached
    from esmshard.data.loader import Examples
    from esmshard.data.structure_splits import cached_split, holds_structures, notices
    from esmshard.progress import say
    from esmshard.recipe import sample
    from esmshard.settings import Recipe
    from esmshard.tasks.finetuner import load_finetuned
    from esmshard.train.evaluate import report

    for name in ("evaluation.json", "per_protein.csv"):
        if (out / name).exists() and not overwrite:
            raise UsageError(f"{out / name}: exists already; choose another directory or pass --overwrite")
    found = load_finetuned(model)
    if Recipe.model_validate(found.about["recipe"]).task.name == "variant":
        raise UsageError(
            f"{model}: is of variants; finetune tests on folds of their table, and `esmshard predict MODEL TABLE` "
            "says Spearman's correlation with the measured values of another one"
        )
    path = sample(data)
    fasta = cached_split(path) if holds_structures(path) else path
    for notice in notices(fasta) if fasta != path else ():
        say(f"{path}: {notice}")
    store = cached(fasta)
    where = Recipe.model_validate(found.about["recipe"]).data.model_copy(update={"labels": labels, "mask": None})
    examples = Examples(Path(data).name, path, store, found.task.labels(fasta, store, where))
    out.mkdir(parents=True, exist_ok=True)
    print(report(model, examples, out, warn=say))


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
