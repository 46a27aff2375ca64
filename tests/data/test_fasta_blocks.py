"""FASTA files in blocks: cut anywhere, from the standard input, in ranges; where errors are; what costs nothing."""

import bz2
import gzip
import io
import lzma
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmshard.errors import InputError
from esmshard.io import sequences as fasta_blocks
from esmshard.io.sequences import STDIN, Record, is_plain, read_blocks, read_fasta
from esmshard.io.symbols import Edits, Rules
from esmshard.vocab import decode

BLOCKS = (7, 16, 64, 1 << 20)
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
        for cut in range(len(MIXED) + 2):
            assert in_range(path, 0, cut) == [record for record in whole if starts[record[0]] < cut], cut
            assert in_range(path, cut, None) == [record for record in whole if starts[record[0]] >= cut], cut


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
