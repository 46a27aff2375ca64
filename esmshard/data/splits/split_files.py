"""The files of a split.

    OUT/train.fasta  valid.fasta  test.fasta     records with their headers, as read
    OUT/train.npz    ...                         coordinates, if NAME.npz lies beside NAME.fasta
    OUT/train.csv    valid.csv    test.csv       for variants: rows, with all columns
    OUT/splits.tsv                               id, set (or fold), cluster or line; `none` for a record that is left
    out
    OUT/split.json                               how the split was made: source, options, programs, counts, notices

With folds, the sets of round k are in `OUT/fold_k`.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from esmshard.data.splits.assignment import LEFT_OUT, SETS, Numbers, sets_of_fold
from esmshard.data.splits.fasta_split import FastaRecords
from esmshard.data.splits.leakage import MOST
from esmshard.data.splits.split_method import Method
from esmshard.data.splits.variant_split import VariantRows
from esmshard.errors import UsageError
from esmshard.files import check_replaced

Data = FastaRecords | VariantRows


@dataclass(frozen=True)
class Division:
    """The result of a division."""

    counts: dict[str, dict[str, int]]
    """Sizes of each set or fold; the sizes of what was left out have the name `none`."""
    notices: list[str]


def may_write(out: Path, overwrite: bool) -> None:
    """Refuse to write over anything but an earlier split. Changes nothing."""
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    sets = [f"{fold}{name}.{ending}" for fold in ("", "fold_*/") for name in SETS for ending in ("fasta", "npz", "csv")]
    check_replaced(out, ["splits.tsv", "split.json", *sets], marker="split.json")


def divide(
    data: Data, method: Method, out: Path, overwrite: bool = False, say: Callable[[str], None] = lambda _: None
) -> Division:
    """Divide a data set and write the files of its sets. `out` appears only when all files are complete.

    Args:
        data: the records.
        method: how to divide the records.
        out: directory to make.
        overwrite: replace an earlier split.
        say: takes a message before a step that takes long.

    Raises:
        InputError: the data cannot be divided by this method.
        UsageError: `out` exists.
    """
    may_write(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    number_N = data.divide(method, out.parent, say)
    names = list(SETS) if method.folds is None else [str(k) for k in range(method.folds)]
    counts = {name: _sizes(data, np.flatnonzero(number_N == k)) for k, name in enumerate(names)}
    if (number_N == LEFT_OUT).any():
        counts["none"] = _sizes(data, np.flatnonzero(number_N == LEFT_OUT))
    work = Path(tempfile.mkdtemp(prefix=f".tmp-{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)  # mkdtemp makes a private directory.
        notices = list(data.notices)
        if method.folds is None:
            notices += _write_sets(data, work, number_N, MOST)
        else:
            for k in range(method.folds):
                name, sets_N = f"fold_{k}", sets_of_fold(number_N, k, method.folds)
                found = _write_sets(data, work / name, sets_N, MOST // method.folds)
                notices += [f"{name}: {notice}" for notice in found]
        _write_list(data, work / "splits.tsv", number_N, [*names, "none"], "set" if method.folds is None else "fold")
        options = {**asdict(method), "clusters": [str(path) for path in method.clusters]}
        facts = {
            "esmshard": version("esmshard"),
            **data.facts,
            "method": options,
            "counts": counts,
            "notices": notices,
        }
        (work / "split.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        _rename(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Division(counts, notices)


def counts_table(counts: Mapping[str, Mapping[str, int]], what: str) -> str:
    """Format the sizes of sets as lines of text.

    >>> print(counts_table({"train": {"records": 1200}, "test": {"records": 8}}, "set"))
    set    records
    train    1,200
    test         8
    """
    header = [what, *next(iter(counts.values()))]
    rows = [header, *([name, *(f"{size:,}" for size in sizes.values())] for name, sizes in counts.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _sizes(data: Data, number_M: Numbers) -> dict[str, int]:
    return dict(zip(data.sizes, data.count(number_M), strict=False))


def _write_sets(data: Data, directory: Path, number_N: Numbers, most: int) -> list[str]:
    """Write the files of three sets, and return notices about what they have in common."""
    directory.mkdir(exist_ok=True)
    sets = {name: np.flatnonzero(number_N == k) for k, name in enumerate(SETS)}
    for name, number_M in sets.items():
        data.write(directory / name, number_M)
    return data.check(sets, most).notices()


def _write_list(data: Data, path: Path, number_N: Numbers, names: Sequence[str], what: str) -> None:
    columns = data.columns()
    (first, ids), *others = columns.items()
    with open(path, "w", encoding="utf-8") as file:
        file.write("\t".join([first, what, *(name for name, _ in others)]) + "\n")
        for record_id, number, *rest in zip(ids, number_N.tolist(), *(column for _, column in others), strict=True):
            file.write("\t".join(map(str, [record_id, names[number], *rest])) + "\n")  # -1 is `none`, the last name


def _rename(work: Path, out: Path) -> None:
    """Replace a directory by another. Between the two renames `out` is missing, but both directories are complete."""
    if not out.exists():
        work.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".old-{out.name}-", dir=out.parent))
    out.rename(old / out.name)
    work.rename(out)
    shutil.rmtree(old)
