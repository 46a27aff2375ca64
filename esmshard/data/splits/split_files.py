"""The command `esmshard split`: divides a data set, and writes the files of its sets.

    OUT/train.fasta  valid.fasta  test.fasta     the records of each set, with their headers
    OUT/train.npz    valid.npz    test.npz       coordinates, if the input NAME.fasta has a file NAME.npz
    OUT/train.csv    valid.csv    test.csv       for variants: the rows of the table, with all columns
    OUT/splits.tsv                               id; set or fold (`none` if left out); cluster or line of the table
    OUT/split.json                               source, options, programs, counts, notices

With folds, the three sets of round k are in the directory `OUT/fold_k`.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.coordinates import CoordinateLabels, npz_beside, read_arrays
from esmshard.data.labels.label_sources import table_or_fasta
from esmshard.data.mutations import name_of
from esmshard.data.splits import assignment, leakage
from esmshard.data.splits.assignment import LEFT_OUT, RATIOS, SETS, Numbers, check_given, sets_of_fold
from esmshard.data.splits.clusters import align_clusters, read_clusters, run_mmseqs
from esmshard.data.splits.leakage import MOST, ComparedRecords
from esmshard.data.splits.recipe_splits import given_splits, sequence_names
from esmshard.data.splits.variant_records import given_sets, left_out
from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices
from esmshard.data.variants import read_variants
from esmshard.errors import UsageError
from esmshard.io.paths import check_replaced, whole_directory
from esmshard.io.sequences import is_sequence_table
from esmshard.io.store import cached
from esmshard.io.symbols import Edits, Rules
from esmshard.io.tables import NUMBER, counted, write_rows
from esmshard.vocab import decode

OF_SEQUENCES = ("cluster", "ratio", "given")
OF_VARIANTS = ("position", "contiguous", "modulo", "mutations", "low-to-high", "ratio", "given")
"""The values of `--by` for sequences (OF_SEQUENCES) and variants (OF_VARIANTS). The first value is the default."""
_READS = {
    "cluster": ("clusters", "ratios", "folds", "seed"),
    "ratio": ("ratios", "folds", "seed"),
    "given": (),
    "position": ("ratios", "folds", "seed"),
    "contiguous": ("folds",),
    "modulo": ("folds",),
    "mutations": ("ratios", "seed", "train_max"),
    "low-to-high": ("ratios", "seed", "train_max", "target"),
}


@dataclass(frozen=True)
class Method:
    """A method that divides a data set, and its options; see `assignment.py`."""

    by: str
    ratios: Sequence[float] = RATIOS
    folds: int | None = None
    seed: int = 0
    clusters: Sequence[Path] = ()
    """Files with lines `representative<TAB>member`. Records in the same cluster of any file go to the same set."""
    train_max: str | None = None
    """The maximum number of mutations of training variants; for `low-to-high` their maximum value (`50%`: median)."""
    target: str | None = None
    """The column of measured values for the method `low-to-high`."""

    @property
    def shares(self) -> Sequence[float]:
        """The relative sizes of the sets or folds."""
        return self.ratios if self.folds is None else [1] * self.folds


def chosen(known: Sequence[str], by: str | None = None, **options: Any) -> Method:
    """Return the method `by` (by default the first in `known`). An option that is None or [] gets its default. Raises
    `UsageError` if `by` is not in `known`, does not read a given option, or needs a missing option.

    >>> chosen(OF_VARIANTS, folds=5)
    Method(by='position', ratios=(0.8, 0.1, 0.1), folds=5, seed=0, clusters=(), train_max=None, target=None)
    """
    by = by or known[0]
    if by not in known:
        data = "variants (--wild-type)" if known is OF_VARIANTS else "sequences (no --wild-type)"
        raise UsageError(f"--by {by}: is not for {data}; choose {', '.join(known)}")
    given = {name: value for name, value in options.items() if value is not None and value != []}
    for name in given:
        if name not in _READS[by]:
            raise UsageError(f"--{name.replace('_', '-')} is not read by --by {by}; leave it out")
    if "folds" in given and "ratios" in given:
        raise UsageError("--ratios: folds are of equal size; leave out --ratios or --folds")
    if by in ("contiguous", "modulo") and "folds" not in given:
        raise UsageError(f"--by {by} makes folds; pass --folds 5 for the folds of ProteinGym")
    if given.get("folds", 3) < 3:
        raise UsageError(f"--folds {given['folds']}: at least 3 are needed, for train, valid and test")
    return Method(by, **given)


def parse_ratios(text: str) -> list[float]:
    """Parse the value of `--ratios`: three numbers above zero, such as `8,1,1`."""
    ratios = [float(part) if NUMBER.fullmatch(part.strip()) else 0.0 for part in text.split(",")]
    if len(ratios) != len(SETS) or not 0 < min(ratios) <= max(ratios) < float("inf"):
        raise UsageError(f"--ratios {text}: three numbers above zero are expected, for train, valid and test")
    return ratios


class FastaRecords:
    """N records to divide. `source` is a FASTA file, a table, a token store, or structures. `sets` is a table or a
    FASTA file of labels that names the set of each record. `rules` names the columns if `source` is a table.
    """

    def __init__(self, source: Path, sets: Path | None = None, rules: Rules = Rules()) -> None:  # noqa: B008  # frozen
        structures = holds_structures(source)
        if rules != Rules() and not is_sequence_table(source):
            raise UsageError(f"{source}: is no table; leave out --sequence-column and --id-column")
        self.source, self._fasta = source, cached_split(source) if structures else source
        self._store = cached(self._fasta, rules)
        self._sets = None if sets is None else table_or_fasta(sets)
        about_records = [*(notices(self._fasta) if structures else []), *self._store.notices]
        self.notices = [f"{source}: {notice}" for notice in about_records]
        self.ids = [self._store.id(n) for n in range(len(self._store))]
        self.facts: dict[str, str] = {"source": source.resolve().name}
        if sets is not None:
            self.facts["sets"] = str(sets)
        self._clusters: list[str] = []
        self._coordinates = self._read_coordinates()

    def divide(self, method: Method, directory: Path, say: Callable[[str], None]) -> Numbers:
        """Return the set or fold of each record, int64 [N]. Records with the same sequence go to the same set, unless
        the method is `given`. `directory` is for temporary files. `say` gets a message before clustering.
        """
        if method.by == "given":
            edits = Edits()
            number_N = given_splits(self._store, self.source, self._sets, edits, required=False)
            file = self.facts.get("sets", self.source)
            self.notices += [f"{file}: {notice}" for notice in edits.notices()]
            check_given(number_N, Path(file))
            return number_N
        count, same = len(self._store), sequence_names(self._store)
        if method.by == "ratio":
            return assignment.by_cluster(same, method.shares, method.seed)
        if method.clusters:
            clusterings = [read_clusters(path, self.ids) for path in method.clusters]
        elif shutil.which("mmseqs") is None:
            say(f"clustering {counted(count, 'record')} by pairwise alignment, as MMseqs2 is not installed")
            clusterings = [align_clusters(ComparedRecords(count, self._store.residues, self._store.id))]
        else:
            say(f"clustering {counted(count, 'record')} with MMseqs2")
            clusterings = [run_mmseqs((decode(self._store.residues(n)) for n in range(count)), self.ids, directory)]
        self.notices += [notice for clusters in clusterings for notice in clusters.notices]
        self.facts["clusters"] = ", ".join(clusters.source for clusters in clusterings)
        self._clusters = assignment.components(*(clusters.names for clusters in clusterings), same)
        return assignment.by_cluster(self._clusters, method.shares, method.seed)

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns of `splits.tsv` without the column of sets or folds. Each column has N cells."""
        return {"id": self.ids, "cluster": self._clusters} if self._clusters else {"id": self.ids}

    def count(self, number_M: Numbers) -> dict[str, int]:
        """Count the records, residues and clusters (if any) of a set."""
        sizes = {"records": len(number_M), "residues": int(self._store.lengths[number_M].sum(dtype=np.int64))}
        return sizes | ({"clusters": len({self._clusters[n] for n in number_M.tolist()})} if self._clusters else {})

    def write(self, stem: Path, number_M: Numbers) -> None:
        """Write the records of a set to `STEM.fasta`, and their coordinates, if any, to `STEM.npz`."""
        with open(stem.with_name(f"{stem.name}.fasta"), "w", encoding="utf-8") as file:
            for n in number_M.tolist():
                file.write(f">{self._store.description(n)}\n{decode(self._store.residues(n))}\n")
        if self._coordinates is not None:
            cut = _cut(self._coordinates, [self.ids[n] for n in number_M.tolist()])
            np.savez_compressed(stem.with_name(f"{stem.name}.npz"), **cut)  # type: ignore[arg-type]

    def check(self, sets: Mapping[str, Numbers], most: int) -> list[str]:
        """Return sentences about records that are identical or similar to training records."""
        records = ComparedRecords(len(self._store), self._store.residues, self._store.id)
        others = {name: records.part(number_M) for name, number_M in sets.items() if name != "train"}
        return leakage.check(records.part(sets["train"]), others, most).notices()

    def _read_coordinates(self) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays of the `.npz` file; None without it. Raises `InputError` if they do not fit the records."""
        path = npz_beside(self._fasta)
        if self._fasta.is_dir() or not path.is_file():
            return None
        CoordinateLabels(self._fasta, self._store)  # raises an error if the files do not fit
        arrays = read_arrays(path)
        chains, residues = len(arrays["names"]), int(arrays["offsets"][-1])
        odd = [n for n, a in arrays.items() if n != "offsets" and (a.ndim == 0 or len(a) not in (chains, residues))]
        if odd:
            self.notices.append(f"{path}: left out {', '.join(odd)}, which has no row for each chain or residue")
        if chains > len(self._store):
            more = counted(chains - len(self._store), "chain")
            self.notices.append(f"{path}: left out {more} that {self.source.name} does not have")
        return {name: array for name, array in arrays.items() if name not in odd}


def _cut(arrays: Mapping[str, npt.NDArray[Any]], ids: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Copy the rows of the chains `ids`, in this order, from the arrays of an `.npz` file."""
    offsets, row = arrays["offsets"], {str(name): k for k, name in enumerate(arrays["names"])}
    rows = np.array([row[record_id] for record_id in ids])
    residues = np.concatenate([np.arange(offsets[k], offsets[k + 1]) for k in rows])
    ends = np.cumsum([0, *np.diff(offsets)[rows]]).astype(offsets.dtype)
    others = {name: array for name, array in arrays.items() if name != "offsets"}
    cut = {name: array[rows if len(array) == len(row) else residues] for name, array in others.items()}
    return {"offsets": ends, **cut}


class VariantRows:
    """N rows of a table of variants to divide. See the function `read_variants` for the arguments.

    Rows with a stop codon, rows without a target value and unusable rows are left out. A row with only synonymous
    changes is treated as the wild type.
    """

    def __init__(
        self, source: Path, wild_type: Path, mutant: str | None, targets: Sequence[str] | None, offset: int
    ) -> None:
        options: dict[str, Any] = {"unusable": "drop", "keep_synonymous": True, "replicates": "keep"}
        variants = read_variants(source, wild_type=wild_type, mutant=mutant, targets=targets, offset=offset, **options)
        self.source, self.notices = source, list(variants.notices)
        self.facts = {"source": source.resolve().name, "wild_type": wild_type.resolve().name}
        self._variants, self._rows = variants, [row for (row,) in variants.rows]
        changes = [tuple(m for m in mutations if m.mutant != m.wild) for mutations in variants.mutations]
        self._names = [name_of(mutations) for mutations in changes]
        self._positions = [frozenset(m.position for m in mutations) for mutations in changes]

    def divide(self, method: Method, _directory: Path, _say: Callable[[str], None]) -> Numbers:
        """Return the set or fold of each row, int64 [N]. Only `given` may put rows of one variant into several sets."""
        if method.by == "given":
            number_N = given_sets(self._variants)
        elif method.by == "low-to-high":
            value_N = self._variants.target_NT[:, 0]
            number_N = assignment.low_to_high(value_N, self._names, self._limit(method), method.ratios, method.seed)
        else:
            train_max = method.train_max or "1"
            if not train_max.isdecimal() or int(train_max) < 1:
                raise UsageError(f"--train-max {train_max}: a number of mutations is expected, such as 2")
            options = (method.shares, method.seed, int(train_max))
            number_N = assignment.of_variants(method.by, self._names, self._positions, *options)
        self.notices += left_out(self.source, self._names, number_N, "set" if method.by == "given" else None)
        return number_N

    def _limit(self, method: Method) -> float:
        """Return the maximum value of training variants: `method.train_max`, else the wild type's mean value."""
        value_N, limit = self._variants.target_NT[:, 0], method.train_max
        if limit is None:
            wild = [n for n, name in enumerate(self._names) if name == "WT"]
            if not wild:
                raise UsageError(
                    f"{self.source}: has no row of the wild type as the limit; pass --train-max, such as 50%"
                )
            return float(value_N[wild].mean())
        try:
            number = float(limit.removesuffix("%"))
            return float(np.quantile(value_N, number / 100)) if limit.endswith("%") else number
        except ValueError:
            raise UsageError(f"--train-max {limit}: a number, or a percentage such as 50%, is expected") from None

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns of `splits.tsv` without the column of sets or folds. Each column has N cells."""
        return {"id": self._variants.names(), "line": [self._variants.table.lines[row] for row in self._rows]}

    def count(self, number_M: Numbers) -> dict[str, int]:
        """Count the rows (`variants`) of a set and their changed positions."""
        positions = frozenset().union(*(self._positions[n] for n in number_M))
        return {"variants": len(number_M), "positions": len(positions)}

    def write(self, stem: Path, number_M: Numbers) -> None:
        """Write the rows of a set to `STEM.csv`, with all columns of the table."""
        cells = list(self._variants.table.columns.values())
        with open(stem.with_name(f"{stem.name}.csv"), "w", encoding="utf-8", newline="") as file:
            rows = [[column[self._rows[n]] for column in cells] for n in number_M.tolist()]
            write_rows(file, [[*self._variants.table.columns], *rows])

    def check(self, sets: Mapping[str, Numbers], _most: int) -> list[str]:
        """Return sentences about variants and positions that are also in the training set."""
        return leakage.variant_notices(self._names, self._positions, sets)


Data = FastaRecords | VariantRows


def may_write(out: Path, overwrite: bool) -> None:
    """Raise `UsageError` if `out` is not empty and `overwrite` is false, or if `out` has a file that
    `esmshard split` does not write.
    """
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    sets = [f"{fold}{name}.{ending}" for fold in ("", "fold_*/") for name in SETS for ending in ("fasta", "npz", "csv")]
    check_replaced(out, ["splits.tsv", "split.json", *sets], marker="split.json")


def divide(
    data: Data, method: Method, out: Path, say: Callable[[str], None]
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Divide a data set, and write the files of its sets. `out` is replaced when all files are written.

    Return the sizes of each set or fold by name (`none` for left-out records), and notices. `say` gets a message before
    a long step. Raises `InputError` if the method cannot divide the data, or `UsageError` for an invalid `train_max`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    number_N = data.divide(method, out.parent, say)
    names = list(SETS) if method.folds is None else [str(k) for k in range(method.folds)]
    counts = {name: data.count(np.flatnonzero(number_N == k)) for k, name in enumerate(names)}
    if (number_N == LEFT_OUT).any():
        counts["none"] = data.count(np.flatnonzero(number_N == LEFT_OUT))
    notices = list(data.notices)
    with whole_directory(out, sync=False) as work:
        if method.folds is None:
            notices += _write_sets(data, work, number_N, MOST)
        else:
            for k in range(method.folds):
                name, sets_N = f"fold_{k}", sets_of_fold(number_N, k, method.folds)
                notices += [f"{name}: {n}" for n in _write_sets(data, work / name, sets_N, MOST // method.folds)]
        (first, ids), *others = data.columns().items()
        in_set = [[*names, "none"][number] for number in number_N]  # LEFT_OUT is -1, the index of `none`
        columns = [(first, ids), ("set" if method.folds is None else "fold", in_set), *others]
        with open(work / "splits.tsv", "w", encoding="utf-8") as file:
            for row in ([name for name, _ in columns], *zip(*(cells for _, cells in columns), strict=True)):
                file.write("\t".join(map(str, row)) + "\n")
        options = {**asdict(method), "clusters": [str(path) for path in method.clusters]}
        made_by = {"esmshard": version("esmshard"), **data.facts}
        facts = {**made_by, "method": options, "counts": counts, "notices": notices}
        (work / "split.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return counts, notices


def counts_table(counts: Mapping[str, Mapping[str, int]], what: str) -> str:
    """Format the sizes of all sets or folds as text. `what` is the title of the first column.

    >>> print(counts_table({"train": {"records": 1200}, "test": {"records": 8}}, "set"))
    set    records
    train    1,200
    test         8
    """
    rows = [[what, *next(iter(counts.values()))]]
    rows += [[name, *(f"{size:,}" for size in sizes.values())] for name, sizes in counts.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(map("  ".join, lines))


def _write_sets(data: Data, directory: Path, number_N: Numbers, most: int) -> list[str]:
    directory.mkdir(exist_ok=True)
    sets = {name: np.flatnonzero(number_N == k) for k, name in enumerate(SETS)}
    for name, number_M in sets.items():
        data.write(directory / name, number_M)
    return data.check(sets, most)
