"""Provides atomic writes, sha256 hashes, caches, and texts for file sizes. This module does not import torch."""

import fnmatch
import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from esmshard.errors import UsageError


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raise `OSError` if the file cannot be read, `ValueError` if it is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a new file for UTF-8 text, or for bytes if `binary` is set. The file replaces `path` when the block ends.

    All bytes are on disk before the file gets the name `path`. After an error, an older file at `path` is unchanged.
    """
    work = path.with_name(f".tmp-{path.name}")
    try:
        with open(work, "wb") if binary else open(work, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file in one step. Other processes read either the old text or the new text."""
    with replacing(path) as file:
        file.write(text)


def replace_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file in one step, as `replace_text` does. NaN becomes null, since JSON has no NaN."""
    replace_text(path, json.dumps(_without_nan(value), indent=1) + "\n")


def _without_nan(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_nan(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_without_nan(value) for value in node]
    return None if isinstance(node, float) and math.isnan(node) else node


def sync_directory(path: Path) -> None:
    """Write the file names of a directory to disk, so that a power cut cannot undo renames. Do nothing on Windows."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_IN_USE: set[str] = set()  # The names of the scratch directories that this process uses now.


@contextmanager
def scratch_directory(out: Path) -> Iterator[Path]:
    """Provide an empty directory in the parent of `out`, and remove it when the block ends.

    First remove older scratch directories for `out` that killed processes of this machine have left.
    """
    out = _absolute(out)
    _remove_leftovers(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = _work(out)
    _IN_USE.add(work.name)
    try:
        work.mkdir()
        yield work
    finally:
        _remove(work)
        _IN_USE.discard(work.name)


@contextmanager
def whole_directory(out: Path, sync: bool = True) -> Iterator[Path]:
    """Provide an empty directory, which replaces `out` when the block ends without an error.

    If `sync` is true, all files are on disk before the new directory is renamed to `out`. An older `out` is first
    renamed to `.old-NAME`. If this process is killed between these two renames, `settle` restores the older directory.
    """
    out = _absolute(out)
    settle(out)
    try:
        with scratch_directory(out) as work:
            yield work
            for path in [*work.rglob("*"), work] if sync else ():
                if path.is_dir():
                    sync_directory(path)
                    continue
                with open(path, "rb+") as written:
                    os.fsync(written.fileno())
            if os.path.lexists(out):
                out.rename(out.with_name(f".old-{out.name}"))
            work.rename(out)
            sync_directory(out.parent)
    finally:
        settle(out)


def check_replaced(out: Path, written: Collection[str], marker: str | None = None) -> None:
    """Raise `UsageError` if `out` is a file, or a directory with files that the command did not write.

    Args:
        out: the directory that a new result would replace.
        written: `fnmatch` patterns of the files that the command writes, relative to `out`.
        marker: a file that every result has. If `out` does not have this file, any file in `out` is an error.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError(f"{out}: is a file, but the result is a directory; choose another name")
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir())
    if marker is None or marker in names:
        names = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in written)]
    if names:
        more = f" and {len(names) - 3:,} more files" if len(names) > 3 else ""
        raise UsageError(
            f"{out}: contains {', '.join(names[:3])}{more}, which are not part of an earlier result, so the directory "
            "is not replaced; move these files, or choose another directory"
        )


def settle(out: Path) -> list[str]:
    """Remove directories that killed processes left while they wrote `out`. Restore a missing `out` from `.old-NAME`.

    A scratch directory of another machine stays, because the process that writes it may still run. Return a sentence
    about each such directory.
    """
    out = _absolute(out)
    old = out.with_name(f".old-{out.name}")
    if os.path.lexists(old):
        if os.path.lexists(out):  # The old directory is renamed before it is removed, so that nobody reads half of it.
            _remove(old.rename(_work(out)))
        else:
            old.rename(out)
    return _remove_leftovers(out)


def _remove_leftovers(out: Path) -> list[str]:
    of_other_machines = []
    for leftover in sorted(out.parent.glob(f".tmp-{glob.escape(out.name)}-*")):
        maker = re.fullmatch(r"(.+)-(\d+)(\.[0-9a-f]{8})?", leftover.name.removeprefix(f".tmp-{out.name}-"))
        if maker and maker[1] != socket.gethostname():
            of_other_machines.append(
                f"{leftover}: is being made, or was left half made, by process {maker[2]} of {maker[1]}; remove it if "
                "that process has ended"
            )
        elif maker and leftover.name not in _IN_USE and (int(maker[2]) == os.getpid() or not lives(int(maker[2]))):
            _remove(leftover)
    return of_other_machines


def _absolute(out: Path) -> Path:
    return Path(os.path.abspath(out))  # noqa: PTH100  # resolve() would follow a link


def _work(out: Path) -> Path:
    # Other users could not read a directory of `mkdtemp`.
    return out.with_name(f".tmp-{out.name}-{socket.gethostname()}-{os.getpid()}.{uuid.uuid4().hex[:8]}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lives(pid: int) -> bool:
    """Return whether the process `pid` exists on this machine. Always return True on systems other than POSIX."""
    if os.name != "posix":  # On other systems signal 0 is a real signal.
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:  # A process of another user is a PermissionError.
        return not isinstance(error, ProcessLookupError)
    return True


def size_text(count: float) -> str:
    """Format a file size in bytes, in decimal units.

    >>> size_text(7.5e12), size_text(2_605_000_000), size_text(31_400_000)
    ('7.50 TB', '2.60 GB', '31.40 MB')
    """
    if count >= 1e12:
        return f"{count / 1e12:.2f} TB"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def memory_text(count: float) -> str:
    """Format a memory size in bytes, in binary units.

    >>> memory_text(3 * 2**29), memory_text(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state(path: Path) -> tuple[int, int, int, int]:
    """Return inode, size in bytes, mtime and ctime (ns) of a file. Every edit changes at least the ctime."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def remembered_sha256(path: Path) -> str:
    """Return the sha256 of a file. If `state` has not changed since the last call, the hash is from the user's cache.

    Disk damage does not change `state`. To detect damage, call `sha256`.
    """
    name = f"{path.resolve()}/{state(path)}"
    known = cache_directory() / "hashes" / hashlib.sha256(name.encode()).hexdigest()[:32]
    with suppress(OSError):
        text = known.read_text(encoding="ascii")
        if len(text) == 64:
            return text
    digest = sha256(path)
    with suppress(OSError):  # Without a cache the file is read again the next time.
        known.parent.mkdir(parents=True, exist_ok=True)
        replace_text(known, digest)
    return digest


ABSOLUTE = re.compile(r"(?<![\w.:/~<&])~?/(?:[^\s/\"'<>,;:()]+/)+(?=[^\s/])")
"""Matches the directories of each absolute path in a text, such as `/home/me/` in `/home/me/x.fasta`, but no URLs."""


def without_directories(value: Any) -> Any:
    """Shorten every absolute path in a JSON value to its last part, so that private directories are not shown.

    >>> without_directories({"model": "/home/me/my runs/model", "notices": ["/data/x.fasta: 3 records"]})
    {'model': 'model', 'notices': ['x.fasta: 3 records']}
    """
    if isinstance(value, Mapping):
        return {key: without_directories(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_directories(part) for part in value]
    if not isinstance(value, str):
        return value
    return Path(value).name if value.startswith("/") and ": " not in value else ABSOLUTE.sub("", value)


def shared_place(path: str, directory: Path) -> str:
    """Return how a file in `directory` names the model at `path`, without the name of the home directory.

    An absolute `path` becomes relative to `directory`, and begins with `./` or `../`. But if the deepest directory that
    contains both is the root or a parent of the home directory, return `./` and the last part of `path`. Relative paths
    and hub names stay unchanged.
    """
    if not Path(path).is_absolute():
        return path
    base = os.path.abspath(directory)  # noqa: PTH100  # resolve() would show where a link leads
    common = Path(os.path.commonpath([path, base]))
    if common == Path(common.anchor) or common in Path.home().parents:
        return f"./{Path(path).name}"
    relative = os.path.relpath(path, base)
    return relative if relative.startswith("..") else f"./{relative}"


def found_place(name: str, directory: Path) -> str:
    """If `name` begins with `./` or `../`, join it to `directory`, and return an absolute path. Else return `name`."""
    return os.path.abspath(directory / name) if name.startswith(("./", "../")) else name  # noqa: PTH100


def is_hub_name(name: str) -> bool:
    """Return whether a text looks like a Hugging Face repository `OWNER/NAME`. A relative path may look like this."""
    is_file = Path(name).suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
    form = re.fullmatch(r"[a-z0-9][\w.-]*/\w[\w.-]*", name, re.ASCII | re.IGNORECASE)
    return form is not None and not is_file and "--" not in name and ".." not in name


def cache_directory() -> Path:
    """Return the user's cache directory, which has token stores, hashes and copies of remote files."""
    if "ESMSHARD_CACHE" in os.environ:
        return Path(os.environ["ESMSHARD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "esmshard"


@contextmanager
def locked_directory(kind: str, key: str) -> Iterator[Path]:
    """Provide the path of the cache directory for `kind` and `key`.

    Other processes that call this function with the same `key` wait until the block ends.
    """
    from filelock import FileLock  # This import is slow.

    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    locks = cache_directory() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        yield cache_directory() / kind / digest


def cached_directory(kind: str, key: str, make: Callable[[Path], list[str]]) -> Path:
    """Return the cache directory for `kind` and `key`. If it is missing or damaged, let `make` fill a new one."""
    with locked_directory(kind, key) as out:
        if not _is_whole(out):
            sealed_directory(out, make)
    return out


def sealed_directory(out: Path, make: Callable[[Path], list[str]]) -> None:
    """Let `make` fill a new directory `out`. Add `manifest.json`: the sha256 of each file, and what `make` returns."""
    with whole_directory(out) as work:
        notices = make(work)
        hashes = {path.name: sha256(path) for path in sorted(work.iterdir())}
        replace_json(work / "manifest.json", {"sha256": hashes, "notices": notices})


def _is_whole(directory: Path) -> bool:
    try:
        hashes = read_json(directory / "manifest.json")["sha256"]
        return all(sha256(directory / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def shipped(kind: Literal["recipes", "data"]) -> Path:
    """Return the directory of the shipped recipes or sample data, in the installed package or in a git clone."""
    installed = Path(__file__).parents[1] / "_shipped" / kind
    return installed if installed.is_dir() else Path(__file__).parents[2] / kind
