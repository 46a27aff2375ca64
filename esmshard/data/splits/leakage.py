"""Finds what a test set shares with the training set: identical sequences, similar sequences, or changed positions.

*Proteins* (function `check`) are compared by common 5-mers, without an alignment. A test record is similar to a
training record if the training record has at least the share `SIMILAR` (0.2) of the test record's distinct 5-mers, and
at least `FEWEST` of them. If two proteins have a share p of identical residues, about p**5 of their 5-mers are common:
a share of 0.2 means 72% identity. CD-HIT uses 5-mers for 70% identity and more (Li and Godzik 2006). By chance, about 3
of 100 pairs of unrelated proteins with 300 residues have a common 5-mer (300 * 300 / 20**5). So the check finds
near-duplicates and close homologs. Remote homologs (at 30% identity, 0.2% of the 5-mers are common) need an alignment
search, such as `mmseqs easy-search -s 7.5 -e 1e-3`.

*Variants of one protein* (function `variant_notices`) are all similar. A test variant is easy to predict if training
variants change the same positions.

*Pairs of proteins* (function `pair_notices`) are in the classes of Park and Marcotte (2012, doi:10.1038/nmeth.2259). In
class C1, both sequences of a test pair are in training pairs; in class C2, one sequence; in class C3, no sequence.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.io.tables import counted, shown
from esmshard.vocab import STANDARD, chain_spans, encode_residues

K = 5
SIMILAR = 0.2
FEWEST = 4
MOST = 100_000_000
"""A check reads at most this number of training residues, and counts at most this number of pairs of equal 5-mers (30
seconds on one core).
"""

_WORDS = len(STANDARD) ** K
_CODE = np.full(256, -1, dtype=np.int32)
_CODE[np.frombuffer(encode_residues(STANDARD), dtype=np.uint8)] = np.arange(len(STANDARD))
_BLOCK = 200_000
"""The approximate number of residues that are compared at a time."""
_INDEXED = 10_000_000
"""A check compares at most this number of residues from sets other than `train`. Sorting their 5-mers needs 300 MB."""
_SAMPLE = 500
_BLIND = "similar: one training record has a fifth of the 5-mers; this does not find remote homologs"

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ComparedRecords:
    """A set of N records, such as a part of a token store."""

    count: int
    residues: Callable[[int], npt.NDArray[np.uint8]]
    """Returns the residues of record n as tokens, uint8 [L]."""
    id: Callable[[int], str]

    def part(self, number_M: _Ints) -> "ComparedRecords":
        """Return a set with the M records that have the indices `number_M`. Their new indices are 0 to M - 1."""
        return ComparedRecords(
            len(number_M), lambda n: self.residues(int(number_M[n])), lambda n: self.id(int(number_M[n]))
        )

    def about(self) -> float:
        """Estimate the total number of residues from a sample of records."""
        lengths = [len(self.residues(int(n))) for n in _spread(self.count, _SAMPLE)]
        return sum(lengths) / max(1, len(lengths)) * self.count

    def words(self) -> Iterator[tuple[int, _Ints, _Ints]]:
        """Yield the distinct 5-mers (words) of all records, in blocks of about `_BLOCK` residues.

        For each block, yield the index of its first record, and two sorted arrays for its P words, int64 [P]: the
        index of the record in the block, and the word as a number. Words have only the 20 standard amino acids.
        """
        first, block, size = 0, [], 0
        end = np.zeros(K, dtype=np.uint8)  # 0 is <cls>, which is no amino acid. So no word spans two records.
        for n in range(self.count):
            block.append(self.residues(n))
            size += len(block[-1])
            if size >= _BLOCK or n + 1 == self.count:
                letter_T = _CODE[np.concatenate([part for residues in block for part in (residues, end)])]
                letter_TK = np.lib.stride_tricks.sliding_window_view(letter_T, K)
                record_T = np.repeat(np.arange(len(block)), [len(residues) + K for residues in block])[: len(letter_TK)]
                word_T = letter_TK @ len(STANDARD) ** np.arange(K - 1, -1, -1)
                key_P = (record_T * _WORDS + word_T)[(letter_TK >= 0).all(1)]
                key_P.sort()  # Sorting and comparing neighbours is 40 times as fast as `np.unique`.
                key_P = key_P[np.diff(key_P, prepend=-1) > 0]
                yield first, key_P // _WORDS, key_P % _WORDS
                first, block, size = n + 1, [], 0


@dataclass(frozen=True)
class Overlap:
    """Counts of the records of a set, such as the test set, that are identical or similar to training records."""

    records: int
    identical: int
    """The number of records with the sequence of a training record."""
    compared: int
    """The number of records whose 5-mers were compared: all records, or an evenly spread sample."""
    similar: int = 0
    """The number of compared records that are similar, but not identical, to a training record."""
    closest: list[tuple[str, str, float]] = field(default_factory=list)
    """For up to three records, most similar first: the id of the record, the id of a training record, and the share of
    the record's 5-mers that the training record has too.
    """


@dataclass(frozen=True)
class Leakage:
    """The result of the function `check`: the overlap of each other set with the training set, by set name."""

    train_records: int
    train_compared: int
    overlaps: dict[str, Overlap]

    def notices(self, what: str = "records") -> list[str]:
        """Return a sentence for each set with records that are identical or similar to training records, and one
        sentence about all sets without such records. `what` is the plural noun for the records.
        """
        sampled = self.train_compared < self.train_records
        train = f"{self.train_compared:,} of {self.train_records:,} training" if sampled else "training"
        leaks, clean = [], []
        for name, o in self.overlaps.items():
            count = f"{o.records:,} {name} {what}"
            if o.compared < o.records:
                count += f" ({o.compared:,} of them compared in full)"
            if not (o.identical or o.similar):
                clean.append(count)
                continue
            pairs = ", ".join(f"{record} and {other} {share:.0%}" for record, other, share in o.closest)
            leaks.append(
                f"leakage: of {count} {o.identical:,} are identical and {o.similar:,} similar to {train} {what} "
                f"({pairs}; {_BLIND})"
            )
        if clean:
            leaks.append(f"leakage: none of {' and '.join(clean)} is identical or similar to {train} {what} ({_BLIND})")
        return leaks


def check(train: ComparedRecords, others: Mapping[str, ComparedRecords], most: int = MOST) -> Leakage:
    """Compare the sets `others` with the training set. If the training set has more than about `most` residues, only a
    sample is compared. If the other sets have more than about `_INDEXED` residues, or more than about `most` pairs of
    equal 5-mers with the training set, only samples of them are compared by 5-mers.
    """
    total = train.count
    if train.about() > most:
        train = train.part(_spread(total, int(most / train.about() * total)))
    partner = first_identical(train, list(others.values()))
    share = min(1.0, _INDEXED / max(1.0, sum(records.about() for records in others.values())))
    numbers = [_spread(records.count, int(share * records.count)) for records in others.values()]
    has_WQ = _index([records.part(number_M) for records, number_M in zip(others.values(), numbers, strict=True)])
    sample, with_word_W = train.part(_spread(train.count, _SAMPLE)), np.diff(has_WQ.indptr)
    pairs = sum(int(with_word_W[word_P].sum()) for _, _, word_P in sample.words()) * train.count / max(1, sample.count)
    if pairs > most:
        kept = [_spread(len(number_M), int(most / pairs * len(number_M))) for number_M in numbers]
        first = np.cumsum([0, *map(len, numbers)])
        has_WQ = has_WQ[:, np.concatenate([k + m for k, m in zip(first, kept, strict=False)])]
        numbers = [number_M[m] for number_M, m in zip(numbers, kept, strict=True)]
    share_Q, nearest_Q = _nearest(has_WQ, train)
    overlaps, start = {}, 0
    for (name, records), partner_N, number_M in zip(others.items(), partner, numbers, strict=True):
        share_M, nearest_M = (array_Q[start : start + len(number_M)] for array_Q in (share_Q, nearest_Q))
        start += len(number_M)
        related = [(1.0, int(n), int(partner_N[n])) for n in np.flatnonzero(partner_N >= 0)]
        close = np.flatnonzero((share_M > 0) & (partner_N[number_M] < 0))
        related += [(float(share_M[m]), int(number_M[m]), int(nearest_M[m])) for m in close]
        related.sort(key=lambda pair: -pair[0])
        closest = [(records.id(n), train.id(other), share) for share, n, other in related[:3]]
        identical = int((partner_N >= 0).sum())
        overlaps[name] = Overlap(records.count, identical, len(number_M), len(close), closest)
    return Leakage(total, train.count, overlaps)


def variant_notices(names: Sequence[str], positions: Sequence[frozenset[Any]], sets: Mapping[str, _Ints]) -> list[str]:
    """Return sentences about variants and positions of each set that are also in the set `train`. `sets` has the
    variant indices of each set.
    """
    train = sets["train"].tolist()
    trained, changed = {names[n] for n in train}, frozenset().union(*(positions[n] for n in train))
    leaks, clean = [], []
    for set_name in [name for name in sets if name != "train"]:
        numbers = sets[set_name].tolist()
        identical = sum(names[n] in trained for n in numbers)
        every_position = sum(bool(positions[n]) and positions[n] <= changed for n in numbers)
        any_position = sum(not positions[n].isdisjoint(changed) for n in numbers)
        count = f"{len(numbers):,} {set_name} variants"
        if not (identical or any_position):
            clean.append(count)
            continue
        leaks.append(
            f"leakage: of {count} {identical:,} are training variants, {every_position:,} change only positions that "
            f"training variants change, and {any_position:,} change at least one such position"
        )
    if clean:
        leaks.append(f"leakage: none of {' and '.join(clean)} changes a position that training variants change")
    return leaks


def _spread(count: int, most: int) -> _Ints:
    """Return up to `most` (at least 1) evenly spread numbers from 0 to `count` - 1."""
    kept = min(count, max(1, most))
    return np.arange(kept, dtype=np.int64) * count // max(1, kept)


def word_pairs(records: ComparedRecords) -> Iterator[tuple[int, int]]:
    """Yield the indices of each pair of records with a common 5-mer, smaller index first."""
    for first, shared in _shared(records, _index([records])):
        later = shared.col > shared.row + first
        yield from zip((shared.row[later] + first).tolist(), shared.col[later].tolist(), strict=True)


def first_identical(train: ComparedRecords, others: Sequence[ComparedRecords]) -> list[_Ints]:
    """Return an array for each of the sets `others`, int64 [N]: for each record, the index of the first training record
    with the same sequence; -1 if there is none.
    """
    distinct_U, first_U = np.unique(hashes(train), return_index=True)
    if not len(distinct_U):
        return [np.full(records.count, -1, dtype=np.int64) for records in others]
    partners = []
    for hash_N in map(hashes, others):
        at_N = np.minimum(np.searchsorted(distinct_U, hash_N), len(distinct_U) - 1)
        partners.append(np.where(distinct_U[at_N] == hash_N, first_U[at_N], -1))
    return partners


def hashes(records: ComparedRecords) -> npt.NDArray[np.uint64]:
    """Return the hash of the sequence of each record (function `key`), uint64 [N]."""
    return np.array([key(records.residues(n)) for n in range(records.count)], dtype=np.uint64)


def _index(sets: Sequence[ComparedRecords]) -> Any:
    """Return a sparse matrix, [words, Q], with 1 for each 5-mer of each of the Q records of all sets."""
    first, words, records = 0, [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int32)]
    for part in sets:
        for start, record_P, word_P in part.words():
            words.append(word_P.astype(np.int32))
            records.append((record_P + first + start).astype(np.int32))
        first += part.count
    return _ones(np.concatenate(words), np.concatenate(records), (_WORDS, first))


def _shared(records: ComparedRecords, has_WQ: Any) -> Iterator[tuple[int, Any]]:
    """Count the common 5-mers of each record and each of Q indexed records. `has_WQ` is the result of `_index`. Yield
    for each block of B records the index of its first record, and a sparse matrix with the counts, [B, Q].
    """
    for first, record_P, word_P in records.words():
        yield first, (_ones(record_P, word_P, (int(record_P.max(initial=-1)) + 1, _WORDS)) @ has_WQ).tocoo()


def _nearest(has_WQ: Any, train: ComparedRecords) -> tuple[npt.NDArray[np.float64], _Ints]:
    """Find the most similar training record for each of Q indexed records. `has_WQ` is the result of `_index`. Return
    the share of common 5-mers, float64 [Q], and the training record's index, int64 [Q]; 0 and -1 if none is similar.
    """
    size_Q = has_WQ.sum(0)
    share_Q, nearest_Q = np.zeros(len(size_Q)), np.full(len(size_Q), -1, dtype=np.int64)
    least_Q = np.maximum(FEWEST, np.ceil(SIMILAR * size_Q - 1e-9))
    for first, shared in _shared(train, has_WQ):
        enough = shared.data >= least_Q[shared.col]
        other, mine = shared.row[enough] + first, shared.col[enough]
        share = shared.data[enough] / size_Q[mine]
        # The assignment keeps the last value for an index, so the highest share and the first record come last.
        order = np.lexsort((-other, share))
        order = order[share[order] > share_Q[mine[order]]]
        share_Q[mine[order]], nearest_Q[mine[order]] = share[order], other[order]
    return share_Q, nearest_Q


def _ones(rows: npt.NDArray[Any], columns: npt.NDArray[Any], shape: tuple[int, int]) -> Any:
    """Return a sparse matrix with 1 at each position (row, column). No position may occur twice."""
    from scipy.sparse import csr_array

    return csr_array((np.ones(len(rows), dtype=np.int32), (rows, columns)), shape=shape)


CLASSES = ("C3", "C2", "C1")
"""The class of a test pair by the number of its sequences that are in training pairs: 0, 1 or 2."""


def two_chains(residues: npt.NDArray[Any], record_id: str, path: Path | None = None) -> list[tuple[int, int]]:
    """Return the begin and the end (exclusive) of both chains in the tokens of a record. Raises `InputError` if the
    record does not have two chains.
    """
    spans = chain_spans(residues)
    if len(spans) != 2:
        record = f"{'' if path is None else f'{path}: '}record {shown(record_id)}"
        raise InputError(f"{record} has {counted(len(spans), 'chain')}, and a pair has two; write its sequence as A:B")
    return spans


def key(residues: npt.NDArray[np.uint8]) -> np.uint64:
    """Hash a sequence to 64 bits. Among a million sequences, two hashes are equal with probability 1 / 37 million."""
    return np.uint64(int.from_bytes(hashlib.blake2b(residues.tobytes(), digest_size=8).digest(), "little"))


def pair_notices(train: ComparedRecords, others: Mapping[str, ComparedRecords], most: int = MOST) -> list[str]:
    """Return sentences about the sets `others`: how many of their pairs and sequences are in `train`, and how many
    sequences are similar to sequences in `train`. For `most` see the function `check`.
    """
    train_N2, single = _distinct(train)
    trained, pairs = {sequence for pair in train_N2 for sequence in pair}, {frozenset(pair) for pair in train_N2}
    notices, singles = [], {}
    for name, records in others.items():
        key_N2, singles[name] = _distinct(records)
        count = Counter(CLASSES[sum(sequence in trained for sequence in pair)] for pair in key_N2)
        same = sum(frozenset(pair) in pairs for pair in key_N2)
        notices.append(
            f"leakage: of {counted(len(key_N2), f'{name} pair')} {same:,} are training pairs, in either order; "
            f"{count['C1']:,} have both sequences in training pairs (C1), {count['C2']:,} one of them (C2) and "
            f"{count['C3']:,} none (C3)"
        )
    return notices + check(single, singles, most).notices("sequences")


def _distinct(records: ComparedRecords) -> tuple[list[tuple[int, int]], ComparedRecords]:
    """Return the hashes of both sequences of each pair, and a set with each distinct sequence as one record."""
    keys: list[tuple[int, int]] = []
    chains: dict[int, tuple[npt.NDArray[np.uint8], str]] = {}
    for n in range(records.count):
        residues, record_id = records.residues(n), records.id(n)
        parts = [residues[slice(*span)] for span in two_chains(residues, record_id)]
        keys.append((int(key(parts[0])), int(key(parts[1]))))
        for place, (sequence_key, part) in enumerate(zip(keys[-1], parts, strict=True), 1):
            chains.setdefault(sequence_key, (part, f"chain {place} of {record_id}"))
    distinct = list(chains.values())
    return keys, ComparedRecords(len(distinct), lambda k: distinct[k][0], lambda k: distinct[k][1])
