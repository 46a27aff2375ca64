"""FASTA files whose "sequences" are labels: FLIP's `sampled.fasta` (one letter a residue) and `mask.fasta` (0 and 1).

The letters are no residues, so they stay as written: only white space, blank lines and a byte-order mark are removed.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from Bio.SeqIO.FastaIO import SimpleFastaParser

from esmshard.data.fasta.headers import id_of
from esmshard.data.fasta.sources import ConvertedSource, open_source
from esmshard.data.fasta.symbols import BLANKS
from esmshard.data.tables import readable, shown
from esmshard.errors import InputError

_NO_BLANKS = str.maketrans("", "", BLANKS.decode())


@dataclass(frozen=True)
class LabelRecord:
    """The labels of one protein, as written in the file."""

    id: str
    header: str
    """The whole header line without `>`."""
    text: str
    """The labels without white space."""
    line: int
    """Line of the header, counted from 1."""


def read_label_fasta(path: Path) -> Iterator[LabelRecord]:
    """Read the records of a label file in file order, plain or compressed (gz, bz2, xz, zst). Ids may come twice.

    Args:
        path: the file.

    Raises:
        InputError: the file cannot be read or has no record, or a table has rows without a sequence; the
            message names file and line.
    """
    lines: deque[int] = deque()  # lines of headers that the parser has read and not yet returned
    none_yet = True
    with (
        readable(path, "a FASTA file of labels"),
        open_source(path) as stream,
        TextIOWrapper(stream, encoding="utf-8-sig") as handle,
    ):
        converted = stream if isinstance(stream, ConvertedSource) else None
        if converted is not None and converted.edits.counts:
            raise InputError(
                f"{path}: {converted.edits.notices()[0]}; fill in what is missing, or remove these records"
            )
        parser = SimpleFastaParser(_checked(handle, path, lines))  # type: ignore[no-untyped-call]
        for header, raw in parser:
            none_yet = False
            line, record_id, text = lines.popleft(), id_of(header), raw.translate(_NO_BLANKS)
            line = line if converted is None else converted.line_in_file(line)
            if not text:
                raise InputError(f"{path}:{line}: record {shown(record_id)} has no labels; write them, or remove it")
            yield LabelRecord(record_id, header.strip(), text, line)
    if none_yet:
        raise InputError(f"{path}: holds no record; a FASTA file of labels has lines that begin with '>'")


def _checked(handle: TextIO, path: Path, lines: deque[int]) -> Iterator[str]:
    """Yield the lines from the first header on. Text before it is refused, since the parser would skip it silently."""
    started = False
    for number, line in enumerate(handle, 1):
        if line.startswith(">"):
            if not line[1:].strip():
                raise InputError(f"{path}:{number}: a record without an id; write the id of its protein after '>'")
            started = True
            lines.append(number)
            yield line
        elif started:
            yield line
        elif line.strip():
            raise InputError(f"{path}:{number}: text before the first '>'; a record begins with '>ID'")
