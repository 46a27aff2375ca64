"""Sharded checkpoints: complete or absent, the same tensors on another number of ranks, damage noticed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from esmshard.checkpoint import manifest, sharded

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from ranks import run_ranks

SHARDS = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]


def restored(size: int, recipe: Path, saved: Path) -> dict[str, np.ndarray]:
    """All tensors as each of some ranks loads them, which are those that `work:save` has written."""
    first, *others = run_ranks("work:restore", size, recipe.parent, str(recipe), str(saved))
    assert len(first) > 60
    assert np.allclose(first["model.trunk.layers.0.fc1.bias"], 0.5)  # fresh biases are 0, the seed does not matter
    assert np.allclose(first["optim.trunk.embed_tokens.weight.exp_avg"], 0.5)
    assert "model.trunk.lm_head.weight" not in first, "the tied weight is stored once"
    for rank in others:
        assert rank.keys() == first.keys()
        assert all(np.array_equal(rank[name], first[name]) for name in first)
    return first


def test_a_checkpoint_of_two_ranks_loads_on_others_and_a_later_save_takes_its_place(tiny_recipe: Path) -> None:
    directory = tiny_recipe.parent / "run" / "checkpoints"
    run_ranks("work:save", 2, tiny_recipe.parent, str(tiny_recipe), str(directory), 0.5)
    saved = directory / "step_000007"
    names = {p.name for p in saved.iterdir()}
    assert names == {*SHARDS, "state.json", "MANIFEST.json"}
    assert (directory / "LATEST").read_text() == "step_000007\n"
    assert sorted(p.name for p in directory.iterdir()) == ["LATEST", "step_000007"]
    assert json.loads((saved / "MANIFEST.json").read_text())["files"].keys() == names - {"MANIFEST.json"}
    assert sharded.read_state(saved)["step"] == 7
    manifest.verify(saved)
    alone = restored(1, tiny_recipe, saved)
    for size in (2, 3):
        other = restored(size, tiny_recipe, saved)
        assert all(np.array_equal(other[name], alone[name]) for name in alone)

    for step in (3, 5):
        (directory / f"step_{step:06d}").mkdir()
        (directory / f"step_{step:06d}" / "MANIFEST.json").write_text("{}")
    leftover = directory / ".tmp-step_000007"
    leftover.mkdir()
    (leftover / SHARDS[0]).write_bytes(b"half")
    run_ranks("work:save", 1, tiny_recipe.parent, str(tiny_recipe), str(directory), 1.5)
    left = ["LATEST", "step_000005", "step_000007", "step_000007.abandoned"]
    assert sorted(p.name for p in directory.iterdir()) == left
    (again,) = run_ranks("work:restore", 1, tiny_recipe.parent, str(tiny_recipe), str(saved))
    assert np.allclose(again["model.trunk.layers.0.fc1.bias"], 1.5)
    assert not list(saved.glob("shard-00002*")), "files of the earlier two-rank save are gone"

    tiny_recipe.write_text(tiny_recipe.read_text().replace("channels: 8", "channels: 12"))
    with pytest.raises(AssertionError, match=r"InputError: .*step_000007: does not fit this model"):
        run_ranks("work:restore", 1, tiny_recipe.parent, str(tiny_recipe), str(saved))


@pytest.mark.parametrize(("size", "key"), [(4, "strategy: hybrid_shard"), (2, "strategy: no_shard"), (2, "tensor: 2")])
def test_a_checkpoint_of_any_layout_holds_each_tensor_once(tiny_recipe: Path, size: int, key: str) -> None:
    text, directory = tiny_recipe.read_text(), tiny_recipe.parent / "run" / "checkpoints"
    tiny_recipe.write_text(text.replace("precision: fp32", f"precision: fp32, {key}"))
    run_ranks("work:save", size, tiny_recipe.parent, str(tiny_recipe), str(directory), 0.5)
    again = restored(size, tiny_recipe, directory / "step_000007")
    tiny_recipe.write_text(text)
    alone = restored(1, tiny_recipe, directory / "step_000007")
    assert all(np.array_equal(again[name], alone[name]) for name in alone)
    names, read = sharded.reader(directory / "step_000007")
    once = sum(read(name).nbytes for name in names)
    written = sum(path.stat().st_size for path in (directory / "step_000007").glob("*.safetensors"))
    assert once < written < 1.2 * once, "headers, and no copy"
