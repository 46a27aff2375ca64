"""What `esmshard finetune` does beyond its options: check, start processes, sum up repeats, draw.

The command line (`esmshard.cli.app`) and Python (`esmshard.api.runs`) both come here. Nothing is left behind in the
process: environment variables and signal handlers are afterwards as they were.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from esmshard.api.run_options import RunOptions
from esmshard.errors import InputError, UsageError
from esmshard.launch import launchers, preemption, process_environment
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

if TYPE_CHECKING:
    from esmshard.train.experiments.repeats import Repeat


class RunFailed(RuntimeError):
    """Processes that were started for a run ended before it was done; on stderr they have said why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Of the process whose failure was the cause, as `parallel.local_processes.run_local` gives it."""


def finetune(recipe: str, overrides: Sequence[str], options: RunOptions) -> Path:
    """Train, consolidate and evaluate as a recipe says, here, in local processes, or as one of a launcher's ranks.

    Args:
        recipe: a file, or the name of a shipped one.
        overrides: of the recipe, as `optim.lr=1e-4`.
        options: how to run it.

    Returns:
        The directory of the run, or of the runs where there are several.

    Raises:
        InputError: for a mistake in recipe or data; UsageError for one in the options.
        RunFailed: processes that were started have failed.
        Preempted: this process was asked to stop, and has saved.
    """
    limit = options.stop_after
    until = {} if limit is None else {preemption.STOP_AT: str(time.time() + preemption.seconds(limit))}
    with process_environment.environment({**until, **launchers.variables()}):
        with preemption.Preemption():
            process_environment.follow_launcher()
            resolved = recipe_file.load(recipe_file.resolve(recipe), overrides)
            recipe_file.check_companions(recipe_file.resolve(recipe), resolved, overrides, options.folds)

            from esmshard.launch.process_group import is_launched

            if is_launched():
                _run_here(resolved, _as_rank(resolved, options))
                return Path(resolved.out)
            runs = _checked(recipe, resolved, overrides, options)
            if options.dry_run:
                return Path(resolved.out)
            if runs.processes == 1 and not options.max_restarts and not runs.several:
                _run_here(resolved, options)
                return Path(resolved.out)
        _run_in_processes(recipe, overrides, options, runs)  # outside: signals are for the processes now
        if runs.several:
            _conclude(resolved, options, runs)
    return Path(resolved.out)


@dataclass(frozen=True)
class _Runs:
    """The runs that one command makes."""

    processes: int
    """Of each run."""
    folds: int | None
    """Of a cross-validation."""
    several: "list[Repeat]"
    """Over seeds and folds; empty where there is a single run."""
    curve: "list[Repeat]"
    """Of a table of variants, with parts of the training variants."""
    to_do: list[tuple[str, ...]]
    """Overrides of each run that is not done yet."""
    of_table: bool
    """The test sets of a table of variants are to be put together at the end."""


def _as_rank(recipe: Recipe, options: RunOptions) -> RunOptions:
    """The options of one rank, which a launcher has started.

    Raises:
        UsageError: an option is for the command that starts the ranks.
    """
    if recipe.divides_table and recipe.data.split not in ("mutations", "given"):
        raise UsageError(
            "a launcher has started this process, which trains one fold; set data.folds=5 and data.fold, or start the "
            "cross-validation with a single command and --nproc"
        )
    if options.of_a_single_command:
        raise UsageError(
            "--nproc, --max-restarts, --seeds, --folds and --dry-run belong to a single command; a launcher has "
            "started this process already: remove them, or start the command without the launcher"
        )
    if options.stop_after is not None and process_environment.restarts_allowed():
        raise UsageError(
            "--stop-after would count anew when the launcher starts this process again; for the launcher, set "
            f"{preemption.STOP_AT}=$(($(date +%s) + {preemption.seconds(options.stop_after)})) instead"
        )
    if process_environment.attempt() and options.resume is None:
        from esmshard.train.records.status import begun_by_this_launch

        # Started again: what it has done so far must not be lost. But what --overwrite is to remove, and did not come
        # to, is not what it has done.
        if not options.overwrite or begun_by_this_launch(Path(recipe.out)):
            return replace(options, resume="auto", overwrite=False)
    return options


def _checked(recipe: str, resolved: Recipe, overrides: Sequence[str], options: RunOptions) -> _Runs:
    """Check everything that can be checked before a process is started; of a dry run, print what would be done."""
    import torch

    from esmshard.data.splits.recipe_splits import in_tokens
    from esmshard.data.splits.variant_records import FOLDS
    from esmshard.launch.process_group import own_device
    from esmshard.train.experiments.cross_validation import curve_runs
    from esmshard.train.experiments.repeats import is_done, repeats
    from esmshard.train.resume import check_start, notices
    from esmshard.train.run_inputs import check_out, describe, prepare

    of_table, probe = resolved.divides_table, resolved.adapt.method == "probe"
    processes = options.nproc or (1 if probe else max(1, torch.cuda.device_count()))
    folds = options.folds
    if of_table and resolved.data.split not in ("mutations", "given"):
        folds = folds or FOLDS
    several = repeats(resolved, options.seeds, folds) if options.seeds > 1 or folds or of_table else []
    # Of a table, the first set is learned from in parts as well, for a learning curve.
    curve = curve_runs(resolved, several[0]) if of_table and not probe else []
    if several and options.resume not in (None, "auto"):
        raise UsageError("--seeds and --folds go on with --resume auto; a path is that of one run")
    to_do: list[tuple[str, ...]] = [()]
    if several:
        to_do = [run.overrides for run in [*several, *curve] if options.resume != "auto" or not is_done(run.out)]
    for n, own in enumerate(to_do or [several[-1].overrides]):
        one = recipe_file.load(recipe_file.resolve(recipe), [*overrides, *own])
        check_out(Path(one.out), options.resume, options.overwrite)
        if n == 0:
            job = prepare(one, processes, processes, own_device(0, processes))
        if options.dry_run:
            here = replace(job, recipe=in_tokens(one, job.train), out=Path(one.out))
            check_start(here, options.resume, options.trust)
    if options.dry_run:
        for notice in notices(job):
            say(notice)
        print(describe(job, processes) + (f"\nruns      {len(to_do)}" if several else ""))
    return _Runs(processes, folds, several, curve, to_do, of_table)


def _run_here(recipe: Recipe, options: RunOptions) -> None:
    """Train in this process, alone or as one of several ranks."""
    from esmshard.train import finetune as training

    resume, overwrite, trust = options.resume, options.overwrite, options.trust
    run = training.run(recipe, resume, overwrite, options.profile, trust=trust, started=options.started)
    if run is not None and options.report:
        _pictures(run, recipe)


def _run_in_processes(recipe: str, overrides: Sequence[str], options: RunOptions, runs: _Runs) -> None:
    """One run after the other, each in processes of its own. `RunFailed` if they fail."""
    from esmshard.launch.local_processes import run_local
    from esmshard.train.resume import NOTICES_PRINTED

    flags = options.flags(report=options.report and not runs.of_table)
    for n, own in enumerate(runs.to_do):
        if runs.several:
            say(" ".join(own))
        with process_environment.environment({NOTICES_PRINTED: "1"} if runs.several and n and runs.of_table else {}):
            arguments = ["-m", "esmshard", "finetune", recipe, *overrides, *own, *flags]
            code = run_local(arguments, runs.processes, max_restarts=options.max_restarts)
        if code:
            one = recipe_file.load(recipe_file.resolve(recipe), [*overrides, *own])
            raise RunFailed(_last_word(Path(one.out), code), code)


def _conclude(recipe: Recipe, options: RunOptions, runs: _Runs) -> None:
    """What several runs say together; of a table of variants, also all single substitutions in their order."""
    from esmshard.train.experiments.cross_validation import conclude
    from esmshard.train.experiments.repeats import summarise

    out = Path(recipe.out)
    summary = summarise(out, runs.several, runs.folds)
    print(conclude(recipe, runs.several, runs.curve) if runs.of_table else summary)
    if runs.of_table:
        from esmshard.predict.variant_ranking import predict as rank

        count = rank(str(out), None, out / "ranked.csv", overwrite=True)
        say(f"all {count:,} single substitutions, best first, in {out / 'ranked.csv'}")
        if options.report:
            _pictures(out, recipe)


def _last_word(out: Path, code: int) -> str:
    """Why a run whose processes ended with an exit code is not done; `status.json` says so, or is made to."""
    from esmshard.train.records import status

    if code != preemption.Preempted.exit_code:
        status.mark_failed(out, "the processes were ended from outside; go on with --resume auto", code)
    try:
        found = status.read(out)
    except InputError as damaged:
        return str(damaged)
    if found is None or found["exit_code"] != code:  # they ended before they had the run's directory
        return f"{out}: its processes ended with exit code {code}, and have said why on stderr"
    return f"{out}: {found['state']} (exit code {code}): {found['message']}"


def _pictures(run: Path, resolved: Recipe) -> None:
    """Figure and report of a run, as far as what they need is installed."""
    from esmshard.data.splits.recipe_splits import open_split
    from esmshard.report.draw.plots import contact_figure
    from esmshard.report.text.html_report import report as write
    from esmshard.tasks.registry import new_task

    try:
        if resolved.task.predicts_contacts:
            labels = new_task(resolved.task, {}).labels
            say(f"figure in {contact_figure(run, open_split(resolved, 'test', labels))}")
        say(f"report in {write(run)}")
    except InputError as error:
        say(f"no figures: {error}")
