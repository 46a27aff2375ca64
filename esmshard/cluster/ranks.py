"""The part of `esmshard doctor` that processes do together: each tells what it is, and all measure what joins them."""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from esmshard.cluster import collectives, fit, gpus, links
from esmshard.cluster.findings import Finding
from esmshard.errors import InputError
from esmshard.files import read_json
from esmshard.progress import say
from esmshard.settings import Recipe

FOLDER = "ESMSHARD_DOCTOR"
"""Environment variable: directory in which a process that `esmshard doctor` started leaves what was found out."""
SHARED, OWN, FAILED = "shared.json", "machine.json", "failed."
MEET = 120
"""Seconds for which processes wait for each other."""
LIMIT = 240
"""Seconds after which a process that hangs in a collective ends itself."""


def facts(recipe: Recipe | None, driver: str | None) -> dict[str, Any]:
    """What this process is: versions, device, precision, kernel. JSON.

    Args:
        recipe: whose precision is wanted; None for auto.
        driver: version of the NVIDIA driver.
    """
    import torch

    from esmshard.errors import UsageError
    from esmshard.model.attention import kernel_name
    from esmshard.parallel.bandwidth import place
    from esmshard.parallel.mesh import is_launched, own_device, precision_on

    size = int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1
    here = place()
    device = own_device(here.local_rank if is_launched() else 0, size)
    on_gpu = device.type == "cuda"
    wanted = recipe.parallel.precision if recipe else "auto"
    found: dict[str, Any] = {"device": str(device), "wanted": wanted, "precision": None, "kernel": None}
    try:
        found["precision"] = precision_on(device, wanted)
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        found["kernel"] = kernel_name(device, types[found["precision"]])
    except UsageError as error:
        found["precision_error"] = str(error)
    here_ports = links.ports()
    peers = None
    if on_gpu and torch.cuda.device_count() > 1:
        peers = torch.cuda.can_device_access_peer(device, (device.index + 1) % torch.cuda.device_count())
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    return found | {
        "host": here.host,
        "node": here.node,
        "local_rank": here.local_rank,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "memory": memory,
        "peers": peers,
        "ports": [asdict(port) for port in here_ports],
        "causes": links.causes(links.verbs(), here_ports, os.environ) if here_ports else [],
        "versions": {
            "esmshard": version("esmshard"),
            "python": python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,  # type: ignore[no-untyped-call]
            "driver": driver,
            "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        },
    }


def together(
    recipe: Recipe | None, own: Sequence[Mapping[str, Any]], driver: str | None, folder: Path
) -> dict[str, Any]:
    """Join the other processes and measure. Every rank has the same answer, which is JSON.

    Args:
        recipe: see `facts`.
        own: what is known of this machine, as dictionaries of findings; from one process of each.
        driver: version of the NVIDIA driver.
        folder: for NCCL's log.
    """
    # NCCL reads these when it starts; what it says goes to a file, and is read when it is done.
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%p")}
    os.environ.pop("NCCL_DEBUG_SUBSYS", None)

    from esmshard.parallel import bandwidth
    from esmshard.parallel.mesh import world

    watchdog = threading.Timer(LIMIT, _give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        with world(MEET, alone_too=True) as ranks:
            mine = facts(recipe, driver)
            known = ranks.gather(mine)
            places = [bandwidth.Place(one["host"], one["node"], one["local_rank"]) for one in known]
            clocks = bandwidth.as_values(bandwidth.clocks(ranks, places)) if ranks.size > 1 else []
            speeds = bandwidth.as_values(bandwidth.measure(ranks, places)) if ranks.size > 1 else []
            log = folder / f"nccl.{os.getpid()}"
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            logs = ranks.gather(asdict(links.parse_log(text)) if text else None)
            here = {"node": mine["node"], "findings": [dict(one) for one in own]}
            told = [found for found in ranks.gather(here) if found["findings"]]
    finally:
        watchdog.cancel()
    _name(known)
    return {
        "node": mine["node"],
        "ranks": known,
        "clocks": clocks,
        "speeds": speeds,
        "nccl": logs,
        "machines": told,
    }


def _name(known: Sequence[dict[str, Any]]) -> None:
    """Give each machine a name of its own: the host's, and its number too where several have the same, as clones do."""
    nodes: dict[str, set[str]] = {}
    for one in known:
        nodes.setdefault(one["host"], set()).add(one["node"])
    for one in known:
        one["name"] = one["host"] if len(nodes[one["host"]]) == 1 else f"{one['host']}#{one['node']}"


def machines(shared: Mapping[str, Any]) -> dict[str, str]:
    """Machines by the launcher's number, and their names."""
    return {one["node"]: one["name"] for one in shared["ranks"]}


def _give_up() -> None:
    say(f"error: rank {os.environ.get('RANK')}: a collective did not end within {LIMIT} s")
    os._exit(1)


def child(recipe: Recipe | None) -> None:
    """What a process that `esmshard doctor` started does: it leaves the answer in the directory of its machine."""
    os.dup2(sys.stderr.fileno(), 1)  # libraries that speak on stdout would spoil the report
    folder = Path(os.environ[FOLDER])
    own = read_json(folder / OWN)
    is_first_here = os.environ.get("LOCAL_RANK") == "0"
    try:
        found = together(recipe, own["findings"] if is_first_here else [], own["driver"], folder)
    except Exception as error:  # of gloo, NCCL, CUDA: what they say is for the report, and not a page of frames
        said = in_a_line(error)
        (folder / f"{FAILED}{os.environ['RANK']}").write_text(said, encoding="utf-8")
        raise InputError(f"rank {os.environ['RANK']}: {said}") from None
    if is_first_here:
        part = folder / f"{SHARED}.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(folder / SHARED)


def in_a_line(error: Exception) -> str:
    """What an exception of torch says, without the frames below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = " ".join(line for line in lines[:6] if line and not line.startswith(("frame #", "Exception raised from")))
    return told[:400] or type(error).__name__


def judge(shared: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about all processes together.

    Args:
        shared: of `together`. Its `node` is the reader's own machine; all else is the same on all of them.
    """
    ranks = shared["ranks"]
    yield from fit.arithmetic(ranks[0])
    if len(ranks) == 1:
        return
    nodes: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        nodes.setdefault(one["node"], []).append(rank)
    yield from collectives.versions(ranks)
    for members in nodes.values():
        logs = [links.NcclLog(**shared["nccl"][rank]) for rank in members if shared["nccl"][rank]]
        if logs:
            first = ranks[members[0]]
            there = [links.Port(**port) for port in first["ports"]]
            why = [(cause, mend) for cause, mend in first["causes"]]
            for finding in links.transport(logs, there, why, len(nodes), first["peers"]):
                yield Finding(**{**finding.__dict__, "node": first["name"] if len(nodes) > 1 else ""})
    sheet = gpus.known(ranks[0]["gpu"], ranks[0]["memory"]) if ranks[0]["gpu"] else None
    yield from collectives.bandwidth(shared["speeds"], sheet, len(nodes))
    yield from collectives.clocks(shared["clocks"], [one["name"] for one in ranks])
