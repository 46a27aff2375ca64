"""Can the disks take what a run writes? Measured with a small file in a directory that is removed again. No torch."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from esmshard.cluster.findings import Finding, gib

CHECK = "storage"
MOST = 256 << 20
"""Bytes of the file that is written, at most."""
PATIENCE = 0.7
"""Seconds of writing; and half of it of reading."""
BLOCK = 8 << 20
SLOW = 50e6
"""Bytes/s of writing below which a checkpoint of a 3B model takes more than ten minutes."""
INODES = 10_000
NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.ceph",
    "cifs",
    "9p",
    "virtiofs",
    "afs",
    "weka",
    "wekafs",
)
VOLATILE = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    """As ext4, nfs4, overlay."""
    source: str


def parse_mounts(text: str) -> list[Mount]:
    """Lines of /proc/self/mountinfo (proc(5)); blanks in paths are written as octal numbers there."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 2:
            continue
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), left[4])
        found.append(Mount(point, right[0], right[1]))
    return found


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """The one that a path lies on: of those that hold it the deepest, and of these the last one mounted."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(Path(mount.point).parts), default=None)


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    path = path.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path.resolve()


@dataclass(frozen=True)
class Speed:
    """How fast a file system is; bytes/s."""

    bytes: int
    """Of the file."""
    write: float
    """With fsync every 32 MiB and at the end."""
    read: float | None
    """After the cache was told to forget the file; it may still come from there, or from the server's."""


def speed(folder: Path, most: int = MOST, patience: float = PATIENCE) -> Speed:
    """Write a file for so long, flush it, read it. The caller removes the folder."""
    path, block = folder / "speed", os.urandom(BLOCK)  # no file system compresses that
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    written, began = 0, time.perf_counter()
    try:
        while written < most and time.perf_counter() - began < patience:
            written += os.write(descriptor, block[: most - written])
            if written % (32 << 20) == 0:
                os.fsync(descriptor)
        os.fsync(descriptor)
        write = written / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    read, began = 0, time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while time.perf_counter() - began < patience / 2 and (part := file.read(BLOCK)):
            read += len(part)
    seconds = time.perf_counter() - began
    return Speed(written, write, read / seconds if read else None)


def semantics(folder: Path) -> list[str]:
    """What the run's files rely on and this file system does not do; empty where all is well."""
    wrong = []
    first, second = folder / "first", folder / "second"
    first.write_text("1", encoding="utf-8")
    second.write_text("2", encoding="utf-8")
    first.replace(second)
    if first.exists() or second.read_text(encoding="utf-8") != "1":
        wrong.append("a rename does not replace a file")
    try:
        os.close(os.open(second, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        wrong.append("a file that exists can be created anew (O_EXCL), which the run's lease relies on")
    except FileExistsError:
        pass
    folders = folder / "before", folder / "after"
    folders[0].mkdir()
    (folders[0] / "file").write_text("3", encoding="utf-8")
    folders[0].rename(folders[1])
    if not (folders[1] / "file").is_file():
        wrong.append("a directory cannot be renamed with what is in it")
    with suppress(OSError):  # a directory that cannot be flushed is no obstacle
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return wrong


def space(role: str, path: Path, free: int, inodes: int | None, needed: int) -> Iterator[Finding]:
    """Room for what is going to be written.

    Args:
        role: what the directory is for: out, cache or TMPDIR.
        path: the directory.
        free: bytes.
        inodes: files that can still be made; None where the file system does not count them.
        needed: bytes that the recipe writes; 0 if no recipe is known.
    """
    values = {"path": str(path), "free": free, "inodes": inodes, "needed": needed}
    mend = "remove old runs, or choose another directory with out=DIR"
    mend = {"cache": "set ESMSHARD_CACHE to another directory", "TMPDIR": "set TMPDIR to another one"}.get(role, mend)
    if needed and free < needed:
        told = f"{path}: {gib(free)} free, and the run writes {gib(needed)}"
        yield Finding(CHECK, f"{role} space", "error", told, f"{mend}, or lower checkpoint.keep", values)
    elif free < 1 << 30 or (needed and free < 1.5 * needed):
        told = f"{path}: only {gib(free)} free" + (f", and the run writes {gib(needed)}" if needed else "")
        yield Finding(CHECK, f"{role} space", "warning", told, mend, values)
    elif inodes is not None and inodes < INODES:
        told = f"{path}: no more than {inodes:,} files can be made (inodes)"
        yield Finding(CHECK, f"{role} space", "warning", told, mend, values)
    else:
        told = f"{gib(free)} free" + (f", of which the run writes {gib(needed)}" if needed else "")
        yield Finding(CHECK, f"{role} space", "ok", f"{path}: {told}", values=values)


def kind(role: str, path: Path, mount: Mount | None) -> Iterator[Finding]:
    """Whether what is written there outlives the job, and is seen by other machines."""
    if mount is None:
        return
    values = {"path": str(path), "type": mount.kind, "mount": mount.point, "source": mount.source}
    told = f"{path} is on {mount.kind} ({mount.point})"
    if role == "out" and mount.kind in ("overlay", "aufs"):
        mend = 'mount a directory of the machine into the container: docker run -v "$PWD:/work"'
        yield Finding(CHECK, f"{role} type", "warning", f"{told}, which goes with the container", mend, values)
    elif role == "out" and mount.kind in VOLATILE:
        mend = "choose a directory on a disk with out=DIR"
        yield Finding(
            CHECK, f"{role} type", "warning", f"{told}, which is memory and gone after a restart", mend, values
        )
    elif role == "TMPDIR" and mount.kind in NETWORK:
        mend = "set TMPDIR to a disk of this machine: sockets and small files go there"
        yield Finding(CHECK, f"{role} type", "warning", f"{told}, over the network", mend, values)
    elif role == "TMPDIR" and mount.kind in VOLATILE:
        yield Finding(CHECK, f"{role} type", "note", f"{told}: what is written there takes memory", values=values)
    else:
        yield Finding(CHECK, f"{role} type", "ok", told, values=values)


def look_at(role: str, path: Path, mounts: list[Mount], needed: int, measured: dict[int, Speed]) -> Iterator[Finding]:
    """One directory: type, room, rights, semantics, speed.

    Args:
        role: what it is for.
        path: it, whether it is there or not.
        mounts: `parse_mounts`.
        needed: see `space`.
        measured: device numbers that have been timed; added to.
    """
    here = existing(path)
    yield from kind(role, here, mount_of(here, mounts))
    known = os.statvfs(here)
    yield from space(role, here, known.f_bavail * known.f_frsize, known.f_favail if known.f_files else None, needed)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".esmshard-doctor-", dir=here))
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        mend = {"cache": "set ESMSHARD_CACHE to one that is", "TMPDIR": "set TMPDIR to one that is"}.get(
            role, "choose another directory with out=DIR, or ask for the right to write"
        )
        told = f"{here}: nothing can be written there ({said})"
        yield Finding(CHECK, f"{role} writable", "error", told, mend, {"path": str(here), "error": said})
        return
    try:
        wrong = semantics(folder)
        if wrong:
            mend = "choose another file system for it: a disk of the machine, or NFS 4"
            yield Finding(CHECK, f"{role} files", "error", f"{here}: {'; '.join(wrong)}", mend, {"wrong": wrong})
        device = here.stat().st_dev
        if device not in measured:
            room = known.f_bavail * known.f_frsize // 4
            measured[device] = speed(folder, max(1 << 20, min(MOST, room)))
            yield from _fast(role, here, measured[device])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fast(role: str, path: Path, found: Speed) -> Iterator[Finding]:
    values = {"path": str(path), "bytes": found.bytes, "write": found.write, "read": found.read}
    told = f"{path}: writes {found.write / 1e6:,.0f} MB/s to the disk"
    told += "" if found.read is None else f", reads {found.read / 1e6:,.0f} MB/s"
    if role == "out" and found.write < SLOW:
        mend = "save less often (checkpoint.every), or choose a faster file system for out"
        yield Finding(CHECK, f"{role} speed", "warning", told, mend, values)
    else:
        yield Finding(CHECK, f"{role} speed", "ok", told, values=values)


def look(out: Path, cache: Path, needed: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The run's directory, the cache and TMPDIR.

    Args:
        out: of the run.
        cache: of token stores.
        needed: bytes that the run writes into `out`; 0 if no recipe is known.
        environment: for TMPDIR.
    """
    try:
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    except OSError:
        mounts = []
    temporary = environment.get("TMPDIR") or "/tmp"  # noqa: S108
    if environment.get("TMPDIR") and not Path(temporary).is_dir():
        yield Finding(CHECK, "TMPDIR", "error", f"TMPDIR={temporary} is no directory", f"mkdir -p {temporary}")
    measured: dict[int, Speed] = {}
    for role, path, bytes_needed in (("out", out, needed), ("cache", cache, 0), ("TMPDIR", Path(temporary), 0)):
        yield from look_at(role, path, mounts, bytes_needed, measured)
