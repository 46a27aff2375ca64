"""FASTA files: blocks and ranges cut anywhere, the lines of errors, and the symbol rules.

`test_ingest_fuzz` compares what the rules change with a slow reader.
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
from esmshard.io.symbols import Edits, Rules, shown
from esmshard.vocab import decode

BLOCKS = (7, 64, 1 << 20)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd,
}  # fmt: skip
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


def test_blocks_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in BLOCKS:
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
    monkeypatch.setattr(fasta_blocks, "BLOCK", 1 << 12)
    data = b">a\nM\n>b " + b">" * 400_000 + b"\nMK\n"  # each '>' is passed over, and not looked at
    assert [(r.id, len(r.description)) for r in read(write(data))[0]] == [("a", 1), ("b", 400_002)]


def test_errors_name_their_line_in_any_block_range_and_in_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for block, newline, k in itertools.product(BLOCKS, ("\n", "\r\n", "\r"), (0, 49)):
        monkeypatch.setattr(fasta_blocks, "BLOCK", block)
        records = [f">r{n} x\nMKT\n\nAAG\n" for n in range(50)]
        records[k] = f">bad{k}\nMK\nT7\n"
        data = ("\n" + "".join(records)).replace("\n", newline).encode()
        place, at = f"{4 * k + 2}: record 'bad{k}' has '7' at position 4", data.index(b">bad")
        assert refused(gzip.compress(data)).startswith(f"x.fasta:{place}")
        for packed in (data, gzip.compress(data)):
            pipe(monkeypatch, packed)
            assert refusal(lambda: read(STDIN)).startswith(f"-:{place}")
        path = write(data)
        for start, stop in ((at, at + 1), (max(at - 30, 0), None), (0, at + 1)):
            assert refusal(lambda: in_range(path, start, stop)).startswith(f"x.fasta:{place}")  # noqa: B023


def test_text_before_the_first_header_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in BLOCKS:
        monkeypatch.setattr(fasta_blocks, "BLOCK", block)
        for blank, line in (("\n" * 40, 41), ("\r\n" * 40, 41), ("\r" * 41, 42), (" \n" * 9, 10)):
            assert refused(f"{blank}MKT\n>a\nMK\n").startswith(f"x.fasta:{line}: text before the first '>'")
            pipe(monkeypatch, f"{blank}\t>a\nMK\n".encode())
            assert refusal(lambda: read(STDIN)).startswith(f"-:{line}: text before the first '>'")
            name = f"seqnum{line - 1:09d}"
            assert read(write(f"{blank}>\nMK\n"))[0] == [Record(name, name, "MK")]
    for data in (b"HEADER    OXYGEN TRANSPORT\n", b"PK\x03\x04xx", b"@read1\nACGT\n+\nIIII\n", b"id,sequence\na,MKT\n"):
        assert refused(gzip.compress(data)).startswith("x.fasta:1: text before the first '>'")


@pytest.mark.parametrize("kind", PACKERS)
def test_compressed_files_are_known_by_their_bytes_and_read_to_their_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters, pack = random.Random(0), PACKERS[kind]
    records = [f">r{k} x\n{''.join(letters.choices('ACDEFGHIKLMNPQRSTVWY', k=300))}\n" for k in range(100)]
    whole = pack("".join(records).encode())
    for name in ("x.fasta", "x.bz2.txt", "x"):
        assert len(pairs(whole, name)) == 100
        assert not is_plain(Path(name))
    pipe(monkeypatch, whole)
    assert len(read(STDIN)[0]) == 100
    for size in (len(whole) // 2, len(whole) - 3):
        assert refused(whole[:size]).startswith("x.fasta: cannot be read to its end (")
    several = pack(b">a\nM\n") + pack(b">b\nM\n") + pack(b"")  # a bgzip file ends in an empty member
    for block in BLOCKS:
        monkeypatch.setattr(fasta_blocks, "BLOCK", block)
        assert pairs(several) == [("a", "M"), ("b", "M")]


def test_damaged_and_binary_files_are_one_sentence() -> None:
    whole = gzip.compress(random.Random(0).randbytes(2000).hex().encode())
    for at in range(12, len(whole) - 8, 97):
        bad = bytearray(whole)
        bad[at] ^= 0x55
        assert refused(bytes(bad), "x.gz").startswith("x.gz")
    lost = bytearray(gzip.compress(b">a\n" + b"MKT" * 99, mtime=0))
    lost[10:14] = b"\x03\x0b\xff\xff"
    assert refused(bytes(lost)).startswith("x.fasta: cannot be read to its end (")
    checksum = bytearray(gzip.compress(b">a\n" + b"MKT" * 99, mtime=0))
    checksum[-6] ^= 1
    assert refused(bytes(checksum)).startswith("x.fasta: cannot be read to its end (")
    for letters in (0, 8189, 100_000):
        data = b">a\n" + b"M" * letters + b"\xff\x00\n"
        assert refused(data).startswith(f"x.fasta: not text (byte {letters + 3} is not UTF-8)")
    for encoding in ("utf-16", "utf-16-be", "utf-16-le"):
        mark = "" if encoding == "utf-16" else "\ufeff"
        assert "UTF-16" in refused(f"{mark}>a\nMK\n".encode(encoding))
    for header in ("a\0b", "a x\0y", "\0"):
        assert refused(f">ok\nMK\n\n>{header}\nMKT\n").startswith("x.fasta:4: the header")


def test_a_pipe_and_a_file_without_permission_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo("p")
    assert "is a pipe" in refusal(lambda: read(Path("p")))
    assert "is a pipe" in refusal(lambda: is_plain(Path("p")))

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fasta_blocks, "open_source", deny)
    assert refused(">a\nMK\n").startswith("x.fasta: you have no permission")


def test_a_genome_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasta_blocks, "BLOCK", 16)
    monkeypatch.setattr(fasta_blocks, "LONGEST", 1000)
    long = "a" * 57 + "..."
    for header, record in ((">chr1 of it", "chr1"), (">", "seqnum000000003"), (">" + "a" * 300, long)):
        for newline in ("\n", "\r"):
            data = f"\n>a\nMK\n{header}\n{'ACGT' * 300}\n".replace("\n", newline)
            assert refused(data).startswith(f"x.fasta:4: record '{record}' is longer than 1,000 bytes")
            pipe(monkeypatch, data.encode())
            assert refusal(lambda: read(STDIN)).startswith(f"-:4: record '{record}' is longer than 1,000 bytes")
    table = write(f"id,sequence\n\na,MK\nchr1,{'ACGT' * 300}\n", "x.csv")
    assert refusal(lambda: read(table)).startswith("x.csv:4: record 'chr1' is longer")


def in_range(path: Path, start: int, stop: int | None) -> list[tuple[str, str]]:
    records = []
    for block in read_blocks(path, Edits(), start=start, stop=stop):
        sequences = block.tokens.split(b"\x02")
        assert sequences.pop() == b""
        assert [len(sequence) for sequence in sequences] == block.lengths.tolist()
        for name, tokens in zip(block.ids, sequences, strict=True):
            records.append((name.decode(), decode(list(tokens))))
    return records


def test_touching_ranges_share_no_record_and_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(MIXED)
    whole = in_range(path, 0, None)
    monkeypatch.setattr(fasta_blocks, "BLOCK", 7)
    for edge in [*range(66), *range(250, len(MIXED) + 2)]:  # between them is one long record
        assert in_range(path, 0, edge) + in_range(path, edge, None) == whole, edge
    assert [name for name, _ in in_range(path, 36, 54)] == ["c>d", "seqnum000000012", "seqnum000000014"]


@settings(max_examples=60, deadline=None, derandomize=True)
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


def test_usual_records_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[str] = []
    monkeypatch.setattr(fasta_blocks, "clean", lambda text, rules, edits, name: cleaned.append(name) or b"\x05")
    for newline in ("\n", "\r\n", "\r"):
        usual = "".join(f">r{k} a>b \xe9\nMK T\n\nAAX\n" for k in range(50)).replace("\n", newline)
        assert len(read(write(usual), Rules("mask", long="error", max_length=6))[0]) == 50
        read(write(f"{usual}>odd\nMKt\n{usual.replace('>r', '>s')}>star\nM*\n"))
    assert cleaned == ["odd", "star"] * 3


# The symbol rules


def test_a_symbol_that_is_no_residue_is_refused_and_the_option_is_named() -> None:
    message = refused(">a\nMK\n>b\nM*K\n>c\nMKT/MKV\n", "my x.fa.gz")
    assert message.startswith("my x.fa.gz:3: record 'b' has '*' at position 2, which is not a residue")
    assert "--on-unknown drop" in message
    for separator in "/|+":
        assert f"has '{separator}' at position 4" in refused(f">a\nMKT{separator}MKV\n")
    assert "'<mask>' at position 2" in refused(">a\nM<mask>K\n")
    assert [r.sequence for r in read_fasta(write(">a\nM<mask>K<MASK>\n"), rules=Rules("mask"))] == ["M<mask>K<mask>"]
    assert [r.id for r in read_fasta(write(">a\nM<mask>K\n>b\nMK\n"), rules=Rules("drop"))] == ["b"]


def test_an_id_that_comes_twice_is_read_once_or_refused() -> None:
    records, notices = read(write(">a\nMK\n>b\nM\n>a x\nM K\n"))
    assert [record.id for record in records] == ["a", "b"]
    assert notices == ["a record that came twice was read once in 1 record (a)"]
    assert refused(">a\nMK\n>b\nM\n>a\nMV\n").startswith("x.fasta: id 'a' has two different sequences")


def test_chains_are_divided_by_a_colon() -> None:
    data = ">a\nmkt:M\nKV*\n>b\nMK*:MV*\n>c\nMKT\n"
    records, notices = read(write(data), Rules(linker=2))
    assert [record.sequence for record in records] == ["MKT:MKV", "MK:MV", "MKT"]
    assert "chains were joined by a linker of 2 in 2 records (a, b)" in notices
    (block,) = read_blocks(write(data), Edits(), Rules(linker=2))
    assert block.tokens == bytes([20, 15, 11, 31, 31, 20, 15, 7, 2, 20, 15, 31, 31, 20, 7, 2, 20, 15, 11, 2])
    assert block.lengths.tolist() == [8, 6, 3]
    for sequence, chain, count in ((":MK", 1, 2), ("MK::MV", 2, 3), ("MK:*", 2, 2), ("MK:--:MV", 2, 3)):
        text = f">x\nMK\n>a\n{sequence}\n"
        assert refused(text).startswith(f"x.fasta:3: record 'a' has no residues in chain {chain} of {count}")
        assert [record.id for record in read(write(text), Rules("drop"))[0]] == ["x"]
    assert "has '7' at position 7" in refused(">a\nMK*:MV7*\n")
    assert "has ':' at position 3" in refused(">a\nMK:MV\n", rules=Rules(a3m=True))


def test_a_header_without_an_id_gets_the_name_that_fair_esm_gives() -> None:
    mine = pairs(">\nMK\n>b\nMM\n>\nMT\nMT\n>  \nMA\n")
    assert mine[0] == ("seqnum000000000", "MK")
    assert mine == list(esm.data.FastaBatchedDataset.from_file("x.fasta"))


def test_structure_letters_between_residues_are_refused_and_the_way_in_is_named() -> None:
    for rules, written in itertools.product((Rules(), Rules("mask"), Rules("drop")), ("MdEvVp", "Md\nEvV#*")):
        assert "docs/tracks.md" in refused(f">a\n{written}\n", rules=rules)
    assert pairs(">a\nMdEvVpp\n") == [("a", "MDEVVPP")]
    assert read(write(">a\nMdEvVp\n"), Rules(a3m=True))[1] == ["insertions were removed in 1 record (a)"]


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="--long crop: needs --max-length"):
        Rules(long="crop")
    with pytest.raises(UsageError, match="--max-length 0"):
        Rules(long="window", max_length=0)
    assert Rules(max_length=5).long == "full"


def test_edits_name_the_first_records_of_each_kind_in_the_order_of_the_file() -> None:
    edits, later = Edits({"x": 2, "y": 1}, {"x": ["a", "b"], "y": ["c"]}), Edits()
    later.counts, later.first = {"z": 4, "x": 5}, {"z": ["d", "e", "f"], "x": ["g", "h", "i"]}
    edits.extend(later)
    assert list(edits.counts.items()) == [("x", 7), ("y", 1), ("z", 4)]
    edits.add("z", "j\x1b[31m" + "x" * 100)
    edits.add("row(s) left out", "line 7", 2)
    assert edits.first["x"] == ["a", "b", "g", "h"]
    assert later.first == {"z": ["d", "e", "f"], "x": ["g", "h", "i"]}
    assert edits.notices() == [
        "x in 7 records (a, b, g, ...)", "y in 1 record (c)", "z in 5 records (d, e, f, ...)",
        "2 rows left out (line 7)",
    ]  # fmt: skip
    for name, text in (("a\0\u202eb", "a\\x00\\u202eb"), ("a" * 60, "a" * 60), ("\n" * 10_000, "\\n" * 28 + "\\...")):
        assert shown(name) == text
