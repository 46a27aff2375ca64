"""The joint part of `esmshard doctor`: every process describes itself, and all processes time collectives."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

import esmshard
from esmshard.cluster.doctor import gpus, links, recipe_fit
from esmshard.cluster.doctor.findings import Finding, Level, guarded
from esmshard.errors import InputError, UsageError
from esmshard.files import replace_json
from esmshard.planner.machines import GPU, NETWORK_GBIT, data_sheet
from esmshard.progress import say
from esmshard.recipe.sections import Recipe

if TYPE_CHECKING:
    import torch

    from esmshard.monitor.bandwidth import Speed

FOLDER = "ESMSHARD_DOCTOR"
"""The environment variable with the directory for the measurements of processes that `esmshard doctor` started."""
SHARED, FAILED = "shared.json", "failed."
START = 120
"""Seconds for which processes wait for each other."""
LIMIT = 240
"""Seconds after which a process that hangs in a collective ends itself."""
FAR_BELOW = 3
"""The factor by which a link must be slower than the planner assumes for a warning."""

_SCOPES = {"all": "all {n} processes", "machine": "{n} processes of a machine", "between": "{n} machines"}
_FIXES = {"driver": "request nodes with one driver version", "gpu": "request nodes with one kind of GPU"}


def facts(recipe: Recipe | None, device: "torch.device") -> dict[str, Any]:
    """Describe this process and its device. Without a recipe, the precision is that of `auto`."""
    import torch

    from esmshard.launch.process_group import precision_on
    from esmshard.model.attention import kernel_name
    from esmshard.monitor.bandwidth import place
    from esmshard.sharding.shard import DTYPES

    wanted = recipe.parallel.precision if recipe else "auto"
    found: dict[str, Any] = {"device": str(device), "wanted": wanted, "precision": None, "kernel": None}
    try:
        found["precision"] = precision_on(device, wanted)
        found["kernel"] = kernel_name(device, DTYPES[found["precision"]])
    except UsageError as error:
        found["precision_error"] = str(error)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    count, ports = torch.cuda.device_count(), links.ports()
    return found | {
        **asdict(place()),
        "memory": gpu and gpu.total_memory,
        "peers": torch.cuda.can_device_access_peer(device, (device.index + 1) % count) if gpu and count > 1 else None,
        "ports": ports,
        "causes": list(links.causes(ports, os.environ)),
        "versions": {
            "esmshard": esmshard.__version__,
            "python": python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,  # type: ignore[no-untyped-call]
            "driver": gpus.driver(),
            "gpu": gpu and gpu.name,
        },
    }


def together(
    recipe: Recipe | None, folder: Path, own: Sequence[Finding] = (), on_hang: Callable[[], None] = lambda: None
) -> tuple[list[dict[str, Any]], "list[Speed]"]:
    """Join the other processes and measure.

    NCCL's log is written to `folder`. One process of each machine has `own` findings about the machine. `on_hang` is
    called before a process that hangs in a collective ends itself.

    Returns:
        On every rank, the `facts` of each rank, with the `name` of its machine, its `own` findings and the lines of its
        `nccl` log (None without a log); and the speed of collectives.
    """
    # NCCL reads these variables when it starts. Its log goes to a file, which is read after the measurement.
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%p")}
    os.environ.pop("NCCL_DEBUG_SUBSYS", None)

    from esmshard.launch.process_group import world
    from esmshard.monitor import bandwidth

    def give_up() -> None:
        on_hang()
        say(f"error: rank {os.environ.get('RANK')}: a collective did not end within {LIMIT} s")
        os._exit(1)

    watchdog = threading.Timer(LIMIT, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        with world(START, alone_too=True) as ranks:
            known = ranks.gather(facts(recipe, ranks.device) | {"own": list(own)})
            places = [bandwidth.Place(one["host"], one["node"], one["local_rank"]) for one in known]
            speeds = bandwidth.measure(ranks, places) if ranks.size > 1 else []
            log = folder / f"nccl.{os.getpid()}"
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else None
            logs = ranks.gather(text and links.nccl_lines(text))
    finally:
        watchdog.cancel()
    hosts = {(one["host"], one["node"]) for one in known}
    for one, lines in zip(known, logs, strict=True):
        is_unique = sum(host == one["host"] for host, _ in hosts) == 1  # cloned machines may all have one name
        one |= {"name": one["host"] if is_unique else f"{one['host']}#{one['node']}", "nccl": lines}
    return known, speeds


def child(recipe: Recipe | None, folder: Path) -> None:
    """Run a process that `esmshard doctor` started. The first one writes the joint findings to the directory."""
    os.dup2(sys.stderr.fileno(), 1)  # output of libraries on stdout would spoil the report
    rank = os.environ["RANK"]
    try:
        found = judge(*together(recipe, folder))
    except Exception as error:  # the report gets messages of gloo, NCCL or CUDA without their stack
        message = in_a_line(error)
        (folder / f"{FAILED}{rank}").write_text(message, encoding="utf-8")
        raise InputError(f"rank {rank}: {message}") from None
    if rank == "0":
        replace_json(folder / SHARED, [asdict(finding) for finding in found])


def in_a_line(error: Exception) -> str:
    """Return the message of torch's exception, without the stack below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(one for one in lines[:6] if one and not one.startswith(("frame #", "Exception raised from")))
    return message[:400] or type(error).__name__


def judge(ranks: Sequence[Mapping[str, Any]], speeds: "Sequence[Speed]") -> list[Finding]:
    """Return findings about all processes together, from the result of `together`."""
    found = guarded("recipe", partial(recipe_fit.arithmetic, ranks[0]))
    if len(ranks) == 1:
        return found
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for one in ranks:
        nodes.setdefault(one["node"], []).append(one)
    found += guarded("collectives", partial(judge_versions, [members[0] for members in nodes.values()]))
    for first, *others in nodes.values():
        if logs := [one["nccl"] for one in (first, *others) if one["nccl"] is not None]:
            log = "\n".join(logs)
            check = partial(links.transport, log, first["ports"], first["causes"], len(nodes), first["peers"])
            name = first["name"] if len(nodes) > 1 else ""
            found += [replace(finding, node=name) for finding in guarded("links", check)]
    gpu, memory = ranks[0]["versions"]["gpu"], ranks[0]["memory"]
    sheet = data_sheet(gpu, memory) if gpu else None
    return found + guarded("collectives", partial(judge_bandwidth, speeds, sheet, len(nodes)))


def judge_bandwidth(speeds: "Sequence[Speed]", sheet: GPU | None, nodes: int) -> Iterator[Finding]:
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
        values = {"speeds": [asdict(one) for one in measured], "assumed": assumed or None}
        if slowest * FAR_BELOW >= assumed:
            found += f"; the planner assumes {assumed / 1e9:.0f}" if assumed else ""
            yield Finding(f"bandwidth {scope}", "ok", found, values=values)
            continue
        fix = (
            "see the transport above, nvidia-smi topo -m and nvidia-smi nvlink --status; if the machine has no faster "
            "link, share a copy of the model among fewer GPUs (hybrid_shard) or raise batch.global_tokens"
        )
        if not within:
            gbit = max(1, round(slowest * 8 / 1e9))
            fix = f"check the transport above; if the network is this slow, plan with esmshard plan --network {gbit}"
        found += f", under a third of the {assumed / 1e9:.0f} GB/s that the planner assumes"
        yield Finding(f"bandwidth {scope}", "warning", found, fix, values)


def judge_versions(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the `versions` of one process of each machine, which are described as by `facts`."""
    equal = True
    for what in ranks[0]["versions"]:
        machines: dict[str, list[str]] = {}
        for one in sorted(ranks, key=lambda rank: rank["name"]):
            machines.setdefault(str(one["versions"].get(what)), []).append(one["name"])
        if len(machines) > 1:
            equal = False
            found = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in machines.items())
            level: Level = "warning" if what in ("gpu", "python") else "error"
            fix = _FIXES.get(what, "start all processes in the same image or environment")
            values = {"name": what, "by": machines}
            yield Finding(f"versions {what}", level, f"{what} differs: {found}", fix, values)
    if equal:
        names = ", ".join(sorted(one["name"] for one in ranks))
        found = f"all processes on {names} run the same versions"
        yield Finding("versions", "ok", found, values={"versions": dict(ranks[0]["versions"])})
