"""Carries out `esmshard finetune --sweep`: train trials, then the best settings with several seeds, tested once."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from esmshard.api.run_options import RunOptions
from esmshard.api.start_run import RunFailed, last_word
from esmshard.errors import InputError, UsageError
from esmshard.launch import preemption, process_environment
from esmshard.progress import say
from esmshard.recipe import recipe_file, sweep_file
from esmshard.recipe.sections import Recipe
from esmshard.train.experiments import sweep_results, trial
from esmshard.train.experiments.repeats import SUMMARY, Repeat, is_done, summarise
from esmshard.train.experiments.search import (
    JOURNAL,
    TRIALS,
    Outcome,
    Search,
    SearchTrial,
    is_sweep,
    optuna,
    trial_directory,
)
from esmshard.train.experiments.sweep_results import SWEEP_FILES, SweptRecipe
from esmshard.train.records import lease

TRIALS_BY_DEFAULT, SEEDS_BY_DEFAULT = 20, 3

MOST_FAILED = 5
"""The number of trials in a row that may fail before any has a value. Then the recipe or the machine is the cause."""


def sweep(recipe: str, overrides: Sequence[str], options: RunOptions) -> Path:
    """Search settings of a recipe, alone or as one of several workers, and test the best ones.

    Arguments and errors are those of `start_run.finetune`.

    Returns:
        The directory of the sweep.
    """
    with preemption.Preemption():
        swept, search, processes = _prepared(recipe, overrides, options)
    if search is None:
        return Path(swept.recipe.out)
    flags = [*options.flags(report=False), *(() if options.resume else ("--resume", "auto"))]
    flags = [flag for flag in flags if flag != "--overwrite"]
    failed = 0
    while True:
        with search.claimed() as one:
            if one is None:
                break
            outcome = _trained(recipe, swept, search, one, processes, options, flags)
            search.tell(one, outcome)
            shutil.rmtree(trial_directory(search.out, one.number) / "checkpoints", ignore_errors=True)
        say(f"trial {one.number} of {search.count}: {outcome.state}: {outcome.message}")
        sweep_results.write(search, swept)
        failed = failed + 1 if outcome.state == "failed" else 0
        if failed == MOST_FAILED and search.best is None:
            raise InputError(
                f"{search.out}: {failed} trials in a row failed, and none has a value; the last one: {outcome.message}"
                "; mend that, then go on with --resume auto"
            )
    if running := [one.number for one in search.trials if one.outcome is None]:
        say(f"no trial is left to begin; others train {len(running)}, and the last one trains the best settings")
        return search.out
    _conclude(recipe, swept, search, processes, options, flags)
    return search.out


def _prepared(recipe: str, overrides: Sequence[str], options: RunOptions) -> tuple[SweptRecipe, Search | None, int]:
    """Check everything before the first trial. For a dry run, print what would be done, and return no search."""
    import torch

    from esmshard.data.splits.variant_records import FOLDS
    from esmshard.launch.process_group import is_launched, own_device
    from esmshard.train.resume import notices
    from esmshard.train.run_inputs import describe, prepare

    if is_launched():
        raise UsageError(
            "--sweep belongs to a single command, which starts the processes of each trial; start it without the "
            "launcher, once on each machine, with --nproc and --resume auto"
        )
    assert options.sweep is not None
    optuna()  # raises if it is missing
    path = recipe_file.resolve(recipe)
    settings = sweep_file.load(Path(options.sweep), path, overrides)
    resolved = recipe_file.load(path, overrides)
    recipe_file.check_companions(path, resolved, overrides)
    if resolved.divides_table and resolved.data.split not in ("mutations", "given"):
        # The other folds are trained and validated on by trials, so that they are no test.
        overrides = [*overrides, f"data.folds={FOLDS}", "data.fold=0"]
        say(f"trials are validated, and the best settings tested, on fold 0 of {FOLDS}: data.folds={FOLDS} data.fold=0")
        resolved = recipe_file.load(path, overrides)
    if options.dry_run and (far := recipe_file.far_inputs(resolved)):
        raise UsageError(f"--dry-run sends nothing over a network, and the sweep reads {', '.join(far)}; copy it first")
    processes = options.nproc or (1 if resolved.adapt.method == "probe" else max(1, torch.cuda.device_count()))
    job = prepare(resolved, processes, processes, own_device(0, processes))
    out = Path(resolved.out)
    check_sweep(out, options)
    by_loss = settings.metric == "loss"
    swept = SweptRecipe(path, tuple(overrides), resolved, job.task.columns[0], job.task.lower_is_better, by_loss)
    count = options.trials or TRIALS_BY_DEFAULT
    if settings.sampler == "grid":
        count = min(options.trials or settings.cells, settings.cells)
    for notice in notices(job):
        say(notice)
    if options.dry_run:
        print(describe(job, processes))
        print(f"trials    {count}, of {', '.join(settings.space)}; by valid {swept.metric}")
        return swept, None, processes
    if options.overwrite:
        remove_sweep(out)
    facts = {"recipe": resolved.model_dump(mode="json", exclude={"out"})}
    return swept, Search(out, settings, facts, count, lower_is_better=swept.lower_is_better), processes


def check_sweep(out: Path, options: RunOptions) -> None:
    """Refuse to write over an earlier run or sweep. Nothing is changed.

    Raises:
        UsageError: if the directory holds something else, or a sweep without `--resume auto` or `--overwrite`.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_sweep(out):
        raise UsageError(f"{out}: exists already, and holds no sweep; choose another directory with out=DIR")
    if not options.resume and not options.overwrite:
        raise UsageError(
            f"{out}: holds a sweep; pass --resume auto to go on or to join its workers, --overwrite to start again, or "
            "out=DIR"
        )
    if options.overwrite:
        for place in (out, *out.glob(f"{TRIALS}/*/claim")):
            if (held := lease.sign(place)) is not None and held.lives is not False:
                raise UsageError(f"{place}: held by {held.holder}; stop it, or choose another directory with out=DIR")


def remove_sweep(out: Path) -> None:
    """Remove the files of a sweep, and nothing else."""
    for name in (JOURNAL, *SWEEP_FILES, SUMMARY, "report.html"):
        (out / name).unlink(missing_ok=True)
    for run in (out / TRIALS, *out.glob("best-*-seed-*")):
        shutil.rmtree(run, ignore_errors=True)


def _trained(
    recipe: str,
    swept: SweptRecipe,
    search: Search,
    one: SearchTrial,
    processes: int,
    options: RunOptions,
    flags: Sequence[str],
) -> Outcome:
    """Train a trial in processes of its own, and return its end.

    Raises:
        RunFailed: if it was asked to stop. The trial goes on when the command is started again.
    """
    from esmshard.launch.local_processes import TO_END, run_local

    run = trial_directory(search.out, one.number)
    own = (*sweep_results.own_settings(one), f"out={run}")
    say(f"trial {one.number} of {search.count}: {sweep_file.shown(one.values)}")
    with process_environment.environment(trial.variables(one.number, search.out)):
        arguments = ["-m", "esmshard", "finetune", recipe, *swept.overrides, *own, *flags]
        code = run_local(arguments, processes, max_restarts=options.max_restarts)
    if code == preemption.Preempted.exit_code or code in {128 + number for number in TO_END}:
        raise RunFailed(last_word(run, code), code)
    return sweep_results.outcome(swept, run, code, own)


def _conclude(
    recipe: str, swept: SweptRecipe, search: Search, processes: int, options: RunOptions, flags: Sequence[str]
) -> None:
    """Train the best settings with several seeds, test each model once, and write the results."""
    from esmshard.launch.local_processes import run_local

    out, best = search.out, search.best
    if best is None:
        messages = [one.outcome.message for one in search.trials if one.outcome]
        sweep_results.write(search, swept, state="failed")
        raise InputError(f"{out}: none of {search.count} trials has a validation value; the last one: {messages[-1]}")
    if (held := lease.watched(out)) is not None and held.lives:
        say(f"{out}: {held.holder} trains the best settings")
        return
    runs = finals(swept.recipe, best, options.seeds or SEEDS_BY_DEFAULT)
    with lease.Lease(out, say):
        sweep_results.write(search, swept, state="training")
        for run in runs:
            if is_done(run.out):
                continue
            say(" ".join(run.overrides))
            code = run_local(
                ["-m", "esmshard", "finetune", recipe, *swept.overrides, *run.overrides, *flags],
                processes,
                max_restarts=options.max_restarts,
            )
            if code:
                raise RunFailed(last_word(run.out, code), code)
        said = sweep_results.honest(swept, runs)
        summary = summarise(out, runs, None)
        found = sweep_results.write(
            search, swept, state="done", importance=search.importance(), runs=[run.name for run in runs], honest=said
        )
    print("\n".join([sweep_results.as_text(found), found["selected"], said, summary]))
    if options.report:
        from esmshard.report.text.html_report import report

        try:
            say(f"report in {report(out)}")
        except InputError as error:
            say(f"no report: {error}")


def finals(recipe: Recipe, best: SearchTrial, seeds: int) -> list[Repeat]:
    """Return the runs of the best settings. Their seeds are new: that of the trials was a part of what was selected."""
    found = []
    for seed in range(recipe.train.seed + 1, recipe.train.seed + 1 + seeds):
        name = f"best-{best.number:03}-seed-{seed}"
        out = Path(recipe.out) / name
        found.append(Repeat(name, out, (*sweep_results.own_settings(best), f"train.seed={seed}", f"out={out}")))
    return found
