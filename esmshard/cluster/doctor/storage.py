"""The check of disks for the files of a run, with a small test file that is removed. No torch."""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from esmshard.cluster.doctor.findings import Case, Finding, first_case, gib

GROUP = "storage"
MOST = 256 << 20
"""The most bytes of the test file."""
PATIENCE = 0.7
"""Seconds of writing. Reading takes at most half of them."""
BLOCK = 8 << 20
SLOW = 50e6
"""Bytes/s of writing below which a checkpoint of a 3B model takes more than ten minutes."""
INODES = 10_000
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "9p", "virtiofs", "afs", "wekafs")
VOLATILE = ("tmpfs", "ramfs")
LAYERED = ("overlay", "aufs")

ANOTHER = {
    "out": "choose another directory with out=DIR",
    "cache": "set ESMSHARD_CACHE to another directory",
    "TMPDIR": "set TMPDIR to another directory",
}
"""The fix, by the role of a directory: out, cache or TMPDIR."""


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    """The type, such as ext4, nfs4, overlay."""
    source: str


def parse_mounts(text: str) -> list[Mount]:
    """Read the lines of /proc/self/mountinfo (proc(5)), which writes blanks in paths as octal numbers."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) >= 5 and len(right) >= 2:
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), left[4])
            found.append(Mount(point, right[0], right[1]))
    return found


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds a path: the deepest one, and the last one mounted if several are at one point."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(Path(mount.point).parts), default=None)


def kind(role: str, path: Path, mount: Mount) -> Finding:
    """Check whether the files of a directory outlive the job, and whether TMPDIR is local."""
    found = f"{path} is on {mount.kind} ({mount.point})"
    values = {"path": str(path), "type": mount.kind, "mount": mount.point, "source": mount.source}
    container = 'mount a directory of the machine into the container: docker run -v "$PWD:/work"'
    local = "set TMPDIR to a disk of this machine: sockets and small files go there"
    is_out, is_volatile = role == "out", mount.kind in VOLATILE
    is_remote = role == "TMPDIR" and mount.kind in NETWORK
    return first_case(
        GROUP,
        f"{role} type",
        found,
        values,
        (is_out and mount.kind in LAYERED, "warning", f"{found}, which is removed with the container", container),
        (is_out and is_volatile, "warning", f"{found}, which is memory and gone after a restart", ANOTHER[role]),
        (is_remote, "warning", f"{found}, over the network", local),
        (role == "TMPDIR" and is_volatile, "note", f"{found}: its files take memory", ""),
    )


def space(role: str, path: Path, free: int, inodes: int | None, needed: int) -> Finding:
    """Check the room for the files of a run, which writes `needed` bytes (0 if no recipe is known).

    `free` is in bytes. So many `inodes` (files) can still be made; None if the file system does not count them.
    """
    found = f"{path}: {gib(free)} free" + (f", and the run writes {gib(needed)}" if needed else "")
    fix = f"remove old files, or {ANOTHER[role]}" + (", or lower checkpoint.keep" if needed else "")
    values = {"path": str(path), "free": free, "inodes": inodes, "needed": needed}
    few = f"{path}: no more than {inodes or 0:,} files can be made (inodes)"
    return first_case(
        GROUP,
        f"{role} space",
        found,
        values,
        (needed and free < needed, "error", found, fix),
        (free < 1 << 30 or free < 1.5 * needed, "warning", found, fix),
        (inodes is not None and inodes < INODES, "warning", few, fix),
    )


def semantics(folder: Path) -> str:
    """Return what a run relies on and this file system cannot do; empty if there is nothing. The caller cleans up."""
    first, second = folder / "first", folder / "second"
    try:
        first.mkdir()
        (first / "file").write_text("1", encoding="utf-8")
        (first / "new").write_text("2", encoding="utf-8")
        first.rename(second)
        (second / "new").replace(second / "file")
    except OSError as error:
        return f"a directory or a file cannot be renamed ({(error.strerror or str(error)).lower()})"
    with suppress(FileExistsError):
        (second / "file").open("x").close()
        return "a file that exists can be created again (O_EXCL), which the run's lease relies on"
    return ""


@dataclass(frozen=True)
class DiskSpeed:
    """The speed of a file system in bytes/s."""

    bytes: int
    """The size of the file in bytes."""
    write: float
    """The writing speed, with fsync every 32 MiB and at the end."""
    read: float
    """The reading speed, after the kernel was asked to drop the file from its cache; a server may still have it cached.
    """


def speed(folder: Path, most: int = MOST, patience: float = PATIENCE) -> DiskSpeed:
    """Write a file of at most `most` bytes for `patience` seconds, flush it, and read it. The caller removes it."""
    block = os.urandom(BLOCK)  # no file system compresses random bytes
    written, began = 0, time.perf_counter()
    with open(folder / "speed", "xb", buffering=0) as file:
        while written < most and time.perf_counter() - began < patience:
            written += file.write(block[: most - written])
            if written % (32 << 20) == 0:
                os.fsync(file)
        os.fsync(file)
        write = written / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read, began = 0, time.perf_counter()
    with open(folder / "speed", "rb", buffering=0) as file:
        while time.perf_counter() - began < patience / 2 and (part := file.read(BLOCK)):
            read += len(part)
    return DiskSpeed(written, write, read / (time.perf_counter() - began))


def directory(role: str, path: Path, mounts: Sequence[Mount], needed: int, measured: set[int]) -> Iterator[Finding]:
    """Check one directory, or the nearest one above it that exists: type, room, rights, semantics and speed.

    `measured` has the device numbers of disks that were timed, so that each is timed once. This disk is added.
    """
    absolute = path.expanduser().absolute()
    here = next(one for one in (absolute, *absolute.parents) if one.is_dir()).resolve()
    mount = mount_of(here, mounts)
    if mount is not None:
        yield kind(role, here, mount)
    known = os.statvfs(here)
    free = known.f_bavail * known.f_frsize
    yield space(role, here, free, known.f_favail if known.f_files else None, needed)
    try:
        folder = tempfile.TemporaryDirectory(prefix=".esmshard-doctor-", dir=here, ignore_cleanup_errors=True)
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        found, fix = f"{here}: nothing can be written there ({message})", f"{ANOTHER[role]}, or get write access"
        yield Finding(GROUP, f"{role} writable", "error", found, fix, {"path": str(here), "error": message})
        return
    with folder as name:
        if wrong := semantics(Path(name)):
            fix = f"{ANOTHER[role]}, on a disk of the machine or NFS 4"
            yield Finding(GROUP, f"{role} files", "error", f"{here}: {wrong}", fix, {"wrong": [wrong]})
        if here.stat().st_dev in measured:
            return
        measured.add(here.stat().st_dev)
        disk = speed(Path(name), max(1 << 20, min(MOST, free // 4)))
    found = f"{here}: writes {disk.write / 1e6:,.0f} MB/s to the disk, reads {disk.read / 1e6:,.0f} MB/s"
    fix = "save less often (checkpoint.every), or choose a faster file system with out=DIR"
    case: Case = (role == "out" and disk.write < SLOW, "warning", found, fix)
    yield first_case(GROUP, f"{role} speed", found, {"path": str(here), **asdict(disk)}, case)


def check(out: Path, cache: Path, needed: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the run's directory, to which the run writes `needed` bytes, the cache, and TMPDIR of the environment."""
    mounts: list[Mount] = []
    with suppress(OSError):
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    temporary = environment.get("TMPDIR") or "/tmp"  # noqa: S108
    if environment.get("TMPDIR") and not Path(temporary).is_dir():
        yield Finding(GROUP, "TMPDIR", "error", f"TMPDIR={temporary} is not a directory", f"mkdir -p {temporary}")
    measured: set[int] = set()
    for role, path, bytes_needed in (("out", out, needed), ("cache", cache, 0), ("TMPDIR", Path(temporary), 0)):
        yield from directory(role, path, mounts, bytes_needed, measured)
