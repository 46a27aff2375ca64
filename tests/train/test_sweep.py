"""`esmshard finetune --sweep`: trials of a tiny model, interrupted, shared, failed and pruned."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import esmshard, in_process
from held_runs import Hold

from esmshard.errors import UsageError
from esmshard.recipe import sweep_file

RANGE = "space:\n  optim.lr: {low: 1.0e-5, high: 1.0e-3}\n"
LR = "space:\n  optim.lr: {{choices: [{choices}]}}\nsampler: grid\npruner: none\n"


@pytest.fixture
def small(tiny_recipe: Path) -> Path:
    """A language model with random weights, which learns within some steps."""
    text = tiny_recipe.read_text().replace("contact, channels: 8, blocks: 1", "mlm")
    tiny_recipe.write_text(text.replace("steps: 6", "steps: 8").replace("eval_every: 3", "eval_every: 4"))
    return tiny_recipe


def sweep(recipe: Path, settings: str, *options: str) -> Any:
    file = recipe.with_name("sweep.yaml")
    file.write_text(settings)
    return esmshard("finetune", recipe, "--sweep", file, *options)


def read(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return content


def test_the_better_value_is_trained_with_new_seeds_and_tested(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="3.0e-3, 1.0e-9")  # the grid begins with the second, which hardly changes the model
    out = tmp_path / "run"
    begun = sweep(small, settings, "--trials", "1", "--seeds", "1")
    assert begun.returncode == 0, begun.stderr
    before = (out / "best-000" / "evaluation.json").read_bytes()
    done = sweep(small, settings, "--seeds", "2", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert (out / "best-000" / "evaluation.json").read_bytes() == before, "the earlier results stay"
    result = read(out)
    assert [trial["state"] for trial in result["trials"]] == ["complete", "complete"]
    assert [trial["values"]["optim.lr"] for trial in result["trials"]] == [1e-9, 3e-3]
    assert result["best"] == 1
    assert result["trials"][1]["value"] < result["trials"][0]["value"]
    assert "  lr: 0.003" in (out / "best.yaml").read_text()
    # The runs of the best settings have other seeds than the trials, whose seed is 3, and are tested.
    assert json.loads((out / "best-001" / "summary.json").read_text())["runs"] == ["seed-4", "seed-5"]
    assert result["state"] == "done"
    assert "is optimistic" in done.stdout
    for trial in (out / "trials").iterdir():
        names = {path.name for path in trial.iterdir()}
        assert names == {"metrics.jsonl", "recipe.yaml", "status.json", "versions.json"}, "no trial is tested"
        assert "as a trial of a sweep" in json.loads((trial / "status.json").read_text())["message"]
    assert "2 of 2 trials have ended; the best is trial" in in_process("status", out).stdout
    # The same command does nothing again, and other settings are refused.
    before = (out / "trials" / "001" / "metrics.jsonl").stat()
    again = sweep(small, settings, "--seeds", "2", "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert (out / "trials" / "001" / "metrics.jsonl").stat() == before
    other = sweep(small, LR.format(choices="1.0e-9, 1.0e-2"), "--resume", "auto")
    assert other.returncode == 2
    assert "holds a sweep with another sweep file;" in other.stderr
    assert sweep(small, settings).stderr.count("pass --resume auto to go on or to join") == 1


def test_a_trial_that_fails_is_recorded_and_does_not_end_the_sweep(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="10, 3.0e-3")  # the first makes the losses infinite, and its run gives up
    done = sweep(small, settings, "train.steps=30", "optim.weight_decay=100", "--seeds", "1")
    trials = read(tmp_path / "run")["trials"]
    failed, best = sorted(trials, key=lambda trial: trial["values"]["optim.lr"], reverse=True)
    assert done.returncode == 0, done.stderr
    assert failed["state"] == "failed", failed
    assert "was not finite" in failed["message"]
    assert best["state"] == "complete"
    assert read(tmp_path / "run")["best"] == best["number"]


@pytest.mark.slow
def test_a_bad_trial_is_stopped_by_all_ranks_together(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="1.0e-9, 3.0e-3").replace("pruner: none", "prune_after_trials: 1")
    done = sweep(small, settings, "--nproc", "2", "--seeds", "1", "checkpoint.every=1")
    assert done.returncode == 0, done.stderr
    complete, pruned = read(tmp_path / "run")["trials"]
    assert [complete["state"], pruned["state"]] == ["complete", "pruned"]
    assert (pruned["step"], [*pruned["validations"]]) == (4, ["4"]), "at the first validation"
    assert in_process("status", tmp_path / "run").returncode == 0


def test_an_interrupted_trial_goes_on_from_its_checkpoint(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="1.0e-3, 3.0e-3")
    out = tmp_path / "run"
    steps = ("checkpoint.every=1", "--seeds", "1")
    (file := small.with_name("sweep.yaml")).write_text(settings)
    command = [sys.executable, "-m", "esmshard", "finetune", str(small), "--sweep", str(file), *steps]
    held = Hold(tmp_path / "hold", 3)
    with subprocess.Popen(command, env={**os.environ, **held.environment}) as worker:
        held.wait(lambda: worker.poll() is not None)
        worker.send_signal(signal.SIGTERM)
        held.go_when_asked(lambda: worker.poll() is not None)
    assert worker.returncode == 75
    assert [trial["state"] for trial in read(out)["trials"]] == ["running"]
    assert in_process("status", out).returncode == 75
    done = sweep(small, settings, *steps, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "trials" / "000" / "metrics.jsonl").read_text().splitlines()]
    begun = [line["from_step"] for line in lines if line.get("event") == "attempt"]
    assert len(begun) == 2
    assert begun[0] == 0 < begun[1], "it went on from a checkpoint"
    assert [line["step"] for line in lines if "lr" in line] == [*range(1, 9)]
    assert [trial["state"] for trial in read(out)["trials"]] == ["complete", "complete"]


def test_workers_share_the_trials(small: Path, tmp_path: Path) -> None:
    small.with_name("sweep.yaml").write_text(RANGE)
    command = ("finetune", str(small), "--sweep", str(small.with_name("sweep.yaml")), "--trials", "4", "--seeds", "1")
    with ThreadPoolExecutor(2) as pool:
        ended = [*pool.map(lambda n: esmshard(*command, "--resume", "auto"), range(2))]
    assert [done.returncode for done in ended] == [0, 0], [done.stderr for done in ended]
    result = read(tmp_path / "run")
    assert [trial["number"] for trial in result["trials"]][:4] == [0, 1, 2, 3], "the number is for both together"
    assert len(result["trials"]) <= 5, "both may have begun the last one at once"
    assert {trial["state"] for trial in result["trials"]} <= {"complete", "pruned"}
    assert len({trial["values"]["optim.lr"] for trial in result["trials"]}) >= 4, "workers draw different values"
    assert result["state"] == "done"
    begun = [sum(f"trial {n} of 4: optim.lr" in done.stderr for done in ended) for n in range(4)]
    assert begun == [1, 1, 1, 1], "each by one worker"


def test_mistakes_are_refused_before_anything_is_trained(small: Path, tmp_path: Path) -> None:
    file = small.with_name("sweep.yaml")
    for text, overrides, place, says in (
        ("space:\n  optim.lrr: {choices: [1, 2]}\n", [], ":2:", "did you mean 'lr'?"),
        ("space:\n  adapt.rank: {choices: [4, 8]}\n", [], ":2:", "for adapt.method lora"),
        ("space:\n  out: {choices: [a, b]}\n", [], ":2:3:", "cannot be searched"),
        (RANGE, ["optim.lr=1e-4"], ":2:3:", "is searched, and optim.lr=1e-4 sets it"),
        (RANGE + "sampler: grid\n", [], ":3:1:", "ranges with a step"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError) as caught:
            sweep_file.load(file, small, overrides)
        assert says in str(caught.value)
        assert f"sweep.yaml{place}" in str(caught.value)
    done = in_process("finetune", small, "--sweep", file, "--folds", "3")
    assert done.returncode == 2
    assert "--sweep does not go with --folds" in done.stderr
    assert not (tmp_path / "run").exists()
