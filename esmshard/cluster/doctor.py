"""`esmshard doctor`: what is wrong with this machine, or with the machines of a job together, each with its fix."""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from esmshard import __version__
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import cache_directory, is_hub_name, memory_text, size_text
from esmshard.io.tables import counted
from esmshard.parallel import cpu_limits
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

Level = Literal["ok", "note", "warning", "error"]
ANSWER = 30.0
"""The seconds in which nvidia-smi must answer. It hangs where a GPU does."""
START = 120
"""The seconds for which processes wait for each other."""
FIELDS = "name,driver_version,memory.total,memory.free"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """The group: versions, gpus, machine, disks, recipe or collectives."""
    level: Level
    found: str
    """A sentence."""
    fix: str = ""
    """The fix, in one sentence; never empty for a warning or an error."""
    node: str = ""
    """The machine; empty for all of them together."""


@dataclass(frozen=True)
class Card:
    """One GPU as the driver reports it; memory in bytes."""

    name: str
    driver: str
    total: int
    free: int


def run(
    recipe: str | None,
    overrides: Sequence[str],
    nproc: int | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Check this machine, connect the processes, and report on stdout.

    Under a launcher (torchrun, srun) each process joins, the first one of a machine checks the machine, and the first
    of all reports. Otherwise this command starts `nproc` processes: by default one for each GPU, or two.

    Returns:
        The exit code: 1 if the report has an error, else 0; 0 for processes that do not report.

    Raises:
        UsageError: the recipe or the options are wrong.
    """
    import torch

    from esmshard.parallel.launch import run_local
    from esmshard.parallel.process_group import is_launched, processes_per_machine

    if recipe is None and overrides:
        raise UsageError(f"{overrides[0]}: name the recipe whose key this is")
    resolved = recipe_file.load(recipe_file.resolve(recipe), overrides) if recipe else None
    processes = nproc or torch.cuda.device_count() or min(2, cpu_limits.cores())
    if is_launched():
        processes = processes_per_machine(1)
    elif processes > 1:
        arguments = ["doctor", *([recipe] if recipe else []), *overrides, *(["--json"] if as_json else [])]
        return run_local(["-m", "esmshard", *arguments, *(["--out", str(out)] if out else [])], processes)
    own: list[Finding] = []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        own = [replace(finding, node=socket.gethostname()) for finding in _machine(resolved, processes, out)]
    findings = _together(own)
    return 0 if findings is None else _show(findings, as_json)


def _machine(recipe: Recipe | None, processes: int, out: Path | None) -> Iterator[Finding]:
    """Yield the findings that one process can make about its machine."""
    try:
        cards = gpus()
    except (OSError, subprocess.SubprocessError) as error:
        cards = []
        fix = "drain the node and reboot it; `dmesg | grep -i -e xid -e nvrm` shows what happened"
        yield Finding("gpus", "error", f"nvidia-smi failed: {str(error).strip()}", fix)
    yield from _packages()
    yield from _cuda(cards)
    for n, card in enumerate(cards):
        busy = card.total - card.free > 0.1 * card.total
        fix = "wait for its programs or end them (nvidia-smi), or choose GPUs with CUDA_VISIBLE_DEVICES" if busy else ""
        found = f"GPU {n}: {card.name}, {memory_text(card.free)} of {memory_text(card.total)} free"
        yield Finding("gpus", "warning" if busy else "ok", found, fix)
    cores, shared = cpu_limits.cores(), Path("/dev/shm")  # noqa: S108
    few = cores < processes
    fix = "give the job more (--cpus-per-task, --cpus), or start fewer processes" if few else ""
    yield Finding("machine", "warning" if few else "ok", f"{cores} cores for {processes} processes", fix)
    if shared.is_dir() and (size := shutil.disk_usage(shared)).free < 1 << 30:
        found = (
            f"{shared} has {memory_text(size.free)} free of {memory_text(size.total)}; processes exchange tensors there"
        )
        yield Finding("machine", "warning", found, "docker run --shm-size=16g, or remove what ended jobs left there")
    yield from _disks(out or (Path(recipe.out) if recipe else Path.cwd()), _written_bytes(recipe) if recipe else 0)
    if recipe is not None:
        yield from _recipe(recipe, cards, processes)


def _packages() -> Iterator[Finding]:
    """Compare the installed versions with esmshard's requirements."""
    import torch

    installed = {str(canonicalize_name(one.name)): one.version for one in metadata.distributions() if one.name}
    found = (
        f"esmshard {__version__}, Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    )
    yield Finding("versions", "ok", found)
    for wanted in map(Requirement, metadata.requires("esmshard") or [] if "esmshard" in installed else []):
        name, is_extra = str(canonicalize_name(wanted.name)), "extra" in str(wanted.marker or "")
        version = installed.get(name)
        if not is_extra and (version is None or not wanted.specifier.contains(version, prereleases=True)):
            found = f"{name} {version} does not fit {wanted.specifier}" if version else f"{name} is missing"
            yield Finding("versions", "error", found, f"pip install '{name}{wanted.specifier}'")
    if "esm" in installed and "fair-esm" in installed:
        spec = find_spec("esm")
        found = f"fair-esm and esm are both installed, and both own the package `esm` ({spec and spec.origin})"
        fix = "keep one: pip uninstall --yes esm fair-esm && pip install fair-esm==2.0.0"
        yield Finding("versions", "warning", found, fix)


def _cuda(cards: Sequence[Card]) -> Iterator[Finding]:
    """Check whether driver, build of torch, NCCL and GPUs work together."""
    import torch

    if not cards:
        found = f"no NVIDIA GPU; torch is built for {torch.version.cuda or 'the CPU'}"
        yield Finding("gpus", "note" if torch.version.cuda else "ok", found)
        return
    there = f"{len(cards)} x {cards[0].name}, driver {cards[0].driver}"
    build = "install a torch for this driver and these GPUs, as https://pytorch.org/get-started/locally shows"
    if torch.version.cuda is None:
        yield Finding("versions", "error", f"{there}, but torch is built without CUDA", build)
        return
    try:
        torch.ones(1, device="cuda").sum().item()  # a driver or a build that is too old fails here, and says so
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding("versions", "ok", f"{there}, CUDA {torch.version.cuda}, NCCL {nccl}")
    except (RuntimeError, AssertionError) as error:
        fix = f"unset CUDA_VISIBLE_DEVICES if it is empty; update the driver, or {build}"
        yield Finding("versions", "error", f"{there}, but torch cannot use CUDA: {str(error).splitlines()[0]}", fix)


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi. `OSError` or `subprocess.SubprocessError` if it cannot be run, or fails."""
    command = ["nvidia-smi", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER, check=False)  # noqa: S603
    if answer.returncode:
        raise subprocess.SubprocessError(f"exit code {answer.returncode}: {(answer.stdout or answer.stderr).strip()}")
    return answer.stdout


def gpus() -> list[Card]:
    """Return the GPUs that the driver reports; none where there is no nvidia-smi. Errors as `nvidia_smi`."""
    if shutil.which("nvidia-smi") is None:
        return []
    cards = []
    for line in nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits").splitlines():
        name, driver, *memory = [cell.strip() for cell in line.split(", ")]
        total, free = [int(cell) << 20 if cell.isdecimal() else 0 for cell in memory]
        cards.append(Card(name, driver, total, free))
    return cards


def _disks(out: Path, needed: int) -> Iterator[Finding]:
    """Check that the directories of results, caches and temporary files can be written and have room."""
    fixes = {"out": "choose another directory with out=DIR", "cache": "set ESMSHARD_CACHE", "TMPDIR": "set TMPDIR"}
    places = (("out", out, needed), ("cache", cache_directory(), 0), ("TMPDIR", Path(tempfile.gettempdir()), 0))
    for role, path, wanted in places:
        absolute = path.expanduser().absolute()
        here = next(one for one in (absolute, *absolute.parents) if one.is_dir())
        try:
            with tempfile.TemporaryDirectory(prefix=".esmshard-doctor-", dir=here):
                pass
        except OSError as error:
            yield Finding("disks", "error", f"{role}: {here} cannot be written ({error})", fixes[role])
            continue
        free = shutil.disk_usage(here).free
        found = f"{role}: {here} has {size_text(free)} free" + (
            f", and the run writes {size_text(wanted)}" if wanted else ""
        )
        level: Level = "error" if free < wanted else "warning" if free < max(1 << 30, 1.5 * wanted) else "ok"
        yield Finding("disks", level, found, "" if level == "ok" else f"remove old files, or {fixes[role]}")


def _written_bytes(recipe: Recipe) -> int:
    """Return the bytes of checkpoints and model: fp32 weights, and two moments for each weight that learns."""
    from esmshard.planner import config_of, model_numbers

    try:
        numbers = model_numbers(recipe, config_of(recipe.model.name))
    except (InputError, OSError):  # `_recipe` reports it
        return 0
    each = 4 * numbers.parameters + 8 * numbers.trained
    return each * (recipe.checkpoint.keep + 1 + recipe.checkpoint.keep_best) + 4 * numbers.parameters


def _recipe(recipe: Recipe, cards: Sequence[Card], processes: int) -> Iterator[Finding]:
    """Check whether data and weights are there, and whether the run fits. Nothing is downloaded."""
    from huggingface_hub import constants

    from esmshard.data.splits.variant_records import FOLDS
    from esmshard.model import hub, weights
    from esmshard.model.families.family_registry import RELEASED, n_parameters
    from esmshard.parallel.process_group import own_device, processes_per_machine
    from esmshard.planner import GPUS, Machines, data_sheet, plan
    from esmshard.train.inputs import prepare

    name = recipe.model.name
    if recipe.divides_table and recipe.data.split not in ("mutations", "given"):  # the first fold of several
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"folds": FOLDS, "fold": 0})})
    of_hub = recipe.init != "random" and (name in RELEASED or is_hub_name(name)) and not weights.place(name).exists()
    if of_hub and hub.find(name) is None:
        fix = f"esmshard download {name}, where there is internet"
        if constants.HF_HUB_OFFLINE:
            yield Finding("recipe", "error", f"{name} is in no cache, and HF_HUB_OFFLINE is set", fix)
        else:
            yield Finding("recipe", "note", f"{name} is in no cache: the run downloads it", fix)
        return
    nodes = max(1, int(os.environ.get("WORLD_SIZE", processes)) // max(1, processes_per_machine(processes)))
    try:
        job = prepare(recipe, processes * nodes, processes, own_device(0, 1))
        found = f"{recipe.task.name}, {n_parameters(job.weights.config):,} parameters, {job.steps} steps"
        yield Finding("recipe", "ok", f"data and weights are there: {found}")
        if not cards:
            return
        first = min(cards, key=lambda card: card.total)
        sheet = data_sheet(first.name, first.total) or replace(GPUS["A100-40GB"], name=first.name)
        machines = Machines(replace(sheet, memory_bytes=first.total), len(cards), nodes)
        planned, wanted = plan(recipe, machines), recipe.parallel
        keys = attrgetter("strategy", "activation_checkpointing", "cpu_offload", "tensor")
        fits = [option for option in planned.options if option.fits and keys(option.layout) == keys(wanted)]
        if fits:
            found = f"fits on {machines}: {wanted.strategy}, {fits[0].tokens:,} tokens a rank at once"
            yield Finding("recipe", "ok", found)
        else:
            fix = f"pass {' '.join(planned.keys)}" if planned.best else planned.reason
            yield Finding("recipe", "error", f"{wanted.strategy} does not fit on {machines}", fix)
    except (InputError, OSError) as error:
        found, _, fix = str(error).partition("; ")
        yield Finding("recipe", "error", found, fix or "correct what this names, in the recipe or its files")


def _together(own: Sequence[Finding]) -> list[Finding] | None:
    """Connect all processes, compare their versions, and time an all-reduce. Return all findings on the first rank.

    A process that cannot connect reports what it found about its own machine.
    """
    import torch
    import torch.distributed as dist  # noqa: TID251  # a measurement of its own, outside of a run

    from esmshard.parallel.process_group import world

    with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
        # NCCL has no other interface that names the network it uses; it reads these variables when it starts.
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{name}/nccl"}
        try:
            with world(START, alone_too=True) as ranks:
                if ranks.size == 1:
                    return list(own)
                here = {"esmshard": __version__, "torch": torch.__version__, "Python": platform.python_version()}
                here["GPU"] = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "none"
                numbers = torch.zeros((64 if ranks.device.type == "cuda" else 4) << 20, device=ranks.device)
                times = []
                for _ in range(6):
                    ranks.rows([0.0])  # all begin together
                    began = time.perf_counter()
                    dist.all_reduce(numbers)
                    ranks.rows([float(numbers[0])])  # waits for the device
                    times.append(time.perf_counter() - began)
                log = Path(name, "nccl").read_text(errors="replace") if Path(name, "nccl").is_file() else ""
                known = ranks.gather((list(own), here, socket.gethostname(), sorted(set(_NETWORK.findall(log)))))
        except Exception as error:  # of gloo, NCCL or CUDA
            found = f"the processes did not work together: {' '.join(str(error).split())[:300]}"
            fix = "mend the errors above first; then check MASTER_ADDR, the network, and firewalls between the machines"
            return [*own, Finding("collectives", "error", found, fix)] if own else None
    if not ranks.is_first:
        return None
    findings = [finding for findings, *_ in known for finding in findings]
    for what in here:
        values = {host: versions[what] for _, versions, host, _ in known}
        if len(set(values.values())) > 1:
            level: Level = "warning" if what == "GPU" else "error"
            found = f"{what} differs: {', '.join(f'{value} on {host}' for host, value in values.items())}"
            findings.append(Finding("collectives", level, found, "start all processes in one image or environment"))
    bus = 2 * numbers.nbytes / min(times[1:]) * (ranks.size - 1) / ranks.size  # as in NVIDIA's nccl-tests
    networks = sorted({network for *_, used in known for network in used})
    found = f"{ranks.size} processes: all-reduce of {size_text(numbers.nbytes)} at {bus / 1e9:.2f} GB/s bus bandwidth"
    findings.append(Finding("collectives", "ok", found + (f", network {', '.join(networks)}" if networks else "")))
    active = any("ACTIVE" in path.read_text() for path in Path("/sys/class/infiniband").glob("*/ports/*/state"))
    if active and "Socket" in networks:
        found = "NCCL uses TCP sockets, though InfiniBand or RoCE ports are active"
        fix = (
            "give the container /dev/infiniband, libibverbs and ulimit -l unlimited, and unset NCCL_IB_DISABLE and "
            "NCCL_NET; NCCL_DEBUG=INFO shows the reason"
        )
        findings.append(Finding("collectives", "error", found, fix))
    return findings


_NETWORK = re.compile(r"NCCL INFO Using network (.*\S)")


def _show(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the report on stdout, and return the exit code."""
    hosts = list(dict.fromkeys(finding.node for finding in findings if finding.node))
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    code = int(counts["error"] > 0)
    lines: list[str] = []
    for finding in findings:
        where = f"[{finding.node}] " if len(hosts) > 1 and finding.node else ""
        lines.append(f"{finding.level:<8} {finding.check:<12} {where}{finding.found}")
        lines += [f"{'':<9}fix: {finding.fix}"] if finding.fix else []
    lines.append(", ".join(counted(count, level) for level, count in counts.items()))
    if as_json:
        lines = [json.dumps({"hosts": hosts, "exit_code": code, "findings": list(map(asdict, findings))}, indent=1)]
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()
    return code
