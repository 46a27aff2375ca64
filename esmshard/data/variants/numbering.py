"""The numbering of a mutation table, compared with the sequence of the wild type.

Tables often count from the start of the mature protein, of a construct or of a crystal structure instead of residue 1
of the sequence. A wrong shift of positions would go unnoticed without the wild-type letters, so each letter is
compared.
"""

import functools
from collections import Counter
from itertools import chain
from typing import Literal

import numpy as np

from esmshard.data.tables import Table, counted, first_three
from esmshard.data.variants.substitutions import Mutation, renumbered
from esmshard.errors import InputError

_ENOUGH = 0.99  # share of the mutations that must fit a shift of the numbering
_FEWEST = 5  # sites for a shift without being asked: fewer fit some shift by chance (a letter matches one time in 17)
_TOLD = 3  # sites for a shift that the user is told of


class Misnumbered(InputError):
    """Mutations name other residues than the wild type has at these positions."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")
        self._problem, self._fix = problem, fix

    def spelled(self, option: str) -> str:
        """Return the message for a user who sets the offset by `option`, such as `--offset ` or `data.offset=`."""
        fix = self._fix.replace("or offset", f"or {option.rstrip('= ')}").replace("offset=", option)
        return f"{self._problem}; {fix}"


def placed(
    table: Table,
    parsed: dict[int, tuple[Mutation, ...]],
    protein: str,
    protein_name: str,
    offset: int | Literal["auto"],
    notices: list[str],
    left_out: dict[int, str],
    most_misfits: float = 0.0,
) -> tuple[dict[int, tuple[Mutation, ...]], int]:
    """Renumber the variants as the wild type, check each mutation against it, and return the number added to their
    positions too.

    Args:
        table: the table of the variants.
        parsed: the variant in each row, in the numbering of the table.
        protein: the wild type.
        protein_name: name of the wild type in messages.
        offset: number added to the positions of the table. "auto" takes the only shift that fits five sites or more.
        notices: gets a sentence if "auto" shifts, or variants are left out.
        left_out: gets the reason for each row that is left out.
        most_misfits: share of the variants that may have a mutation that does not fit; these variants are left out.

    Raises:
        Misnumbered: mutations do not fit; the message has the first three of them, or the shift that would fit.
    """
    counts = Counter(chain.from_iterable(parsed.values()))
    shift = 0 if offset == "auto" else offset

    def fits(mutation: Mutation, shift: int) -> bool:
        place = mutation.position + shift
        return 0 <= place < len(protein) and protein[place] == mutation.wild

    def misfit(mutation: Mutation) -> str:
        place = mutation.position + shift
        inside = 0 <= place < len(protein)
        return f"{mutation} ({f'{protein[place]} is there' if inside else 'outside'})"

    def named(row: int, mutation: Mutation) -> str:
        return f"{table.at(row)} {misfit(mutation)}"

    def wrong() -> list[tuple[int, Mutation]]:
        such = {mutation for mutation in counts if not fits(mutation, shift)}
        return [(row, m) for row, mutations in parsed.items() for m in mutations if m in such] if such else []

    total, misfits, auto_failed = counts.total(), wrong(), ""
    if misfits:
        best, fit, sites = _best_shift(counts, protein)
        how = "as numbered" if shift == 0 else f"with offset={shift}"
        changed = [mutations for mutations in parsed.values() if mutations]
        now_rows, best_rows = (
            sum(all(map(functools.partial(fits, shift=by), mutations)) for mutations in changed) for by in (shift, best)
        )
        fitting = (
            f"{now_rows:,} of {counted(len(changed), 'row')} fit {protein_name} {how}, {best_rows:,} fit when shifted "
            f"by {best:+d}"
        )
        if offset == "auto" and sites >= _FEWEST and best != shift and fit >= min(_ENOUGH, 1 - most_misfits) * total:
            notices.append(f"{table.path}: {fitting}, which was done")
            shift = best
            misfits = wrong()
        elif sites >= _TOLD and best != shift and fit > max(total - len(misfits), total / 2):
            raise Misnumbered(f"{table.path}: {fitting}", f"pass offset={best}, or fix {named(*misfits[0])}")
        elif offset == "auto" and best != shift:
            auto_failed = ", and no other shift fits clearly better"
    bad = {row for row, _ in misfits}
    if misfits and len(bad) <= most_misfits * len(parsed):
        some = first_three(misfits, lambda misfit: named(*misfit))
        notices.append(
            f"{table.path}: left out {counted(len(bad), 'row')} with another residue than {protein_name} has: {some}"
        )
        for row, mutation in reversed(misfits):  # If a row has several misfits, the first is kept.
            left_out[row] = f"{misfit(mutation)}, another residue than the wild type has"
        parsed = {row: mutations for row, mutations in parsed.items() if row not in bad}
    elif misfits:
        with_shift = f" shifted by {shift:+d}" if shift else ""
        some = first_three(misfits, lambda misfit: named(*misfit))
        raise Misnumbered(
            f"{table.path}: {len(misfits):,} of {total:,} mutations{with_shift} do not fit {protein_name} "
            f"of {counted(len(protein), 'residue')}{auto_failed}: {some}",
            "correct them, the wild type or offset",
        )
    if shift == 0:
        return parsed, 0
    return {row: renumbered(mutations, shift) for row, mutations in parsed.items()}, shift


def _best_shift(counts: Counter[Mutation], protein: str) -> tuple[int, int, int]:
    """Return the shift that the most mutations fit, how many fit, and how many different sites these have: 0 if another
    shift fits more than half as many sites.
    """
    sites: Counter[tuple[int, str]] = Counter()
    for mutation, count in counts.items():
        sites[mutation.position, mutation.wild] += count
    places = {letter: np.array([k for k, c in enumerate(protein) if c == letter], np.int64) for letter in set(protein)}
    lowest, highest = min(position for position, _ in sites), max(position for position, _ in sites)
    mutations_S = np.zeros(highest - lowest + len(protein), np.int64)  # for shifts -highest, -highest + 1, ...
    sites_S = np.zeros_like(mutations_S)
    for (position, wild), count in sites.items():
        if wild in places:
            mutations_S[places[wild] - position + highest] += count
            sites_S[places[wild] - position + highest] += 1
    best = int(mutations_S.argmax())
    others = np.delete(sites_S, best).max(initial=0)
    return best - highest, int(mutations_S[best]), int(sites_S[best]) if 2 * others <= sites_S[best] else 0
