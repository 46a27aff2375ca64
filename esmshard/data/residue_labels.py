"""Labels of residues: a class letter or a number for each, from FASTA headers, FLIP's label files, or a table.

| where | labels | mask |
|---|---|---|
| headers of the FASTA file | `TARGET=DVCD`, `TARGET=0.5;0.3;nan;0.1` | `MASK=1101` |
| a label file: FASTA with labels for sequences | `DVCD` | `MASK=1101` in its headers, or a mask file |
| a table | a column of such texts | a mask file |

A mask file is a FASTA file with `1101` for sequences.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from esmshard.data.headers import FLOAT32_MAX, attributes, number
from esmshard.data.label_fasta import read_label_fasta
from esmshard.data.labels import Policy, Records, Surplus
from esmshard.data.pairing import Tally, only_column, rows_of_records, settle
from esmshard.data.symbols import Edits
from esmshard.data.tables import Table, listed, shown
from esmshard.errors import InputError, UsageError

Kind = Literal["class", "number"]
_PLAIN_NUMBERS = re.compile(r"[0-9eE+.;-]+")
_ONE = ord("1")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ResidueLabels:
    """One label a residue, cropped with the sequence."""

    per_residue: ClassVar[bool] = True

    kind: Kind
    names: str
    """Of `class`: the letters of the C classes; a class is its place here."""
    values: npt.NDArray[Any]
    """Of all residues end to end, in the order of the store: class: int8, -1 where undefined; number: float32, NaN."""
    offsets: npt.NDArray[np.int64]
    """Record n has values[offsets[n] : offsets[n + 1]], int64 [N + 1]."""
    labelled_N: npt.NDArray[np.bool_]
    """Whether record n has labels: false only where `missing="drop"` left it out."""
    notices: list[str]
    """What was changed or left out, one sentence each."""

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """`target` of record n: int8 [L], or float32 [L]. Read-only."""
        if not self.labelled_N[n]:
            raise KeyError(f"record {n} has no label")
        return {"target": self.values[self.offsets[n] : self.offsets[n + 1]]}


class _Given(NamedTuple):
    """The labels of one record, as text."""

    n: int | None
    id: str
    text: str
    mask: str | None
    where: str
    line: int


def residue_labels(
    store: Records,
    fasta: Path,
    kind: Kind,
    source: Table | Path | None = None,
    *,
    mask: Path | None = None,
    column: str | None = None,
    id_column: str | None = None,
    classes: str = "",
    missing: Policy = "error",
    surplus: Surplus = "error",
) -> ResidueLabels:
    """Labels of all residues of N proteins.

    Args:
        store: the proteins.
        fasta: their file.
        kind: `class`: a letter for each residue; `number`: numbers divided by semicolons, `nan` where there is none.
        source: a table, or the path of a label file; None for the headers of the FASTA file.
        mask: FASTA file of 0 and 1; a residue under a 0 is undefined.
        column: of the table, or key of the headers; without it `TARGET`, or the one column called `target` or `label`.
        id_column: of the table; see `rows_of_records`.
        classes: all letters, in the order of their numbers; without them those that occur, sorted. Give the training
            split's `names` here for the other splits.
        missing: what happens to proteins without labels.
        surplus: what happens to labels without a protein.

    Raises:
        InputError: naming record or line of labels that do not fit their protein or cannot be read, or the counts of
            those without a partner.
        UsageError: the arguments do not fit each other.
    """
    edits, extra = Edits(), Tally()
    if kind == "number" and classes:
        raise UsageError("numbers have no classes; leave classes out, or ask for kind class")
    if not (classes.isascii() and classes.isprintable()):
        raise UsageError(f"classes has {shown(classes)}; each letter of it is a class, in ASCII")
    if len(set(classes)) < len(classes):
        raise UsageError(f"classes has a letter twice: {classes}; leave one of them out")
    if isinstance(source, Path) and column is not None:
        raise UsageError("a label file has no columns; leave column out")
    lengths_N = store.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)])
    labelled_N, masked_N = (np.zeros(len(store), dtype=np.bool_) for _ in range(2))
    line_N = np.zeros(len(store), dtype=np.int64)  # for messages; 0 in headers
    counted = np.ones(offsets[-1], dtype=np.bool_)
    # Letters are kept as bytes until all are there, with 0 for none; then one look-up turns them into classes.
    values: npt.NDArray[Any] = np.zeros(offsets[-1], dtype=np.uint8)
    if kind == "number":
        values = np.full(offsets[-1], np.nan, dtype=np.float32)

    if isinstance(source, Table):
        given = _of_rows(store, fasta, source, column, id_column, missing, surplus, edits)
    elif source is None:
        given = _of_headers(store, fasta, (column or "TARGET").upper(), edits)
    else:
        given = _of_label_file(store, source, edits)
    for n, record_id, text, own_mask, where, line in given:
        if n is None:
            extra.add(record_id)
            if surplus != "ignore":
                edits.add("labels of no record were passed over", record_id)
            continue
        if own_mask is not None and mask is not None:
            raise InputError(f"{where} has MASK=, but masks come from {mask}; leave one of them out")
        labels_L = _letters(text, where) if kind == "class" else _numbers(text, where)
        if len(labels_L) != lengths_N[n]:
            raise _other_length(where, "labels", len(labels_L), lengths_N[n], fasta)
        mask_L = _mask(own_mask, where, len(labels_L), fasta) if own_mask else np.ones(len(labels_L), dtype=np.bool_)
        part = slice(offsets[n], offsets[n + 1])
        if labelled_N[n]:
            same = np.array_equal(values[part], labels_L, equal_nan=kind == "number")
            if not (same and np.array_equal(counted[part], mask_L)):
                raise InputError(f"{where} has other labels than in line {line_N[n]}; leave one of them out")
            edits.add("a record that came twice with the same labels was read once", record_id)
        values[part], counted[part] = labels_L, mask_L
        labelled_N[n], masked_N[n], line_N[n] = True, own_mask is not None, line
    if not isinstance(source, Table):
        lacks = f"labels in {source}" if source else f"{(column or 'TARGET').upper()}="
        settle(store, fasta, labelled_N, lacks, extra, source or fasta, missing=missing, surplus=surplus, edits=edits)
    if mask is not None:
        _read_masks(store, fasta, mask, counted, offsets, labelled_N, surplus, edits)
    elif masked_N.any():
        for k in np.flatnonzero(labelled_N & ~masked_N):
            edits.add("no MASK=, so that all residues count,", store.id(int(k)))

    names = ""
    if kind == "class":
        values[~counted] = 0
        path = fasta if source is None else source.path if isinstance(source, Table) else source
        names, values = _classes(store, values, offsets, line_N, classes, path)
    else:
        values[~counted] = np.nan
    defined = values >= 0 if kind == "class" else np.isfinite(values)
    if not defined.any():
        raise InputError(f"{fasta}: no residue of any record has a label; look at labels and masks")
    for k in np.flatnonzero(labelled_N & (np.add.reduceat(defined, offsets[:-1], dtype=np.int64) == 0)):
        edits.add("no residue has a label", store.id(int(k)))
    values.flags.writeable = False
    return ResidueLabels(kind, names, values, offsets, labelled_N, edits.notices())


def _of_headers(store: Records, fasta: Path, key: str, edits: Edits) -> Iterator[_Given]:
    for n in range(len(store)):
        found = attributes(store.description(n), (key, "MASK"), str(fasta), edits)
        if key in found:
            record_id = store.id(n)
            yield _Given(n, record_id, found[key], found.get("MASK"), f"{fasta}: record {shown(record_id)}", 0)


def _of_label_file(store: Records, path: Path, edits: Edits) -> Iterator[_Given]:
    for record in read_label_fasta(path):
        found = attributes(record.header, ("MASK",), f"{path}:{record.line}", edits)
        where = f"{path}:{record.line}: record {shown(record.id)}"
        yield _Given(store.find(record.id), record.id, record.text, found.get("MASK"), where, record.line)


def _of_rows(
    store: Records,
    fasta: Path,
    table: Table,
    column: str | None,
    id_column: str | None,
    missing: Policy,
    surplus: Surplus,
    edits: Edits,
) -> Iterator[_Given]:
    column = column or only_column(table, ("target", "targets", "label", "labels"), "column")
    if column is None:
        raise InputError(f"{table.path}: has no column 'target' or 'label'; {listed(table.columns)}")
    cells = table.column(column)
    row_N = rows_of_records(
        table,
        store,
        fasta,
        id_column=id_column,
        same=lambda a, b: cells[a] == cells[b],
        labelled_R=np.array([bool(cell) for cell in cells]),
        missing=missing,
        surplus=surplus,
        edits=edits,
    )
    for n, row in enumerate(row_N.tolist()):
        if row >= 0:
            record_id = store.id(n)
            where = f"{table.where(row)}: record {shown(record_id)}"
            yield _Given(n, record_id, cells[row], None, where, table.lines[row])


def _letters(text: str, where: str) -> npt.NDArray[np.uint8]:
    """ASCII codes, uint8 [L]."""
    if not (text.isascii() and text.isprintable()) or " " in text:
        at = next(k for k, c in enumerate(text) if not (c.isascii() and c.isprintable()) or c == " ")
        raise InputError(
            f"{where} has {shown(text[at])} at position {at + 1}, which is no label; classes are ASCII letters, digits "
            "and signs"
        )
    return np.frombuffer(text.encode("ascii"), dtype=np.uint8)


def _numbers(text: str, where: str) -> npt.NDArray[np.float32]:
    """float32 [L], NaN where a label says so."""
    pieces = text.split(";")
    if _PLAIN_NUMBERS.fullmatch(text):
        try:
            values_L = np.array(list(map(float, pieces)))
        except ValueError:
            pass  # named below, piece by piece
        else:
            if (np.abs(values_L) <= FLOAT32_MAX).all():
                return values_L.astype(np.float32)
    values = []
    for k, piece in enumerate(pieces, 1):
        if not piece.strip():
            raise InputError(f"{where} has nothing as value {k}; write nan for a residue without a value")
        values.append(number(piece.strip(), lambda k=k: f"{where}: value {k}"))  # type: ignore[misc]
    return np.array(values, dtype=np.float32)


def _mask(text: str, where: str, length: int, fasta: Path) -> npt.NDArray[np.bool_]:
    """Which residues count, bool [L]."""
    if len(text) != length:
        raise _other_length(where, "a mask", len(text), length, fasta)
    wrong = text.strip("01")
    if wrong:
        raise InputError(
            f"{where} has {shown(wrong[0])} at position {text.index(wrong[0]) + 1} of its mask; write 0 or 1"
        )
    mask_L: npt.NDArray[np.bool_] = np.frombuffer(text.encode("ascii"), dtype=np.uint8) == _ONE
    return mask_L


def _other_length(where: str, what: str, got: int, length: int, fasta: Path) -> InputError:
    return InputError(
        f"{where} has {what} for {got} residues, but {length} residues in {fasta}; give one for each residue of the "
        "full sequence"
    )


def _read_masks(
    store: Records,
    fasta: Path,
    path: Path,
    counted: npt.NDArray[np.bool_],
    offsets: npt.NDArray[np.int64],
    labelled_N: npt.NDArray[np.bool_],
    surplus: Surplus,
    edits: Edits,
) -> None:
    """Write the masks of a file into `counted`. Every record with labels needs one."""
    line_N = np.zeros(len(store), dtype=np.int64)
    extra = Tally()
    for record in read_label_fasta(path):
        where, n = f"{path}:{record.line}: record {shown(record.id)}", store.find(record.id)
        if n is None:
            extra.add(record.id)
            if surplus != "ignore":
                edits.add("a mask of no record was passed over", record.id)
            continue
        part = slice(offsets[n], offsets[n + 1])
        mask_L = _mask(record.text, where, int(offsets[n + 1] - offsets[n]), fasta)
        if line_N[n] and not np.array_equal(counted[part], mask_L):
            raise InputError(f"{where} has another mask than in line {line_N[n]}; leave one of them out")
        counted[part], line_N[n] = mask_L, record.line
    bare = Tally()
    for k in np.flatnonzero(labelled_N & (line_N == 0)):
        bare.add(store.id(int(k)))
    if bare.count:
        raise InputError(f"{path}: has no mask for {bare.count:,} of the records with labels {bare}; give each one")
    if extra.count and surplus == "error":
        raise InputError(
            f"{path}: {extra.count:,} of the masks have no record in {fasta} {extra}; mend the ids, or say "
            "surplus=drop to pass over such masks"
        )


def _classes(
    store: Records,
    codes: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    line_N: npt.NDArray[np.int64],
    given: str,
    path: Path,
) -> tuple[str, npt.NDArray[np.int8]]:
    """Letters of the classes, and the class of each residue, int8, -1 where undefined."""
    found = np.zeros(256, dtype=np.bool_)
    for start in range(0, len(codes), _CHUNK):
        found[codes[start : start + _CHUNK]] = True
    letters = [chr(code) for code in np.flatnonzero(found[1:]) + 1]
    names = given or "".join(letters)
    unknown = [letter for letter in letters if letter not in names]
    if unknown:
        at = int(np.argmax(codes == ord(unknown[0])))
        n = int(np.searchsorted(offsets, at, side="right")) - 1
        where = f"{path}:{line_N[n]}" if line_N[n] else str(path)
        raise InputError(
            f"{where}: record {shown(store.id(n))} has the class {shown(unknown[0])} at position {at - offsets[n] + 1}"
            f", which is none of {names}; mend the label, or name it in task.classes"
        )
    class_of = np.full(256, -1, dtype=np.int8)
    for place, letter in enumerate(names):
        class_of[ord(letter)] = place
    return names, class_of[codes]
