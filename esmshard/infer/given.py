"""Sequences and variants as Python has them: lists, dictionaries, FASTA files; checked as those of files are."""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta import read_fasta
from esmshard.data.substitutions import STOP, Mutation, parse_variant
from esmshard.data.symbols import Edits, Refused, Rules, mend, shown
from esmshard.errors import InputError, UsageError
from esmshard.vocab import CLS, EOS, encode

Sequences = str | Iterable[str] | Mapping[str, str] | os.PathLike[str]
"""One sequence, some, some by id, or the path of a FASTA file, which is never a plain string."""


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
    edits, rules = Edits(), Rules()
    if isinstance(given, os.PathLike):
        path = Path(given)
        records = list(read_fasta(path, edits, rules))
        _warn(edits, f"{path}: ")
        names = [f"{path}: record '{shown(record.id)}'" for record in records]
        return Given([encode(record.sequence) for record in records], names, single=False)
    alone = isinstance(given, str)
    if isinstance(given, str):
        if re.search(r"[./\\]", given):  # 'my.fasta' would pass for a sequence with a gap in it
            raise UsageError(f"{shown(given)!r} is no sequence; give a file as a pathlib.Path")
        pairs: list[tuple[object, object]] = [(single, given)]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        pairs = list(enumerate(given))
    else:
        raise UsageError(f"a list of sequences is expected, not {type(given).__name__}")
    if not pairs:
        raise InputError("there is no sequence; give at least one")
    tokens, names = [], []
    for key, written in pairs:
        names.append(single if alone else f"sequences[{key!r}]")
        if not isinstance(written, str):
            raise InputError(f"{names[-1]} is of type {type(written).__name__}; a string of residues is expected")
        try:
            residues = mend(written, rules, edits, str(key))
        except Refused as error:
            raise InputError(f"{names[-1]} {error}") from None
        assert residues is not None, "a record is left out only where the rules say 'drop'"
        tokens.append(np.frombuffer(bytes([CLS]) + residues + bytes([EOS]), dtype=np.uint8))
    _warn(edits, "")
    return Given(tokens, names, alone)


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
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UsageError("a list of variants is expected, such as ['A24G', 'A24G:V30L']")
    found = []
    for n, cell in enumerate(given):
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
