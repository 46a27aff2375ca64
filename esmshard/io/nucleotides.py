"""Detection of DNA and RNA. All letters of nucleotides are residues too, so one letter alone proves nothing.

Records are taken for nucleotides if they have at least LETTERS letters together, a SHARE of these letters is A, C, G,
T, U or N, and each of A, C, G and T (or U) is at least the share EACH of those that are not N. In proteins a quarter of
the letters are among these. The rare protein that has more of them, from alanine, glycine and threonine, has almost no
cysteine. Fewer than LETTERS letters are not judged, since a short protein may consist of these letters.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from esmshard.vocab import RESIDUES, TOKENS

LETTERS, SHARE, EACH = 100, 0.95, 0.05
LOOKED_AT = 10_000
"""Most records that are looked at. Of a larger input, evenly spread records are taken."""


class NucleotideRecords(Protocol):
    """Residue tokens of each record. A `TokenStore` is one."""

    def __len__(self) -> int: ...

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the residue tokens of record n, uint8 [L]."""


def finding(tokens: Iterable[npt.NDArray[np.uint8]], count: str) -> str | None:
    """Describe in a clause why sequences seem to be DNA or RNA; None if they seem to be proteins.

    >>> from esmshard.vocab import encode
    >>> print(finding([encode("MKTAYIAKQR" * 12)[1:-1]], "1 record"))
    None
    >>> print(finding([encode("ATGGCCAATTCG" * 10)[1:-1]], "1 record"))
    1 record of DNA or RNA, as it seems (100% of the letters are A, C, G, T, U or N), where proteins are expected

    Args:
        tokens: residue tokens of each sequence.
        count: the number of sequences with its noun, for the clause.
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


def some(records: NucleotideRecords) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the residue tokens of at most LOOKED_AT records, evenly spread, uint8 [L] each."""
    for n in np.unique(np.linspace(0, len(records) - 1, min(len(records), LOOKED_AT)).astype(np.int64)).tolist():
        yield records.residues(n)
