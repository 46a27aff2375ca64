"""Commands about a run: fine-tune, plan beforehand, and look at it while it goes on or afterwards."""

import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from esmshard.cli.shared_options import Overwrite, Trust
from esmshard.errors import UsageError

_STARTED = time.time()
"""Seconds since the epoch at which this process began, from which `--stop-after` and goodput count."""


def finetune(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as optim.lr=1e-4.")
    ] = None,
    nproc: Annotated[
        Optional[int], typer.Option(min=1, max=1_024, help="Local processes; all GPUs, or one, by default.")
    ] = None,
    resume: Annotated[Optional[str], typer.Option(help="auto, never, or the path of a run or checkpoint.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done, and stop.")
    ] = False,
    profile: Annotated[
        int,
        typer.Option(
            min=0, max=1_000_000, metavar="N", help="Record N steps with torch's profiler, and say where time goes."
        ),
    ] = 0,
    stop_after: Annotated[
        Optional[str], typer.Option(metavar="TIME", help="Save and leave with exit code 75 after so long, as 3h50m.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000,
            metavar="N",
            help="Start all processes again, up to N times, when one was lost.",
        ),
    ] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=1_000, metavar="N", help="Train N times, from as many seeds.")] = 1,
    folds: Annotated[
        Optional[int],
        typer.Option(
            min=3,
            max=10_000,
            metavar="K",
            help="Cross-validate: K runs, each tested on another part of data.train; of variants 5 by default.",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Draw report.html at the end; esmshard report does it later.")
    ] = True,
    trust: Trust = False,
) -> None:
    """Fine-tune a model as a recipe says: train, consolidate, evaluate."""
    from esmshard.api import start_run
    from esmshard.api.run_options import RunOptions
    from esmshard.launch import launchers

    launchers.join()
    try:
        options = RunOptions(
            nproc=nproc,
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            profile=profile,
            stop_after=stop_after,
            max_restarts=max_restarts,
            seeds=seeds,
            folds=folds,
            report=page,
            trust=trust,
            started=_STARTED,
        )
        start_run.finetune(recipe, overrides or [], options)
    except start_run.RunFailed as failed:  # the processes have printed the reason
        raise SystemExit(failed.exit_code) from None


def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (esmshard recipes ls).")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as optim.lr=1e-4.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="GPUs of one machine, as 8xA100-40GB.")] = "",
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    network: Annotated[float, typer.Option(metavar="GBIT", help="Gbit/s of each GPU between machines.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and seconds for programs.")] = False,
) -> None:
    """Say what a recipe needs on given GPUs, and which strategy to choose. Needs no GPU and reads no weights."""
    import json

    from esmshard.planner import machines
    from esmshard.recipe import recipe_file

    if not gpus:
        raise UsageError(f"--gpus: say for which GPUs, as 8xA100-40GB; known are {', '.join(machines.GPUS)}")
    there = machines.parse(gpus, nodes, network)
    resolved = recipe_file.load(recipe_file.resolve(recipe), overrides or [])

    from esmshard.planner import recipe_plan

    found = recipe_plan.plan(resolved, there)
    print(json.dumps(recipe_plan.as_json(found), indent=1) if as_json else recipe_plan.as_text(found))


def status(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, or of several: folds, seeds, a table's runs.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything for programs.")] = False,
) -> None:
    """Say how a run stands, and whether it lives. Exit code 0 done, 3 running, 75 preempted, 1 failed, 2 no run."""
    from esmshard.train.records import standing

    found = standing.standings(run)
    print(standing.as_json(found) if as_json else standing.as_text(found))
    if code := standing.exit_code(found):
        raise SystemExit(code)


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, done or not, or of a table's cross-validation.")
    ],
    out: Annotated[
        Optional[Path], typer.Option("-o", "--out", help="File to write; RUN/report.html by default.")
    ] = None,
) -> None:
    """Write one HTML page about a run: curves, metrics beside baselines, predictions, speed, memory, time."""
    from esmshard.report.text import html_report

    print(html_report.report(run, out))
