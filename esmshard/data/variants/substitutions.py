"""Substitutions as a cell of a mutation table names them.

Everything that is not in this list is refused with a reason.

| the cell | its meaning |
|---|---|
| `A24G`, `p.A24G`, `p.Ala24Gly`, `p.(Ala24Gly)`, `NP_000509.1:p.Ala24Gly` | one substitution |
| `A24G:V30L`, also with `;`, `,`, `/`, `+` or spaces, `p.[Ala24Gly;Val30Leu]` | several substitutions in one protein |
| `24G`, `24G:30L` | the same, if no cell of the column has letters of the wild type |
| `WT`, `_wt`, `wild-type`, `p.=` | the wild type |
| `A24*`, `p.Ala24Ter` | a stop codon: refused or dropped |
| `A24A`, `p.Ala24=` | a synonymous change: refused, dropped or kept |

Three-letter codes and brackets are HGVS (den Dunnen et al. 2016, https://hgvs-nomenclature.org); `_wt` comes from
Enrich2 (Rubin et al. 2017). Lower case is read too.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from Bio.Data.IUPACData import protein_letters_3to1_extended

from esmshard.errors import InputError
from esmshard.io.tables import counted, shown
from esmshard.vocab import RESIDUES, STANDARD

STOP = "*"

_WILD = frozenset(RESIDUES)
_MUTANT = frozenset(STANDARD + "UO" + STOP)
_LETTER = {name.upper(): letter for name, letter in protein_letters_3to1_extended.items()} | {"TER": STOP}
_WILD_TYPE = frozenset({"wt", "_wt", "wildtype", "wild-type", "wild_type", "wild type", "=", "p.=", "p.(=)", "p.[=]"})
_ACCESSION = re.compile(r"([NX]P_\d+|[A-Z][A-Z0-9_]*\d\.\d+):(?=p\.)")
_JOINED = re.compile(r"\s*[:;,/+]\s*|\s+")
_SUBSTITUTION = re.compile(r"([A-Z]{3}|[A-Z])(-?\d{1,6})([A-Z]{3}|[A-Z]|\*|=)", re.ASCII | re.IGNORECASE)
_BARE = re.compile(r"(?<![A-Za-z0-9-])(\d{1,6})(?=([A-Z]{3}|[A-Z]|\*)(?![A-Za-z0-9]))", re.ASCII | re.IGNORECASE)
"""A position without the letter of the wild type before it."""
HOW = "write A24G, A24G:V30L or p.Ala24Gly, and WT for the wild type; remove rows of other changes"
"""Advice for messages about cells that cannot be used."""


class RefusedVariant(InputError):
    """A cell cannot be used."""


# a dataclass sorts and hashes ten times slower, and tables have hundreds of thousands of mutations
class Mutation(NamedTuple):
    """A substitution of one residue.

    >>> print(Mutation(23, "A", "G"))
    A24G
    """

    position: int
    """Position in the protein, counted from 0."""
    wild: str
    mutant: str
    """One letter. `*` is a stop codon; the letter of `wild` is a synonymous change."""

    def __str__(self) -> str:
        return f"{self.wild}{self.position + 1}{self.mutant}"


def name_of(mutations: tuple[Mutation, ...]) -> str:
    """Return the name of a variant, such as `A24G:V30L` or `WT`."""
    return ":".join(map(str, mutations)) or "WT"


def renumbered(mutations: tuple[Mutation, ...], shift: int) -> tuple[Mutation, ...]:
    """Return the same substitutions in a numbering that is ahead by `shift`.

    >>> name_of(renumbered((Mutation(0, "M", "L"),), 23))
    'M24L'
    """
    return tuple(Mutation(m.position + shift, m.wild, m.mutant) for m in mutations)


def parse_variant(cell: str) -> tuple[Mutation, ...]:
    """Read the substitutions that a cell names, sorted by position; none for the wild type.

    >>> [str(mutation) for mutation in parse_variant("p.[Val30Leu;Ala24Gly]")]
    ['A24G', 'V30L']
    >>> parse_variant("WT")
    ()

    Raises:
        RefusedVariant: the cell is no list of substitutions; the message says what the cell has instead.
    """
    cell = cell.strip()
    if cell.lower() in _WILD_TYPE:
        return ()
    if not cell:
        raise RefusedVariant("an empty cell")
    body = _ACCESSION.sub("", cell, count=1) if "p." in cell else cell
    if body[:2].lower() == "p.":
        body = body[2:]
        for opening, closing in ("[]", "()"):
            if body.startswith(opening) and body.find(closing) == len(body) - 1:
                body = body[1:-1]
    mutations = tuple(sorted(_substitution(word) for word in _JOINED.split(body)))
    for one, other in itertools.pairwise(mutations):
        if one.position == other.position:
            raise RefusedVariant(f"{shown(cell)} changes position {one.position + 1} twice")
    return mutations


def without_wild_type_letters(cells: Sequence[str]) -> bool:
    """Whether each cell has only positions and new letters, as in `24G`, or is the wild type."""
    words = [word for cell in cells if cell.strip().lower() not in _WILD_TYPE for word in _JOINED.split(cell.strip())]
    return bool(words) and all(_BARE.match(word) for word in words)


def parse_with_wild_type(cell: str, wild_type: str, shift: int) -> tuple[Mutation, ...]:
    """Read a cell such as `24G`, whose letters of the wild type stand at the position plus `shift`; see
    `parse_variant`.

    >>> name_of(parse_with_wild_type("2T", "MKV", 0))
    'K2T'
    """

    def completed(match: re.Match[str]) -> str:
        place = int(match[1]) - 1 + shift
        return f"{wild_type[place] if 0 <= place < len(wild_type) else 'X'}{match[1]}"  # X fits no wild type

    return parse_variant(_BARE.sub(completed, cell))


@functools.lru_cache(maxsize=1 << 16)
def _substitution(word: str) -> Mutation:
    code = word.removeprefix("p.")
    if code.startswith("(") and code.endswith(")"):
        code = code[1:-1]
    match = _SUBSTITUTION.fullmatch(code)
    if match:
        before, number, after = match[1].upper(), match[2], match[3].upper()
        wild = _LETTER.get(before, before)
        mutant = wild if after == "=" else _LETTER.get(after, after)
        if wild in _WILD and (mutant in _MUTANT or mutant == wild):
            return Mutation(int(number) - 1, wild, mutant)
    raise RefusedVariant(f"{shown(word)} is no substitution")


def compare(sequence: str, wild_type: str) -> tuple[Mutation, ...]:
    """Return the substitutions that turn the wild type into another sequence of its length.

    >>> [str(mutation) for mutation in compare("MKV", "MKT")]
    ['T3V']

    Raises:
        RefusedVariant: the sequence has another length, gaps, or differs by a letter that is not one residue.
    """
    text = "".join(sequence.split())
    if len(text) == len(wild_type) + 1:
        text = text.removesuffix(STOP)
    if len(text) != len(wild_type):
        raise RefusedVariant(f"{shown(sequence)} has {counted(len(text), 'residue')}, the wild type {len(wild_type):,}")
    if not text.isascii():  # upper() would turn some letters into two.
        raise RefusedVariant(f"{shown(sequence)} is no sequence in one-letter codes")
    text = text.upper()
    differ_L = np.frombuffer(text.encode(), np.uint8) != np.frombuffer(wild_type.encode(), np.uint8)
    mutations = tuple(Mutation(k, wild_type[k], text[k]) for k in np.flatnonzero(differ_L).tolist())
    for mutation in mutations:
        if mutation.mutant not in _MUTANT:
            raise RefusedVariant(f"{shown(mutation.mutant)} at position {mutation.position + 1} is not one residue")
    return mutations
