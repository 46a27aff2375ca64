"""A process may die at any moment, and a disk may fill up: finished checkpoints stay, and no other is used."""

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError

sys.path.insert(0, str(Path(__file__).parent))
from drills import contents, fork, killed_at, refused_at, tensors, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; step 2 is the best."""
    directory = tmp_path / "run" / "checkpoints"
    write(directory, 1)
    write(directory, 2, best=True)
    return directory


def copy_of(directory: Path, n: int) -> Path:
    return Path(shutil.copytree(directory, directory.parent.parent / f"run{n}" / "checkpoints"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def go_on(directory: Path) -> int:
    """Go on as a restarted run does, and return its first step. Its next checkpoint leaves nothing unusual."""
    manifest.sweep(directory)
    newest = manifest.newest_good(directory, pytest.fail)
    assert newest is not None
    step = contents(newest)
    assert newest.name == f"step_{step:06d}"
    assert contents(write(directory, step + 1, best=True)) == step + 1
    left = [name for name in names(directory) if not name.endswith(".abandoned")]
    assert left == ["BEST", "LATEST", f"step_{step:06d}", f"step_{step + 1:06d}"]
    assert (directory / "LATEST").read_text() == f"step_{step + 1:06d}\n"
    return step


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_save_that_is_killed_at_any_change(directory: Path, power_cut: bool) -> None:
    found = []
    for n in range(1, 100):
        copy = copy_of(directory, n)
        if not killed_at(n, copy, lambda it: write(it, 3, best=True), power_cut=power_cut):
            break
        best = manifest.pointed(copy, "BEST")
        assert best is not None
        manifest.verify(best)
        found.append(go_on(copy))
    # First the files, manifest and name of step 3; then the pointers, and the removal of step 1 with its three files.
    assert found.index(3) >= 7
    assert len(found) - found.index(3) >= 8
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_a_killed_save_over_a_checkpoint_of_the_same_step(directory: Path) -> None:
    """The older one was left by another run in the same place."""
    found = []
    for n in range(1, 100):
        copy = copy_of(directory, n)
        sharded.write(copy, 3, tensors(3), {"marker": 3, "other": True}, keep=9)
        if not killed_at(n, copy, lambda it: write(it, 3, keep=9)):
            break
        newest = manifest.newest_good(copy, pytest.fail)
        assert newest is not None
        found.append((contents(newest), "other" in sharded.read_state(newest)))
    assert sharded.read_state(copy / "step_000003.abandoned")["other"] is True
    assert set(found) == {(3, True), (2, False), (3, False)}
    assert found.count((2, False)) == 1  # between the two renames


def test_a_first_save_that_is_killed_leaves_no_checkpoint(directory: Path, tmp_path: Path) -> None:
    assert killed_at(4, directory, lambda it: write(it, 3))
    leftover = "shard-00008-model-00001-of-00001.safetensors"
    (directory / ".tmp-step_000003" / leftover).write_bytes(b"of more ranks")
    assert contents(write(directory, 3)) == 3
    assert leftover not in names(directory / "step_000003")
    found = []
    for n in range(1, 100):
        directory = tmp_path / str(n) / "checkpoints"
        directory.parent.mkdir()
        if not killed_at(n, directory.parent, lambda it: write(it / "checkpoints", 1)):
            break
        found.append(manifest.newest_good(directory, pytest.fail) is not None)
        if not found[-1]:
            with pytest.raises(InputError):
                manifest.locate(directory.parent, pytest.fail)
    assert found == sorted(found)
    assert set(found) == {False, True}


def test_tensors_are_cut_into_files_and_the_best_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 5):
        write(tmp_path, step, keep=1, best=step == 2)
    assert names(tmp_path) == ["BEST", "LATEST", "step_000002", "step_000004"]
    monkeypatch.setattr(sharded, "FILE_BYTES", 10_000)  # a tensor has 8,000
    path = write(tmp_path, 5, keep=2, best=True)
    assert names(tmp_path) == ["BEST", "LATEST", "step_000004", "step_000005"]
    assert len(list(path.glob("shard-00001-model-*-of-00003.safetensors"))) == 3
    manifest.verify(path)
    assert contents(path) == 5


def test_what_is_killed_while_removing_is_removed_by_the_next(directory: Path) -> None:
    shutil.copytree(directory / "step_000002", directory / "step_000002.damaged")
    (directory / ".tmp-step_000003").mkdir()
    (directory / ".tmp-step_000003" / "state.json").write_text("half")
    works: dict[str, Callable[[Path], Any]] = {
        "prune": lambda it: manifest.remove(it / "step_000001"),
        "set aside": lambda it: manifest.set_aside(it / "step_000002", "damaged"),
        "sweep": manifest.sweep,
    }
    for name, work in works.items():
        for n in range(1, 20):
            copy = copy_of(directory, len(list(directory.parent.parent.iterdir())))
            dead = killed_at(n, copy, work)
            assert go_on(copy) == (1 if name == "set aside" and not dead else 2)
            if not dead:
                break
        assert n > 2, name


@pytest.mark.parametrize(("error", "for_good"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_file_system_that_refuses_a_change(directory: Path, error: int, for_good: bool) -> None:
    """All new files from some change on are refused, or only one change."""
    refused = []
    for n in range(1, 30):
        copy = copy_of(directory, n)
        message = refused_at(n, copy, error, lambda it: write(it, 3, best=True), for_good=for_good)
        refused.append(bool(message))
        if message:
            assert f"{copy}: the checkpoint of step 3 could not be written ({os.strerror(error)})" in message
            assert not [name for name in names(copy) if name.startswith(".tmp-step")]
        assert go_on(copy) in ((2, 3) if message else (3,))
    assert sum(refused) >= 6
    assert not refused[-1]


def test_a_file_that_cannot_grow(directory: Path) -> None:
    """The kernel refuses in the middle of the tensors."""

    def limited() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        with pytest.raises(InputError, match="File too large"):
            write(directory, 3)
        return 0

    assert fork(limited) == 0
    assert names(directory) == ["BEST", "LATEST", "step_000001", "step_000002"]
    assert go_on(directory) == 2


def write_as(rank: int, directory: Path, last: str | None) -> int:
    """Write step 3 as one of two ranks, and die after the call of the function `last`. Return the exit code."""
    store = dist.FileStore(str(directory.parent / "meet"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if last is not None:
        real = getattr(manifest, last)
        setattr(manifest, last, lambda *arguments: (real(*arguments), os.kill(os.getpid(), signal.SIGKILL)))
    try:
        write(directory, 3)
    except (InputError, RuntimeError):
        return 3
    return 0


@pytest.mark.parametrize(("rank", "last"), [(1, "entry"), (0, "seal")])
def test_one_rank_of_two_is_killed(directory: Path, rank: int, last: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        codes = [*pool.map(lambda k: fork(lambda: write_as(k, directory, last if k == rank else None)), (0, 1))]
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 3, "the other rank does not wait for ever"
    assert go_on(directory) == (3 if last == "seal" else 2)
