"""The check of disks for the files of a run, with a small test file that is removed. No torch."""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from esmshard.cluster.doctor.findings import Finding
from esmshard.files import size_text

MOUNTS = Path("/proc/self/mountinfo")
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


def mount_of(path: Path, mounts: str) -> tuple[str, str, str] | None:
    """Return mount point, type (such as nfs4) and source of the file system that holds a path.

    `mounts` is the text of /proc/self/mountinfo (proc(5)), which writes blanks as octal numbers. If several file
    systems are mounted at one point, the last one counts.
    """
    found = None
    for escaped, kind, source in re.findall(r"^(?:\S+ ){4}(\S+) .* - (\S+) (\S+)", mounts, re.MULTILINE):
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), escaped)
        if path.is_relative_to(point) and (found is None or len(point) >= len(found[0])):
            found = point, kind, source
    return found


def kind(role: str, path: Path, point: str, mounted: str, source: str) -> Finding:
    """Check whether the files of a directory outlive the job, and whether TMPDIR is local. See `mount_of`."""
    found = f"{path} is on {mounted} ({point})"
    values = {"path": str(path), "type": mounted, "mount": point, "source": source}
    finding = partial(Finding, f"{role} type", values=values)
    if role == "out" and mounted in LAYERED:
        fix = 'mount a directory of the machine into the container: docker run -v "$PWD:/work"'
        return finding("warning", f"{found}, which is removed with the container", fix)
    if role == "out" and mounted in VOLATILE:
        return finding("warning", f"{found}, which is memory and gone after a restart", ANOTHER[role])
    if role == "TMPDIR" and mounted in NETWORK:
        fix = "set TMPDIR to a disk of this machine: sockets and small files go there"
        return finding("warning", f"{found}, over the network", fix)
    if role == "TMPDIR" and mounted in VOLATILE:
        return finding("note", f"{found}: its files take memory")
    return finding("ok", found)


def space(role: str, path: Path, free: int, inodes: int | None, needed: int) -> Finding:
    """Check the room for the files of a run, which writes `needed` bytes (0 if no recipe is known).

    `free` is in bytes. So many `inodes` (files) can still be made; None if the file system does not count them.
    """
    found = f"{path}: {size_text(free)} free" + (f", and the run writes {size_text(needed)}" if needed else "")
    fix = f"remove old files, or {ANOTHER[role]}" + (", or lower checkpoint.keep" if needed else "")
    values = {"path": str(path), "free": free, "inodes": inodes, "needed": needed}
    if free < max(1 << 30, 1.5 * needed):
        return Finding(f"{role} space", "error" if free < needed else "warning", found, fix, values)
    if inodes is not None and inodes < INODES:
        found = f"{path}: no more than {inodes:,} files can be made (inodes)"
        return Finding(f"{role} space", "warning", found, fix, values)
    return Finding(f"{role} space", "ok", found, values=values)


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


def speed(folder: Path, most: int = MOST, patience: float = PATIENCE) -> dict[str, float]:
    """Write a file of at most `most` bytes for `patience` seconds, flush it, and read it. The caller removes it.

    Returns:
        `bytes` of the file; `write`, in bytes/s, with fsync every 32 MiB and at the end; `read`, in bytes/s, after the
        kernel was asked to drop the file from its cache. A server may still have it cached.
    """
    block = os.urandom(BLOCK)  # no file system compresses random bytes
    written, began = 0, time.perf_counter()
    with open(folder / "speed", "xb", buffering=0) as file:
        while written < most and time.perf_counter() - began < patience:
            written += file.write(block[: most - written])
            if written % (32 << 20) == 0:
                os.fsync(file)
        os.fsync(file)
        write = written / (time.perf_counter() - began)
        with suppress(OSError, AttributeError):  # macOS has no such call
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read, began = 0, time.perf_counter()
    with open(folder / "speed", "rb", buffering=0) as file:
        while time.perf_counter() - began < patience / 2 and (part := file.read(BLOCK)):
            read += len(part)
    return {"bytes": written, "write": write, "read": read / (time.perf_counter() - began)}


def directory(role: str, path: Path, mounts: str, needed: int, measured: set[int]) -> Iterator[Finding]:
    """Check one directory, or the nearest one above it that exists: type, room, rights, semantics and speed.

    `measured` has the device numbers of disks that were timed, so that each is timed once. This disk is added.
    """
    absolute = path.expanduser().absolute()
    here = next(one for one in (absolute, *absolute.parents) if one.is_dir()).resolve()
    if (mount := mount_of(here, mounts)) is not None:
        yield kind(role, here, *mount)
    known = os.statvfs(here)
    free = known.f_bavail * known.f_frsize
    yield space(role, here, free, known.f_favail if known.f_files else None, needed)
    try:
        folder = tempfile.TemporaryDirectory(prefix=".esmshard-doctor-", dir=here, ignore_cleanup_errors=True)
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        found, fix = f"{here}: nothing can be written there ({message})", f"{ANOTHER[role]}, or get write access"
        yield Finding(f"{role} writable", "error", found, fix, {"path": str(here), "error": message})
        return
    with folder as name:
        if wrong := semantics(Path(name)):
            fix = f"{ANOTHER[role]}, on a disk of the machine or NFS 4"
            yield Finding(f"{role} files", "error", f"{here}: {wrong}", fix, {"wrong": [wrong]})
        if here.stat().st_dev in measured:
            return
        measured.add(here.stat().st_dev)
        disk = speed(Path(name), max(1 << 20, min(MOST, free // 4)))
    found = f"{here}: writes {disk['write'] / 1e6:,.0f} MB/s to the disk, reads {disk['read'] / 1e6:,.0f} MB/s"
    finding = partial(Finding, f"{role} speed", values={"path": str(here), **disk})
    if role == "out" and disk["write"] < SLOW:
        fix = "save less often (checkpoint.every), or choose a faster file system with out=DIR"
        yield finding("warning", found, fix)
    else:
        yield finding("ok", found)


def check(out: Path, cache: Path, needed: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the run's directory, to which the run writes `needed` bytes, the cache, and TMPDIR of the environment."""
    mounts = MOUNTS.read_text(encoding="utf-8") if MOUNTS.is_file() else ""
    temporary = environment.get("TMPDIR") or "/tmp"  # noqa: S108
    if not Path(temporary).is_dir():
        yield Finding("TMPDIR", "error", f"TMPDIR={temporary} is not a directory", f"mkdir -p {temporary}")
    measured: set[int] = set()
    yield from directory("out", out, mounts, needed, measured)
    yield from directory("cache", cache, mounts, 0, measured)
    yield from directory("TMPDIR", Path(temporary), mounts, 0, measured)
