"""A directory that appears complete or not at all, also when it replaces another directory. No torch."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from esmshard.checkpoint.manifest import sync_directory


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Provide an empty directory that gets the name `out` when the block ends without an error, and is removed
    otherwise.

    All files are on disk before the directory is renamed. An older `out` is first moved to `.old-NAME` beside it, so
    one of the two exists even if this process is killed; `settle` then cleans up.
    """
    out = _absolute(out)
    settle(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = _work(out)
    work.mkdir()
    try:
        yield work
        for file in work.iterdir():
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        sync_directory(work)
        if os.path.lexists(out):
            out.rename(_old(out))
        work.rename(out)
        sync_directory(out.parent)
    finally:
        settle(out)


def settle(out: Path) -> list[str]:
    """Clean up after earlier calls for `out` that have ended, also in a process that was killed.

    Returns:
        A sentence for each directory of a process on another machine, which may still be running.
    """
    out = _absolute(out)
    if not out.parent.is_dir():
        return []
    old, mine = _old(out), _work(out)
    if os.path.lexists(old) and not os.path.lexists(out):
        old.rename(out)
    _remove(mine)
    if os.path.lexists(old):  # renamed first, so that a half-removed directory is never taken for the model
        old.rename(mine)
        _remove(mine)
    unknown = []
    for leftover in sorted(out.parent.iterdir()):
        maker = re.fullmatch(re.escape(f".tmp-{out.name}-") + r"(.+)-(\d+)", leftover.name)
        if maker and maker[1] != socket.gethostname():
            unknown.append(
                f"{leftover}: is being made, or was left half made, by process {maker[2]} of {maker[1]}; remove it if "
                "that process is over"
            )
        elif maker and not lives(int(maker[2])):
            _remove(leftover)
    return unknown


def _absolute(out: Path) -> Path:
    return Path(os.path.abspath(out))  # noqa: PTH100  # resolve() would replace the target of a link, and not the link


def _work(out: Path) -> Path:
    """Create the work directory. The directories of mkdtemp are closed to the group; machine and process name its
    owner.
    """
    return out.with_name(f"{_prefix(out)}{os.getpid()}")


def _prefix(out: Path) -> str:
    return f".tmp-{out.name}-{socket.gethostname()}-"


def _old(out: Path) -> Path:
    return out.with_name(f".old-{out.name}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lives(pid: int) -> bool:
    """Whether a process of this machine exists."""
    if os.name != "posix":  # on other systems signal 0 is a real signal
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
