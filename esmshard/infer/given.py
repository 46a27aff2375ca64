"""Sequences and variants as Python has them: lists, dictionaries, FASTA files; checked as those of files are."""

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

from esmshard.data import nucleotides
from esmshard.data.advice import instead
from esmshard.data.fasta import read_fasta
from esmshard.data.store import TokenStore, is_store
from esmshard.data.substitutions import STOP, Mutation, parse_variant
from esmshard.data.symbols import Edits, Refused, Rules, mend, shown
from esmshard.data.tables import counted
from esmshard.errors import InputError, UsageError
from esmshard.vocab import CLS, EOS, encode

Sequences = str | Iterable[str] | Mapping[str, str] | os.PathLike[str]
"""One sequence, some, some by id, or the path of a FASTA file or token store, which is never a plain string."""
_COLUMNS = ("sequence", "sequences", "seq", "protein_sequence", "mutated_sequence")
"""What a column of sequences is called."""


@dataclass(frozen=True)
class Given:
    """N sequences in order."""

    tokens: list[npt.NDArray[np.uint8]]
    """`<cls> ... <eos>`, uint8 [L + 2] of each."""
    names: list[str]
    """What to call each in a message: `sequences[3]`, `sequences['P01308']` or `x.fasta: record 'P01308'`."""
    single: bool
    """One sequence was given and not a list."""


def sequences(given: Sequences, single: str = "the sequence") -> Given:
    """Tokens of sequences, under the rules of `esmshard.data.symbols`; what is changed is told in a warning each.

    >>> sequences(["MKT", "MK"]).tokens[0].tolist()
    [0, 20, 15, 11, 2]

    Args:
        given: see `Sequences`.
        single: what to call one that comes without a list.

    Raises:
        InputError: naming sequence and position of what is no residue, a sequence without any, or that there is none.
    """
    if isinstance(given, os.PathLike):
        return _of_file(Path(given))
    edits, rules = Edits(), Rules()
    alone = isinstance(given, str)
    if isinstance(given, str):
        if re.search(r"[./\\]", given):  # 'my.fasta' would pass for a sequence with a gap in it
            raise UsageError(f"{shown(given)!r} is no sequence; give a file as a pathlib.Path")
        pairs: list[tuple[object, object]] = [(single, given)]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        pairs = list(enumerate(as_list(given, "sequences")))
    if not pairs:
        raise InputError("there is no sequence; give at least one")
    tokens, names = [], []
    for n, (key, written) in enumerate(pairs):
        names.append(single if alone else f"sequences[{key!r}]")
        if not isinstance(written, str):
            raise InputError(f"{names[-1]} is of type {type(written).__name__}; a string of residues is expected")
        try:
            residues = mend(written, rules, edits, str(key))
        except Refused as error:
            others = f", as {counted(more, 'sequence')} after it" if (more := _refused(pairs[n + 1 :])) else ""
            raise InputError(f"{names[-1]} {error.what}{others}; {error.fix}, or leave it out") from None
        assert residues is not None, "a record is left out only where the rules say 'drop'"
        tokens.append(np.frombuffer(bytes([CLS]) + residues + bytes([EOS]), dtype=np.uint8))
    if found := nucleotides.finding((one[1:-1] for one in tokens), counted(len(tokens), "sequence")):
        raise InputError(
            f"{found}; translate them, or, if they are proteins nevertheless, write them to x.fasta, run `esmshard "
            "ingest x.fasta -o x.store --on-nucleotides keep`, and give pathlib.Path('x.store')"
        )
    _warn(edits, "")
    return Given(tokens, names, alone)


def as_list(given: Any, what: str) -> list[Any]:
    """What was given for a list of strings, as one. Refused is what would be taken for a list of something else: the
    names of a table's columns, the letters of a Biopython sequence, a set, whose order is nobody's.

    >>> as_list(("MKT", "MK"), "sequences")
    ['MKT', 'MK']

    Args:
        given: a list, tuple, generator, 1-d array or Series.
        what: its items are, in the plural, for messages.

    Raises:
        UsageError: saying what to type for it.
    """
    kind = type(given).__name__
    expected = f"a list of {what} is expected, not"
    if isinstance(given, str):
        raise UsageError(f"a list of {what} is expected, and this is a single one; write [{shown(given)!r}]")
    if isinstance(given, bytes | bytearray):
        raise UsageError(f"{expected} {kind}; write given.decode()")
    columns = getattr(given, "column_names", getattr(given, "columns", None))  # of Arrow and pandas
    shape = getattr(given, "shape", None)
    if columns is not None and not callable(columns):
        names = [str(name) for name in columns]
        likely = next((name for known in _COLUMNS for name in names if name.lower() == known), None)
        typed = f'df["{likely}"]' if likely and what == "sequences" else f"the column that has the {what}, as df[NAME]"
        raise UsageError(f"{expected} a {kind} with the columns {', '.join(map(shown, names[:5]))}; give {typed}")
    if shape is not None and len(shape) != 1:
        fix = "x[:, 0]" if len(shape) == 2 else "x.ravel()" if shape else "str(x)"
        raise UsageError(f"{expected} an array of shape {tuple(shape)}; give one dimension, as {fix}")
    if kind in ("Seq", "MutableSeq", "SeqRecord"):  # Biopython's are sequences of letters
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


def _of_file(path: Path) -> Given:
    """The records of a FASTA file or a token store."""
    if is_store(path):
        store = TokenStore(path)
        ids, residues = [store.id(n) for n in range(len(store))], [store.residues(n) for n in range(len(store))]
        tokens = [np.concatenate(([CLS], one, [EOS])).astype(np.uint8) for one in residues]
    else:
        edits = Edits()
        records = list(read_fasta(path, edits))
        ids, tokens = [record.id for record in records], [encode(record.sequence) for record in records]
        if found := nucleotides.finding((one[1:-1] for one in tokens), counted(len(records), "record")):
            raise InputError(f"{path}: {found}; translate them, or, {instead([path], '--on-nucleotides keep')}")
        _warn(edits, f"{path}: ")
    return Given(tokens, [f"{path}: record '{shown(record_id)}'" for record_id in ids], single=False)


def _refused(pairs: Sequence[tuple[object, object]]) -> int:
    """How many sequences cannot be read. Only on the way to an error."""
    count = 0
    for _, written in pairs:
        try:
            mend(str(written), Rules(), Edits(), "")
        except Refused:
            count += 1
    return count


def variants(given: Iterable[str], protein: str) -> list[tuple[Mutation, ...]]:
    """The substitutions of each variant, such as `A24G:V30L` or `WT`; synonymous ones are none.

    >>> [len(one) for one in variants(["K2R:T3S", "WT", "K2K"], "MKT")]
    [2, 0, 0]

    Args:
        given: see `esmshard.data.substitutions` for what a variant may look like.
        protein: the wild type, whose first residue is number 1.

    Raises:
        InputError: naming the variant that is none, does not fit the protein, or has a stop codon.
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
        level, frame = level + 1, frame.f_back  # the warning is of the caller's line
    for notice in edits.notices():
        warnings.warn(f"{where}{notice}", stacklevel=level)
