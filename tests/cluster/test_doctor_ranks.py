"""What several processes find out together: values in, findings out. The measuring itself runs in test_doctor.py."""

from typing import Any

import pytest

from esmshard.cluster.doctor.doctor_ranks import judge, judge_bandwidth, judge_versions
from esmshard.monitor.bandwidth import Place, Scope, Speed, bus_bandwidth, scopes
from esmshard.planner.machines import GPUS


def speed(bus: float, scope: Scope = "all", ranks: int = 8) -> Speed:
    return Speed("all_gather", scope, ranks, 256 << 20, 0.1, bus)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md of nccl-tests: busbw = S/t * (n-1)/n for all-gather and reduce-scatter."""
    assert bus_bandwidth(1 << 30, 0.5, 8) == pytest.approx(1.879048192e9)
    assert bus_bandwidth(100, 1.0, 2) == 50


def test_bandwidth_beside_the_planners_assumption() -> None:
    (found,) = judge_bandwidth([speed(230e9)], GPUS["A100-80GB"], 1)
    assert found.level == "ok"
    assert "all-gather 230.00 GB/s" in found.found
    assert "the planner assumes 300" in found.found
    (found,) = judge_bandwidth([speed(230e9), speed(20e9)], GPUS["A100-80GB"], 1)  # PCIe
    assert found.level == "warning"
    assert "under a third of the 300 GB/s" in found.found
    (found,) = judge_bandwidth([speed(0.5e9)], None, 1)  # CPUs: nothing is assumed
    assert found.level == "ok"
    assert found.values["assumed"] is None


def test_bandwidth_between_machines() -> None:
    """The planner takes 200 Gbit/s a GPU: 25 GB/s, a third of which is 8.33."""
    speeds = [speed(9e9, ranks=16), speed(230e9, "machine"), speed(8.4e9, "between", 2)]
    assert [one.level for one in judge_bandwidth(speeds, GPUS["A100-80GB"], 2)] == ["ok", "ok", "ok"]
    speeds[2] = speed(1.1e9, "between", 2)
    found = {one.name: one for one in judge_bandwidth(speeds, GPUS["A100-80GB"], 2)}
    assert found["bandwidth between"].level == "warning"
    assert "esmshard plan --network 9" in found["bandwidth between"].fix


def test_groups_to_measure_over() -> None:
    one = [Place("a", "0", rank) for rank in range(4)]
    assert scopes(one) == {"all": [[0, 1, 2, 3]]}
    singles = [Place("a", "0", 0), Place("b", "1", 0)]
    assert scopes(singles) == {"all": [[0, 1]]}  # which is between the machines already
    uneven = [Place("a", "0", 0), Place("a", "0", 1), Place("b", "1", 0)]
    assert scopes(uneven) == {"all": [[0, 1, 2]]}


def test_one_rank_a_machine_is_compared_with_the_network() -> None:
    """2 GB/s would be far too little for NVLink, and 16 Gbit/s is for the network."""
    (found,) = judge_bandwidth([speed(2e9, ranks=2)], GPUS["H100-80GB"], 2)
    assert found.level == "warning"
    assert "25 GB/s" in found.found
    (found,) = judge_bandwidth([speed(20e9, ranks=2)], GPUS["H100-80GB"], 2)
    assert found.level == "ok"


def rank(host: str, **versions: str | None) -> dict[str, Any]:
    same = {"esmshard": "0.1.0", "python": "3.11.7", "torch": "2.11.0", "nccl": "2.28.9", "driver": "580.65.06"}
    return {"name": host, "versions": same | versions}


def test_versions_of_all_ranks() -> None:
    (found,) = judge_versions([rank("node1"), rank("node2")])
    assert (found.level, found.found) == ("ok", "all processes on node1, node2 run the same versions")
    found_all = list(judge_versions([rank("node1"), rank("node2", torch="2.13.0", python="3.12.1")]))
    assert {one.name: one.level for one in found_all} == {"versions torch": "error", "versions python": "warning"}
    assert found_all[1].found == "torch differs: 2.11.0 on node1; 2.13.0 on node2"
    (found,) = judge_versions([rank("node1"), rank("node2", driver="535.104.05")])
    assert found.level == "error"
    assert found.fix == "request nodes with one driver version"


def described(host: str, log: str | None) -> dict[str, Any]:
    """A rank as `together` describes it, alone on its machine."""
    alone = {"host": host, "node": host, "local_rank": 0, "memory": 85_000_000_000, "peers": None, "ports": []}
    computes = {"device": "cuda:0", "wanted": "auto", "precision": "bf16", "kernel": "varlen"}
    versions = rank(host, gpu="NVIDIA A100-SXM4-80GB")
    return versions | alone | computes | {"causes": [], "own": [], "nccl": log}


def test_all_joint_findings_with_their_group_and_machine() -> None:
    log = "a:1:1 [0] NCCL INFO Using network IB\na:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/IB/0/GDRDMA"
    found = judge([described("a", log), described("b", None)], [speed(20e9, ranks=2)])
    assert [(one.check, one.name, one.node, one.level) for one in found] == [
        ("recipe", "precision", "", "ok"),
        ("collectives", "versions", "", "ok"),
        ("links", "transport", "a", "ok"),  # the other machine has no log
        ("collectives", "bandwidth all", "", "ok"),
    ]
    assert found[3].values["assumed"] == 25e9  # the network, since each machine has one rank
    assert [one.name for one in judge([described("a", log)], [])] == ["precision"]
