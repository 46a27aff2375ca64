"""The check of disks for the files of a run, with a small test file that is removed. No torch."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from esmshard.cluster.doctor.findings import Finding, Level, gib

GROUP = "storage"
MOST = 256 << 20
"""The most bytes of the test file."""
PATIENCE = 0.7
"""Seconds of writing. Reading takes at most half of them."""
BLOCK = 8 << 20
SLOW = 50e6
"""Bytes/s of writing below which a checkpoint of a 3B model takes more than ten minutes."""
INODES = 10_000
NETWORK = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph"),
    *("cifs", "9p", "virtiofs", "afs", "weka", "wekafs"),
)
VOLATILE = ("tmpfs", "ramfs")

ANOTHER = {
    "out": "choose another directory with out=DIR",
    "cache": "set ESMSHARD_CACHE to another directory",
    "TMPDIR": "set TMPDIR to another directory",
}
"""The fix, by the purpose of a directory."""


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


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the mount that holds a path: the deepest one, and the last one mounted if several are at one point."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(Path(mount.point).parts), default=None)


def existing(path: Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists."""
    path = path.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path.resolve()


@dataclass(frozen=True)
class DiskSpeed:
    """The speed of a file system in bytes/s."""

    bytes: int
    """The size of the file in bytes."""
    write: float
    """The writing speed, with fsync every 32 MiB and at the end."""
    read: float | None
    """The reading speed, after the kernel was asked to drop the file from its cache; a server may still have it cached.
    """


def speed(folder: Path, most: int = MOST, patience: float = PATIENCE) -> DiskSpeed:
    """Write a file of at most `most` bytes for `patience` seconds, flush it, and read it. The caller removes it."""
    path, block = folder / "speed", os.urandom(BLOCK)  # no file system compresses random bytes
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
    return DiskSpeed(written, write, read / (time.perf_counter() - began) if read else None)


def semantics(folder: Path) -> list[str]:
    """Return the operations that a run relies on and that fail on this file system. The caller removes the folder."""
    wrong = []
    first, second = folder / "first", folder / "second"
    first.write_text("1", encoding="utf-8")
    second.write_text("2", encoding="utf-8")
    first.replace(second)
    if first.exists() or second.read_text(encoding="utf-8") != "1":
        wrong.append("a rename does not replace a file")
    with suppress(FileExistsError):
        os.close(os.open(second, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        wrong.append("a file that exists can be created again (O_EXCL), which the run's lease relies on")
    before, after = folder / "before", folder / "after"
    before.mkdir()
    (before / "file").write_text("3", encoding="utf-8")
    before.rename(after)
    if not (after / "file").is_file():
        wrong.append("a directory cannot be renamed with what is in it")
    return wrong


def space(role: str, path: Path, free: int, inodes: int | None, needed: int) -> Finding:
    """Check the room for the files of a run.

    Args:
        role: the purpose of the directory: out, cache or TMPDIR.
        path: the directory.
        free: the free bytes.
        inodes: the number of files that can still be made; None if the file system does not count them.
        needed: bytes that the recipe writes; 0 if no recipe is known.
    """
    values = {"path": str(path), "free": free, "inodes": inodes, "needed": needed}
    found = f"{path}: {gib(free)} free" + (f", and the run writes {gib(needed)}" if needed else "")
    level: Level = "ok"
    if needed and free < needed:
        level = "error"
    elif free < 1 << 30 or free < 1.5 * needed:
        level = "warning"
    elif inodes is not None and inodes < INODES:
        level, found = "warning", f"{path}: no more than {inodes:,} files can be made (inodes)"
    fix = f"remove old files, or {ANOTHER[role]}" + (", or lower checkpoint.keep" if needed else "")
    return Finding(GROUP, f"{role} space", level, found, "" if level == "ok" else fix, values)


def kind(role: str, path: Path, mount: Mount) -> Finding:
    """Check whether the files of a directory outlive the job, and whether TMPDIR is local."""
    values = {"path": str(path), "type": mount.kind, "mount": mount.point, "source": mount.source}
    found = f"{path} is on {mount.kind} ({mount.point})"
    level: Level = "ok"
    fix = ""
    if role == "out" and mount.kind in ("overlay", "aufs"):
        level, found = "warning", f"{found}, which is removed with the container"
        fix = 'mount a directory of the machine into the container: docker run -v "$PWD:/work"'
    elif role == "out" and mount.kind in VOLATILE:
        level, found = "warning", f"{found}, which is memory and gone after a restart"
        fix = "choose a directory on a disk with out=DIR"
    elif role == "TMPDIR" and mount.kind in NETWORK:
        level, found = "warning", f"{found}, over the network"
        fix = "set TMPDIR to a disk of this machine: sockets and small files go there"
    elif role == "TMPDIR" and mount.kind in VOLATILE:
        level, found = "note", f"{found}: what is written there takes memory"
    return Finding(GROUP, f"{role} type", level, found, fix, values)


def directory(
    role: str, path: Path, mounts: list[Mount], needed: int, measured: dict[int, DiskSpeed]
) -> Iterator[Finding]:
    """Check one directory: type, room, rights, semantics and speed.

    Args:
        role: the purpose of the directory.
        path: the directory, which need not exist.
        mounts: the result of `parse_mounts`.
        needed: see `space`.
        measured: speeds by device number, so that each disk is timed once. Results are added.
    """
    here = existing(path)
    mount = mount_of(here, mounts)
    if mount is not None:
        yield kind(role, here, mount)
    known = os.statvfs(here)
    free = known.f_bavail * known.f_frsize
    yield space(role, here, free, known.f_favail if known.f_files else None, needed)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".esmshard-doctor-", dir=here))
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        found = f"{here}: nothing can be written there ({message})"
        values = {"path": str(here), "error": message}
        yield Finding(GROUP, f"{role} writable", "error", found, f"{ANOTHER[role]}, or get write access", values)
        return
    try:
        wrong = semantics(folder)
        if wrong:
            fix = f"{ANOTHER[role]}, on a disk of the machine or NFS 4"
            yield Finding(GROUP, f"{role} files", "error", f"{here}: {'; '.join(wrong)}", fix, {"wrong": wrong})
        device = here.stat().st_dev
        if device not in measured:
            measured[device] = speed(folder, max(1 << 20, min(MOST, free // 4)))
            yield fast(role, here, measured[device])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fast(role: str, path: Path, measured: DiskSpeed) -> Finding:
    """Check whether a disk is fast enough for checkpoints."""
    values = {"path": str(path), "bytes": measured.bytes, "write": measured.write, "read": measured.read}
    found = f"{path}: writes {measured.write / 1e6:,.0f} MB/s to the disk"
    found += "" if measured.read is None else f", reads {measured.read / 1e6:,.0f} MB/s"
    if role != "out" or measured.write >= SLOW:
        return Finding(GROUP, f"{role} speed", "ok", found, values=values)
    fix = "save less often (checkpoint.every), or choose a faster file system with out=DIR"
    return Finding(GROUP, f"{role} speed", "warning", found, fix, values)


def check(out: Path, cache: Path, needed: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the run's directory, the cache and TMPDIR.

    Args:
        out: the directory of the run.
        cache: the directory of token stores.
        needed: bytes that the run writes into `out`; 0 if no recipe is known.
        environment: the environment, for TMPDIR.
    """
    try:
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    except OSError:
        mounts = []
    temporary = environment.get("TMPDIR") or "/tmp"  # noqa: S108
    if environment.get("TMPDIR") and not Path(temporary).is_dir():
        yield Finding(GROUP, "TMPDIR", "error", f"TMPDIR={temporary} is not a directory", f"mkdir -p {temporary}")
    measured: dict[int, DiskSpeed] = {}
    for role, path, bytes_needed in (("out", out, needed), ("cache", cache, 0), ("TMPDIR", Path(temporary), 0)):
        yield from directory(role, path, mounts, bytes_needed, measured)
