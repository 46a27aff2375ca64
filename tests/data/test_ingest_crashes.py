"""Ingestion that is interrupted: whatever the moment, no half of a store is one, and the same call finishes it."""

import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmshard.data.fasta.sources import STDIN
from esmshard.data.fasta.symbols import Rules
from esmshard.data.store import ingestion
from esmshard.data.store.ingestion import cached, ingest, ingest_part, merge
from esmshard.data.store.token_store import TokenStore, is_store
from esmshard.errors import InputError, UsageError

FASTA = ">b first\nMKT\n>a\nagv*\n>7abc/A\nW\n>c\nMKTAAGV\n>d\nMJ\n>b x\nMKT\n"
WHAT_CHANGES = ("rename", "replace", "mkdir", "link", "unlink", "rmdir")
GOING_ON, STARTING_OVER = (
    "out.partial: going on with an interrupted ingest",
    "out.partial: left by an ingest of other files or with other options; starting over",
)


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory where there is such a place: some hundreds of stores are made here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        (Path(scratch) / "run").mkdir()
        monkeypatch.chdir(Path(scratch) / "run")
        monkeypatch.setenv("ESMSHARD_CACHE", f"{scratch}/cache")
        monkeypatch.setattr(ingestion, "SHARD", 16)
        yield Path(scratch)
        monkeypatch.chdir("/")


@pytest.fixture
def fasta(directory: Path) -> Path:
    path = directory / "x.fasta"
    path.write_text(FASTA)
    return path


@pytest.fixture
def two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 40)


def content(path: Path) -> dict[str, bytes]:
    TokenStore(path).verify()
    return {file.name: file.read_bytes() for file in path.iterdir()}


def left() -> list[str]:
    """What lies in the directory, but for what was about to be removed."""
    return sorted(path.name for path in Path().iterdir() if not path.name.startswith("."))


@contextmanager
def interrupted_after(pieces: int) -> Iterator[list[int]]:
    """`ingest` stops before it reads another piece. Gives the pieces that were requested."""
    read, requested = ingestion.read_piece, []

    def stop(work: Path, plan: dict[str, Any], fastas: list[Path], number: int, *rest: Any) -> int:
        requested.append(number)
        if len(requested) > pieces:
            raise KeyboardInterrupt
        return read(work, plan, fastas, number, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingestion, "read_piece", stop)
        yield requested


@pytest.mark.parametrize("done", [0, 1, 3])
def test_finished_pieces_are_not_read_again(fasta: Path, done: int) -> None:
    whole = content(ingest([fasta], Path("whole")).path)
    said: list[str] = []
    with interrupted_after(done) as requested, pytest.raises(KeyboardInterrupt):
        ingest([fasta], Path("out"), say=said.append)
    assert requested == list(range(done + 1))
    finished = {path: path.stat().st_ino for path in Path("out.partial").glob("piece-*/tokens-*")}
    assert sorted(path.parent.name for path in finished) == [f"piece-{k:05d}" for k in range(done)]
    assert left() == ["out.partial", "whole"]
    with interrupted_after(100) as requested:
        store = ingest([fasta], Path("out"), say=said.append)
    assert requested == list(range(done, 4))
    assert said == [GOING_ON]
    assert content(store.path) == whole
    for path, inode in finished.items():
        assert (store.path / f"tokens-{path.parent.name[-5:]}.u8").stat().st_ino == inode
    assert left() == ["out", "whole"]


def test_other_options_or_files_start_over(fasta: Path) -> None:
    for change in ("options", "files", "content", "duplicates"):
        with interrupted_after(2), pytest.raises(KeyboardInterrupt):
            ingest([fasta], Path("out"))
        said: list[str] = []
        rules, fastas = Rules(), [fasta]
        if change == "options":
            rules = Rules(long="crop", max_length=2)
        elif change == "files":
            fastas.append(fasta.with_name("y.fasta"))
            fastas[1].write_text(">y\nM\n")
        elif change == "content":
            fasta.write_text(FASTA.replace("W", "C"))
        duplicate = "first" if change == "duplicates" else "error"
        store = ingest(fastas, Path("out"), rules, on_duplicate=duplicate, say=said.append)  # type: ignore[arg-type]
        assert said == [STARTING_OVER]
        fresh = ingest(fastas, Path("fresh"), rules, on_duplicate=duplicate)  # type: ignore[arg-type]
        assert content(store.path) == content(fresh.path)
        assert store.find("y") == (5 if change == "files" else None)
        for path in ("out", "fresh"):
            ingestion._remove(Path(path))


def test_a_pipe_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))  # type: ignore[type-var]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    pipe(b">a\nMK\n")
    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "_merge", stop)
        with pytest.raises(KeyboardInterrupt):
            ingest([STDIN], Path("out"))
    pipe(b">z\nMM\n")
    said: list[str] = []
    assert ingest([STDIN], Path("out"), say=said.append).id(0) == "z"
    assert said == [STARTING_OVER]


def test_pieces_that_have_become_a_store_are_not_read_again(fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "without_duplicates", stop)
        with pytest.raises(KeyboardInterrupt):
            ingest([fasta], Path("out"))
    with interrupted_after(100) as requested:
        assert len(ingest([fasta], Path("out"))) == 5
    assert requested == []


def test_an_interrupted_ingest_into_the_cache_goes_on(fasta: Path) -> None:
    with interrupted_after(2), pytest.raises(KeyboardInterrupt):
        cached(fasta)
    with interrupted_after(100) as requested:
        assert cached(fasta).find("d") == 4
    assert requested == [2, 3]


class Crash(BaseException):
    """Nothing handles it, and nothing is tidied up after it: as if the process were killed."""


@contextmanager
def crash_before(step: int) -> Iterator[None]:
    """From the `step`-th change of a directory, array or text file on, nothing is changed any more."""
    steps = iter(range(1, 1 << 30))

    def dying(act: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def maybe(*arguments: Any, **options: Any) -> Any:
            now = next(steps)
            if now == step and half is not None:
                half(*arguments)
            if now >= step:
                raise Crash
            return act(*arguments, **options)

        return maybe

    write_text = Path.write_text
    with pytest.MonkeyPatch.context() as patch:
        for name in WHAT_CHANGES:
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(np, "save", dying(np.save, lambda path, _: path.write_bytes(b"\x93NUMPY")))
        patch.setattr(np.lib.format, "open_memmap", dying(np.lib.format.open_memmap))
        patch.setattr(
            Path, "write_text", dying(write_text, lambda path, text: write_text(path, text[: len(text) // 2]))
        )
        yield


def crashes(act: Callable[[], object]) -> Iterator[int]:
    """Crash `act` at each of its steps, one after the other; the last time it gets through."""
    for step in range(1, 1000):
        try:
            with crash_before(step):
                act()
            return
        except Crash:
            pass
        yield step


def in_child(act: Callable[[], object]) -> int:
    """Exit code of a copy of this process that does something."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def clear() -> None:
    for path in Path().iterdir():
        ingestion._remove(path)


def test_a_crash_at_any_step_leaves_no_half_store_and_the_same_call_finishes(fasta: Path, two_pieces: None) -> None:
    out = Path("out")
    whole = content(ingest([fasta], Path("whole")).path)
    clear()
    steps = 0
    for step in crashes(lambda: ingest([fasta], out)):
        steps = step
        if out.exists():
            assert content(out) == whole, step
            with pytest.raises(UsageError, match="exists already"):
                ingest([fasta], out)
        else:
            assert content(ingest([fasta], out).path) == whole, step
            assert left() == ["out"], step
        clear()
    assert steps > 60
    assert content(out) == whole


def test_a_crash_at_any_step_of_overwriting_keeps_the_old_store_or_makes_the_new_one(
    fasta: Path, two_pieces: None
) -> None:
    out, other = Path("out"), fasta.with_name("other.fasta")
    other.write_text(">old\nMKTAAGV\n>older\nMKT\n")
    unique = FASTA.replace(">b x", ">bb x")
    fasta.write_text(unique)  # so that the store in the directory of the pieces is the one that is moved out of it
    old, new = content(ingest([other], Path("old")).path), content(ingest([fasta], Path("new")).path)

    def prepare() -> None:
        clear()
        ingest([other], out)
        with interrupted_after(1), pytest.raises(KeyboardInterrupt):
            ingest([other, fasta], Path("out"), overwrite=True)  # pieces of something else

    prepare()
    steps = 0
    for step in crashes(lambda: ingest([fasta], out, overwrite=True, say=lambda _: None)):
        steps = step
        if out.exists():
            assert content(out) in (old, new), step
        assert content(ingest([fasta], out, overwrite=True, say=lambda _: None).path) == new, step
        assert left() == ["out"], step
        prepare()
    assert steps > 60
    assert content(out) == new


def test_a_crash_at_any_step_of_parts_and_merge_is_mended_by_the_same_commands(fasta: Path, two_pieces: None) -> None:
    out = Path("out")
    whole = content(ingest([fasta], Path("whole"), on_duplicate="suffix").path)
    clear()

    def all_steps() -> None:
        for part in (2, 1):
            ingest_part([fasta], out, part, 2, on_duplicate="suffix")
        merge(out, overwrite=True)

    for step in crashes(all_steps):
        if is_store(out):
            assert content(out) == whole, step
        all_steps()
        assert content(out) == whole, step
        assert left() == ["out"], step
        clear()


SLOW = """
import sys, time
from pathlib import Path
from esmshard.data.store import ingestion

ingestion.SHARD = 16
read = ingestion.read_piece
def slow(work, plan, fastas, number, *rest):
    if number == 2:
        print("two pieces", flush=True)
        time.sleep(60)
    return read(work, plan, fastas, number, *rest)
ingestion.read_piece = slow
ingestion.ingest([Path(sys.argv[1])], Path("out"))
"""


def test_a_killed_process_is_gone_on_with(fasta: Path) -> None:
    whole = content(ingest([fasta], Path("whole")).path)
    with subprocess.Popen([sys.executable, "-c", SLOW, str(fasta)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"two pieces\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert left() == ["out.partial", "whole"]
    with interrupted_after(100) as requested:
        assert content(ingest([fasta], Path("out")).path) == whole
    assert requested == [2, 3]


class DyingPool:
    """A pool whose second task takes its process down."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tasks = 0

    def __enter__(self) -> "DyingPool":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self.tasks += 1
        future: Future[Any] = Future()
        if self.tasks == 2:
            future.set_exception(BrokenProcessPool("A process in the process pool was terminated abruptly"))
        else:
            future.set_result(act(*arguments))
        return future

    def shutdown(self, **_: Any) -> None: ...


def test_a_worker_that_is_killed_costs_its_piece_only(fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "ProcessPoolExecutor", DyingPool)
        with pytest.raises(ChildProcessError, match="a worker process was killed, perhaps because memory ran out; run"):
            ingest([fasta], Path("out"), workers=2)
    with interrupted_after(100) as requested:
        ingest([fasta], Path("out"))
    assert requested == [1]


def test_a_full_disk_is_an_error_and_never_a_short_store(fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "SHARD", 1 << 26)
    fasta.write_text(">a\n" + "MKTAAGV\n" * 30_000)
    whole = content(ingest([fasta], Path("whole")).path)

    def cramped() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            ingest([fasta], Path("out"))
        except InputError:
            os._exit(3)
        except OSError:
            os._exit(4)

    assert in_child(cramped) == 3
    assert left() == ["out.partial", "whole"]
    assert content(ingest([fasta], Path("out")).path) == whole


def test_two_processes_that_claim_the_same_name_do_not_mix(fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [ingestion._plan([fasta], Rules(policy), "error") for policy in ("mask", "drop")]  # type: ignore[arg-type]
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        ingestion._claim(Path("out.partial"), plans[1])  # another process, a moment earlier
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(UsageError, match="belongs to an ingest of other files or with other options"):
        ingestion._claim(Path("out.partial"), plans[0])
    assert ingestion._read_plan(Path("out.partial")) == plans[1]
    assert [path.name for path in Path().iterdir()] == ["out.partial"]


def test_the_pieces_of_somebody_else_are_left_alone(fasta: Path) -> None:
    Path("out.partial").mkdir()
    Path("out.partial/mine").write_text("mine")
    with pytest.raises(InputError, match=r"^out.partial/plan.json: cannot be read; delete out.partial and ingest"):
        ingest([fasta], Path("out"))
    assert Path("out.partial/mine").read_text() == "mine"


def test_a_piece_that_two_jobs_read_is_there_once(fasta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest_part([fasta], Path("out"), 1, 1)
    whole = content(merge(Path("out")).path)
    clear()
    plan = ingestion._plan([fasta], Rules(), "error")
    ingestion._claim(Path("out.partial"), plan)
    for k in (0, 0, 1, 2, 3, 2):
        ingestion.read_piece(Path("out.partial"), plan, [fasta], k)
    assert sorted(path.name for path in Path("out.partial").iterdir()) == [
        *(f"piece-{k:05d}" for k in range(4)),
        "plan.json",
    ]
    assert content(merge(Path("out")).path) == whole
