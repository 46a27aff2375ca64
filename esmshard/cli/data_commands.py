"""Commands that prepare data: a token store of FASTA files, and training, validation and test sets."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from esmshard.cli.shared_options import Overwrite
from esmshard.errors import UsageError


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
    from esmshard.data.fasta.symbols import Rules
    from esmshard.data.store import ingestion
    from esmshard.data.store.token_store import TokenStore
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
    from esmshard.data.splits.fasta_split import FastaRecords
    from esmshard.data.splits.split_files import counts_table, divide, may_write
    from esmshard.data.splits.split_method import OF_SEQUENCES, OF_VARIANTS, chosen, parse_ratios
    from esmshard.data.splits.variant_split import VariantRows
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
