"""The command `esmshard doctor`, which reports problems of a machine, or of all machines of a job, and their fixes."""

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
from typing import Literal, NamedTuple

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
"""How many seconds to wait for the program nvidia-smi, which hangs if a GPU hangs."""
START = 120
"""How many seconds the processes of `doctor` wait for a process that is late or missing."""
_NETWORK = re.compile(r"NCCL INFO Using network (.*\S)")


@dataclass(frozen=True)
class Finding:
    """The result of a check. A warning or an error always has a `fix`."""

    check: str  # the name of the check: versions, gpus, machine, disks, recipe or collectives
    level: Level
    found: str  # the result as a sentence
    fix: str = ""
    node: str = ""  # the host name of the machine; empty for all machines together


class Card(NamedTuple):
    """One GPU as its driver reports it, with the total and the free memory in bytes."""

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
    """Check this machine, connect the processes, and print the report on stdout.

    Under a launcher (torchrun, srun), the first process of each machine checks the machine, and rank 0 prints the
    report. Without a launcher, this function starts `nproc` processes: by default one for each GPU, or two without a
    GPU (one on a single core).

    Returns:
        The exit code: 1 if this process prints a report with an error, otherwise 0.

    Raises:
        UsageError: if the recipe or an option is wrong.
    """
    import torch

    from esmshard.parallel.launch import run_local
    from esmshard.parallel.process_group import is_launched, processes_per_machine

    if recipe is None and overrides:
        raise UsageError(f"{overrides[0]}: there is no recipe; name the recipe before its overrides")
    resolved = recipe_file.load(recipe_file.resolve(recipe), overrides) if recipe else None
    processes = nproc or torch.cuda.device_count() or min(2, cpu_limits.cores())
    if is_launched():
        processes = processes_per_machine(1)
    elif processes > 1:
        arguments = ["doctor", *([recipe] if recipe else []), *overrides, *(["--json"] if as_json else [])]
        return run_local(["-m", "esmshard", *arguments, *(["--out", str(out)] if out else [])], processes)
    of_machine: list[Finding] = []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        of_machine = [replace(finding, node=socket.gethostname()) for finding in _machine(resolved, processes, out)]
    findings = _together(of_machine)
    return 0 if findings is None else _show(findings, as_json)


def _machine(recipe: Recipe | None, processes: int, out: Path | None) -> Iterator[Finding]:
    """Yield the results of all checks that need only one process."""
    cards: list[Card] = []
    try:
        cards = gpus()
    except (OSError, subprocess.SubprocessError) as error:
        fix = "drain the node and reboot it; `dmesg | grep -i -e xid -e nvrm` shows what happened"
        yield Finding("gpus", "error", f"nvidia-smi failed: {str(error).strip()}", fix)
    yield from _packages()
    yield from _cuda(cards)
    for n, card in enumerate(cards):
        busy = card.total - card.free > 0.1 * card.total
        fix = "end the programs that nvidia-smi lists, or choose GPUs with CUDA_VISIBLE_DEVICES" if busy else ""
        text = f"GPU {n}: {card.name}, {memory_text(card.free)} of {memory_text(card.total)} free"
        yield Finding("gpus", "warning" if busy else "ok", text, fix)
    cores, shared = cpu_limits.cores(), Path("/dev/shm")  # noqa: S108
    fix = "give the job more (--cpus-per-task, --cpus), or start fewer processes" if cores < processes else ""
    yield Finding("machine", "warning" if fix else "ok", f"{cores} cores for {processes} processes", fix)
    if shared.is_dir() and (size := shutil.disk_usage(shared)).free < 1 << 30:
        text = f"{shared}, for the exchange of tensors, has {memory_text(size.free)} of {memory_text(size.total)} free"
        yield Finding("machine", "warning", text, "docker run --shm-size=16g, or remove the files of ended jobs")
    yield from _disks(out or (Path(recipe.out) if recipe else Path.cwd()))
    if recipe is not None:
        yield from _recipe(recipe, cards, processes)


def _packages() -> Iterator[Finding]:
    """Compare the versions of the installed packages with esmshard's requirements."""
    import torch

    installed = {str(canonicalize_name(each.name)): each.version for each in metadata.distributions() if each.name}
    versions = f"esmshard {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    yield Finding("versions", "ok", f"{versions}, {platform.platform()}")
    for wanted in map(Requirement, metadata.requires("esmshard") or [] if "esmshard" in installed else []):
        name = str(canonicalize_name(wanted.name))
        version = installed.get(name)
        is_extra = "extra" in str(wanted.marker or "")
        if not is_extra and (version is None or not wanted.specifier.contains(version, prereleases=True)):
            text = f"{name} {version} does not fit {wanted.specifier}" if version else f"{name} is missing"
            yield Finding("versions", "error", text, f"pip install '{name}{wanted.specifier}'")
    if "esm" in installed and "fair-esm" in installed:
        spec = find_spec("esm")
        text = f"fair-esm and esm are both installed, and both contain the package `esm` ({spec and spec.origin})"
        fix = "keep one: pip uninstall --yes esm fair-esm && pip install fair-esm==2.0.0"
        yield Finding("versions", "warning", text, fix)


def _cuda(cards: Sequence[Card]) -> Iterator[Finding]:
    """Check whether the driver, this build of torch, NCCL and the GPUs work together."""
    import torch

    if not cards:
        text = f"no NVIDIA GPU; torch is built for {torch.version.cuda or 'the CPU'}"
        yield Finding("gpus", "note" if torch.version.cuda else "ok", text)
        return
    driver = f"{len(cards)} x {cards[0].name}, driver {cards[0].driver}"
    build = "install a torch for this driver and these GPUs, as https://pytorch.org/get-started/locally shows"
    if torch.version.cuda is None:
        yield Finding("versions", "error", f"{driver}, but torch is built without CUDA", build)
        return
    try:
        torch.ones(1, device="cuda").sum().item()  # raises an error if the driver or the build is too old
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding("versions", "ok", f"{driver}, CUDA {torch.version.cuda}, NCCL {nccl}")
    except (RuntimeError, AssertionError) as error:
        fix = f"unset CUDA_VISIBLE_DEVICES if it is empty; update the driver, or {build}"
        yield Finding("versions", "error", f"{driver}, but torch cannot use CUDA: {str(error).splitlines()[0]}", fix)


def nvidia_smi(*arguments: str) -> str:
    """Return the output of the program nvidia-smi. Raises `OSError` or `subprocess.SubprocessError` if it fails."""
    command = ["nvidia-smi", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER, check=False)  # noqa: S603
    if answer.returncode:
        raise subprocess.SubprocessError(f"exit code {answer.returncode}: {(answer.stdout or answer.stderr).strip()}")
    return answer.stdout


def gpus() -> list[Card]:
    """Return the GPUs that the driver reports; none without nvidia-smi. Raises the errors of `nvidia_smi`."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "name,driver_version,memory.total,memory.free"
    cards = []
    for line in nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines():
        name, driver, *memory = [cell.strip() for cell in line.split(", ")]
        cards.append(Card(name, driver, *(int(cell) << 20 if cell.isdecimal() else 0 for cell in memory)))
    return cards


def _disks(out: Path) -> Iterator[Finding]:
    """Check that the directories for results, caches and temporary files are writable and have 1 GiB free."""
    for role, path, fix in (
        ("out", out, "choose another directory with out=DIR"),
        ("cache", cache_directory(), "set ESMSHARD_CACHE"),
        ("TMPDIR", Path(tempfile.gettempdir()), "set TMPDIR"),
    ):
        absolute = path.expanduser().absolute()
        folder = next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
        try:
            with tempfile.TemporaryDirectory(prefix=".esmshard-doctor-", dir=folder):
                pass
        except OSError as error:
            yield Finding("disks", "error", f"{role}: {folder} cannot be written ({error})", fix)
            continue
        free = shutil.disk_usage(folder).free
        full = free < 1 << 30
        text = f"{role}: {folder} has {size_text(free)} free"
        yield Finding("disks", "warning" if full else "ok", text, f"remove old files, or {fix}" * full)


def _recipe(recipe: Recipe, cards: Sequence[Card], processes: int) -> Iterator[Finding]:
    """Check, without downloads, that the data and weights of a recipe exist, and that the run fits into memory."""
    from huggingface_hub import constants

    from esmshard.data.splits.variant_records import FOLDS
    from esmshard.model import hub, weights
    from esmshard.model.families.family_registry import RELEASED, n_parameters
    from esmshard.parallel.process_group import own_device, processes_per_machine
    from esmshard.planner import GPUS, Machines, data_sheet, plan
    from esmshard.train.inputs import prepare

    name = recipe.model.name
    if recipe.divides_table and recipe.data.split not in ("mutations", "given"):  # check only the first fold
        folds = recipe.data.folds or FOLDS
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"folds": folds, "fold": 0})})
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
        size = f"{n_parameters(job.weights.config):,} parameters, {job.steps} steps"
        yield Finding("recipe", "ok", f"data and weights exist: {recipe.task.name}, {size}")
        if not cards:
            return
        card = min(cards, key=lambda card: card.total)
        sheet = data_sheet(card.name, card.total) or replace(GPUS["A100-40GB"], name=card.name)
        machines = Machines(replace(sheet, memory_bytes=card.total), len(cards), nodes)
        planned, wanted = plan(recipe, machines), recipe.parallel
        keys = attrgetter("strategy", "activation_checkpointing", "cpu_offload", "tensor")
        fits = [option for option in planned.options if option.fits and keys(option.layout) == keys(wanted)]
        if fits:
            text = f"fits on {machines}: {wanted.strategy}, {fits[0].tokens:,} tokens a rank at once"
            yield Finding("recipe", "ok", text)
        else:
            fix = f"pass {' '.join(planned.keys)}" if planned.best else planned.reason
            yield Finding("recipe", "error", f"{wanted.strategy} does not fit on {machines}", fix)
    except (InputError, OSError) as error:
        text, _, fix = str(error).partition("; ")
        yield Finding("recipe", "error", text, fix or "correct the recipe or its files")


def _together(of_machine: Sequence[Finding]) -> list[Finding] | None:
    """Connect all processes, compare their software versions, and measure the speed of an all-reduce.

    Return the findings about all machines on rank 0, and None on other ranks. If the processes cannot connect, a
    process that checked its machine returns the findings about this machine and the error.
    """
    import torch
    import torch.distributed as dist  # noqa: TID251  # a measurement, not a run

    from esmshard.parallel.process_group import world

    with tempfile.TemporaryDirectory(prefix="esmshard_doctor_") as name:
        # Only the log of NCCL says which network it uses. NCCL reads these variables when it starts.
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{name}/nccl"}
        try:
            with world(START, alone_too=True) as ranks:
                if ranks.size == 1:
                    return list(of_machine)
                on_gpu = ranks.device.type == "cuda"
                versions = {"esmshard": __version__, "torch": torch.__version__, "Python": platform.python_version()}
                versions["GPU"] = torch.cuda.get_device_name(ranks.device) if on_gpu else "none"
                numbers = torch.zeros((64 if on_gpu else 4) << 20, device=ranks.device)
                times = []
                for _ in range(6):
                    ranks.rows([0.0])  # waits until all ranks are here
                    began = time.perf_counter()
                    dist.all_reduce(numbers)
                    ranks.rows([float(numbers[0])])  # waits until the device has finished
                    times.append(time.perf_counter() - began)
                log = Path(name, "nccl").read_text(errors="replace") if Path(name, "nccl").is_file() else ""
                networks = sorted(set(_NETWORK.findall(log)))
                of_ranks = ranks.gather((list(of_machine), versions, socket.gethostname(), networks))
        except Exception as error:  # an error of gloo, NCCL or CUDA
            text = f"the processes did not work together: {' '.join(str(error).split())[:300]}"
            fix = "fix the errors above first; then check MASTER_ADDR, the network and the firewalls between machines"
            return [*of_machine, Finding("collectives", "error", text, fix)] if of_machine else None
    if not ranks.is_first:
        return None
    findings = [finding for findings, *_ in of_ranks for finding in findings]
    for what in versions:
        values = {host: known[what] for _, known, host, _ in of_ranks}
        if len(set(values.values())) > 1:
            text = f"{what} differs: {', '.join(f'{value} on {host}' for host, value in values.items())}"
            fix = "start all processes in one image or environment"
            findings.append(Finding("collectives", "warning" if what == "GPU" else "error", text, fix))
    bus = 2 * numbers.nbytes / min(times[1:]) * (ranks.size - 1) / ranks.size  # bytes/s, as in NVIDIA's nccl-tests
    networks = sorted({network for *_, used in of_ranks for network in used})
    text = f"{ranks.size} processes: all-reduce of {size_text(numbers.nbytes)} at {bus / 1e9:.2f} GB/s bus bandwidth"
    findings.append(Finding("collectives", "ok", text + (f", network {', '.join(networks)}" if networks else "")))
    active = any("ACTIVE" in path.read_text() for path in Path("/sys/class/infiniband").glob("*/ports/*/state"))
    if active and "Socket" in networks:
        fix = (
            "give the container /dev/infiniband, libibverbs and ulimit -l unlimited, and unset NCCL_IB_DISABLE and "
            "NCCL_NET; NCCL_DEBUG=INFO shows the reason"
        )
        text = "NCCL uses TCP sockets, though InfiniBand or RoCE ports are active"
        findings.append(Finding("collectives", "error", text, fix))
    return findings


def _show(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the report on stdout. Return the exit code: 1 if the report has an error, otherwise 0."""
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
