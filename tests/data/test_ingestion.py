"""Ingestion: the same bytes whoever reads the pieces, one sentence for what cannot be read, and the cache."""

import bz2
import gzip
import io
import json
import os
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from esmshard.errors import InputError, UsageError
from esmshard.io import paths
from esmshard.io import store as ingestion
from esmshard.io.paths import cache_directory
from esmshard.io.sequences import STDIN
from esmshard.io.store import TokenStore, cached, ingest
from esmshard.io.symbols import Rules
from esmshard.vocab import decode

FASTA = ">b first\nMKT\n>a\nagv*\n>7abc/A\nW\n"
DATA_FILES = (
    "tokens-00000.u8", "headers-00000.txt", "offsets.npy", "headers.npy", "ids.npy", "rows.npy", "manifest.json",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(data: str | bytes, name: str = "x.fasta") -> Path:
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Path(name)


def many(count: int = 40, seed: int = 0) -> str:
    """Records of many lengths, some with edits, all line ends, a byte-order mark."""
    draw = random.Random(seed)
    text = "\ufeff\r\n"
    for k in range(count):
        letters = draw.choices("ACDEFGHIKLMNPQRSTVWYXacdJ-.", weights=[9] * 21 + [1] * 6, k=draw.randrange(1, 60))
        sequence, newline = "".join(letters), draw.choice(["\n", "\n", "\r\n", "\r"])
        lines = [sequence[at : at + 20] for at in range(0, len(sequence), 20)]
        text += newline.join([f">r{seed}_{k} {'x' * draw.randrange(20)}", "A" + lines[0], *lines[1:], ""])
    return text


def records(store: TokenStore) -> list[tuple[str, str]]:
    """(header, sequence) of each, once all else that a store says of them was found to agree."""
    found = [(store.description(n), decode(store.residues(n))) for n in range(len(store))]
    assert [store.find(header.split()[0]) for header, _ in found] == list(range(len(store)))
    assert store.lengths.tolist() == [len(sequence) for _, sequence in found]
    assert store.manifest["residues"] == sum(len(sequence) for _, sequence in found)
    store.verify()
    return found


def ids(store: TokenStore) -> list[str]:
    return [store.id(n) for n in range(len(store))]


def content(store: TokenStore) -> dict[str, object]:
    """All that is in a store except where it came from."""
    files: dict[str, object] = {path.name: path.read_bytes() for path in store.path.iterdir()}
    about = json.loads(str(files["manifest.json"], "utf-8"))  # type: ignore[call-overload]
    files["manifest.json"] = {k: v for k, v in about.items() if k not in ("sources", "manifest_sha256")}
    return files


def refusal(act: Callable[[], object], kind: type[InputError] = InputError) -> str:
    with pytest.raises(kind) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """A pipe as the standard input, which another thread fills."""
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(open(reading, "rb")))  # noqa: SIM115  # the reader closes it

    def fill() -> None:
        with open(writing, "wb") as file:
            file.write(data)

    threading.Thread(target=fill, daemon=True).start()


def test_the_same_records_from_a_file_packed_or_not_and_from_the_standard_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, rules = many().encode(), Rules(long="window", max_length=40)
    for shard, shards in ((64, 20), (1 << 26, 1)):
        monkeypatch.setattr(ingestion, "SHARD", shard)
        store = ingest([write(data)], Path("plain"), rules, overwrite=True)
        assert len(store.manifest["shards"]) >= shards
        assert sum(shard["records"] for shard in store.manifest["shards"]) == len(store) > 40
        other = ingest([write(bz2.compress(data), "packed")], Path("other"), rules, overwrite=True)
        assert (records(other), other.digest) == (records(store), store.digest)
        for packed in (data, gzip.compress(data)):
            pipe(monkeypatch, packed)
            other = ingest([STDIN], Path("piped"), rules, overwrite=True)
            assert (records(other), other.digest) == (records(store), store.digest)
    assert other.manifest["sources"] == [{"path": "-"}]
    assert content(other) == content(store)


class Threads(futures.ThreadPoolExecutor):
    """In place of a pool of processes."""

    def __init__(self, workers: int, mp_context: object) -> None:
        super().__init__(workers)


class Dying(Threads):
    def submit(self, *_: Any) -> Any:
        raise BrokenProcessPool


def test_two_processes_write_what_one_writes_and_find_the_first_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "SHARD", 300)
        files = [write(many(20, 0), "0.fasta"), write(many(20, 1), "1.fasta"), write(gzip.compress(b">z\nmk\n"), "z")]
        one = ingest(files, Path("one"))
        patch.setattr(ingestion, "ProcessPoolExecutor", Threads)
        assert content(ingest(files, Path("two"), workers=2)) == content(one)
        assert len(one) == 41
        files[1:] = [write(f"{many(20, k)}>bad\nM{k}\n{many(20, 3)[3:]}", f"{k}.fasta") for k in (1, 2)]
        before = sorted(Path().iterdir())
        message = refusal(lambda: ingest(files, Path("bad"), workers=2))
        assert message.startswith("1.fasta:")
        assert "record 'bad' has '1' at position 2" in message
        assert sorted(Path().iterdir()) == before
        patch.setattr(ingestion, "ProcessPoolExecutor", Dying)
        with pytest.raises(ChildProcessError, match="a worker process was killed"):
            ingest(files, Path("bad"), workers=2)
        assert sorted(Path().iterdir()) == before
    # Real processes, for two files that are too large for one piece. They know no `SHARD` of this process.
    files = [write(gzip.compress(text.encode()), f"{k}.gz") for k, text in enumerate((many(20, 2), many(20, 3)))]
    monkeypatch.setattr(ingestion, "SHARD", 300)
    pieces = ingest(files, Path("three"))
    other = ingest(files, Path("four"), workers=2)
    assert (records(other), other.digest) == (records(pieces), pieces.digest)


def test_a_range_in_which_no_record_begins_is_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 16)
    store = ingest([write("\n" * 40 + ">a\n" + "MKTA\n" * 40 + ">b\nMK\n>c\nM\n")], Path("out"))
    assert store.manifest["shards"] == [
        {"records": 1, "tokens": 161, "headers": 2},
        {"records": 2, "tokens": 5, "headers": 4},
    ]


def test_several_files_are_one_store_and_share_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(FASTA), write(">b\nMKT\n>c\nMM\n", "y.fasta")]
    store = ingest(files, Path("store"))
    assert ids(store) == ["b", "a", "7abc/A", "c"]
    assert store.notices[-1] == "a record that came twice was read once in 1 record (b)"
    write(">c\nMM\n>a\nMM\n", "y.fasta")
    wanted = "id 'a' has two different sequences"
    assert refusal(lambda: ingest(files, Path("bad"))).startswith(f"x.fasta, y.fasta: {wanted}")
    pipe(monkeypatch, b">p\nMK\n")
    assert ids(ingest([files[0], STDIN], Path("out"), workers=2)) == ["b", "a", "7abc/A", "p"]
    pipe(monkeypatch, b">a\nMM\n")
    assert refusal(lambda: ingest([files[0], STDIN], Path("bad"))).startswith(f"x.fasta, -: {wanted}")
    assert "can be read only once" in refusal(lambda: ingest([STDIN, STDIN], Path("bad")), UsageError)


def test_a_failing_ingest_leaves_nothing_behind_and_a_good_one_only_the_store() -> None:
    Path("here").mkdir()
    files = [write(FASTA), Path("bad.fasta")]
    for data in (None, ">a\nMK\n>b\nM1\n", ">a\nMK\n>a\nMM\n", "", b"\xff\xfe>\0", b"\x1f\x8b\x08\0"):
        if data is not None:
            write(data, "bad.fasta")
        before = sorted(Path().rglob("*"))
        assert "bad.fasta" in refusal(lambda: ingest(files, Path("here/store")))
        assert sorted(Path().rglob("*")) == before
    store = ingest([write(FASTA)], Path("new/store"))
    assert [path.name for path in Path("new").iterdir()] == ["store"]
    assert sorted(path.name for path in store.path.iterdir()) == sorted(DATA_FILES)
    assert store.path.stat().st_mode == Path("here").stat().st_mode
    assert {path.stat().st_mode for path in store.path.iterdir()} == {files[0].stat().st_mode}


def test_what_exists_is_replaced_only_by_a_whole_store_and_if_asked_for() -> None:
    old, out = content(ingest([write(FASTA)], Path("out"))), Path("out")
    write(">z\nMM\n")
    assert "exists already" in refusal(lambda: ingest([Path("x.fasta")], out), UsageError)
    for bad in (">a\nM7\n", ">a\nMK\n>a\nMM\n", ""):
        assert refusal(lambda: ingest([write(bad)], out, overwrite=True)).startswith("x.fasta")  # noqa: B023
    assert content(TokenStore(out)) == old
    Path("mine").write_text("mine")
    assert "is a file" in refusal(lambda: ingest([Path("x.fasta")], Path("mine"), overwrite=True), UsageError)
    assert Path("mine").read_text() == "mine"
    for name in (".", "..", "new/.."):
        message = refusal(lambda: ingest([write(FASTA)], Path(name), overwrite=True), UsageError)  # noqa: B023
        assert message.startswith(f"{name}: ")
    Path("link").symlink_to("out")
    assert ids(ingest([write(">z\nMM\n")], Path("link"), overwrite=True)) == ["z"]
    assert not Path("link").is_symlink()
    assert content(TokenStore(out)) == old, "the link is replaced, and not what it leads to"
    assert ids(ingest([Path("x.fasta")], out, overwrite=True)) == ["z"]
    assert sorted(path.name for path in Path().iterdir()) == ["link", "mine", "out", "x.fasta"]


def test_a_file_that_changes_while_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fasta, read = write(FASTA), ingestion.read_piece

    def slow(*arguments: object) -> object:
        records = read(*arguments)  # type: ignore[arg-type]
        with fasta.open("a") as file:
            file.write(">late\nMK\n")
        return records

    monkeypatch.setattr(ingestion, "read_piece", slow)
    assert "changed while being read" in refusal(lambda: ingest([fasta], Path("out")))
    assert sorted(Path().iterdir()) == [fasta]


# The cache.


def stores() -> list[Path]:
    return sorted((cache_directory() / "stores").glob("*"))


def sequences(store: TokenStore) -> list[str]:
    return [decode(store.residues(n)) for n in range(len(store))]


def test_a_file_is_ingested_once_and_an_edited_file_anew(tmp_path: Path) -> None:
    store = cached(tmp_path / write(FASTA))
    assert sequences(store) == ["MKT", "AGV", "W"]
    inodes = {path.name: path.stat().st_ino for path in store.path.iterdir()}
    again = cached(Path("x.fasta"))
    assert stores() == [store.path] == [again.path]
    assert {path.name: path.stat().st_ino for path in again.path.iterdir()} == inodes
    changed = Path("x.fasta").stat().st_mtime_ns
    write(FASTA.replace("MKT", "MKV"))
    os.utime("x.fasta", ns=(changed, changed))  # of the same size and time
    assert sequences(cached(Path("x.fasta")))[0] == "MKV"
    shutil.copy2("x.fasta", "y.fasta")
    assert cached(Path("x.fasta")).path != cached(Path("y.fasta")).path


def test_a_store_is_data_as_it_is_and_what_cannot_be_read_leaves_the_cache_empty() -> None:
    ingest([write(FASTA)], Path("out"))
    assert cached(Path("out")).path == Path("out")
    Path("out/rows.npy").write_bytes(b"")
    assert refusal(lambda: cached(Path("out"))).startswith("out/rows.npy: has changed since")
    assert refusal(lambda: cached(Path("none.fasta"))).startswith("none.fasta: no such file")
    Path("d").mkdir()
    assert refusal(lambda: cached(Path("d"))).startswith("d: is a directory")
    assert refusal(lambda: cached(write(">a\nM1\n"))).startswith("x.fasta:1: record 'a'")
    assert stores() == []


def test_a_damaged_copy_in_the_cache_is_replaced() -> None:
    whole = content(cached(write(FASTA)))
    for name in DATA_FILES:
        path = stores()[0] / name
        path.write_bytes(path.read_bytes()[::-1])
        assert content(cached(Path("x.fasta"))) == whole
        path.unlink()
        assert content(cached(Path("x.fasta"))) == whole
        assert len(stores()) == 1


def test_of_two_commands_one_reads_and_the_other_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def slowly(*arguments: object) -> TokenStore:
        reads.append(arguments)
        time.sleep(0.05)
        return ingest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ingestion, "ingest", slowly)
    fasta = write(FASTA)
    with futures.ThreadPoolExecutor(2) as pool:
        assert [store.find("7abc/A") for store in pool.map(cached, [fasta] * 2)] == [2, 2]
    assert len(reads) == len(stores()) == 1


# Deaths and disks.


class Killed(BaseException):
    """The process is gone: nothing of it changes a name from here on, so no cleanup happens."""


def die_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let this process die before the step-th change of a name."""
    left = step

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*arguments, **options)

        return run

    for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
        patch.setattr(os, name, dying(getattr(os, name)))


def test_a_killed_ingest_leaves_no_store_and_the_same_call_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step, also of overwriting: the old store is there, or the new one, and nothing else in the end."""
    monkeypatch.setattr(ingestion, "SHARD", 100)
    out, old, new = Path("out"), write(">old\nMKTAAGV\n", "old.fasta"), write(many(3))
    contents = [content(ingest([file], Path(file.stem))) for file in (old, new)]
    for overwrite in (False, True):
        for step in range(1000):
            shutil.rmtree(out, ignore_errors=True)
            if overwrite:
                ingest([old], out)
            with monkeypatch.context() as patch:
                die_at(step, patch)
                try:
                    ingest([new], out, overwrite=overwrite)
                    died = False
                except Killed:
                    died = True
            paths._IN_USE.clear()  # another process would not know them
            if out.exists():
                assert content(TokenStore(out)) in contents
            assert died or content(TokenStore(out)) == contents[1]
            assert content(ingest([new], out, overwrite=True)) == contents[1]
            assert sorted(path.name for path in Path().iterdir()) == ["old", "old.fasta", "out", "x", "x.fasta"]
            if not died:
                break
        assert step > 15


def test_a_full_disk_is_an_error_and_never_a_short_store() -> None:
    fasta, (soft, hard) = write(">a\n" + "MKTAAGV\n" * 30_000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert refusal(lambda: ingest([fasta], Path("out")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not Path("out").exists()
    assert len(ingest([fasta], Path("out"))) == 1


# Ids that come more than once. `test_ingest_fuzz` has the policies.


def test_an_id_with_two_sequences_is_an_error_and_the_first_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(">z\nMK\n>a\nMK\n>b\nM\n>b\nM\n>a\nmk\n", "one.fasta")
    two = write(gzip.compress(b"\r\n>a x\r\nM K\r\n>b\r\nMM\r\n>a\r\nMM\r\n"), "two.gz")
    for shard in (8, 1 << 26):
        monkeypatch.setattr(ingestion, "SHARD", shard)
        for files, name in (([one, two], "b"), ([two, one], "a"), ([two], "a")):
            message = refusal(lambda: ingest(files, Path("out")))  # noqa: B023
            assert message.startswith(f"{', '.join(map(str, files))}: id '{name}' has two different sequences")
    assert sorted(path.name for path in Path().iterdir()) == ["one.fasta", "two.gz"]


def same_key(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Ids share a key if they begin alike."""
    return np.array([name[0] for name in names], np.uint64)


def test_ids_that_share_a_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "keys", same_key)
    distinct = "".join(f">{letter}{k}\nMK\n" for k in range(5) for letter in "ab")
    store = ingest([write(distinct)], Path("distinct"))
    assert len(records(store)) == 10
    assert (store.notices, store.find("a9")) == ([], None)
    again = distinct + ">a3\nMM\n>b1\nMK\n>a9\nM\n>a3\nMT\n>c\nM\n"
    assert "id 'a3' has two" in refusal(lambda: ingest([write(again)], Path("out")))
    assert ids(ingest([Path("x.fasta")], Path("first"), on_duplicate="first"))[10:] == ["a9", "c"]
    suffix = ingest([Path("x.fasta")], Path("suffix"), on_duplicate="suffix")
    assert [header for header, _ in records(suffix)][10:] == ["a3_2", "b1_2", "a9", "a3_3", "c"]
    store = ingest([write(">a\nM\n>a\nK\n>a_2\nT\n>a\nV\n")], Path("free"), on_duplicate="suffix")
    assert ids(store) == ["a", "a_3", "a_2", "a_4"], "numbers that are free"
