"""The commands for clusters: `launch` (a job of a scheduler) and `doctor` (checks of a machine)."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

from esmshard.cli.options import AsJson, Overrides, Overwrite, recipes


def launch(
    ctx: Context,
    what: Annotated[
        str,
        Argument(
            metavar="RECIPE",
            help="A recipe file, or the name of a shipped one; or embed or doctor.",
            autocompletion=recipes,
        ),
    ],
    arguments: Overrides = None,
    *,
    target: Annotated[Literal["slurm", "kubernetes"], Option(help="The scheduler.")],
    nodes: Annotated[
        str | None, Option(metavar="N|MIN:MAX", help="Machines, by default 1. With 1:2, a run goes on with fewer.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        Option(min=0, max=1_024, metavar="N", help="GPUs of a machine; by default those of the site profile."),
    ] = None,
    nproc: Annotated[
        int | None, Option(min=1, max=1_024, help="Processes of a machine; by default one for each GPU, or one.")
    ] = None,
    time_limit: Annotated[
        str | None, Option("--time", metavar="TIME", help="Time limit of Slurm, as 24:00:00; by default the profile's.")
    ] = None,
    array: Annotated[
        int | None,
        Option(min=1, max=1_000_000, metavar="N", help="Workers of embed, which share the output."),
    ] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="Name of the job; by default that of the recipe.")] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="File to write; by default NAME.sbatch or NAME.job.yaml.")
    ] = None,
    template: Annotated[Path | None, Option(metavar="FILE", help="Your own Jinja2 template of the file.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the file, and stop.")] = False,
) -> None:
    """Run a recipe, or workers of embed, on a cluster: write the scheduler's job file, and submit the job if possible.
    The arguments of embed follow after --.
    """
    from esmshard.cluster import launch as jobs
    from esmshard.cluster import site as sites
    from esmshard.progress import say

    options = jobs.Options(
        target=target,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        nproc=nproc,
        time=time_limit,
        array=array,
        name=name,
    )
    site = sites.load()
    if site.python is None:
        site = site.model_copy(update={"python": sys.executable})
    given = arguments or []
    if what == "embed":
        # The parser of `embed` reads the arguments now, so that a mistake is found before the job waits in the queue.
        assert ctx.parent is not None
        parser = ctx.parent.command.get_command(ctx.parent, "embed")  # type: ignore[attr-defined]
        with parser.make_context("embed", list(given), parent=ctx.parent) as parsed:
            job = jobs.embed_job(given, parsed.params, options, site)
    elif what == "doctor":
        job = jobs.doctor_job(given, options, site)
    else:
        job = jobs.finetune_job(what, given, options, site)
    text = jobs.render(job, site, target, template)
    none = "" if sites.path().is_file() else "none at "
    say(f"site profile: {none}{sites.path()}{none and '; all its keys have their defaults'}")
    for path in job.reads if target == "slurm" else ():
        if not Path(path).exists():
            say(f"{path}: is not on this machine; make sure that the nodes have it")
    if dry_run:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        return
    file = out or jobs.default_file(job, target)
    jobs.write(text, file, overwrite, job.reads)
    print(file)
    print(jobs.submit(file, target))


def doctor(
    recipe: Annotated[str | None, Argument(help="A recipe to check as well.", autocompletion=recipes)] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    nproc: Annotated[
        int | None, Option(min=1, max=1_024, help="Processes to connect; by default one for each GPU, or two.")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Directory of runs; by default the recipe's, or the working one.")
    ] = None,
) -> None:
    """Check this machine (versions, GPUs, disks, collectives) and, if given, a recipe. Print problems and solutions."""
    from esmshard.cluster import doctor as checks
    from esmshard.parallel import launch

    if nproc is None:
        os.environ.update(launch.variables())
    if code := checks.run(recipe, overrides or (), nproc, out, as_json):
        raise SystemExit(code)
