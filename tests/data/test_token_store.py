"""Token stores, version 4: every byte of them, what is read back, and what a damaged one says."""

import hashlib
import json
import multiprocessing
import pickle
import random
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from esmshard.errors import InputError
from esmshard.io import store as token_store
from esmshard.io.paths import cache_directory, sha256, shipped
from esmshard.io.store import TokenStore, ingest, is_store
from esmshard.io.symbols import Rules
from esmshard.vocab import ALPHABET_HASH, decode

FASTA = ">b first\nMKT\n>a\nagv*\n>7abc/A\nW\n"
ARRAYS = ("offsets.npy", "headers.npy", "ids.npy", "rows.npy")
FILES = ("tokens-00000.u8", "headers-00000.txt", *ARRAYS)
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


def ids(store: TokenStore) -> list[str]:
    return [store.id(n) for n in range(len(store))]


def sequences(store: TokenStore) -> list[str]:
    return [decode(store.residues(n)) for n in range(len(store))]


def test_every_byte_is_what_the_format_says(store: TokenStore) -> None:
    assert (store.path / "tokens-00000.u8").read_bytes() == bytes([20, 15, 11, 2, 5, 6, 7, 2, 22, 2])
    assert (store.path / "headers-00000.txt").read_bytes() == b"b first\na\n7abc/A\n"
    arrays = {name: np.load(store.path / name) for name in ARRAYS}
    assert {name: (array.dtype.str, array.tolist()) for name, array in arrays.items()} == {
        "offsets.npy": ("<i8", [0, 4, 8, 10]),
        "headers.npy": ("<i8", [0, 8, 10, 17]),
        # CRC-32, then Adler-32, of b, 7abc/A and a.
        "ids.npy": ("<u8", [0x71BEEFF9_00630063, 0xC496CBD1_068501CE, 0xE8B7BE43_00620062]),
        "rows.npy": ("<u4", [0, 2, 1]),
    }
    assert (store.lengths.dtype, store.lengths.tolist()) == (np.dtype(np.int32), [3, 3, 1])
    for n in (-1, 3, 100):
        for read in (store.residues, store.id, store.description, store.header):
            with pytest.raises(IndexError):
                read(n)


def test_the_manifest_tells_counts_source_rules_edits_and_true_hashes(store: TokenStore, tmp_path: Path) -> None:
    manifest = json.loads((store.path / "manifest.json").read_text())
    hashes, own_hash = manifest.pop("sha256"), manifest.pop("manifest_sha256")
    star, lower = "a '*' at the end was removed", "lower-case letters were read as upper case"
    notices = [f"{star} in 1 record (a)", f"{lower} in 1 record (a)"]
    rules = {"on_unknown": "error", "a3m": False, "keep_gaps": False, "long": "full", "max_length": None}
    assert manifest == {
        "format": "esmshard-tokens",
        "version": 4,
        "alphabet": ALPHABET_HASH,
        "records": 3,
        "residues": 7,
        "tokens_sha256": hashes["tokens-00000.u8"],
        "lengths": {"shortest": 1, "longest": 3, "mean": 2.33, "histogram": {"0-31": 3}},
        "sources": [{"path": "x.fasta", "bytes": len(FASTA)}],
        "rules": {**rules, "on_nucleotides": "error", "linker": 25},
        "on_duplicate": "error",
        "edits": {star: {"records": 1, "first": ["a"]}, lower: {"records": 1, "first": ["a"]}},
        "notices": notices,
        "shards": [{"records": 3, "tokens": 10, "headers": 17}],
    }
    assert store.notices == notices
    assert sorted(p.name for p in store.path.iterdir()) == sorted([*FILES, "manifest.json"])
    text = json.dumps(manifest | {"sha256": hashes}, sort_keys=True)
    assert own_hash == hashlib.sha256(text.encode()).hexdigest()
    assert hashes == {name: hashlib.sha256((store.path / name).read_bytes()).hexdigest() for name in FILES}
    assert store.digest == hashlib.sha256(hashes["tokens-00000.u8"].encode()).hexdigest()
    sizes = [1, 31, 32, 1022, 1023, 9000]
    (tmp_path / "sizes").mkdir()
    counted = make(tmp_path / "sizes", "".join(f">r{size}\n{'M' * size}\n" for size in sizes))
    histogram = {"0-31": 2, "32-63": 1, "768-1022": 1, "1023-2047": 1, "8192-2147483647": 1}
    wanted = {"shortest": 1, "longest": 9000, "mean": 1851.5, "histogram": histogram}
    assert (counted.manifest["lengths"], counted.lengths.tolist()) == (wanted, sizes)


def test_a_shipped_sample_comes_back_whole(tmp_path: Path) -> None:
    fasta = shipped("data") / "contact" / "test.fasta"
    store = ingest([fasta], tmp_path / "store")
    records = [entry.split("\n", 1) for entry in fasta.read_text().split(">")[1:]]
    assert len(records) == 100
    assert ids(store) == [header for header, _ in records]
    assert sequences(store) == [lines.replace("\n", "") for _, lines in records]
    assert [store.find(header) for header, _ in records] == list(range(100))
    assert [store.find(name) for name in ("", "none", f"{records[0][0]}\n", "\ud800")] == [None] * 4


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """Five shards of one record."""
    monkeypatch.setattr(token_store, "SHARD", 20)
    return make(tmp_path, "".join(f">r{k} {'x' * 10}\nMKTA\n" for k in range(5)))


def test_a_shard_is_mapped_when_it_is_read_and_the_last_ones_stay_so(
    sharded: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, mapped = TokenStore(sharded.path), []

    def memmap(path: Path, **options: object) -> npt.NDArray[np.uint8]:
        mapped.append(path.name)
        return np.fromfile(path, np.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(np, "memmap", memmap)
        assert store.lengths.tolist() == [4] * 5
        assert mapped == []
        assert (decode(store.residues(3)), store.id(3)) == ("MKTA", "r3")
        assert (store.find("r1"), store.id(3), store.id(1)) == (1, "r3", "r1")
    assert mapped == ["tokens-00003.u8", "headers-00003.txt", "headers-00001.txt"]
    monkeypatch.setattr(token_store, "_OPEN_SHARDS", 2)
    store = TokenStore(sharded.path)
    assert {decode(store.residues(n)) for n in (0, 1, 0, 2, 0, 4, 3)} == {"MKTA"}
    assert store._mapped.cache_info()[:2] == (2, 5)
    held = weakref.ref(store)
    del store
    assert held() is None, "its files are closed at once"


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
        with pytest.raises(InputError, match="another version"):
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
