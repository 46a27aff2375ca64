"""What the processes found out together: speed of collectives, clocks, versions. Decisions take values; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esmshard.cluster.findings import Finding
from esmshard.parallel.machines import GPU, NETWORK_GBIT

CHECK = "collectives"
FAR_BELOW = 3
"""A link that is slower than planned by this factor is worth a warning."""
APART = 1.0
"""Seconds between two clocks above which logs of several machines are hard to read together."""

_SCOPES = {"all": "all {n} processes", "machine": "{n} processes of a machine", "between": "{n} machines"}


def bandwidth(speeds: Sequence[Mapping[str, Any]], sheet: GPU | None, nodes: int) -> Iterator[Finding]:
    """Measured bus bandwidth beside what the planner takes for granted of the link.

    Args:
        speeds: `parallel.bandwidth.Speed`, as dictionaries.
        sheet: the GPU of the planner's table; None for CPUs and others, of which it assumes nothing.
        nodes: machines.
    """
    network = NETWORK_GBIT * 1e9 / 8
    for scope, words in _SCOPES.items():
        here = [one for one in speeds if one["scope"] == scope]
        if not here:
            continue
        ranks = here[0]["ranks"]
        told = ", ".join(f"{one['collective'].replace('_', '-')} {one['bus'] / 1e9:.2f} GB/s" for one in here)
        told = f"{words.format(n=ranks)}: {told} (bus bandwidth, {here[0]['bytes'] >> 20} MiB)"
        within = scope == "machine" or nodes == 1
        # All of several machines go by the slower of two links; with one process each there is one.
        mixed = scope == "all" and 1 < nodes < ranks
        assumed = None if sheet is None or mixed else sheet.link if within else network
        values = {"speeds": here, "assumed": assumed}
        slowest = min(one["bus"] for one in here)
        if assumed is not None and slowest * FAR_BELOW < assumed:
            yield Finding(
                CHECK,
                f"bandwidth {scope}",
                "warning",
                f"{told}, under a third of the {assumed / 1e9:.0f} GB/s that the planner takes for granted",
                "see the transport and topology above; if the machine has no faster link, plan with fewer GPUs a copy "
                "(hybrid_shard) or a larger batch.global_tokens"
                if within
                else f"see the transport above; if the network is slower, tell the planner: esmshard plan --network "
                f"{max(1, round(slowest * 8 / 1e9))}",
                values,
            )
        else:
            told += "" if assumed is None else f"; the planner assumes {assumed / 1e9:.0f}"
            yield Finding(CHECK, f"bandwidth {scope}", "ok", told, values=values)


def clocks(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Finding]:
    """Clocks of the machines beside the first one's.

    Args:
        found: `parallel.bandwidth.Clock`, as dictionaries.
        hosts: of each rank.
    """
    for one in found:
        host, seconds = hosts[one["rank"]], one["offset"]
        told = f"the clock of {host} (rank {one['rank']}) is {abs(seconds) * 1e3:.1f} ms "
        told += f"{'ahead' if seconds >= 0 else 'behind'} (to {one['uncertainty'] * 1e3:.1f} ms)"
        if abs(seconds) - one["uncertainty"] > APART:
            mend = "let chrony or ntpd set the clocks: logs, status.json and TLS go by them"
            yield Finding(CHECK, f"clock {one['rank']}", "warning", told, mend, dict(one))
        else:
            yield Finding(CHECK, f"clock {one['rank']}", "ok", told, values=dict(one))


def versions(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether all processes run the same.

    Args:
        ranks: of each rank the `name` of its machine, and under `versions` a text for each of esmshard, python, torch,
            cuda, nccl, driver and gpu.
    """
    differing = {}
    for name in ranks[0]["versions"]:
        by: dict[str, list[str]] = {}
        for one in ranks:
            by.setdefault(str(one["versions"].get(name)), []).append(one["name"])
        if len(by) > 1:
            differing[name] = {value: sorted(set(hosts)) for value, hosts in by.items()}
    if not differing:
        hosts = sorted({one["name"] for one in ranks})
        told = f"{len(ranks)} processes on {', '.join(hosts)} run the same versions"
        yield Finding(CHECK, "versions", "ok", told, values={"versions": dict(ranks[0]["versions"])})
        return
    for name, by in differing.items():
        told = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by.items())
        harmless = name in ("driver", "python", "gpu")
        mend = "start all of them in the same image or environment"
        mend = {"driver": "ask for nodes with one driver", "gpu": "ask for nodes of one kind"}.get(name, mend)
        yield Finding(
            CHECK,
            f"versions {name}",
            "warning" if harmless and name != "driver" else "error",
            f"{name} differs: {told}",
            mend,
            {"name": name, "by": by},
        )
