"""Processes that die, or run into an error, at a chosen change of a directory.

Python reports every change before it makes it (PEP 578): files opened for writing, names made, renamed and removed. So
a drill needs no hooks in the code under test, and meets it at every point that the file system can see.
"""

import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from esmshard.checkpoint import sharded

CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "open": 1}
"""Audit events, and how many of their arguments are paths."""


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Values that tell of their step."""
    return {f"w{k}": torch.full((40, 50), float(step * 10 + k)) for k in range(4)}


def write(directory: Path, step: int, *, keep: int = 2, best: bool = False) -> Path:
    """A checkpoint as the main job writes it."""
    return sharded.write(directory, step, tensors(step), {"marker": step}, keep=keep, best=best)


def contents(path: Path) -> int:
    """The step that all values of a checkpoint tell of."""
    state = sharded.read_state(path)
    found = {name: torch.empty_like(tensor) for name, tensor in tensors(0).items()}
    sharded.load(path, found)
    assert state["step"] == state["marker"]
    for name, tensor in tensors(state["step"]).items():
        assert torch.equal(found[name], tensor)
    return int(state["step"])


def fork(function: Callable[[], int | None]) -> int:
    """Call it in a forked process; its exit code, or -N if a signal ended it."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = function() or 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def on_change(directory: Path, action: Callable[[int, str, str], None]) -> None:
    """From now on, call `action(number, event, path)` right before each change below `directory`. For good."""
    inside, count = str(directory) + os.sep, 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in CHANGES:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        # Names relative to an open directory, as rmtree uses them, are below it or nobody's.
        paths = [str(os.fspath(p)) for p in arguments[: CHANGES[event]] if not isinstance(p, int)]
        if any(path.startswith(inside) or not Path(path).is_absolute() for path in paths):
            count += 1
            action(count, event, paths[0])

    sys.addaudithook(hook)


def killed_at(number: int, directory: Path, function: Callable[[Path], Any], *, power_cut: bool = False) -> bool:
    """Whether a process that calls it dies at that change of `directory`; False if it comes to its end before.

    Args:
        number: of the change, from 1 on.
        directory: what is below it counts.
        function: the work, done on that directory.
        power_cut: as if the machine lost its power: new files that were not synced are empty, and those whose
            directory was not synced after they were made are gone.
    """

    def work() -> int:
        synced: dict[int, set[str]] = {}  # by inode: of a directory the names in it
        fsync = os.fsync

        def record(handle: int) -> None:
            fsync(handle)
            found = os.fstat(handle)
            synced[found.st_ino] = set(os.listdir(handle)) if stat.S_ISDIR(found.st_mode) else set()

        def die(count: int, event: str, path: str) -> None:
            nonlocal number
            if count != number:
                return
            number = 0
            if power_cut:
                for file in [path for path in directory.rglob("*") if path.is_file()]:
                    if file.stat().st_ino in before:
                        continue
                    if file.name not in synced.get(file.parent.stat().st_ino, ()):
                        file.unlink()
                    elif file.stat().st_ino not in synced:
                        os.truncate(file, 0)
            os.kill(os.getpid(), signal.SIGKILL)

        before = {file.stat().st_ino for file in directory.rglob("*") if file.is_file()}
        os.fsync = record
        on_change(directory, die)
        function(directory)
        return 0

    code = fork(work)
    assert code in (0, -signal.SIGKILL), code
    return code == -signal.SIGKILL


def refused_at(number: int, directory: Path, error: int, function: Callable[[Path], Any], *, for_good: bool) -> str:
    """Work on a file system that refuses some changes: the message of the `ValueError`; "" if there was none.

    Args:
        number: the change that is refused, from 1 on.
        directory: what is below it counts.
        error: as `errno.ENOSPC`.
        function: the work, done on that directory.
        for_good: all later files and directories are refused, too.
    """
    message = directory.parent / "message"
    message.write_text("")

    def work() -> int:
        def refuse(count: int, event: str, path: str) -> None:
            if count == number if not for_good else count >= number and event in ("open", "os.mkdir"):
                raise OSError(error, os.strerror(error), path)

        on_change(directory, refuse)
        try:
            function(directory)
        except ValueError as caught:
            message.write_text(str(caught))
        return 0

    assert fork(work) == 0
    return message.read_text()
