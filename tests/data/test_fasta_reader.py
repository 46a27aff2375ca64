"""FASTA files under the symbol rules: what is refused, and what is said about edits.

`test_ingest_fuzz` compares what is changed with a slow reader that goes letter by letter.
"""

import bz2
import gzip
import itertools
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import esm
import pytest
from packed import zstd

from esmshard.errors import InputError, UsageError
from esmshard.io.sequences import Record, read_blocks, read_fasta
from esmshard.io.symbols import STRANGE, Edits, Rules, cut, shown, table

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


def test_a_header_without_an_id_gets_the_name_that_fair_esm_gives() -> None:
    data = ">\nMK\n>b\nMM\n>\nMT\nMT\n>  \nMA\n"
    theirs = esm.data.FastaBatchedDataset.from_file
    mine = pairs(data)
    assert mine[0] == ("seqnum000000000", "MK")
    assert mine == list(theirs("x.fasta"))


@pytest.mark.parametrize("letters", [0, 10, 8189, 100_000])
def test_a_binary_file_is_refused_with_the_place_of_its_first_bad_byte(letters: int) -> None:
    data = b">a\n" + b"M" * letters + b"\xff\x00\n"
    assert refusal(data).startswith(f"x.fasta: not text (byte {letters + 3} is not UTF-8)")


@pytest.mark.parametrize("header", ["a\0b", "a x\0y", "\0"])
def test_a_nul_in_a_header_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(f">ok\nMK\n\n>{header}\nMKT\n")
    with pytest.raises(InputError, match=r"x\.fasta:4: the header '.*' holds a NUL character"):
        list(read_fasta(path))


def test_structure_letters_between_residues_are_refused_and_the_way_in_is_named() -> None:
    for rules, written in itertools.product((Rules(), Rules("mask"), Rules("drop")), ("MdEvVp", "Md\nEvV#*")):
        assert "docs/tracks.md" in refusal(f">a\n{written}\n", rules=rules)
    assert pairs(">a\nMdEvVpp\n") == [("a", "MDEVVPP")]
    assert read(">a\nMdEvVp\n", rules=Rules(a3m=True))[1] == ["insertions were removed in 1 record (a)"]


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
