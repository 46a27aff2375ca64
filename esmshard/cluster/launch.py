"""`esmshard launch`: it makes a job of the options, a scheduler's file of the job and a template, and submits the file.

The templates are `templates/slurm.sh` and `templates/kubernetes.yaml`. `launch --template FILE` takes an operator's own
file instead. A template is Jinja2 text with these variables: `job` (a `Job`), `site` (the profile), and the values that
`_slurm` or `_kubernetes` return. Every text that a user can choose passes a filter that quotes it: `quote` for bash,
`quoted` and `block` for YAML, and `literal` where the kubelet would replace `$(NAME)`.

Facts about Slurm are from its manual and were observed on Slurm 22.05; Kubernetes must be 1.31 or later.
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

from pydantic import TypeAdapter, ValidationError

from esmshard.cluster import site as site_profile
from esmshard.cluster.site import OF_THE_JOB, Site, Time
from esmshard.data.tracks import named_tracks
from esmshard.errors import InputError, UsageError
from esmshard.parallel.layout import layout
from esmshard.recipe import recipe_file, sweep_file
from esmshard.recipe.data_section import INSIDE
from esmshard.recipe.sections import Recipe

Target = Literal["slurm", "kubernetes"]

TEMPLATES = Path(__file__).parent / "templates"
ENDINGS: dict[Target, str] = {"slurm": ".sbatch", "kubernetes": ".job.yaml"}
"""The ending of the file for each target. The file has the name of the recipe, so its ending must differ."""
COMMANDS: dict[Target, tuple[str, ...]] = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f")}
"""The command that submits the file, which is its last argument."""
GRACE = 660
"""The seconds of a pod between SIGTERM and SIGKILL. `--nproc N` gives its processes 600 s to save, and then kills them.
Under torchrun the processes have all of these seconds.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a scheduler: a run on some nodes, or an array of independent workers."""

    name: str
    """The name that the scheduler shows; any text."""
    kind: Literal["finetune", "embed", "doctor"]
    """The kind of job. `finetune` and `doctor` run on all nodes together (in an array of runs, each run on its own).
    `embed` is `array` workers on one node each, which share an output.
    """
    arguments: tuple[str, ...]
    """Arguments of `esmshard`, without those that the scheduler sets: ("finetune", "/my.yaml", "--resume", "auto").
    For Kubernetes the recipe is its name, or its path in the pods.
    """
    out: str
    """The run's directory, in which status.json records the result; for `embed` the output."""
    directory: str = "/"
    """The working directory of the command, to which paths in `arguments` are relative. Kubernetes has its own."""
    reads: tuple[str, ...] = ()
    """Recipe, data and model: files or directories that a container must see."""
    nodes: int = 1
    """The largest number of nodes of a run."""
    min_nodes: int = 1
    """The smallest number of nodes with which the run continues after a loss; equal to `nodes` if it is not elastic."""
    gpus_per_node: int = 0
    nproc: int = 1
    """Processes of a node: one for each GPU, or the requested number on CPUs."""
    starts_processes: bool = False
    """Whether a single command on each node starts its `nproc` processes itself, as `embed` and a cross-validation do.
    Otherwise the scheduler starts each process.
    """
    array: int = 1
    """The number of workers of `embed` or of a sweep, or of runs of `finetune`."""
    first_seed: int | None = None
    """For an array of runs, which differ in their seeds, the first seed. Each run has its own directory `seed-N` in
    `out`. None for a single run.
    """
    max_restarts: int = 3
    """How often the processes are started again after the loss of a process or a node."""
    recipe_text: str | None = None
    """The text of a user's own recipe where it must travel with the job (Kubernetes); None for a shipped recipe."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line; None for an option that was not given."""

    target: Target
    nodes: str | None = None
    """The number of nodes, such as `2`; on Kubernetes also `1:2` for at least one node and at most two."""
    gpus_per_node: int | None = None
    nproc: int | None = None
    time: str | None = None
    array: int | None = None
    sweep: Path | None = None
    trials: int | None = None
    name: str | None = None


def merged(site: Site, options: Options) -> Site:
    """Return the profile, in which options of the command line replace values of the file.

    Raises:
        UsageError: if an option is wrong, or is not for this scheduler.
    """
    if options.time is None:
        return site
    if options.target != "slurm":
        raise UsageError("--time is for Slurm only; leave it out, because jobs for Kubernetes have no time limit")
    try:
        limit = TypeAdapter(Time).validate_python(options.time)
    except ValidationError as error:
        raise UsageError(f"--time: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    return site.model_copy(update={"slurm": site.slurm.model_copy(update={"time": limit})})


def finetune_job(recipe: str, overrides: Sequence[str], options: Options, site: Site) -> Job:
    """Check a recipe, and return the job that runs it.

    Raises:
        UsageError: if the recipe or an option is wrong.
    """
    path = recipe_file.resolve(recipe)
    resolved = recipe_file.load(path, overrides)
    if options.trials is not None and options.sweep is None:
        raise UsageError("--trials is the number of trials of a sweep; pass --sweep FILE, too, or leave it out")
    if options.sweep is not None:
        if options.target != "slurm" or options.nodes is not None:
            raise UsageError("--sweep is for Slurm, and a worker has one node; pass the number of workers as --array N")
        sweep_file.load(options.sweep, path, overrides)
    elif options.array is not None and options.target != "slurm":
        raise UsageError("--array for a recipe is for Slurm only; launch each run with train.seed=N and out=DIR")
    elif options.array is not None and resolved.divides_table:
        raise UsageError(
            "--array: a table of variants is cross-validated by one job; leave it out, or set data.folds and data.fold"
        )
    least, most = _nodes(options.nodes)
    if options.target == "slurm" and least != most:
        raise UsageError(
            f"--nodes {options.nodes}: Slurm gives a job a fixed number of nodes, and starts it again after a lost "
            f"one; type --nodes {most}"
        )
    gpus = _gpus(options, site)
    nproc = options.nproc or (1 if resolved.adapt.method == "probe" else max(1, gpus))
    if resolved.adapt.method == "probe" and (most > 1 or nproc > 1):
        raise UsageError("adapt.method probe: is fitted in one process; leave --nodes and --nproc out")
    if resolved.divides_table and most > 1:
        raise UsageError("--nodes: a table of variants is cross-validated on one node; leave it out, or set data.folds")
    starts_processes = resolved.divides_table or options.sweep is not None
    for nodes in () if starts_processes else sorted({least, most}):
        layout(resolved.parallel, nodes * nproc, nproc, "fp32")  # raises for a division that cannot be
    shipped = recipe in recipe_file.names() and not Path(recipe).expanduser().is_file()
    named, out = recipe if shipped else os.path.abspath(path), resolved.out  # noqa: PTH100
    text, reads = None, _read_by(None if shipped else path, resolved)
    searched: list[str] = []
    if options.sweep is not None:
        searched = ["--sweep", _absolute(str(options.sweep))]
        reads.append(searched[-1])
        searched += [] if options.trials is None else ["--trials", str(options.trials)]
    if options.target == "kubernetes":
        text = None if shipped else path.read_text(encoding="utf-8")
        # The paths in the recipe are relative to the volume.
        named = recipe if shipped else f"{site.kubernetes.mount}/{path.name}"
        out = _in_pods(out, site)
    return Job(
        name=options.name or path.stem,
        kind="finetune",
        arguments=("finetune", named, *overrides, *searched, "--resume", "auto"),
        out=out,
        directory=str(Path.cwd()),
        reads=tuple(sorted(set(reads))),
        nodes=most,
        min_nodes=least,
        gpus_per_node=gpus,
        nproc=nproc,
        starts_processes=starts_processes,
        array=options.array or 1,
        first_seed=None if options.array is None or options.sweep is not None else resolved.train.seed,
        recipe_text=text,
    )


def embed_job(arguments: Sequence[str], parsed: Mapping[str, Any], options: Options, site: Site) -> Job:
    """Return the job of workers that share an output.

    Args:
        arguments: the arguments of `esmshard embed`, as they were typed.
        parsed: the values that the parser of `embed` has read from them.
        options: the options of the launch.
        site: the profile.

    Raises:
        UsageError: if arguments are wrong, or cannot be used by workers that begin at different times.
    """
    _no_sweep(options)
    if options.nodes is not None:
        raise UsageError("--nodes: workers of embed are independent of each other; pass their number as --array N")
    out: Path | None = parsed["out"]
    if out is None:
        raise UsageError("-o: name the file to write, or the directory, after the --, such as -o my.h5")
    if parsed["model"] in ("status", "verify", "merge") and not Path(parsed["model"]).exists():
        raise UsageError(f"embed {parsed['model']}: needs no job; run it here, without launch")
    if str(parsed["fasta"]) == "-":
        raise UsageError("-: a job has no standard input; name the FASTA file or the store")
    for option in ("overwrite", "dry_run"):
        if parsed[option]:
            why = "lets each worker remove the others' results" if option == "overwrite" else "is for a single command"
            raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out")
    if parsed["engine"] != "local" or parsed["worker"] is not None:
        raise UsageError("--engine: launch sets the engine and the number of each worker; leave --engine, --worker out")
    gpus = 1 if site.gpus_per_node is None else min(1, site.gpus_per_node)
    if options.gpus_per_node is not None:
        gpus = options.gpus_per_node
    elif site.gpus_per_node is None and (options.nproc or parsed["nproc"]):
        gpus = 0
    read = [str(path) for path in (parsed["fasta"], parsed["reuse"]) if path is not None]
    if os.sep in parsed["model"] or Path(parsed["model"]).exists():  # otherwise it is the name of a released model
        read.append(parsed["model"])
    read += [path for path in named_tracks(parsed["track"] or ()).values() if path != INSIDE]
    return Job(
        name=options.name or f"embed-{out.stem}",
        kind="embed",
        arguments=("embed", *arguments, *(("--engine", "array") if (options.array or 1) > 1 else ())),
        out=_in_pods(_absolute(str(out)), site) if options.target == "kubernetes" else _absolute(str(out)),
        directory=str(Path.cwd()),
        reads=tuple(sorted({_absolute(path) for path in read})),
        gpus_per_node=gpus,
        nproc=options.nproc or parsed["nproc"] or max(1, gpus),
        starts_processes=True,
        array=options.array or 1,
    )


def doctor_job(arguments: Sequence[str], options: Options, site: Site) -> Job:
    """Return the job that checks all nodes together.

    Raises:
        UsageError: if an option is wrong.
    """
    _no_sweep(options)
    if options.array is not None:
        raise UsageError("--array is for a recipe or embed; pass the number of nodes as --nodes N")
    least, most = _nodes(options.nodes)
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
    )


def render(job: Job, site: Site, target: Target, template: Path | None = None) -> str:
    """Return the text of the scheduler's file.

    Args:
        job: the job.
        site: the profile.
        target: the scheduler.
        template: an operator's own template; by default the shipped one.

    Raises:
        UsageError: if a value cannot be expressed for the scheduler, or the template is wrong.
    """
    from jinja2 import Environment, StrictUndefined, TemplateError

    path = template or TEMPLATES / {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml"}[target]
    values = _slurm(job, site) if target == "slurm" else _kubernetes(job, site)
    # The file is no HTML: filters quote what stands in it.
    environment = Environment(  # noqa: S701
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= {"quote": quote, "quoted": _quoted, "block": _block, "literal": _literal}
    try:
        text = environment.from_string(path.read_text(encoding="utf-8")).render(job=job, site=site, **values)
    except TemplateError as error:
        raise UsageError(f"{path}:{getattr(error, 'lineno', 1)}: {error}") from None
    if "\0" in text:
        raise UsageError("a NUL character cannot be given to a command; remove it")
    return text


def write(text: str, path: Path, overwrite: bool, reads: Sequence[str]) -> None:
    """Write the file. An existing file with the same text stays; any other existing file is refused.

    Args:
        text: the text of the file.
        path: the path of the file.
        overwrite: whether another file may be replaced.
        reads: the paths that the job reads, its recipe included. These are never replaced.

    Raises:
        UsageError: if another file exists there, or the job reads it.
        InputError: if the file cannot be written.
    """
    raw = text.encode("utf-8", "surrogateescape")  # names of files need not be UTF-8
    try:
        if path.exists() and any(Path(read).exists() and path.samefile(read) for read in reads):
            raise UsageError(f"{path}: is what the job reads; choose another file with -o")
        if path.exists() and path.read_bytes() != raw and not overwrite:
            raise UsageError(f"{path}: exists already; choose another one with -o, or pass --overwrite")
        path.write_bytes(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def submit(path: Path, target: Target) -> str:
    """Submit a file. Return the scheduler's answer with the job's number, or the command to type where it is missing.

    Raises:
        InputError: if the scheduler refuses the file.
    """
    program, *arguments = COMMANDS[target]
    file = str(path) if path.is_absolute() else f"./{path}"  # a name that begins with - would be an option
    if (executable := shutil.which(program)) is None:
        return f"there is no {program} here; where there is one: {' '.join([program, *arguments, quote(file)])}"
    done = subprocess.run([executable, *arguments, file], check=False, capture_output=True, text=True)  # noqa: S603
    answer = "; ".join(line for line in (done.stderr + done.stdout).splitlines() if line.strip())
    if done.returncode:
        raise InputError(f"{path}: {program} refuses it: {answer or f'exit code {done.returncode}'}")
    return answer


def default_file(job: Job, target: Target) -> Path:
    """Return the default path of the file: the job's name, in the working directory."""
    return Path(_file_name(job.name) + ENDINGS[target])


def _slurm(job: Job, site: Site) -> dict[str, Any]:
    """Return the values that the template for Slurm needs besides `job` and `site`."""
    container, tasks = site.container, 1 if job.starts_processes else job.nproc
    if container.runtime == "none" and site.python is None:
        raise UsageError("python: the job needs an interpreter; set it in the site profile")
    if container.runtime != "none" and not container.image:
        raise UsageError(f"container.runtime is {container.runtime}; set container.image in the site profile, too")
    cores = job.nproc if job.starts_processes and not job.gpus_per_node else None
    if job.gpus_per_node and site.slurm.cpus_per_gpu is not None:
        cores = max(1, site.slurm.cpus_per_gpu * job.gpus_per_node // tasks)
    memory = site.slurm.memory
    if memory is not None and job.kind == "embed" and 0 < job.gpus_per_node < (site.gpus_per_node or 0):
        number, unit = re.fullmatch(r"(\d+)([KMGT]?)", memory).groups()  # type: ignore[union-attr]
        megabytes = int(number) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[unit]
        memory = f"{int(megabytes * job.gpus_per_node / site.gpus_per_node)}M"  # type: ignore[operator]
    scratch = ""
    if site.scratch is not None:  # a word of bash in which only variables of Slurm expand
        parts = re.split(rf"(\$\{{{OF_THE_JOB}\}})", site.scratch)
        scratch = "".join(f'"{part}"' if n % 2 else quote(part) for n, part in enumerate(parts) if part)
    arguments = [quote(argument) for argument in job.arguments]
    if job.first_seed is not None:
        arguments += ['train.seed="$seed"', f'out={quote(job.out)}/seed-"$seed"']
    if job.nodes * tasks == 1:  # one command without ranks
        arguments += ["--nproc", str(job.nproc)]
    return {
        "name": _file_name(job.name),
        "is_array": job.kind == "embed" or job.first_seed is not None or job.array > 1,
        "tasks": tasks,
        "cores": cores,
        "processes": job.nproc // tasks if cores else job.nproc,
        "memory": memory,
        "container": container,
        "scratch": scratch,
        "arguments": arguments,
        "mounts": _mounts(job, site, scratch),
        "out_parent": str(PurePosixPath(job.out).parent),
    }


def _mounts(job: Job, site: Site, scratch: str) -> str:
    """Return a word of bash with SRC:DST of each mount: those of the profile, and all other paths of the run."""
    if site.container.runtime == "none":
        return ""
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in site.container.mounts]
    seen = [PurePosixPath(mount.split(":")[0]) for mount in mounts if mount.split(":")[0] == mount.split(":")[1]]
    # The directory of a file is mounted, since labels and coordinates lie beside the data.
    needed = [PurePosixPath(path).parent for path in (*job.reads, *([job.out] if job.kind != "doctor" else []))]
    for place in sorted({PurePosixPath(job.directory), *needed}, key=lambda path: (len(path.parts), path)):
        # Neither runtime can quote separators in its list of mounts, and enroot's tables of mounts are split at blanks.
        if re.search(r"[:,\s]", str(place)):
            raise UsageError(f"{place}: a container cannot mount a path with ':', ',' or a blank; rename it")
        if len(place.parts) > 1 and not any(place.is_relative_to(path) for path in seen):
            seen.append(place)
            mounts.append(f"{place}:{place}")
    return ",".join([quote(",".join(mounts)), *([f"{scratch}:{scratch}"] if scratch else [])])


def _kubernetes(job: Job, site: Site) -> dict[str, Any]:
    """Return the values that the template for Kubernetes needs besides `job` and `site`."""
    profile, wanted = site_profile.path(), site.kubernetes
    problems = []
    if not site.container.image:
        problems.append(f"Kubernetes runs images only; set container.image in the site profile, {profile}")
    elif site.container.image.startswith("/") or site.container.image.endswith((".sif", ".sqsh")):
        problems.append(f"container.image is the file {site.container.image}; Kubernetes needs a name in a registry")
    if not wanted.claim:
        problems.append(
            f"the pods need a volume for data and results; set kubernetes.claim in the site profile, {profile}, to the "
            "name of a PersistentVolumeClaim"
        )
    if job.recipe_text is not None and not re.fullmatch(rf"{re.escape(wanted.mount)}/[^:]+", job.arguments[1]):
        problems.append(f"{job.arguments[1]}: pods see a recipe only below {wanted.mount}; its name may have no ':'")
    if len((job.recipe_text or "").encode(errors="replace")) > 2**17:  # kubectl stores 256 KiB in an annotation
        problems.append(f"{job.arguments[1]}: a recipe of more than 128 KiB cannot travel with the job; shorten it")
    for text in (*job.arguments, *site.exports.values(), job.recipe_text or ""):
        if re.search("[\0\ud800-\udfff]", text):
            problems.append(f"{text!r}: only Unicode text can be given to Kubernetes; rename what is called so")
    if problems:
        raise UsageError(*problems)
    pods = job.array if job.kind == "embed" else job.nodes
    # The name of a Service must begin with a letter; with the index of a pod it has at most 63 characters.
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    name = name if re.match("[a-z]", name) else f"esmshard-{name}".rstrip("-")
    name = name[: 62 - len(str(pods - 1))].rstrip("-")
    limits = {"cpu": _share(wanted.cpu, job, site), "memory": _share(wanted.memory, job, site)} | wanted.resources
    if job.gpus_per_node:
        limits[wanted.gpu_resource] = str(job.gpus_per_node)
    exports = {
        "HOME": "/tmp",  # noqa: S108  # a volume of the pod
        "USER": "esmshard",  # the image may not know the user id, but torch needs a name
        "ESMSHARD_CACHE": "/tmp/esmshard",  # noqa: S108
    }
    if cores := re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", limits["cpu"] or ""):
        # Processes see all cores of the machine, and would start as many threads.
        per_process = float(cores[1]) / (1000 if cores[2] else 1) / job.nproc
        exports["OMP_NUM_THREADS"] = str(max(1, int(per_process)))
    return {
        "name": name,
        "kubernetes": wanted,
        "labels": {
            **wanted.labels,
            "app.kubernetes.io/name": "esmshard",
            "app.kubernetes.io/component": job.kind,
        },
        "pods": pods,
        "together": pods > 1 and job.kind != "embed",
        "grace": GRACE,
        "tolerations": [
            {key: int(value) if key == "tolerationSeconds" else value for key, value in toleration.items()}
            for toleration in wanted.tolerations
        ],
        "wrapper": (TEMPLATES / "torchrun_wrapper.sh").read_text(encoding="utf-8"),
        "status": f"{job.out}/status.json" if job.kind == "finetune" else "",
        # The wrapper needs the run's directory, also if the recipe's `out` has variables. YAML reads the value.
        "out": f"out={job.out if re.fullmatch(r'/[a-zA-Z0-9_./-]+', job.out) else json.dumps(job.out)}",
        "exports": exports | site.exports,
        "rdma": any(re.search("rdma|hca|infiniband", resource) for resource in wanted.resources),
        "limits": {resource: quantity for resource, quantity in limits.items() if quantity is not None},
    }


def _share(quantity: str | None, job: Job, site: Site) -> str | None:
    """Return a pod's part of the resource of a whole node, by its share of the GPUs. Other pods then fit, too."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", quantity or "")
    if found is None or not site.gpus_per_node or not 0 < job.gpus_per_node < site.gpus_per_node:
        return quantity
    share = float(found[1]) * job.gpus_per_node / site.gpus_per_node
    return f"{int(share * 8) / 8:.12g}{found[2]}"  # eighths give whole bytes and no endless digits


def _file_name(name: str) -> str:
    """Convert a text to a name for Slurm and for files.

    >>> _file_name("my run; $(reboot)")
    'my-run-reboot'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "esmshard"


def _quoted(value: Any) -> str:
    """Return JSON, which any YAML parser reads as the same value, whatever characters it has."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _block(text: str, indent: int) -> str:
    """Return a readable block of YAML, where it keeps every character; else a quoted text."""
    lines = text.split("\n")
    if lines.pop() or not lines or not all(line.isprintable() for line in lines):
        return _quoted(text)
    return "|2+\n" + "\n".join(" " * indent + line if line else "" for line in lines)


def _literal(text: str) -> str:
    """Escape a text for the kubelet, which replaces $(NAME) and reads $$ as $, so that the command gets `text`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _no_sweep(options: Options) -> None:
    if options.sweep is not None or options.trials is not None:
        raise UsageError("--sweep and --trials are for a recipe; leave them out")


def _nodes(text: str | None) -> tuple[int, int]:
    """Return the lowest and the highest number of nodes in a text such as `2` or `1:2`."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"--nodes {text}: a number of nodes such as 2 is expected, or a lowest and a highest one, 1:2")
    return int(found[1]), int(found[2] or found[1])


def _gpus(options: Options, site: Site) -> int:
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    if site.gpus_per_node is not None:
        return site.gpus_per_node
    if options.nproc is not None:
        return 0
    raise UsageError(
        "the number of GPUs of a node is not known; pass --gpus-per-node N (0 for none), or set gpus_per_node in the "
        "site profile"
    )


def _read_by(recipe: Path | None, resolved: Recipe) -> list[str]:
    """Return the paths that a run reads, without names of samples and released models."""
    data = resolved.data
    paths = [data.train, data.valid, data.test, data.labels, data.mask, data.clusters, data.table, data.wild_type]
    paths += [*(data.tracks or {}).values(), resolved.model.name, _absolute(str(recipe)) if recipe else None]
    return [path for path in paths if path is not None and path.startswith("/")]


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100  # symbolic links are kept


def _in_pods(path: str, site: Site) -> str:
    """Return the path in the pods of a path below the working directory. Any other path is returned unchanged."""
    here = Path.cwd()
    if not Path(path).is_relative_to(here):
        return path
    return str(PurePosixPath(site.kubernetes.mount) / Path(path).relative_to(here))
