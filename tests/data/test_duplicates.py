"""Ids that come more than once: found whatever shard they are in, and what the three policies make of them."""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from esmshard.errors import InputError
from esmshard.io import store as ingestion
from esmshard.io.store import OnDuplicate, TokenStore, ingest
from esmshard.io.symbols import Rules
from esmshard.vocab import decode

READ_ONCE = "a record that came twice was read once"
LEFT_OUT = "a record with the id of an earlier one and another sequence was left out"
NUMBERED = "an id that came again got a number"
POLICIES: tuple[OnDuplicate, ...] = ("error", "first", "suffix")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(data: str | bytes, name: str = "x.fasta") -> Path:
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Path(name)


def records(store: TokenStore) -> list[tuple[str, str]]:
    """(header, sequence) of each, once all else that a store says of them was found to agree."""
    found = [(store.description(n), decode(store.residues(n))) for n in range(len(store))]
    ids = [header.split()[0] for header, _ in found]
    assert [store.find(name) for name in ids] == list(range(len(store)))
    assert [store.id(n) for n in range(len(store))] == ids
    assert store.lengths.tolist() == [len(sequence) for _, sequence in found]
    assert store.manifest["residues"] == sum(len(sequence) for _, sequence in found)
    assert (np.diff(store.keys.astype(object)) >= 0).all()
    store.verify()
    return found


def read(data: str, on_duplicate: OnDuplicate, out: str = "out", rules: Rules = Rules()) -> TokenStore:  # noqa: B008
    return ingest([write(data)], Path(out), rules, on_duplicate)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("policy", "data", "wanted", "notices"),
    [
        ("error", ">a x\nMKT\n>b\nMK\n>a y\nmk\nt\n", [("a x", "MKT"), ("b", "MK")], [f"{READ_ONCE} in 1 record (a)"]),
        ("first", ">a x\nMKT\n>b\nMK\n>a y\nMKT\n", [("a x", "MKT"), ("b", "MK")], [f"{READ_ONCE} in 1 record (a)"]),
        ("first", ">a x\nMKT\n>b\nMK\n>a y\nMKV\n", [("a x", "MKT"), ("b", "MK")], [f"{LEFT_OUT} in 1 record (a)"]),
        (
            "first",
            ">a\nM\n>a\nK\n>a\nM\n>a\nT\n>b\nA\n>b\nA\n>c\nC\n",
            [("a", "M"), ("b", "A"), ("c", "C")],
            [f"{LEFT_OUT} in 2 records (a, a)", f"{READ_ONCE} in 2 records (a, b)"],
        ),
        (
            "suffix",
            ">a x\nMKT\n>b\nMK\n>a y\nMKT\n> a\tz \nM\n",
            [("a x", "MKT"), ("b", "MK"), ("a_2 y", "MKT"), ("a_3\tz", "M")],
            [f"{NUMBERED} in 2 records (a_2, a_3)"],
        ),
        (
            "suffix",
            ">a\nM\n>a\nK\n>a_2\nT\n",
            [("a", "M"), ("a_3", "K"), ("a_2", "T")],
            [f"{NUMBERED} in 1 record (a_3)"],
        ),
        (
            "suffix",
            ">a_3\nT\n>a\nM\n>a\nK\n>a\nC\n>a_2\nA\n>a_2\nG\n",
            [("a_3", "T"), ("a", "M"), ("a_4", "K"), ("a_5", "C"), ("a_2", "A"), ("a_2_2", "G")],
            [f"{NUMBERED} in 3 records (a_4, a_5, a_2_2)"],
        ),
    ],
)
def test_what_becomes_of_an_id_that_comes_again(
    policy: OnDuplicate,
    data: str,
    wanted: list[tuple[str, str]],
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shard in (8, 20, 1 << 26):
        monkeypatch.setattr(ingestion, "SHARD", shard)
        store = read(data, policy, f"out{shard}")
        assert records(store) == wanted
        assert [notice for notice in store.notices if "lower-case" not in notice] == notices
        assert store.manifest["on_duplicate"] == policy
        assert store.manifest["sources"] == [{"path": "x.fasta", "bytes": len(data)}]
        names = {
            name
            for k in range(len(store.manifest["shards"]))
            for name in (f"tokens-{k:05d}.u8", f"headers-{k:05d}.txt")
        }
        arrays = {"offsets.npy", "headers.npy", "ids.npy", "rows.npy", "manifest.json"}
        assert {path.name for path in store.path.iterdir()} == names | arrays


def test_edits_are_kept_and_duplicates_come_after_them() -> None:
    store = read(">a\nmkt\n>b\nMJ\n>a\nMKT*\n>c\nmm\n", "error")
    assert store.notices == [
        "lower-case letters were read as upper case in 2 records (a, c)",
        "J (Leu or Ile) was read as X in 1 record (b)",
        "a '*' at the end was removed in 1 record (a)",
        f"{READ_ONCE} in 1 record (a)",
    ]
    assert store.manifest["edits"][READ_ONCE] == {"records": 1, "first": ["a"]}


def test_duplicates_are_named_in_file_order() -> None:
    names = [*(f"r{k}" for k in range(9)), "r0", *(f"r{k}" for k in range(9, 15)), "r1", "r15", "r2"]
    data = "".join(f">{name}\nMK\n" for name in names)
    assert read(data, "error").notices == [f"{READ_ONCE} in 3 records (r0, r1, r2)"]
    assert read(data, "suffix", "numbered").notices == [f"{NUMBERED} in 3 records (r0_2, r1_2, r2_2)"]


@pytest.mark.parametrize("shard", [8, 24, 1 << 26])
def test_an_id_with_two_sequences_is_an_error_with_both_places(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", shard)
    one = write(">z\nMK\n>a\nMK\n>b\nM\n>b\nM\n>a\nmk\n", "one.fasta")
    two = write(gzip.compress(b"\r\n>a x\r\nM K\r\n>b\r\nMM\r\n>a\r\nMM\r\n"), "two.gz")
    out = Path("out")
    wanted = "one.fasta, two.gz: 'b' comes twice with two sequences"
    assert refusal(lambda: ingest([one, two], out)).startswith(wanted)  # the first record of all that differs
    for files in ([two, one], [two]):
        assert "'a' comes twice with two sequences" in refusal(lambda: ingest(files, out))  # noqa: B023
    assert sorted(path.name for path in Path().iterdir()) == ["one.fasta", "two.gz"]


def test_records_that_the_rules_leave_out_are_no_places() -> None:
    data = ">a\nM7\n>a\nMK\n>a\nM8\n>a\nMK\n>a\nMM\n"
    wanted = "x.fasta: 'a' comes twice with two sequences"
    assert refusal(lambda: read(data, "error", rules=Rules("drop"))).startswith(wanted)
    data = ">a\nMKTAAGV\n>b\nM\n>a/1-5\nMKTAA\n>a/3-7\nM\n"
    wanted = "x.fasta: 'a/3-7' comes twice with two sequences"
    assert refusal(lambda: read(data, "error", rules=Rules(long="window", max_length=5))).startswith(wanted)
    store = read(data, "suffix", rules=Rules(long="window", max_length=5))
    assert [header for header, _ in records(store)] == ["a/1-5", "a/3-7", "b", "a/1-5_2", "a/3-7_2"]


def test_an_id_of_ten_thousand_letters_is_cut_in_the_sentence() -> None:
    name = "a" * 10_000
    wanted = f"x.fasta: '{'a' * 57}...' comes twice with two sequences"
    assert refusal(lambda: read(f">{name}\nM\n>{name}\nK\n", "error")).startswith(wanted)
    assert [header for header, _ in records(read(f">{name} x\nM\n>{name} y\nK\n", "suffix"))] == [
        f"{name} x",
        f"{name}_2 y",
    ]


def same_key(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Ids share a key if they begin alike."""
    return np.array([name[0] for name in names], np.uint64)


def test_ids_that_share_a_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "keys", same_key)
    distinct = "".join(f">{letter}{k}\nMK\n" for k in range(5) for letter in "ab")
    assert len(records(read(distinct, "error", "distinct"))) == 10
    assert TokenStore(Path("distinct")).notices == []
    again = distinct + ">a3\nMM\n>b1\nMK\n>a9\nM\n>a3\nMT\n>c\nM\n"
    wanted = "x.fasta: 'a3' comes twice with two sequences"
    assert refusal(lambda: read(again, "error")).startswith(wanted)
    first = [header for header, _ in records(read(again, "first", "first"))]
    assert first == [f"{letter}{k}" for k in range(5) for letter in "ab"] + ["a9", "c"]
    suffix = [header for header, _ in records(read(again, "suffix", "suffix"))]
    assert suffix[10:] == ["a3_2", "b1_2", "a9", "a3_3", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_result_does_not_depend_on_who_reads(policy: OnDuplicate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 60)
    rare = "".join(f">r{k * k % 17} {k}\nMKT{'A' * (k * k % 17)}\n" for k in range(40))
    often = "".join(f">r{k * k % 17} {k}\nMKT{'A' * (k % 5)}\n" for k in range(40))
    data = rare if policy == "error" else often
    one = ingest([write(data)], Path("one"), on_duplicate=policy)
    other = ingest([Path("x.fasta")], Path("parts"), on_duplicate=policy, workers=2)
    packed = ingest([write(gzip.compress(data.encode()), "x.gz")], Path("packed"), on_duplicate=policy)
    assert records(one) == records(other) == records(packed)
    assert one.digest == other.digest == packed.digest
    for path in one.path.iterdir():
        if path.name != "manifest.json":
            assert path.read_bytes() == (other.path / path.name).read_bytes()
    assert len(one) == (40 if policy == "suffix" else 9)  # squares modulo 17
