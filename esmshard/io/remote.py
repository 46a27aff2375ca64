"""Copies inputs from cloud buckets (`s3://`, `gs://`) to the local cache, and uploads results.

A bucket cannot rename or change an object. It writes each object in one step, so objects are never incomplete.
"""

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
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
    """Return the normal form (`s3://...`, `gs://...`) of an address in a bucket; None for a path on a disk.

    `pathlib` turns two slashes into one, so `s3:/bucket/name` is also an address. Raise `UsageError` if the address has
    a `?` or credentials, since logs and recipes would show the credentials.

    >>> address("s3://bucket/x.fasta"), address(Path("gs://bucket/x")), address("data/s3/x.fasta")
    ('s3://bucket/x.fasta', 'gs://bucket/x', None)
    """
    text = os.fspath(path)
    if (match := _ADDRESS.match(text)) is None:
        return None
    scheme, place = match[1], text[match.end() :].rstrip("/")
    bucket = place.partition("/")[0]
    if "@" in bucket or ":" in bucket or "?" in place:
        raise UsageError(
            f"an address in {scheme}:// may hold no credentials and no `?`; remove them, and set {_CREDENTIALS[scheme]}"
        )
    return f"{scheme}://{place}"


class Stored(NamedTuple):
    """The size and the tag of an object in a bucket."""

    size: int
    """The size of the object in bytes."""
    tag: str
    """The bucket's tag (ETag) for the object. A new tag means that the object was written again."""


class RemoteDirectory:
    """The object at an address in a bucket, and all objects below this address.

    The names of objects are relative to the address. The empty name is the object at the address itself. All methods
    raise `InputError` if the bucket cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = url.partition("://")[2]

    def listing(self, folder: str = "") -> dict[str, Stored]:
        """Return the size and tag of each object below the address, or only in `folder`. The keys are object names."""
        with one_sentence(self.url):
            entries = self._files.find(self._key(folder), detail=True)
        prefix = f"{self._path}/"
        return {name.removeprefix(prefix): _stored(entry) for name, entry in entries.items() if name.startswith(prefix)}

    def look(self, name: str) -> Stored | None:
        """Return the size and tag of an object; None if the object does not exist."""
        with one_sentence(self.url):
            try:
                entry = self._files.info(self._key(name))
            except FileNotFoundError as error:
                if "bucket" in str(error):
                    raise
                return None
        return _stored(entry) if entry["type"] == "file" else None

    def read(self, *names: str) -> dict[str, bytes]:
        """Read objects in parallel. Return the content of each object by name, without missing objects."""
        keys = {self._key(name): name for name in names}
        if not keys:
            return {}
        with one_sentence(self.url):
            contents = self._files.cat([*keys], on_error="return")
            for content in contents.values():
                if isinstance(content, BaseException) and not isinstance(content, FileNotFoundError):
                    raise content
        return {keys[key]: content for key, content in contents.items() if isinstance(content, bytes)}

    def write(self, name: str, data: bytes) -> None:
        """Write `data` to the object `name`, and replace an existing object."""
        with one_sentence(self.url):
            self._files.pipe_file(self._key(name), data)

    def first_bytes(self, name: str, count: int) -> bytes:
        """Return the first `count` bytes of an object, without reading the rest."""
        with one_sentence(f"{self.url}/{name}"):
            return bytes(self._files.cat_file(self._key(name), start=0, end=count))

    def upload(self, file: Path, name: str) -> Stored:
        """Copy a file into the bucket, and return the size and tag of the new object."""
        with one_sentence(self.url):
            self._files.put_file(str(file), self._key(name))
        entry, size = self.look(name), file.stat().st_size
        if entry is None or entry.size != size:
            state = "missing" if entry is None else f"{entry.size:,} bytes long"
            raise InputError(f"{self.url}/{name}: is {state} after an upload of {size:,} bytes; run the command again")
        return entry

    def download(self, name: str, file: Path) -> None:
        """Copy an object into a file. The file has a temporary name until the copy is complete."""
        file.parent.mkdir(parents=True, exist_ok=True)
        work = file.with_name(f".tmp-{os.getpid()}-{file.name}")
        try:
            with one_sentence(f"{self.url}/{name}".rstrip("/")):
                self._files.get_file(self._key(name), str(work))
            work.replace(file)
        finally:
            work.unlink(missing_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. A missing object is no error."""
        with one_sentence(self.url):
            for name in names:
                with suppress(FileNotFoundError):
                    self._files.rm_file(self._key(name))

    @property
    def _files(self) -> Any:
        return _library(self.url.partition("://")[0], os.getpid())

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path


@functools.cache
def _library(scheme: str, process: int) -> Any:
    """Return the fsspec file system of a process. A forked process needs a new one, since threads are not forked."""
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


def _stored(entry: Mapping[str, Any]) -> Stored:
    tag = entry.get("ETag") or entry.get("etag") or entry.get("md5Hash") or ""
    return Stored(int(entry["size"]), str(tag).strip('"'))


@contextmanager
def one_sentence(url: str) -> Iterator[None]:
    """Turn an error of a bucket in the `with` block into an `InputError` with one sentence about `url`."""
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
    """Return the local path of an input. If `path` is an address in a bucket, first copy its objects to the cache.

    Only the first call of a process for an address copies changed objects. A path on a disk is returned unchanged.
    Raise `InputError` if the bucket cannot be read, the disk is full, or no object exists and `needed` is true.
    """
    url = address(path)
    return Path(path) if url is None else _copied(url, needed)


def exists(url: str) -> bool:
    """Return whether an object has exactly this address."""
    return RemoteDirectory(url).look("") is not None


@functools.cache
def _copied(url: str, needed: bool) -> Path:
    remote, target = RemoteDirectory(url), cache_directory() / "remote" / url.replace("://", "/")
    state = cache_directory() / "remote" / ".state" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    single = remote.look("")
    objects = {"": single} if single is not None else remote.listing()
    if not objects and not needed:
        target.unlink(missing_ok=True)  # The object was removed from the bucket.
        return target
    if not objects:
        raise InputError(f"{url}: there is no such object, and no object below it; look at the address")
    try:
        from filelock import FileLock

        state.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(state.with_suffix(".lock")):  # Only one process of a machine copies the objects.
            return _updated(remote, target, objects, state)
    except OSError as error:
        raise InputError(
            f"{error.filename or target}: the copy of {url} cannot be written "
            f"({(error.strerror or str(error)).lower()}); make room, or set ESMSHARD_CACHE to another directory"
        ) from None


def _updated(remote: RemoteDirectory, target: Path, objects: Mapping[str, Stored], state: Path) -> Path:
    try:
        copied = read_json(state)
    except (OSError, ValueError):
        copied = {}
    files = {name: target / name if name else target for name in objects}
    if unsafe := [name for name in objects if ".." in name.split("/") or name.startswith("/")]:
        raise InputError(f"{remote.url}: object {unsafe[0]!r} would lie outside the cache; rename it")

    def is_current(name: str) -> bool:
        is_copy = files[name].is_file() and files[name].stat().st_size == objects[name].size
        return is_copy and copied.get(name) == [*objects[name]]

    changed = [name for name in objects if not is_current(name)]
    if changed:
        total = sum(objects[name].size for name in changed)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if total > free:
            raise InputError(
                f"{remote.url}: its copy needs {size_text(total)}, but only {size_text(free)} are free in "
                f"{target.parent}; make room, or set ESMSHARD_CACHE to another directory"
            )
        say(f"{remote.url}: is copied to {target} ({size_text(total)}); later commands use this copy")
    for name in changed:
        remote.download(name, files[name])
        if (size := files[name].stat().st_size) != objects[name].size:
            files[name].unlink()
            raise InputError(
                f"{remote.url}/{name}: has {size:,} bytes instead of {objects[name].size:,}, since another program "
                "changed it during the copy; run the command again"
            )
        copied[name] = [*objects[name]]
        replace_json(state, {name: copied[name] for name in objects if name in copied})
    for file in target.rglob("*") if target.is_dir() else ():
        if file.is_file() and file.relative_to(target).as_posix() not in objects:
            file.unlink()  # The bucket no longer has this object.
    return target


def scratch() -> AbstractContextManager[Path]:
    """Provide a temporary directory for the files of an upload. Remove it when the `with` block ends."""
    return scratch_directory(cache_directory() / "uploads" / "result")


def write_at(url: str, overwrite: bool, write: Callable[[Path], None]) -> None:
    """Let `write` make a file or directory at a temporary path, and upload all its files to the address `url`.

    The temporary path and `url` have the same last part. `manifest.json` and `config.json` are uploaded last, because
    they mark a directory as complete. Raise `UsageError` if objects exist at the address and `overwrite` is false. If
    `overwrite` is true, `write` finds each existing object as an empty file at the temporary path. Objects whose files
    `write` neither replaces nor removes stay in the bucket.
    """
    remote, parent = RemoteDirectory(url), RemoteDirectory(url.rpartition("/")[0])
    is_file, existing = remote.look("") is not None, remote.listing()
    if (is_file or existing) and not overwrite:
        raise UsageError(f"{url}: exists already; choose another name or pass --overwrite")
    with scratch() as folder:
        out = folder / url.rpartition("/")[2]
        lists = (failures_file(out).name, chains_file(out).name)
        old = {name for name in lists if parent.look(name) is not None}
        for name in existing:  # `write` sees existing objects as empty files, so it can refuse to replace them.
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).touch()
            os.utime(out / name, ns=(1, 1))
        write(out)
        unchanged = [name for name in existing if (out / name).is_file() and (out / name).stat().st_mtime_ns == 1]
        for name in unchanged:
            (out / name).unlink()
        made = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        names = sorted(made, key=lambda name: (_LAST.get(name.rpartition("/")[2], 0), name == out.name, name))
        old |= {f"{out.name}/{name}" for name in existing if name not in unchanged}
        try:
            parent.remove(sorted(name for name in old if name.rpartition("/")[2] in _LAST))
            for name in names:
                parent.upload(made[name], name)
            parent.remove(sorted(old - made.keys()))
        except InputError as error:
            rescued = cache_directory() / "not-uploaded" / folder.name
            rescued.parent.mkdir(exist_ok=True)
            folder.rename(rescued)
            raise InputError(f"{error}; the result is saved in {rescued}; copy it from there") from None
        say(f"{url}: uploaded, {size_text(sum(path.stat().st_size for path in made.values()))} in {len(made)} files")


_LAST = {"config.json": 1, "manifest.json": 1}


def data_file(path: str) -> Path:
    """Return the local file of `path`. An object at an address in a bucket is first copied to the cache.

    `sample:contact/train` and `sample:contact/labels.csv` are `contact/train.fasta` and `contact/labels.csv` in the
    shipped sample data.
    """
    if (url := address(path)) is not None:
        local(f"{_ENDING.sub('', url)}.npz", needed=False)  # The `.npz` has the labels of a FASTA file, if it exists.
        return local(url)
    if not path.startswith("sample:"):
        return Path(path)
    name = path.removeprefix("sample:")
    file = shipped("data") / (name if Path(name).suffix else f"{name}.fasta")
    if not file.is_file() or ".." in Path(name).parts:
        root = shipped("data")
        known = sorted(str(fasta.relative_to(root).with_suffix("")) for fasta in root.glob("*/*.fasta"))
        known += sorted(str(table.relative_to(root)) for table in root.glob("*/*.csv"))
        raise InputError(f"{path}: no such sample; choose one of {', '.join(f'sample:{name}' for name in known)}")
    return file
