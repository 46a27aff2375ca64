"""`esmshard doctor`: what is wrong with this machine, or with several of them together, each with the mend.

`--json` prints one object. Its keys stay as they are while `schema` is 1; more may come.

    schema      1
    esmshard    version
    host        name of the machine that reports
    hosts       names of all machines that took part
    processes   in all
    summary     findings of each level: ok, note, warning, error
    exit_code   1 with an error, else 0
    findings    list of: check (group), name, level (ok, note, warning, error), found and mend (for people; mend is
                empty where there is nothing to do), node (host; empty for what is about all), values (for programs:
                bytes, seconds, bytes/s)

Groups, in order: versions, gpus, links, machine, storage, recipe, collectives.
"""

import json
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esmshard import __version__
from esmshard import recipe as recipes
from esmshard.cluster import fit, gpus, host, links, ranks, storage, versions
from esmshard.cluster.findings import LEVELS, Finding, guarded
from esmshard.errors import InputError, UsageError
from esmshard.files import cache_directory, read_json
from esmshard.parallel import allowed
from esmshard.parallel.worker import environment
from esmshard.progress import say
from esmshard.settings import Recipe

if TYPE_CHECKING:
    from esmshard.parallel.nodes import Nodes

SCHEMA = 1
GROUPS = ("versions", "gpus", "links", "machine", "storage", "recipe", "collectives")
CPU_PROCESSES = 2
"""Without GPUs as many are started, for the collectives."""


@dataclass(frozen=True)
class Request:
    """What is to be looked at."""

    recipe: str | None = None
    """A file, or the name of a shipped one."""
    overrides: tuple[str, ...] = ()
    nproc: int | None = None
    """Processes of this machine; all GPUs, or two, by default."""
    nodes: "Nodes | None" = None
    """Machines that are looked at together, each by the same command; None for this one."""
    out: Path | None = None
    """Directory whose disk is looked at, if not the recipe's or the working directory."""


@dataclass(frozen=True)
class Report:
    """What `doctor` found."""

    findings: list[Finding]
    host: str
    hosts: list[str]
    processes: int

    @property
    def counts(self) -> dict[str, int]:
        """Findings of each level."""
        found = Counter(finding.level for finding in self.findings)
        return {level: found[level] for level in LEVELS}

    @property
    def exit_code(self) -> int:
        """1 with an error, else 0."""
        return int(self.counts["error"] > 0)


def doctor(request: Request) -> Report | None:
    """Look at this machine, measure between processes, and say what is wrong.

    Processes are started here; under torchrun, srun or another launcher those that it started join in.

    Returns:
        The report; None on all but the first rank of a launcher, and in the processes that are started here.

    Raises:
        UsageError: for a wrong recipe or wrong options.
    """
    if request.recipe is None and request.overrides:
        raise UsageError(f"{request.overrides[0]}: name the recipe whose key that is")
    recipe = recipes.load(recipes.resolve(request.recipe), request.overrides) if request.recipe else None
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if ranks.FOLDER in os.environ and launched:
        ranks.child(recipe)
        return None
    if launched and (request.nproc or request.nodes):
        raise UsageError("--nproc and --nnodes belong to a single command; a launcher has started this process already")
    if launched:
        return _joined(request, recipe)
    return _started(request, recipe)


def _joined(request: Request, recipe: Recipe | None) -> Report | None:
    """As one of the processes of a launcher."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    seen = _seen()
    own: list[Finding] = []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        own = _machine(request, recipe, seen, local, max(1, int(os.environ["WORLD_SIZE"]) // local))
    try:
        with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as folder:
            notes = [asdict(finding) for finding in own]
            shared = ranks.together(recipe, notes, seen.driver, Path(folder))
    except UsageError:
        raise
    except Exception as error:  # of gloo, NCCL, CUDA
        if not own:
            raise InputError(f"rank {os.environ['RANK']}: {ranks.in_a_line(error)}") from None
        return _alone([*own, _not_joined(error)])
    return None if os.environ["RANK"] != "0" else _all(own, shared)


def _started(request: Request, recipe: Recipe | None) -> Report:
    """As the command that starts the processes of this machine."""
    import torch

    from esmshard.parallel.launch import run_local

    seen = _seen()
    nodes = request.nodes.most if request.nodes else 1
    idle = min(CPU_PROCESSES, max(1, allowed.cores()))
    processes = request.nproc or torch.cuda.device_count() or idle
    # A torch that cannot use the GPUs is to be mended, and the recipe then runs on them.
    planned = processes if request.nproc or torch.cuda.is_available() else len(seen.cards) or processes
    own = _machine(request, recipe, seen, planned, nodes)
    if processes * nodes == 1:
        found = guarded("recipe", "precision", lambda: fit.arithmetic(ranks.facts(recipe, seen.driver)))
        told = "one process: no collective to measure; --nproc 2 starts two"
        return _alone([*own, *found, Finding("collectives", "processes", "note", told)])
    with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
        folder = Path(name)
        notes = {"driver": seen.driver, "findings": [asdict(finding) for finding in own]}
        (folder / ranks.OWN).write_text(json.dumps(notes), encoding="utf-8")
        arguments = ["-m", "esmshard", "doctor", *([request.recipe] if request.recipe else []), *request.overrides]
        try:
            with environment({ranks.FOLDER: str(folder)}):
                code = run_local(arguments, processes, nodes=request.nodes, stop_timeout=10)
        except (InputError, RuntimeError) as error:
            return _alone([*own, _not_joined(error)])
        answer = folder / ranks.SHARED
        if code or not answer.is_file():
            words = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"{ranks.FAILED}*"))]
            said = "; ".join(dict.fromkeys(words)) or f"they ended with exit code {code}, and have said why on stderr"
            return _alone([*own, _not_joined(InputError(said))])
        shared = read_json(answer)
    return _all(own, shared)


def _seen() -> gpus.Seen:
    known: list[gpus.Seen] = []

    def look() -> list[Finding]:
        known.append(gpus.look())
        return known[0].findings

    findings = guarded("gpus", "nvidia-smi", look)
    return known[0] if known else gpus.Seen(None, [], findings)


def _not_joined(error: Exception) -> Finding:
    return Finding(
        "collectives",
        "processes",
        "error",
        f"the processes did not come together: {ranks.in_a_line(error)}",
        "mend what stands above first; then look at firewalls between the machines, at --rdzv-endpoint, and at the "
        "clocks (machines whose clocks are 15 s apart never meet)",
    )


def _machine(request: Request, recipe: Recipe | None, seen: gpus.Seen, processes: int, nodes: int) -> list[Finding]:
    """All that one process can find out about its machine."""
    cards = [(card.name, card.capability) for card in seen.cards]
    found = guarded("versions", "versions", lambda: versions.look(seen.driver, cards, allowed.cores()))
    found += seen.findings
    ports = links.ports()
    why = links.causes(links.verbs(), ports, os.environ) if ports else []
    found += guarded("links", "infiniband", lambda: links.infiniband(ports, why, len(seen.cards)))
    needs_lock = any(port.active for port in ports)
    found += guarded("machine", "machine", lambda: host.look(processes, nodes, needs_lock))
    needed, out = 0, request.out
    if request.recipe and recipe:
        check = partial(fit.check, request.recipe, request.overrides, seen.cards, processes, nodes)
        known: list[fit.Fit] = []

        def fits() -> list[Finding]:
            known.append(check())
            return known[0].findings

        found += guarded("recipe", "recipe", fits)
        needed = known[0].needed if known else 0
        out = out or Path(recipe.out)
    found += guarded(
        "storage", "storage", lambda: storage.look(out or Path.cwd(), cache_directory(), needed, os.environ)
    )
    return found


def _all(own: Sequence[Finding], shared: Mapping[str, Any]) -> Report:
    """Of all machines: their own findings, and those about all of them."""
    names = ranks.machines(shared)
    found = [replace(finding, node=names[shared["node"]]) for finding in own]
    for machine in shared["machines"]:
        if machine["node"] != shared["node"]:
            found += [Finding(**{**one, "node": names[machine["node"]]}) for one in machine["findings"]]
    found += ranks.judge(shared)
    return _report(found, names[shared["node"]], list(names.values()), len(shared["ranks"]))


def _alone(findings: Sequence[Finding]) -> Report:
    name = socket.gethostname()
    return _report([replace(finding, node=name) for finding in findings], name, [name], 1)


def _report(findings: Sequence[Finding], name: str, hosts: list[str], processes: int) -> Report:
    return Report(sorted(findings, key=lambda finding: GROUPS.index(finding.check)), name, hosts, processes)


def as_text(report: Report) -> str:
    """A line for each finding, by group; the mends below them; one line at the end."""
    lines: list[str] = []
    group = ""
    several = len(report.hosts) > 1
    for finding in report.findings:
        if several and finding.node != report.host and finding.node and finding.level == "ok":
            continue  # of other machines what is well is not repeated
        if finding.check != group:
            group = finding.check
            lines.append(group)
        where = f"[{finding.node}] " if several and finding.node else ""
        level = finding.level.upper() if finding.level in ("warning", "error") else finding.level
        lines.append(f"  {level:<8} {finding.name:<16} {where}{finding.found}")
        if finding.mend:
            lines.append(f"{'':<11}mend: {finding.mend}")
    counts = report.counts
    told = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("error", "warning", "note"))
    machines = f"{len(report.hosts)} machine{'s' * (len(report.hosts) > 1)}"
    processes = f"{report.processes} process{'es' * (report.processes > 1)}"
    return "\n".join([*lines, f"{machines}, {processes}: {told}"])


def as_json(report: Report) -> dict[str, Any]:
    """The same for programs; see the top of this file."""
    return {
        "schema": SCHEMA,
        "esmshard": __version__,
        "host": report.host,
        "hosts": report.hosts,
        "processes": report.processes,
        "summary": report.counts,
        "exit_code": report.exit_code,
        "findings": [asdict(finding) for finding in report.findings],
    }


def run(request: Request, as_json_too: bool) -> int:
    """Report on stdout; the exit code."""
    report = doctor(request)
    if report is None:
        return 0
    print(json.dumps(as_json(report), indent=1) if as_json_too else as_text(report))  # noqa: T201
    if report.exit_code:
        say("doctor: there are errors; each has its mend below it")
    return report.exit_code
