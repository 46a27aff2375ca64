"""Records of FASTA files, and the messages about ids that come twice."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from esmshard.data.fasta.fasta_blocks import read_blocks
from esmshard.data.fasta.symbols import Edits, Rules, in_a_store, shown
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
    for block in read_blocks(path, edits, rules):
        end = 0
        for name, header, length in zip(block.ids, block.headers, block.lengths.tolist(), strict=True):
            tokens, end = block.tokens[end : end + length], end + length + 1
            if name in seen:
                if seen[name] != tokens:
                    raise InputError(repeated(name.decode(), [path]))
                edits.add(READ_ONCE, name.decode())
                continue
            seen[name] = tokens
            yield Record(name.decode(), header.strip().decode(), decode(np.frombuffer(tokens, np.uint8)))


READ_ONCE = "a record that came twice was read once"


def repeated(name: str, paths: Sequence[Path]) -> str:
    """Return the message about an id with two sequences in files that were read together."""
    return (
        f"{', '.join(map(str, paths))}: '{shown(name)}' comes twice with two sequences; rename one of the two, or "
        f"{in_a_store('--on-duplicate suffix')}"
    )
