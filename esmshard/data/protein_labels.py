"""Labels of whole proteins: numbers, one class, or several classes, from FASTA headers or from a table."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.headers import FLOAT32_MAX, TRUTH, attributes, number
from esmshard.data.labels import Policy, Records, Surplus
from esmshard.data.pairing import Tally, only_column, rows_of_records, settle
from esmshard.data.symbols import Edits
from esmshard.data.tables import MISSING, Table, listed, shown
from esmshard.errors import InputError, UsageError

Kind = Literal["number", "class", "multilabel"]
_TARGETS = ("target", "targets", "label", "labels", "dms_score")


@dataclass(frozen=True)
class ProteinLabels:
    """One array a protein, which a crop of its sequence leaves as it is."""

    per_residue: ClassVar[bool] = False

    kind: Kind
    names: tuple[str, ...]
    """Of the T targets of `number`, else of the C classes: a class is its place here."""
    values: npt.NDArray[Any]
    """number: float32 [N, T], NaN where missing; class: int64 [N], -1 where missing; multilabel: int64, the classes of
    all proteins end to end."""
    spans_N2: npt.NDArray[np.int64]
    """Of `multilabel`: the classes of record n are values[spans_N2[n, 0] : spans_N2[n, 1]]. Else empty."""
    labelled_N: npt.NDArray[np.bool_]
    """Whether record n has a label: false only where `missing="drop"` left it out."""
    notices: list[str]
    """What was changed or left out, one sentence each."""

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """`target` of record n: float32 [T], int64 [], or float32 [C] of 0 and 1, as `kind` says."""
        if not self.labelled_N[n]:
            raise KeyError(f"record {n} has no label")
        if self.kind != "multilabel":
            return {"target": self.values[n, ...]}
        target_C = np.zeros(len(self.names), dtype=np.float32)
        start, stop = self.spans_N2[n]
        target_C[self.values[start:stop]] = 1
        return {"target": target_C}


def protein_labels(
    store: Records,
    fasta: Path,
    kind: Kind,
    table: Table | None = None,
    *,
    columns: Sequence[str] = (),
    id_column: str | None = None,
    classes: Sequence[str] = (),
    missing: Policy = "error",
    surplus: Surplus = "error",
) -> ProteinLabels:
    """Labels of N proteins.

    Args:
        store: the proteins.
        fasta: their file; its headers hold the labels (`TARGET=0.1`) where there is no table.
        kind: `number`: one or several columns of numbers; `class`: one column of names; `multilabel`: one column of
            names divided by semicolons, or several columns of 0 and 1.
        table: R rows with the labels.
        columns: of the table, or keys of the headers; without them `TARGET`, or the one column that is called `target`,
            `label` or the like.
        id_column: of the table; see `rows_of_records`.
        classes: all names, in the order of their numbers; without them those that occur, sorted. Give the training
            split's `names` here for the other splits.
        missing: what happens to proteins without a label.
        surplus: what happens to rows without a protein.

    Raises:
        InputError: naming line or record of a label that cannot be used, or the counts of those without a partner.
        UsageError: the arguments do not fit each other.
    """
    edits = Edits()
    if kind == "number" and classes:
        raise UsageError("numbers have no classes; leave classes out, or ask for kind class")
    if len(set(classes)) < len(classes):
        raise UsageError(f"classes has a name twice: {', '.join(map(shown, classes))}; leave one of them out")
    if table is None:
        columns = [key.upper() for key in columns] or ["TARGET"]
        count, where = len(store), _where_in(store, fasta)
    else:
        target = None if columns else only_column(table, _TARGETS, "columns")
        if not columns and target is None:
            raise InputError(f"{table.path}: has no column 'target' or 'label'; {listed(table.columns)}")
        columns = columns or [str(target)]
        count, where = len(table), table.where
    if len(set(columns)) < len(columns):
        raise UsageError(f"columns has a name twice: {', '.join(map(shown, columns))}; leave one of them out")
    if kind == "class" and len(columns) > 1:
        raise UsageError(f"a class comes from one column, not from {len(columns)}; name one, or ask for multilabel")
    flags = kind == "multilabel" and len(columns) > 1
    if flags and classes:
        raise UsageError("several columns of 0 and 1 are the classes themselves; leave classes out")

    texts: Iterable[Sequence[str]]
    if table is None:
        texts = _header_texts(store, fasta, columns, edits)
    else:
        texts = zip(*map(table.column, columns), strict=True)
    values: npt.NDArray[Any]
    labelled_R: npt.NDArray[np.bool_]
    spans_R2 = np.zeros((0, 2), dtype=np.int64)
    names: tuple[str, ...] = tuple(columns)
    if kind == "number":
        values = _numbers(texts, count, columns, where) if table is None else _table_numbers(table, columns)
        labelled_R = np.asarray(np.isfinite(values).any(axis=1))
    elif flags:
        values, spans_R2, labelled_R = _flags(texts, count, columns, where)
    else:
        names, values, spans_R2 = _classes((text for (text,) in texts), count, kind, classes, where, edits)
        labelled_R = spans_R2[:, 0] < spans_R2[:, 1]
        if kind == "class":
            values, spans_R2 = _one_each(values, labelled_R), spans_R2[:0]
    values.flags.writeable = False
    if table is None:
        lacks = " or ".join(f"{key}=" for key in columns[:3])
        settle(store, fasta, labelled_R, lacks, Tally(), fasta, missing=missing, surplus=surplus, edits=edits)
        return ProteinLabels(kind, names, values, spans_R2, labelled_R, edits.notices())

    def same(a: int, b: int) -> bool:
        if kind != "multilabel":
            return bool(np.array_equal(values[a], values[b], equal_nan=kind == "number"))
        ours, theirs = (values[slice(*spans_R2[row])] for row in (a, b))
        return bool(labelled_R[a] == labelled_R[b]) and np.array_equal(ours, theirs)

    row_N = rows_of_records(
        table,
        store,
        fasta,
        id_column=id_column,
        same=same,
        labelled_R=labelled_R,
        missing=missing,
        surplus=surplus,
        edits=edits,
    )
    labelled_N = row_N >= 0
    if kind == "multilabel":
        return ProteinLabels(kind, names, values, spans_R2[row_N], labelled_N, edits.notices())
    values = values[row_N]
    values[~labelled_N] = np.nan if kind == "number" else -1
    values.flags.writeable = False
    return ProteinLabels(kind, names, values, spans_R2, labelled_N, edits.notices())


def _where_in(store: Records, fasta: Path) -> Callable[[int], str]:
    return lambda n: f"{fasta}: record {shown(store.id(n))}"


def _header_texts(store: Records, fasta: Path, keys: Sequence[str], edits: Edits) -> Iterator[tuple[str, ...]]:
    """Values of the keys of each record, '' where it has none."""
    for n in range(len(store)):
        found = attributes(store.description(n), keys, str(fasta), edits)
        yield tuple(found.get(key, "") for key in keys)


def _numbers(
    texts: Iterable[Sequence[str]], count: int, keys: Sequence[str], where: Callable[[int], str]
) -> npt.NDArray[np.float32]:
    """float32 [N, T]."""
    values_NT = np.full((count, len(keys)), np.nan, dtype=np.float32)
    for n, cells in enumerate(texts):
        for t, text in enumerate(cells):
            values_NT[n, t] = number(text, lambda n=n, t=t: f"{where(n)}: {keys[t]}")  # type: ignore[misc]
    return values_NT


def _table_numbers(table: Table, columns: Sequence[str]) -> npt.NDArray[np.float32]:
    """float32 [R, T]."""
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
    """Columns of 0 and 1 as classes end to end, the span of each row, and whether it has a label at all."""
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
    given: Sequence[str],
    where: Callable[[int], str],
    edits: Edits,
) -> tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Names, the classes of all rows end to end, and the span of each row."""
    number_of = {name: k for k, name in enumerate(given)}
    codes, ends_R = array("q"), np.zeros(count + 1, dtype=np.int64)
    for row, text in enumerate(texts):
        start = len(codes)
        for piece in text.split(";") if kind == "multilabel" else [text]:
            name = piece.strip()
            if not name:
                continue
            if name not in number_of:
                if given:
                    raise InputError(
                        f"{where(row)}: class {shown(name)} is none of the {len(given)} that are known "
                        f"({', '.join(map(shown, given[:5]))}{', ...' if len(given) > 5 else ''}); mend the label"
                    )
                if name.lower() in MISSING:
                    raise InputError(
                        f"{where(row)}: {shown(name)} may be a class or say that there is none; leave the cell empty, "
                        "or write the class in another way"
                    )
                number_of[name] = len(number_of)
            if kind == "multilabel" and number_of[name] in codes[start:]:
                edits.add("a class that was named twice was taken once", name)
            else:
                codes.append(number_of[name])
        if kind == "multilabel":
            codes[start:] = array("q", sorted(codes[start:]))
        ends_R[row + 1] = len(codes)
    values, names = np.array(codes, dtype=np.int64), tuple(number_of)
    if not given:
        names = tuple(sorted(number_of))
        place = {name: k for k, name in enumerate(names)}
        values = np.array([place[name] for name in number_of], dtype=np.int64)[values]
    return names, values, np.stack([ends_R[:-1], ends_R[1:]], axis=1)


def _one_each(values: npt.NDArray[np.int64], labelled_R: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """One class of each row, -1 where it has none."""
    one_R = np.full(len(labelled_R), -1, dtype=np.int64)
    one_R[labelled_R] = values
    return one_R
