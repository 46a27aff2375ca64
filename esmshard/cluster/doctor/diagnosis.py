"""`esmshard doctor`: the problems of this machine, or of several machines together, each with its fix.

`--json` prints one object. Its keys stay the same while `schema` is 1; keys may be added.

    schema      1
    esmshard    version
    host        name of the machine that reports
    hosts       names of all machines that took part
    processes   number of processes on all machines
    summary     number of findings of each level: ok, note, warning, error
    exit_code   1 with an error, else 0
        findings    list of: check (group), name, level (ok, note, warning, error), found (a sentence), mend (the fix, a
                    sentence; empty if none is needed), node (host; empty for findings on all machines), values (for
                    programs: bytes, seconds, bytes/s)

Groups, in order: versions, gpus, links, machine, storage, recipe, collectives.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
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
from esmshard.launch.process_group import is_launched
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

SCHEMA = 1
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


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a check."""

    findings: list[Finding]
    host: str
    hosts: list[str]
    processes: int

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of findings of each level."""
        found = Counter(finding.level for finding in self.findings)
        return {level: found[level] for level in LEVELS}

    @property
    def exit_code(self) -> int:
        """Return 1 if there is an error, else 0."""
        return int(self.counts["error"] > 0)


def run(request: DoctorRequest) -> int:
    """Check this machine, measure between processes, and report on stdout.

    Under a launcher (torchrun, srun, mpirun) the started processes join, and the first one reports. Otherwise this
    process starts processes itself.

    Returns:
        The exit code: 1 with an error, else 0. It is 0 for processes that do not report.

    Raises:
        UsageError: if the recipe or the options are wrong.
    """
    if request.recipe is None and request.overrides:
        raise UsageError(f"{request.overrides[0]}: name the recipe whose key this is")
    recipe = recipe_file.load(recipe_file.resolve(request.recipe), request.overrides) if request.recipe else None
    if doctor_ranks.FOLDER in os.environ and is_launched():
        doctor_ranks.child(recipe)
        return 0
    if is_launched() and request.nproc:
        raise UsageError("--nproc belongs to a single command; a launcher has started this process already")
    diagnosis = _joined(request, recipe) if is_launched() else _started(request, recipe)
    return 0 if diagnosis is None else show(diagnosis, request.as_json)


def _joined(request: DoctorRequest, recipe: Recipe | None) -> Diagnosis | None:
    """Check as one of the processes of a launcher. Returns None on all processes but the first.

    The first process of each machine checks the machine. If the processes cannot connect, it reports its own findings.
    """
    seen, own = gpus.Seen(), list[Finding]()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own = _machine(request, recipe, seen, local, max(1, int(os.environ["WORLD_SIZE"]) // local))

    def on_hang() -> None:
        shutil.rmtree(name, ignore_errors=True)
        if own:
            hangs = TimeoutError(f"a collective did not end within {doctor_ranks.LIMIT} s")
            show(_alone([*own, _not_connected(hangs)]), request.as_json)

    try:
        with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
            shared = doctor_ranks.together(recipe, Path(name), own, seen.driver, on_hang)
    except UsageError:
        raise
    except Exception as error:  # an error of gloo, NCCL or CUDA
        if not own:
            raise InputError(f"rank {os.environ['RANK']}: {doctor_ranks.in_a_line(error)}") from None
        return _alone([*own, _not_connected(error)])
    return _all(own, shared) if os.environ["RANK"] == "0" else None


def _started(request: DoctorRequest, recipe: Recipe | None) -> Diagnosis:
    """Check as the command that starts the processes of this machine."""
    import torch

    from esmshard.launch.local_processes import run_local

    processes = request.nproc or torch.cuda.device_count() or min(CPU_PROCESSES, cpu_limits.cores())
    seen = gpus.Seen()
    own = _machine(request, recipe, seen, processes, 1)
    if processes == 1:
        own += guarded("recipe", lambda: recipe_fit.arithmetic(doctor_ranks.facts(recipe)))
        found = "one process has no collective to measure; --nproc 2 starts two"
        return _alone([*own, Finding("collectives", "processes", "note", found)])
    arguments = ["-m", "esmshard", "doctor", *([request.recipe] if request.recipe else []), *request.overrides]
    with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
        folder = Path(name)
        try:
            with environment({doctor_ranks.FOLDER: name}):
                code = run_local(arguments, processes, stop_timeout=STOP_TIMEOUT)
        except (InputError, RuntimeError) as error:
            return _alone([*own, _not_connected(error)])
        if code or not (folder / doctor_ranks.SHARED).is_file():
            messages = {
                path.read_text(encoding="utf-8"): None for path in sorted(folder.glob(f"{doctor_ranks.FAILED}*"))
            }
            said = "; ".join(messages) or f"they ended with exit code {code}; see stderr for the cause"
            return _alone([*own, _not_connected(InputError(said))])
        joint = [Finding(**one) for one in read_json(folder / doctor_ranks.SHARED)]
    return _alone(own, joint, processes)


def _not_connected(error: Exception) -> Finding:
    found = f"the processes did not connect: {doctor_ranks.in_a_line(error)}"
    fix = "fix the errors above first; then check MASTER_ADDR, and firewalls between the machines"
    return Finding("collectives", "processes", "error", found, fix)


def _machine(
    request: DoctorRequest, recipe: Recipe | None, seen: gpus.Seen, processes: int, nodes: int
) -> list[Finding]:
    """Return the findings that one process can make about its machine, and fill `seen`."""
    import torch

    found = guarded("gpus", partial(gpus.check, seen))
    if not (is_launched() or request.nproc or torch.cuda.is_available()):
        # A torch that cannot use the GPUs must be fixed, and the recipe then runs on the GPUs.
        processes = len(seen.cards) or processes
    cards = [(card.name, card.capability) for card in seen.cards]
    found += guarded("versions", lambda: versions.check(seen.driver, cards, cpu_limits.cores()))
    ports = links.ports()
    why = links.causes(links.verbs(), ports, os.environ) if ports else []
    found += guarded("links", lambda: links.infiniband(ports, why, len(seen.cards)))
    found += guarded("machine", lambda: host.check(processes))
    needed, out = 0, request.out or Path.cwd()
    if request.recipe and recipe:
        out = request.out or Path(recipe.out)
        fits = partial(recipe_fit.check, request.recipe, request.overrides, seen.cards, processes, nodes)
        found += guarded("recipe", fits)
        needed = recipe_fit.written_bytes(recipe)
    return found + guarded("storage", partial(storage.check, out, cache_directory(), needed, os.environ))


def _all(own: Sequence[Finding], shared: Mapping[str, Any]) -> Diagnosis:
    """Combine the findings of all machines, and add the joint findings."""
    names = {one["node"]: one["name"] for one in shared["ranks"]}
    found = [replace(finding, node=names[shared["node"]]) for finding in own]
    for node, findings in shared["machines"]:
        if node != shared["node"]:
            found += [replace(finding, node=names[node]) for finding in findings]
    found += doctor_ranks.judge(shared)
    return Diagnosis(_sorted(found), names[shared["node"]], list(names.values()), len(shared["ranks"]))


def _alone(own: Sequence[Finding], joint: Sequence[Finding] = (), processes: int = 1) -> Diagnosis:
    """Combine the findings about this machine with the joint findings of its processes, if there are any."""
    name = socket.gethostname()
    found = [*(replace(finding, node=name) for finding in own), *joint]
    return Diagnosis(_sorted(found), name, [name], processes)


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: GROUPS.index(finding.check))


def show(diagnosis: Diagnosis, as_json: bool) -> int:
    """Print a diagnosis on stdout, and return the exit code."""
    text = json.dumps(to_json(diagnosis), indent=1) if as_json else to_text(diagnosis)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    if diagnosis.exit_code:
        say("doctor: there are errors; each has its fix below it")
    return diagnosis.exit_code


def to_text(diagnosis: Diagnosis) -> str:
    """Format as text: a line for each finding, by group, with its fix below it, and one line at the end."""
    lines: list[str] = []
    group = ""
    several = len(diagnosis.hosts) > 1
    for finding in diagnosis.findings:
        if several and finding.node not in (diagnosis.host, "") and finding.level == "ok":
            continue  # `ok` findings of other machines are not repeated
        if finding.check != group:
            group = finding.check
            lines.append(group)
        where = f"[{finding.node}] " if several and finding.node else ""
        level = finding.level.upper() if finding.level in ("warning", "error") else finding.level
        lines.append(f"  {level:<8} {finding.name:<16} {where}{finding.found}")
        lines += [f"{'':<11}fix: {finding.fix}"] if finding.fix else []
    counts = [(count, level) for level, count in reversed(diagnosis.counts.items()) if level != "ok"]
    summary = ", ".join(f"{count} {level}{'s' * (count != 1)}" for count, level in counts)
    machines = f"{len(diagnosis.hosts)} machine{'s' * (len(diagnosis.hosts) > 1)}"
    processes = f"{diagnosis.processes} process{'es' * (diagnosis.processes > 1)}"
    return "\n".join([*lines, f"{machines}, {processes}: {summary}"])


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Convert to JSON values; the top of this file lists the keys."""
    findings = [asdict(finding) for finding in diagnosis.findings]
    return {
        "schema": SCHEMA,
        "esmshard": __version__,
        "host": diagnosis.host,
        "hosts": diagnosis.hosts,
        "processes": diagnosis.processes,
        "summary": diagnosis.counts,
        "exit_code": diagnosis.exit_code,
        "findings": [{"mend" if key == "fix" else key: value for key, value in one.items()} for one in findings],
    }
