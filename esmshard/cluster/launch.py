"""The command `esmshard launch`, which writes the job file for a scheduler, and submits the file.

The file is made from a Jinja2 template: `templates/slurm.sh`, `templates/kubernetes.yaml`, or `--template FILE`. Its
variables are `job` (a `Job`), `site` (the site profile), and the values that `_slurm` or `_kubernetes` returns. Every
text that a user can choose needs a filter: `quote` for bash, `quoted` and `block` for YAML, and `literal` where the
kubelet would replace `$(NAME)`.

The behaviour of Slurm was observed on version 22.05. Kubernetes must have version 1.31 or later.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Literal

from esmshard.cluster.site import Site
from esmshard.data.tracks import named_tracks
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.parallel.layout import layout
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import INSIDE

Target = Literal["slurm", "kubernetes"]

TEMPLATES = Path(__file__).parent / "templates"
ENDINGS: dict[Target, str] = {"slurm": ".sbatch", "kubernetes": ".job.yaml"}
"""The ending of the job file for each scheduler. With `.yaml`, a job file could replace a recipe of the same name."""
COMMANDS: dict[Target, tuple[str, ...]] = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f")}
"""The command that submits a job file to each scheduler. The path of the file is the last argument."""
MAX_RESTARTS = 3
"""How often a job may restart after it loses a process or a node. `doctor` never restarts."""
GRACE = 660
"""The seconds between SIGTERM and SIGKILL for a pod. The launcher of `--nproc N` kills late processes after 600 s."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job for Slurm or Kubernetes: a run, a check of nodes, or several workers of `embed`."""

    name: str
    """Any text. Characters that the scheduler does not allow are replaced."""
    kind: Literal["finetune", "embed", "doctor"]
    """The command. `finetune` and `doctor` use all nodes together. `embed` has `array` separate workers."""
    arguments: tuple[str, ...]
    """The arguments of `esmshard`, such as ("finetune", "/my.yaml", "--resume", "auto"). The job file adds arguments
    to these, such as `--nproc`. On Kubernetes, the recipe is a shipped recipe, or a path in the pods."""
    out: str
    """The directory of a run, or the output of `embed`."""
    directory: str = "/"
    """The working directory of the command on Slurm. Paths in `arguments` are relative to it."""
    reads: tuple[str, ...] = ()
    """The paths of recipe, data and model, which must exist on the nodes."""
    nodes: int = 1
    """The maximum number of nodes of a run."""
    min_nodes: int = 1
    """The minimum number of nodes with which a run continues after it loses a node."""
    gpus_per_node: int = 0
    nproc: int = 1
    """The number of processes on each node."""
    starts_processes: bool = False
    """Whether `esmshard` itself starts the processes of a node, as for `embed` and cross-validation. Otherwise srun, or
    torchrun if a run has several pods, starts them."""
    array: int = 1
    """The number of workers of `embed`. Each worker is a task of a Slurm job array, or a pod."""
    time: str | None = None
    """The time limit on Slurm; None for the time limit in the site profile."""
    recipe_text: str | None = None
    """The user's recipe file, which the job file for Kubernetes contains. None on Slurm and for shipped recipes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `esmshard launch`. None means that the user did not set the option."""

    target: Target
    nodes: str | None = None
    """The number of nodes, such as `2`; on Kubernetes also a range, such as `1:2` (minimum, maximum)."""
    gpus_per_node: int | None = None
    nproc: int | None = None
    time: str | None = None
    array: int | None = None
    name: str | None = None


def finetune_job(recipe: str, overrides: Sequence[str], options: Options, site: Site) -> Job:
    """Return the job that runs a recipe. Raises `UsageError` if the recipe or an option is wrong."""
    path = recipe_file.resolve(recipe)
    resolved = recipe_file.load(path, overrides)
    slurm = options.target == "slurm"
    least, most = _nodes(options.nodes)
    on_each_fold = resolved.divides_table
    for refused, why in (
        (options.array, "--array is for embed; launch each run separately, with train.seed=N and out=DIR"),
        (
            slurm and least != most,
            f"--nodes {options.nodes}: a Slurm job has a fixed number of nodes; pass --nodes {most}",
        ),
        (
            on_each_fold and most > 1,
            "--nodes: cross-validation of variants uses one node; leave it out, or set data.folds and data.fold",
        ),
        (
            resolved.adapt.method == "probe" and (most > 1 or (options.nproc or 1) > 1),
            "adapt.method probe: runs in one process; leave --nodes and --nproc out",
        ),
    ):
        if refused:
            raise UsageError(why)
    gpus = _gpus(options, site)
    nproc = options.nproc or (1 if resolved.adapt.method == "probe" else max(1, gpus))
    for nodes in () if on_each_fold else sorted({least, most}):
        layout(resolved.parallel, nodes * nproc, nproc, "fp32")  # raises `UsageError` if the layout is impossible
    shipped = recipe in recipe_file.names() and not Path(recipe).expanduser().is_file()
    data = resolved.data
    reads = [data.train, data.valid, data.test, data.labels, data.mask, data.complexes, data.clusters, *data.tables]
    reads += [data.wild_type, *(data.tracks or {}).values(), resolved.model.name]
    reads += [None if shipped else _absolute(str(path))]
    arguments = ["finetune", recipe if shipped else _absolute(str(path)), *overrides]
    text = None
    if not slurm and not shipped:  # Paths in the recipe are relative to the volume in the pods.
        text = path.read_text(encoding="utf-8")
        arguments[1] = f"{site.kubernetes.mount}/{_file_name(path.stem)}.yaml"
    return Job(
        name=options.name or path.stem,
        kind="finetune",
        arguments=(*arguments, "--resume", "auto"),
        out=resolved.out if slurm else _in_pods(resolved.out, site),
        directory=str(Path.cwd()),
        # Other values are names of sample data and released models.
        reads=tuple(sorted({read for read in reads if read is not None and read.startswith("/")})),
        nodes=most,
        min_nodes=least,
        gpus_per_node=gpus,
        nproc=nproc,
        starts_processes=on_each_fold,
        time=_time(options),
        recipe_text=text,
    )


def embed_job(arguments: Sequence[str], parsed: Mapping[str, Any], options: Options, site: Site) -> Job:
    """Return the job whose workers run `esmshard embed` and write one output together.

    `arguments` are the words that the user typed after `embed`, and `parsed` are the values of its arguments. Raises
    `UsageError` if an option is wrong, or impossible with several workers.
    """
    out: Path | None = parsed["out"]
    for refused, why in (
        (options.nodes, "--nodes: embed has workers instead of nodes; pass their number as --array N"),
        (out is None, "-o: name the file to write, or the directory, after the --, such as -o my.h5"),
        (str(parsed["fasta"]) == "-", "-: a job has no standard input; name the FASTA file or the store"),
        (parsed["overwrite"], "--overwrite: each worker would remove the results of others; leave it out"),
        (parsed["dry_run"], "--dry-run: is not for jobs; leave it out"),
        (parsed["engine"] != "local" or parsed["worker"], "--engine, --worker: launch sets them; leave them out"),
    ):
        if refused:
            raise UsageError(why)
    assert out is not None
    gpus = 1 if site.gpus_per_node is None else min(1, site.gpus_per_node)
    if options.gpus_per_node is not None:
        gpus = options.gpus_per_node
    elif site.gpus_per_node is None and (options.nproc or parsed["nproc"]):
        gpus = 0
    reads = [str(path) for path in (parsed["fasta"], parsed["reuse"]) if path is not None]
    if os.sep in parsed["model"] or Path(parsed["model"]).exists():  # not the name of a released model
        reads.append(parsed["model"])
    reads += [path for path in named_tracks(parsed["track"] or ()).values() if path != INSIDE]
    array = options.array or 1
    return Job(
        name=options.name or f"embed-{out.stem}",
        kind="embed",
        arguments=("embed", *arguments, *(("--engine", "array") if array > 1 else ())),
        out=str(out),
        directory=str(Path.cwd()),
        reads=tuple(sorted({_absolute(path) for path in reads if remote.address(path) is None})),
        gpus_per_node=gpus,
        nproc=options.nproc or parsed["nproc"] or max(1, gpus),
        starts_processes=True,
        array=array,
        time=_time(options),
    )


def doctor_job(arguments: Sequence[str], options: Options, site: Site) -> Job:
    """Return the job that runs `esmshard doctor` on all nodes together. Raises `UsageError` if an option is wrong."""
    least, most = _nodes(options.nodes)
    if options.array:
        raise UsageError("--array is for embed; pass the number of nodes to check as --nodes N")
    if least != most:
        raise UsageError(f"--nodes {options.nodes}: doctor checks a fixed number of nodes; pass --nodes {most}")
    gpus = _gpus(options, site)
    return Job(
        name=options.name or "doctor",
        kind="doctor",
        arguments=("doctor", *arguments),
        out=str(Path.cwd()),
        directory=str(Path.cwd()),
        nodes=most,
        min_nodes=most,
        gpus_per_node=gpus,
        nproc=options.nproc or max(1, gpus),
        time=_time(options),
    )


def render(job: Job, site: Site, target: Target, template: Path | None = None) -> str:
    """Return the text of the job file, made from the file `template` or the shipped template.

    Raises `UsageError` if a value or the template is wrong, or the site profile lacks a key.
    """
    from jinja2 import Environment, StrictUndefined, TemplateError

    unusable = "[\0]" if target == "slurm" else "[\0\ud800-\udfff]"  # names of files need not be Unicode
    for text in (*job.arguments, *site.exports.values(), job.recipe_text or ""):
        if re.search(unusable, text):
            raise UsageError(f"{text!r}: contains a character that is not allowed in a job file; remove the character")
    path = template or TEMPLATES / {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml"}[target]
    values = _slurm(job, site) if target == "slurm" else _kubernetes(job, site)
    # The filters below quote texts, instead of the HTML escapes of Jinja2.
    environment = Environment(  # noqa: S701
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= {"quote": quote, "quoted": _quoted, "block": _block, "literal": _literal}
    try:
        return environment.from_string(path.read_text(encoding="utf-8")).render(job=job, site=site, **values)
    except TemplateError as error:
        raise UsageError(f"{path}:{getattr(error, 'lineno', 1)}: {error}") from None


def write(text: str, path: Path, overwrite: bool, reads: Sequence[str]) -> None:
    """Write the text of a job file to `path`.

    Raises:
        UsageError: if `path` is in `reads`, or if the file exists with another text and `overwrite` is False.
        InputError: if the file cannot be written.
    """
    raw = text.encode("utf-8", "surrogateescape")  # names of files need not be UTF-8
    try:
        if path.exists() and any(Path(read).exists() and path.samefile(read) for read in reads):
            raise UsageError(f"{path}: is an input of the job; choose another file with -o")
        if path.exists() and path.read_bytes() != raw and not overwrite:
            raise UsageError(f"{path}: exists already; choose another file with -o, or pass --overwrite")
        path.write_bytes(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def submit(path: Path, target: Target) -> str:
    """Submit a job file, and return the answer of the scheduler. Without `sbatch` or `kubectl`, return the command to
    type on another machine. Raises `InputError` if the scheduler refuses the file.
    """
    program, *arguments = COMMANDS[target]
    file = str(path) if path.is_absolute() else f"./{path}"  # a name that begins with - would be an option
    if (executable := shutil.which(program)) is None:
        return f"no {program} on this machine; type on another: {' '.join([program, *arguments, quote(file)])}"
    done = subprocess.run([executable, *arguments, file], check=False, capture_output=True, text=True)  # noqa: S603
    answer = "; ".join(line for line in (done.stderr + done.stdout).splitlines() if line.strip())
    if done.returncode:
        raise InputError(f"{path}: {program} refuses it: {answer or f'exit code {done.returncode}'}")
    return answer


def default_file(job: Job, target: Target) -> Path:
    """Return the default path of the job file, in the working directory."""
    return Path(_file_name(job.name) + ENDINGS[target])


def _slurm(job: Job, site: Site) -> dict[str, Any]:
    """Return the template variables for Slurm. Raises `UsageError` if `site` lacks a key or a mount for the job."""
    container, tasks = site.container, 1 if job.starts_processes else job.nproc
    if container.runtime == "none" and site.python is None:
        raise UsageError("python: the job needs a Python interpreter; set its path in the site profile")
    places = [*container.mounts, *([job.directory] if job.directory != "/" else [])]
    mounts = [place if ":" in place else f"{place}:{place}" for place in places]
    if container.runtime != "none":
        if not container.image:
            raise UsageError(f"container.runtime is {container.runtime}; set container.image in the site profile, too")
        if re.search(r"[:,\s]", job.directory):
            raise UsageError(
                f"{job.directory}: a container cannot mount a path with ':', ',' or a blank; rename the directory"
            )
        used = [*job.reads, *([] if job.kind == "doctor" or remote.address(job.out) else [job.out])]
        used = [os.path.normpath(os.path.join(job.directory, path)) for path in used]  # noqa: PTH118
        seen = [mount.split(":")[1] for mount in mounts]
        if hidden := [path for path in used if not any(Path(path).is_relative_to(place) for place in seen)]:
            fix = "the container does not see it; add its directory to container.mounts in the site profile"
            raise UsageError(*(f"{path}: {fix}" for path in hidden))
    cores = job.nproc if job.starts_processes and not job.gpus_per_node else None
    if job.gpus_per_node and site.slurm.cpus_per_gpu is not None:
        cores = max(1, site.slurm.cpus_per_gpu * job.gpus_per_node // tasks)
    arguments = [quote(argument) for argument in job.arguments]
    if job.nodes * tasks == 1:  # The only command that srun starts must start the other processes itself.
        arguments += ["--nproc", str(job.nproc)]
    return {
        "name": _file_name(job.name),
        "tasks": tasks,
        "cores": cores,
        "processes": job.nproc // tasks if cores else job.nproc,
        "gpus": site.slurm.gpus.replace("{n}", str(job.gpus_per_node)) if job.gpus_per_node else None,
        "time": job.time or site.slurm.time,
        "container": container,
        "arguments": arguments,
        "mounts": quote(",".join(dict.fromkeys(mounts))),
        "starts": MAX_RESTARTS + 1,
    }


def _kubernetes(job: Job, site: Site) -> dict[str, Any]:
    """Return the template variables for Kubernetes. Raises `UsageError` if `site` lacks `image` or `claim`."""
    wanted, image = site.kubernetes, site.container.image or ""
    if not image or image.startswith("/") or image.endswith((".sif", ".sqsh")):
        raise UsageError("container.image: Kubernetes needs an image in a registry; set its name in the site profile")
    if not wanted.claim:
        raise UsageError(
            "kubernetes.claim: the pods need a volume for data and results; set it in the site profile to the name of "
            "a PersistentVolumeClaim"
        )
    pods = job.array if job.kind == "embed" else job.nodes
    # The name of a Service must begin with a letter. The name of a pod (with index) has at most 63 characters.
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    name = name if re.match("[a-z]", name) else f"esmshard-{name}".rstrip("-")
    exports = {
        "HOME": "/tmp",  # noqa: S108  # the template mounts a volume here
        "USER": "esmshard",  # torch needs a name, and the image may not know the user id
        "ESMSHARD_CACHE": "/tmp/esmshard",  # noqa: S108
    }
    limits = {}
    if job.gpus_per_node:
        limits[wanted.gpu_resource] = str(job.gpus_per_node)
        if wanted.cpus_per_gpu is not None:
            limits["cpu"] = str(wanted.cpus_per_gpu * job.gpus_per_node)
            exports["OMP_NUM_THREADS"] = str(max(1, wanted.cpus_per_gpu * job.gpus_per_node // job.nproc))
        if wanted.memory_per_gpu is not None:
            number, unit = re.fullmatch(r"(\d+)(.*)", wanted.memory_per_gpu).groups()  # type: ignore[union-attr]
            limits["memory"] = f"{int(number) * job.gpus_per_node}{unit}"
    return {
        "name": name[: 62 - len(str(pods - 1))].rstrip("-"),
        "kubernetes": wanted,
        "labels": wanted.labels | {"app.kubernetes.io/name": "esmshard", "app.kubernetes.io/component": job.kind},
        "pods": pods,
        "together": pods > 1 and job.kind != "embed",
        "restarts": 0 if job.kind == "doctor" else MAX_RESTARTS,
        "grace": GRACE,
        "wrapper": (TEMPLATES / "torchrun_wrapper.sh").read_text(encoding="utf-8"),
        "status": f"{job.out}/status.json" if job.kind == "finetune" else "",
        # The run must use the directory of the wrapper, not `out` of the recipe. YAML parses this value.
        "out": f"out={job.out if re.fullmatch(r'/[a-zA-Z0-9_./-]+', job.out) else json.dumps(job.out)}",
        "exports": exports | site.exports,
        "rdma": any(re.search("rdma|hca|infiniband", resource) for resource in wanted.resources),
        "limits": limits | wanted.resources,
    }


def _file_name(name: str) -> str:
    """Convert a text to a valid name of a Slurm job or of a file.

    >>> _file_name("my run; $(reboot)")
    'my-run-reboot'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "esmshard"


def _quoted(value: Any) -> str:
    """Return the value as JSON, which every YAML parser reads as the same value."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _block(text: str, indent: int) -> str:
    """Return the text as a YAML block; or quoted, if a block would change characters."""
    lines = text.split("\n")
    if lines.pop() or not lines or not all(line.isprintable() for line in lines):
        return _quoted(text)
    return "|2+\n" + "\n".join(" " * indent + line if line else "" for line in lines)


def _literal(text: str) -> str:
    """Escape a text for the kubelet, which replaces `$(NAME)` and reads `$$` as `$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _time(options: Options) -> str | None:
    if options.time is None:
        return None
    if options.target != "slurm":
        raise UsageError("--time is for Slurm; leave it out, because jobs on Kubernetes have no time limit")
    if not re.fullmatch(r"\d[\d:-]*", options.time, re.ASCII):
        raise UsageError(f"--time {options.time!r}: a time such as 24:00:00, 2-12:00:00 or 90 (minutes) is expected")
    return options.time


def _nodes(text: str | None) -> tuple[int, int]:
    """Return the minimum and the maximum number of nodes for a text such as `2` or `1:2`."""
    if text is None:
        return 1, 1
    parts = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if parts is None or int(parts[2] or parts[1]) < int(parts[1]):
        raise UsageError(f"--nodes {text}: a number of nodes such as 2, or a range such as 1:2, is expected")
    return int(parts[1]), int(parts[2] or parts[1])


def _gpus(options: Options, site: Site) -> int:
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    if site.gpus_per_node is not None:
        return site.gpus_per_node
    if options.nproc is not None:
        return 0
    raise UsageError(
        "the number of GPUs on each node is not known; pass --gpus-per-node N (0 for none), or set gpus_per_node in "
        "the site profile"
    )


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100  # symbolic links are kept


def _in_pods(path: str, site: Site) -> str:
    """Return the path in the pods for a path in the working directory, and any other path unchanged."""
    if not Path(path).is_relative_to(Path.cwd()):
        return path
    return str(PurePosixPath(site.kubernetes.mount) / Path(path).relative_to(Path.cwd()))
