"""`esmshard finetune --sweep`, as a user types it: trials of a tiny model, interrupted, shared, failed and stopped."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import esmshard

from esmshard.errors import UsageError
from esmshard.recipe import sweep_file

RANGE = "space:\n  optim.lr: {low: 1.0e-5, high: 1.0e-3}\n"
LR = """\
space:
  optim.lr: {{choices: [{choices}]}}
sampler: grid
pruner: none
"""


@pytest.fixture
def small(tiny_recipe: Path) -> Path:
    """A language model of random weights, which learns within some steps, with test records of its own."""
    text = tiny_recipe.read_text().replace("contact, channels: 8, blocks: 1", "mlm")
    text = text.replace("test: valid.fasta", "test: test.fasta").replace("steps: 6", "steps: 20")
    tiny_recipe.write_text(text.replace("eval_every: 3", "eval_every: 10"))
    tiny_recipe.with_name("test.fasta").write_text(tiny_recipe.with_name("valid.fasta").read_text())
    return tiny_recipe


def sweep(recipe: Path, settings: str, *options: str, **more: Any) -> Any:
    """The command; the settings are written to `sweep.yaml`."""
    file = recipe.with_name("sweep.yaml")
    file.write_text(settings)
    return esmshard("finetune", recipe, "--sweep", file, *options, **more)


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def test_the_better_value_is_found_trained_with_new_seeds_and_tested(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="3.0e-3, 1.0e-9")  # the grid begins with the second, which leaves the model as it is
    out = tmp_path / "run"
    begun = sweep(small, settings, "--trials", "1", "--seeds", "1")
    assert begun.returncode == 0, begun.stderr
    before = (out / "best-000" / "evaluation.json").read_bytes()
    done = sweep(small, settings, "--seeds", "2", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert (out / "best-000" / "evaluation.json").read_bytes() == before, "the results of the settings before stay"
    found = read(out)
    assert [one["state"] for one in found["trials"]] == ["complete", "complete"]
    assert {one["values"]["optim.lr"] for one in found["trials"]} == {1e-9, 3e-3}
    best = found["trials"][found["best"]]
    assert best["values"] == {"optim.lr": 3e-3}
    assert best["value"] == min(one["value"] for one in found["trials"])
    assert "  lr: 0.003" in (out / "best.yaml").read_text()
    # The runs of the best settings have other seeds than the trials, whose seed is 3, and are tested.
    assert json.loads((out / "best-001" / "summary.json").read_text())["runs"] == ["seed-4", "seed-5"]
    assert found["state"] == "done"
    assert "is optimistic" in done.stdout
    for trial in (out / "trials").iterdir():
        names = {path.name for path in trial.iterdir()}
        assert names == {"metrics.jsonl", "recipe.yaml", "status.json", "versions.json"}, "no model, no test"
        assert "as a trial of a sweep" in json.loads((trial / "status.json").read_text())["message"]
    status = esmshard("status", out)
    assert status.returncode == 0
    assert "2 of 2 trials have ended; the best is trial" in status.stdout
    # The same command again does nothing again, and one of other settings is refused.
    before = (out / "trials" / "001" / "metrics.jsonl").stat()
    again = sweep(small, settings, "--seeds", "2", "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert (out / "trials" / "001" / "metrics.jsonl").stat() == before
    other = sweep(small, LR.format(choices="1.0e-9, 1.0e-2"), "--resume", "auto")
    assert other.returncode == 2
    assert "holds a sweep with another settings;" in other.stderr
    assert sweep(small, settings).stderr.count("pass --resume auto to go on or to join") == 1
    # The test set has no influence on the search.
    small.with_name("test.fasta").write_text(">other\nMKVLAAGICWYMKVLAAGICWYHHHHQQPNDEST\n")
    other = sweep(small, settings, "--seeds", "1", f"out={tmp_path / 'other'}")
    assert other.returncode == 0, other.stderr
    assert read(tmp_path / "other")["trials"] == found["trials"]
    tested = [path / "evaluation.json" for path in (out / "best-001" / "seed-4", tmp_path / "other" / "best-001")]
    metrics = [json.loads(path.read_text())["metrics"] for path in tested]
    assert metrics[0] != metrics[1], "it is another test"


def test_a_trial_that_fails_is_recorded_and_does_not_end_the_sweep(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="10, 3.0e-3")  # the first makes the losses infinite, and its run gives up
    done = sweep(small, settings, "train.steps=60", "optim.weight_decay=100", "--seeds", "1")
    failed, best = sorted(read(tmp_path / "run")["trials"], key=lambda one: one["values"]["optim.lr"], reverse=True)
    assert done.returncode == 0, done.stderr
    assert failed["state"] == "failed", failed
    assert "was not finite" in failed["message"]
    assert best["state"] == "complete"
    assert read(tmp_path / "run")["best"] == best["number"]
    assert esmshard("status", tmp_path / "run").returncode == 0


def test_a_bad_trial_is_stopped_by_all_ranks_together(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="1.0e-9, 3.0e-3").replace("pruner: none", "prune_after_trials: 1")
    options = ("--nproc", "2", "--seeds", "1", "checkpoint.every=1")
    done = sweep(small, settings, *options)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "run")
    assert [one["state"] for one in found["trials"]] == ["complete", "pruned"]
    assert found["trials"][1]["step"] == 10, "at the first validation, after half of the steps"
    assert set(found["trials"][1]["validations"]) == {"10"}, "the pruner sees no more, however far the run went"
    assert esmshard("status", tmp_path / "run").returncode == 0


def test_an_interrupted_trial_goes_on_from_its_checkpoint(small: Path, tmp_path: Path) -> None:
    settings = LR.format(choices="1.0e-3, 3.0e-3")
    out = tmp_path / "run"
    steps = ("train.steps=40", "train.eval_every=20", "checkpoint.every=1", "--seeds", "1")
    file = small.with_name("sweep.yaml")
    file.write_text(settings)
    command = [sys.executable, "-m", "esmshard", "finetune", str(small), "--sweep", str(file), *steps]
    with subprocess.Popen(command) as worker:
        metrics = out / "trials" / "001" / "metrics.jsonl"
        while not (metrics.is_file() and '"step": 3,' in metrics.read_text()):
            assert worker.poll() is None, "it ended too early"
            time.sleep(0.05)
        worker.send_signal(signal.SIGTERM)
    assert worker.returncode == 75
    assert [one["state"] for one in read(out)["trials"]] == ["complete", "running"]
    assert esmshard("status", out).returncode == 75
    done = sweep(small, settings, *steps, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "trials" / "001" / "metrics.jsonl").read_text().splitlines()]
    begun = [line["from_step"] for line in lines if line.get("event") == "attempt"]
    assert begun[0] == 0
    assert len(begun) == 2
    assert begun[1] >= 3, "it went on from a checkpoint"
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, 41))
    assert [one["state"] for one in read(out)["trials"]] == ["complete", "complete"]


def test_workers_share_the_trials(small: Path, tmp_path: Path) -> None:
    small.with_name("sweep.yaml").write_text(RANGE)
    command = ("finetune", str(small), "--sweep", str(small.with_name("sweep.yaml")), "--trials", "4", "--seeds", "1")
    with ThreadPoolExecutor(2) as pool:
        ended = [*pool.map(lambda n: esmshard(*command, "--resume", "auto"), range(2))]
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    found = read(tmp_path / "run")
    assert [one["number"] for one in found["trials"]][:4] == [0, 1, 2, 3], "as many as asked, of both together"
    assert len(found["trials"]) <= 5, "both may have begun the last one at once"
    assert {one["state"] for one in found["trials"]} <= {"complete", "pruned"}
    assert len({one["values"]["optim.lr"] for one in found["trials"]}) >= 4, "workers draw different values"
    assert found["state"] == "done"
    begun = [sum(f"trial {n} of 4: optim.lr" in one.stderr for one in ended) for n in range(4)]
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
    done = sweep(small, RANGE, "--folds", "3")
    assert done.returncode == 2
    assert "--sweep does not go with --folds" in done.stderr
    assert not (tmp_path / "run").exists()
