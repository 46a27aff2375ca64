"""The main job, from the recipe to the evaluated model, in the order of its steps."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from esmshard.checkpoint import card, manifest
from esmshard.checkpoint.consolidate import consolidate
from esmshard.data.batching.loader import SEEN
from esmshard.devices import DeviceName
from esmshard.errors import LostProcess
from esmshard.launch import cpu_limits, process_environment
from esmshard.launch.preemption import Preempted, Preemption, reason
from esmshard.launch.process_group import processes_per_machine, world
from esmshard.model.convolutions import exact_convolutions
from esmshard.model.weight_reader import read_json
from esmshard.monitor.stuck_ranks import Control, recorder_settings
from esmshard.progress import say
from esmshard.recipe.sections import Recipe
from esmshard.sharding.cuda_allocator import expandable_segments
from esmshard.tasks.finetuner import load_base
from esmshard.train import evaluate
from esmshard.train.loop import train
from esmshard.train.records import status
from esmshard.train.records.attempt import Attempt
from esmshard.train.resume import starting_point
from esmshard.train.run_inputs import RunInputs, check_out, leakage_notices, prepare, seen_in_training
from esmshard.train.token_budget import out_of_memory_in_evaluation, out_of_memory_of_model


def run(
    recipe: Recipe,
    resume: str | None = None,
    overwrite: bool = False,
    profile: int = 0,
    *,
    trust: bool = False,
    started: float | None = None,
    device: DeviceName = None,
) -> Path | None:
    """Fine-tune in this process and those that were launched together with this one, then write the results.

    A trial of a sweep (`process_environment.TRIAL`) ends with its last validation, without a model and a test.

    Args:
        recipe: the checked recipe; `out` names the run's directory.
        resume: `auto` continues from the newest good checkpoint of `out` if there is one. A path continues from that
            run or checkpoint. None starts a new run.
        overwrite: remove the files of an earlier run from `out`.
        profile: number of steps to record with torch's profiler.
        trust: continue from a checkpoint that another user wrote.
        started: the time at which the command began, in seconds since 1970; the time of the call by default.
        device: the device of each process, see `own_device`; by default its own GPU, else the CPU.

    Returns:
        The run's directory on the first rank, which also consolidates and evaluates; None on the other ranks.

    Raises:
        InputError: for any mistake in recipe or data, on all ranks.
        Preempted: on all ranks, after a signal or a time limit. The work done until then is saved.
    """
    wait, dumps = recipe.parallel, Path(recipe.out) / "flight_recorder"
    recorder = {name: os.environ.get(name, value) for name, value in recorder_settings(dumps).items()}
    out, started, is_trial = Path(recipe.out), started or time.time(), process_environment.TRIAL in os.environ
    with (
        process_environment.environment(recorder),
        Preemption() as preemption,
        Attempt(out, started, recipe.track) as attempt,
    ):
        try:
            with (
                world(wait.start_timeout, alone_too=recipe.parallel.cpu_offload, wanted=device) as ranks,
                Control(
                    ranks, start_timeout=wait.start_timeout, step_timeout=wait.step_timeout, dumps=dumps
                ) as control,
                exact_convolutions(ranks.device),
                expandable_segments(ranks.device),
                out_of_memory_of_model(ranks.device),
            ):
                job = ranks.agree(lambda: prepare(recipe, ranks.size, processes_per_machine(ranks.size), ranks.device))
                ranks.from_first(lambda: check_out(out, resume, overwrite))
                ranks.agree(lambda: attempt.open(ranks.is_first, job.steps))
                start = ranks.from_first(lambda: starting_point(job, resume, trust))
                if is_trial:
                    attempt.ending = "trained and validated, as a trial of a sweep"
                train(job, start, ranks, control, preemption, attempt, profile)
        except (LostProcess, Preempted):
            # A rank that was asked to stop may have left before training began. Once training runs, a rank that is gone
            # was lost, and srun then sends SIGTERM to the other ranks.
            if asked := preemption.unsaved:
                raise Preempted(f"stopped by {reason(asked)}; go on with --resume auto", asked) from None
            raise
        if not ranks.is_first:
            if process_environment.on_several_machines_of_torchrun():
                # torchrun leaves a machine 300 s after its last rank has ended, and may end the rendezvous. Without a
                # rendezvous, the torchrun of rank 0 would end rank 0 in the middle of the evaluation.
                status.wait_while_running(out)
            return None
        if is_trial:
            return out
        if process_environment.SHARED_CORES in os.environ:  # the other ranks are ending
            torch.set_num_threads(cpu_limits.cores())
        attempt.report("running", "consolidating and evaluating")
        with out_of_memory_in_evaluation(recipe, ranks.device):
            _evaluate(job, ranks.device, trust)
    say(attempt.summary())  # the attempt has ended, so its time includes the evaluation, as in the report
    return out


def _evaluate(job: RunInputs, device: torch.device, trust: bool) -> None:
    """Fit baselines, write the model as one directory, score it on the test split, and write its card. The first rank
    only.
    """
    recipe, out = job.recipe, job.out
    say(f"fitting the baselines, then scoring {len(job.test)} test records")
    evaluate.fit_baselines(job.task, job.train, load_base(recipe, job.task, device), out / evaluate.BASELINES)
    evaluate.keep_seen(job.task, job.train, job.valid, out / SEEN)
    best = recipe.keeps_best and manifest.pointed(out / "checkpoints", "BEST") is not None
    model = consolidate(out, out / "model", overwrite=True, warn=say, best=best, trust=trust)
    say(f"model in {model}")
    shared: dict[str, Any] = {"leakage": leakage_notices(job), "seen": seen_in_training(job)}
    report = evaluate.report(str(model), job.test, out, say, device=device, **shared)
    print(report, flush=True)
    card.write(model, read_json(model / "esmshard.json"), read_json(out / "evaluation.json"))
