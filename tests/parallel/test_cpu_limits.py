"""Limits of cgroups, from directories as the kernel shows them."""

from pathlib import Path

from esmshard.parallel import cpu_limits

GIB = 2**30


def _memory(root: Path, membership: str) -> tuple[int, int] | None:
    file = root / "membership"
    file.write_text(membership)
    return cpu_limits.memory(root, file)


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_limit_of_a_cgroup_of_version_2(tmp_path: Path) -> None:
    _write(tmp_path / "system" / "job_12", memory__max=str(8 * GIB), memory__current=str(GIB))
    _write(tmp_path / "system", memory__max="max", memory__current=str(3 * GIB))
    assert _memory(tmp_path, "0::/system/job_12\n") == (8 * GIB, GIB)


def test_a_parent_may_be_stricter(tmp_path: Path) -> None:
    _write(tmp_path / "slurm" / "step", memory__max=str(8 * GIB), memory__current=str(GIB))
    _write(tmp_path / "slurm", memory__max=str(4 * GIB), memory__current=str(2 * GIB))
    assert _memory(tmp_path, "0::/slurm/step\n") == (4 * GIB, 2 * GIB)


def test_limit_of_a_cgroup_of_version_1(tmp_path: Path) -> None:
    """Docker shows a container its own cgroup at the root, whatever /proc/self/cgroup calls it."""
    _write(tmp_path / "memory", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(GIB))
    membership = "5:cpu,cpuacct:/docker/3f\n4:memory:/docker/3f\n0::/\n"
    assert _memory(tmp_path, membership) == (2 * GIB, GIB)


def test_no_limit(tmp_path: Path) -> None:
    _write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="1")
    assert _memory(tmp_path, "4:memory:/\n") is None
    assert _memory(tmp_path, "") is None
    _write(tmp_path, memory__max="max", memory__current="1")
    assert _memory(tmp_path, "0::/\n") is None


def test_quota_of_processors(tmp_path: Path) -> None:
    assert cpu_limits.cpu_quota(tmp_path) is None
    _write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_limits.cpu_quota(tmp_path) is None
    _write(tmp_path / "cpu", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    assert cpu_limits.cpu_quota(tmp_path) == 2.5
    _write(tmp_path, cpu__max="max 100000")
    assert cpu_limits.cpu_quota(tmp_path) is None
    _write(tmp_path, cpu__max="400000 100000")
    assert cpu_limits.cpu_quota(tmp_path) == 4


def test_pages_of_files_can_be_given_up(tmp_path: Path) -> None:
    _write(tmp_path, memory__max=str(8 * GIB), memory__current=str(7 * GIB))
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nactive_file {GIB}\ninactive_file {5 * GIB}\n")
    assert _memory(tmp_path, "0::/\n") == (8 * GIB, 2 * GIB)


def test_cores_are_no_more_than_the_quota(tmp_path: Path) -> None:
    _write(tmp_path, cpu__max="100000 100000")
    assert cpu_limits.cores(tmp_path) == 1
    _write(tmp_path, cpu__max="50000 100000")
    assert cpu_limits.cores(tmp_path) == 1
