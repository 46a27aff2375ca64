"""The sequences that the pairs of a test set share with the pairs of the training set.

A test is as hard as its pairs are new. Park and Marcotte (2012, doi:10.1038/nmeth.2259) divide them into classes: both
sequences are in training pairs (C1), one of them (C2), or none (C3). Sequences are the same if all their residues are.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.splits.leakage import MOST, ComparedRecords, check
from esmshard.data.tables import counted, shown
from esmshard.errors import InputError
from esmshard.vocab import chain_spans

CLASSES = ("C3", "C2", "C1")
"""The class of a pair, by how many of its two sequences training pairs have."""


def two_chains(residues: npt.NDArray[Any], record_id: str, path: Path | None = None) -> list[tuple[int, int]]:
    """Return begin and end of the two chains of a record.

    Args:
        residues: tokens without `<cls>` and `<eos>`.
        record_id: of the record, for the message.
        path: the file of the record.

    Raises:
        InputError: the record has one chain, or more than two.
    """
    found = chain_spans(residues)
    if len(found) != 2:
        raise InputError(
            f"{'' if path is None else f'{path}: '}record {shown(record_id)} has {counted(len(found), 'chain')}, and a "
            "pair has two; write its sequence as A:B, or give a table with two columns of sequences"
        )
    return found


def key(residues: npt.NDArray[np.uint8]) -> np.uint64:
    """Hash a sequence to 64 bits. Among a million sequences, two have one hash once in 37 million times."""
    return np.uint64(int.from_bytes(hashlib.blake2b(residues.tobytes(), digest_size=8).digest(), "little"))


def pair_notices(train: ComparedRecords, others: Mapping[str, ComparedRecords], most: int = MOST) -> list[str]:
    """Return sentences on what sets of pairs share with the training pairs: pairs, sequences, and close relatives.

    Args:
        train: the training pairs.
        others: the sets to compare with them, by name.
        most: see `leakage.check`.
    """
    train_N2, single = _distinct(train)
    seen, pairs = {one for two in train_N2 for one in two}, {frozenset(two) for two in train_N2}
    notices, singles = [], {}
    for name, records in others.items():
        two_N2, singles[name] = _distinct(records)
        count = Counter(CLASSES[sum(one in seen for one in two)] for two in two_N2)
        same = sum(frozenset(two) in pairs for two in two_N2)
        notices.append(
            f"leakage: of {counted(len(two_N2), f'{name} pair')} {same:,} are training pairs, in either order; "
            f"{count['C1']:,} have both sequences in training pairs (C1), {count['C2']:,} one of them (C2) and "
            f"{count['C3']:,} none (C3)"
        )
    return notices + check(single, singles, most).notices("sequences")


def _distinct(records: ComparedRecords) -> tuple[list[tuple[int, int]], ComparedRecords]:
    """Return the keys of the sequences of each pair, and every different sequence once."""
    keys: list[tuple[int, int]] = []
    places: dict[int, tuple[int, int]] = {}
    for n in range(records.count):
        residues = records.residues(n)
        spans = two_chains(residues, records.id(n))
        one, other = (int(key(residues[slice(*span)])) for span in spans)
        keys.append((one, other))
        places.setdefault(one, (n, 0))
        places.setdefault(other, (n, 1))
    chains = list(places.values())

    def residues_of(k: int) -> npt.NDArray[np.uint8]:
        n, chain = chains[k]
        residues = records.residues(n)
        return residues[slice(*chain_spans(residues)[chain])]

    def id_of(k: int) -> str:
        n, chain = chains[k]
        return f"chain {chain + 1} of {records.id(n)}"

    return keys, ComparedRecords(len(chains), residues_of, id_of)
