"""Files and directories: atomic writes, sha256, sizes and caches, without torch."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from esmshard.errors import UsageError


def read_json(path: Path) -> Any:
    """Read a JSON file. `OSError` if it cannot be read, `ValueError` if it is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Provide an open file of UTF-8 text or of bytes, which replaces `path` when the block ends.

    The file first has another name, and all its bytes are on disk before it gets the name `path`. If the block ends
    with an error, the new file is removed and an older file stays.
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
    """Replace a file. At any time the file holds either its old text or its new text."""
    with replacing(path) as file:
        file.write(text)


def replace_json(path: Path, value: Any) -> None:
    """Replace a JSON file with `replace_text`. NaN becomes null, since JSON has no NaN."""
    replace_text(path, json.dumps(_without_nan(value), indent=1) + "\n")


def _without_nan(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_nan(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_without_nan(value) for value in node]
    return None if isinstance(node, float) and math.isnan(node) else node


def sync_directory(path: Path) -> None:
    """Write the file names of a directory to disk, so that they survive a power cut. Windows needs no such call."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_IN_USE: set[str] = set()
"""The names of the scratch directories that this process uses now."""


@contextmanager
def scratch_directory(out: Path) -> Iterator[Path]:
    """Provide an empty directory beside `out`, and remove it when the block ends.

    Scratch directories that killed processes of this machine left beside `out` are removed first.
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

    If `sync` is set, all files are on disk before the directory is renamed. An older `out` is first moved to
    `.old-NAME` beside it. If this process is killed in between, one of the two directories exists, and `settle` cleans
    up.
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
    """Refuse to replace a directory that holds other files than an earlier result. A missing directory is no error.

    Args:
        out: the directory that would be removed as a whole.
        written: `fnmatch` patterns for the files of a result, relative to `out`.
        marker: a file that every result has. Without this file, no file of `out` counts as a file of a result.

    Raises:
        UsageError: `out` is a file, or the directory holds other files; the message names them.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError(f"{out}: is a file, and a directory would replace it; choose another name")
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir())
    if marker is None or marker in names:
        names = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in written)]
    if names:
        more = f" and {len(names) - 3:,} more files" if len(names) > 3 else ""
        raise UsageError(
            f"{out}: holds {', '.join(names[:3])}{more}, which no earlier result of this command has, so it is not "
            "replaced; move them, or choose another directory"
        )


def settle(out: Path) -> list[str]:
    """Remove what earlier calls of `whole_directory` left behind when their processes were killed.

    Returns:
        A sentence for each scratch directory of another machine, whose process may still run.
    """
    out = _absolute(out)
    old = out.with_name(f".old-{out.name}")
    if os.path.lexists(old):
        if os.path.lexists(out):  # The directory is renamed first, so that nobody reads it while it is removed.
            _remove(old.rename(_work(out)))
        else:
            old.rename(out)
    return _remove_leftovers(out)


def _remove_leftovers(out: Path) -> list[str]:
    """Remove the scratch directories of processes that have ended. See `settle`."""
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
    """Return a new name with machine and process. mkdtemp would make a directory that the user's group cannot read."""
    return out.with_name(f".tmp-{out.name}-{socket.gethostname()}-{os.getpid()}.{uuid.uuid4().hex[:8]}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lives(pid: int) -> bool:
    """Whether a process of this machine exists."""
    if os.name != "posix":  # On other systems signal 0 is a real signal.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def size_text(count: float) -> str:
    """Format a number of bytes on a disk in decimal units.

    >>> size_text(7.5e12), size_text(2_605_000_000), size_text(31_400_000)
    ('7.50 TB', '2.60 GB', '31.40 MB')
    """
    if count >= 1e12:
        return f"{count / 1e12:.2f} TB"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def memory_text(count: float) -> str:
    """Format a number of bytes of memory in binary units.

    >>> memory_text(3 * 2**29), memory_text(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state(path: Path) -> tuple[int, int, int, int]:
    """Return inode, size, mtime and ctime (ns) of a file. One of them changes when the file is replaced or altered.

    The ctime shows a change even if a program set the mtime back.
    """
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def remembered_sha256(path: Path) -> str:
    """Return the sha256 of a file. The user's cache keeps it by path and `state`, so that a large file is read once.

    Damage on the disk does not change the `state`; call `sha256` to notice such damage.
    """
    name = f"{path.resolve()}/{state(path)}"
    known = cache_directory() / "hashes" / hashlib.sha256(name.encode()).hexdigest()[:32]
    try:
        text = known.read_text(encoding="ascii")
        if len(text) == 64:
            return text
    except OSError:
        pass
    digest = sha256(path)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        replace_text(known, digest)
    except OSError:  # Without a cache the file is read again the next time.
        pass
    return digest


ABSOLUTE = re.compile(r"(?<![\w.:/~<&])~?/(?:[^\s/\"'<>,;:()]+/)+(?=[^\s/])")
"""The directories of an absolute path in a sentence, without the last part of the path. URLs do not match."""


def without_directories(value: Any) -> Any:
    """Replace every absolute path in the texts of a JSON value by its last part, so that the value can be shared.

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
    """Return the path of a model for a shared file in `directory`. The result never names a user's home.

    An absolute path becomes relative to `directory`, and begins with `./` or `../`. If path and directory share only
    the root or the parent of all homes, the result is `./NAME`. Other paths and names of models do not change.
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
    """Return the absolute path for a result of `shared_place`. Other names do not change."""
    return os.path.abspath(directory / name) if name.startswith(("./", "../")) else name  # noqa: PTH100


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form OWNER/NAME of a Hugging Face repository. A relative path may have it too."""
    is_file = Path(name).suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
    form = re.fullmatch(r"[a-z0-9][\w.-]*/\w[\w.-]*", name, re.ASCII | re.IGNORECASE)
    return form is not None and not is_file and "--" not in name and ".." not in name


def cache_directory() -> Path:
    """Return the user's cache, which keeps token stores, hashes and copies between runs."""
    if "ESMSHARD_CACHE" in os.environ:
        return Path(os.environ["ESMSHARD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "esmshard"


@contextmanager
def locked_directory(kind: str, key: str) -> Iterator[Path]:
    """Provide the path of a key in the user's cache. One process at a time uses the path."""
    from filelock import FileLock  # This import is slow.

    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    locks = cache_directory() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        yield cache_directory() / kind / digest


def cached_directory(kind: str, key: str, make: Callable[[Path], list[str]]) -> Path:
    """Return the directory of a key in the user's cache, made by `sealed_directory` if it is missing or damaged.

    While one process makes the directory, the others wait.
    """
    with locked_directory(kind, key) as out:
        if not _is_whole(out):
            sealed_directory(out, make)
    return out


def sealed_directory(out: Path, make: Callable[[Path], list[str]]) -> None:
    """Make a directory by `make`, which returns notices. `manifest.json` gets the notices and each file's sha256."""
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
    """Return the directory of shipped recipes or data, in the installed package or at the top of a clone."""
    installed = Path(__file__).parents[1] / "_shipped" / kind
    return installed if installed.is_dir() else Path(__file__).parents[2] / kind
