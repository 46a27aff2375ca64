"""Files and directories: writing completely or not at all, sha256, sizes, caches. No torch."""

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
    """Provide a file to write, of text in UTF-8 or of bytes, which gets the name `path` when the block ends without an
    error and all of it is on disk, and is removed otherwise.

    An older file of this name stays until then.
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
    """Replace a file so that it holds its old text or its new text at any time."""
    with replacing(path) as file:
        file.write(text)


def replace_json(path: Path, value: Any) -> None:
    """Replace a JSON file as `replace_text` does. NaN becomes null, since JSON has no NaN."""
    replace_text(path, json.dumps(_without_nan(value), indent=1) + "\n")


def _without_nan(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_nan(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_without_nan(value) for value in node]
    return None if isinstance(node, float) and math.isnan(node) else node


def sync_directory(path: Path) -> None:
    """Make names in a directory survive a power cut. Windows cannot open directories, and does not need this."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_IN_USE: set[str] = set()
"""The names of the scratch directories of this process."""


@contextmanager
def scratch_directory(out: Path) -> Iterator[Path]:
    """Provide an empty directory beside `out`, in which `out` is made. It is removed when the block ends, and so are
    those that killed processes of this machine left behind.
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
    """Provide an empty directory that gets the name `out` when the block ends without an error, and is removed
    otherwise.

    All files are on disk before the directory is renamed, if `sync` is set. An older `out` is first moved to
    `.old-NAME` beside it, so one of the two exists even if this process is killed; `settle` then cleans up.
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
                out.rename(_old(out))
            work.rename(out)
            sync_directory(out.parent)
    finally:
        settle(out)


def check_replaced(out: Path, written: Collection[str], marker: str | None = None) -> None:
    """Refuse to replace a directory that holds anything besides an earlier result. A missing or empty one is no error.

    Args:
        out: the directory that would be removed as a whole.
        written: patterns of the files that such a result consists of, as for `fnmatch`, relative to `out`.
        marker: the file that every such result has, beside which alone the other files count as a result's.

    Raises:
        UsageError: `out` is no directory, or holds other files, which are named.
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
    """Clean up after earlier calls of `whole_directory` that have ended, also in a process that was killed.

    Returns:
        A sentence for each directory of a process on another machine, which may still be running.
    """
    out = _absolute(out)
    old = _old(out)
    if os.path.lexists(old):
        if os.path.lexists(out):  # renamed first, so that a half-removed directory is never taken for the model
            _remove(old.rename(_work(out)))
        else:
            old.rename(out)
    return _remove_leftovers(out)


def _remove_leftovers(out: Path) -> list[str]:
    """Remove the scratch directories of processes that are over. See `settle`."""
    unknown = []
    for leftover in sorted(out.parent.glob(f".tmp-{glob.escape(out.name)}-*")):
        maker = re.fullmatch(r"(.+)-(\d+)(\.[0-9a-f]{8})?", leftover.name.removeprefix(f".tmp-{out.name}-"))
        if maker and maker[1] != socket.gethostname():
            unknown.append(
                f"{leftover}: is being made, or was left half made, by process {maker[2]} of {maker[1]}; remove it if "
                "that process is over"
            )
        elif maker and leftover.name not in _IN_USE and (int(maker[2]) == os.getpid() or not lives(int(maker[2]))):
            _remove(leftover)
    return unknown


def _absolute(out: Path) -> Path:
    return Path(os.path.abspath(out))  # noqa: PTH100  # resolve() would replace the target of a link, and not the link


def _work(out: Path) -> Path:
    """Return a new scratch directory, which names machine and process. One of mkdtemp would be closed to the group."""
    return out.with_name(f".tmp-{out.name}-{socket.gethostname()}-{os.getpid()}.{uuid.uuid4().hex[:8]}")


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


def size_text(count: float) -> str:
    """Format a number of bytes as disks and downloads are measured.

    >>> size_text(7.5e12), size_text(2_605_000_000), size_text(31_400_000)
    ('7.50 TB', '2.60 GB', '31.40 MB')
    """
    if count >= 1e12:
        return f"{count / 1e12:.2f} TB"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def memory_text(count: float) -> str:
    """Format a number of bytes as memory is measured.

    >>> memory_text(3 * 2**29), memory_text(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state(path: Path) -> tuple[int, int, int, int]:
    """Return what changes when a file is replaced or altered: inode, size, and times of writing and of change in ns.

    The time of change shows an alteration even if the time of writing was set back.
    """
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def remembered_sha256(path: Path) -> str:
    """Return the sha256 of a file, and remember it in the user's cache by path and `state`.

    So a model of 60 GB is read once, and not by each process that opens it. Call `sha256` to notice a change that left
    the `state` as it was, such as damage on the disk.
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
        scratch = known.with_name(f"{known.name}.{os.getpid()}")
        scratch.write_text(digest, encoding="ascii")
        scratch.replace(known)
    except OSError:  # a cache that cannot be written to costs time only
        pass
    return digest


ABSOLUTE = re.compile(r"(?<![\w.:/~<&])~?/(?:[^\s/\"'<>,;:()]+/)+(?=[^\s/])")
"""The directories of a path in a sentence, up to its last part. URLs do not match."""


def without_directories(value: Any) -> Any:
    """Return what a file that is shared holds of a value for JSON: every absolute path in its texts becomes a name.

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
    """Return the path of a model for a file in `directory` that is shared, without anybody's home: relative to it, with
    `./` or `../` first, or `./NAME` if the two have only the root or the directory of all homes in common. A relative
    path or a name, such as that of a released model, stays as it is.
    """
    if not Path(path).is_absolute():
        return path
    here = os.path.abspath(directory)  # noqa: PTH100  # resolve() would show where a link leads
    common = Path(os.path.commonpath([path, here]))
    if common == Path(common.anchor) or common in Path.home().parents:
        return f"./{Path(path).name}"
    relative = os.path.relpath(path, here)
    return relative if relative.startswith("..") else f"./{relative}"


def found_place(name: str, directory: Path) -> str:
    """Return the path for a result of `shared_place`; any other name stays as it is."""
    return os.path.abspath(directory / name) if name.startswith(("./", "../")) else name  # noqa: PTH100


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME of a repository on the Hugging Face hub. A path may have it too."""
    is_file = Path(name).suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
    form = re.fullmatch(r"[a-z0-9][\w.-]*/\w[\w.-]*", name, re.ASCII | re.IGNORECASE)
    return form is not None and not is_file and "--" not in name and ".." not in name


def cache_directory() -> Path:
    """Return the directory in which stores, hashes and similar files are kept between runs."""
    if "ESMSHARD_CACHE" in os.environ:
        return Path(os.environ["ESMSHARD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "esmshard"


@contextmanager
def locked_directory(kind: str, key: str) -> Iterator[Path]:
    """Provide the place of a key in the user's cache, for one process at a time."""
    from filelock import FileLock  # slow to import

    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    locks = cache_directory() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        yield cache_directory() / kind / digest


def cached_directory(kind: str, key: str, make: Callable[[Path], list[str]]) -> Path:
    """Return the directory of a key in the user's cache (`sealed_directory`). Whoever asks first makes it, and the
    others wait. A damaged directory is made again.
    """
    with locked_directory(kind, key) as out:
        if not _is_whole(out):
            sealed_directory(out, make)
    return out


def sealed_directory(out: Path, make: Callable[[Path], list[str]]) -> None:
    """Make a directory: `make` writes its files and returns notices, which `manifest.json` keeps together with the
    sha256 of each file.
    """
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
    """Return the directory of shipped recipes or data: inside the installed package, or at the top of a clone."""
    installed = Path(__file__).parents[1] / "_shipped" / kind
    return installed if installed.is_dir() else Path(__file__).parents[2] / kind
