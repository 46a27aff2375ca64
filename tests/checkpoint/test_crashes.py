"""A process may die at any moment, and a disk fill up: a finished checkpoint stays, and nothing half passes for one."""

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError

sys.path.insert(0, str(Path(__file__).parent))
from drills import REFUSED, SURVIVED, contents, fork, killed_at, refused_from, tensors, write


def silent(message: str) -> None:
    raise AssertionError(f"said: {message}")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    directory = tmp_path / "run" / "checkpoints"
    write(directory, 1)
    write(directory, 2)
    return directory


def copy_of(directory: Path, n: int) -> Path:
    return Path(shutil.copytree(directory, directory.parent.parent / f"run{n}" / "checkpoints"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def go_on(directory: Path) -> int:
    """As a run does that is started again: the step it goes on from. Its next checkpoint leaves nothing unusual."""
    manifest.sweep(directory)
    newest = manifest.newest_good(directory, silent)
    assert newest is not None
    step = contents(newest)
    assert newest.name == f"step_{step:06d}"
    assert contents(write(directory, step + 1)) == step + 1
    assert manifest.newest_good(directory, silent) == directory / f"step_{step + 1:06d}"
    left = [name for name in names(directory) if not name.endswith(".abandoned")]
    assert left == [*(["BEST"] if "BEST" in left else []), "LATEST", f"step_{step:06d}", f"step_{step + 1:06d}"]
    assert (directory / "LATEST").read_text() == f"step_{step + 1:06d}\n"
    return step


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_save_that_is_killed_at_any_change(directory: Path, power_cut: bool) -> None:
    found = []
    for n in range(1, 100):
        copy = copy_of(directory, n)
        if not killed_at(n, copy, lambda it: write(it, 3), power_cut=power_cut):
            break
        found.append(go_on(copy))
    # Files, manifest and name of step 3; from its name on it counts; pointer, removal of step 1 with its four files.
    assert found.index(3) >= 8
    assert len(found) - found.index(3) >= 8
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_a_killed_save_over_a_checkpoint_of_the_same_step(directory: Path) -> None:
    """Left by another run in the same place. DCP alone would then take old index and new tensors for a checkpoint."""
    found = []
    for n in range(1, 100):
        copy = copy_of(directory, n)
        other = sharded.write(copy, 3, tensors(3), {"marker": 3, "other": True}, keep=9)
        if not killed_at(n, copy, lambda it: write(it, 3, keep=9)):
            assert "other" not in sharded.read_state(other)
            assert sharded.read_state(copy / "step_000003.abandoned")["other"] is True
            break
        newest = manifest.newest_good(copy, silent)
        assert newest is not None
        found.append((contents(newest), "other" in sharded.read_state(newest)))
        go_on_step = contents(newest)
        manifest.sweep(copy)
        assert contents(write(copy, go_on_step + 1, keep=9)) == go_on_step + 1
        assert not [name for name in names(copy) if name.startswith(".tmp")]
    assert set(found) == {(3, True), (2, False), (3, False)}
    assert found.count((2, False)) == 1  # between the two renames


def test_what_a_killed_save_left_is_not_part_of_the_next(directory: Path) -> None:
    """Also where nobody has swept."""
    assert killed_at(4, directory, lambda it: write(it, 3))
    (directory / ".tmp-step_000003" / "__7_0.distcp").write_bytes(b"of more ranks")
    assert contents(write(directory, 3)) == 3
    assert not (directory / "step_000003" / "__7_0.distcp").exists()
    assert names(directory) == ["LATEST", "step_000002", "step_000003"]


def test_a_first_save_that_is_killed_leaves_no_checkpoint(tmp_path: Path) -> None:
    found = []
    for n in range(1, 100):
        directory = tmp_path / str(n) / "checkpoints"
        directory.parent.mkdir()
        if not killed_at(n, directory.parent, lambda it: write(it / "checkpoints", 1)):
            break
        newest = manifest.newest_good(directory, silent)
        found.append(newest is not None)
        if newest is None:
            with pytest.raises(InputError, match=r"no complete checkpoint yet|neither a run nor a checkpoint"):
                manifest.locate(directory.parent, silent)
        manifest.sweep(directory)
        assert contents(write(directory, 1 + (newest is not None))) == 1 + (newest is not None)
        assert not [name for name in names(directory) if name.startswith(".tmp")]
    assert found == sorted(found)
    assert found[0] is False
    assert found[-1] is True


def test_a_killed_save_of_the_best_keeps_the_best_before(directory: Path) -> None:
    write(directory, 2, best=True)
    found = []
    for n in range(1, 100):
        copy = copy_of(directory, n)
        if not killed_at(n, copy, lambda it: write(it, 3, best=True, keep=1)):
            break
        best = manifest.pointed(copy, "BEST")
        assert best is not None
        manifest.verify(best)
        found.append(contents(best))
        assert manifest.newest_good(copy, silent) in (copy / "step_000002", copy / "step_000003")
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_the_best_is_spared_and_the_rest_goes(tmp_path: Path) -> None:
    for step in range(1, 5):
        write(tmp_path, step, keep=1, best=step == 2)
    assert names(tmp_path) == ["BEST", "LATEST", "step_000002", "step_000004"]
    write(tmp_path, 5, keep=2, best=True)
    assert names(tmp_path) == ["BEST", "LATEST", "step_000004", "step_000005"]


def test_what_is_killed_while_removing_is_removed_by_the_next(directory: Path) -> None:
    for n in range(1, 100):
        copy = copy_of(directory, n)
        if not killed_at(n, copy, lambda it: manifest.remove(it / "step_000001")):
            assert names(copy) == ["LATEST", "step_000002"]
            break
        manifest.sweep(copy)
        assert names(copy) == ["LATEST", *(["step_000001"] if n == 1 else []), "step_000002"]
        assert go_on(copy) == 2
    assert n > 5


def test_what_is_killed_while_sweeping_is_swept_by_the_next(directory: Path) -> None:
    for name in (".tmp-step_000003", ".tmp-removed-step_000000"):
        (directory / name).mkdir()
        (directory / name / "__0_0.distcp").write_bytes(b"half")
    (directory / ".tmp-LATEST").write_text("step_0000")
    for n in range(1, 20):
        copy = copy_of(directory, n)
        dead = killed_at(n, copy, manifest.sweep)
        assert go_on(copy) == 2
        if not dead:
            break
    assert n == 6  # two directories with a file each, and a file


def test_a_killed_setting_aside_keeps_one_of_both(directory: Path) -> None:
    shutil.copytree(directory / "step_000002", directory / "step_000002.damaged")
    for n in range(1, 20):
        copy = copy_of(directory, n)
        dead = killed_at(n, copy, lambda it: manifest.set_aside(it / "step_000002", "damaged"))
        assert go_on(copy) == (2 if dead else 1)
        if not dead:
            break
    assert n == 7  # four files and their directory, then the rename


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_no_more_files(directory: Path, error: int) -> None:
    codes = []
    for n in range(1, 40):
        copy = copy_of(directory, n)
        code, message = refused_from(n, copy, error, lambda it: write(it, 3))
        codes.append(code)
        if code == SURVIVED:
            assert contents(copy / "step_000003") == 3
            break
        assert code == REFUSED
        assert f"{copy}: the checkpoint of step 3 could not be written ({os.strerror(error).lower()})" in message
        assert "the newest one is step_00000" in message
        assert "--resume auto" in message
        assert "\n" not in message
        assert not [name for name in names(copy) if name.startswith(".tmp-step")]
        assert go_on(copy) in (2, 3)
    assert codes.count(REFUSED) >= 6


def test_one_error_at_any_change(directory: Path) -> None:
    """Also of renames and removals, and nothing is wrong with the file system any more right after it."""
    codes = []
    for n in range(1, 25):
        copy = copy_of(directory, n)
        code, message = refused_from(n, copy, errno.EIO, lambda it: write(it, 3), for_good=False)
        codes.append(code)
        if code == REFUSED:
            assert "(input/output error)" in message
        assert code in (REFUSED, SURVIVED), message
        assert go_on(copy) in ((3,) if code == SURVIVED else (2, 3))
    assert codes[0] == REFUSED
    assert REFUSED in codes[6:]


def test_a_file_that_cannot_grow(directory: Path) -> None:
    """The kernel's own error, in the middle of the tensors."""

    def limited() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        with pytest.raises(InputError, match=r"not be written \(file too large\); the newest one is step_000002"):
            write(directory, 3)
        return SURVIVED

    assert fork(limited) == SURVIVED
    assert names(directory) == ["LATEST", "step_000001", "step_000002"]
    assert go_on(directory) == 2


def test_a_disk_that_is_full_in_the_middle_of_a_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = sharded._Hashed.write, [0]

    def full(self: Any, data: Any) -> int:
        written[0] += memoryview(data).nbytes
        if written[0] > 20000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(sharded._Hashed, "write", full)
        with pytest.raises(InputError, match=r"\(no space left on device\); the newest one is step_000002; free some"):
            write(directory, 3)
    assert names(directory) == ["LATEST", "step_000001", "step_000002"]
    assert go_on(directory) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_directory(directory: Path) -> None:
    directory.chmod(0o555)
    try:
        with pytest.raises(InputError, match=r"\(permission denied\).*make the directory writable"):
            write(directory, 3)
    finally:
        directory.chmod(0o755)
    assert go_on(directory) == 2


def one_of_two(rank: int, directory: Path, meet: Path, die: Callable[[], None]) -> int:
    """A rank that writes step 3 with another one; the code with which it leaves."""
    store = dist.FileStore(str(meet), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    own = {f"rank{rank}.w": torch.full((40, 50), float(rank))}
    die()
    try:
        sharded.write(directory, 3, own, {"marker": 3}, keep=2)
    except (InputError, RuntimeError):
        return REFUSED
    return SURVIVED


def die_in(module: Any, name: str, after: bool) -> None:
    real = getattr(module, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (1, (sharded._Writer, "write_data", False)),
        (1, (sharded._Writer, "write_data", True)),
        (1, (sharded, "_gather", True)),
        (0, (sharded._Writer, "write_data", True)),
        (0, (sharded._Writer, "finish", False)),
        (0, (sharded._Writer, "finish", True)),
        (0, (manifest, "seal", False)),
        (0, (manifest, "seal", True)),
        (0, (manifest, "prune", False)),
    ],
)
def test_one_rank_of_two_is_killed(directory: Path, rank: int, where: tuple[Any, str, bool]) -> None:
    meet = directory.parent / "meet"
    children = []
    for own in (0, 1):
        child = os.fork()
        if not child:
            code = 99
            try:
                code = one_of_two(own, directory, meet, lambda: die_in(*where) if own == rank else None)  # noqa: B023
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes[rank] == -signal.SIGKILL
    # The other one hears of it and does not wait for ever, unless it has no part in what is left to do.
    assert codes[1 - rank] == (SURVIVED if where[1] == "prune" else REFUSED)
    finished = where[1:] == ("seal", True) or where[1] == "prune"
    newest = manifest.newest_good(directory, silent)
    if finished:
        assert newest == directory / "step_000003"
        own_tensors = {f"rank{r}.w": torch.empty(40, 50) for r in (0, 1)}
        sharded.load(newest, own_tensors)
        assert [float(t.mean()) for t in own_tensors.values()] == [0.0, 1.0]
    else:
        assert go_on(directory) == 2
