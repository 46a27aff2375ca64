"""Cores, memory, limits, interfaces. Files of the kernel are given as texts; limits are really set."""

import resource

import pytest

from esmshard.cluster.doctor import host

MEMINFO = "MemTotal:       65805228 kB\nMemFree:         1000000 kB\nMemAvailable:   50000000 kB\n"
GIB = 2**30


def test_cores_for_the_processes() -> None:
    found = host.processors(4, 64, 8)
    assert (found.level, found.found) == ("warning", "4 of 64 cores for 8 processes")
    assert host.processors(8, 8, 8).level == "ok"


def test_memory() -> None:
    found = host.memory(MEMINFO, None)
    assert (found.level, found.found) == ("ok", "47.68 GiB of 62.76 GiB available")
    found = host.memory(MEMINFO, (8 * GIB, 4 * GIB))
    assert (found.level, found.values["limit"]) == ("ok", 8 * GIB)
    found = host.memory(MEMINFO, (8 * GIB, int(7.5 * GIB)))
    assert found.level == "warning"
    assert "this job may have 8.00 GiB, of which 512 MiB are left" in found.found
    assert "--mem" in found.fix
    found = host.memory(MEMINFO.replace("50000000", "  999999"), None)
    assert found.level == "warning"


def test_shared_memory_of_a_container() -> None:
    found = host.shared_memory(64 << 20, 64 << 20)
    assert found.level == "warning"
    assert "/dev/shm has 64 MiB free of 64 MiB" in found.found
    assert "--shm-size=16g" in found.fix
    assert "emptyDir" in found.fix
    found = host.shared_memory(16 * GIB, 100 << 20)
    assert found.fix == "remove what ended jobs left in /dev/shm"
    assert host.shared_memory(16 * GIB, 16 * GIB).level == "ok"


def test_limits_as_they_are_set() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        found = {one.name: one for one in host.check(1)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found["limits"].level == "warning"
    assert found["limits"].values["open_files"] == 512
    assert found["limits"].fix.startswith("ulimit -n 65536")
    assert {one.name: one for one in host.check(1)}["limits"].level == "ok"


def test_unlimited() -> None:
    assert host.limits(-1, -1, -1).found == "open files unlimited, locked memory unlimited"
    assert host.limits(65536, -1, 8 << 20).found == "open files 65536, locked memory 8 MiB"


@pytest.mark.parametrize(
    ("variable", "value", "is_missing"),
    [
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", False),
        ("NCCL_SOCKET_IFNAME", "=ib", True),
        ("NCCL_SOCKET_IFNAME", "bond0", True),
        ("GLOO_SOCKET_IFNAME", "eth0", False),
        ("GLOO_SOCKET_IFNAME", "ib", True),  # gloo knows no beginnings
    ],
)
def test_interfaces_that_the_environment_names(variable: str, value: str, is_missing: bool) -> None:
    found = list(host.missing_interfaces(["lo", "eth0", "ib0"], {variable: value}))
    said = [f"{variable}={value}, but this machine has only lo, eth0, ib0"] if is_missing else []
    assert [one.found for one in found] == said
    assert all(one.level == "error" and variable in one.fix for one in found)


def test_this_machine() -> None:
    found = {one.name: one for one in host.check(1)}
    assert {"cores", "memory", "shm", "limits"} <= found.keys()
    assert 0 < found["memory"].values["available"] <= found["memory"].values["total"]
