"""The joint findings of all processes: the speed of collectives, and whether versions are the same. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from esmshard.cluster.doctor.findings import Finding, Level, first_case
from esmshard.planner.machines import GPU, NETWORK_GBIT

if TYPE_CHECKING:
    from esmshard.monitor.bandwidth import Speed

GROUP = "collectives"
FAR_BELOW = 3
"""The factor by which a link must be slower than the planner assumes for a warning."""

_SCOPES = {"all": "all {n} processes", "machine": "{n} processes of a machine", "between": "{n} machines"}


def bandwidth(speeds: "Sequence[Speed]", sheet: GPU | None, nodes: int) -> Iterator[Finding]:
    """Compare the measured bus bandwidth with the planner's assumption.

    There is no assumption for CPUs and for GPUs outside the planner's table, whose `sheet` is None.
    """
    for scope, words in _SCOPES.items():
        measured = [one for one in speeds if one.scope == scope]
        if not measured:
            continue
        ranks, within = measured[0].ranks, scope == "machine" or nodes == 1
        found = ", ".join(f"{one.collective.replace('_', '-')} {one.bus / 1e9:.2f} GB/s" for one in measured)
        found = f"{words.format(n=ranks)}: {found} (bus bandwidth, {measured[0].bytes >> 20} MiB)"
        # A collective of all processes uses two kinds of links and runs at the slower one. With one process on each
        # machine, there is one kind of link.
        mixed = scope == "all" and 1 < nodes < ranks
        assumed = 0.0 if sheet is None or mixed else sheet.link if within else NETWORK_GBIT * 1e9 / 8
        slowest = min(one.bus for one in measured)
        slow = f"{found}, under a third of the {assumed / 1e9:.0f} GB/s that the planner assumes"
        share = (
            "see the transport above, nvidia-smi topo -m and nvidia-smi nvlink --status; if the machine has no faster "
            "link, share a copy of the model among fewer GPUs (hybrid_shard) or raise batch.global_tokens"
        )
        plan = "check the transport above; if the network is this slow, plan with esmshard plan --network "
        with_plan = f"{found}; the planner assumes {assumed / 1e9:.0f}" if assumed else found
        yield first_case(
            GROUP,
            f"bandwidth {scope}",
            with_plan,
            {"speeds": [asdict(one) for one in measured], "assumed": assumed or None},
            (slowest * FAR_BELOW < assumed and within, "warning", slow, share),
            (slowest * FAR_BELOW < assumed, "warning", slow, f"{plan}{max(1, round(slowest * 8 / 1e9))}"),
        )


_DIFFERENT: dict[str, tuple[Level, str]] = {
    "driver": ("error", "request nodes with one driver version"),
    "gpu": ("warning", "request nodes with one kind of GPU"),
    "python": ("warning", "start all processes in the same image or environment"),
}


def versions(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the `versions` of one process of each machine, which are described as by `doctor_ranks.facts`."""
    names = sorted(one["name"] for one in ranks)
    equal = True
    for what in ranks[0]["versions"]:
        machines: dict[str, list[str]] = {}
        for one in ranks:
            machines.setdefault(str(one["versions"].get(what)), []).append(one["name"])
        if len(machines) > 1:
            equal = False
            found = "; ".join(f"{version} on {', '.join(sorted(hosts))}" for version, hosts in machines.items())
            level, fix = _DIFFERENT.get(what, ("error", "start all processes in the same image or environment"))
            values = {"name": what, "by": {version: sorted(hosts) for version, hosts in machines.items()}}
            yield Finding(GROUP, f"versions {what}", level, f"{what} differs: {found}", fix, values)
    if equal:
        found = f"all processes on {', '.join(names)} run the same versions"
        yield Finding(GROUP, "versions", "ok", found, values={"versions": dict(ranks[0]["versions"])})
