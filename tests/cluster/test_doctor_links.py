"""NCCL's log, read; and why it would not take InfiniBand. The texts have the line formats of NCCL 2.18 to 2.29."""

from dataclasses import replace
from pathlib import Path

import pytest

from esmshard.cluster.doctor.findings import Finding
from esmshard.cluster.doctor.links import NcclLog, Port, Verbs, causes, infiniband, parse_log, ports, transport

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
ABLE = Verbs(True, ("uverbs0",), (), -1)


def test_a_log_with_infiniband() -> None:
    log = parse_log(INFINIBAND)
    assert log.network == "IB"
    assert log.channels == {"P2P": 2, "NET/IB": 2}
    assert log.direct
    assert log.warnings == ()


def test_a_log_with_sockets() -> None:
    log = parse_log(SOCKETS)
    assert log.network == "Socket"
    assert log.channels == {"NET/Socket": 2}
    assert not log.direct


def test_other_logs() -> None:
    assert parse_log(CLOSED).warnings == (
        "Call to ibv_open_device failed",
        "NET/IB : Unable to open device mlx5_0",
    )
    assert parse_log(SHARED_MEMORY).channels == {"SHM": 2}
    assert parse_log(PLUGIN).network == "AWS Libfabric"
    assert parse_log(PLUGIN).channels == {"NET/AWS Libfabric": 1}
    assert parse_log("") == NcclLog()
    assert parse_log("nothing of NCCL\nat all").channels == {}


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


def test_sockets_beside_infiniband_are_an_error_that_shouts() -> None:
    """A container without the verbs libraries, and the variable set."""
    bare = replace(ABLE, library=False, devices=(), memlock=64 << 10)
    why = causes(bare, [HDR], {"NCCL_IB_DISABLE": "1"})
    assert [cause.split(" ")[0] for cause, _ in why] == ["NCCL_IB_DISABLE=1", "libibverbs", "/dev/infiniband", "only"]
    found = next(transport([parse_log(SOCKETS)], [HDR], why, 2, None))
    assert found.level == "error"
    assert found.found.startswith("SOCKETS, THOUGH 1 INFINIBAND PORTS ARE ACTIVE (mlx5_0:1 InfiniBand 200 Gb/sec")
    assert "libibverbs is not installed" in found.found
    for part in ("unset NCCL_IB_DISABLE", "libibverbs1", "--device=/dev/infiniband", "memlock=-1"):
        assert part in found.fix
    assert found.values["channels"] == {"NET/Socket": 2}


def test_sockets_where_nothing_is_to_blame() -> None:
    found = next(transport([parse_log(SOCKETS)], [HDR], [], 2, None))
    assert found.level == "error"
    assert "none of the usual causes was found" in found.found
    assert "NCCL_DEBUG=INFO" in found.fix


def test_sockets_beside_ethernet_ports_on_one_machine_are_a_warning() -> None:
    assert next(transport([parse_log(SHARED_MEMORY)], [ROCE], [], 1, False)).level == "warning"
    assert next(transport([parse_log(SOCKETS)], [ROCE], [], 2, False)).level == "error"


def test_transports_that_are_well() -> None:
    (found,) = transport([parse_log(INFINIBAND)], [HDR], [], 2, True)
    assert found.level == "ok"
    assert "P2P (2 channels), NET/IB (2 channels); network IB, GPUDirect RDMA" in found.found
    (found,) = transport([parse_log(SOCKETS)], [], [], 2, None)
    assert found.level == "note"
    assert "TCP between machines, because there is nothing faster" in found.found
    without = INFINIBAND.replace("/GDRDMA", "")
    (found,) = transport([parse_log(without)], [HDR], [], 2, True)
    assert found.level == "note"
    assert "nvidia_peermem" in found.fix


def test_shared_memory_between_gpus_that_could_reach_each_other() -> None:
    found = {one.name: one for one in transport([parse_log(SHARED_MEMORY)], [], [], 1, True)}
    assert found["peers"].level == "warning"
    assert "NCCL_P2P_DISABLE" in found["peers"].fix
    assert [one.name for one in transport([parse_log(SHARED_MEMORY)], [], [], 1, False)] == ["transport"]


def test_warnings_of_nccl_are_repeated() -> None:
    found: dict[str, Finding] = {one.name: one for one in transport([parse_log(CLOSED)], [], [], 1, None)}
    assert "NET/IB : Unable to open device mlx5_0" in found["nccl warnings"].found


@pytest.mark.parametrize(
    ("here", "environment", "cause"),
    [
        (ABLE, {}, None),
        (ABLE, {"NCCL_IB_DISABLE": "0"}, None),
        (ABLE, {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 is set"),
        (ABLE, {"NCCL_NET": "Socket"}, "NCCL_NET=Socket is set"),
        (replace(ABLE, library=False), {}, "libibverbs is not installed"),
        (replace(ABLE, devices=()), {}, "/dev/infiniband has no uverbs devices"),
        (replace(ABLE, closed=("uverbs0",)), {}, "uverbs0 may not be opened"),
        (replace(ABLE, memlock=8 << 20), {}, "only 8 MiB of memory may be locked"),
        (ABLE, {"NCCL_IB_HCA": "mlx5"}, None),
        (ABLE, {"NCCL_IB_HCA": "=mlx5_0:1"}, None),
        (ABLE, {"NCCL_IB_HCA": "^mlx5_1"}, None),
        (ABLE, {"NCCL_IB_HCA": "=mlx5"}, "NCCL_IB_HCA==mlx5 names none of the active ports (mlx5_0)"),
        (ABLE, {"NCCL_IB_HCA": "enp1s0f0np0"}, "NCCL_IB_HCA=enp1s0f0np0 names none"),
    ],
)
def test_each_cause_by_itself(here: Verbs, environment: dict[str, str], cause: str | None) -> None:
    found = causes(here, [HDR], environment)
    assert [one for one, _ in found] == [] if cause is None else cause in found[0][0]
    assert all(fix for _, fix in found)


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
