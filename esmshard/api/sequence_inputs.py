"""Read the sequences and variants that Python users give as lists, dictionaries or files."""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.mutations import STOP, Mutation, parse_variant
from esmshard.errors import InputError, UsageError
from esmshard.io.store import TokenStore, ingest, is_store
from esmshard.io.symbols import Edits, RefusedSymbols, Rules, clean, nucleotides, shown
from esmshard.io.tables import counted
from esmshard.vocab import CLS, EOS, LINKER

Sequences = str | Iterable[str] | Mapping[str, str] | os.PathLike[str]
"""One sequence, several sequences, a dictionary of sequences by id, or the path of a FASTA file, table or token store.
A string is always a sequence and never a path.
"""


@dataclass(frozen=True)
class SequenceInputs:
    """The tokens, names and ids of N sequences, in the order of the input."""

    tokens: list[npt.NDArray[np.uint8]]
    """The tokens `<cls> ... <eos>` of each sequence, uint8 [L + 2]."""
    names: list[str]
    """The name of each sequence in messages: `sequences[3]`, `sequences['P01308']` or `x.fasta: record 'P01308'`."""
    single: bool
    """Whether the user gave a single string."""
    ids: list[str] | None = None
    """The keys of a dictionary, or the ids in a file; None for a string or a list."""


def sequences(given: Sequences, single: str = "the sequence", linker: int = LINKER) -> SequenceInputs:
    """Convert sequences to tokens by the rules of `esmshard.io.symbols`. Warn once for each kind of correction.

    Args:
        given: see `Sequences`.
        single: the name of a single string in messages.
        linker: the number of tokens between the chains of a sequence such as `MKT:MKV`.

    Raises:
        InputError: there is no sequence, a sequence is empty or has a character that is no residue, or the sequences
            seem to be DNA or RNA. The message names the sequence and the position of the character.
    """
    if isinstance(given, os.PathLike):
        return _of_file(Path(given), linker)
    edits, rules = Edits(), Rules(linker=linker)
    is_single, with_ids = isinstance(given, str), isinstance(given, Mapping)
    if isinstance(given, str):
        if re.search(r"[./\\]", given):  # 'my.fasta' must not be read as a sequence with a gap.
            raise UsageError(f"{shown(given)!r} is no sequence; if it is a file, give a pathlib.Path")
        pairs: list[tuple[object, object]] = [(single, given)]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        pairs = list(enumerate(as_list(given, "sequences")))
    if not pairs:
        raise InputError("there is no sequence; give at least one")
    tokens, names = [], []
    for key, text in pairs:
        names.append(single if is_single else f"sequences[{key!r}]")
        if not isinstance(text, str):
            raise InputError(f"{names[-1]} is of type {type(text).__name__}; a string of residues is expected")
        try:
            residues = clean(text, rules, edits, str(key))
        except RefusedSymbols as error:
            raise InputError(f"{names[-1]} {error.what}; {error.fix}, or leave it out") from None
        assert residues is not None, "only the rule 'drop' leaves a record out"
        tokens.append(np.frombuffer(bytes([CLS]) + residues + bytes([EOS]), dtype=np.uint8))
    if dna := nucleotides((sequence[1:-1] for sequence in tokens), counted(len(tokens), "sequence")):
        raise InputError(
            f"{dna}; translate the sequences. If they are proteins, write them to x.fasta, run `esmshard ingest "
            "x.fasta -o x.store --on-nucleotides keep`, and give pathlib.Path('x.store')"
        )
    for notice in edits.notices():
        _warn(notice)
    ids = [str(key) for key, _ in pairs] if with_ids else None
    return SequenceInputs(tokens, names, is_single, ids)


def as_list(given: Any, what: str) -> list[Any]:
    """Make a list from a list, tuple, generator, 1-d array or Series of strings. `what` names the strings in messages.

    Raise `UsageError` for other collections: the items of a table are columns, the items of a Biopython sequence are
    letters, and a set has no order.
    """
    kind, one_dimension = type(given).__name__, len(getattr(given, "shape", (1,))) == 1
    wrong = isinstance(given, str | bytes | set | frozenset | Mapping) or kind in ("Seq", "MutableSeq", "SeqRecord")
    if wrong or not one_dimension or not isinstance(given, Iterable):
        raise UsageError(
            f"a list of {what} is expected, not {kind}; give a list of strings, such as [{what[:-1]}], or a column of "
            "a table, as list(df['sequence'])"
        )
    return list(given)


def _of_file(path: Path, linker: int) -> SequenceInputs:
    """Read all records of a FASTA file, a table or a token store into memory."""
    with TemporaryDirectory(prefix="esmshard-load-") as scratch:
        given = is_store(path)
        store = TokenStore(path) if given else ingest([path], Path(scratch) / "store", Rules(linker=linker))
        store.check_linker(linker, path)
        for notice in () if given else store.notices:
            _warn(f"{path}: {notice}")
        ids = [store.id(n) for n in range(len(store))]
        tokens = [np.pad(store.residues(n), 1, constant_values=(CLS, EOS)) for n in range(len(store))]
    return SequenceInputs(tokens, [f"{path}: record '{shown(record_id)}'" for record_id in ids], single=False, ids=ids)


def variants(given: Iterable[str], protein: str) -> list[tuple[Mutation, ...]]:
    """Return the substitutions of each variant, such as `A24G:V30L` or `WT`, without synonymous substitutions.

    The first residue of the wild type `protein` has position 1. Raise `InputError` if a variant cannot be read, does
    not fit the protein, or has a stop codon.

    >>> [len(mutations) for mutations in variants(["K2R:T3S", "WT", "K2K"], "MKT")]
    [2, 0, 0]
    """
    substitutions = []
    for n, cell in enumerate(as_list(given, "variants")):
        where = f"variants[{n}]"
        if not isinstance(cell, str):
            raise InputError(f"{where} is of type {type(cell).__name__}; a string such as 'A24G' is expected")
        try:
            mutations = parse_variant(cell)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        for mutation in mutations:
            if STOP in mutation.mutant:
                raise InputError(
                    f"{where}: {mutation} is a stop codon, for which models have no letter; remove this variant"
                )
            if not 0 <= mutation.position < len(protein):
                raise InputError(
                    f"{where}: {mutation}: the wild type has residues 1 to {len(protein):,}; correct the position"
                )
            if mutation.wild not in ("", protein[mutation.position]):  # inside a longer deletion it is unknown
                raise InputError(
                    f"{where}: {mutation}: residue {mutation.position + 1} of the wild type is "
                    f"{protein[mutation.position]}; positions count from 1 for the wild type's first residue"
                )
        substitutions.append(tuple(mutation for mutation in mutations if mutation.mutant != mutation.wild))
    return substitutions


def _warn(notice: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("esmshard."):
        level, frame = level + 1, frame.f_back  # The warning must name the line of the user's call.
    warnings.warn(notice, stacklevel=level)
