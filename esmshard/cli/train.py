"""The commands about runs and recipes: `finetune`, `plan`, `status`, `report` and `recipes`."""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from esmshard.cli.options import AsJson, Device, LocalProcesses, Overrides, Overwrite, Recipe, recipes
from esmshard.errors import ExitCode, RunFailed, UsageError

_STARTED = time.time()
"""The time when this process started, in seconds since 1970. Goodput (the useful share of time) counts from here."""


def finetune(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: LocalProcesses = None,
    device: Device = None,
    resume: Annotated[str | None, Option(metavar="auto|never|PATH", help="Continue a run or a checkpoint.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything, print the planned run, and stop.")] = False,
    profile: Annotated[int, Option(min=0, max=1_000_000, metavar="N", help="Profile N steps with torch.")] = 0,
    stop_after: Annotated[
        str | None, Option(metavar="TIME", help="After this time, such as 3h50m, save and stop with exit code 75.")
    ] = None,
    max_restarts: Annotated[
        int, Option(min=0, max=1_000_000, metavar="N", help="Restart all processes up to N times after one is lost.")
    ] = 0,
    seeds: Annotated[int | None, Option(min=1, max=1_000, metavar="N", help="Train with N different seeds.")] = None,
    folds: Annotated[int | None, Option(min=3, max=10_000, metavar="K", help="Cross-validate with K runs.")] = None,
    sweep: Annotated[
        Path | None, Option(metavar="FILE", help="Search for the best values of the keys in FILE.")
    ] = None,
    trials: Annotated[int | None, Option(min=1, max=100_000, metavar="N", help="Trials of --sweep (20).")] = None,
    page: Annotated[bool, Option("--report/--no-report", help="Write report.html at the end.")] = True,
    take_over: Annotated[
        bool, Option("--take-over", help="Use the directory of a run that has ended on another machine.")
    ] = False,
) -> None:
    """Fine-tune a model with a recipe: train, consolidate, evaluate."""
    from esmshard.api import runs
    from esmshard.parallel import launch

    os.environ.update(launch.variables())
    how: dict[str, Any] = {"nproc": nproc, "device": device, "resume": resume, "overwrite": overwrite}
    how |= {"dry_run": dry_run, "profile": profile, "stop_after": stop_after, "max_restarts": max_restarts}
    how |= {"seeds": seeds, "folds": folds, "sweep": None if sweep is None else str(sweep), "trials": trials}
    try:
        options = runs.RunOptions(**how, report=page, take_over=take_over, started=_STARTED)
        runs.start(recipe, overrides or [], options)
    except RunFailed as failed:  # The processes of the run have printed the reason.
        if failed.exit_code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt from None
        raise SystemExit(failed.exit_code) from None


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[str, Option(metavar="NxGPU", help="GPUs of one machine, such as 8xA100-40GB.")] = "",
    nodes: Annotated[int, Option(help="Number of machines.")] = 1,
    network: Annotated[float, Option(metavar="GBIT", help="Network speed of each GPU in Gbit/s.")] = 200,
    memory: Annotated[float | None, Option(metavar="GB", help="Memory of a GPU that plan does not know.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and time of a recipe on given GPUs, and recommend a strategy, without a GPU or weights."""
    from esmshard import planner
    from esmshard.recipe import recipe_file

    if not gpus:
        raise UsageError(f"--gpus is missing; pass, for example, 8xA100-40GB; known GPUs are {', '.join(planner.GPUS)}")
    machines = planner.parse(gpus, nodes, network, memory)
    estimate = planner.plan(recipe_file.load(recipe_file.resolve(recipe), overrides or []), machines)
    print(json.dumps(estimate.as_json(), indent=1) if as_json else estimate.as_text())


def status(
    run: Annotated[Path, Argument(metavar="RUN", help="Directory of a run, or of several runs (folds or seeds).")],
    as_json: AsJson = False,
) -> None:
    """Print the state of a run. Exit code: 0 done, 3 running, 75 preempted, 1 failed, 2 no run."""
    from esmshard.train import run_dir

    runs = run_dir.standings(run)
    state = run_dir.joint_state(runs)
    print(json.dumps({"state": state, "runs": runs}, indent=1) if as_json else run_dir.status_text(runs))
    if code := run_dir.EXIT_CODES[state]:
        raise SystemExit(code)


def report(
    run: Annotated[Path, Argument(metavar="RUN", help="Directory of a run, finished or not, or of several runs.")],
    out: Annotated[Path | None, Option("-o", "--out", help="File to write; by default RUN/report.html.")] = None,
) -> None:
    """Write an HTML page about a run: curves, metrics of model and baselines, predictions, speed, memory and time."""
    from esmshard.report import page

    print(page.report(run, out))


def recipes_ls() -> None:
    """List the shipped recipes."""
    from esmshard.recipe import recipe_file

    for name in recipe_file.names():
        print(f"{name:14} {recipe_file.description(name)}")


def recipes_cp(
    name: Annotated[str, Argument(metavar="NAME", help="A shipped recipe.", autocompletion=recipes)],
    to: Annotated[Path, Argument(help="File to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Copy a shipped recipe to a new file."""
    from esmshard.recipe import recipe_file

    source = recipe_file.resolve(name)
    target = to / source.name if to.is_dir() else to
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists already; choose another name or pass --overwrite")
    target.write_text(recipe_file.copy_of(source), encoding="utf-8")
    print(target)


def recipes_validate(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe, and print it with the values of all keys."""
    from esmshard.recipe import recipe_file

    print(recipe_file.dump(recipe_file.load(recipe_file.resolve(recipe), overrides or [])), end="")


def recipes_schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    from esmshard.recipe import recipe_file

    print(json.dumps(recipe_file.schema(), indent=1))
