"""Labels of residues: a class letter or a number for each, from FASTA headers, FLIP's label files, or a table.

| source | labels | mask |
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

from esmshard.data.labels.label_sources import read_label_fasta
from esmshard.data.labels.pairing import NAME_LABEL, check_labelled, rows_of_records
from esmshard.errors import InputError
from esmshard.io.headers import FLOAT32_MAX, attributes, number
from esmshard.io.store import TokenStore
from esmshard.io.symbols import Edits
from esmshard.io.tables import Table, first_three, listed, shown
from esmshard.vocab import BETWEEN, is_residue

Kind = Literal["class", "number"]
_PLAIN_NUMBERS = re.compile(r"[0-9eE+.;-]+")
_ONE = ord("1")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ResidueLabels:
    """One label for each residue, cropped with the sequence."""

    per_residue: ClassVar[bool] = True
    labelled_N: ClassVar[None] = None

    kind: Kind
    names: str
    """The letters of the C classes if `kind` is `class`; the number of a class is its place here."""
    values: npt.NDArray[Any]
    """Labels of all residues in the order of the store. `class`: int8, -1 where undefined; `number`: float32, NaN where
    undefined.
    """
    offsets: npt.NDArray[np.int64]
    """Record n has values[offsets[n] : offsets[n + 1]], int64 [N + 1]."""
    notices: list[str]
    """Sentences about labels that were changed or left out."""

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """Return `target` of record n: int8 [L], or float32 [L]. Read-only."""
        return {"target": self.values[self.offsets[n] : self.offsets[n + 1]]}


class _RecordLabels(NamedTuple):
    """The labels of one record, as text. `n` is None if the store has no such record."""

    n: int | None
    id: str
    text: str
    mask: str | None
    where: str
    line: int


def residue_labels(
    store: TokenStore,
    fasta: Path,
    kind: Kind,
    source: Table | Path | None = None,
    *,
    mask: Path | None = None,
    column: str | None = None,
    id_column: str | None = None,
    classes: str = "",
) -> ResidueLabels:
    """Read the labels of all residues of N proteins. Labels of other proteins are passed over.

    Args:
        store: the proteins.
        fasta: the file of the proteins.
        kind: `class`: a letter for each residue; `number`: numbers separated by semicolons, `nan` where there is none.
        source: a table, or the path of a label file; None for the headers of the FASTA file.
        mask: FASTA file of 0 and 1; a residue under a 0 is undefined.
        column: column of the table, or key of the headers; without it `TARGET`, or the one column called `target` or
            `label`.
        id_column: column of the ids; see `rows_of_records`.
        classes: all letters, in the order of their numbers; without them, the letters that occur, sorted. For other
            splits, pass the `names` of the training split.

    Raises:
        InputError: labels cannot be read, do not fit their protein, or have no match; the message names record, line or
            counts.
    """
    builder, extra = _LabelBuilder(store, fasta, kind, mask), list[str]()
    if isinstance(source, Table):
        records = _of_rows(store, fasta, source, column, id_column, builder.edits)
    elif source is None:
        records = _of_headers(store, fasta, (column or "TARGET").upper(), builder.edits)
    else:
        records = _of_label_file(store, source, builder.edits)
    for record in records:
        if record.n is not None:
            builder.add(record.n, record)
        else:
            extra.append(record.id)
    if not isinstance(source, Table):
        lacks = f"label in {source}" if source else f"{(column or 'TARGET').upper()}="
        check_labelled(store, fasta, builder.labelled_N, lacks, extra, builder.edits, required=True)
    builder.hide_masked()
    path = fasta if source is None else source.path if isinstance(source, Table) else source
    return builder.labels(classes, path)


class _LabelBuilder:
    """A builder of `ResidueLabels` for N records: call `add` for each record, then `hide_masked`, then `labels`.

    Args:
        store: the N records.
        fasta: the file of the records.
        kind: kind of the labels.
        mask: the file of masks, if there is one.
    """

    def __init__(self, store: TokenStore, fasta: Path, kind: Kind, mask: Path | None) -> None:
        self._store, self._fasta, self._kind, self._mask = store, fasta, kind, mask
        self.edits = Edits()
        self.offsets = np.concatenate([[0], np.cumsum(store.lengths, dtype=np.int64)])
        self.labelled_N, self._masked_N = (np.zeros(len(store), dtype=np.bool_) for _ in range(2))
        self._line_N = np.zeros(len(store), dtype=np.int64)  # for messages; 0 for labels from headers
        self._counted = np.ones(self.offsets[-1], dtype=np.bool_)
        # Letters are collected as bytes, with 0 for no label; then one look-up turns them into classes.
        self._values: npt.NDArray[Any] = np.zeros(self.offsets[-1], dtype=np.uint8)
        if kind == "number":
            self._values = np.full(self.offsets[-1], np.nan, dtype=np.float32)

    def add(self, n: int, record: _RecordLabels) -> None:
        """Add the labels of record n, and its mask if there is one with the labels.

        Raises:
            InputError: the labels cannot be read, do not fit the record, or differ from labels that the record has
                already.
        """
        where = record.where
        if record.mask is not None and self._mask is not None:
            raise InputError(f"{where} has MASK=, but masks come from {self._mask}; leave one of them out")
        own_L = self._own(n)
        length = int(own_L.sum())
        classes = self._kind == "class"
        text = self._joined(record.text, own_L, "" if classes else ";")
        labels = _letters(text, where) if classes else _numbers(text, where)
        if len(labels) != length:
            raise _other_length(where, "labels", len(labels), length, self._fasta)
        labels_L = np.full(len(own_L), 0 if classes else np.nan, self._values.dtype)
        labels_L[own_L] = labels
        mask_L = own_L
        if record.mask:
            mask_L = own_L.copy()
            mask_L[own_L] = _mask(self._joined(record.mask, own_L), where, length, self._fasta)
        part = slice(self.offsets[n], self.offsets[n + 1])
        if self.labelled_N[n]:
            same = np.array_equal(self._values[part], labels_L, equal_nan=self._kind == "number")
            if not (same and np.array_equal(self._counted[part], mask_L)):
                raise InputError(f"{where} has other labels than in line {self._line_N[n]}; leave one of them out")
            self.edits.add("a record that came twice with the same labels was read once", record.id)
        self._values[part], self._counted[part] = labels_L, mask_L
        self.labelled_N[n], self._masked_N[n], self._line_N[n] = True, record.mask is not None, record.line

    def _own(self, n: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of record n are residues, bool [L]; the others are between its chains."""
        if self._store.linker is None:
            return np.ones(self._store.lengths[n], dtype=np.bool_)
        return is_residue(self._store.residues(n))

    def _joined(self, text: str, own_L: npt.NDArray[np.bool_], between: str = "") -> str:
        """Return the labels of all chains of a record without the `:` between chains, if it has several."""
        return text if own_L.all() else text.replace(BETWEEN, between)

    def hide_masked(self) -> None:
        """Make residues under a mask undefined. The file of masks, if there is one, is read here."""
        if self._mask is not None:
            self._read_masks(self._mask)
        elif self._masked_N.any():
            for k in np.flatnonzero(~self._masked_N):
                self.edits.add("record(s) without MASK=, of which all residues count", self._store.id(int(k)))
        self._values[~self._counted] = 0 if self._kind == "class" else np.nan

    def _read_masks(self, path: Path) -> None:
        """Read the masks of a file. Every record needs a mask."""
        line_N = np.zeros(len(self._store), dtype=np.int64)
        for record in read_label_fasta(path):
            where, n = f"{path}:{record.line}: record {shown(record.id)}", self._store.find(record.id)
            if n is None:
                continue
            part = slice(self.offsets[n], self.offsets[n + 1])
            own_L = self._own(n)
            mask_L = own_L.copy()
            mask_L[own_L] = _mask(self._joined(record.text, own_L), where, int(own_L.sum()), self._fasta)
            if line_N[n] and not np.array_equal(self._counted[part], mask_L):
                raise InputError(f"{where} has another mask than in line {line_N[n]}; leave one of them out")
            self._counted[part], line_N[n] = mask_L, record.line
        if bare := np.flatnonzero(line_N == 0).tolist():
            raise InputError(
                f"{path}: has no mask for {len(bare):,} of the records ({first_three(bare, self._store.id)}); give "
                "each one"
            )

    def labels(self, classes: str, path: Path) -> ResidueLabels:
        """Return all labels. `classes` is as in `residue_labels`; `path` is named in messages.

        Raises:
            InputError: a residue has a class that is not in `classes`, or no residue has a label.
        """
        names, values = "", self._values
        if self._kind == "class":
            names, values = _classes(self._store, self._values, self.offsets, self._line_N, classes, path)
        defined = values >= 0 if self._kind == "class" else np.isfinite(values)
        if not defined.any():
            raise InputError(f"{self._fasta}: no residue of any record has a label; look at labels and masks")
        bare_N = np.add.reduceat(defined, self.offsets[:-1], dtype=np.int64) == 0
        for k in np.flatnonzero(bare_N):
            self.edits.add("no residue has a label", self._store.id(int(k)))
        values.flags.writeable = False
        return ResidueLabels(self._kind, names, values, self.offsets, self.edits.notices())


def _of_headers(store: TokenStore, fasta: Path, key: str, edits: Edits) -> Iterator[_RecordLabels]:
    for n in range(len(store)):
        found = attributes(store.description(n), (key, "MASK"), str(fasta), edits)
        if key in found:
            record_id = store.id(n)
            yield _RecordLabels(n, record_id, found[key], found.get("MASK"), f"{fasta}: record {shown(record_id)}", 0)


def _of_label_file(store: TokenStore, path: Path, edits: Edits) -> Iterator[_RecordLabels]:
    for record in read_label_fasta(path):
        found = attributes(record.header, ("MASK",), f"{path}:{record.line}", edits)
        where = f"{path}:{record.line}: record {shown(record.id)}"
        yield _RecordLabels(store.find(record.id), record.id, record.text, found.get("MASK"), where, record.line)


def _of_rows(
    store: TokenStore,
    fasta: Path,
    table: Table,
    column: str | None,
    id_column: str | None,
    edits: Edits,
) -> Iterator[_RecordLabels]:
    column = column or table.only_column(("target", "targets", "label", "labels"), NAME_LABEL)
    if column is None:
        raise InputError(f"{table.path}: has no column 'target' or 'label'; {listed(table.columns)}; {NAME_LABEL}")
    cells = table.column(column, NAME_LABEL)
    row_N = rows_of_records(
        table,
        store,
        fasta,
        id_column=id_column,
        same=lambda a, b: cells[a] == cells[b],
        labelled_R=np.array([bool(cell) for cell in cells]),
        required=True,
        edits=edits,
    )
    for n, row in enumerate(row_N.tolist()):
        if row >= 0:
            record_id = store.id(n)
            where = f"{table.where(row)}: record {shown(record_id)}"
            yield _RecordLabels(n, record_id, cells[row], None, where, table.lines[row])


def _letters(text: str, where: str) -> npt.NDArray[np.uint8]:
    """Convert the class letters of one record to ASCII codes, uint8 [L]."""
    if not (text.isascii() and text.isprintable()) or " " in text:
        at = next(k for k, c in enumerate(text) if not (c.isascii() and c.isprintable()) or c == " ")
        raise InputError(
            f"{where} has {shown(text[at])} at position {at + 1}, which is no label; classes are ASCII letters, digits "
            "and signs"
        )
    return np.frombuffer(text.encode("ascii"), dtype=np.uint8)


def _numbers(text: str, where: str) -> npt.NDArray[np.float32]:
    """Convert the numbers of one record, float32 [L], NaN where a label says so."""
    pieces = text.split(";")
    if _PLAIN_NUMBERS.fullmatch(text):
        try:
            values_L = np.array(list(map(float, pieces)))
        except ValueError:
            pass  # The loop below names the wrong value.
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
    """Convert a mask to whether each residue counts, bool [L]."""
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


def _classes(
    store: TokenStore,
    codes: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    line_N: npt.NDArray[np.int64],
    classes: str,
    path: Path,
) -> tuple[str, npt.NDArray[np.int8]]:
    """Return the letters of the classes, and the class of each residue, int8, -1 where undefined."""
    found = np.zeros(256, dtype=np.bool_)
    for start in range(0, len(codes), _CHUNK):
        found[codes[start : start + _CHUNK]] = True
    letters = [chr(code) for code in np.flatnonzero(found[1:]) + 1]
    names = classes or "".join(letters)
    unknown = [letter for letter in letters if letter not in names]
    if unknown:
        at = int(np.argmax(codes == ord(unknown[0])))
        n = int(np.searchsorted(offsets, at, side="right")) - 1
        where = f"{path}:{line_N[n]}" if line_N[n] else str(path)
        raise InputError(
            f"{where}: record {shown(store.id(n))} has the class {shown(unknown[0])} at position {at - offsets[n] + 1}"
            f", which is none of {names}; fix the label, or name it in task.classes"
        )
    class_of = np.full(256, -1, dtype=np.int8)
    for place, letter in enumerate(names):
        class_of[ord(letter)] = place
    return names, class_of[codes]
