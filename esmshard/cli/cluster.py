"""The commands about machines: `launch` submits jobs to a scheduler, `doctor` checks machines, `app` serves a page."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

from esmshard.cli.options import AsJson, Overrides, Overwrite, recipes
from esmshard.errors import UsageError
from esmshard.progress import say


def launch(
    ctx: Context,
    what: Annotated[
        str,
        Argument(metavar="RECIPE", help="A recipe file or shipped recipe; or embed or doctor.", autocompletion=recipes),
    ],
    arguments: Overrides = None,
    *,
    target: Annotated[Literal["slurm", "kubernetes"], Option(help="The scheduler.")],
    nodes: Annotated[
        str | None, Option(metavar="N|MIN:MAX", help="Machines (1). With 1:2, a run continues if it loses one.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, Option(min=0, max=1_024, metavar="N", help="GPUs of each machine; by default the site profile's.")
    ] = None,
    nproc: Annotated[
        int | None, Option(min=1, max=1_024, help="Processes of each machine; by default one for each GPU, or one.")
    ] = None,
    time_limit: Annotated[str | None, Option("--time", metavar="TIME", help="Slurm time limit, as 24:00:00.")] = None,
    array: Annotated[int | None, Option(min=1, max=1_000_000, metavar="N", help="Number of workers of embed.")] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="Name of the job; by default the recipe's name.")] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="File to write; by default NAME.sbatch or NAME.job.yaml.")
    ] = None,
    template: Annotated[Path | None, Option(metavar="FILE", help="Your own Jinja2 template of the file.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the job file without writing it.")] = False,
) -> None:
    """Write a job file that runs a recipe, or workers of embed, on a cluster. Submit it if this machine has sbatch or
    kubectl. Type the arguments of embed after --.
    """
    from esmshard.cluster import launch as jobs
    from esmshard.cluster import site as sites
    from esmshard.progress import say

    options = jobs.Options(
        target=target, nodes=nodes, gpus_per_node=gpus_per_node, nproc=nproc, time=time_limit, array=array, name=name
    )
    site = sites.load()
    if site.python is None:
        site = site.model_copy(update={"python": sys.executable})
    given = arguments or []
    if what == "embed":
        # The parser of `embed` checks the arguments now, before the job waits in the queue.
        assert ctx.parent is not None
        parser = ctx.parent.command.get_command(ctx.parent, "embed")  # type: ignore[attr-defined]
        with parser.make_context("embed", list(given), parent=ctx.parent) as parsed:
            job = jobs.embed_job(given, parsed.params, options, site)
    elif what == "doctor":
        job = jobs.doctor_job(given, options, site)
    else:
        job = jobs.finetune_job(what, given, options, site)
    text = jobs.render(job, site, target, template)
    missing = "" if sites.path().is_file() else " does not exist; all keys have their defaults"
    say(f"site profile: {sites.path()}{missing}")
    for path in job.reads if target == "slurm" else ():
        if not Path(path).exists():
            say(f"{path}: does not exist on this machine; make sure that it exists on the nodes")
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
        Path | None, Option(metavar="DIR", help="Directory of runs; by default `out` of the recipe, or `.`")
    ] = None,
) -> None:
    """Check this machine (versions, GPUs, disks, network) and, if given, a recipe. Print problems and solutions."""
    from esmshard.cluster import doctor as checks
    from esmshard.parallel import launch

    if nproc is None:
        os.environ.update(launch.variables())
    if code := checks.run(recipe, overrides or (), nproc, out, as_json):
        raise SystemExit(code)


def app(
    directory: Annotated[Path, Argument(help="The directory for the files of the page.")] = Path(),
    host: Annotated[str, Option(help="The address to listen on. Other machines than this one need --password.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Option(min=0, max=65_535, help="The port to listen on; 0 for any that is free.")] = 8050,
    password: Annotated[
        str | None, Option(envvar="ESMSHARD_PASSWORD", help="A password, in place of the token in the address.")
    ] = None,
    limit: Annotated[float, Option(min=0.001, metavar="GB", help="The largest upload.")] = 2.0,
) -> None:
    """Serve a page for a browser: rank variants, predict contacts and labels, embed, score and plan."""
    try:
        from esmshard.app.server import serve
    except ImportError as error:
        raise UsageError(f"esmshard app needs {error.name}; pip install 'esmshard[app]'") from None

    def show(address: str) -> None:
        print(address, flush=True)
        say("open this address in a browser; Ctrl-C ends the page and stops the running job")

    serve(directory, host, port, password, int(limit * 1e9), show)
