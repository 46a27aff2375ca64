"""The joint part of `esmshard doctor`: every process describes itself, and all processes time collectives."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from platform import python_version
from typing import Any

import esmshard
from esmshard.cluster.doctor import collectives, gpus, links, recipe_fit
from esmshard.cluster.doctor.findings import Finding
from esmshard.errors import InputError, UsageError
from esmshard.files import replacing
from esmshard.planner.machines import data_sheet
from esmshard.progress import say
from esmshard.recipe.sections import Recipe

FOLDER = "ESMSHARD_DOCTOR"
"""The environment variable with the directory for the measurements of processes that `esmshard doctor` started."""
SHARED, FAILED = "shared.json", "failed."
START = 120
"""Seconds for which processes wait for each other."""
LIMIT = 240
"""Seconds after which a process that hangs in a collective ends itself."""


def facts(recipe: Recipe | None, driver: str | None = None) -> dict[str, Any]:
    """Describe this process: versions, device, precision (auto without a recipe), attention kernel, ports."""
    import torch

    from esmshard.launch.process_group import is_launched, own_device, precision_on
    from esmshard.model.attention import kernel_name
    from esmshard.monitor.bandwidth import place

    here = place()
    size = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
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
    count = torch.cuda.device_count() if on_gpu else 0
    ports = links.ports()
    gpu = torch.cuda.get_device_name(device) if on_gpu else None
    return found | {
        **asdict(here),
        "gpu": gpu,
        "memory": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "peers": torch.cuda.can_device_access_peer(device, (device.index + 1) % count) if count > 1 else None,
        "ports": ports,
        "causes": links.causes(links.verbs(), ports, os.environ) if ports else [],
        "versions": {
            "esmshard": esmshard.__version__,
            "python": python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,  # type: ignore[no-untyped-call]
            "driver": driver,
            "gpu": gpu,
        },
    }


def together(
    recipe: Recipe | None,
    folder: Path,
    own: Sequence[Finding] = (),
    driver: str | None = None,
    on_hang: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Join the other processes and measure. Every rank returns the same values, except for its own `node`.

    NCCL's log is written to `folder`. One process of each machine has `own` findings about the machine. `on_hang` is
    called before a process that hangs in a collective ends itself.
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
            mine = facts(recipe, driver)
            known = ranks.gather(mine)
            places = [bandwidth.Place(one["host"], one["node"], one["local_rank"]) for one in known]
            speeds = bandwidth.measure(ranks, places) if ranks.size > 1 else []
            log = folder / f"nccl.{os.getpid()}"
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            logs = ranks.gather(links.parse_log(text) if text else None)
            machines = ranks.gather((mine["node"], list(own)))
    finally:
        watchdog.cancel()
    hosts = {(one["host"], one["node"]) for one in known}
    for one in known:  # cloned machines may all have one name
        is_unique = sum(host == one["host"] for host, _ in hosts) == 1
        one["name"] = one["host"] if is_unique else f"{one['host']}#{one['node']}"
    return {"node": mine["node"], "ranks": known, "speeds": speeds, "nccl": logs, "machines": machines}


def child(recipe: Recipe | None) -> None:
    """Run a process that `esmshard doctor` started. The first one writes the joint findings to the directory FOLDER."""
    os.dup2(sys.stderr.fileno(), 1)  # output of libraries on stdout would spoil the report
    folder = Path(os.environ[FOLDER])
    rank = os.environ["RANK"]
    try:
        driver = gpus.MODULE.read_text(encoding="utf-8").strip() if gpus.MODULE.is_file() else None
        found = list(judge(together(recipe, folder, driver=driver)))
    except Exception as error:  # the report gets messages of gloo, NCCL or CUDA without their stack
        message = in_a_line(error)
        (folder / f"{FAILED}{rank}").write_text(message, encoding="utf-8")
        raise InputError(f"rank {rank}: {message}") from None
    if rank == "0":
        with replacing(folder / SHARED) as file:
            json.dump([asdict(finding) for finding in found], file)


def in_a_line(error: Exception) -> str:
    """Return the message of torch's exception, without the stack below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(one for one in lines[:6] if one and not one.startswith(("frame #", "Exception raised from")))
    return message[:400] or type(error).__name__


def judge(shared: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings about all processes together, from the result of `together`."""
    ranks = shared["ranks"]
    yield from recipe_fit.arithmetic(ranks[0])
    if len(ranks) == 1:
        return
    nodes: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        nodes.setdefault(one["node"], []).append(rank)
    yield from collectives.versions([ranks[members[0]] for members in nodes.values()])
    for members in nodes.values():
        first, logs = ranks[members[0]], [shared["nccl"][rank] for rank in members if shared["nccl"][rank]]
        if logs:
            for finding in links.transport(logs, first["ports"], first["causes"], len(nodes), first["peers"]):
                yield replace(finding, node=first["name"] if len(nodes) > 1 else "")
    sheet = data_sheet(ranks[0]["gpu"], ranks[0]["memory"]) if ranks[0]["gpu"] else None
    yield from collectives.bandwidth(shared["speeds"], sheet, len(nodes))
