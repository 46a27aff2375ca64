"""What `esmshard launch` does beyond its options: a job is made of them, and a file for a scheduler. No torch."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from esmshard.cluster.scripts import slurm
from esmshard.cluster.scripts.scheduler_job import SchedulerJob
from esmshard.cluster.scripts.site import Site, time_limit
from esmshard.errors import UsageError
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

Target = Literal["slurm", "kubernetes"]

ENDINGS: dict[Target, str] = {"slurm": ".sbatch", "kubernetes": ".job.yaml"}
"""Of the file that is written. It is named for the recipe, and must not be the recipe itself."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command line; None where nothing was said."""

    target: Target
    nodes: str | None = None
    """As `2`; on Kubernetes also `1:2`, for at least one and at most two."""
    gpus_per_node: int | None = None
    nproc: int | None = None
    time: str | None = None
    array: int | None = None
    name: str | None = None


def chosen_target(text: str) -> Target:
    """The scheduler that `--target` names."""
    for known in ENDINGS:
        if text == known:
            return known
    raise UsageError("--target: slurm or kubernetes is expected")


def merged(site: Site, options: Options) -> Site:
    """The profile, with what options say in its place.

    Raises:
        UsageError: an option is wrong, or not for this scheduler.
    """
    if options.time is None:
        return site
    if options.target != "slurm":
        raise UsageError("--time is of Slurm; a Job of Kubernetes has no time limit here")
    try:
        limit = time_limit(options.time)
    except ValueError as error:
        raise UsageError(f"--time: {error}") from None
    return site.model_copy(update={"slurm": site.slurm.model_copy(update={"time": limit})})


def finetune_job(recipe: str, overrides: Sequence[str], options: Options, site: Site) -> SchedulerJob:
    """A run of a recipe, which is checked first.

    Raises:
        UsageError: recipe or options are wrong.
    """
    path = recipe_file.resolve(recipe)
    resolved = recipe_file.load(path, overrides)
    if options.array is not None and options.target != "slurm":
        raise UsageError("--array of runs is of Slurm; launch each with train.seed=N and out=DIR")
    if options.array is not None and resolved.divides_table:
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
    of_table = resolved.divides_table
    if of_table and most > 1:
        raise UsageError("--nodes: a table of variants is cross-validated on one node; leave it out, or set data.folds")
    shipped = recipe in recipe_file.names() and not Path(recipe).expanduser().is_file()
    named, out = recipe if shipped else os.path.abspath(path), resolved.out  # noqa: PTH100
    text = None
    if options.target == "kubernetes":
        text = None if shipped else path.read_text(encoding="utf-8")
        named = recipe if shipped else f"{site.kubernetes.mount}/{path.name}"  # its paths are relative to the volume
        out = _in_pods(out, site)
    return SchedulerJob(
        name=options.name or path.stem,
        kind="finetune",
        arguments=("finetune", named, *overrides, "--resume", "auto"),
        out=out,
        directory=str(Path.cwd()),
        reads=tuple(sorted(set(_read_by(None if shipped else path, resolved)))),
        nodes=most,
        min_nodes=least,
        gpus_per_node=gpus,
        nproc=nproc,
        starts_processes=of_table,
        array=options.array or 1,
        first_seed=None if options.array is None else resolved.train.seed,
        recipe_text=text,
    )


def embed_job(arguments: Sequence[str], parsed: Mapping[str, Any], options: Options, site: Site) -> SchedulerJob:
    """Workers that share an output.

    Args:
        arguments: of `esmshard embed`, as they were typed.
        parsed: what its own parser made of them.
        options: of the launch.
        site: the profile.

    Raises:
        UsageError: they are wrong, or make no sense for workers that begin at different times.
    """
    if options.nodes is not None:
        raise UsageError("--nodes: workers of embed need not know each other; say how many with --array")
    out: Path | None = parsed["out"]
    if out is None:
        raise UsageError("-o: name the file to write, or the directory, after the --")
    if parsed["model"] in ("status", "verify", "merge") and not Path(parsed["model"]).exists():
        raise UsageError(f"embed {parsed['model']}: takes no time; run it where you are")
    if str(parsed["fasta"]) == "-":
        raise UsageError("-: a job has no standard input; name the FASTA file or the store")
    for option in ("overwrite", "dry_run", "shard"):
        if parsed[option]:
            why = "has each worker remove what the others did" if option == "overwrite" else "is for a single command"
            raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out")
    gpus = 1 if site.gpus_per_node is None else min(1, site.gpus_per_node)
    if options.gpus_per_node is not None:
        gpus = options.gpus_per_node
    elif site.gpus_per_node is None and (options.nproc or parsed["nproc"]):
        gpus = 0
    read = [str(path) for path in (parsed["fasta"], parsed["reuse"]) if path is not None]
    if os.sep in parsed["model"] or Path(parsed["model"]).exists():  # else it is the name of a released one
        read.append(parsed["model"])
    return SchedulerJob(
        name=options.name or f"embed-{out.stem}",
        kind="embed",
        arguments=("embed", *arguments, *(() if parsed["resume"] else ("--resume",))),
        out=_in_pods(_absolute(str(out)), site) if options.target == "kubernetes" else _absolute(str(out)),
        directory=str(Path.cwd()),
        reads=tuple(sorted({_absolute(path) for path in read})),
        gpus_per_node=gpus,
        nproc=options.nproc or parsed["nproc"] or max(1, gpus),
        starts_processes=True,
        array=options.array or 1,
    )


def doctor_job(arguments: Sequence[str], options: Options, site: Site) -> SchedulerJob:
    """A look at all nodes together.

    Raises:
        UsageError: the options are wrong.
    """
    if options.array is not None:
        raise UsageError("--array is of a recipe and of embed; say on how many nodes with --nodes")
    least, most = _nodes(options.nodes)
    if least != most:
        raise UsageError(f"--nodes {options.nodes}: a doctor looks at all of them; say how many, as --nodes {most}")
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
    """The file for the scheduler.

    Raises:
        UsageError: something cannot be said in its words.
    """
    if target == "slurm":
        return slurm.render(job, site)
    from esmshard.cluster.scripts import kubernetes

    return kubernetes.render(job, site)


def default_file(job: SchedulerJob, target: Target) -> Path:
    """Where the file is written unless `-o` says so: in the working directory, by the job's name."""
    return Path(slurm.file_name(job.name) + ENDINGS[target])


def not_here(job: SchedulerJob) -> list[str]:
    """What the job reads and this machine does not see. It need not, if the nodes do."""
    return [path for path in job.reads if not Path(path).exists()]


def _nodes(text: str | None) -> tuple[int, int]:
    """Fewest and most of `2` and `1:2`."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"--nodes {text}: a number of nodes is expected, as 2, or a least and a most, as 1:2")
    return int(found[1]), int(found[2] or found[1])


def _gpus(options: Options, site: Site) -> int:
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    if site.gpus_per_node is not None:
        return site.gpus_per_node
    if options.nproc is not None:
        return 0
    raise UsageError(
        "how many GPUs has a node? pass --gpus-per-node N (0 for none), or write gpus_per_node into the site profile"
    )


def _read_by(recipe: Path | None, resolved: Recipe) -> list[str]:
    """What a run reads, but for names of samples and released models."""
    data = resolved.data
    paths = [data.train, data.valid, data.test, data.labels, data.mask, data.clusters, data.table, data.wild_type]
    paths += [resolved.model.name, _absolute(str(recipe)) if recipe else None]
    return [path for path in paths if path is not None and path.startswith("/")]


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100  # links stay what they are


def _in_pods(path: str, site: Site) -> str:
    """Where pods see what is relative to the working directory."""
    here = Path.cwd()
    if not Path(path).is_relative_to(here):
        return path
    return str(PurePosixPath(site.kubernetes.mount) / Path(path).relative_to(here))
