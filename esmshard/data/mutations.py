"""The notation of variants: reads cells such as `A24G:V30L`, compares sequences with the wild type, and makes names.

A cell of the mutation column has one of these forms. Cells with other forms are refused.

| cell | meaning |
|---|---|
| `A24G`, `p.A24G`, `p.Ala24Gly`, `p.(Ala24Gly)`, `NP_000509.1:p.Ala24Gly` | one substitution |
| `A24G:V30L`, or `;`, `,`, `/`, `+` or spaces as separators, `p.[Ala24Gly;Val30Leu]` | several substitutions |
| `WT`, `_wt`, `wild-type`, `p.=` | the wild type |
| `A24*`, `p.Ala24Ter` | a stop codon: an error, or the row is left out |
| `A24A`, `p.Ala24=` | a synonymous change: an error, or the row is left out or kept |
| `A24del`, `A24_V30del`, `A24_V25insGG`, `A24delinsGV`, `p.Ala24dup` | insertions and deletions, if `indels` is true |

Three-letter codes and brackets are from HGVS (den Dunnen et al. 2016, https://hgvs-nomenclature.org); `_wt` is from
Enrich2 (Rubin et al. 2017). Lower case is accepted too.
"""

import functools
import itertools
import re
from typing import NamedTuple

import numpy as np
from Bio.Data.IUPACData import protein_letters_3to1_extended

from esmshard.errors import InputError
from esmshard.io.tables import counted, shown
from esmshard.vocab import BETWEEN, RESIDUES, STANDARD

STOP = "*"

_WILD = frozenset(RESIDUES)
_MUTANT = frozenset(STANDARD + "UO" + STOP)
_LETTER = {name.upper(): letter for name, letter in protein_letters_3to1_extended.items()} | {"TER": STOP}
_WILD_TYPE = frozenset({"wt", "_wt", "wildtype", "wild-type", "wild_type", "wild type", "=", "p.=", "p.(=)", "p.[=]"})
_ACCESSION = re.compile(r"([NX]P_\d+|[A-Z][A-Z0-9_]*\d\.\d+):(?=p\.)")
_JOINED = re.compile(r"\s*[:;,/+]\s*|\s+")
_SUBSTITUTION = re.compile(r"([A-Z]{3}|[A-Z])(-?\d{1,6})([A-Z]{3}|[A-Z]|\*|=)", re.ASCII | re.IGNORECASE)
_INDEL = re.compile(
    r"([A-Z]{3}|[A-Z])(\d{1,6})(?:_([A-Z]{3}|[A-Z])(\d{1,6}))?(delins|ins|del|dup)([A-Z]*)", re.ASCII | re.IGNORECASE
)


class RefusedVariant(InputError):
    """The error for a cell of a table that does not name a valid variant."""


# A named tuple sorts and hashes ten times faster than a dataclass, and tables have hundreds of thousands of mutations.
class Mutation(NamedTuple):
    """A change at one residue of a protein, such as `A24G`: residue 24 changes from A to G. A deletion replaces the
    residue by nothing, and an insertion replaces it by several residues.

    >>> print(Mutation(23, "A", "G"), Mutation(23, "A", ""), Mutation(23, "A", "AGG"), Mutation(0, "M", "GM"))
    A24G A24del A24insGG M1delinsGM
    """

    position: int
    """The position in the protein, counted from 0."""
    wild: str
    mutant: str
    """The letter of the new residue. `*` is a stop codon. The same letter as in `wild` is a synonymous change."""

    def __str__(self) -> str:
        how, letters = "", self.mutant
        if not letters:
            how = "del"
        elif len(letters) > 1:
            how, letters = ("ins", letters[1:]) if letters[0] == self.wild else ("delins", letters)
        return f"{self.wild}{self.position + 1}{how}{letters}"

    @property
    def is_substitution(self) -> bool:
        """Whether one residue replaces the residue."""
        return len(self.mutant) == 1


class WildType(NamedTuple):
    """The wild type of a protein, or the part of it that a model reads."""

    residues: str
    """The residues of all chains, one chain after the other."""
    breaks: tuple[int, ...] = ()
    """The index of the first residue of each chain but the first."""
    first: int = 0
    """The position of the first residue in the whole protein."""
    name: str = ""
    """The name in the file of the wild type, if it has one."""

    def mutated(self, mutations: tuple[Mutation, ...]) -> str:
        """Return the sequence of a variant, with `:` between chains. `mutations` have positions in the whole protein.

        >>> WildType("MKV", breaks=(2,)).mutated((Mutation(1, "K", "KA"),))
        'MKA:V'
        """
        letters = list(self.residues)
        for mutation in mutations:
            letters[mutation.position - self.first] = mutation.mutant
        for place in self.breaks:
            letters[place] = BETWEEN + letters[place]
        return "".join(letters)


WildTypes = dict[str, WildType]
"""The wild type of each protein by name. The name of the only protein of a table is an empty text."""


def wild_type_of(sequence: str) -> WildType:
    """Return the wild type with a sequence in which `:` is between chains.

    >>> wild_type_of("MK:V")
    WildType(residues='MKV', breaks=(2,), first=0, name='')
    """
    *before, _ = itertools.accumulate(map(len, sequence.split(BETWEEN)))
    return WildType(sequence.replace(BETWEEN, ""), tuple(before))


def name_of(mutations: tuple[Mutation, ...], protein: str = "") -> str:
    """Return the name of a variant: its mutations as `A24G:V30L`, or `WT` without mutations. In a table of several
    proteins, the protein's name and `/` are put in front.
    """
    return (f"{protein}/" if protein else "") + (":".join(map(str, mutations)) or "WT")


def parse_name(name: str) -> tuple[str, tuple[Mutation, ...]]:
    """Return the protein, or an empty text, and the mutations of a result of `name_of`.

    >>> protein, mutations = parse_name("1A32.pdb/A24G:V30del")
    >>> protein, name_of(mutations)
    ('1A32.pdb', 'A24G:V30del')
    """
    protein, _, variant = name.rpartition("/")
    return protein, parse_variant(variant)


def renumbered(mutations: tuple[Mutation, ...], shift: int) -> tuple[Mutation, ...]:
    """Add `shift` to the position of each mutation.

    >>> name_of(renumbered((Mutation(0, "M", "L"),), 23))
    'M24L'
    """
    return tuple(Mutation(m.position + shift, m.wild, m.mutant) for m in mutations)


def parse_variant(cell: str) -> tuple[Mutation, ...]:
    """Parse a cell of the mutation column. Return its mutations, sorted by position; () for the wild type. Raises
    `RefusedVariant` if the cell is empty, has another form, or changes a position twice.

    >>> [str(mutation) for mutation in parse_variant("p.[Val30Leu;Ala24Gly]")]
    ['A24G', 'V30L']
    >>> parse_variant("WT")
    ()
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
    mutations = tuple(sorted(itertools.chain.from_iterable(map(_changes, _JOINED.split(body)))))
    for mutation, following in itertools.pairwise(mutations):
        if mutation.position == following.position:
            raise RefusedVariant(f"{shown(cell)} changes position {mutation.position + 1} twice")
    return mutations


@functools.lru_cache(maxsize=1 << 16)
def _changes(word: str) -> tuple[Mutation, ...]:
    code = word.removeprefix("p.")
    if code.startswith("(") and code.endswith(")"):
        code = code[1:-1]
    if match := _INDEL.fullmatch(code):
        return _indel(word, *match.groups())
    match = _SUBSTITUTION.fullmatch(code)
    if match:
        before, number, after = match[1].upper(), match[2], match[3].upper()
        wild = _LETTER.get(before, before)
        mutant = wild if after == "=" else _LETTER.get(after, after)
        if wild in _WILD and (mutant in _MUTANT or mutant == wild):
            return (Mutation(int(number) - 1, wild, mutant),)
    raise RefusedVariant(f"{shown(word)} is no substitution")


def _indel(
    word: str, first: str, place: str, last: str | None, end: str | None, kind: str, new: str
) -> tuple[Mutation, ...]:
    """Return the mutations of an insertion or deletion. The letters of residues between `first` and `last` are not in
    the word, so `wild` is empty for these residues.
    """
    size, kind = len(first), kind.lower()  # one-letter or three-letter codes
    letters = [new[n : n + size].upper() for n in range(0, len(new), size)]
    inserted = "".join(_LETTER.get(letter, letter) for letter in letters)
    start, stop = int(place) - 1, int(end or place) - 1
    wild = [_LETTER.get(first.upper(), first.upper()), *[""] * (stop - start)]
    if last is not None and stop > start:
        wild[-1] = _LETTER.get(last.upper(), last.upper())
    if kind == "dup" and stop - start in (0, 1):
        start, wild, inserted = stop, wild[-1:], wild[-1] + "".join(wild)
    elif kind == "ins" and stop - start in (0, 1):
        wild, inserted = wild[:1], wild[0] + inserted
    elif not kind.startswith("del") or stop < start:
        raise RefusedVariant(f"{shown(word)} is no insertion between two neighbours, and no deletion")
    if (
        (kind in ("del", "dup")) != (not new)
        or len(new) % size
        or not set(inserted) <= _WILD
        or not set(wild) <= _WILD | {""}
    ):
        raise RefusedVariant(f"{shown(word)} has letters that are no residues, or lacks them")
    return tuple(Mutation(start + k, letter, "" if k else inserted) for k, letter in enumerate(wild))


def _common(a: str, b: str) -> int:
    """Return the length of the common start of two texts."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compare(sequence: str, wild_type: str, *, indels: bool = False) -> tuple[Mutation, ...]:
    """Return the mutations that turn `wild_type` into `sequence`. If the lengths differ and `indels` is true, the
    residues between the common start and the common end are replaced. A `:` between chains does not count.

    Raises `RefusedVariant` if the lengths differ and `indels` is false, or if `sequence` has a character that is no
    residue, such as a gap.

    >>> [str(mutation) for mutation in compare("MKV", "MKT")]
    ['T3V']
    >>> name_of(compare("MKAAT", "MKT", indels=True)), name_of(compare("MT", "MKAT", indels=True))
    ('K2insAA', 'K2del:A3del')
    """
    text = "".join(sequence.split()).replace(BETWEEN, "")
    if len(text) == len(wild_type) + 1 or indels:
        text = text.removesuffix(STOP)
    if len(text) != len(wild_type) and not (indels and text):
        raise RefusedVariant(f"{shown(sequence)} has {counted(len(text), 'residue')}, the wild type {len(wild_type):,}")
    if not text.isascii():  # `upper` turns some of the other letters into two letters.
        raise RefusedVariant(f"{shown(sequence)} is no sequence in one-letter codes")
    text = text.upper()
    if len(text) != len(wild_type):
        start = _common(wild_type, text)
        end = _common(wild_type[start:][::-1], text[start:][::-1])
        replaced, inserted = wild_type[start : len(wild_type) - end], text[start : len(text) - end]
        if not replaced:  # an insertion; the residue before it, or the first residue, is a part of the mutation
            anchor = max(start - 1, 0)
            replaced = wild_type[anchor]
            inserted, start = (replaced + inserted if start else inserted + replaced), anchor
        mutations = tuple(Mutation(start + k, letter, "" if k else inserted) for k, letter in enumerate(replaced))
    else:
        differ_L = np.frombuffer(text.encode(), np.uint8) != np.frombuffer(wild_type.encode(), np.uint8)
        mutations = tuple(Mutation(k, wild_type[k], text[k]) for k in np.flatnonzero(differ_L).tolist())
    for mutation in mutations:
        if strange := set(mutation.mutant) - _MUTANT:
            raise RefusedVariant(f"{shown(min(strange))} at position {mutation.position + 1} is not one residue")
    return mutations
