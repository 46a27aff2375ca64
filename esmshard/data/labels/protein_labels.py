"""Labels of whole proteins: numbers, one class, or several classes, from FASTA headers or from a table."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.pairing import NAME_LABEL, check_labelled, rows_of_records
from esmshard.errors import InputError, UsageError
from esmshard.io.headers import FLOAT32_MAX, TRUTH, attributes, number
from esmshard.io.store import TokenStore
from esmshard.io.symbols import Edits
from esmshard.io.tables import MISSING, Table, listed, shown

Kind = Literal["number", "class", "multilabel"]
_TARGETS = ("target", "targets", "label", "labels", "dms_score")


@dataclass(frozen=True)
class ProteinLabels:
    """Labels of N whole proteins. A crop of a sequence does not change them."""

    per_residue: ClassVar[bool] = False

    kind: Kind
    names: tuple[str, ...]
    """Names of the T targets if `kind` is `number`, else of the C classes; the number of a class is its place here."""
    values: npt.NDArray[Any]
    """The labels of all proteins. `number`: float32 [N, T], NaN where missing; `class`: int64 [N], -1 where missing;
    `multilabel`: int64, the classes of all proteins one after another.
    """
    spans_N2: npt.NDArray[np.int64]
    """For `multilabel`, int64 [N, 2]: the classes of record n are values[spans_N2[n, 0] : spans_N2[n, 1]]. Otherwise
    empty.
    """
    labelled_N: npt.NDArray[np.bool_]
    """Whether each record has a label, bool [N]: false only for a record that was left out."""
    notices: list[str]
    """Sentences about labels that were changed or left out."""

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """Return `target` of record n: float32 [T], int64 [], or float32 [C] of 0 and 1, as `kind` says."""
        if not self.labelled_N[n]:
            raise KeyError(f"record {n} has no label")
        if self.kind != "multilabel":
            return {"target": self.values[n, ...]}
        target_C = np.zeros(len(self.names), dtype=np.float32)
        start, stop = self.spans_N2[n]
        target_C[self.values[start:stop]] = 1
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
    """Read the labels of N proteins.

    Args:
        store: the proteins.
        fasta: the file of the proteins; its headers hold the labels (`TARGET=0.1`) if there is no table.
        kind: `number`: one or several columns of numbers; `class`: one column of names; `multilabel`: one column of
            names separated by semicolons, or several columns of 0 and 1.
        table: a table of R rows with the labels.
        columns: columns of the table, or keys of the headers; without them `TARGET`, or the one column that is called
            `target`, `label` or the like.
        id_column: column of the ids; see `rows_of_records`.
        required: whether a protein without a label is an error. If not, it is left out and counted.

    Raises:
        InputError: a label cannot be used, or proteins or rows have no match; the message names line, record or counts.
        UsageError: the arguments contradict each other.
    """
    edits = Edits()
    columns = _columns(table, columns)
    if table is None:
        texts, where = _header_texts(store, fasta, columns, edits), lambda n: f"{fasta}: record {shown(store.id(n))}"
        rows = _rows(kind, columns, texts, len(store), where, edits)
    elif kind == "number":
        rows = _number_rows(columns, _table_numbers(table, columns))
    else:
        texts = zip(*map(table.column, columns), strict=True)
        rows = _rows(kind, columns, texts, len(table), table.where, edits)
    rows.values.flags.writeable = False
    if table is None:
        lacks = " or ".join(f"{key}=" for key in columns[:3])
        check_labelled(store, fasta, rows.labelled_R, lacks, (), edits, required=required)
        return ProteinLabels(kind, rows.names, rows.values, rows.spans_R2, rows.labelled_R, edits.notices())
    row_N = rows_of_records(
        table,
        store,
        fasta,
        id_column=id_column,
        same=rows.same,
        labelled_R=rows.labelled_R,
        required=required,
        edits=edits,
    )
    values, spans_N2 = rows.of_records(row_N)
    return ProteinLabels(kind, rows.names, values, spans_N2, row_N >= 0, edits.notices())


@dataclass(frozen=True)
class _Rows:
    """The labels of R rows of a table, or of R headers. `names`, `values` and `spans_R2` are as in `ProteinLabels`."""

    kind: Kind
    names: tuple[str, ...]
    values: npt.NDArray[Any]
    spans_R2: npt.NDArray[np.int64]
    labelled_R: npt.NDArray[np.bool_]
    """Whether each row has a label, bool [R]."""

    def same(self, a: int, b: int) -> bool:
        """Return whether two rows have the same label."""
        if self.kind != "multilabel":
            return bool(np.array_equal(self.values[a], self.values[b], equal_nan=self.kind == "number"))
        ours, theirs = (self.values[slice(*self.spans_R2[row])] for row in (a, b))
        return bool(self.labelled_R[a] == self.labelled_R[b]) and np.array_equal(ours, theirs)

    def of_records(self, row_N: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return values (read-only) and spans of the records with these rows; -1 means a record without a label."""
        if self.kind == "multilabel":
            return self.values, self.spans_R2[row_N]
        values = self.values[row_N]
        values[row_N < 0] = np.nan if self.kind == "number" else -1
        values.flags.writeable = False
        return values, self.spans_R2


def _columns(table: Table | None, columns: Sequence[str]) -> Sequence[str]:
    """Return the columns of the table, or the keys of the headers, that hold the labels."""
    if table is None:
        columns = [key.upper() for key in columns] or ["TARGET"]
    elif not columns:
        target = table.only_column(_TARGETS, NAME_LABEL)
        if target is None:
            raise InputError(f"{table.path}: has no column 'target' or 'label'; {listed(table.columns)}; {NAME_LABEL}")
        columns = [target]
    else:
        for name in columns:
            table.column(name, NAME_LABEL)
    if len(set(columns)) < len(columns):
        raise UsageError(f"columns has a name twice: {', '.join(map(shown, columns))}; leave one of them out")
    return columns


def _number_rows(columns: Sequence[str], values_RT: npt.NDArray[np.float32]) -> _Rows:
    """Make the labels of R rows from their numbers; a row with at least one number has a label."""
    labelled_R = np.asarray(np.isfinite(values_RT).any(axis=1))
    return _Rows("number", tuple(columns), values_RT, np.zeros((0, 2), dtype=np.int64), labelled_R)


def _rows(
    kind: Kind,
    columns: Sequence[str],
    texts: Iterable[Sequence[str]],
    count: int,
    where: Callable[[int], str],
    edits: Edits,
) -> _Rows:
    """Make the labels of `count` rows from texts: numbers, one column of class names, or several columns of 0 and 1."""
    if kind == "number":
        return _number_rows(columns, _numbers(texts, count, columns, where))
    if len(columns) > 1:
        values, spans_R2, labelled_R = _flags(texts, count, columns, where)
        return _Rows(kind, tuple(columns), values, spans_R2, labelled_R)
    names, values, spans_R2 = _classes((text for (text,) in texts), count, kind, where, edits)
    labelled_R = spans_R2[:, 0] < spans_R2[:, 1]
    if kind == "class":
        one_R = np.full(count, -1, dtype=np.int64)  # the one class of each row, -1 where it has none
        one_R[labelled_R] = values
        values, spans_R2 = one_R, spans_R2[:0]
    return _Rows(kind, names, values, spans_R2, labelled_R)


def _header_texts(store: TokenStore, fasta: Path, keys: Sequence[str], edits: Edits) -> Iterator[tuple[str, ...]]:
    """Yield the values of the keys in the header of each record, '' where the key is missing."""
    for n in range(len(store)):
        found = attributes(store.description(n), keys, str(fasta), edits)
        yield tuple(found.get(key, "") for key in keys)


def _numbers(
    texts: Iterable[Sequence[str]], count: int, keys: Sequence[str], where: Callable[[int], str]
) -> npt.NDArray[np.float32]:
    """Convert the texts of N headers to numbers, float32 [N, T]."""
    values_NT = np.full((count, len(keys)), np.nan, dtype=np.float32)
    for n, cells in enumerate(texts):
        for t, text in enumerate(cells):
            values_NT[n, t] = number(text, lambda n=n, t=t: f"{where(n)}: {keys[t]}")  # type: ignore[misc]
    return values_NT


def _table_numbers(table: Table, columns: Sequence[str]) -> npt.NDArray[np.float32]:
    """Read columns of a table as numbers, float32 [R, T]."""
    values_RT = np.stack([table.numbers(column) for column in columns], axis=1)
    large = np.argwhere(np.abs(values_RT) > FLOAT32_MAX)
    if len(large):
        row, t = map(int, large[0])
        cell = table.columns[columns[t]][row]
        raise InputError(f"{table.where(row)}: column {shown(columns[t])} has {shown(cell)}, too large for float32")
    return values_RT.astype(np.float32)


def _flags(
    texts: Iterable[Sequence[str]], count: int, columns: Sequence[str], where: Callable[[int], str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Convert columns of 0 and 1 to the classes of all R rows one after another, int64, the span of each row, int64 [R,
    2], and whether each row has a label, bool [R].
    """
    codes, ends_R = array("q"), np.zeros(count + 1, dtype=np.int64)
    labelled_R = np.zeros(count, dtype=np.bool_)
    for row, cells in enumerate(texts):
        if any(cells):
            labelled_R[row] = True
            for c, text in enumerate(cells):
                truth = TRUTH.get(text.lower())
                if truth is None:
                    raise InputError(
                        f"{where(row)}: {shown(columns[c])} is {shown(text)}; write 0 or 1, or leave all columns of "
                        "the protein empty"
                    )
                if truth:
                    codes.append(c)
        ends_R[row + 1] = len(codes)
    return np.array(codes, dtype=np.int64), np.stack([ends_R[:-1], ends_R[1:]], axis=1), labelled_R


def _classes(
    texts: Iterable[str],
    count: int,
    kind: Kind,
    where: Callable[[int], str],
    edits: Edits,
) -> tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the sorted names of the classes, the classes of all R rows one after another, int64, and the span of each
    row, int64 [R, 2].
    """
    number_of: dict[str, int] = {}
    codes, ends_R = array("q"), np.zeros(count + 1, dtype=np.int64)
    for row, text in enumerate(texts):
        start = len(codes)
        for piece in text.split(";") if kind == "multilabel" else [text]:
            name = piece.strip()
            if not name:
                continue
            if name.lower() in MISSING:
                raise InputError(
                    f"{where(row)}: {shown(name)} may be a class or say that there is none; leave the cell empty, "
                    "or write the class in another way"
                )
            code = number_of.setdefault(name, len(number_of))
            if kind == "multilabel" and code in codes[start:]:
                edits.add("a class that was named twice was taken once", name)
            else:
                codes.append(code)
        if kind == "multilabel":
            codes[start:] = array("q", sorted(codes[start:]))
        ends_R[row + 1] = len(codes)
    names = tuple(sorted(number_of))
    place = {name: k for k, name in enumerate(names)}
    values = np.array([place[name] for name in number_of], dtype=np.int64)[np.array(codes, dtype=np.int64)]
    return names, values, np.stack([ends_R[:-1], ends_R[1:]], axis=1)
