"""Whether sequences are DNA or RNA. All letters of nucleotides are residues too, so that no single one gives them away.

Records are taken for nucleotides if they have LETTERS letters together, SHARE of these are A, C, G, T, U or N, and each
of A, C, G and T (or U) is at least EACH of those that are not N. Proteins have a quarter of these letters, and the odd
one that has more, of alanine, glycine and threonine, has next to no cysteine; one that is shorter than LETTERS may well
be made of them.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from esmshard.vocab import RESIDUES, TOKENS

LETTERS, SHARE, EACH = 100, 0.95, 0.05
LOOKED_AT = 10_000
"""Records of a larger input that are looked at, evenly spread."""


class Records(Protocol):
    """Residue tokens of each record; a `TokenStore` is one."""

    def __len__(self) -> int: ...

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Of record n, uint8 [L]."""


def finding(tokens: Iterable[npt.NDArray[np.uint8]], count: str) -> str | None:
    """What gives sequences away as DNA or RNA, in a clause; None if nothing does.

    >>> from esmshard.vocab import encode
    >>> print(finding([encode("MKTAYIAKQR" * 12)[1:-1]], "1 record"))
    None
    >>> print(finding([encode("ATGGCCAATTCG" * 10)[1:-1]], "1 record"))
    1 record of DNA or RNA, as it seems (100% of the letters are A, C, G, T, U or N), where proteins are expected

    Args:
        tokens: residues of each sequence.
        count: how many there are, for the clause.
    """
    counts = np.zeros(len(TOKENS), np.int64)
    for one in tokens:
        counts += np.bincount(one, minlength=len(TOKENS))
    of = {letter: int(counts[TOKENS.index(letter)]) for letter in RESIDUES}
    total = sum(of.values())
    acgt = [of["A"], of["C"], of["G"], of["T"] + of["U"]]
    if total < LETTERS or sum(acgt) + of["N"] < SHARE * total or min(acgt) < EACH * sum(acgt):
        return None
    share = (sum(acgt) + of["N"]) / total
    return (
        f"{count} of DNA or RNA, as it seems ({100 * share:.0f}% of the letters are A, C, G, T, U or N), where "
        "proteins are expected"
    )


def some(records: Records) -> Iterator[npt.NDArray[np.uint8]]:
    """Residue tokens of LOOKED_AT records, evenly spread; of all if there are no more."""
    for n in np.unique(np.linspace(0, len(records) - 1, min(len(records), LOOKED_AT)).astype(np.int64)).tolist():
        yield records.residues(n)
