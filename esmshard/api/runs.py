"""Start and read runs in Python: `esmshard.finetune` and `esmshard.Run`.

`finetune` and the command `esmshard finetune` call the function `start`. `start` checks the recipe, starts
processes, summarises several runs and draws figures. It restores environment variables and signal handlers at the end.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from esmshard.errors import ExitCode, InputError, RunFailed, UsageError
from esmshard.io.paths import read_json
from esmshard.parallel import launch, preemption
from esmshard.parallel.preemption import Preempted
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe

if TYPE_CHECKING:
    import torch

    from esmshard.api.model import Model
    from esmshard.train.cross_validation import Repeat


class Run:
    """The directory of a run (`out` in the recipe), or of several runs that one call of `finetune` has started. Each
    property reads the files when it is used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError(f"{self.path}: no such directory; give a run's directory, which is `out` in its recipe")

    @property
    def runs(self) -> dict[str, "Run"]:
        """The runs of a cross-validation or of several seeds, by name; empty for a single run or unfinished runs."""
        summary = self._json("summary.json")
        return {} if summary is None else {name: Run(self.path / name) for name in summary["runs"]}

    @property
    def status(self) -> str:
        """The state: `failed`, `running`, `preempted` or `done`. For several runs: `failed` if any has
        failed; otherwise `running` if any is running, and so on.
        """
        from esmshard.train.run_dir import joint_state, standings

        return joint_state(standings(self.path))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: validations (with the key `split`), events (with `event`), optimizer steps."""
        if parts := self.runs:
            raise InputError(f"{self.path}: several runs; use .runs[NAME].metrics, with NAME one of {', '.join(parts)}")
        from esmshard.train.run_dir import METRICS, metrics_of

        if not (self.path / METRICS).is_file():
            raise InputError(f"{self.path / METRICS}: no such file; wait until the run has begun")
        return list(metrics_of(self.path))

    @property
    def evaluation(self) -> dict[str, Any]:
        """The test metrics of model and baselines: `evaluation.json`, or `summary.json` for several runs."""
        evaluation = self._json("summary.json") or self._json("evaluation.json")
        if evaluation is None:
            raise InputError(f"{self.path}: not evaluated yet; wait until finetune has written evaluation.json")
        return evaluation

    def model(self, **options: Any) -> "Model":
        """Open the fine-tuned model of the run. `options` are the options of `esmshard.load`. Raise `InputError` if
        there is no model yet, or if there are several runs; then each of `runs` has a model.
        """
        from esmshard.api.model import load

        if parts := self.runs:
            raise InputError(f"{self.path}: several runs; use .runs[NAME].model(), with NAME one of {', '.join(parts)}")
        path = self.path / "model"
        if not path.is_dir():
            raise InputError(f"{path}: no such model; make it with esmshard consolidate {self.path} -o {path}")
        return load(str(path), **options)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return dict(read_json(path)) if path.is_file() else None


def finetune(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    *,
    nproc: int | None = None,
    device: "str | torch.device | None" = None,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    seeds: int | None = None,
    folds: int | None = None,
    sweep: str | os.PathLike[str] | None = None,
    trials: int | None = None,
    report: bool = True,
    **overrides: Any,
) -> Run:
    """Fine-tune a model by a recipe: train, make the model from the last checkpoint, and evaluate it.

    This is the command `esmshard finetune` in Python. A single run with one process is trained in this process. For
    several processes, seeds or folds, new processes are started.

    Args:
        recipe: a file, the name of a shipped recipe (`esmshard recipes ls`), or a dictionary with the sections of a
            recipe. Relative paths in a dictionary are relative to the working directory.
        nproc: the number of processes; by default one for each GPU, or one if there is no GPU.
        device: the device of each process: `cpu`, `cuda` (one GPU for each process), `cuda:N` or `mps`; by default one
            GPU for each process, or the CPU if there is no GPU.
        resume: `auto` continues from the newest checkpoint in `out`, if there is one. The path of a checkpoint
            continues from this checkpoint, and the path of another run from the newest checkpoint of that run.
        overwrite: replace the files of an earlier run in `out`.
        seeds: the number of runs with different seeds; 1 by default, and 3 for the best settings of a sweep.
        folds: the number of folds of a cross-validation; 5 by default for a table of variants.
        sweep: a file with settings to search (docs/sweep.md). The result is the run with the best settings.
        trials: the number of trials of a sweep; by default 20, or for a grid all combinations.
        report: draw figures and report.html at the end, if matplotlib is installed.
        **overrides: settings of the recipe, such as `train={"steps": 10}` or `**{"optim.lr": 1e-4}`. Relative paths are
            relative to the working directory.

    Raises:
        InputError: the recipe, the data or the options have a mistake.
        RunFailed: a process that this function started has failed.
        Preempted: this process got SIGTERM or SIGUSR1. The work is saved, and `resume="auto"` continues it.
            `except Exception` does not catch `Preempted`.
    """
    for name, number, least in (("nproc", nproc, 1), ("seeds", seeds, 1), ("folds", folds, 3), ("trials", trials, 1)):
        if number is not None and not (isinstance(number, int | np.integer) and number >= least):
            raise UsageError(f"{name} is {number!r}; a whole number of at least {least} is expected")
    given = keys(overrides)
    if isinstance(recipe, Mapping):
        given = [*keys(recipe), *given]
    with _file_of(recipe) as file:
        try:
            options = RunOptions(
                nproc=nproc,
                device=None if device is None else str(device),
                resume=None if resume is None else os.fspath(resume),
                overwrite=overwrite,
                seeds=seeds,
                folds=folds,
                sweep=None if sweep is None else os.fspath(sweep),
                trials=trials,
                report=report,
                started=time.time(),
            )
            out = start(file, given, options)
        except RunFailed as failed:
            if failed.exit_code == ExitCode.REQUEUE:
                raise Preempted(str(failed)) from None
            if failed.exit_code == ExitCode.INTERRUPTED:
                raise KeyboardInterrupt(str(failed)) from None
            raise
    return Run(out)


def keys(overrides: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Convert overrides to the form `KEY=VALUE` of the command line. Nested mappings become keys with dots. Values
    become JSON, which is valid YAML.

    >>> keys({"adapt": {"method": "lora", "lora": {"rank": 4}}, "adapt.freeze": ["embedding"], "data.labels": None})
    ['adapt.method="lora"', 'adapt.lora.rank=4', 'adapt.freeze=["embedding"]', 'data.labels=null']
    """
    settings = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            settings += keys(value, f"{prefix}{key}.")
            continue
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
        except (TypeError, ValueError):
            raise UsageError(
                f"{prefix}{key} is {value!r}; a text, number, list or dictionary is expected, or None"
            ) from None
        settings.append(f"{prefix}{key}={text}")
    return settings


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else os.fspath(value)


@contextmanager
def _file_of(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[str]:
    """Yield the name or path of a recipe. For a dictionary this is the path of a temporary empty recipe, because new
    processes read a file. The caller converts the dictionary to overrides of this recipe.
    """
    if not isinstance(recipe, Mapping):
        yield os.fspath(recipe)
        return
    with TemporaryDirectory() as directory:
        file = Path(directory) / "recipe.yaml"
        file.write_text("{}\n", encoding="utf-8")
        yield str(file)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run. For fields without a text see `esmshard.finetune`. Options that contradict each other are
    a `UsageError`.
    """

    nproc: int | None = None
    device: str | None = None
    resume: str | None = None
    overwrite: bool = False
    dry_run: bool = False
    """Whether to check everything and print the plan, without a run."""
    profile: int = 0
    """The number of steps to record with torch's profiler."""
    stop_after: str | None = None
    """The time, such as `3h50m`, after which the run saves a checkpoint and ends with exit code 75."""
    max_restarts: int = 0
    """The maximum number of times that all local processes are started again after one was killed or has crashed."""
    seeds: int | None = None
    folds: int | None = None
    sweep: str | None = None
    trials: int | None = None
    report: bool = True
    take_over: bool = False
    """Whether to continue in the directory of a run that ended on another machine and left its lock."""
    started: float | None = None
    """The time when the command started, in seconds since 1970; None means now."""

    def __post_init__(self) -> None:
        if self.resume == "never":
            object.__setattr__(self, "resume", None)
        if self.resume and self.overwrite:
            raise UsageError("--resume continues a run, and --overwrite removes it; pass one of the two")
        if self.max_restarts and self.resume not in (None, "auto"):
            raise UsageError("--max-restarts continues from the run's newest checkpoint; pass --resume auto")
        if self.trials is not None and self.sweep is None:
            raise UsageError("--trials counts the trials of a sweep; pass --sweep FILE, too, or leave --trials out")
        if self.sweep is not None and (
            self.overwrite or self.folds or self.profile or self.resume not in (None, "auto")
        ):
            raise UsageError(
                "--sweep does not go with --folds (trials would train on the test sets), --profile, --overwrite and "
                "--resume PATH; leave them out. To start again, pass out=DIR; to continue, pass --resume auto"
            )

    def flags(self, *, report: bool) -> list[str]:
        """Return the arguments for `esmshard finetune` in new processes. `report`: whether they draw the report."""
        flags = ["--device", self.device] if self.device else []
        flags += ["--resume", self.resume] if self.resume else []
        flags += ["--overwrite"] if self.overwrite else []
        flags += ["--profile", str(self.profile)] if self.profile else []
        flags += ["--take-over"] if self.take_over else []
        return flags if report else [*flags, "--no-report"]


def start(recipe: str, overrides: Sequence[str], options: RunOptions) -> Path:
    """Train, consolidate and evaluate, in this process or in new local processes. If a launcher such as torchrun has
    started this process, it is one rank of the run. `overrides` replace settings of the recipe (`optim.lr=1e-4`).

    For errors see `finetune`. Return the directory of the run; several runs have subdirectories of this directory. For
    a sweep, return the run with the best settings, or the sweep's directory if another worker trains that run.
    """
    limit = options.stop_after
    until = {} if limit is None else {preemption.STOP_AT: str(time.time() + preemption.seconds(limit))}
    variables = {**until, **_allocator(), **launch.variables()}
    with launch.environment(variables):
        if options.sweep is not None:
            return _sweep(recipe, overrides, options)
        with preemption.Preemption():
            launch.follow_launcher()
            resolved = recipe_file.load(recipe_file.resolve(recipe), overrides)

            from esmshard.parallel.process_group import is_launched

            if is_launched():
                _run_here(resolved, _as_rank(resolved, options))
                return Path(resolved.out)
            _check_dry_run(resolved, options)

            from esmshard.train.cross_validation import curve_runs, repeats
            from esmshard.train.inputs import NOTICES_PRINTED
            from esmshard.train.run_dir import last_word

            processes, of_table = _devices(resolved, options)[0], resolved.divides_table
            runs = repeats(resolved, options.seeds or 1, options.folds)
            curve = curve_runs(resolved, runs)
            to_do = _checked(recipe, resolved, overrides, options, [*runs, *curve])
            if options.dry_run:
                return Path(resolved.out)
            if processes == 1 and not options.max_restarts:
                # All runs in this process: packages are imported once, and outputs of the frozen model are kept.
                of_run = replace(options, report=options.report and not of_table)
                for n, run in enumerate(to_do):
                    if run.overrides:
                        say(" ".join(run.overrides))
                    with launch.environment({NOTICES_PRINTED: "1"} if n else {}):
                        _run_here(recipe_file.load(recipe_file.resolve(recipe), [*overrides, *run.overrides]), of_run)
                    of_run = replace(of_run, started=None)
                to_do = []
        flags = options.flags(report=options.report and not of_table)
        for n, run in enumerate(to_do):  # `launch.run_local` handles signals.
            if run.overrides:
                say(" ".join(run.overrides))
            with launch.environment({NOTICES_PRINTED: "1"} if n else {}):
                arguments = ["-m", "esmshard", "finetune", recipe, *overrides, *run.overrides, *flags]
                code = launch.run_local(arguments, processes, max_restarts=options.max_restarts)
            if code:
                raise RunFailed(last_word(run.out, code), code)
        if runs:
            _conclude(resolved, options, runs, curve)
    return Path(resolved.out)


def _devices(recipe: Recipe, options: RunOptions) -> "tuple[int, torch.device]":
    """Return the number of local processes of a run, and the device of the first process."""
    from esmshard.devices import chosen_device
    from esmshard.parallel.process_group import own_device, processes_of

    # `task.head: auto` also fits a head, which one process does.
    default = 1 if recipe.adapt.method == "probe" or getattr(recipe.task, "head", "") == "auto" else None
    processes = processes_of(chosen_device(options.device), options.nproc or default)
    return processes, own_device(0, processes, options.device)


def _sweep(recipe: str, overrides: Sequence[str], options: RunOptions) -> Path:
    """Search settings of a recipe, as the only worker or with other workers (docs/sweep.md). After the last trial, one
    worker trains models with the best settings and several seeds, and tests each model once. A dry run prints the plan.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UsageError("--sweep needs optuna; pip install 'esmshard[sweep]'") from None
    from filelock import FileLock, Timeout

    from esmshard.data.splits.variant_records import FOLDS
    from esmshard.parallel.process_group import is_launched
    from esmshard.recipe import sweep_file
    from esmshard.train.inputs import describe, notices, prepare
    from esmshard.train.search import BEST, BEST_LOCK, TRIALS_BY_DEFAULT, Search

    assert options.sweep is not None
    if is_launched():
        raise UsageError(
            "--sweep: the command starts the processes of each trial itself; start it without the launcher, once on "
            "each machine, with --nproc and --resume auto"
        )
    with preemption.Preemption():
        path = recipe_file.resolve(recipe)
        settings = sweep_file.load(Path(options.sweep), path, overrides)
        resolved = recipe_file.load(path, overrides)
        if resolved.divides_table and resolved.data.split not in ("mutations", "given"):
            # Trials train and validate on the other folds, so only one fold can be the test set.
            column = resolved.data.folds is not None
            overrides = [*overrides, *([] if column else [f"data.folds={FOLDS}"]), "data.fold=0"]
            say(f"fold 0 of {resolved.data.folds or FOLDS} validates trials and tests the best settings: data.fold=0")
            resolved = recipe_file.load(path, overrides)
        _check_dry_run(resolved, options)
        processes, device = _devices(resolved, options)
        job = prepare(resolved, processes, processes, device)
        count = options.trials or TRIALS_BY_DEFAULT
        if settings.sampler == "grid":
            count = min(options.trials or settings.cells, settings.cells)
        search = Search(
            name=recipe,
            overrides=overrides,
            recipe=resolved,
            settings=settings,
            task=job.task,
            processes=processes,
            count=count,
            flags=replace(options, resume="auto").flags(report=False),
            max_restarts=options.max_restarts,
        )
        search.check_directory(goes_on=options.resume is not None)
        for notice in notices(job):
            say(notice)
        if options.dry_run:
            print(describe(job, processes))
            print(f"trials    {count}, of {', '.join(settings.space)}; by valid {search.metric}")
            return search.out
        is_last = search.work()
    if not is_last:
        return search.out
    # `stop_after=None` keeps the time limit of this command, which is in an environment variable. No new limit begins.
    best = replace(options, sweep=None, trials=None, seeds=options.seeds or 3, resume="auto", stop_after=None)
    try:
        with FileLock(search.out / BEST_LOCK, timeout=0):
            out = start(str(search.out / BEST), [], best)
            search.finish()
    except Timeout:
        say(f"{search.out}: another worker trains the best settings")
        return search.out
    if options.report:
        _report(search.out)
    return out


def _check_dry_run(recipe: Recipe, options: RunOptions) -> None:
    from esmshard.model import weights

    name = recipe.model.name
    if options.dry_run and weights.is_far(name):
        raise UsageError(f"--dry-run needs the model and downloads nothing; run esmshard download {name} first")


def _as_rank(recipe: Recipe, options: RunOptions) -> RunOptions:
    """Return the options of one rank that a launcher has started. Raise `UsageError` for options such as `--nproc`."""
    if recipe.divides_table and recipe.data.split not in ("mutations", "given"):
        raise UsageError(
            "a launcher has started this process, so it can train only one fold; pass data.fold=0 or another fold (and "
            "data.folds=5, unless the table has a column of folds), or start the cross-validation without the launcher "
            "and with --nproc"
        )
    several = (options.seeds or 1) > 1 or options.folds
    if options.nproc or options.dry_run or options.max_restarts or several:
        raise UsageError(
            "--nproc, --max-restarts, --seeds, --folds and --dry-run are for a command without a launcher, and a "
            "launcher has started this process; remove them, or start the command without the launcher"
        )
    if options.stop_after is not None and launch.restarts_allowed():
        raise UsageError(
            "--stop-after would begin again from zero when the launcher restarts this process; set "
            f"{preemption.STOP_AT}=$(($(date +%s) + {preemption.seconds(options.stop_after)})) for the launcher instead"
        )
    if launch.attempt() and options.resume is None:
        from esmshard.train.run_dir import begun_by_this_job

        # The launcher has restarted this process, which continues its own work. But if the first attempt ended before
        # --overwrite had removed the files of an earlier run, these files are not its work.
        if not options.overwrite or begun_by_this_job(Path(recipe.out)):
            return replace(options, resume="auto", overwrite=False)
    return options


def _checked(
    recipe: str, resolved: Recipe, overrides: Sequence[str], options: RunOptions, runs: "Sequence[Repeat]"
) -> "list[Repeat]":
    """Check as much as possible before processes start, and return the unfinished runs. A dry run prints the plan."""
    from esmshard.data.splits.recipe_splits import in_tokens
    from esmshard.train import cross_validation
    from esmshard.train.inputs import check_out, describe, notices, prepare
    from esmshard.train.resume import check_start

    to_do = [*runs] or [cross_validation.Repeat(Path(resolved.out))]
    if runs:
        if options.resume not in (None, "auto"):
            raise UsageError("--seeds and --folds make several runs, and --resume PATH names one; pass --resume auto")
        cross_validation.check_out(Path(resolved.out))
        if options.resume == "auto":
            to_do = [run for run in runs if not cross_validation.is_done(run.out, resolved.train.steps)]
    for n, run in enumerate(to_do or runs[-1:]):
        of_run = recipe_file.load(recipe_file.resolve(recipe), [*overrides, *run.overrides])
        check_out(run.out, options.resume, options.overwrite)
        if n == 0:
            processes, device = _devices(resolved, options)
            job = prepare(of_run, processes, processes, device)
        if options.dry_run:
            check_start(replace(job, recipe=in_tokens(of_run, job.train), out=run.out), options.resume)
    if options.dry_run:
        for notice in notices(job):
            say(notice)
        print(describe(job, processes) + (f"\nruns      {len(to_do)}" if runs else ""))
    return to_do


def _allocator() -> dict[str, str]:
    """Return the environment variable that configures torch's GPU allocator for a run; {} if the user has set it.

    By default the allocator cannot use freed segments for the tensors of a slightly larger micro-batch. So a run may
    lack memory although half of the memory is free. With expandable segments, it can use this memory. torch reads
    the variable at its import.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _run_here(recipe: Recipe, options: RunOptions) -> None:
    from esmshard.train import finetune as training

    run = training.run(
        recipe,
        options.resume,
        options.overwrite,
        options.profile,
        take_over=options.take_over,
        started=options.started,
        device=options.device,
    )
    if run is not None and options.report:
        _pictures(run, recipe, options.device)


def _conclude(recipe: Recipe, options: RunOptions, runs: "Sequence[Repeat]", curve: "Sequence[Repeat]") -> None:
    """Print and write the summary of `runs`. For a table of variants, add the learning curve from the runs `curve`, and
    rank all single substitutions.
    """
    from esmshard.train.cross_validation import conclude, summarise

    out = Path(recipe.out)
    summary = summarise(out, runs)
    if not recipe.divides_table:
        print(summary)
        return
    print(conclude(recipe, runs, curve))

    if recipe.data.protein is not None:
        say(f"to rank variants of a protein: esmshard predict {out} --wild-type wt.fasta --all-singles -o ranked.csv")
        if options.report:
            _pictures(out, recipe, options.device)
        return

    from esmshard.predict.variants import rank

    count = rank(str(out), None, out / "ranked.csv", device=options.device, overwrite=True)
    say(f"all {count:,} single substitutions, best first, in {out / 'ranked.csv'}")
    if options.report:
        _pictures(out, recipe, options.device)


def _pictures(run: Path, resolved: Recipe, device: str | None) -> None:
    """Draw the figures and the report of a run, or print why this is not possible."""
    from esmshard.data.splits.recipe_splits import open_split
    from esmshard.report.charts import contact_figures
    from esmshard.tasks.finetuned import tracks_of
    from esmshard.tasks.registry import new_task

    try:
        if resolved.task.predicts_contacts:
            labels = new_task(resolved.task, {}).labels
            test = open_split(resolved, "test", labels, tracks_of(resolved))
            say(f"figures in {contact_figures(run, test, device)[0].parent}")
    except InputError as error:
        say(f"no figures: {error}")
    _report(run)


def _report(out: Path) -> None:
    from esmshard.report.page import report

    try:
        say(f"report in {report(out)}")
    except InputError as error:
        say(f"no report: {error}")
