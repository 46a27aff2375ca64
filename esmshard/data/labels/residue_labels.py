"""Reads labels of residues: a class letter or a number for each residue of a protein.

| source | labels | mask |
|---|---|---|
| headers of the FASTA file | `TARGET=DVCD`, `TARGET=0.5;0.3;nan;0.1` | `MASK=1101` |
| a FASTA file with labels in place of sequences | `DVCD` | `MASK=1101` in its headers, or a mask file |
| a table | a column with cells such as `DVCD` | a mask file |

A mask file is a FASTA file with a mask such as `1101` in place of each sequence. A residue with mask 0 has no label.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.label_sources import read_label_fasta
from esmshard.data.labels.pairing import NAME_LABEL, check_labelled, label_column, rows_of_records
from esmshard.errors import InputError
from esmshard.io.headers import FLOAT32_MAX, attributes, number
from esmshard.io.store import TokenStore
from esmshard.io.symbols import Edits
from esmshard.io.tables import Table, first_three, shown
from esmshard.vocab import BETWEEN, is_residue

Kind = Literal["class", "number"]
_PLAIN_NUMBERS = re.compile(r"[0-9eE+.;-]+")


@dataclass(frozen=True)
class ResidueLabels:
    """Labels with a value for each residue of N records. The labels are cropped together with the sequence."""

    per_residue: ClassVar[bool] = True
    labelled_N: ClassVar[None] = None

    kind: Kind
    names: str
    """The letters of the C classes: class k has letter k. Empty if `kind` is `number`."""
    values: npt.NDArray[Any]
    """The labels of all residues in the order of the store: int8 (kind `class`, -1 if unknown), or float32 (kind
    `number`, NaN if unknown).
    """
    offsets: npt.NDArray[np.int64]
    """Record n has the labels values[offsets[n] : offsets[n + 1]], int64 [N + 1]."""
    notices: list[str]

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """Return the read-only labels of record n as `target`, int8 (kind `class`) or float32 (kind `number`) [L]."""
        return {"target": self.values[self.offsets[n] : self.offsets[n + 1]]}


class _RecordLabels(NamedTuple):
    """The labels of one protein as text. `n` is its record index in the store; None if the store does not have it."""

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
    """Read the labels of all residues of N proteins. Labels of proteins that are not in the store are skipped.

    Args:
        store: the proteins.
        fasta: the FASTA file of the proteins.
        kind: `class`: a letter for each residue. `number`: numbers separated by semicolons, `nan` for no label.
        source: a table, or the path of a FASTA file of labels; None if the headers of `fasta` have the labels.
        mask: the path of a mask file; None if there is no mask file.
        column: the column of the table, or the key of the headers. By default the key `TARGET`, or the only column with
            the name `target`, `targets`, `label` or `labels`.
        id_column: the name of the id column; see the function `rows_of_records`.
        classes: all class letters, in the order of the class numbers; by default the sorted letters of the data.

    Raises:
        InputError: labels or masks cannot be read, do not fit their protein, or are missing for a protein.
    """
    edits, extra = Edits(), list[str]()
    if isinstance(source, Table):
        records = _of_rows(store, fasta, source, column, id_column, edits)
        lacks = f"label in {source.path}"
    elif source is None:
        key = (column or "TARGET").upper()
        records, lacks = _of_headers(store, fasta, key, edits), f"{key}="
    else:
        records, lacks = _of_label_file(store, source, edits), f"label in {source}"
    mask_of = {} if mask is None else _masks(store, fasta, mask)
    offsets = np.concatenate([[0], np.cumsum(store.lengths, dtype=np.int64)])
    # For kind `class`, `values` has letters as bytes (0 for no label) until the end, where they become class numbers.
    none, dtype = (0, np.uint8) if kind == "class" else (np.nan, np.float32)
    values: npt.NDArray[Any] = np.full(offsets[-1], none, dtype)
    line_of: dict[int, int] = {}  # the line of the labels of each record number; 0 for labels in headers
    codes, unmasked = set[int](), list[str]()
    for record in records:
        n, where = record.n, record.where
        if n is None:
            extra.append(record.id)
            continue
        residue_L = _residues(store, n)
        text = _joined(record.text, residue_L, "" if kind == "class" else ";")
        labels = _letters(text, where) if kind == "class" else _numbers(text, where)
        _check_length(where, "labels", len(labels), residue_L, fasta)
        labels_L = np.full(len(residue_L), none, dtype)
        labels_L[residue_L] = labels
        if record.mask is not None and mask is not None:
            raise InputError(f"{where} has MASK=, but {mask} has masks too; leave one of them out")
        if record.mask is not None:
            labels_L[~_mask(record.mask, residue_L, where, fasta)] = none
        elif mask is not None:
            labels_L[~mask_of[n]] = none
        values_L = values[offsets[n] : offsets[n + 1]]
        if n in line_of:
            if not np.array_equal(values_L, labels_L, equal_nan=kind == "number"):
                raise InputError(f"{where} has other labels than in line {line_of[n]}; leave one of them out")
            edits.add("a record that came twice with the same labels was read once", record.id)
            continue
        line_of[n], values_L[:] = record.line, labels_L
        if record.mask is None:
            unmasked.append(record.id)
        if kind == "class":
            new = set(labels_L.tobytes()) - codes - {0}
            if unknown := [letter for letter in map(chr, sorted(new)) if classes and letter not in classes]:
                at = int(np.argmax(labels_L == ord(unknown[0]))) + 1
                label = f"the class {shown(unknown[0])} at position {at}"
                raise InputError(f"{where} has {label}, which is none of {classes}; correct it, or extend task.classes")
            codes |= new
        if not (labels_L.any() if kind == "class" else np.isfinite(labels_L).any()):
            edits.add("no residue has a label", record.id)
    labelled_N = np.array([n in line_of for n in range(len(store))])
    check_labelled(store, fasta, labelled_N, lacks, extra, edits, required=True)
    if edits.counts.get("no residue has a label") == len(store):
        raise InputError(f"{fasta}: no residue of any record has a label; check labels and masks")
    for record_id in unmasked if mask is None and len(unmasked) < len(store) else ():
        edits.add("record(s) without MASK=, in which all residues count", record_id)
    names = ""
    if kind == "class":
        names = classes or "".join(map(chr, sorted(codes)))
        class_of = np.full(256, -1, dtype=np.int8)
        class_of[[ord(letter) for letter in names]] = np.arange(len(names))
        values = class_of[values]
    values.flags.writeable = False
    return ResidueLabels(kind, names, values, offsets, edits.notices())


def _residues(store: TokenStore, n: int) -> npt.NDArray[np.bool_]:
    """Return which tokens of record n are residues, not linkers between chains, bool [L]."""
    if store.linker is None:
        return np.ones(store.lengths[n], dtype=np.bool_)
    return is_residue(store.residues(n))


def _joined(text: str, residue_L: npt.NDArray[np.bool_], between: str = "") -> str:
    """Replace each `:` of `text` by `between` if the record has linkers (`residue_L` is false for linkers)."""
    return text if residue_L.all() else text.replace(BETWEEN, between)


def _masks(store: TokenStore, fasta: Path, path: Path) -> dict[int, npt.NDArray[np.bool_]]:
    """Read a mask file. Return the mask of each record by its index, bool [L]. A record without a mask is an error."""
    mask_of, line_of = dict[int, npt.NDArray[np.bool_]](), dict[int, int]()
    for record in read_label_fasta(path):
        n, where = store.find(record.id), f"{path}:{record.line}: record {shown(record.id)}"
        if n is None:
            continue
        mask_L = _mask(record.text, _residues(store, n), where, fasta)
        if n in mask_of and not np.array_equal(mask_of[n], mask_L):
            raise InputError(f"{where} has another mask than in line {line_of[n]}; leave one of them out")
        mask_of[n], line_of[n] = mask_L, record.line
    if bare := [n for n in range(len(store)) if n not in mask_of]:
        raise InputError(f"{path}: has no mask for {len(bare):,} records ({first_three(bare, store.id)}); add them")
    return mask_of


def _of_headers(store: TokenStore, fasta: Path, key: str, edits: Edits) -> Iterator[_RecordLabels]:
    for n in range(len(store)):
        given = attributes(store.description(n), (key, "MASK"), str(fasta), edits)
        if key in given:
            record_id = store.id(n)
            yield _RecordLabels(n, record_id, given[key], given.get("MASK"), f"{fasta}: record {shown(record_id)}", 0)


def _of_label_file(store: TokenStore, path: Path, edits: Edits) -> Iterator[_RecordLabels]:
    for record in read_label_fasta(path):
        given = attributes(record.header, ("MASK",), f"{path}:{record.line}", edits)
        where = f"{path}:{record.line}: record {shown(record.id)}"
        yield _RecordLabels(store.find(record.id), record.id, record.text, given.get("MASK"), where, record.line)


def _of_rows(
    store: TokenStore, fasta: Path, table: Table, column: str | None, id_column: str | None, edits: Edits
) -> Iterator[_RecordLabels]:
    column = column or label_column(table, ("target", "targets", "label", "labels"))
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
    if wrong := re.search("[^!-~]", text):
        at = wrong.start() + 1
        raise InputError(f"{where} has {shown(wrong[0])} at position {at}, which is no label; write letters or digits")
    return np.frombuffer(text.encode("ascii"), dtype=np.uint8)


def _numbers(text: str, where: str) -> npt.NDArray[np.float32]:
    """Convert numbers separated by semicolons to float32 [L]. The text `nan` becomes NaN."""
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
            raise InputError(f"{where} has an empty value {k}; write nan for a residue without a value")
        values.append(number(piece.strip(), lambda k=k: f"{where}: value {k}"))  # type: ignore[misc]
    return np.array(values, dtype=np.float32)


def _mask(text: str, residue_L: npt.NDArray[np.bool_], where: str, fasta: Path) -> npt.NDArray[np.bool_]:
    """Convert the text of a mask to bool [L]; False for linkers."""
    text = _joined(text, residue_L)
    _check_length(where, "a mask", len(text), residue_L, fasta)
    if wrong := text.strip("01"):
        at = text.index(wrong[0]) + 1
        raise InputError(f"{where} has {shown(wrong[0])} at position {at} of its mask; write 0 or 1")
    mask_L = np.zeros(len(residue_L), dtype=np.bool_)
    mask_L[residue_L] = np.frombuffer(text.encode("ascii"), dtype=np.uint8) == ord("1")
    return mask_L


def _check_length(where: str, what: str, count: int, residue_L: npt.NDArray[np.bool_], fasta: Path) -> None:
    if count != residue_L.sum():
        sizes = f"{count} residues, but {residue_L.sum()} residues in {fasta}"
        raise InputError(f"{where} has {what} for {sizes}; each residue of the full sequence needs a value")
