"""Records of FASTA files, and the messages about ids that come twice."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from esmshard.data.fasta.advice import instead
from esmshard.data.fasta.fasta_blocks import occurrences, read_blocks
from esmshard.data.fasta.symbols import Edits, Rules, shown
from esmshard.errors import InputError
from esmshard.vocab import decode


@dataclass(frozen=True)
class Record:
    """One protein. Its sequence has letters of `vocab.RESIDUES` only, unless the rules keep gaps or masks."""

    id: str
    description: str
    """The whole header line without `>`."""
    sequence: str


def read_fasta(path: str | os.PathLike[str], edits: Edits | None = None, rules: Rules = Rules()) -> Iterator[Record]:  # noqa: B008  # frozen
    """Read the records of a FASTA file in file order, plain or compressed (gz, bgz, bz2, xz, zst; `-` is standard
    input).

    A record that comes twice with the same id and sequence is read once and counted; an id with two sequences is an
    error. The ids are kept in memory for this check; for more than some millions of records, make a token store.

    Args:
        path: the file.
        edits: collects what was changed.
        rules: what may be changed.

    Raises:
        InputError: the file cannot be read or has no record; the message names file, line, record and position.
    """
    path = Path(path)
    edits = Edits() if edits is None else edits
    seen: dict[bytes, bytes] = {}
    again: Counter[bytes] = Counter()
    for block in read_blocks(path, edits, rules):
        end = 0
        for name, header, length in zip(block.ids, block.headers, block.lengths.tolist(), strict=True):
            tokens, end = block.tokens[end : end + length], end + length + 1
            if name in seen:
                again[name] += 1
                if seen[name] != tokens:
                    raise InputError(repeated(name, [path], rules, again[name]))
                edits.add(READ_ONCE, name.decode())
                continue
            seen[name] = tokens
            yield Record(name.decode(), header.strip().decode(), decode(np.frombuffer(tokens, np.uint8)))


READ_ONCE = "a record that came twice was read once"


def repeated(name: bytes, paths: Sequence[Path], rules: Rules, place: int) -> str:
    """Write the message about an id with two sequences, with the lines of its first record and of a later one.

    Args:
        name: the id.
        paths: files that were read together.
        rules: the rules under which they were read.
        place: which of the later records of the id has another sequence, counted from 1.
    """
    record, where = shown(name.decode()), list(occurrences(paths, name, rules))
    advice = f"rename one of the two, or {instead(paths, '--on-duplicate suffix', rules)}"
    if place >= len(where):  # These are the standard input, or files that are gone.
        return f"{paths[0]}: '{record}' comes twice with two sequences; {advice}"
    (first, _), (second, line) = where[0], where[place]
    there = "" if first == second else f" in {first}"
    return f"{second}:{line}: '{record}' was used before{there} with another sequence; {advice}"
