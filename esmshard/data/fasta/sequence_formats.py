"""Files of GenBank, UniProt and alignments of proteins that Biopython reads: their recognition, and their records."""

import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from esmshard.data.fasta.symbols import Edits, shown
from esmshard.data.tables import read_text
from esmshard.errors import InputError


@dataclass(frozen=True)
class SequenceFormat:
    """A format of files of sequences."""

    name: str
    """The name in `Bio.SeqIO`."""
    title: str
    head: re.Pattern[bytes]
    """The beginning of every file."""
    record: re.Pattern[str]
    """The beginning of the first line of a record. Of an alignment in blocks, later blocks match it, too."""


FORMATS = tuple(
    SequenceFormat(name, title, re.compile(head), re.compile(record, re.MULTILINE))
    for name, title, head, record in (
        ("genbank", "a GenBank file", rb"LOCUS ", r"^LOCUS "),
        ("swiss", "a UniProt text file", rb"ID   [^\r\n]* AA\.", r"^ID   "),
        ("uniprot-xml", "a UniProt XML file", rb"<\?xml[^>]*>\s*(<!--.*?-->\s*)?<uniprot[\s>]", r"<entry[\s>]"),
        ("stockholm", "a Stockholm alignment", rb"# STOCKHOLM", r"^[^#/\s]"),
        ("clustal", "a Clustal alignment", rb"CLUSTAL", r"^(?!CLUSTAL)\S"),
    )
)


@dataclass(frozen=True)
class FormatRecords:
    """The N records of a file, in file order."""

    headers: list[str]
    """The header of each record: its id and its description."""
    sequences: list[str]
    lines: list[int]
    """The line at which each record begins, counted from 1."""
    edits: Edits
    """What Biopython warned of."""


def format_of(head: bytes) -> SequenceFormat | None:
    r"""Recognise a format by the first bytes of a file, without leading blanks.

    >>> format_of(b"# STOCKHOLM 1.0\n").title, format_of(b">a\nMKT\n")
    ('a Stockholm alignment', None)
    """
    return next((known for known in FORMATS if known.head.match(head)), None)


def read_format(path: Path, kind: SequenceFormat) -> FormatRecords:
    """Read the proteins of a file, plain or compressed.

    Raises:
        InputError: the file cannot be read, a record has no sequence, or is DNA or RNA; the message names the line.
    """
    from Bio import SeqIO
    from Bio.Seq import UndefinedSequenceError

    text = read_text(path, kind.title).replace("\r\n", "\n").replace("\r", "\n")
    if kind.record.search(text) is None:  # Biopython reads a Clustal file without a record for ever.
        raise InputError(f"{path}: is {kind.title} without a record; download or make it again")
    edits, body = Edits(), text.lstrip()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # The reader of XML takes bytes, since such a file names its encoding. `read_text` has checked for UTF-8.
            source = io.BytesIO(body.encode()) if kind.name == "uniprot-xml" else io.StringIO(body)
            records = list(SeqIO.parse(source, kind.name))  # type: ignore[no-untyped-call]
    except Exception as error:  # The reader of each format has errors of its own.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: cannot be read as {kind.title} ({reason}); download or make it again") from None
    if not records:
        raise InputError(f"{path}: is {kind.title} without a record; download or make it again")
    for warning in warned:
        edits.add(f"Biopython warned of this: {' '.join(str(warning.message).split())}", path.name)
    starts = _lines(text, kind, len(records))
    headers, sequences, lines = list[str](), list[str](), list[int]()
    for record, line in zip(records, starts, strict=True):
        where = f"{path}:{line}: record '{shown(record.id)}'"
        molecule = record.annotations.get("molecule_type", "protein")
        if "protein" not in molecule.lower():
            raise InputError(f"{where} is {molecule}, and proteins are expected; download its proteins as FASTA")
        try:
            sequences.append("".join(str(record.seq).split()))
        except UndefinedSequenceError:
            raise InputError(f"{where} has no sequence in the file; download the file with sequences") from None
        described = "" if record.description in ("<unknown description>", record.id) else f" {record.description}"
        headers.append(" ".join(f"{record.id}{described}".split()))
        lines.append(line)
    return FormatRecords(headers, sequences, lines, edits)


def _lines(text: str, kind: SequenceFormat, count: int) -> list[int]:
    """Return the line at which each record begins."""
    lines, at, line = list[int](), 0, 1
    for found in kind.record.finditer(text):
        line, at = line + text.count("\n", at, found.start()), found.start()
        lines.append(line)
        if len(lines) == count:
            break
    return lines + lines[-1:] * (count - len(lines))
