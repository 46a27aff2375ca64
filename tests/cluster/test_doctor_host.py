"""Cores, memory, limits, names. Files of the kernel are given as texts or as directories; limits are really set."""

import resource
import socket

import pytest

from esmshard.cluster import host
from esmshard.cluster.findings import Finding
from esmshard.parallel import address

MEMINFO = "MemTotal:       65805228 kB\nMemFree:         1000000 kB\nMemAvailable:   50000000 kB\n"
GIB = 2**30


def test_cores_for_the_processes() -> None:
    (found,) = host.processors(4, 64, 8)
    assert (found.level, found.found) == ("warning", "4 of 64 cores for 8 processes")
    assert next(host.processors(8, 8, 8)).level == "ok"


def test_memory() -> None:
    (found,) = host.memory(MEMINFO, None)
    assert (found.level, found.found) == ("ok", "47.7 GiB of 62.8 GiB available")
    (found,) = host.memory(MEMINFO, (8 * GIB, 4 * GIB))
    assert (found.level, found.values["limit"]) == ("ok", 8 * GIB)
    (found,) = host.memory(MEMINFO, (8 * GIB, int(7.5 * GIB)))
    assert found.level == "warning"
    assert "this job may have 8.0 GiB, of which 512 MiB are left" in found.found
    assert "--mem" in found.mend
    (found,) = host.memory(MEMINFO.replace("50000000", "  999999"), None)
    assert found.level == "warning"


def test_shared_memory_of_a_container() -> None:
    (found,) = host.shared_memory(64 << 20, 64 << 20)
    assert found.level == "warning"
    assert "/dev/shm has 64 MiB free of 64 MiB" in found.found
    assert "--shm-size=16g" in found.mend
    assert "emptyDir" in found.mend
    (found,) = host.shared_memory(16 * GIB, 100 << 20)
    assert found.mend == "remove what ended jobs left in /dev/shm"
    assert next(host.shared_memory(16 * GIB, 16 * GIB)).level == "ok"


def test_limits_as_they_are_set() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        found = {one.name: one for one in host.look(1, 1, False)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found["limits"].level == "warning"
    assert found["limits"].values["open_files"] == 512
    assert found["limits"].mend.startswith("ulimit -n 65536")
    assert {one.name: one for one in host.look(1, 1, False)}["limits"].level == "ok"


def test_locked_memory_matters_with_infiniband_only() -> None:
    assert next(host.limits(65536, -1, 8 << 20, False)).level == "ok"
    (found,) = host.limits(65536, -1, 8 << 20, True)
    assert (found.level, found.found) == ("warning", "open files 65536, locked memory 8 MiB")
    assert next(host.limits(-1, -1, -1, True)).found == "open files unlimited, locked memory unlimited"


INTERFACES = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "192.0.2.5", "ib0": "10.4.0.5"}


def network(found: list[str] | None, nodes: int = 1, **environment: str) -> Finding:
    return next(host.network("node1", found, INTERFACES, environment, nodes))


def test_a_name_that_leads_to_an_interface() -> None:
    found = network(["192.0.2.5"], 2)
    assert found.level == "ok"
    assert found.found == "node1 is 192.0.2.5; gloo takes eth0, NCCL ib0"
    assert network(["192.0.2.5"], NCCL_SOCKET_IFNAME="eth0").values["nccl"] == "eth0"


def test_debians_own_name_is_no_address_for_others() -> None:
    found = network(["127.0.1.1"], 2)
    assert found.level == "warning"
    assert "other machines cannot reach that" in found.found
    assert "write `172.17.0.1 node1`" not in found.mend
    assert "write `192.0.2.5 node1` into /etc/hosts" in found.mend
    assert "GLOO_SOCKET_IFNAME=eth0" in found.mend
    assert network(["127.0.1.1"]).level == "note"


def test_names_that_lead_nowhere() -> None:
    assert "unknown to the resolver" in network([], 2).found
    assert network(None).level == "warning"
    found = network(["198.51.100.9"], 2)
    assert "no interface here has that address" in found.found
    assert network(["192.0.2.5"], GLOO_SOCKET_IFNAME="eth7").level == "error"
    assert network([], 2, GLOO_SOCKET_IFNAME="eth0").level == "ok"  # the name is not asked for then
    assert network([], 2, GLOO_SOCKET_IFNAME="lo").level == "warning"


def test_a_resolver_that_is_slow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.2) or [])
    assert host.resolved("node1", timeout=0.05) is None


def test_this_machine() -> None:
    assert host.resolved("localhost") in (["127.0.0.1"], ["::1", "127.0.0.1"], ["127.0.0.1", "::1"], ["::1"])
    assert address.interfaces()["lo"] == "127.0.0.1"
    found = {one.name: one for one in host.look(1, 1, False)}
    assert {"cores", "memory", "shm", "limits", "network"} <= found.keys()
    assert 0 < found["memory"].values["available"] <= found["memory"].values["total"]
