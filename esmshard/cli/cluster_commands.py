"""Commands for clusters: a scheduler's job, the checks of a machine, and installation without internet."""

import sys
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from esmshard.cli.shared_options import AsJson, Overrides, Overwrite, SweepFile, SweepTrials


def launch(
    ctx: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe file, the name of a shipped recipe, or one of the commands embed, doctor."
        ),
    ],
    arguments: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides such as optim.lr=1e-4; for embed, its own arguments after --."
        ),
    ] = None,
    *,
    target: Annotated[Literal["slurm", "kubernetes"], typer.Option(help="The scheduler.")],
    nodes: Annotated[
        Optional[str],
        typer.Option(
            metavar="N|MIN:MAX", help="Number of machines, by default 1. With 1:2, the run continues on fewer machines."
        ),
    ] = None,
    gpus_per_node: Annotated[
        Optional[int],
        typer.Option(min=0, max=1_024, metavar="N", help="GPUs of each machine; by default as in the site profile."),
    ] = None,
    nproc: Annotated[
        Optional[int],
        typer.Option(min=1, max=1_024, help="Processes of each machine; by default one for each GPU, or one."),
    ] = None,
    time_limit: Annotated[
        Optional[str],
        typer.Option(
            "--time", metavar="TIME", help="Time limit for Slurm, such as 24:00:00; by default as in the site profile."
        ),
    ] = None,
    array: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            max=1_000_000,
            metavar="N",
            help="Number of workers of embed, each with a GPU, or of --sweep; or number of runs, each with a seed.",
        ),
    ] = None,
    sweep: SweepFile = None,
    trials: SweepTrials = None,
    name: Annotated[Optional[str], typer.Option(help="Name of the job; by default the name of the recipe.")] = None,
    out: Annotated[
        Optional[Path], typer.Option("-o", "--out", help="File to write; by default NAME.sbatch or NAME.job.yaml.")
    ] = None,
    template: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="Jinja2 template of the file, in place of the one that esmshard ships."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file, and stop.")] = False,
) -> None:
    """Run a recipe, or workers of embed, on a cluster: write the scheduler's file, and submit it if possible."""
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
        sweep=sweep,
        trials=trials,
        name=name,
    )
    profile = sites.found()
    site = jobs.merged(sites.load(), options)
    if site.python is None:
        site = site.model_copy(update={"python": sys.executable})
    given = arguments or []
    if what == "embed":
        # The parser of `embed` reads its arguments now, so that a mistake is found now and not in the queue.
        assert ctx.parent is not None
        parser = ctx.parent.command.get_command(ctx.parent, "embed")  # type: ignore[attr-defined]
        with parser.make_context("embed", list(given), parent=ctx.parent) as parsed:
            job = jobs.embed_job(given, parsed.params, options, site)
    elif what == "doctor":
        job = jobs.doctor_job(given, options, site)
    else:
        job = jobs.finetune_job(what, given, options, site)
    text = jobs.render(job, site, target, template)
    say(f"site profile: {profile or f'none at {sites.path()}; all its keys have their defaults'}")
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
    recipe: Annotated[
        Optional[str], typer.Argument(help="A recipe to check as well: its memory, data and weights on this machine.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    nproc: Annotated[
        Optional[int],
        typer.Option(min=1, max=1_024, help="Processes that are connected; by default one for each GPU, or two."),
    ] = None,
    out: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR", help="Directory of runs to check; by default the recipe's out, or the working directory."
        ),
    ] = None,
) -> None:
    """Check this machine (versions, GPUs, disks, collectives) and a recipe on it, and print problems with fixes."""
    from esmshard.cluster import doctor as checks
    from esmshard.parallel import launch

    if nproc is None:
        launch.join()
    if code := checks.run(recipe, overrides or (), nproc, out, as_json):
        raise SystemExit(code)
