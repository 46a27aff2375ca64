"""Token stores, version 4: what is read back, and what a damaged one says. `golden/store_v4` has every byte."""

import json
import multiprocessing
import pickle
import random
import weakref
from contextlib import suppress
from pathlib import Path

import pytest

from esmshard.errors import InputError
from esmshard.io import store as token_store
from esmshard.io.paths import cache_directory, sha256
from esmshard.io.store import TokenStore, ingest, is_store
from esmshard.io.symbols import Rules
from esmshard.vocab import decode

FASTA = ">b first\nMKT\n>a\nagv*\n>7abc/A\nW\n"
ARRAYS = ("offsets.npy", "headers.npy", "ids.npy", "rows.npy")
GOLDEN = Path(__file__).parent.parent / "golden" / "store_v4"
GOLDEN_FASTA = (
    "\ufeff>b first one\r\nMKTAAGV\r\n\r\n>a\nagv-J*\n"
    ">sp|P1|LONG_ECOLI of \xe9. coli\nACDEFGHIKLMNPQRSTVWYXBUZO\n>\nW\n>b x\nMKT\nAAGV\n>c\rMMM\n"
)


def make(directory: Path, text: str, rules: Rules = Rules()) -> TokenStore:  # noqa: B008  # frozen
    path = directory / "x.fasta"
    path.write_bytes(text.encode())
    return ingest([path], directory / "store", rules)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return make(tmp_path, FASTA)


def test_only_records_of_the_store_are_read(store: TokenStore) -> None:
    for n in (-1, 3, 100):
        for read in (store.residues, store.id, store.description, store.header):
            with pytest.raises(IndexError):
                read(n)
    assert [store.find(name) for name in ("b", "", "none", "b\n", "\ud800")] == [0, None, None, None, None]


def test_lengths_are_counted_in_bins(tmp_path: Path) -> None:
    store = make(tmp_path, "".join(f">r{size}\n{'M' * size}\n" for size in (1, 31, 32, 1022, 1023, 9000)))
    histogram = {"0-31": 2, "32-63": 1, "768-1022": 1, "1023-2047": 1, "8192-2147483647": 1}
    lengths = {"shortest": 1, "longest": 9000, "mean": 1851.5, "histogram": histogram}
    assert store.manifest["lengths"] == lengths


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """Five shards of one record."""
    monkeypatch.setattr(token_store, "SHARD", 20)
    return make(tmp_path, "".join(f">r{k} {'x' * 10}\nMKTA\n" for k in range(5)))


def test_few_shards_stay_mapped_and_the_files_of_a_lost_store_are_closed(
    sharded: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "_OPEN_SHARDS", 2)
    store = TokenStore(sharded.path)
    assert store.lengths.tolist() == [4] * 5
    assert store._mapped.cache_info().misses == 0
    assert {decode(store.residues(n)) for n in (0, 1, 0, 2, 0, 4, 3)} == {"MKTA"}
    assert store._mapped.cache_info()[:2] == (2, 5)
    held = weakref.ref(store)
    del store
    assert held() is None


def test_a_store_goes_to_another_process_as_its_path_and_its_files_are_hashed_once(
    sharded: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    monkeypatch.setattr(token_store, "sha256", counting)
    store = TokenStore(sharded.path)
    assert decode(store.residues(2)) == "MKTA"
    sent = multiprocessing.reduction.ForkingPickler.dumps(store)
    assert len(sent) < 1000
    other = pickle.loads(sent)
    assert decode(other.residues(2)) == "MKTA"
    assert hashed == [*ARRAYS, "tokens-00002.u8"]
    assert (other.description(4), other.find("r3")) == ("r4 xxxxxxxxxx", 3)


def content(path: Path) -> list[object]:
    store = TokenStore(path)
    records = [(store.id(n), store.description(n), decode(store.residues(n))) for n in range(len(store))]
    found = [store.find(name) for name in ("r0", "r3", "none")]
    return [records, found, store.lengths.tolist(), store.notices, store.linker, store.digest]


def altered(data: bytes, draw: random.Random) -> bytes:
    """One to three bytes of a file replaced, left out or doubled, or its end cut off."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(max(1, len(data)))
        new = draw.choice([bytes([draw.randrange(256)]), b"", data[at : at + 1] * 2])
        data = data[:at] + new + data[at + 1 :] if draw.random() < 0.9 else data[:at]
    return data


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_no_altered_byte_of_any_file_is_read_as_a_residue_or_an_id(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "SHARD", 60)
    sharded = make(tmp_path, "".join(f">r{k} {'x' * 10}\nMKTA\n" for k in range(5)))
    whole, draw, read = content(sharded.path), random.Random(0), 0
    assert len(sharded.manifest["shards"]) == 2
    for path in sorted(sharded.path.iterdir()):
        data = path.read_bytes()
        for _ in range(rounds):
            path.write_bytes(altered(data, draw))
            with suppress(InputError):
                assert content(sharded.path) == whole
                read += 1  # a byte was put where it was, or blanks of the manifest changed
        path.unlink()
        with pytest.raises(InputError, match=path.name):
            content(sharded.path)
        path.write_bytes(data)
    assert read < rounds
    assert content(sharded.path) == whole


def test_what_is_no_store_of_this_version_is_refused(store: TokenStore, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "x.fasta"):
        with pytest.raises(InputError, match="not a token store"):
            TokenStore(path)
        assert not is_store(path)
    path = store.path / "manifest.json"
    whole = path.read_text()
    for change in ({"version": 2}, {"alphabet": "0"}):
        path.write_text(json.dumps(json.loads(whole) | change))
        with pytest.raises(InputError, match="this version"):
            TokenStore(store.path)


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("ESMSHARD_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("ESMSHARD_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "esmshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / ".cache" / "esmshard"


def test_a_store_of_this_version_is_read_for_ever_and_written_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TokenStore(GOLDEN)
    store.verify()
    records = [
        ("b first one", "MKTAAGV"),
        ("a", "AGVX"),
        ("sp|P1|LONG_ECOLI/1-10 of \xe9. coli", "ACDEFGHIKL"),
        ("sp|P1|LONG_ECOLI/8-17 of \xe9. coli", "IKLMNPQRST"),
        ("sp|P1|LONG_ECOLI/16-25 of \xe9. coli", "STVWYXBUZO"),
        ("seqnum000000007", "W"),
        ("c", "MMM"),
    ]
    assert [(store.description(n), decode(store.residues(n))) for n in range(len(store))] == records
    assert store.lengths.tolist() == [7, 4, 10, 10, 10, 1, 3]
    assert [store.find(header.split()[0]) for header, _ in records] == list(range(7))
    assert len(store.manifest["shards"]) == 2
    assert [notice.rpartition(" in ")[2] for notice in store.notices] == [
        *["1 record (a)"] * 4, "1 record (sp|P1|LONG_ECOLI)", "1 record (b)",
    ]  # fmt: skip
    monkeypatch.setattr(token_store, "SHARD", 64)
    made = make(tmp_path, GOLDEN_FASTA, Rules(long="window", max_length=10))
    names = sorted(path.name for path in made.path.iterdir())
    assert names == sorted(path.name for path in GOLDEN.iterdir())
    for name in names:
        if name != "manifest.json":
            assert (made.path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert made.manifest | {"manifest_sha256": ""} == store.manifest | {"manifest_sha256": ""}
