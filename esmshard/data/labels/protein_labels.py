"""Reads protein labels from FASTA headers or a table: numbers, one class, or several classes for each protein."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.pairing import NAME_LABEL, check_labelled, label_column, rows_of_records
from esmshard.errors import InputError, UsageError
from esmshard.io.headers import FLOAT32_MAX, TRUTH, attributes, number
from esmshard.io.store import TokenStore
from esmshard.io.symbols import Edits
from esmshard.io.tables import MISSING, Table, shown

Kind = Literal["number", "class", "multilabel"]
_TARGETS = ("target", "targets", "label", "labels", "dms_score")


@dataclass(frozen=True)
class ProteinLabels:
    """Labels of N proteins. Cropping a sequence does not change its label."""

    per_residue: ClassVar[bool] = False

    kind: Kind
    names: tuple[str, ...]
    """The names of T targets (kind `number`) or of C classes; class k has name k."""
    values: Any
    """Kind `number`: float32 [N, T], NaN for a missing label. Kind `class`: int64 [N], -1 for a missing label. Kind
    `multilabel`: a sparse float32 matrix of 0 and 1, [N, C].
    """
    labelled_N: npt.NDArray[np.bool_]
    """Whether each protein has a label, bool [N]."""
    notices: list[str]

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """Return the label of record n as `target`: number float32 [T], class int64 [], multilabel float32 [C]."""
        if not self.labelled_N[n]:
            raise KeyError(f"record {n} has no label")
        if self.kind != "multilabel":
            return {"target": self.values[n, ...]}
        target_C = np.zeros(len(self.names), dtype=np.float32)
        target_C[_classes_of(self.values, n)] = 1
        return {"target": target_C}


def protein_labels(
    store: TokenStore,
    fasta: Path,
    kind: Kind,
    table: Table | None = None,
    *,
    columns: Sequence[str] = (),
    id_column: str | None = None,
    required: bool = True,
) -> ProteinLabels:
    """Read the labels of N proteins from FASTA headers or from a table.

    Args:
        store: the proteins.
        fasta: the FASTA file of the proteins. Without `table`, its headers have the labels, such as `TARGET=0.1`.
        kind: `number`: one or several columns of numbers; `class`: one column of class names; `multilabel`: one column
            of class names separated by semicolons, or several columns of 0 and 1.
        table: a table of R rows with the labels; None if the headers have the labels.
        columns: columns of the table, or keys of the headers. By default the key `TARGET`, or the only column with a
            name in `_TARGETS`.
        id_column: the name of the id column; see the function `rows_of_records`.
        required: whether a protein without a label is an error. Otherwise the protein is left out and counted.

    Raises:
        InputError: a label is not valid, or proteins and rows do not match.
        UsageError: a column is named twice.
    """
    edits = Edits()
    columns = _columns(table, columns)
    where: Callable[[int], str]
    if table is None:
        headers = (attributes(store.description(n), columns, str(fasta), edits) for n in range(len(store)))
        texts = [tuple(given.get(key, "") for key in columns) for given in headers]
        where = lambda n: f"{fasta}: record {shown(store.id(n))}"  # noqa: E731
    else:
        texts, where = list(zip(*map(table.column, columns), strict=True)), table.where
    names: tuple[str, ...] = tuple(columns)
    values: Any
    labelled_R: npt.NDArray[np.bool_]
    if kind == "number":
        values = _header_numbers(texts, columns, where) if table is None else _table_numbers(table, columns)
        labelled_R = np.asarray(np.isfinite(values).any(1))
    elif len(columns) > 1:
        labelled_R = np.array([any(cells) for cells in texts])
        values = _sparse([_flags(cells, columns, where(row)) for row, cells in enumerate(texts)], len(columns))
    else:
        rows = [_classes(text, kind, where(row), edits) for row, (text,) in enumerate(texts)]
        names = tuple(sorted({name for row in rows for name in row}))
        place = {name: k for k, name in enumerate(names)}
        labelled_R = np.array([bool(row) for row in rows])
        if kind == "class":
            values = np.array([place[row[0]] if row else -1 for row in rows], np.int64)
        else:
            values = _sparse([sorted(place[name] for name in row) for row in rows], len(names))
    if table is None:
        lacks = " or ".join(f"{key}=" for key in columns[:3])
        check_labelled(store, fasta, labelled_R, lacks, (), edits, required=required)
        return ProteinLabels(kind, names, values, labelled_R, edits.notices())

    def same(a: int, b: int) -> bool:
        if kind == "multilabel":
            equal = np.array_equal(_classes_of(values, a), _classes_of(values, b))
            return equal and bool(labelled_R[a] == labelled_R[b])
        return np.array_equal(values[a], values[b], equal_nan=kind == "number")

    row_N = rows_of_records(
        table, store, fasta, id_column=id_column, same=same, labelled_R=labelled_R, required=required, edits=edits
    )
    values = values[row_N]
    if kind == "multilabel":  # Index -1 selects the last row, so remove its classes.
        values.data[np.repeat(row_N < 0, np.diff(values.indptr))] = 0
        values.eliminate_zeros()
    else:
        values[row_N < 0] = np.nan if kind == "number" else -1
    return ProteinLabels(kind, names, values, row_N >= 0, edits.notices())


def _columns(table: Table | None, columns: Sequence[str]) -> Sequence[str]:
    if table is None:
        columns = [key.upper() for key in columns] or ["TARGET"]
    elif not columns:
        columns = [label_column(table, _TARGETS)]
    else:
        for name in columns:
            table.column(name, NAME_LABEL)
    if len(set(columns)) < len(columns):
        raise UsageError(f"data.target: names a column twice: {', '.join(map(shown, columns))}; leave one of them out")
    return columns


def _header_numbers(
    texts: Sequence[Sequence[str]], keys: Sequence[str], where: Callable[[int], str]
) -> npt.NDArray[np.float32]:

    def converted(n: int, key: str, text: str) -> float:
        return number(text, lambda: f"{where(n)}: {key}")

    return np.array([list(map(converted, [n] * len(keys), keys, cells)) for n, cells in enumerate(texts)], np.float32)


def _table_numbers(table: Table, columns: Sequence[str]) -> npt.NDArray[np.float32]:
    values_RT = np.stack([table.numbers(column) for column in columns], axis=1)
    large = np.argwhere(np.abs(values_RT) > FLOAT32_MAX)
    if len(large):
        row, t = map(int, large[0])
        cell = table.columns[columns[t]][row]
        raise InputError(f"{table.where(row)}: column {shown(columns[t])} has {shown(cell)}; 3.4e38 is the maximum")
    return values_RT.astype(np.float32)


def _sparse(rows: Sequence[Sequence[int]], n_classes: int) -> Any:
    """Return a sparse matrix, float32 [R, C], in which element (r, c) is 1 if `rows[r]` contains c."""
    from scipy.sparse import csr_array

    ends = np.cumsum([0, *map(len, rows)])
    codes = np.fromiter((code for row in rows for code in row), np.int64, ends[-1])
    return csr_array((np.ones(len(codes), np.float32), codes, ends), shape=(len(rows), n_classes))


def _classes_of(matrix: Any, row: int) -> npt.NDArray[np.int32]:
    """Return the class numbers in a row of a sparse matrix. Indexing with scipy is 30 times slower."""
    classes: npt.NDArray[np.int32] = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]
    return classes


def _flags(cells: Sequence[str], columns: Sequence[str], where: str) -> list[int]:
    """Return the indices of the cells of a row that have the value 1 or true. `where` begins the error message."""
    truths = [TRUTH.get(text.lower()) for text in cells]
    if any(cells) and None in truths:
        c = truths.index(None)
        raise InputError(
            f"{where}: {shown(columns[c])} is {shown(cells[c])}; write 0 or 1, or leave all classes of the row empty"
        )
    return [c for c, truth in enumerate(truths) if truth]


def _classes(text: str, kind: Kind, where: str, edits: Edits) -> list[str]:
    """Return the distinct class names in the cell `text`. Only kind `multilabel` allows several names."""
    pieces = text.split(";") if kind == "multilabel" else [text]
    names = [name for piece in pieces if (name := piece.strip())]
    for k, name in enumerate(names):
        if name.lower() in MISSING:
            raise InputError(f"{where}: {shown(name)} may mean no class; leave the cell empty, or rename the class")
        if name in names[:k]:
            edits.add("a class that was named twice was taken once", name)
    return list(dict.fromkeys(names))
