"""Limits of cgroups, from directories as the kernel shows them."""

from pathlib import Path

import pytest

from esmshard.parallel import cpu_limits

GIB = 2**30
V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/system/job_12", {"system/job_12": (V2, 8 * GIB, GIB), "system": (V2, "max", 3 * GIB)}, (8 * GIB, GIB)),
        ("0::/slurm/s", {"slurm/s": (V2, 8 * GIB, GIB), "slurm": (V2, 4 * GIB, 2 * GIB)}, (4 * GIB, 2 * GIB)),
        # Docker shows a container its own cgroup at the root, whatever /proc/self/cgroup calls it.
        ("5:cpu,cpuacct:/docker/3f\n4:memory:/docker/3f\n0::/", {"memory": (V1, 2 * GIB, GIB)}, (2 * GIB, GIB)),
        ("4:memory:/", {"memory": (V1, 9223372036854771712, 1)}, None),
        ("0::/", {".": (V2, "max", 1)}, None),
        ("", {}, None),
    ],
)
def test_memory(tmp_path: Path, membership: str, files: dict, limit: object) -> None:
    (tmp_path / "membership").write_text(membership)
    for folder, (names, *values) in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (tmp_path / folder / name).write_text(f"{value}\n")
    assert cpu_limits.memory(tmp_path, tmp_path / "membership") == limit


def test_pages_of_files_can_be_released(tmp_path: Path) -> None:
    texts = {"memory.max": 8 * GIB, "memory.current": 7 * GIB, "membership": "0::/"}
    for name, text in (texts | {"memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {5 * GIB}"}).items():
        (tmp_path / name).write_text(f"{text}\n")
    assert cpu_limits.memory(tmp_path, tmp_path / "membership") == (8 * GIB, 2 * GIB)


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_limits.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert cpu_limits.cores(tmp_path) == 8
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", 8), ("250000", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert cpu_limits.cores(tmp_path) == cores
    for quota, cores in (("max", 8), ("400000", 4), ("50000", 1)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert cpu_limits.cores(tmp_path) == cores
