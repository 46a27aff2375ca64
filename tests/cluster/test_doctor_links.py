"""NCCL's log, read; and why it would not take InfiniBand. The texts have the line formats of NCCL 2.18 to 2.29."""

import ctypes
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from esmshard.cluster.doctor import links
from esmshard.cluster.doctor.findings import Finding
from esmshard.cluster.doctor.links import Port, causes, infiniband, ports

INFINIBAND = """\
node1:714:714 [0] NCCL INFO Bootstrap: Using ib0:10.4.0.11<0>
node1:714:714 [0] NCCL INFO cudaDriverVersion 13000
node1:714:714 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
node1:714:812 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
node1:714:812 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB ib0:10.4.0.11<0>
node1:714:812 [0] NCCL INFO Initialized NET plugin IB
node1:714:812 [0] NCCL INFO Using network IB
node1:714:812 [0] NCCL INFO Channel 00/08 : 0 1 2 3
node1:714:812 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:714:812 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:714:812 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
node1:714:812 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1(1)/GDRDMA/Shared
node1:714:812 [0] NCCL INFO Connected all rings
"""
SOCKETS = """\
node1:99:99 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
node1:99:99 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.5<0>
NCCL version 2.18.5+cuda12.1
node1:99:120 [0] NCCL INFO Failed to open libibverbs.so[.1]
node1:99:120 [0] NCCL INFO NET/IB : No device found.
node1:99:120 [0] NCCL INFO NET/Socket : Using [0]eth0:192.0.2.5<0> [1]docker0:172.17.0.1<0>
node1:99:120 [0] NCCL INFO Using network Socket
node1:99:120 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node1:99:120 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
CLOSED = """\
gpu7:44:61 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_open_device failed
gpu7:44:61 [0] transport/net_ib.cc:212 NCCL WARN NET/IB : Unable to open device mlx5_0
gpu7:44:61 [0] NCCL INFO NET/IB : No device found.
gpu7:44:61 [0] NCCL INFO Using network Socket
"""
SHARED_MEMORY = """\
box:5:5 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
box:5:9 [0] NCCL INFO NET/IB : Using [RO]; OOB enp6s0:192.0.2.9<0>
box:5:9 [0] NCCL INFO Using network Socket
box:5:9 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
box:5:9 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
"""
PLUGIN = """\
ip-10-0-0-1:8:8 [0] NCCL INFO Using network AWS Libfabric
ip-10-0-0-1:8:8 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA
"""
HDR = Port("mlx5_0", "1", True, "InfiniBand", "200 Gb/sec (4X HDR)")
ROCE = Port("mlx5_2", "1", True, "Ethernet", "100 Gb/sec (4X EDR)")


@dataclass(frozen=True)
class Able:
    """A process that can use InfiniBand, or lacks something for it."""

    library: bool = True
    devices: tuple[str, ...] = ("uverbs0",)
    closed: tuple[str, ...] = ()
    memlock: int = resource.RLIM_INFINITY

    def act(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process be such a process."""
        for name in self.devices:
            (folder / name).touch()
        if not self.library:
            monkeypatch.setattr(ctypes, "CDLL", _not_there)
        else:
            monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
        monkeypatch.setattr(links, "DEVICES", folder)
        monkeypatch.setattr(os, "access", lambda path, mode: path.name not in self.closed)
        monkeypatch.setattr(resource, "getrlimit", lambda which: (self.memlock, resource.RLIM_INFINITY))


def _not_there(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


ABLE = Able()


def transport(
    logs: Sequence[str], there: Sequence[Port], why: Sequence[tuple[str, str]], nodes: int, peers: bool | None
) -> list[Finding]:
    """The findings on the logs of the processes of a machine, each cut down to the lines that are exchanged."""
    return list(links.transport("\n".join(map(links.nccl_lines, logs)), there, why, nodes, peers))


def values(*logs: str) -> dict[str, Any]:
    """What is read from logs."""
    return dict(transport(logs, [], [], 1, None)[0].values)


def test_a_log_with_infiniband() -> None:
    found = {"channels": {"P2P": 2, "NET/IB": 2}, "networks": ["IB"], "gpudirect": True, "warnings": []}
    assert values(INFINIBAND) == found


def test_a_log_with_sockets() -> None:
    found = {"channels": {"NET/Socket": 2}, "networks": ["Socket"], "gpudirect": False, "warnings": []}
    assert values(SOCKETS) == found


def test_other_logs() -> None:
    assert values(CLOSED)["warnings"] == [
        "Call to ibv_open_device failed",
        "NET/IB : Unable to open device mlx5_0",
    ]
    assert values(SHARED_MEMORY)["channels"] == {"SHM": 2}
    assert values(PLUGIN)["networks"] == ["AWS Libfabric"]
    assert values(PLUGIN)["channels"] == {"NET/AWS Libfabric": 1}
    nothing = {"channels": {}, "networks": [], "gpudirect": False, "warnings": []}
    assert values("") == values("nothing of NCCL\nat all") == nothing


def test_the_logs_of_several_processes_are_one() -> None:
    found = values(INFINIBAND, INFINIBAND.replace("via P2P/CUMEM/read", "via SHM/direct/direct"), CLOSED)
    assert found["channels"] == {"P2P": 2, "SHM": 2, "NET/IB": 4}
    assert found["networks"] == ["IB", "Socket"]
    assert len(found["warnings"]) == 2


def test_what_is_exchanged_of_a_log() -> None:
    lines = links.nccl_lines(INFINIBAND).splitlines()
    assert len(lines) == 6  # the network, and five lines of channels
    assert all("Bootstrap" not in line for line in lines)


def _card(root: Path, device: str, state: str, layer: str = "InfiniBand", rate: str = "200 Gb/sec (4X HDR)") -> None:
    folder = root / device / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", layer), ("rate", rate)):
        (folder / name).write_text(f"{text}\n")


def test_ports_of_the_kernel(tmp_path: Path) -> None:
    _card(tmp_path, "mlx5_0", "4: ACTIVE")
    _card(tmp_path, "mlx5_1", "1: DOWN", rate="10 Gb/sec (4X SDR)")
    _card(tmp_path, "mlx5_2", "4: ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)")
    assert ports(tmp_path) == [HDR, Port("mlx5_1", "1", False, "InfiniBand", "10 Gb/sec (4X SDR)"), ROCE]
    assert ports(tmp_path / "nowhere") == []


def test_sockets_beside_infiniband_are_an_error_that_shouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without the verbs libraries, and the variable set."""
    Able(library=False, devices=(), memlock=64 << 10).act(tmp_path, monkeypatch)
    why = list(causes([HDR], {"NCCL_IB_DISABLE": "1"}))
    assert [cause.split(" ")[0] for cause, _ in why] == ["NCCL_IB_DISABLE=1", "libibverbs", str(tmp_path), "only"]
    found = transport([SOCKETS], [HDR], why, 2, None)[0]
    assert found.level == "error"
    assert found.found.startswith("SOCKETS, THOUGH 1 INFINIBAND PORTS ARE ACTIVE (mlx5_0:1 InfiniBand 200 Gb/sec")
    assert "libibverbs is not installed" in found.found
    for part in ("unset NCCL_IB_DISABLE", "libibverbs1", "--device=/dev/infiniband", "memlock=-1"):
        assert part in found.fix
    assert found.values["channels"] == {"NET/Socket": 2}


def test_sockets_where_nothing_is_to_blame() -> None:
    found = transport([SOCKETS], [HDR], [], 2, None)[0]
    assert found.level == "error"
    assert "none of the usual causes was found" in found.found
    assert "NCCL_DEBUG=INFO" in found.fix


def test_sockets_beside_ethernet_ports_on_one_machine_are_a_warning() -> None:
    assert transport([SHARED_MEMORY], [ROCE], [], 1, False)[0].level == "warning"
    assert transport([SOCKETS], [ROCE], [], 2, False)[0].level == "error"


def test_transports_that_are_well() -> None:
    (found,) = transport([INFINIBAND], [HDR], [], 2, True)
    assert found.level == "ok"
    assert "P2P (2 channels), NET/IB (2 channels); network IB, GPUDirect RDMA" in found.found
    (found,) = transport([SOCKETS], [], [], 2, None)
    assert found.level == "note"
    assert "TCP between machines, because there is nothing faster" in found.found
    without = INFINIBAND.replace("/GDRDMA", "")
    (found,) = transport([without], [HDR], [], 2, True)
    assert found.level == "note"
    assert "nvidia_peermem" in found.fix


def test_shared_memory_between_gpus_that_could_reach_each_other() -> None:
    found = {one.name: one for one in transport([SHARED_MEMORY], [], [], 1, True)}
    assert found["peers"].level == "warning"
    assert "NCCL_P2P_DISABLE" in found["peers"].fix
    assert [one.name for one in transport([SHARED_MEMORY], [], [], 1, False)] == ["transport"]


def test_warnings_of_nccl_are_repeated() -> None:
    found: dict[str, Finding] = {one.name: one for one in transport([CLOSED], [], [], 1, None)}
    assert "NET/IB : Unable to open device mlx5_0" in found["nccl warnings"].found


@pytest.mark.parametrize(
    ("here", "environment", "cause"),
    [
        (ABLE, {}, None),
        (ABLE, {"NCCL_IB_DISABLE": "0"}, None),
        (ABLE, {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 is set"),
        (ABLE, {"NCCL_NET": "Socket"}, "NCCL_NET=Socket is set"),
        (replace(ABLE, library=False), {}, "libibverbs is not installed"),
        (replace(ABLE, devices=()), {}, "has no uverbs devices: the container was not given them"),
        (replace(ABLE, closed=("uverbs0",)), {}, "uverbs0 may not be opened"),
        (replace(ABLE, memlock=8 << 20), {}, "only 8 MiB of memory may be locked"),
        (ABLE, {"NCCL_IB_HCA": "mlx5"}, None),
        (ABLE, {"NCCL_IB_HCA": "=mlx5_0:1"}, None),
        (ABLE, {"NCCL_IB_HCA": "^mlx5_1"}, None),
        (ABLE, {"NCCL_IB_HCA": "=mlx5"}, "NCCL_IB_HCA==mlx5 names none of the active ports (mlx5_0)"),
        (ABLE, {"NCCL_IB_HCA": "enp1s0f0np0"}, "NCCL_IB_HCA=enp1s0f0np0 names none"),
    ],
)
def test_each_cause_by_itself(
    here: Able, environment: dict[str, str], cause: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.act(tmp_path, monkeypatch)
    found = list(causes([HDR], environment))
    monkeypatch.undo()
    assert [one for one, _ in found] == [] if cause is None else cause in found[0][0]
    assert all(fix for _, fix in found)


def test_a_machine_without_ports_has_no_obstacles() -> None:
    assert not list(causes([], {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}))


def test_ports_without_a_collective() -> None:
    (found,) = infiniband([], [], 8)
    assert found.level == "ok"
    (found,) = infiniband([HDR], [], 8)
    assert found.found == "1 active: mlx5_0:1 InfiniBand 200 Gb/sec (4X HDR)"
    why = [("libibverbs is missing", "install it")]
    (found,) = infiniband([HDR], why, 8)
    assert (found.level, found.fix) == ("warning", "install it")
    assert next(infiniband([HDR], why, 0)).level == "note"
    assert [one.name for one in infiniband([replace(HDR, active=False)], [], 8)] == ["ports"]
