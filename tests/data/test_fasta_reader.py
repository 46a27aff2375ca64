"""FASTA files under the symbol rules: what is changed, what is refused, and what is said about it."""

import bz2
import gzip
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import esm
import pytest
from packed import zstd

from esmshard.errors import InputError
from esmshard.io.sequences import Record, read_blocks, read_fasta
from esmshard.io.symbols import Edits, Rules

LOWER = "lower-case letters were read as upper case in 1 record (a)"
GAPS = "gaps were removed in 1 record (a)"
STAR = "a '*' at the end was removed in 1 record (a)"
LEUCINE = "J (Leu or Ile) was read as X in 1 record (a)"


PACKERS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
PACKERS["zst"] = zstd


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(data: str | bytes, name: str = "x.fasta") -> Path:
    path = Path(name)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read(
    data: str | bytes,
    name: str = "x.fasta",
    rules: Rules = Rules(),  # noqa: B008  # frozen
) -> tuple[list[Record], list[str]]:
    edits = Edits()
    return list(read_fasta(write(data, name), edits, rules)), edits.notices()


def pairs(data: str | bytes, name: str = "x.fasta") -> list[tuple[str, str]]:
    return [(record.id, record.sequence) for record in read(data, name)[0]]


def refusal(
    data: str | bytes,
    name: str = "x.fasta",
    rules: Rules = Rules(),  # noqa: B008  # frozen
) -> str:
    with pytest.raises(InputError) as error:
        read(data, name, rules)
    return str(error.value)


@pytest.mark.parametrize(
    ("written", "sequence", "notices"),
    [
        ("MKTAA", "MKTAA", []),
        ("ACDEFGHIKLMNPQRSTVWY", "ACDEFGHIKLMNPQRSTVWY", []),
        ("MXBUZOK", "MXBUZOK", []),
        ("M K", "MK", []),
        (" M\tK\nT \n\nAA\n", "MKTAA", []),
        ("mktaa", "MKTAA", [LOWER]),
        ("MkT", "MKT", [LOWER]),
        ("MJK", "MXK", [LEUCINE]),
        ("M-K.T", "MKT", [GAPS]),
        ("--MK", "MK", [GAPS]),
        ("MKT*", "MKT", [STAR]),
        ("MKT *\n", "MKT", [STAR]),
        ("mj-k*", "MXK", [STAR, LOWER, GAPS, LEUCINE]),
    ],
)
def test_each_symbol_becomes_what_the_rules_say(written: str, sequence: str, notices: list[str]) -> None:
    records, said = read(f">a\n{written}\n")
    assert records == [Record("a", "a", sequence)]
    assert sorted(said) == sorted(notices)


@pytest.mark.parametrize(
    ("written", "letter", "position"),
    [
        ("MK*T", "*", 3),
        ("MKT**", "*", 4),
        ("*MK", "*", 1),
        ("MK1T", "1", 3),
        ("MKT9", "9", 4),
        ("M?K", "?", 2),
        ("m--k#", "#", 5),
        ("MKT\nMK1T", "1", 6),
        ("MK\x00T", "\\x00", 3),
        ("MK\u2028T", "\\u2028", 3),
        ("MK>T", ">", 3),
    ],
)
def test_what_is_no_residue_is_refused_with_line_record_and_position(written: str, letter: str, position: int) -> None:
    message = refusal(f">first\nMK\n\n>second one\n{written}\n>third\nMK\n")
    assert message.startswith(f"x.fasta:4: record 'second' has '{letter}' at position {position}, ")


@pytest.mark.parametrize("letter", ["\xe9", "\xdf", "\u017f", "\u0131", "\u0394", "\uff2b"])
def test_a_letter_of_another_alphabet_is_no_residue_whatever_its_upper_case(letter: str) -> None:
    message = refusal(f">a\nM{letter}K\n")
    assert message.startswith("x.fasta:1: record 'a' has ")
    assert "at position 2" in message


@pytest.mark.parametrize("written", ["", "\n\n", " ", "---", "*", "-*"])
def test_a_record_without_residues_is_refused(written: str) -> None:
    for data, line in ((f">a\n{written}\n>b\nMK\n", 1), (f">b\nMK\n>a\n{written}", 3), (f">a x\n{written}", 1)):
        assert refusal(data).startswith(f"x.fasta:{line}: record 'a' has no residues; remove the record")


def test_a_symbol_that_is_no_residue_is_refused_and_the_option_is_named() -> None:
    data = ">a\nMK\n>b\nM*K\n>c\nMKT/MKV\n>d\nM<mask>K\n>e\n\n>f\nMK*\n>g\nm-k\n"
    assert refusal(data, "my x.fa.gz") == (
        "my x.fa.gz:3: record 'b' has '*' at position 2, which is not a residue; write X for an unknown "
        "residue, or type `esmshard ingest FILE -o NAME.store --on-unknown drop`, and name NAME.store instead"
    )
    for separator in "/|+":
        assert f"has '{separator}' at position 4, which is" in refusal(f">a\nMKT{separator}MKV\n>b\nMK{separator}\n")
    assert "'<mask>' at position 2, which is not a residue; write X for" in refusal(">a\nM<mask>K\n")


def test_chains_are_divided_by_a_colon() -> None:
    edits = Edits()
    data = ">a\nmkt:M\nKV*\n>b\nMK*:MV*\n>c\nMKT\n"
    found = list(read_fasta(write(data), edits, Rules(linker=2)))
    assert [record.sequence for record in found] == ["MKT:MKV", "MK:MV", "MKT"]
    assert "chains were joined by a linker of 2 in 2 records (a, b)" in edits.notices()
    (block,) = read_blocks(write(data), Edits(), Rules(linker=2))
    assert block.tokens == bytes([20, 15, 11, 31, 31, 20, 15, 7, 2, 20, 15, 31, 31, 20, 7, 2, 20, 15, 11, 2])
    assert block.lengths.tolist() == [8, 6, 3]
    for sequence, chain, count in ((":MK", 1, 2), ("MK::MV", 2, 3), ("MK:*", 2, 2), ("MK:--:MV", 2, 3)):
        assert refusal(f">x\nMK\n>a\n{sequence}\n").startswith(
            f"x.fasta:3: record 'a' has no residues in chain {chain} of {count}; write one ':' between two chains"
        )
        assert [
            record.id for record in read_fasta(write(f">x\nMK\n>a\n{sequence}\n"), rules=Rules(on_unknown="drop"))
        ] == ["x"]
    assert "has '7' at position 7, which" in refusal(">a\nMK*:MV7*\n")
    assert "has ':' at position 3, which is not a residue" in refusal(">a\nMK:MV\n", rules=Rules(a3m=True))


def test_a_mask_that_is_written_out_is_one_symbol() -> None:
    found = list(read_fasta(write(">a\nM<mask>K<MASK>\n"), rules=Rules(on_unknown="mask")))
    assert [record.sequence for record in found] == ["M<mask>K<mask>"]
    assert [record.id for record in read_fasta(write(">a\nM<mask>K\n>b\nMK\n"), rules=Rules(on_unknown="drop"))] == [
        "b"
    ]


def test_a_file_of_another_kind_is_refused() -> None:
    for data in (b"HEADER    OXYGEN TRANSPORT\n", b"PK\x03\x04xx", b"@read1\nACGT\n+\nIIII\n", b"id,sequence\na,MKT\n"):
        for packed in (data, gzip.compress(data)):
            assert refusal(packed).startswith("x.fasta:1: text before the first '>'")


def test_an_id_ends_at_white_space() -> None:
    records, notices = read(">P1,TEM1 beta, lactamase\nMK\n>P2;x\nMK\n>P3 a, b; c\nMK\n")
    assert [record.id for record in records] == ["P1,TEM1", "P2;x", "P3"]
    assert notices == []


def test_the_path_may_be_a_string() -> None:
    path = write(">a\nMK\n")
    assert list(read_fasta(str(path))) == list(read_fasta(path))


@pytest.mark.parametrize(
    "data",
    [
        ">a one\nMKT\nAA\n>b\nMK\n",
        ">a one\r\nMKT\r\nAA\r\n>b\r\nMK\r\n",
        ">a one\rMKT\rAA\r>b\rMK\r",
        "\ufeff>a one\nMKT\nAA\n>b\nMK\n",
        "\ufeff>a one\r\nMKT\r\nAA\r\n>b\r\nMK",
        "\n \n>a one\n\nMKT\n\n\nAA\n\n>b\n\nMK\n\n\n",
        ">a one  \nMKT  \n  AA\n>b\t\nMK",
    ],
)
def test_line_ends_blank_lines_and_marks_change_nothing(data: str) -> None:
    assert read(data) == ([Record("a", "a one", "MKTAA"), Record("b", "b", "MK")], [])


@pytest.mark.parametrize("kind", PACKERS)
def test_compressed_files_read_like_plain_ones(kind: str) -> None:
    data = "\ufeff>a one\r\nmkt\r\n>b\r\nMK\r\n"
    assert read(PACKERS[kind](data.encode()), f"x.fasta.{kind}") == read(data)
    assert read(data)[0] == [Record("a", "a one", "MKT"), Record("b", "b", "MK")]


@pytest.mark.parametrize("kind", PACKERS)
def test_a_compressed_file_that_ends_early_is_refused(kind: str) -> None:
    letters = random.Random(0)
    records = [f">r{k}\n{''.join(letters.choices('ACDEFGHIKLMNPQRSTVWY', k=300))}\n" for k in range(100)]
    whole = PACKERS[kind]("".join(records).encode())
    name = f"x.fasta.{kind}"
    assert len(pairs(whole, name)) == 100
    for size in (len(whole) // 2, len(whole) - 3):
        assert refusal(whole[:size], name).startswith(f"{name}: cannot be read to its end (")


def test_a_compressed_file_with_a_flipped_byte_is_refused() -> None:
    letters = random.Random(0).choices("ACDEFGHIKLMNPQRSTVWY", k=3000)
    data = bytearray(gzip.compress(f">a\n{''.join(letters)}\n".encode()))
    data[-6] ^= 1  # of the checksum
    assert refusal(bytes(data), "x.fasta.gz").startswith("x.fasta.gz: cannot be read to its end (")


def test_an_error_in_a_compressed_file_names_its_line() -> None:
    assert refusal(gzip.compress(b">a\nMK\n>b\nM7\n"), "x.fasta.gz").startswith(
        "x.fasta.gz:3: record 'b' has '7' at position 2"
    )


def test_the_id_is_the_first_word_and_the_description_the_whole_line() -> None:
    records, _ = read(">sp|P1|NAME_ECOLI  Some protein OS=E. coli\nMK\n>7abc/A\tx\nMT\n> c d\nMM\n")
    assert [(r.id, r.description) for r in records] == [
        ("sp|P1|NAME_ECOLI", "sp|P1|NAME_ECOLI  Some protein OS=E. coli"),
        ("7abc/A", "7abc/A\tx"),
        ("c", "c d"),
    ]


def test_a_header_without_an_id_gets_the_name_that_fair_esm_gives() -> None:
    data = ">\nMK\n>b\nMM\n>\nMT\nMT\n>  \nMA\n"
    theirs = esm.data.FastaBatchedDataset.from_file
    mine = pairs(data)
    assert mine[0] == ("seqnum000000000", "MK")
    assert mine == list(theirs("x.fasta"))


def test_records_come_in_file_order() -> None:
    ids = [f"r{k * 7919 % 101}" for k in range(101)]
    assert [i for i, _ in pairs("".join(f">{i}\nMK\n" for i in ids))] == ids
    assert len(set(ids)) == 101


def test_an_id_that_comes_twice_with_one_sequence_is_read_once_with_a_notice() -> None:
    records, notices = read(">a x\nMKT\n>b\nMKT\n>a y\nM K\nT\n")
    assert [(r.description, r.sequence) for r in records] == [("a x", "MKT"), ("b", "MKT")]
    assert notices == ["a record that came twice was read once in 1 record (a)"]
    assert pairs(">a\nMKT\n>a\nmk-t*\n") == [("a", "MKT")]


def test_an_id_that_comes_twice_with_two_sequences_is_refused() -> None:
    message = refusal(">a\nMKT\n>b\nMK\n>a\nMKV\n")
    assert message.startswith("x.fasta: 'a' comes twice with two sequences; rename one of the two")


@pytest.mark.parametrize(
    ("ids", "named"), [("a", "1 record (a)"), ("abc", "3 records (a, b, c)"), ("abcde", "5 records (a, b, c, ...)")]
)
def test_edits_are_counted_and_the_first_three_records_named(ids: str, named: str) -> None:
    data = ">other\nMK\n" + "".join(f">{i}\nmKj\n" for i in ids)
    assert read(data)[1] == [
        f"lower-case letters were read as upper case in {named}",
        f"J (Leu or Ile) was read as X in {named}",
    ]


@pytest.mark.parametrize(("data", "line"), [("MK\n>a\nMK\n", 1), ("\n\n;x\n>a\nMK\n", 3), ("MKT", 1), ("@r\nMK\n", 1)])
def test_text_before_the_first_header_is_refused_with_its_line(data: str, line: int) -> None:
    assert refusal(data).startswith(f"x.fasta:{line}: text before the first '>'")


@pytest.mark.parametrize("data", ["", "\n", " \r\n\n", "\ufeff"])
def test_a_file_without_records_is_refused(data: str) -> None:
    assert refusal(data).startswith("x.fasta: holds no record")
    assert refusal(gzip.compress(data.encode()), "x.fasta.gz").startswith("x.fasta.gz: holds no record")


@pytest.mark.parametrize("letters", [0, 10, 8189, 100_000])
def test_a_binary_file_is_refused_with_the_place_of_its_first_bad_byte(letters: int) -> None:
    data = b">a\n" + b"M" * letters + b"\xff\x00\n"
    assert refusal(data).startswith(f"x.fasta: not text (byte {letters + 3} is not UTF-8)")


@pytest.mark.parametrize("name", ["none.fasta", "none/x.fasta.gz"])
def test_a_missing_file_is_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        list(read_fasta(Path(name)))
    assert str(error.value) == f"{name}: no such file"


def test_a_directory_is_refused() -> None:
    Path("d.fasta").mkdir()
    with pytest.raises(InputError) as error:
        list(read_fasta(Path("d.fasta")))
    assert str(error.value).startswith("d.fasta: is a directory")


def test_edits_need_not_be_collected() -> None:
    Path("x.fasta").write_text(">a\nmk\n")
    assert [r.sequence for r in read_fasta(Path("x.fasta"))] == ["MK"]


@pytest.mark.parametrize("header", ["a\0b", "a x\0y", "\0"])
def test_a_nul_in_a_header_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(f">ok\nMK\n\n>{header}\nMKT\n")
    with pytest.raises(InputError, match=r"x\.fasta:4: the header '.*' holds a NUL character"):
        list(read_fasta(path))
