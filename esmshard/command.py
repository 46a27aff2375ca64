"""What `esmshard finetune` does beyond its options: check, start processes, sum up repeats, draw.

The command line (`esmshard.cli`) and Python (`esmshard.runs`) both come here. Nothing is left behind in the process:
environment variables and signal handlers are afterwards as they were.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esmshard import recipe as recipes
from esmshard.errors import InputError, UsageError
from esmshard.parallel import nodes as machines
from esmshard.parallel import preemption, worker
from esmshard.progress import say
from esmshard.settings import Recipe


class RunFailed(RuntimeError):
    """Processes that were started for a run ended before it was done; on stderr they have said why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Of the process whose failure was the cause, as `parallel.launch.run_local` gives it."""


def finetune(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    nproc: int | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    profile: int = 0,
    stop_after: str | None = None,
    max_restarts: int = 0,
    nnodes: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    rdzv_conf: str = "",
    local_addr: str | None = None,
    seeds: int = 1,
    folds: int | None = None,
    page: bool = True,
    trust: bool = False,
    started: float | None = None,
) -> Path:
    """Train, consolidate and evaluate as a recipe says, here, in processes of this machine, or of several machines.

    Args:
        recipe: a file, or the name of a shipped one.
        overrides: of the recipe, as `optim.lr=1e-4`.
        nproc: processes; all GPUs, or one, by default. A single one is this process.
        resume: `auto`, `never` (the default), or the path of a run or checkpoint.
        overwrite: replace an earlier run.
        dry_run: check everything, print what would be done, and stop.
        profile: steps to record with torch's profiler.
        stop_after: save and leave after so long, as `3h50m`.
        max_restarts: how often all processes are started again when one was lost, or a machine.
        nnodes: machines, as `2` or `1:2`, on each of which this is called alike.
        rdzv_endpoint: where they meet, `HOST:PORT`; host is one of them.
        rdzv_id: name of the run; the scheduler's job id by default.
        rdzv_conf: times, as in `parallel.nodes.parse`.
        local_addr: of this machine for the others; found by default.
        seeds: train so many times.
        folds: cross-validate; of a table of variants 5 by default.
        page: draw figures and report.html at the end.
        trust: read a checkpoint that another user wrote.
        started: when the command was, in seconds since 1970; now by default.

    Returns:
        The directory of the run, or of the runs where there are several.

    Raises:
        InputError: for a mistake in recipe or data; UsageError for one in the options.
        RunFailed: processes that were started have failed.
        Preempted: this process was asked to stop, and has saved.
    """
    until = {} if stop_after is None else {preemption.STOP_AT: str(time.time() + preemption.seconds(stop_after))}
    resume = None if resume == "never" else resume
    if resume and overwrite:
        raise UsageError("--resume goes on with a run, --overwrite removes it; give one of them")
    if max_restarts and resume not in (None, "auto"):
        raise UsageError("--max-restarts goes on from the newest checkpoint of the run: give --resume auto with it")
    nodes = None
    if nnodes is not None:
        from esmshard.train.lease import job_id

        nodes = machines.parse(nnodes, rdzv_endpoint, rdzv_id or job_id(), local_addr, rdzv_conf)
    elif rdzv_endpoint or rdzv_id or rdzv_conf or local_addr:
        raise UsageError(
            "--rdzv-endpoint, --rdzv-id, --rdzv-conf and --local-addr are for several machines: --nnodes 2"
        )
    with worker.environment(until):
        with preemption.Preemption():
            worker.follow_launcher()
            resolved = recipes.load(recipes.resolve(recipe), overrides)
            recipes.check_companions(recipes.resolve(recipe), resolved, overrides, folds)
            out = Path(resolved.out)

            import torch

            from esmshard.parallel.mesh import is_launched, own_device

            of_table = resolved.task.name == "variant" and resolved.data.folds is None
            processes = nproc or (1 if resolved.adapt.method == "probe" else max(1, torch.cuda.device_count()))
            runs: list[tuple[str, ...]] = [()]  # overrides of each
            if not is_launched():
                from esmshard.data.variant_records import FOLDS
                from esmshard.train.cross_validated import conclude, curve_runs
                from esmshard.train.job import check_out, describe, prepare
                from esmshard.train.repeats import is_done, repeats, summarise
                from esmshard.train.splits import in_tokens
                from esmshard.train.start import check_start, notices

                if of_table and resolved.data.split not in ("mutations", "given"):
                    folds = folds or FOLDS
                several = repeats(resolved, seeds, folds) if seeds > 1 or folds or of_table else []
                # Of a table, the first set is learned from in parts as well, for a learning curve.
                curve = curve_runs(resolved, several[0]) if of_table and resolved.adapt.method != "probe" else []
                if several and nodes is not None:
                    raise UsageError(
                        "--seeds, --folds and cross-validations are for one machine; on several, give each run a job "
                        "of its own, with train.seed=N, or data.folds=K and data.fold=N, and out=DIR"
                    )
                if several and resume not in (None, "auto"):
                    raise UsageError("--seeds and --folds go on with --resume auto; a path is that of one run")
                if several:
                    all_runs = [*several, *curve]
                    runs = [run.overrides for run in all_runs if resume != "auto" or not is_done(run.out)]
                # Every mistake that can be seen is seen here, once, before any process is started.
                for n, options in enumerate(runs or [several[-1].overrides]):
                    one = recipes.load(recipes.resolve(recipe), [*overrides, *options])
                    if dry_run or nodes is None:  # of several machines, one may come when the others have begun
                        check_out(Path(one.out), resume, overwrite)
                    if n == 0:
                        together = processes * (nodes.most if nodes is not None else 1)
                        job = prepare(one, together, processes, own_device(0, processes))
                    if dry_run:
                        check_start(replace(job, recipe=in_tokens(one, job.train), out=Path(one.out)), resume, trust)
                if dry_run:
                    for notice in notices(job):
                        say(notice)
                    print(describe(job, together) + (f"\nruns      {len(runs)}" if several else ""))
                    return out
            elif of_table and resolved.data.split not in ("mutations", "given"):
                raise UsageError(
                    "a launcher has started this process, which trains one fold; set data.folds=5 and data.fold, or "
                    "start the cross-validation with a single command and --nproc"
                )
            elif nproc is not None or dry_run or max_restarts or seeds > 1 or folds or nodes is not None:
                raise UsageError(
                    "--nproc, --max-restarts, --seeds, --folds, --dry-run and --nnodes belong to a single command; a "
                    "launcher has started this process already"
                )
            elif stop_after is not None and worker.restarts_allowed():
                raise UsageError(
                    "--stop-after would count anew when the launcher starts this process again; for the launcher, set "
                    f"{preemption.STOP_AT}=$(($(date +%s) + {preemption.seconds(stop_after)})) instead"
                )
            elif worker.attempt() and resume is None:
                from esmshard.train.status import begun_by_this_launch

                # Started again: what it has done so far must not be lost. But what --overwrite is to remove, and did
                # not come to, is not what it has done.
                if not overwrite or begun_by_this_launch(out):
                    resume, overwrite = "auto", False
            if is_launched() or (processes == 1 and not max_restarts and not several and nodes is None):
                from esmshard.train import finetune as training

                run = training.run(resolved, resume, overwrite, profile, trust=trust, started=started)
                if run is not None and page:
                    _pictures(run, resolved)
                return out

        from esmshard.parallel.launch import run_local  # outside: signals are for the processes now
        from esmshard.train.start import TOLD

        flags = (["--resume", resume] if resume else []) + (["--overwrite"] if overwrite else [])
        flags += (["--profile", str(profile)] if profile else []) + (["--trust"] if trust else [])
        flags += [] if page and not of_table else ["--no-report"]
        for n, options in enumerate(runs):
            arguments = ["-m", "esmshard", "finetune", recipe, *overrides, *options, *flags]
            if several:
                say(f"{' '.join(options)}")
            with worker.environment({TOLD: "1"} if several and n and of_table else {}):
                code = run_local(arguments, processes, max_restarts=max_restarts, nodes=nodes)
            if code:
                one = recipes.load(recipes.resolve(recipe), [*overrides, *options])
                raise RunFailed(_last_word(Path(one.out), code), code)
        if several:
            told = summarise(out, several, folds)
            print(told if not of_table else conclude(resolved, several, curve))
        if of_table:
            from esmshard.infer.rank import predict as rank

            count = rank(str(out), None, out / "ranked.csv", overwrite=True)
            say(f"all {count:,} single substitutions, best first, in {out / 'ranked.csv'}")
            if page:
                _pictures(out, resolved)
        return out


def _last_word(out: Path, code: int) -> str:
    """Why a run whose processes ended with an exit code is not done; `status.json` says so, or is made to."""
    from esmshard.train import status

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
    from esmshard.report.html import report as write
    from esmshard.report.plots import contact_figure
    from esmshard.tasks import TASKS
    from esmshard.train.splits import open_split

    try:
        if resolved.task.name == "contact":
            labels = TASKS["contact"](resolved.task, {}).labels
            say(f"figure in {contact_figure(run, open_split(resolved, 'test', labels))}")
        say(f"report in {write(run)}")
    except InputError as error:
        say(f"no figures: {error}")
