"""Sharded checkpoints: complete or absent, the same tensors on another number of ranks, damage noticed."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from esmshard.checkpoint import manifest, sharded

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import RECIPE, write_subset
from ranks import run_ranks

SHARDS = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, in a directory of checkpoints."""
    directory = tmp_path_factory.mktemp("written")
    write_subset(directory, "train", "train", range(24), unresolved=5)
    write_subset(directory, "valid", "valid", range(5))
    recipe = directory / "tiny.yaml"
    recipe.write_text(RECIPE.format(tokens_per_rank=130, out=directory / "run"))
    run_ranks("work:save", 2, directory, str(recipe), str(directory / "run" / "checkpoints"), 0.5)
    return directory / "run" / "checkpoints"


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(written, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints" / "step_000007"


def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_three(saved: Path, tiny_recipe: Path, tmp_path: Path) -> None:
    one = run_ranks("work:restore", 1, tmp_path, str(tiny_recipe), str(saved))[0]
    three = run_ranks("work:restore", 3, tmp_path, str(tiny_recipe), str(saved))
    assert len(one) > 60
    assert np.allclose(one["model.trunk.layers.0.fc1.bias"], 0.5)  # fresh biases are 0, the seed does not matter
    assert np.allclose(one["optim.trunk.embed_tokens.weight.exp_avg"], 0.5)
    assert "model.trunk.lm_head.weight" not in one, "the tied weight is stored once"
    for rank in three:
        assert rank.keys() == one.keys()
        assert all(np.array_equal(rank[name], one[name]) for name in one)


def test_a_checkpoint_of_one_process_loads_on_two_ranks(tiny_recipe: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    run_ranks("work:save", 1, tmp_path, str(tiny_recipe), str(directory), 0.5)
    saved = directory / "step_000007"
    names = {p.name for p in saved.iterdir()}
    assert names == {SHARDS[0], "state.json", "MANIFEST.json"}
    assert json.loads((saved / "MANIFEST.json").read_text())["files"].keys() == names - {"MANIFEST.json"}
    manifest.verify(saved)
    one = run_ranks("work:restore", 1, tmp_path, str(tiny_recipe), str(saved))[0]
    assert np.allclose(one["model.trunk.layers.0.fc1.bias"], 0.5)  # fresh biases are 0, the seed does not matter
    assert np.allclose(one["optim.trunk.embed_tokens.weight.exp_avg"], 0.5)
    assert "model.trunk.lm_head.weight" not in one, "the tied weight is stored once"
    for rank in run_ranks("work:restore", 2, tmp_path, str(tiny_recipe), str(saved)):
        assert rank.keys() == one.keys()
        assert all(np.array_equal(rank[name], one[name]) for name in one)


@pytest.mark.parametrize(("size", "strategy"), [(4, "hybrid_shard"), (2, "no_shard")])
def test_a_checkpoint_of_several_copies_holds_each_tensor_once(
    tiny_recipe: Path, tmp_path: Path, size: int, strategy: str
) -> None:
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(text.replace("precision: fp32", f"precision: fp32, strategy: {strategy}"))
    directory = tmp_path / "run" / "checkpoints"
    run_ranks("work:save", size, tmp_path, str(tiny_recipe), str(directory), 0.5)
    tiny_recipe.write_text(text)
    one = run_ranks("work:restore", 1, tmp_path, str(tiny_recipe), str(directory / "step_000007"))[0]
    assert np.allclose(one["model.trunk.layers.0.fc1.bias"], 0.5)  # fresh biases are 0, the seed does not matter
    assert np.allclose(one["optim.trunk.embed_tokens.weight.exp_avg"], 0.5)
    names, read = sharded.reader(directory / "step_000007")
    once = sum(read(name).nbytes for name in names)
    written = sum(path.stat().st_size for path in (directory / "step_000007").glob("*.safetensors"))
    assert once < written < 1.2 * once, "headers, and no copy"


def test_what_a_checkpoint_leaves(saved: Path) -> None:
    names = {p.name for p in saved.iterdir()}
    assert names == {*SHARDS, "state.json", "MANIFEST.json"}
    assert (saved.parent / "LATEST").read_text() == "step_000007\n"
    assert sorted(p.name for p in saved.parent.iterdir()) == ["LATEST", "step_000007"]
    listed = json.loads((saved / "MANIFEST.json").read_text())
    assert listed["files"].keys() == names - {"MANIFEST.json"}
    assert sharded.read_state(saved)["step"] == 7
    manifest.verify(saved)


def test_a_later_save_keeps_the_newest_and_what_stood_in_its_place(
    saved: Path, tiny_recipe: Path, tmp_path: Path
) -> None:
    for step in (3, 5):
        other = saved.with_name(f"step_{step:06d}")
        other.mkdir()
        (other / "MANIFEST.json").write_text("{}")
    leftover = saved.with_name(".tmp-step_000007")
    leftover.mkdir()
    (leftover / SHARDS[0]).write_bytes(b"half")
    run_ranks("work:save", 1, tmp_path, str(tiny_recipe), str(saved.parent), 1.5)
    names = ["LATEST", "step_000005", "step_000007", "step_000007.abandoned"]
    assert sorted(p.name for p in saved.parent.iterdir()) == names
    again = run_ranks("work:restore", 1, tmp_path, str(tiny_recipe), str(saved))[0]
    assert np.allclose(again["model.trunk.layers.0.fc1.bias"], 1.5)
    assert not list(saved.glob("shard-00002*")), "files of the earlier two-rank save are gone"


def test_a_checkpoint_of_another_shape_is_one_sentence(saved: Path, tiny_recipe: Path, tmp_path: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("channels: 8", "channels: 12"))
    with pytest.raises(AssertionError, match=r"InputError: .*step_000007: does not fit this model"):
        run_ranks("work:restore", 1, tmp_path, str(tiny_recipe), str(saved))
