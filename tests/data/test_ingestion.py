"""Ingestion: the same bytes whoever reads the pieces, one sentence for what cannot be read, and the cache."""

import bz2
import gzip
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
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
from esmshard.io import store as ingestion
from esmshard.io.paths import cache_directory
from esmshard.io.sequences import STDIN
from esmshard.io.store import OnDuplicate, TokenStore, cached, ingest
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
        sequence = "".join(
            draw.choices("ACDEFGHIKLMNPQRSTVWYXacdJ-.", weights=[9] * 21 + [1] * 6, k=draw.randrange(1, 60))
        )
        newline = draw.choice(["\n", "\n", "\r\n", "\r"])
        lines = [sequence[at : at + 20] for at in range(0, len(sequence), 20)]
        text += newline.join([f">r{seed}_{k} {'x' * draw.randrange(20)}", "A" + lines[0], *lines[1:], ""])
    return text


def records(store: TokenStore) -> list[tuple[str, str]]:
    """(header, sequence) of each, once all else that a store says of them was found to agree."""
    found = [(store.description(n), decode(store.residues(n))) for n in range(len(store))]
    ids = [header.split()[0] for header, _ in found]
    assert [store.find(name) for name in ids] == list(range(len(store)))
    assert store.lengths.tolist() == [len(sequence) for _, sequence in found]
    assert store.manifest["residues"] == sum(len(sequence) for _, sequence in found)
    store.verify()
    return found


def content(store: TokenStore) -> dict[str, object]:
    """All that is in a store but where it came from."""
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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[type-var]


@pytest.mark.parametrize("shard", [64, 200, 1 << 26])
def test_the_same_records_from_a_file_packed_or_not_and_from_the_standard_input(
    shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "SHARD", shard)
    data = many().encode()
    rules = Rules(long="window", max_length=40)
    store = ingest([write(data)], Path("plain"), rules)
    assert len(store.manifest["shards"]) >= {64: 20, 200: 9, 1 << 26: 1}[shard]
    assert sum(shard["records"] for shard in store.manifest["shards"]) == len(store) > 40
    store.verify()
    for name, packed in (("x.gz", gzip.compress(data)), ("x.bz2", bz2.compress(data))):
        other = ingest([write(packed, name)], Path(f"{name}.store"), rules)
        assert (records(other), other.digest) == (records(store), store.digest)
    pipe(monkeypatch, data)
    piped = ingest([STDIN], Path("piped"), rules)
    assert (records(piped), piped.digest) == (records(store), store.digest)
    if shard == 1 << 26:
        assert content(piped) == content(store)
    assert TokenStore(Path("piped")).manifest["sources"] == [{"path": "-"}]


def test_two_processes_write_what_one_writes_and_find_the_first_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 300)
    files = [write(many(20, seed), f"{seed}.fasta") for seed in range(2)] + [write(gzip.compress(b">z\nmk\n"), "z.gz")]
    one = ingest(files, Path("one"), workers=1)
    assert content(ingest(files, Path("two"), workers=2)) == content(one)
    assert len(one) == 41
    text = files[1].read_bytes().decode()
    text = text.replace(">r1_2 ", ">bad M7\nM7\n>r1_2 ").replace(">r1_19 ", ">bad M8\nM8\n>r1_19 ")
    files[1].write_bytes(text.encode())
    line = text[: text.index(">bad M7")].replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
    before = sorted(Path().iterdir())
    message = refusal(lambda: ingest(files, Path("bad"), workers=2))
    assert message.startswith(f"1.fasta:{line}: record 'bad' has '7' at position 2")
    assert sorted(Path().iterdir()) == before


def pieces(*names: str) -> list[tuple[list[int], int, int | None]]:
    return [(one.sources, one.start, one.stop) for one in ingestion._pieces([Path(name) for name in names])]


def test_pieces_follow_from_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 100)
    for name, size in (("10", 10), ("40", 40), ("50", 50), ("100", 100), ("101", 101), ("250", 250)):
        write(b">" * size, name)
    write(gzip.compress(random.Random(0).randbytes(300), mtime=0), "gz")  # 300 bytes and more
    assert pieces("10") == [([0], 0, None)]
    assert pieces("10", "40", "50") == [([0, 1, 2], 0, None)]
    assert pieces("10", "40", "50", "10") == [([0, 1, 2], 0, None), ([3], 0, None)]
    assert pieces("100", "10", "100") == [([0], 0, None), ([1], 0, None), ([2], 0, None)]
    assert pieces("101") == [([0], 0, 100), ([0], 100, 200)]
    assert pieces("10", "250", "40", "50") == [
        ([0], 0, None),
        ([1], 0, 100),
        ([1], 100, 200),
        ([1], 200, 300),
        ([2, 3], 0, None),
    ]
    assert pieces("10", "gz", "10") == [([0], 0, None), ([1], 0, None), ([2], 0, None)]
    assert pieces("10", "-", "10") == [([0], 0, None), ([1], 0, None), ([2], 0, None)]


def test_ranges_in_which_no_record_begins_are_no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 16)
    store = ingest([write("\n" * 40 + ">a\n" + "MKTA\n" * 40 + ">b\nMK\n>c\nM\n")], Path("out"))
    assert store.lengths.tolist() == [160, 2, 1]
    assert store.manifest["shards"] == [
        {"records": 1, "tokens": 161, "headers": 2},
        {"records": 2, "tokens": 5, "headers": 4},
    ]


def test_several_files_are_one_store_and_share_their_ids() -> None:
    files = [write(">c\nMM\n", "y.fasta"), write(FASTA)]
    store = ingest(files, Path("store"))
    assert [(store.id(n), decode(store.residues(n))) for n in range(len(store))] == [
        ("c", "MM"), ("b", "MKT"), ("a", "AGV"), ("7abc/A", "W"),
    ]  # fmt: skip
    write(">b\nMKT\n>c\nMM\n", "y.fasta")
    store = ingest([Path("x.fasta"), Path("y.fasta")], Path("again"))
    assert [store.id(n) for n in range(len(store))] == ["b", "a", "7abc/A", "c"]
    assert store.notices[-1] == "a record that came twice was read once in 1 record (b)"
    write(">c\nMM\n>a\nMM\n", "y.fasta")
    wanted = "x.fasta, y.fasta: 'a' comes twice with two sequences"
    assert refusal(lambda: ingest([Path("x.fasta"), Path("y.fasta")], Path("bad"))).startswith(wanted)


@pytest.mark.parametrize("data", [">a\nMK\n>b\nM1\n", ">a\nMK\n>a\nMM\n", "", None, b"\xff\xfe>\0", b"\x1f\x8b\x08\0"])
def test_a_failing_ingest_leaves_nothing_behind(data: str | bytes | None) -> None:
    bad = Path("bad.fasta")
    if data is not None:
        write(data, "bad.fasta")
    Path("here").mkdir()
    files = [write(FASTA), bad]
    before = sorted(Path().rglob("*"))
    for out in ("store", "here/store"):
        assert "bad.fasta" in refusal(lambda: ingest(files, Path(out)))  # noqa: B023
        assert sorted(Path().rglob("*")) == before


def test_a_good_ingest_leaves_only_the_store_with_the_permissions_of_any_file() -> None:
    store = ingest([write(FASTA)], Path("new/store"))
    assert sorted(path.name for path in Path().iterdir()) == ["new", "x.fasta"]
    assert [path.name for path in Path("new").iterdir()] == ["store"]
    assert sorted(path.name for path in store.path.iterdir()) == sorted(DATA_FILES)
    Path("any").mkdir()
    Path("any/file").write_text("")
    assert store.path.stat().st_mode == Path("any").stat().st_mode
    assert {path.stat().st_mode for path in store.path.iterdir()} == {Path("any/file").stat().st_mode}


@pytest.mark.parametrize("kind", ["store", "file"])
def test_what_exists_is_not_overwritten(kind: str) -> None:
    fasta, out = write(FASTA), Path("out")
    if kind == "store":
        ingest([fasta], out)
    else:
        out.write_text("mine")
    before = {p.name: p.read_bytes() for p in out.iterdir()} if out.is_dir() else out.read_bytes()
    write(">z\nMM\n")
    assert refusal(lambda: ingest([fasta], out), UsageError).startswith("out: exists already")
    if kind != "store":
        assert refusal(lambda: ingest([fasta], out, overwrite=True), UsageError).startswith("out: is a file")
    assert before == ({p.name: p.read_bytes() for p in out.iterdir()} if out.is_dir() else out.read_bytes())
    assert sorted(path.name for path in Path().iterdir()) == ["out", "x.fasta"]


@pytest.mark.parametrize("name", [".", "..", "new/.."])
def test_a_store_needs_a_name(name: str) -> None:
    message = refusal(lambda: ingest([write(FASTA)], Path(name), overwrite=True), UsageError)
    assert message == f"{name}: give the directory of the store a name"


def test_an_old_store_is_replaced_when_the_new_one_is_whole() -> None:
    out = Path("out")
    old = content(ingest([write(FASTA)], out))
    for bad in (">a\nM7\n", ">a\nMK\n>a\nMM\n", ""):
        assert refusal(lambda: ingest([write(bad)], out, overwrite=True)).startswith("x.fasta")  # noqa: B023
        assert content(TokenStore(out)) == old
    store = ingest([write(">z\nMM\n")], out, overwrite=True)
    assert [store.id(n) for n in range(len(store))] == ["z"]
    assert sorted(path.name for path in Path().iterdir()) == ["out", "x.fasta"]


def test_a_link_to_a_store_is_replaced_and_not_followed() -> None:
    real = ingest([write(FASTA)], Path("real"))
    Path("out").symlink_to("real")
    assert ingest([write(">z\nMM\n")], Path("out"), overwrite=True).find("z") == 0
    assert not Path("out").is_symlink()
    assert TokenStore(real.path).find("b") == 0


def test_the_standard_input_is_read_once_and_here(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "-: the standard input can be read once; name it once"
    assert refusal(lambda: ingest([STDIN, STDIN], Path("out")), UsageError) == wanted
    pipe(monkeypatch, b">p\nMK\n")
    store = ingest([write(FASTA), STDIN], Path("out"), workers=2)
    assert [store.id(n) for n in range(len(store))] == ["b", "a", "7abc/A", "p"]
    pipe(monkeypatch, b">a\nMM\n")
    message = refusal(lambda: ingest([write(FASTA), STDIN], Path("again")))
    assert message.startswith("x.fasta, -: 'a' comes twice with two sequences; rename one of the two, or type")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_real_pipe(pack: Callable[[bytes], bytes]) -> None:
    data = "".join(f">r{k} é\nMKTAAGV\n" for k in range(20_000)).encode()
    command = [sys.executable, "-m", "esmshard", "ingest", "-", "-o", "out"]
    done = subprocess.run(command, input=pack(data), capture_output=True, check=True)
    assert done.stdout == b"out: 20,000 records, 140,000 residues\n"
    assert TokenStore(Path("out")).find("r19999") == 19_999


def test_a_file_that_changes_while_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fasta, read = write(FASTA), ingestion.read_piece

    def slow(*arguments: object) -> object:
        records = read(*arguments)  # type: ignore[arg-type]
        with fasta.open("a") as file:
            file.write(">late\nMK\n")
        return records

    monkeypatch.setattr(ingestion, "read_piece", slow)
    assert refusal(lambda: ingest([fasta], Path("out"))) == "x.fasta: changed while being read; ingest again"
    assert sorted(Path().iterdir()) == [fasta]


def test_records_are_counted_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ingestion, "INTERVAL", 0)
    monkeypatch.setattr(ingestion, "SHARD", 10)
    ingest([write(FASTA)], Path("out"), say=said.append)
    assert said == ["ingest: 1 records", "ingest: 2 records", "ingest: 3 records"]
    said.clear()
    monkeypatch.setattr(ingestion, "INTERVAL", 1000)
    ingest([write(FASTA)], Path("again"), say=said.append)
    assert said == []


# The cache.


def stores() -> list[Path]:
    return sorted((cache_directory() / "stores").glob("*"))


def sequences(store: TokenStore) -> list[str]:
    return [decode(store.residues(n)) for n in range(len(store))]


def test_a_file_is_ingested_once(tmp_path: Path) -> None:
    store = cached(tmp_path / write(FASTA))
    assert sequences(store) == ["MKT", "AGV", "W"]
    inodes = {path.name: path.stat().st_ino for path in store.path.iterdir()}
    again = cached(Path("x.fasta"))
    assert stores() == [store.path] == [again.path]
    assert {path.name: path.stat().st_ino for path in again.path.iterdir()} == inodes
    assert sorted(inodes) == sorted(DATA_FILES)


def test_an_edited_file_is_read_anew() -> None:
    fasta = write(FASTA)
    cached(fasta)
    write(FASTA.replace("MKT", "MKTT"))
    assert sequences(cached(fasta))[0] == "MKTT"
    changed = fasta.stat().st_mtime_ns
    write(FASTA.replace("MKT", "MKTV"))  # of the same size
    os.utime(fasta, ns=(changed + 1000, changed + 1000))
    assert sequences(cached(fasta))[0] == "MKTV"


def test_files_with_equal_content_are_two_stores() -> None:
    fasta = write(FASTA)
    shutil.copy2(fasta, "y.fasta")
    assert cached(fasta).path != cached(Path("y.fasta")).path


def test_a_store_is_data_as_it_is() -> None:
    ingest([write(FASTA)], Path("out"))
    assert cached(Path("out")).path == Path("out")
    assert stores() == []
    Path("out/rows.npy").write_bytes(b"")
    assert refusal(lambda: cached(Path("out"))).startswith("out/rows.npy: is not as it was written")


@pytest.mark.parametrize("damage", ["missing", "empty", "altered"])
@pytest.mark.parametrize("name", DATA_FILES)
def test_a_damaged_copy_in_the_cache_is_replaced(name: str, damage: str) -> None:
    path = cached(write(FASTA)).path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[::-1] if damage == "altered" else b"")
    store = cached(Path("x.fasta"))
    assert [store.id(n) for n in range(len(store))] == ["b", "a", "7abc/A"]
    assert sequences(store) == ["MKT", "AGV", "W"]
    assert stores() == [store.path]


def test_what_cannot_be_read_leaves_the_cache_empty() -> None:
    assert refusal(lambda: cached(Path("none.fasta"))) == "none.fasta: no such file or directory"
    Path("d").mkdir()
    assert refusal(lambda: cached(Path("d"))) == "d: is a directory; a FASTA file is expected"
    assert refusal(lambda: cached(write(">a\nM1\n"))).startswith("x.fasta:1: record 'a'")
    assert stores() == []


def test_of_two_processes_one_reads_and_the_other_waits() -> None:
    fasta, children = write(FASTA), []

    def slowly(*arguments: object) -> TokenStore:
        with open("log", "a") as log:
            log.write("read\n")
        time.sleep(0.3)
        return ingest(*arguments)  # type: ignore[arg-type]

    for _ in range(2):
        child = os.fork()
        if child == 0:
            ingestion.ingest = slowly  # type: ignore[assignment]
            os._exit(0 if cached(fasta).find("7abc/A") == 2 else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert Path("log").read_text() == "read\n"
    assert len(stores()) == 1


@pytest.mark.skipif(os.name != "posix", reason="processes are forked")
def test_a_killed_ingest_leaves_no_store_and_the_same_call_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step, also of overwriting: the old store is there, or the new one, and nothing else in the end."""
    monkeypatch.setattr(ingestion, "SHARD", 40)
    out, old, new = Path("out"), write(">old\nMKTAAGV\n", "old.fasta"), write(many(8))
    contents = [content(ingest([file], Path(file.stem))) for file in (old, new)]
    for overwrite in (False, True):
        for step in range(1000):
            shutil.rmtree(out, ignore_errors=True)
            if overwrite:
                ingest([old], out)
            child = os.fork()
            if child == 0:
                _die_at(step)
                ingest([new], out, overwrite=overwrite)
                os._exit(0)
            died = os.waitpid(child, 0)[1] != 0
            if out.exists():
                assert content(TokenStore(out)) in contents
            assert died or content(TokenStore(out)) == contents[1]
            assert content(ingest([new], out, overwrite=True)) == contents[1]
            assert sorted(path.name for path in Path().iterdir()) == ["old", "old.fasta", "out", "x", "x.fasta"]
            if not died:
                break
        assert step > 20


def _die_at(step: int) -> None:
    """End this process before the step-th change of a name."""
    left = step

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return change(*arguments, **options)

        return run

    for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))


def test_a_full_disk_is_an_error_and_never_a_short_store() -> None:
    fasta = write(">a\n" + "MKTAAGV\n" * 30_000)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            ingest([fasta], Path("out"))
        except InputError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert not Path("out").exists()
    assert len(ingest([fasta], Path("out"))) == 1


def test_a_killed_worker_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __init__(self, *_: object, **__: object) -> None:
            self.pool = futures.ThreadPoolExecutor(1)

        def __enter__(self) -> "Dying":
            return self

        def __exit__(self, *_: object) -> None:
            self.pool.shutdown()

        def submit(self, *_: object) -> Any:
            return self.pool.submit(self.die)

        def shutdown(self, **_: object) -> None:
            pass

        def die(self) -> None:
            raise BrokenProcessPool

    monkeypatch.setattr(ingestion, "ProcessPoolExecutor", Dying)
    monkeypatch.setattr(ingestion, "SHARD", 16)
    with pytest.raises(ChildProcessError, match="a worker process was killed, perhaps because memory ran out; run the"):
        ingest([write(FASTA)], Path("out"), workers=2)
    assert [path.name for path in Path().iterdir()] == ["x.fasta"]


# Ids that come more than once. `test_ingest_fuzz` has the policies.


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


def same_key(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Ids share a key if they begin alike."""
    return np.array([name[0] for name in names], np.uint64)


def test_ids_that_share_a_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "keys", same_key)
    distinct = "".join(f">{letter}{k}\nMK\n" for k in range(5) for letter in "ab")
    assert len(records(ingest([write(distinct)], Path("distinct")))) == 10
    assert (TokenStore(Path("distinct")).notices, TokenStore(Path("distinct")).find("a9")) == ([], None)
    again = distinct + ">a3\nMM\n>b1\nMK\n>a9\nM\n>a3\nMT\n>c\nM\n"
    wanted = "x.fasta: 'a3' comes twice with two sequences"
    assert refusal(lambda: ingest([write(again)], Path("out"))).startswith(wanted)
    first = [header for header, _ in records(ingest([write(again)], Path("first"), on_duplicate="first"))]
    assert first == [f"{letter}{k}" for k in range(5) for letter in "ab"] + ["a9", "c"]
    suffix = [header for header, _ in records(ingest([write(again)], Path("suffix"), on_duplicate="suffix"))]
    assert suffix[10:] == ["a3_2", "b1_2", "a9", "a3_3", "c"]


@pytest.mark.parametrize("policy", ["error", "first", "suffix"])
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
