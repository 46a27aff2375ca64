"""Saving while training goes on, and runs that stop and go on, with the same and with other divisions of the model."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from esmshard.checkpoint import manifest, sharded

sys.path.insert(0, str(Path(__file__).parent))
import saving
from conftest import RECIPE, write_subset
from ranks import run_ranks


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    for found in run_ranks("saving:background", 2, tmp_path, str(tmp_path / "checkpoints")):
        assert found["threads"] == ["checkpoint_0"]
        assert found["first was whole"], "the second save waits for the first"
        for step in (1, 2):
            cut = [[step + (row > 3)] * 3 for row in range(7)]
            loaded = found[f"loaded {step}"]
            assert (loaded["cut"], loaded["whole"], loaded["plain"]) == (cut, [step, step], step)
            assert found[f"state {step}"] == step
        first, second = found["errors"]
        assert "step 3 could not be written" in first
        assert second == "", "an error is raised once"
    names = [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()]
    assert sorted(names) == ["step_000001", "step_000002"]


def steps(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe, never interrupted, on two ranks."""
    directory = tmp_path_factory.mktemp("whole")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    (directory / "tiny.yaml").write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    given = (str(directory / "tiny.yaml"), str(directory / "run"), None)
    assert set(run_ranks("saving:until", 2, directory, *given)) == {""}
    return directory


def test_a_run_that_was_stopped_leaves_what_one_that_was_not_leaves(whole: Path, tmp_path: Path) -> None:
    """Stopped in step 3, which is to be validated, while a checkpoint is saved in the background."""
    recipe, out = str(whole / "tiny.yaml"), tmp_path / "run"
    said = set(run_ranks("saving:until", 2, tmp_path, recipe, str(out), 3, True))
    assert said == {"stopped by SIGTERM after step 3 of 6, which is saved; go on with --resume auto"}
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("preempted", 75, 3)
    assert status["checkpoint"] == "step_000003"
    manifest.verify(out / "checkpoints" / "step_000003")
    assert set(run_ranks("saving:until", 2, tmp_path, recipe, str(out), None)) == {""}

    mine, theirs = steps(out), steps(whole / "run")
    for key in ("step", "split", "loss", "grad_norm", "lr", "epoch", "records", "residues", "long P@L"):
        assert [line.get(key) for line in mine] == [line.get(key) for line in theirs], key
    ours, others = (saving.weights_of(str(run / "checkpoints/step_000006")) for run in (out, whole / "run"))
    assert ours.keys() == others.keys()
    assert all(np.array_equal(ours[name], others[name]) for name in ours)
    file = "model/model.safetensors"
    assert (out / file).read_bytes() == (whole / "run" / file).read_bytes()
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ends = [line["state"] for line in events if line.get("event") == "end"]
    assert ends == ["preempted", "done"]
    assert [line["from_step"] for line in events if line.get("event") == "attempt"] == [0, 3]


def test_a_run_goes_on_with_other_divisions_of_the_model(whole: Path, tmp_path: Path) -> None:
    """As 2 x 2 (data x tensor), on one process, and on two ranks that divide the tokens."""
    text, out = (whole / "tiny.yaml").read_text(), tmp_path / "run"
    for size, key, stop in ((4, "tensor: 2", 1), (1, "tensor: 1", 3), (2, "context: 2", None)):
        recipe = whole / "divided.yaml"
        recipe.write_text(text.replace("precision: fp32", f"precision: fp32, {key}"))
        said = set(run_ranks("saving:until", size, tmp_path, str(recipe), str(out), stop))
        assert len(said) == 1
        assert bool(said.pop()) == (stop is not None)
    mine, theirs = steps(out), steps(whole / "run")
    for key in ("step", "split", "lr", "epoch", "records", "residues"):
        assert [line.get(key) for line in mine] == [line.get(key) for line in theirs], key
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], abs=1e-4)
    assert sharded.read_state(out / "checkpoints" / "step_000006")["world_size"] == 2
    ours, others = (saving.weights_of(str(run / "checkpoints/step_000006")) for run in (out, whole / "run"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in others.items()}
    assert {name.partition(".")[0] for name in ours} == {"model", "optim"}, "nothing is of one rank alone"
    assert all(np.allclose(ours[name], others[name], rtol=0, atol=1e-4) for name in ours if name.startswith("model."))
