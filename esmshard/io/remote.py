"""Addresses in buckets (`s3://`, `gs://`): copies of inputs in the local cache, and objects that are written whole.

A bucket has no rename, no memory mapping and no appending. But an object appears complete or not at all. Everything
that is written to a bucket relies on this. No torch.
"""

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import cache_directory, read_json, replace_json, scratch_directory, shipped, size_text
from esmshard.io.writers import chains_file, failures_file
from esmshard.progress import say

_ADDRESS = re.compile(r"(s3|gs):/{1,2}(?=[^/])")
_ENDING = re.compile(r"\.\w+(\.(gz|bgz|bz2|xz|zst))?$")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or `aws configure`",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
}


def address(path: str | os.PathLike[str]) -> str | None:
    """Return the address in a bucket that a text or a path means; None for a path on a disk.

    `pathlib` makes one slash of two, so `s3:/bucket/name` is an address, too.

    Raises:
        UsageError: the address holds a password, which would end up in logs and recipes.

    >>> address("s3://bucket/x.fasta"), address(Path("gs://bucket/x")), address("data/s3/x.fasta")
    ('s3://bucket/x.fasta', 'gs://bucket/x', None)
    """
    text = os.fspath(path)
    found = _ADDRESS.match(text)
    if found is None:
        return None
    place = text[found.end() :].rstrip("/")
    bucket = place.partition("/")[0]
    if "@" in bucket or ":" in bucket or "?" in place:
        raise UsageError(
            f"an address in {found[1]}:// may hold no credentials and no `?`; take them out of it, and set "
            f"{_CREDENTIALS[found[1]]}"
        )
    return f"{found[1]}://{place}"


class Stored(NamedTuple):
    """An object of a bucket, as a listing shows it."""

    size: int
    """Bytes."""
    tag: str
    """The bucket's own mark of the content, which changes whenever the object is written anew."""


class RemoteDirectory:
    """The objects of a bucket whose names begin with one address.

    Names are relative to the address; the empty name is the object at the address itself. All methods raise
    `InputError` with one sentence if the bucket cannot be reached or used.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = url.partition("://")[2]

    def listing(self, folder: str = "") -> dict[str, Stored]:
        """Return all objects below the address, or below a folder of it, by name."""
        start = self._key(folder)
        with one_sentence(self.url):
            found = self._files.find(start, detail=True)
        prefix = f"{self._path}/"
        return {name.removeprefix(prefix): _stored(entry) for name, entry in found.items() if name.startswith(prefix)}

    def look(self, name: str) -> Stored | None:
        """Return what is known of an object; None if there is none."""
        with one_sentence(self.url):
            try:
                entry = self._files.info(self._key(name))
            except FileNotFoundError as error:
                if "bucket" in str(error):
                    raise
                return None
        return _stored(entry) if entry["type"] == "file" else None

    def read(self, *names: str) -> dict[str, bytes]:
        """Return the content of those of these objects that exist, by name. They are read at the same time."""
        keys = {self._key(name): name for name in names}
        if not keys:
            return {}
        with one_sentence(self.url):
            found = self._files.cat([*keys], on_error="return")
            for value in found.values():
                if isinstance(value, BaseException) and not isinstance(value, FileNotFoundError):
                    raise value
        return {keys[key]: value for key, value in found.items() if isinstance(value, bytes)}

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        with one_sentence(self.url):
            self._files.pipe_file(self._key(name), data)

    def first_bytes(self, name: str, count: int) -> bytes:
        """Return the first bytes of an object."""
        with one_sentence(f"{self.url}/{name}"):
            return bytes(self._files.cat_file(self._key(name), start=0, end=count))

    def upload(self, file: Path, name: str) -> Stored:
        """Copy a file into the bucket, and return the object as the bucket shows it."""
        with one_sentence(self.url):
            self._files.put_file(str(file), self._key(name))
        found, size = self.look(name), file.stat().st_size
        if found is None or found.size != size:
            there = "missing" if found is None else f"{found.size:,} bytes long"
            raise InputError(f"{self.url}/{name}: is {there} after {size:,} bytes were written; run the command again")
        return found

    def download(self, name: str, file: Path) -> None:
        """Copy an object into a file, which has its name when it is complete."""
        file.parent.mkdir(parents=True, exist_ok=True)
        work = file.with_name(f".tmp-{os.getpid()}-{file.name}")
        try:
            with one_sentence(f"{self.url}/{name}".rstrip("/")):
                self._files.get_file(self._key(name), str(work))
            work.replace(file)
        finally:
            work.unlink(missing_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. Those that do not exist are left out."""
        keys = [self._key(name) for name in names]
        if keys:
            with one_sentence(self.url):
                for key in keys:
                    try:
                        self._files.rm_file(key)
                    except FileNotFoundError:
                        pass

    @property
    def _files(self) -> Any:
        return _library(self.url.partition("://")[0], os.getpid())

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path


@functools.cache
def _library(scheme: str, process: int) -> Any:
    """Return the library of a kind of address, without any cache of listings; one in a process, as it has threads."""
    assert process == os.getpid()
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


def _stored(entry: Mapping[str, Any]) -> Stored:
    tag = entry.get("ETag") or entry.get("etag") or entry.get("md5Hash") or ""
    return Stored(int(entry["size"]), str(tag).strip('"'))


@contextmanager
def one_sentence(url: str) -> Iterator[None]:
    """Turn an error of a bucket into one sentence, without any credentials.

    Raises:
        InputError: instead of it.
    """
    try:
        yield
    except (InputError, FileExistsError, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise InputError(f"{url}: buckets need packages that are missing; pip install 'esmshard[cloud]'") from error
    except FileNotFoundError as error:
        raise InputError(f"{url}: there is no such object or bucket; look at the address") from error
    except Exception as error:
        reason, credentials = " ".join(str(error).split()) or type(error).__name__, _CREDENTIALS[url[:2]]
        raise InputError(
            f"{url}: {reason}; look at the credentials ({credentials}), their rights, the region and the network, and "
            "run the command again"
        ) from error


def local(path: str | os.PathLike[str], *, needed: bool = True) -> Path:
    """Return a path on a disk as it is, and of an address the path of its copy in the cache, which is brought up to
    date once in a process.

    Raises:
        InputError: there is nothing at the address and it is needed, the bucket cannot be read, or the disk has no
            room.
    """
    url = address(path)
    return Path(path) if url is None else _copied(url, needed)


def exists(url: str) -> bool:
    """Return whether there is an object at an address."""
    return RemoteDirectory(url).look("") is not None


@functools.cache
def _copied(url: str, needed: bool) -> Path:
    """Bring the copy of an object, or of all objects below an address, up to date, and return its path.

    All objects are compared by size and by the bucket's mark of their content, and only changed ones are copied.
    """
    place, target = RemoteDirectory(url), cache_directory() / "remote" / url.replace("://", "/")
    state = cache_directory() / "remote" / ".state" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    single = place.look("")
    found = {"": single} if single is not None else place.listing()
    if not found and not needed:
        target.unlink(missing_ok=True)  # of an earlier time
        return target
    if not found:
        raise InputError(f"{url}: there is no such object, and no object below it; look at the address")
    try:
        from filelock import FileLock

        state.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(state.with_suffix(".lock")):  # the processes of one machine copy it once
            return _brought_up_to_date(place, target, found, state)
    except OSError as error:
        raise InputError(
            f"{error.filename or target}: the copy of {url} cannot be written "
            f"({(error.strerror or str(error)).lower()}); make room, or set ESMSHARD_CACHE to another directory"
        ) from None


def _brought_up_to_date(place: RemoteDirectory, target: Path, found: Mapping[str, Stored], state: Path) -> Path:
    try:
        known = read_json(state)
    except (OSError, ValueError):
        known = {}
    files = {name: target / name if name else target for name in found}
    if outside := [name for name in found if ".." in name.split("/") or name.startswith("/")]:
        raise InputError(f"{place.url}: object {outside[0]!r} would lie outside the cache; rename it")

    def is_current(name: str) -> bool:
        file = files[name]
        there = file.is_file() and file.stat().st_size == found[name].size
        return there and known.get(name) == [found[name].size, found[name].tag]

    changed = [name for name in found if not is_current(name)]
    if changed:
        total = sum(found[name].size for name in changed)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if total > free:
            raise InputError(
                f"{place.url}: its copy takes {size_text(total)}, and {size_text(free)} are free in {target.parent}; "
                "make room, or set ESMSHARD_CACHE to another directory"
            )
        say(f"{place.url}: is copied to {target} ({size_text(total)}), which later commands use again")
    for name in changed:
        place.download(name, files[name])
        if (size := files[name].stat().st_size) != found[name].size:
            files[name].unlink()
            raise InputError(
                f"{place.url}/{name}: has {size:,} bytes instead of {found[name].size:,}, as it was changed while it "
                "was copied; run the command again"
            )
        known[name] = [found[name].size, found[name].tag]
        replace_json(state, {name: known[name] for name in found if name in known})
    for file in target.rglob("*") if target.is_dir() else ():
        if file.is_file() and file.relative_to(target).as_posix() not in found:
            file.unlink()  # it is no longer in the bucket
    return target


def scratch() -> AbstractContextManager[Path]:
    """Provide a directory of this process for what will be uploaded. It is removed at the end of the block, or by a
    later command if this process is killed.
    """
    return scratch_directory(cache_directory() / "uploads" / "result")


def write_at(url: str, overwrite: bool, write: Callable[[Path], None]) -> None:
    """Let a function write a file or directory on this disk, and upload it with all files beside it.

    The object that shows that a directory is complete is written last: its manifest or configuration.

    Args:
        url: the address of the result.
        overwrite: replace what is there. Of a directory only what the function replaces is removed.
        write: the function, which gets a path whose name is that of the address.

    Raises:
        UsageError: there is something at the address, and `overwrite` is not set.
    """
    place, parent = RemoteDirectory(url), RemoteDirectory(url.rpartition("/")[0])
    is_file, before = place.look("") is not None, place.listing()
    if (is_file or before) and not overwrite:
        raise UsageError(f"{url}: exists already; choose another name or pass --overwrite")
    with scratch() as folder:
        out = folder / url.rpartition("/")[2]
        lists = (failures_file(out).name, chains_file(out).name)
        old = {name for name in lists if parent.look(name) is not None}  # of an earlier file
        for name in before:  # The function sees the names of the objects, and refuses to replace those of others.
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).touch()
            os.utime(out / name, ns=(1, 1))
        write(out)
        kept = [name for name in before if (out / name).is_file() and (out / name).stat().st_mtime_ns == 1]
        for name in kept:
            (out / name).unlink()
        made = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        names = sorted(made, key=lambda name: (_LAST.get(name.rpartition("/")[2], 0), name == out.name, name))
        old |= {f"{out.name}/{name}" for name in before if name not in kept}
        try:
            parent.remove(sorted(name for name in old if name.rpartition("/")[2] in _LAST))
            for name in names:
                parent.upload(made[name], name)
            parent.remove(sorted(old - made.keys()))
        except InputError as error:
            rescued = cache_directory() / "not-uploaded" / folder.name
            rescued.parent.mkdir(exist_ok=True)
            folder.rename(rescued)
            raise InputError(f"{error}; the result is kept in {rescued}, from where you can copy it") from None
        say(f"{url}: uploaded, {size_text(sum(path.stat().st_size for path in made.values()))} in {len(made)} files")


_LAST = {"config.json": 1, "manifest.json": 1}


def data_file(path: str) -> Path:
    """The file that a data path means; `sample:contact/train` is `contact/train.fasta` of the shipped data, and a name
    with an ending, such as `sample:contact/labels.csv`, that very file. Of an address in a bucket it is a copy.
    """
    if (url := address(path)) is not None:
        local(f"{_ENDING.sub('', url)}.npz", needed=False)  # the labels of a FASTA file may lie beside it
        return local(url)
    if not path.startswith("sample:"):
        return Path(path)
    name = path.removeprefix("sample:")
    file = shipped("data") / (name if Path(name).suffix else f"{name}.fasta")
    if not file.is_file() or ".." in Path(name).parts:
        root = shipped("data")
        known = sorted(str(p.relative_to(root).with_suffix("")) for p in root.glob("*/*.fasta"))
        known += sorted(str(p.relative_to(root)) for p in root.glob("*/*.csv"))
        raise InputError(f"{path}: no such sample; there are {', '.join('sample:' + k for k in known)}")
    return file
