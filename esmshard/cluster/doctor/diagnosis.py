"""`esmshard doctor`: the problems of this machine, or of several machines together, each with its fix."""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from esmshard import __version__
from esmshard.cluster.doctor import doctor_ranks, gpus, host, links, recipe_fit, storage, versions
from esmshard.cluster.doctor.findings import LEVELS, Finding, guarded
from esmshard.errors import InputError, UsageError
from esmshard.files import cache_directory, read_json
from esmshard.launch import cpu_limits
from esmshard.launch.process_environment import environment
from esmshard.launch.process_group import is_launched, own_device, processes_per_machine
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

Report = dict[str, Any]
"""The object that `--json` prints. docs/doctor.md describes its keys, which stay the same while `schema` is 1."""

GROUPS = ("versions", "gpus", "links", "machine", "storage", "recipe", "collectives")
CPU_PROCESSES = 2
"""The number of processes that measure collectives on a machine without GPUs."""
STOP_TIMEOUT = 10.0
"""Seconds for these processes to end after SIGTERM."""


@dataclass(frozen=True)
class DoctorRequest:
    """The options of a check."""

    recipe: str | None = None
    """A file, or the name of a shipped recipe."""
    overrides: tuple[str, ...] = ()
    nproc: int | None = None
    """Processes of this machine; by default one for each GPU, or two without GPUs."""
    out: Path | None = None
    """A directory whose disk is checked; by default that of the recipe, or the working directory."""
    as_json: bool = False
    """Whether to print the report as JSON."""


def run(request: DoctorRequest) -> int:
    """Check this machine, measure between processes, and report on stdout.

    Under a launcher (torchrun, srun) the started processes join, and the first one reports. Otherwise this
    process starts processes itself.

    Returns:
        The exit code: 1 with an error, else 0. It is 0 for processes that do not report.

    Raises:
        UsageError: if the recipe or the options are wrong.
    """
    if request.recipe is None and request.overrides:
        raise UsageError(f"{request.overrides[0]}: name the recipe whose key this is")
    recipe = recipe_file.load(recipe_file.resolve(request.recipe), request.overrides) if request.recipe else None
    if not is_launched():
        return show(_started(request, recipe), request.as_json)
    if doctor_ranks.FOLDER in os.environ:
        doctor_ranks.child(recipe, Path(os.environ[doctor_ranks.FOLDER]))
        return 0
    if request.nproc:
        raise UsageError("--nproc belongs to a single command; a launcher has started this process already")
    report = _joined(request, recipe)
    return 0 if report is None else show(report, request.as_json)


def _joined(request: DoctorRequest, recipe: Recipe | None) -> Report | None:
    """Check as one of the processes of a launcher. Returns None on all processes but the first.

    The first process of each machine checks the machine. If the processes cannot connect, it reports its own findings.
    """
    own = list[Finding]()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        local = processes_per_machine(1)
        own = _machine(request, recipe, local, max(1, int(os.environ["WORLD_SIZE"]) // local))

    def on_hang() -> None:
        shutil.rmtree(name, ignore_errors=True)
        if own:
            hangs = TimeoutError(f"a collective did not end within {doctor_ranks.LIMIT} s")
            show(_not_connected(own, hangs), request.as_json)

    try:
        with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
            ranks, speeds = doctor_ranks.together(recipe, Path(name), own, on_hang)
    except UsageError:
        raise
    except Exception as error:  # an error of gloo, NCCL or CUDA
        if not own:
            raise InputError(f"rank {os.environ['RANK']}: {doctor_ranks.in_a_line(error)}") from None
        return _not_connected(own, error)
    if os.environ["RANK"] != "0":
        return None
    machines: dict[str, list[Finding]] = {one["name"]: [] for one in ranks}
    for one in ranks:
        machines[one["name"]] += one["own"]
    return _report(machines, doctor_ranks.judge(ranks, speeds), len(ranks))


def _started(request: DoctorRequest, recipe: Recipe | None) -> Report:
    """Check as the command that starts the processes of this machine."""
    import torch

    from esmshard.launch.local_processes import run_local

    processes = request.nproc or torch.cuda.device_count() or min(CPU_PROCESSES, cpu_limits.cores())
    own = _machine(request, recipe, processes, 1)
    here = socket.gethostname()
    if processes == 1:
        own += guarded("recipe", lambda: recipe_fit.arithmetic(doctor_ranks.facts(recipe, own_device(0, 1))))
        found = "one process has no collective to measure; --nproc 2 starts two"
        return _report({here: [*own, Finding("processes", "note", found, check="collectives")]})
    arguments = ["-m", "esmshard", "doctor", *([request.recipe] if request.recipe else []), *request.overrides]
    with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
        folder = Path(name)
        try:
            with environment({doctor_ranks.FOLDER: name}):
                code = run_local(arguments, processes, stop_timeout=STOP_TIMEOUT)
        except (InputError, RuntimeError) as error:
            return _not_connected(own, error)
        if code or not (folder / doctor_ranks.SHARED).is_file():
            failed = sorted(folder.glob(f"{doctor_ranks.FAILED}*"))
            said = "; ".join(dict.fromkeys(path.read_text(encoding="utf-8") for path in failed))
            said = said or f"they ended with exit code {code}; see stderr for the cause"
            return _not_connected(own, InputError(said))
        joint = [Finding(**one) for one in read_json(folder / doctor_ranks.SHARED)]
    return _report({here: own}, joint, processes)


def _machine(request: DoctorRequest, recipe: Recipe | None, processes: int, nodes: int) -> list[Finding]:
    """Return the findings that one process can make about its machine."""
    import torch

    cards: list[gpus.Card] = []
    found = guarded("gpus", partial(gpus.check, cards))
    if not (is_launched() or request.nproc or torch.cuda.is_available()):
        # A torch that cannot use the GPUs must be fixed, and the recipe then runs on the GPUs.
        processes = len(cards) or processes
    driver, kinds = cards[0].driver if cards else gpus.driver(), [(card.name, card.capability) for card in cards]
    found += guarded("versions", partial(versions.check, driver, kinds, cpu_limits.cores()))
    ports = links.ports()
    why = list(links.causes(ports, os.environ))
    found += guarded("links", partial(links.infiniband, ports, why, len(cards)))
    found += guarded("machine", partial(host.check, processes))
    needed, out = 0, request.out or Path.cwd()
    if request.recipe and recipe:
        out = request.out or Path(recipe.out)
        found += recipe_fit.check(request.recipe, request.overrides, cards, processes, nodes)
        needed = recipe_fit.written_bytes(recipe)
    return found + guarded("storage", partial(storage.check, out, cache_directory(), needed, os.environ))


def _not_connected(own: Sequence[Finding], error: Exception) -> Report:
    """Return the findings about this machine, whose processes did not connect to others."""
    found = f"the processes did not connect: {doctor_ranks.in_a_line(error)}"
    fix = "fix the errors above first; then check MASTER_ADDR, and firewalls between the machines"
    return _report({socket.gethostname(): [*own, Finding("processes", "error", found, fix, check="collectives")]})


def _report(machines: Mapping[str, Sequence[Finding]], joint: Sequence[Finding] = (), processes: int = 1) -> Report:
    """Combine the findings about each machine, by its name, with the joint findings. The first machine reports."""
    found = [replace(finding, node=name) for name, own in machines.items() for finding in own]
    found = sorted([*found, *joint], key=lambda finding: GROUPS.index(finding.check))
    summary = {level: sum(finding.level == level for finding in found) for level in LEVELS}
    rows = [asdict(finding) for finding in found]
    return {
        "schema": 1,
        "esmshard": __version__,
        "host": next(iter(machines)),
        "hosts": list(machines),
        "processes": processes,
        "summary": summary,
        "exit_code": int(summary["error"] > 0),
        "findings": [{"check": row.pop("check"), "mend": row.pop("fix"), **row} for row in rows],
    }


def show(report: Report, as_json: bool) -> int:
    """Print a report on stdout, and return the exit code."""
    sys.stdout.write(f"{json.dumps(report, indent=1) if as_json else to_text(report)}\n")
    sys.stdout.flush()
    if report["exit_code"]:
        say("doctor: there are errors; each has its fix below it")
    return int(report["exit_code"])


def to_text(report: Report) -> str:
    """Format as text: a line for each finding, by group, with its fix below it, and one line at the end."""
    lines: list[str] = []
    group, several = "", len(report["hosts"]) > 1
    for one in report["findings"]:
        if one["level"] == "ok" and one["node"] not in (report["host"], ""):
            continue  # `ok` findings of other machines are not repeated
        if one["check"] != group:
            group = one["check"]
            lines.append(group)
        where = f"[{one['node']}] " if several and one["node"] else ""
        level = one["level"].upper() if one["level"] in ("warning", "error") else one["level"]
        lines.append(f"  {level:<8} {one['name']:<16} {where}{one['found']}")
        lines += [f"{'':<11}fix: {one['mend']}"] if one["mend"] else []
    counts = [(count, level) for level, count in reversed(report["summary"].items()) if level != "ok"]
    summary = ", ".join(f"{count} {level}{'s' * (count != 1)}" for count, level in counts)
    machines = f"{len(report['hosts'])} machine{'s' * several}"
    processes = f"{report['processes']} process{'es' * (report['processes'] > 1)}"
    return "\n".join([*lines, f"{machines}, {processes}: {summary}"])
