"""Saving while training goes on, and runs that stop and go on."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from esmshard.checkpoint import manifest, sharded

sys.path.insert(0, str(Path(__file__).parent))
import saving
from ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path: Path, size: int) -> None:
    for found in run_ranks("saving:background", size, tmp_path, str(tmp_path / "checkpoints")):
        assert found["threads"] == ["checkpoint_0"]
        assert found["first was whole"], "the second save waits for the first"
        for step in (1, 2):
            cut = [[step + (size == 2 and row > 3)] * 3 for row in range(7)]
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
    from conftest import RECIPE, write_subset

    directory = tmp_path_factory.mktemp("whole")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    (directory / "tiny.yaml").write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    assert set(run_ranks("saving:until", 2, directory, str(directory / "tiny.yaml"), str(directory / "run"), None)) == {
        ""
    }
    return directory


def test_a_run_that_was_stopped_leaves_what_one_that_was_not_leaves(whole: Path, tmp_path: Path) -> None:
    """Stopped in step 3, which is to be validated, and in step 5, that time saving in the background."""
    recipe, out = str(whole / "tiny.yaml"), tmp_path / "run"
    for stop in (3, 5):
        said = set(run_ranks("saving:until", 2, tmp_path, recipe, str(out), stop, stop == 5))
        assert said == {f"stopped by SIGTERM after step {stop} of 6, which is saved; go on with --resume auto"}
        status = json.loads((out / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["step"]) == ("preempted", 75, stop)
        assert status["checkpoint"] == f"step_{stop:06d}"
        manifest.verify(out / "checkpoints" / f"step_{stop:06d}")
    assert set(run_ranks("saving:until", 2, tmp_path, recipe, str(out), None)) == {""}

    mine, theirs = steps(out), steps(whole / "run")
    for key in ("step", "split", "loss", "grad_norm", "lr", "epoch", "records", "residues", "long P@L"):
        assert [line.get(key) for line in mine] == [line.get(key) for line in theirs], key
    last = "checkpoints/step_000006"
    ours, others = saving.weights_of(str(out / last)), saving.weights_of(str(whole / "run" / last))
    assert ours.keys() == others.keys()
    assert all(np.array_equal(ours[name], others[name]) for name in ours)
    assert (out / "model" / "model.safetensors").read_bytes() == (
        whole / "run" / "model" / "model.safetensors"
    ).read_bytes()
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ends = [line["state"] for line in events if line.get("event") == "end"]
    assert ends == ["preempted", "preempted", "done"]
    assert [line["from_step"] for line in events if line.get("event") == "attempt"] == [0, 3, 5]


def test_a_run_goes_on_with_other_numbers_of_ranks(whole: Path, tmp_path: Path) -> None:
    recipe, out = str(whole / "tiny.yaml"), tmp_path / "run"
    for size, stop in ((4, 1), (2, 3), (1, 4), (3, None)):
        said = set(run_ranks("saving:until", size, tmp_path, recipe, str(out), stop))
        assert len(said) == 1
        assert bool(said.pop()) == (stop is not None)
    mine, theirs = steps(out), steps(whole / "run")
    for key in ("step", "split", "lr", "epoch", "records", "residues"):
        assert [line.get(key) for line in mine] == [line.get(key) for line in theirs], key
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], abs=1e-4)
    state = sharded.read_state(out / "checkpoints" / "step_000006")
    assert state["world_size"] == 3
    names = {name.partition(".")[0] for name in sharded.reader(out / "checkpoints" / "step_000006")[0]}
    assert names == {"model", "optim"}, "nothing is of one rank alone, such as a random state"
