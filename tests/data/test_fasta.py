"""FASTA files in blocks: cut anywhere, from the standard input, in ranges; where errors are; what costs nothing. And
what the symbol rules refuse; what they change, `test_ingest_fuzz` compares with a slow reader.
"""

import bz2
import gzip
import io
import itertools
import lzma
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import esm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import zstd

from esmshard.errors import InputError, UsageError
from esmshard.io import sequences as fasta_blocks
from esmshard.io.sequences import STDIN, Record, is_plain, read_blocks, read_fasta
from esmshard.io.symbols import STRANGE, Edits, Rules, cut, shown, table
from esmshard.vocab import decode

BLOCKS = (7, 16, 64, 1 << 20)
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
PACKERS["zst"] = zstd
MIXED = (
    b"\xef\xbb\xbf\r\n \n>a one > two\r\nMKT\r\nAA\r>b\rmk\r\r>c>d\n\nM-K\n\n>\r\n"
    b"MT\n>  \nMA\n>e \xc3\xa9\n" + b"ACDEFGHIKLMNPQRSTVWY\n" * 9 + b">f\nMKJ*\n>g\tx\nM"
)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(data: str | bytes, name: str = "x.fasta") -> Path:
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Path(name)


def read(path: Path, rules: Rules = Rules()) -> tuple[list[Record], list[str]]:  # noqa: B008  # frozen
    edits = Edits()
    return list(read_fasta(path, edits, rules)), edits.notices()


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def refused(data: str | bytes, name: str = "x.fasta", rules: Rules = Rules()) -> str:  # noqa: B008  # frozen
    return refusal(lambda: read(write(data, name), rules))


def pairs(data: str | bytes, name: str = "x.fasta") -> list[tuple[str, str]]:
    return [(record.id, record.sequence) for record in read(write(data, name))[0]]


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[type-var]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_may_end_anywhere(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", block)
    records, notices = read(write(MIXED))
    assert [(r.id, r.description, r.sequence) for r in records] == [
        ("a", "a one > two", "MKTAA"),
        ("b", "b", "MK"),
        ("c>d", "c>d", "MK"),
        ("seqnum000000012", "seqnum000000012", "MT"),
        ("seqnum000000014", "seqnum000000014", "MA"),
        ("e", "e \xe9", "ACDEFGHIKLMNPQRSTVWY" * 9),
        ("f", "f", "MKX"),
        ("g", "g\tx", "M"),
    ]
    assert notices == [
        "lower-case letters were read as upper case in 1 record (b)",
        "gaps were removed in 1 record (c>d)",
        "a '*' at the end was removed in 1 record (f)",
        "J (Leu or Ile) was read as X in 1 record (f)",
    ]


@pytest.mark.parametrize("newline", ["\n", "\r"])
@pytest.mark.parametrize("header", ["r", "a>b>c"])
def test_blocks_are_not_larger_than_need_be(newline: str, header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", 64)
    path = write("".join(f">{k} {header}\nMKTAAMKTAA\n" for k in range(100)).replace("\n", newline))
    counts = [len(block.ids) for block in read_blocks(path, Edits())]
    assert sum(counts) == 100
    assert max(counts) * path.stat().st_size / 100 <= 2 * 64


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("k", [0, 1, 5, 49])
def test_errors_name_their_line_whatever_block_they_are_in(
    block: int, newline: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", block)
    records = [f">r{n} x\nMKT\n\nAAG\n" for n in range(50)]
    records[k] = f">bad{k}\nMK\nT7\n"
    data = ("\n" + "".join(records)).replace("\n", newline)
    wanted = (
        f"{4 * k + 2}: record 'bad{k}' has '7' at position 4, which is not a residue; write X for an unknown residue"
    )
    assert refusal(lambda: read(write(data))).startswith(f"x.fasta:{wanted}, or ")
    assert refusal(lambda: read(write(gzip.compress(data.encode()), "x.gz"))).startswith(f"x.gz:{wanted}, or ")
    for packed in (data.encode(), gzip.compress(data.encode())):
        pipe(monkeypatch, packed)
        assert refusal(lambda: read(STDIN)).startswith(f"-:{wanted}, or ")


@pytest.mark.parametrize("block", BLOCKS)
def test_text_before_the_first_header_has_its_line(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", block)
    for blank, line in (("\n" * 40, 41), ("\r\n" * 40, 41), ("\r" * 41, 42), (" \n" * 9, 10)):
        for text in ("MKT\n>a\nMK\n", ";x\n", " >a\nMK\n", "\t>a\nMK\n"):
            message = refusal(lambda: read(write(blank + text)))  # noqa: B023
            assert message.startswith(f"x.fasta:{line}: text before the first '>'")
            pipe(monkeypatch, (blank + text).encode())
            assert refusal(lambda: read(STDIN)) == "-" + message.removeprefix("x.fasta")
        assert read(write(blank + ">a\nMK\n"))[0] == [Record("a", "a", "MK")]
        assert read(write(f"{blank}>\nMK\n"))[0] == [Record(f"seqnum{line - 1:09d}", f"seqnum{line - 1:09d}", "MK")]


def test_gzip_files_of_several_members_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [gzip.compress(b"".join(b">r%d\nMKT\n" % k for k in range(n, n + 10))) for n in range(0, 100, 10)]
    empty = gzip.compress(b"")  # a bgzip file ends in one
    path = write(b"".join([*members, empty]), "x.bgz")
    assert [r.id for r in read(path)[0]] == [f"r{k}" for k in range(100)]
    monkeypatch.setattr(fasta_blocks, "BLOCK", 16)
    assert [r.id for r in read(path)[0]] == [f"r{k}" for k in range(100)]
    assert refusal(lambda: read(write(b"".join(members)[:-5]))).startswith("x.fasta: cannot be read to its end (")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_the_standard_input_may_be_compressed(pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, pack(b">a one\nMKT\n>b\nmk\n"))
    assert read(STDIN) == (
        [Record("a", "a one", "MKT"), Record("b", "b", "MK")],
        ["lower-case letters were read as upper case in 1 record (b)"],
    )


@pytest.mark.parametrize("name", ["x.fasta", "x.gz", "x", "x.bz2.txt"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_names_do_not_say_what_is_compressed(pack: Callable[[bytes], bytes], name: str) -> None:
    path = write(pack(b">a\nMKT\n"), name)
    assert read(path)[0] == [Record("a", "a", "MKT")]
    assert is_plain(path) == (pack is bytes)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le"])
def test_utf_16_is_refused(encoding: str) -> None:
    mark = "" if encoding == "utf-16" else "\ufeff"
    assert (
        refusal(lambda: read(write(f"{mark}>a\nMK\n".encode(encoding)))) == "x.fasta: is UTF-16 text; save it as UTF-8"
    )


def test_damaged_compressed_data_is_one_sentence() -> None:
    whole = gzip.compress(random.Random(0).randbytes(2000).hex().encode())
    for at in range(12, len(whole) - 8, 23):
        bad = bytearray(whole)
        bad[at] ^= 0x55
        assert refusal(lambda: read(write(bytes(bad), "x.gz"))).startswith("x.gz")  # noqa: B023
    lost = bytearray(gzip.compress(b">a\n" + b"MKT" * 99, mtime=0))
    lost[10:14] = b"\x03\x0b\xff\xff"
    assert refusal(lambda: read(write(bytes(lost), "x.gz"))).startswith("x.gz: cannot be read to its end (")


def test_a_pipe_is_refused_because_files_are_read_several_times() -> None:
    os.mkfifo("p")
    wanted = "p: is a pipe, not a file; pipe it into the standard input and name that, as -"
    assert refusal(lambda: read(Path("p"))) == refusal(lambda: is_plain(Path("p"))) == wanted


def test_what_may_not_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fasta_blocks, "open_source", deny)
    assert refusal(lambda: read(write(">a\nMK\n"))) == "x.fasta: may not be read; change its permissions"


@pytest.mark.parametrize(
    ("header", "record", "line"),
    [(">chr1 of it", "chr1", 4), (">", "seqnum000000003", 4), (">" + "a" * 300, "a" * 57 + "...", 4)],
)
@pytest.mark.parametrize("newline", ["\n", "\r"])
def test_a_genome_is_refused(
    header: str, record: str, line: int, newline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", 16)
    monkeypatch.setattr(fasta_blocks, "LONGEST", 1000)
    data = f"\n>a\nMK\n{header}\n" + "ACGT\n" * 300
    data, wanted = data.replace("\n", newline), "longer than 1,000 bytes; proteins are expected, not a genome"
    assert refusal(lambda: read(write(data))) == f"x.fasta:{line}: record '{record}' is {wanted}"
    pipe(monkeypatch, data.encode())
    assert refusal(lambda: read(STDIN)) == f"-:{line}: record '{record}' is {wanted}"
    table = write(f"id,sequence\n\na,MK\nchr1,{'ACGT' * 300}\n", "x.csv")
    assert refusal(lambda: read(table)) == f"x.csv:4: record 'chr1' is {wanted}"


def in_range(path: Path, start: int, stop: int | None) -> list[tuple[str, str]]:
    found = []
    for block in read_blocks(path, Edits(), start=start, stop=stop):
        sequences = block.tokens.split(b"\x02")
        assert sequences.pop() == b""
        assert [len(sequence) for sequence in sequences] == block.lengths.tolist()
        for name, tokens in zip(block.ids, sequences, strict=True):
            found.append((name.decode(), decode(list(tokens))))
    return found


def test_touching_ranges_share_no_record_and_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(MIXED)
    whole = in_range(path, 0, None)
    starts = {
        "a": 7, "b": 29, "c>d": 36, "seqnum000000012": 47, "seqnum000000014": 53, "e": 60, "f": 255, "g": 263,
    }  # fmt: skip
    assert [name for name, _ in whole] == [*starts]
    for block in (7, 1 << 20):
        monkeypatch.setattr(fasta_blocks, "BLOCK", block)
        for edge in range(len(MIXED) + 2):
            assert in_range(path, 0, edge) == [record for record in whole if starts[record[0]] < edge], edge
            assert in_range(path, edge, None) == [record for record in whole if starts[record[0]] >= edge], edge


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet=">>aM\n\n\r \t", max_size=60),
    mark=st.sampled_from(["", "", "\ufeff", "\n", "\r\n "]),
    cuts=st.lists(st.integers(0, 70), max_size=6),
    block=st.sampled_from([7, 16, 1 << 20]),
)
def test_any_cut_of_any_text_gives_every_record_once(text: str, mark: str, cuts: list[int], block: int) -> None:
    path = write(f"{mark}>first\nM\n{text.replace('a', 'A')}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fasta_blocks, "BLOCK", block)
        try:
            whole = in_range(path, 0, None)
        except InputError:
            return
        edges = [0, *sorted(cuts)]
        ranges = zip(edges, [*edges[1:], None], strict=True)
        assert [record for start, stop in ranges for record in in_range(path, start, stop)] == whole


def test_an_error_in_a_range_has_the_line_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [f">r{n} x\r\nMKT\r\n" for n in range(60)]
    records[50] = ">bad\r\nM\r\n7\r\n"
    path = write("".join(records))
    at = path.read_bytes().index(b">bad")
    for block in BLOCKS:
        monkeypatch.setattr(fasta_blocks, "BLOCK", block)
        for start, stop in ((at, at + 1), (at - 30, None), (300, at + 9), (0, at + 1)):
            message = refusal(lambda: in_range(path, start, stop))  # noqa: B023
            assert message.startswith("x.fasta:101: record 'bad' has '7' at position 2")
        assert in_range(path, 0, at)[-1][0] == "r49"
        assert in_range(path, at + 1, None)[0][0] == "r51"


def test_records_without_ids_have_the_same_names_in_every_range() -> None:
    path = write("\r\n" + ">\r\nMK\r\n" * 40)
    names = [f"seqnum{line:09d}" for line in range(1, 81, 2)]
    assert [name for name, _ in in_range(path, 0, None)] == names
    for start in (1, 2, 3, 50, 200):
        found = in_range(path, start, None)
        assert [name for name, _ in found] == names[-len(found) :]


def test_long_records_are_seen_among_usual_ones() -> None:
    path = write("".join(f">r{size}\n{'M' * size}\n" for size in (1, 4, 5, 6, 7, 5)).replace("r5", "s5", 1))
    records, notices = read(path, Rules(long="skip", max_length=5))
    assert [len(record.sequence) for record in records] == [1, 4, 5, 5]
    assert notices == ["a sequence over 5 residues was left out in 2 records (r6, r7)"]


def test_usual_records_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def clean(written: str, rules: Rules, edits: Edits, record_id: str) -> bytes:
        looked.append(record_id)
        return b"\x05"

    monkeypatch.setattr(fasta_blocks, "clean", clean)
    for newline in ("\n", "\r\n", "\r"):
        usual = "".join(f">r{k} a>b \xe9\nMK T\n\nAAX\n" for k in range(50)).replace("\n", newline)
        assert len(read(write(usual))[0]) == 50
        assert len(read(write(usual), Rules("mask", long="error", max_length=6))[0]) == 50
        assert looked == []
        read(write(f"{usual}>odd\nMKt\n{usual.replace('>r', '>s')}>star\nM*\n"))
        assert looked == ["odd", "star"]
        looked.clear()


def test_lines_are_counted_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0

    def newlines(text: bytes, count: Callable[[bytes], int] = fasta_blocks._newlines) -> int:
        nonlocal counted
        counted += len(text)
        return count(text)

    monkeypatch.setattr(fasta_blocks, "_newlines", newlines)
    path = write(b">\nM\n" * 2000)
    assert len(list(read_fasta(path))) == 2000
    assert counted <= 3 * path.stat().st_size
    counted = 0
    assert len(list(read_fasta(write(">a\nM\n>b\nMk\n")))) == 2
    assert counted == 0


def test_marks_inside_a_long_line_are_passed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", 1 << 12)
    data = b">a\nM\n>b " + b">" * 400_000 + b"\nMK\n"
    assert [(r.id, len(r.description)) for r in read(write(data))[0]] == [("a", 1), ("b", 400_002)]


# The symbol rules


def test_a_symbol_that_is_no_residue_is_refused_and_the_option_is_named() -> None:
    data = ">a\nMK\n>b\nM*K\n>c\nMKT/MKV\n>d\nM<mask>K\n>e\n\n>f\nMK*\n>g\nm-k\n"
    assert refused(data, "my x.fa.gz") == (
        "my x.fa.gz:3: record 'b' has '*' at position 2, which is not a residue; write X for an unknown "
        "residue, or type `esmshard ingest FILE -o NAME.store --on-unknown drop`, and name NAME.store instead"
    )
    for separator in "/|+":
        assert f"has '{separator}' at position 4, which is" in refused(f">a\nMKT{separator}MKV\n>b\nMK{separator}\n")
    assert "'<mask>' at position 2, which is not a residue; write X for" in refused(">a\nM<mask>K\n")


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
        assert refused(f">x\nMK\n>a\n{sequence}\n").startswith(
            f"x.fasta:3: record 'a' has no residues in chain {chain} of {count}; write one ':' between two chains"
        )
        assert [
            record.id for record in read_fasta(write(f">x\nMK\n>a\n{sequence}\n"), rules=Rules(on_unknown="drop"))
        ] == ["x"]
    assert "has '7' at position 7, which" in refused(">a\nMK*:MV7*\n")
    assert "has ':' at position 3, which is not a residue" in refused(">a\nMK:MV\n", rules=Rules(a3m=True))


def test_a_mask_that_is_written_out_is_one_symbol() -> None:
    found = list(read_fasta(write(">a\nM<mask>K<MASK>\n"), rules=Rules(on_unknown="mask")))
    assert [record.sequence for record in found] == ["M<mask>K<mask>"]
    assert [record.id for record in read_fasta(write(">a\nM<mask>K\n>b\nMK\n"), rules=Rules(on_unknown="drop"))] == [
        "b"
    ]


def test_a_file_of_another_kind_is_refused() -> None:
    for data in (b"HEADER    OXYGEN TRANSPORT\n", b"PK\x03\x04xx", b"@read1\nACGT\n+\nIIII\n", b"id,sequence\na,MKT\n"):
        for packed in (data, gzip.compress(data)):
            assert refused(packed).startswith("x.fasta:1: text before the first '>'")


@pytest.mark.parametrize("kind", PACKERS)
def test_a_compressed_file_that_ends_early_is_refused(kind: str) -> None:
    letters = random.Random(0)
    records = [f">r{k}\n{''.join(letters.choices('ACDEFGHIKLMNPQRSTVWY', k=300))}\n" for k in range(100)]
    whole = PACKERS[kind]("".join(records).encode())
    name = f"x.fasta.{kind}"
    assert len(pairs(whole, name)) == 100
    for size in (len(whole) // 2, len(whole) - 3):
        assert refused(whole[:size], name).startswith(f"{name}: cannot be read to its end (")


def test_a_compressed_file_with_a_flipped_byte_is_refused() -> None:
    letters = random.Random(0).choices("ACDEFGHIKLMNPQRSTVWY", k=3000)
    data = bytearray(gzip.compress(f">a\n{''.join(letters)}\n".encode()))
    data[-6] ^= 1  # of the checksum
    assert refused(bytes(data), "x.fasta.gz").startswith("x.fasta.gz: cannot be read to its end (")


def test_a_header_without_an_id_gets_the_name_that_fair_esm_gives() -> None:
    data = ">\nMK\n>b\nMM\n>\nMT\nMT\n>  \nMA\n"
    theirs = esm.data.FastaBatchedDataset.from_file
    mine = pairs(data)
    assert mine[0] == ("seqnum000000000", "MK")
    assert mine == list(theirs("x.fasta"))


@pytest.mark.parametrize("letters", [0, 10, 8189, 100_000])
def test_a_binary_file_is_refused_with_the_place_of_its_first_bad_byte(letters: int) -> None:
    data = b">a\n" + b"M" * letters + b"\xff\x00\n"
    assert refused(data).startswith(f"x.fasta: not text (byte {letters + 3} is not UTF-8)")


@pytest.mark.parametrize("header", ["a\0b", "a x\0y", "\0"])
def test_a_nul_in_a_header_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(f">ok\nMK\n\n>{header}\nMKT\n")
    with pytest.raises(InputError, match=r"x\.fasta:4: the header '.*' holds a NUL character"):
        list(read_fasta(path))


def test_structure_letters_between_residues_are_refused_and_the_way_in_is_named() -> None:
    for rules, written in itertools.product((Rules(), Rules("mask"), Rules("drop")), ("MdEvVp", "Md\nEvV#*")):
        assert "docs/tracks.md" in refused(f">a\n{written}\n", rules=rules)
    assert pairs(">a\nMdEvVpp\n") == [("a", "MDEVVPP")]
    assert read(write(">a\nMdEvVp\n"), Rules(a3m=True))[1] == ["insertions were removed in 1 record (a)"]


@pytest.mark.parametrize(
    ("rules", "letters"),
    [
        ({}, "LAGVSERTIDPKQNFYMHWCXBUZO"),
        ({"a3m": True}, "LAGVSERTIDPKQNFYMHWCXBUZO"),
        ({"keep_gaps": True}, "LAGVSERTIDPKQNFYMHWCXBUZO.-"),
        ({"keep_gaps": True, "a3m": True}, "LAGVSERTIDPKQNFYMHWCXBUZO-"),
    ],
)
def test_only_what_needs_no_edit_is_taken_without_a_look(rules: dict[str, object], letters: str) -> None:
    codes = table(Rules(**rules), {">": 2})  # type: ignore[arg-type]
    assert len(codes) == 256
    order = "LAGVSERTIDPKQNFYMHWCXBUZO.-"  # tokens 4 to 30
    assert {chr(k): code for k, code in enumerate(codes) if code != STRANGE} == {
        **{letter: 4 + order.index(letter) for letter in letters},
        ">": 2,
    }


LONG = bytes(range(4, 27))  # 23 residues, all different


def test_as_few_windows_as_can_be_overlap_as_evenly_as_they_can() -> None:
    for length in range(2, 80):
        tokens = bytes(range(100, 100 + length))
        for most in range(1, length):
            found = cut(b"id", b"id of it", tokens, Rules(long="window", max_length=most), Edits())
            assert all(header == name + b" of it" for name, header, _ in found)
            starts = [piece[0] - 100 for _, _, piece in found]
            assert len(found) == -(-length // most)
            assert {len(piece) for _, _, piece in found} == {most}
            assert starts[0] == 0
            assert starts[-1] == length - most
            steps = {later - earlier for earlier, later in itertools.pairwise(starts)}
            assert max(steps) - min(steps) <= 1
            assert max(steps) <= most


STARTS = (5, 8, 3, 10, 4, 8, 1, 9, 13, 11, 7, 1)


def test_a_crop_is_a_window_drawn_from_the_id_alone() -> None:
    # sha256(id), its first eight bytes as a little-endian number, modulo 14 places; worked out once.
    for k, start in enumerate(STARTS):
        name = b"r%d" % k
        header = b"%s x residues=%d-%d" % (name, start + 1, start + 10)
        found = cut(name, name + b" x", LONG, Rules(long="crop", max_length=10), Edits())
        assert found == [(name, header, LONG[start : start + 10])]


def test_rules_that_make_no_sense_are_refused() -> None:
    for long in ("crop", "window", "skip", "error"):
        with pytest.raises(UsageError) as error:
            Rules(long=long)  # type: ignore[arg-type]
        assert str(error.value) == f"--long {long}: needs --max-length"
    for most in (0, -1):
        with pytest.raises(UsageError) as error:
            Rules(long="window", max_length=most)
        assert str(error.value) == f"--max-length {most}: 1 or more is expected"
    assert Rules(max_length=5).long == "full"


def test_edits_name_the_first_three_records_of_each_kind() -> None:
    edits = Edits()
    for k in range(5):
        edits.add("odd" if k % 2 else "even", f"r{k}")
    assert edits.counts == {"even": 3, "odd": 2}
    assert edits.first == {"even": ["r0", "r2", "r4"], "odd": ["r1", "r3"]}
    edits.add("even", "r\x1b[31m" + "x" * 100)
    assert edits.notices() == ["even in 4 records (r0, r2, r4, ...)", "odd in 2 records (r1, r3)"]
    one = Edits()
    one.add("odd", "r\n")
    assert one.notices() == ["odd in 1 record (r\\n)"]


def test_edits_of_later_records_come_after() -> None:
    early, later = Edits({"x": 2, "y": 1}, {"x": ["a", "b"], "y": ["c"]}), Edits()
    later.counts, later.first = {"z": 4, "x": 5}, {"z": ["d", "e", "f"], "x": ["g", "h", "i"]}
    early.extend(later)
    assert list(early.counts.items()) == [("x", 7), ("y", 1), ("z", 4)]
    assert early.first == {"x": ["a", "b", "g", "h"], "y": ["c"], "z": ["d", "e", "f"]}
    early.add("z", "j")
    assert early.first["z"] == ["d", "e", "f", "j"]
    assert later.first == {"z": ["d", "e", "f"], "x": ["g", "h", "i"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sp|P1|A_B", "sp|P1|A_B"),
        ("a\0b", "a\\x00b"),
        ("\u202eevil\u2028", "\\u202eevil\\u2028"),
        ("a" * 60, "a" * 60),
        ("a" * 61, "a" * 57 + "..."),
        ("\n" * 10_000, "\\n" * 28 + "\\..."),
    ],
)
def test_ids_are_short_and_printable_in_messages(name: str, text: str) -> None:
    assert shown(name) == text
