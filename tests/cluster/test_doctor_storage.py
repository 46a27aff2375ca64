"""Disks: real directories, a small file system in memory where the test may mount one, and texts of the kernel."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from esmshard.cluster.doctor import storage
from esmshard.cluster.doctor.findings import Finding
from esmshard.cluster.doctor.storage import mount_of

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/u
31 27 0:60 / /work rw,relatime shared:7 - nfs4 filer:/export/work rw,vers=4.2
32 31 8:1 / /work/my\\040disk rw,relatime - xfs /dev/sda1 rw
33 27 0:61 / /scratch rw - tmpfs tmpfs rw,size=1g
34 27 0:62 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw
broken line
"""


def test_file_systems_of_paths() -> None:
    assert mount_of(Path("/work/runs/x"), MOUNTS) == ("/work", "nfs4", "filer:/export/work")
    assert mount_of(Path("/work/my disk/runs"), MOUNTS) == ("/work/my disk", "xfs", "/dev/sda1")
    assert mount_of(Path("/workers"), MOUNTS) == ("/", "overlay", "overlay")
    assert mount_of(Path("/scratch/a"), MOUNTS) == ("/scratch", "lustre", "10.0.0.1@o2ib:/fs")  # the later one
    assert mount_of(Path("/a"), "") is None


@pytest.mark.parametrize(
    ("role", "kind", "level", "fix"),
    [
        ("out", "overlay", "warning", "docker run -v"),
        ("out", "tmpfs", "warning", "out=DIR"),
        ("out", "nfs4", "ok", ""),
        ("TMPDIR", "nfs4", "warning", "set TMPDIR"),
        ("TMPDIR", "tmpfs", "note", ""),
        ("cache", "overlay", "ok", ""),
    ],
)
def test_kinds(role: str, kind: str, level: str, fix: str) -> None:
    found = storage.kind(role, Path("/x/y"), "/x", kind, "s")
    assert (found.level, found.values["type"]) == (level, kind)
    assert fix in found.fix


def test_space() -> None:
    gb = 10**9
    assert (storage.space("out", Path("/x"), 100 * gb, 10**6, 50 * gb)).level == "ok"
    found = storage.space("out", Path("/x"), 40 * gb, 10**6, 50 * gb)
    assert (found.level, found.found) == ("error", "/x: 40.00 GB free, and the run writes 50.00 GB")
    assert "checkpoint.keep" in found.fix
    assert (storage.space("out", Path("/x"), 60 * gb, None, 50 * gb)).level == "warning"
    assert (storage.space("out", Path("/x"), gb // 2, None, 0)).level == "warning"
    found = storage.space("cache", Path("/x"), 100 * gb, 12, 0)
    assert found.found == "/x: no more than 12 files can be made (inodes)"
    assert "ESMSHARD_CACHE" in found.fix


def names(found: list[Finding]) -> dict[str, str]:
    return {one.name: one.level for one in found}


def test_a_real_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    out = tmp_path / "runs" / "new"  # not made yet: the directory above is looked at, and no other is made
    found = {one.name: one for one in storage.check(out, tmp_path, 0, {"TMPDIR": str(tmp_path)})}
    assert found["out speed"].values["write"] > 1e6
    assert 0 < found["out speed"].values["bytes"] <= 256 << 20
    assert found["out speed"].values["read"] > 1e6
    assert found["out type"].values["path"] == str(tmp_path)
    assert "out files" not in found
    assert "cache speed" not in found  # the same disk is not measured twice
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_system_without_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a mounted object store. The error is raised where Python calls the system."""

    def refused(*paths: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "rename", refused)
    found = {one.name: one for one in storage.check(tmp_path, tmp_path, 0, {})}["out files"]
    assert found.level == "error"
    assert found.found == f"{tmp_path}: a directory or a file cannot be renamed (operation not supported)"
    assert "out=DIR" in found.fix
    assert list(tmp_path.iterdir()) == []


def test_what_is_measured_has_bounds(tmp_path: Path) -> None:
    found = storage.speed(tmp_path, most=3 << 20, patience=5)
    assert found["bytes"] == 3 << 20
    (tmp_path / "speed").unlink()
    assert storage.speed(tmp_path, most=1 << 30, patience=0.0001)["bytes"] <= 8 << 20


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB and few inodes."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,nr_inodes=200", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_small_file_system(mounted: Path) -> None:
    found = {one.name: one for one in storage.check(mounted / "run", mounted, 1 << 30, {"TMPDIR": str(mounted)})}
    assert found["out type"].level == "warning"
    assert "memory and gone after a restart" in found["out type"].found
    assert found["out space"].level == "error"
    assert "25.17 MB free, and the run writes 1.07 GB" in found["out space"].found
    assert found["out speed"].values["bytes"] <= 6 << 20  # a quarter of what is free
    assert list(mounted.iterdir()) == []


def test_a_file_system_that_is_read_only(mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    found = {one.name: one for one in storage.check(Path.cwd(), mounted, 0, {"TMPDIR": str(mounted)})}
    assert found["TMPDIR writable"].level == "error"
    assert "read-only file system" in found["TMPDIR writable"].found
    assert found["TMPDIR writable"].fix == "set TMPDIR to another directory, or get write access"
    assert found["cache writable"].fix == "set ESMSHARD_CACHE to another directory, or get write access"


def test_a_temporary_directory_that_is_not_there(tmp_path: Path) -> None:
    found = list(storage.check(tmp_path, tmp_path, 0, {"TMPDIR": str(tmp_path / "gone")}))
    assert found[0].name == "TMPDIR"
    assert found[0].level == "error"
    assert found[0].fix == f"mkdir -p {tmp_path / 'gone'}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert names(list(storage.check(closed, tmp_path, 0, {})))["out writable"] == "error"
