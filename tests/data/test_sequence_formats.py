"""Files of GenBank, UniProt and alignments in place of FASTA files."""

import bz2
from pathlib import Path

import pytest

from esmshard.errors import InputError
from esmshard.io.sequences import is_plain, read_fasta
from esmshard.io.store import ingest
from esmshard.io.symbols import Edits

GENBANK = """\
LOCUS       NP_000001                 12 aa            linear   PRI 01-JAN-2020
DEFINITION  test protein [Homo sapiens].
ACCESSION   NP_000001
VERSION     NP_000001.1
ORIGIN
        1 mktayiakqr qi
//
LOCUS       NP_000002                  3 aa            linear   PRI 01-JAN-2020
DEFINITION  second.
ACCESSION   NP_000002
VERSION     NP_000002.7
ORIGIN
        1 mkt
//
"""
SWISS = """\
ID   HBA_TEST                Reviewed;          10 AA.
AC   P12345;
DE   RecName: Full=Hemoglobin test;
OS   Homo sapiens (Human).
SQ   SEQUENCE   10 AA;  1128 MW;  1234567890ABCDEF CRC64;
     MKTAYIAKQR
//
"""
XML = """\
<?xml version='1.0' encoding='UTF-8'?>
<uniprot xmlns="http://uniprot.org/uniprot">
<entry dataset="Swiss-Prot" created="1990-01-01" modified="2020-01-01" version="1">
<accession>P12345</accession><name>HBA_TEST</name>
<protein><recommendedName><fullName>Hemo</fullName></recommendedName></protein>
<sequence length="10" mass="1128" checksum="1" modified="1990-01-01" version="1">MKTAYIAKQR</sequence>
</entry>
</uniprot>
"""
STOCKHOLM = "# STOCKHOLM 1.0\n#=GF ID x\n\na/1-4  MK-T.A\nb/2-9  mkATTA\n#=GC SS_cons  xxxxxx\n//\n"
CLUSTAL = "CLUSTAL W (1.83) multiple sequence alignment\n\n\na     MK-TA\nb     MKATA\n\na     CC\nb     DD\n\n"
FILES = {
    "x.gbk": (GENBANK, [("NP_000001.1", "MKTAYIAKQRQI"), ("NP_000002.7", "MKT")]),
    "x.dat": (SWISS, [("P12345", "MKTAYIAKQR")]),
    "x.xml": (XML, [("P12345", "MKTAYIAKQR")]),
    "x.sto": (STOCKHOLM, [("a/1-4", "MKTA"), ("b/2-9", "MKATTA")]),
    "x.aln": (CLUSTAL, [("a", "MKTACC"), ("b", "MKATADD")]),
}


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


def read(path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    edits = Edits()
    return [(record.id, record.sequence) for record in read_fasta(path, edits)], edits.notices()


@pytest.mark.parametrize("name", FILES)
def test_records_are_read_whatever_the_name_the_line_ends_and_the_compression(name: str) -> None:
    text, expected = FILES[name]
    assert read(write(text, name))[0] == expected
    assert not is_plain(Path(name))
    store = ingest([Path(name)], Path("x.store"))
    assert [store.id(n) for n in range(len(store))] == [record_id for record_id, _ in expected]
    assert read(write(f"\n{text}", "other.fasta"))[0] == expected
    Path("x.bz2").write_bytes(bz2.compress(text.replace("\n", "\r\n").encode()))
    assert read(Path("x.bz2"))[0] == expected
    for size in range(45, len(text), 31):  # a file that ends early is read or refused, and nothing else
        try:
            assert read(write(text[:size], name))[0]
        except InputError as error:
            assert str(error).startswith(name), size  # noqa: PT017


def test_headers_have_the_description_and_edits_are_counted() -> None:
    headers = [record.description for record in read_fasta(write(GENBANK, "x.gb"))]
    assert headers == ["NP_000001.1 test protein [Homo sapiens]", "NP_000002.7 second"]
    assert read(write(CLUSTAL, "x.aln"))[1] == ["gaps were removed in 1 record (a)"]


def test_bad_files_are_refused_in_one_sentence() -> None:
    for name, text, message in (
        ("x.gb", GENBANK.replace("1 mkt\n", "1 m1t\n"), "x.gb: record 'NP_000002.7' has '1' at position 2"),
        ("x.embl", SWISS.replace("10 AA.", "10 BP."), "x.embl:1: text before the first '>'"),
        ("x.xml", XML.replace("YIAKQR<", "YIAK?R<"), "x.xml: record 'P12345' has '?' at position 9"),
        ("x.aln", "CLUSTAL W (1.83)\n\n", "x.aln: is a Clustal alignment without a record"),
        ("x.xml", XML.replace("</uniprot>", ""), "x.xml: cannot be read as a UniProt XML file ("),
        ("x.sto", STOCKHOLM.replace("mkATTA", "mkATT"), "x.sto: cannot be read as a Stockholm alignment ("),
    ):
        with pytest.raises(InputError) as caught:
            read(write(text, name))
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
