"""The match of residues with atoms to residues of SEQRES. mmCIF states it; for PDB an alignment finds it.

The alignments of gemmi and Biopython do not know residue numbers. Where unresolved residues lie in a repeat or in a tag
at the chain's end, they often choose a place that the numbers exclude.
"""

from collections.abc import Sequence

import numpy as np

MISMATCH, GAP, NUMBERED = -4, -3, 1
"""Score of a residue on another one, of a step that was not expected, and of a start where its number says."""
LARGEST = 10**8
"""Cells of the table of the alignment; four bytes each."""


def align_to_listed(
    observed: Sequence[str], listed: Sequence[str], steps: Sequence[int], first: int | None
) -> list[int]:
    """Return the place of each observed residue in the listed sequence, ascending. Every residue gets a place;
    unresolved ends cost nothing.

    Letters alone leave open where in a repeat the unresolved residues are, so each residue is tried first where a step
    from the one before leads to: 1 over a peptide bond, else the difference of their numbers.

    Args:
        observed: residues with atoms, N, not more than are listed.
        listed: all residues, M.
        steps: N - 1 expected steps, 1 or more.
        first: number of the first observed residue, counted from 1; SEQRES mostly counts so too.

    >>> align_to_listed("GGK", "MGGGGK", [1, 3], None)
    [1, 2, 5]
    """
    if not observed:
        return []
    codes = {symbol: code for code, symbol in enumerate(dict.fromkeys(listed))}
    listed_M = np.array([codes[symbol] for symbol in listed])
    observed_N = np.array([codes.get(symbol, -1) for symbol in observed])
    # Dynamic programming: the best score of residue n at place m follows from those of residue n - 1.
    n, m = len(observed_N), len(listed_M)
    score_NM = np.empty((n, m), dtype=np.int32)
    score_NM[0] = np.where(listed_M == observed_N[0], 0, MISMATCH)
    if first is not None and 1 <= first <= m:
        score_NM[0, first - 1] += NUMBERED
    for k, step in enumerate(steps, 1):
        forerunner_M = np.full(m, -(10**9), dtype=np.int32)  # nothing can stand before place 0
        forerunner_M[1:] = np.maximum.accumulate(score_NM[k - 1])[:-1] + GAP
        if step < m:
            forerunner_M[step:] = np.maximum(forerunner_M[step:], score_NM[k - 1, :-step])
        score_NM[k] = np.where(listed_M == observed_N[k], 0, MISMATCH) + np.maximum(forerunner_M, -(10**9))
    places = [int(np.argmax(score_NM[-1]))]
    for k in range(n - 1, 0, -1):
        before_M, straight = score_NM[k - 1, : places[-1]], places[-1] - steps[k - 1]
        nearest = len(before_M) - 1 - int(np.argmax(before_M[::-1]))
        expected = straight >= 0 and before_M[straight] >= before_M[nearest] + GAP
        places.append(straight if expected else nearest)
    return places[::-1]
