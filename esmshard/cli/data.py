"""The commands that prepare data: `ingest` (token stores), `split` (training, validation, test sets) and `track`."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from esmshard.cli.options import Device, IdColumn, Join, MutantColumn, Overwrite, SequenceColumn, TargetColumn
from esmshard.errors import UsageError


def ingest(
    fasta: Annotated[list[Path] | None, Argument(help="FASTA files or tables; - for standard input.")] = None,
    out: Annotated[Path | None, Option("-o", "--out", help="Directory of the store to make.")] = None,
    on_unknown: Annotated[
        Literal["error", "mask", "drop"], Option(help="What to do with symbols that are no residues.")
    ] = "error",
    on_duplicate: Annotated[Literal["error", "first", "suffix"], Option(help="For ids that occur twice.")] = "error",
    on_nucleotides: Annotated[Literal["error", "keep"], Option(help="What to do with likely DNA or RNA.")] = "error",
    max_length: Annotated[
        int | None, Option(min=8, max=10**6, help="Maximum residues of a record; needs --long.")
    ] = None,
    long: Annotated[
        Literal["full", "crop", "window", "skip", "error"] | None, Option(help="For sequences over --max-length.")
    ] = None,
    sequence_column: SequenceColumn = None,
    id_column: IdColumn = None,
    a3m: Annotated[bool, Option("--a3m", help="Remove lower-case letters, which are insertions.")] = False,
    keep_gaps: Annotated[bool, Option("--keep-gaps", help="Keep - and . as tokens.")] = False,
    join: Join = None,
    workers: Annotated[int, Option(min=1, max=1_024, help="Number of processes.")] = 1,
    verify: Annotated[Path | None, Option(metavar="STORE", help="Compare a store with its sha256 sums.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Read FASTA files and tables into a new token store, or verify a store."""
    from esmshard.io.store import TokenStore, ingest
    from esmshard.io.symbols import Rules
    from esmshard.io.tables import counted
    from esmshard.progress import say
    from esmshard.vocab import Chains, join_option

    columns, policies = (sequence_column, id_column), {on_unknown, on_duplicate, on_nucleotides}
    ruled = long or max_length or a3m or keep_gaps or join or any(columns) or policies != {"error"} or workers > 1
    if verify is not None and (fasta or out or ruled or overwrite):
        raise UsageError("--verify only checks a store; pass it without other arguments")
    if verify is not None:
        TokenStore(verify).verify()
        print(f"{verify}: all files are unchanged")
        return
    if out is None:
        raise UsageError("-o: name the directory of the store to make")
    if not fasta:
        raise UsageError("there is no FASTA file; name one or more")
    if max_length is not None and not long:
        raise UsageError("--max-length needs --long; pass --long crop, window, skip or error for the longer sequences")
    chains = join_option(join) or Chains()
    if chains.gap:
        raise UsageError(
            f"--join {join}: a store cannot save a gap; leave the gap out here, and pass --join {join} (finetune: "
            f"data.join.gap={chains.gap}) to the command that reads the store"
        )
    rules = Rules(on_unknown, a3m, keep_gaps, long or "full", max_length, on_nucleotides, chains.tokens, *columns)
    store = ingest(fasta, out, rules, on_duplicate, workers, overwrite, say)  # type: ignore[arg-type]
    for notice in store.notices:
        say(notice)
    print(f"{out}: {counted(len(store), 'record')}, {counted(store.manifest['residues'], 'residue')}")


def track(
    name: Annotated[Literal["structure_tokens"], Argument(metavar="TRACK", help="The track: structure_tokens.")],
    structures: Annotated[Path, Argument(help="A directory of PDB or mmCIF files, or one file.")],
    weights: Annotated[Path, Option(help="The published file with the weights of the encoder.")],
    out: Annotated[Path, Option("-o", "--out", help="The .npz file to write.")],
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Compute a track (an extra input of a model for each residue) from structures, for `--track` and `data.tracks`."""
    from esmshard.predict.track_codes import write_codes

    print(write_codes(name, structures, weights, out, device=device, overwrite=overwrite))


def split(
    data: Annotated[Path, Argument(help="FASTA, table, store or structures; with --wild-type, a table of variants.")],
    out: Annotated[Path, Option("-o", "--out", help="Directory to make.")],
    by: Annotated[
        Literal["cluster", "ratio", "given", "position", "contiguous", "modulo", "mutations", "low-to-high"] | None,
        Option(
            help="For sequences: cluster (default), ratio, given. For variants: position (default), any but cluster."
        ),
    ] = None,
    sets: Annotated[
        Path | None,
        Option(metavar="FILE", help="For --by given: a table (columns set, validation), or a FASTA of labels (SET=)."),
    ] = None,
    clusters: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="A _cluster.tsv of MMseqs2 (repeatable); by default, MMseqs2 is run."),
    ] = None,
    ratios: Annotated[str | None, Option(metavar="N,N,N", help="Shares of the sets; by default 0.8,0.1,0.1.")] = None,
    folds: Annotated[int | None, Option(help="Number of folds; by default the sets train, valid and test.")] = None,
    seed: Annotated[int | None, Option(help="Seed of random choices; by default 0.")] = None,
    wild_type: Annotated[Path | None, Option(metavar="FASTA", help="The protein whose variants are in DATA.")] = None,
    sequence_column: SequenceColumn = None,
    id_column: IdColumn = None,
    mutant: MutantColumn = None,
    offset: Annotated[int | None, Option(help="Number to add to the positions in the table.")] = None,
    target: TargetColumn = None,
    train_max: Annotated[
        str | None,
        Option(metavar="N", help="Maximum mutations in training (1); for low-to-high, maximum value or share (50%)."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Divide sequences or variants into training, validation and test sets, and report overlaps of the sets."""
    from esmshard.data.splits import split_files as files
    from esmshard.io.symbols import Rules
    from esmshard.progress import say

    known = files.OF_SEQUENCES if wild_type is None else files.OF_VARIANTS
    parts = None if ratios is None else files.parse_ratios(ratios)
    method = files.chosen(
        known, by, ratios=parts, folds=folds, seed=seed, clusters=clusters, train_max=train_max, target=target
    )
    if sets is not None and (method.by != "given" or wild_type is not None):
        raise UsageError("--sets is for --by given with sequences; pass --by given, or leave --sets out")
    if wild_type is not None and (sequence_column or id_column):
        raise UsageError(
            "--sequence-column and --id-column are for sequences; leave both out, or leave --wild-type out"
        )
    files.may_write(out, overwrite)
    if wild_type is not None:
        targets = None if method.by != "low-to-high" else (target,) if target else ()
        counts, notices = files.divide(
            files.VariantRows(data, wild_type, mutant, targets, offset or 0), method, out, say
        )
    elif mutant is not None or offset is not None:
        raise UsageError("--mutant and --offset are for variants of one protein; pass --wild-type FILE.fasta, too")
    else:
        rules = Rules(sequence_column=sequence_column, id_column=id_column)
        counts, notices = files.divide(files.FastaRecords(data, sets, rules), method, out, say)
    for notice in notices:
        say(notice)
    print(f"{out}\n{files.counts_table(counts, 'set' if folds is None else 'fold')}")
