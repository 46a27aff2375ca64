"""The run of a fine-tuning, from the recipe to the evaluated model."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from esmshard.checkpoint import card, manifest, sharded
from esmshard.checkpoint.consolidate import BASELINES, consolidate
from esmshard.data.batching.loader import SEEN
from esmshard.devices import DeviceName, exact_convolutions
from esmshard.errors import LostProcess
from esmshard.io.paths import replace_text, replacing
from esmshard.model.finetuner import FineTuner
from esmshard.model.weight_reader import read_json
from esmshard.parallel import launch
from esmshard.parallel.load import refill
from esmshard.parallel.preemption import Preempted, Preemption, reason
from esmshard.parallel.process_group import World, processes_per_machine, world
from esmshard.parallel.shard import free_layers
from esmshard.parallel.watch import Control, recorder_settings
from esmshard.progress import say
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import MAIN
from esmshard.tasks.finetuned import new_head
from esmshard.tasks.registry import new_task
from esmshard.train import evaluate
from esmshard.train.inputs import RunInputs, check_out, leakage_notices, prepare, seen_in_training
from esmshard.train.loop import advice_if_out_of_memory, train
from esmshard.train.optim import model_tensors
from esmshard.train.resume import starting_point
from esmshard.train.run_dir import Attempt, goodput, goodput_text, metrics_of


def run(
    recipe: Recipe,
    resume: str | None = None,
    overwrite: bool = False,
    profile: int = 0,
    *,
    take_over: bool = False,
    started: float | None = None,
    device: DeviceName = None,
) -> Path | None:
    """Fine-tune a model, evaluate it, and write the results. All processes that were launched together call this.

    A trial of a sweep (environment variable `launch.TRIAL`) ends after its last validation. It writes no model, and
    scores no test split. The first rank writes the results and returns the run's directory. Other ranks return None.

    Args:
        recipe: the checked recipe. Its key `out` names the directory of the run.
        resume: `auto` continues from the newest undamaged checkpoint of `out` if there is one. A path continues from
            that run or checkpoint. None starts a new run.
        overwrite: remove the files of an earlier run from `out`.
        profile: the number of steps to record with torch's profiler.
        take_over: take the lock of `out` from another run; see the class `esmshard.train.run_dir.Lock`.
        started: the start time of the command, in seconds since 1970; by default the present time.
        device: the kind of device (see `own_device`); by default a GPU for each process, or the CPU if there is no GPU.

    Raises:
        InputError: on all ranks, for a mistake in recipe or data, or if memory does not suffice.
        Preempted: on all ranks, after a signal or a time limit. All finished steps are saved.
    """
    out, parallel, is_trial = Path(recipe.out), recipe.parallel, launch.TRIAL in os.environ
    dumps, timeouts = out / "flight_recorder", (parallel.start_timeout, parallel.step_timeout)
    recorder = {name: os.environ.get(name, value) for name, value in recorder_settings(dumps).items()}
    with (
        launch.environment(recorder),
        Preemption() as preemption,
        Attempt(out, started or time.time(), recipe.track) as attempt,
    ):
        try:
            with (
                world(*timeouts, alone_too=parallel.cpu_offload, wanted=device) as ranks,
                Control(ranks, dumps) as control,
                exact_convolutions(ranks.device),
                advice_if_out_of_memory(
                    f"weights and optimizer state of the model do not fit on {ranks.device}; set adapt.method=lora or "
                    "parallel.cpu_offload=true, or share the model among more GPUs (--nproc)"
                ),
            ):
                starting = ranks.patient(parallel.start_timeout)
                machine = processes_per_machine(ranks.size)
                job = starting.agree(lambda: prepare(recipe, ranks.size, machine, ranks.device))
                starting.from_first(lambda: check_out(out, resume, overwrite))
                starting.agree(lambda: attempt.open(ranks.is_first, job.steps, take_over=take_over))
                start = starting.from_first(lambda: starting_point(job, resume))
                model = train(job, start, starting, ranks, control, preemption, attempt, profile)
                if not is_trial:
                    attempt.report("running", "consolidating and evaluating")
                    with advice_if_out_of_memory(
                        f"the evaluation does not fit on {ranks.device}; the trained model is saved in "
                        f"{out / 'checkpoints'}; evaluate it with more memory and --resume auto"
                    ):
                        _evaluate(job, model, replace(ranks, together=job.layout.together), control)
        except (LostProcess, Preempted):
            # A rank that is asked to stop before training ends at once, and the other ranks then report a lost process.
            # When a process is lost during training, srun sends SIGTERM to the others.
            if asked := preemption.unsaved:
                raise Preempted(f"stopped by {reason(asked)}; go on with --resume auto", asked) from None
            raise
        if not ranks.is_first:
            return None
    if not is_trial:
        # Only an ended attempt counts the time of the evaluation.
        say(goodput_text(goodput(metrics_of(out))))
    return out


def _evaluate(job: RunInputs, model: FineTuner, ranks: World, control: Control) -> None:
    """Score the trained model and the baselines on the test split, and write the model directory with its card.

    All ranks call this, and the first rank writes the files. The model stays divided over the ranks as in training.
    Some baselines need the base model, so its weights later replace the trained weights in memory.
    """
    recipe, out, layout = job.recipe, job.out, job.layout
    best = manifest.pointed(out / "checkpoints", "BEST") if recipe.keeps_best else None
    checkpoint = best or manifest.pointed(out / "checkpoints", "LATEST")
    assert checkpoint is not None, "training ends with a checkpoint"
    sharing = ranks if layout.sharded or layout.precision != "fp32" else evaluate.ALONE
    if ranks.is_first:
        say(f"scoring {len(job.test)} test records with {checkpoint.name}, then the baselines")
    control.note("scoring the test set")
    free_layers(model.eval())
    if best is not None:
        sharded.load(best, model_tensors(model, trained_only=recipe.adapt.method != "full"))
    task = new_task(recipe.task, sharded.read_state(checkpoint)["facts"])
    table = {MAIN: evaluate.score(model, task, job.test, sharing)}
    control.note("scoring the baselines")
    refill(model, model.rows_of(job.weights, new_head(recipe, task, job.weights)[0]), ranks)
    if sharing is evaluate.ALONE:
        model.origin = job.weights.origin
    known = evaluate.fit_baselines(task, job.train, model, sharing)
    table |= evaluate.score_baselines(task, job.test, known, model, sharing)

    def write() -> None:
        groups = task.groups(job.test, known)
        if len(job.train) <= evaluate.MOST_TRAINED_ON:
            known[evaluate.TRAINED_ON] = np.unique(evaluate.sequence_hashes(job.train))
        with replacing(out / BASELINES, binary=True) as file:
            np.savez(file, **known)  # type: ignore[arg-type]
        if recipe.task.reads_table:  # `predict` marks these variants as seen in training
            ids = [split.id(n) for split in (job.train, job.valid) for n in range(len(split))]
            replace_text(out / SEEN, "".join(f"{name}\n" for name in ids))
        directory = consolidate(checkpoint, out / "model", overwrite=True, warn=say)
        say(f"model in {directory}")
        about = read_json(directory / "esmshard.json")
        facts = evaluate.described(str(directory), about, job.test, out)
        stored = f", matrices of the layers in {kind}" if (kind := recipe.model.quantize) else ""
        facts |= {"device": str(ranks.device), "precision": layout.precision + stored, "processes": ranks.size}
        facts |= {"labels": None, "left_out": [], "leakage": leakage_notices(job), "in_sample": seen_in_training(job)}
        print(evaluate.write(out, job.test, task, table, facts, groups), flush=True)
        card.write(directory, about, read_json(out / "evaluation.json"))

    control.note("consolidating")
    ranks.patient().from_first(write)
