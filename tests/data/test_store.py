"""Token stores: what ingest writes, what is read back, and what a damaged one says."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.store import TokenStore, cache_directory, cached, ingest
from esmshard.errors import InputError
from esmshard.recipe import shipped
from esmshard.vocab import ALPHABET_HASH, decode

FASTA = ">b first\nMKT\n>a\nagv*\n>7abc/A\nW\n"
FILES = ("tokens.u8", "offsets.npy", "ids.txt", "manifest.json")


@pytest.fixture
def fasta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "x.fasta"
    path.write_text(FASTA)
    return path


@pytest.fixture
def store(fasta: Path, tmp_path: Path) -> TokenStore:
    return ingest([fasta], tmp_path / "store")


def sequences(store: TokenStore) -> list[str]:
    return [decode(store.residues(n)) for n in range(len(store))]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        act()
    return str(error.value)


def test_records_come_back_in_file_order(store: TokenStore) -> None:
    assert store.ids == ["b", "a", "7abc/A"]
    assert sequences(store) == ["MKT", "AGV", "W"]
    assert store.lengths.tolist() == [3, 3, 1]
    assert len(store) == 3


def test_the_files_hold_what_the_format_says(store: TokenStore) -> None:
    assert (store.path / "tokens.u8").read_bytes() == bytes([20, 15, 11, 5, 6, 7, 22])
    offsets = np.load(store.path / "offsets.npy")
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 3, 6, 7]
    assert (store.path / "ids.txt").read_text() == "b\na\n7abc/A\n"
    assert store.residues(0).dtype == np.uint8
    assert store.lengths.dtype == np.int64


def test_the_manifest_tells_counts_source_edits_and_true_hashes(store: TokenStore, fasta: Path) -> None:
    manifest = json.loads((store.path / "manifest.json").read_text())
    hashes, sizes = manifest.pop("sha256"), manifest.pop("bytes")
    edits = [
        "a '*' at the end was removed in 1 record (a)",
        "lower-case letters were read as upper case in 1 record (a)",
    ]
    assert manifest == {
        "format": "esmshard-tokens",
        "version": 1,
        "alphabet": ALPHABET_HASH,
        "records": 3,
        "residues": 7,
        "sources": [{"path": str(fasta.resolve()), "bytes": len(FASTA)}],
        "edits": edits,
    }
    assert store.notices == edits
    assert sorted(p.name for p in store.path.iterdir()) == sorted(FILES)
    data = [name for name in FILES if name != "manifest.json"]
    assert sizes == {name: (store.path / name).stat().st_size for name in data}
    assert hashes == {name: hashlib.sha256((store.path / name).read_bytes()).hexdigest() for name in data}


def test_a_shipped_sample_comes_back_whole(tmp_path: Path) -> None:
    fasta = shipped("data") / "contact" / "test.fasta"
    store = ingest([fasta], tmp_path / "store")
    records = [entry.split("\n", 1) for entry in fasta.read_text().split(">")[1:]]
    assert len(records) == 100
    assert store.ids == [header for header, _ in records]
    assert sequences(store) == [lines.replace("\n", "") for _, lines in records]
    assert TokenStore(store.path).ids == store.ids


def test_several_files_are_one_store(fasta: Path, tmp_path: Path) -> None:
    other = tmp_path / "y.fasta"
    other.write_text(">c\nMM\n")
    store = ingest([other, fasta], tmp_path / "store")
    assert store.ids == ["c", "b", "a", "7abc/A"]
    assert sequences(store) == ["MM", "MKT", "AGV", "W"]
    assert [s["path"] for s in store.manifest["sources"]] == [str(other.resolve()), str(fasta.resolve())]


def test_an_id_in_two_files_with_two_sequences_is_refused(fasta: Path, tmp_path: Path) -> None:
    other = tmp_path / "y.fasta"
    other.write_text(">c\nMM\n>a\nMM\n")
    message = refusal(lambda: ingest([fasta, other], tmp_path / "store"))
    assert str(fasta) in message
    assert str(other) in message
    assert "'a'" in message


def test_an_id_in_two_files_with_one_sequence_is_read_once_with_a_notice(fasta: Path, tmp_path: Path) -> None:
    other = tmp_path / "y.fasta"
    other.write_text(">b\nMKT\n>c\nMM\n")
    store = ingest([fasta, other], tmp_path / "store")
    assert store.ids == ["b", "a", "7abc/A", "c"]
    assert "a record that came twice was read once in 1 record (b)" in store.notices


@pytest.mark.parametrize("data", [">a\nMK\n>b\nM1\n", ">a\nMK\n>a\nMM\n", "", None])
def test_a_failing_ingest_leaves_nothing_behind(fasta: Path, tmp_path: Path, data: str | None) -> None:
    bad = tmp_path / "bad.fasta"
    if data is not None:
        bad.write_text(data)
    before = sorted(tmp_path.iterdir())
    assert refusal(lambda: ingest([fasta, bad], tmp_path / "store")).startswith(str(bad))
    assert sorted(tmp_path.iterdir()) == before


def test_a_good_ingest_leaves_only_the_store(fasta: Path, tmp_path: Path) -> None:
    ingest([fasta], tmp_path / "new" / "store")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "x.fasta"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["store"]


@pytest.mark.parametrize("kind", ["store", "empty directory", "file"])
def test_what_exists_is_not_overwritten(fasta: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "store":
        ingest([fasta], out)
    elif kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
    before = {p.name: p.read_bytes() for p in out.iterdir()} if out.is_dir() else out.read_bytes()
    fasta.write_text(">z\nMM\n")
    assert refusal(lambda: ingest([fasta], out)).startswith(f"{out}: exists already")
    assert before == ({p.name: p.read_bytes() for p in out.iterdir()} if out.is_dir() else out.read_bytes())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_store_is_one_input_error(store: TokenStore, name: str, damage: str) -> None:
    DAMAGE[damage](store.path / name)
    message = refusal(lambda: TokenStore(store.path).ids)
    assert message.startswith(str(store.path))
    assert "\n" not in message


def test_offsets_beyond_the_tokens_are_refused(store: TokenStore) -> None:
    np.save(store.path / "offsets.npy", np.array([0, 3, 6, 8]))
    assert refusal(lambda: TokenStore(store.path)).startswith(f"{store.path}: the token store is truncated")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "a token store of another version"),
        ({"alphabet": "0"}, "a token store of another version"),
        ({"format": "esmshard-embeddings"}, "not a token store"),
        ({"records": 2}, "the token store is truncated"),
    ],
)
def test_another_manifest_is_refused(store: TokenStore, change: dict[str, object], sentence: str) -> None:
    path = store.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert refusal(lambda: TokenStore(store.path)).startswith(f"{store.path}: {sentence}")


@pytest.mark.parametrize("text", ["[]", '{"format": "esmshard-tokens"}', "null"])
def test_a_manifest_that_says_little_is_refused(store: TokenStore, text: str) -> None:
    (store.path / "manifest.json").write_text(text)
    assert refusal(lambda: TokenStore(store.path)).startswith(str(store.path))


@pytest.mark.parametrize("key", ["format", "version", "alphabet", "records", "bytes"])
def test_a_manifest_without_a_key_is_refused(store: TokenStore, key: str) -> None:
    manifest = json.loads((store.path / "manifest.json").read_text())
    del manifest[key]
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(lambda: TokenStore(store.path)).startswith(str(store.path))


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert refusal(lambda path=path: TokenStore(path)).startswith(f"{path}: not a token store")


def stores() -> list[Path]:
    return list((cache_directory() / "stores").iterdir())


def test_a_file_is_ingested_once(fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cached(fasta)
    assert sequences(store) == ["MKT", "AGV", "W"]
    inodes = {p.name: p.stat().st_ino for p in store.path.iterdir()}
    monkeypatch.chdir(fasta.parent)
    again = cached(Path(fasta.name))
    assert stores() == [store.path] == [again.path]
    assert {p.name: p.stat().st_ino for p in again.path.iterdir()} == inodes
    assert len(inodes) == 4


def test_an_edited_file_is_read_anew(fasta: Path) -> None:
    cached(fasta)
    fasta.write_text(FASTA.replace("MKT", "MKTT"))
    assert sequences(cached(fasta))[0] == "MKTT"
    time = fasta.stat().st_mtime_ns
    fasta.write_text(FASTA.replace("MKT", "MKTV"))  # of the same size
    os.utime(fasta, ns=(time + 1000, time + 1000))
    assert sequences(cached(fasta))[0] == "MKTV"


def test_files_with_equal_content_are_two_stores(fasta: Path, tmp_path: Path) -> None:
    other = tmp_path / "y.fasta"
    shutil.copy2(fasta, other)
    assert cached(fasta).path != cached(other).path


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_copy_in_the_cache_is_replaced(fasta: Path, name: str, damage: str) -> None:
    DAMAGE[damage](cached(fasta).path / name)
    store = cached(fasta)
    assert store.ids == ["b", "a", "7abc/A"]
    assert sequences(store) == ["MKT", "AGV", "W"]
    assert stores() == [store.path]


def test_a_file_that_cannot_be_read_leaves_the_cache_empty(fasta: Path, tmp_path: Path) -> None:
    assert refusal(lambda: cached(tmp_path / "none.fasta")) == f"{tmp_path / 'none.fasta'}: no such file or directory"
    fasta.write_text(">a\nM1\n")
    assert refusal(lambda: cached(fasta)).startswith(f"{fasta}:1: record 'a'")
    assert stores() == []


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("ESMSHARD_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("ESMSHARD_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "esmshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / ".cache" / "esmshard"


def test_ids_that_are_no_text_are_refused(store: TokenStore) -> None:
    ids = store.path / "ids.txt"
    ids.write_bytes(b"\xff" * ids.stat().st_size)
    with pytest.raises(InputError, match=r"ids\.txt: cannot be read"):
        _ = TokenStore(store.path).ids
