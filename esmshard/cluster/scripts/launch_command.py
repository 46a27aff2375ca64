"""The work of `esmshard launch`: it makes a job of the options, and a scheduler's file of the job. No torch."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from esmshard.cluster.scripts import slurm
from esmshard.cluster.scripts.scheduler_job import SchedulerJob
from esmshard.cluster.scripts.site import Site, time_limit
from esmshard.data.tracks.track_files import named_tracks
from esmshard.errors import UsageError
from esmshard.parallel.layout import layout
from esmshard.recipe import recipe_file, sweep_file
from esmshard.recipe.data_section import INSIDE
from esmshard.recipe.sections import Recipe

Target = Literal["slurm", "kubernetes"]

ENDINGS: dict[Target, str] = {"slurm": ".sbatch", "kubernetes": ".job.yaml"}
"""The ending of the file for each target. The file has the name of the recipe, so its ending must differ."""


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


def chosen_target(text: str) -> Target:
    """Return the scheduler that `--target` names."""
    for known in ENDINGS:
        if text == known:
            return known
    raise UsageError("--target: slurm or kubernetes is expected")


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
        limit = time_limit(options.time)
    except ValueError as error:
        raise UsageError(f"--time: {error}") from None
    return site.model_copy(update={"slurm": site.slurm.model_copy(update={"time": limit})})


def finetune_job(recipe: str, overrides: Sequence[str], options: Options, site: Site) -> SchedulerJob:
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
    recipe_file.check_companions(path, resolved, overrides)
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
    allowed = [part for name in recipe_file.allowed_names() for part in ("--env", name)]
    if options.target == "kubernetes":
        text = None if shipped else path.read_text(encoding="utf-8")
        # The paths in the recipe are relative to the volume.
        named = recipe if shipped else f"{site.kubernetes.mount}/{path.name}"
        out = _in_pods(out, site)
    return SchedulerJob(
        name=options.name or path.stem,
        kind="finetune",
        arguments=("finetune", named, *overrides, *searched, *allowed, "--resume", "auto"),
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


def embed_job(arguments: Sequence[str], parsed: Mapping[str, Any], options: Options, site: Site) -> SchedulerJob:
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
    return SchedulerJob(
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


def doctor_job(arguments: Sequence[str], options: Options, site: Site) -> SchedulerJob:
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
    return SchedulerJob(
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


def render(job: SchedulerJob, site: Site, target: Target) -> str:
    """Return the text of the scheduler's file.

    Raises:
        UsageError: if a value cannot be expressed for the scheduler.
    """
    if target == "slurm":
        return slurm.render(job, site)
    from esmshard.cluster.scripts import kubernetes

    return kubernetes.render(job, site)


def default_file(job: SchedulerJob, target: Target) -> Path:
    """Return the default path of the file: the job's name, in the working directory."""
    return Path(slurm.file_name(job.name) + ENDINGS[target])


def not_here(job: SchedulerJob) -> list[str]:
    """Return the paths that the job reads and that do not exist on this machine. The nodes may have them."""
    return [path for path in job.reads if not Path(path).exists()]


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
