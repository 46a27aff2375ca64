"""Sequences and variants in Python's forms: lists, dictionaries, tables, files. They are checked as in files."""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.variants.substitutions import STOP, Mutation, parse_variant
from esmshard.errors import InputError, UsageError
from esmshard.io.sequences import id_column, read_fasta, sequence_columns
from esmshard.io.store import TokenStore, is_store
from esmshard.io.symbols import Edits, RefusedSymbols, Rules, clean, in_a_store, nucleotides, shown
from esmshard.io.tables import Table, counted
from esmshard.vocab import BETWEEN, CLS, EOS, LINKER, encode

Sequences = str | Iterable[str] | Mapping[str, str] | os.PathLike[str]
"""One sequence, several sequences, a dictionary of sequences by id, a table of pandas, Polars or Arrow with a column of
sequences (docs/ingest.md), or the path of a FASTA file, table or token store. A plain string is never a path.
"""


@dataclass(frozen=True)
class SequenceInputs:
    """N sequences in order."""

    tokens: list[npt.NDArray[np.uint8]]
    """The tokens `<cls> ... <eos>` of each sequence, uint8 [L + 2]."""
    names: list[str]
    """The name of each sequence in messages: `sequences[3]`, `sequences['P01308']` or `x.fasta: record 'P01308'`."""
    single: bool
    """Whether one sequence was given and not a list."""
    ids: list[str] | None = None
    """The keys of a dictionary, or the ids in a file or table; None for sequences without ids."""


def sequences(given: Sequences, single: str = "the sequence", linker: int = LINKER) -> SequenceInputs:
    """Encode sequences by the rules of `esmshard.io.symbols`. Each kind of change causes a warning.

    >>> sequences(["MKT", "MK"]).tokens[0].tolist()
    [0, 20, 15, 11, 2]

    Args:
        given: see `Sequences`.
        single: the name, in messages, of a sequence that is not in a list.
        linker: the number of tokens between two chains of a sequence, as `MKT:MKV`.

    Raises:
        InputError: with sequence and position of a character that is no residue; or for an empty sequence or list.
    """
    if isinstance(given, os.PathLike):
        return _of_file(Path(given), linker)
    edits, rules = Edits(), Rules(linker=linker)
    alone, with_ids = isinstance(given, str), isinstance(given, Mapping)
    if isinstance(given, str):
        if re.search(r"[./\\]", given):  # 'my.fasta' would otherwise be read as a sequence with a gap
            raise UsageError(f"{shown(given)!r} is no sequence; give a file as a pathlib.Path")
        pairs: list[tuple[object, object]] = [(single, given)]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    elif (found_in := _of_columns(given)) is not None:
        pairs, with_ids = found_in
    else:
        pairs = list(enumerate(as_list(given, "sequences")))
    if not pairs:
        raise InputError("there is no sequence; give at least one")
    tokens, names = [], []
    for key, written in pairs:
        names.append(single if alone else f"sequences[{key!r}]")
        if not isinstance(written, str):
            raise InputError(f"{names[-1]} is of type {type(written).__name__}; a string of residues is expected")
        try:
            residues = clean(written, rules, edits, str(key))
        except RefusedSymbols as error:
            raise InputError(f"{names[-1]} {error.what}; {error.fix}, or leave it out") from None
        assert residues is not None, "a record is left out only where the rules say 'drop'"
        tokens.append(np.frombuffer(bytes([CLS]) + residues + bytes([EOS]), dtype=np.uint8))
    if found := nucleotides((one[1:-1] for one in tokens), counted(len(tokens), "sequence")):
        raise InputError(
            f"{found}; translate them, or, if they are proteins nevertheless, write them to x.fasta, run `esmshard "
            "ingest x.fasta -o x.store --on-nucleotides keep`, and give pathlib.Path('x.store')"
        )
    _warn(edits, "")
    ids = [str(key) for key, _ in pairs] if with_ids else None
    return SequenceInputs(tokens, names, alone, ids)


def as_list(given: Any, what: str) -> list[Any]:
    """Return a list of strings from a list-like argument.

    Refused are arguments whose items are something else: the names of a table's columns, the letters of a Biopython
    sequence, or a set, which has no order.

    >>> as_list(("MKT", "MK"), "sequences")
    ['MKT', 'MK']

    Args:
        given: a list, tuple, generator, 1-d array or Series.
        what: the name of the items, in the plural, for messages.

    Raises:
        UsageError: with the expression to type instead.
    """
    kind = type(given).__name__
    expected = f"a list of {what} is expected, not"
    if isinstance(given, str):
        raise UsageError(f"a list of {what} is expected, and this is a single one; write [{shown(given)!r}]")
    if isinstance(given, bytes | bytearray):
        raise UsageError(f"{expected} {kind}; write given.decode()")
    names, shape = _column_names(given), getattr(given, "shape", None)
    if names is not None:
        likely = sequence_columns(_header(kind, names)) if what == "sequences" else ()
        typed = f'df["{likely[0]}"]' if len(likely) == 1 else f"the column that has the {what}, as df[NAME]"
        raise UsageError(f"{expected} a {kind} with the columns {', '.join(map(shown, names[:5]))}; give {typed}")
    if shape is not None and len(shape) != 1:
        fix = "x[:, 0]" if len(shape) == 2 else "x.ravel()" if shape else "str(x)"
        raise UsageError(f"{expected} an array of shape {tuple(shape)}; give one dimension, as {fix}")
    if kind in ("Seq", "MutableSeq", "SeqRecord"):  # Biopython's objects are sequences of letters
        raise UsageError(f"{expected} a {kind}; give {'str(given.seq)' if kind == 'SeqRecord' else 'str(given)'}")
    if isinstance(given, set | frozenset):
        raise UsageError(f"{expected} a {kind}, which has no order that results could come in; give sorted(given)")
    if isinstance(given, Mapping):
        raise UsageError(f"{expected} a {kind}; give list(given.values())")
    if hasattr(given, "read"):
        raise UsageError(f"{expected} an open file; give its pathlib.Path")
    if not isinstance(given, Iterable):
        raise UsageError(f"{expected} {kind}")
    return list(given)


def _column_names(given: Any) -> list[str] | None:
    """Return the names of the columns of a table of pandas, Polars or Arrow; None if it is something else."""
    columns = getattr(given, "column_names", getattr(given, "columns", None))
    return None if columns is None or callable(columns) else [str(name) for name in columns]


def rows(given: Any) -> list[Any]:
    """Return a list of sequences from a list-like argument, or from the column of sequences of a table.

    Args:
        given: a table of pandas, Polars or Arrow, whose ids are not read and may repeat; else see `as_list`.

    Raises:
        UsageError: with the expression to type instead.
    """
    names = _column_names(given)
    columns = () if names is None else sequence_columns(_header(type(given).__name__, names))
    return _of_chains(given, columns) if columns else as_list(given, "sequences")


def _of_columns(given: Any) -> tuple[list[tuple[object, object]], bool] | None:
    """Return the sequences of a table, each with its id or its place, and whether these are ids; None if it is no
    table, or has no column of sequences.
    """
    names = _column_names(given)
    if names is None:
        return None
    header = _header(type(given).__name__, names)
    columns = sequence_columns(header)
    if not columns:
        return None
    ids = id_column(header, columns)
    sequences = _of_chains(given, columns)
    if ids is None:
        return list(enumerate(sequences)), False
    keys = [str(cell) for cell in _cells(given, ids)]
    if len(set(keys)) < len(keys):
        twice = next(key for n, key in enumerate(keys) if key in keys[:n])
        raise InputError(
            f"{header.path}: column {ids!r} has {shown(twice)!r} twice; give each sequence an id of its own, or give "
            f"df[{list(columns) if len(columns) > 1 else columns[0]!r}], which has no ids"
        )
    return list(zip(keys, sequences, strict=True)), True


def _of_chains(given: Any, columns: Sequence[str]) -> list[Any]:
    """Return the records of a column of sequences, or of two columns of their chains."""
    if len(columns) == 1:
        return _cells(given, columns[0])
    return [_record(*cells) for cells in zip(*(_cells(given, name) for name in columns), strict=True)]


def _record(first: object, second: object) -> object:
    """Return a record of two chains, or a cell that is no text, which is refused like any other."""
    cells = (first, second)
    return next((cell for cell in cells if not isinstance(cell, str)), BETWEEN.join(map(str, cells)))


def _header(kind: str, names: Sequence[str]) -> Table:
    """Return a table without rows, in which columns are found as in a file. Messages call it by its type."""
    return Table(Path(kind), {name: [] for name in names}, [])


def _cells(table: Any, column: str) -> list[object]:
    values = table[column]
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values)  # Arrow's items are no strings


def _of_file(path: Path, linker: int) -> SequenceInputs:
    """Read the records of a FASTA file, a table or a token store."""
    if is_store(path):
        store = TokenStore(path)
        store.check_linker(linker, path)
        ids, residues = [store.id(n) for n in range(len(store))], [store.residues(n) for n in range(len(store))]
        tokens = [np.concatenate(([CLS], one, [EOS])).astype(np.uint8) for one in residues]
    else:
        edits = Edits()
        records = list(read_fasta(path, edits, Rules(linker=linker)))
        ids, tokens = [record.id for record in records], [encode(record.sequence, linker) for record in records]
        if found := nucleotides((one[1:-1] for one in tokens), counted(len(records), "record")):
            raise InputError(f"{path}: {found}; translate them, or {in_a_store('--on-nucleotides keep')}")
        _warn(edits, f"{path}: ")
    return SequenceInputs(tokens, [f"{path}: record '{shown(record_id)}'" for record_id in ids], single=False, ids=ids)


def variants(given: Iterable[str], protein: str) -> list[tuple[Mutation, ...]]:
    """Return the substitutions of each variant, such as `A24G:V30L` or `WT`. Synonymous ones are left out.

    >>> [len(one) for one in variants(["K2R:T3S", "WT", "K2K"], "MKT")]
    [2, 0, 0]

    Args:
        given: the variants; see `esmshard.data.variants.substitutions` for their forms.
        protein: the wild type, whose first residue is number 1.

    Raises:
        InputError: with the variant that is none, does not fit the protein, or has a stop codon.
    """
    found = []
    for n, cell in enumerate(as_list(given, "variants")):
        where = f"variants[{n}]"
        if not isinstance(cell, str):
            raise InputError(f"{where} is of type {type(cell).__name__}; a string such as 'A24G' is expected")
        try:
            mutations = parse_variant(cell)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        for mutation in mutations:
            if mutation.mutant == STOP:
                raise InputError(f"{where}: {mutation} is a stop codon, which no model has a letter for; remove it")
            if not 0 <= mutation.position < len(protein):
                raise InputError(f"{where}: {mutation}: the wild type has residues 1 to {len(protein):,}")
            if protein[mutation.position] != mutation.wild:
                raise InputError(
                    f"{where}: {mutation}: residue {mutation.position + 1} of the wild type is "
                    f"{protein[mutation.position]}; number the residues as they are in it, from 1"
                )
        found.append(tuple(one for one in mutations if one.mutant != one.wild))
    return found


def _warn(edits: Edits, where: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("esmshard."):
        level, frame = level + 1, frame.f_back  # the warning gets the caller's line
    for notice in edits.notices():
        warnings.warn(f"{where}{notice}", stacklevel=level)
