"""Recognition of files that are no FASTA files, by their first bytes, since names are often wrong."""

import re

_SAVE = "save it as plain text, with '>ID' before each sequence"
_NAME = "the standard input has FASTA alone, so name the file"
_BEGINS: tuple[tuple[bytes, str, str], ...] = (
    (b"LOCUS ", "a GenBank file", _NAME),
    (b"ID   ", "an EMBL or UniProt text file", "download the proteins as FASTA, or, from UniProt, name the file"),
    (b"data_", "an mmCIF structure", "give the FASTA file of its chains, or, for contacts, the directory it lies in"),
    (b"{\\rtf", "an RTF document", _SAVE),
    (b"%PDF", "a PDF document", _SAVE),
    (b"\xd0\xcf\x11\xe0", "an old Word or Excel document", _SAVE),
    (b"CLUSTAL", "a Clustal alignment", _NAME),
    (b"# STOCKHOLM", "a Stockholm alignment", _NAME),
    (b"#NEXUS", "a NEXUS file", "convert it to FASTA"),
    (b"HMMER", "an HMMER profile", "give the FASTA file that it was made of"),
    (b"##gff", "a GFF annotation", "give the FASTA file of its proteins"),
    (b"<?xml", "an XML file", "download the sequences as FASTA, or, from UniProt, name the file"),
    (b"<!DOCTYPE html", "a web page", "look at it in a browser, and download the FASTA file itself"),
    (b"<html", "a web page", "look at it in a browser, and download the FASTA file itself"),
    (b"\x89HDF", "an HDF5 file", "give the FASTA file that it was made of"),
    (b"\x93NUMPY", "an .npy array", "give the FASTA file that it was made of"),
    (b"PAR1", "a Parquet table", "let its name end in .parquet"),
    (b"SQLite format 3", "an SQLite database", "write its sequences to a FASTA file"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it"),
    (b"Rar!", "a RAR archive", "unpack it"),
)
_PDB = re.compile(rb"(HEADER|TITLE |COMPND|REMARK|CRYST1|SEQRES|MODEL |ATOM  |HETATM)[ \d]")
_FASTQ = re.compile(rb"@\S[^\r\n]*\r?\n[A-Za-z]+\r?\n\+")
_ONE_SEQUENCE = re.compile(rb"[A-Za-z*\-\s]+")
_ZIPPED = ((b"word/", "a Word document", _SAVE), (b"xl/", "an Excel workbook", "let its name end in .xlsx"))


def kind_of(head: bytes) -> tuple[str, str] | None:
    r"""Recognise a file that is no FASTA file: what it is and what to do about it. None if the kind is not known.

    Args:
        head: the first bytes of the file, without leading blanks; some thousand bytes are enough.

    >>> kind_of(b"@read1\nACGT\n+\nIIII\n")
    ('a FASTQ file of sequencing reads', 'give the FASTA file of the proteins')
    """
    if head.startswith(b"PK\x03\x04"):
        inside = ((what, fix) for name, what, fix in _ZIPPED if name in head)
        return next(inside, ("a zip archive", "unpack it"))
    for begin, what, fix in _BEGINS:
        if head[: len(begin)].lower() == begin.lower():
            return what, fix
    if _PDB.match(head):
        return "a PDB structure", "give the FASTA file of its chains, or, for contacts, the directory it lies in"
    if _FASTQ.match(head):
        return "a FASTQ file of sequencing reads", "give the FASTA file of the proteins"
    return None


def text_without_headers(text: bytes) -> str | None:
    r"""Recognise text that has no line with `>`: what it looks like and what to do about it. None if this is not known.

    >>> text_without_headers(b"MKTAYIAK\nQRQISF")
    "a sequence without a header; write '>' and an id into a line before it"
    """
    if re.search(rb"^>", text.replace(b"\r", b"\n"), re.MULTILINE):
        return None
    first, _, _ = text.partition(b"\n")
    if re.match(rb"[^;,\t#][^;,\t]*[;,\t]", first):  # A line that begins with ';' is a comment of old FASTA files.
        return "a table; give a file whose name ends in .csv or .tsv, and call its column of sequences 'sequence'"
    if _ONE_SEQUENCE.fullmatch(text[:4096]) and len(first.split()) == 1:
        return "a sequence without a header; write '>' and an id into a line before it"
    return None
