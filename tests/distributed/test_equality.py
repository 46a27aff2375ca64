"""Any number of ranks computes what one plain process computes."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import work
from ranks import run_ranks

from esmshard.data.packing import Plan
from esmshard.tasks.contact import ContactTask
from esmshard.train.job import open_split

GOLDEN = Path(__file__).parent.parent / "golden" / "contact_losses.txt"


def worst(mine: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """Largest difference, relative to the largest entry of each tensor, or to a hundredth of the largest of all.

    Some gradients are zero but for rounding (a bias added to all keys changes no softmax): they need the floor.
    """
    assert mine.keys() == reference.keys()
    assert len(reference) > 20
    largest = {name: float(np.abs(g).max()) for name, g in reference.items()}
    floor = max(largest.values()) / 100
    assert sum(value > floor for value in largest.values()) > 20, "most gradients vanish: nothing is compared"
    return max(float(np.abs(mine[n] - reference[n]).max()) / max(largest[n], floor) for n in reference)


@pytest.mark.parametrize(
    ("world_size", "strategy", "checkpointing"),
    [
        *((1, "full_shard", False), (1, "full_shard", True)),
        *((2, "full_shard", True), (2, "shard_grad_op", False), (3, "full_shard", False)),
    ],
)
def test_gradients_are_those_of_one_plain_process(
    tiny_recipe: Path, tmp_path: Path, world_size: int, strategy: str, checkpointing: bool
) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("precision: fp32", f"precision: fp32, strategy: {strategy}"))
    loss, reference = work.plain_gradients(str(tiny_recipe), 0)
    results = run_ranks("work:gradients", world_size, tmp_path, str(tiny_recipe), 0, checkpointing, False)
    for result in results:
        assert result["loss"] == pytest.approx(loss, abs=1e-6)
        assert worst(result["gradients"], reference) < 1e-5
        assert result["passes"] == (2 if checkpointing else 1), "a layer's forward passes, computing again included"
    assert results[0]["micro_batches"] > 1 or world_size > 2  # gradients were accumulated


def step_with_unlabelled(recipe: Path) -> int:
    """The first step that holds record 5, which has no coordinates."""
    settings = work.load(str(recipe))
    data = open_split(settings, ContactTask(settings.task), "train")
    plan = Plan(data.tokens, settings.batch.global_tokens, settings.train.seed)
    return next(step for step in range(20) if 5 in plan.step(step)[1])


def test_gradients_on_four_ranks_with_ghosts_and_a_record_without_labels(tiny_recipe: Path, tmp_path: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("tokens_per_rank: 130", "tokens_per_rank: 62"))
    step = step_with_unlabelled(tiny_recipe)
    loss, reference = work.plain_gradients(str(tiny_recipe), step)
    results = run_ranks("work:gradients", 4, tmp_path, str(tiny_recipe), step, False, False)
    assert results[0]["loss"] == pytest.approx(loss, abs=1e-6)
    assert worst(results[0]["gradients"], reference) < 1e-5
    assert sum(r["ghosts"] for r in results), "no rank had to take part without work"
    assert len({r["counts"] for r in results}) > 1, "all ranks had the same number of labelled proteins"


def test_mean_of_means_is_told_apart(tiny_recipe: Path, tmp_path: Path) -> None:
    """The negative control: were each rank to divide by its own count, these tests would notice."""
    step = step_with_unlabelled(tiny_recipe)
    _, reference = work.plain_gradients(str(tiny_recipe), step)
    results = run_ranks("work:gradients", 2, tmp_path, str(tiny_recipe), step, False, True)
    assert worst(results[0]["gradients"], reference) > 1e-2


def test_loss_curves_are_equal_on_1_2_3_and_4_ranks(tiny_recipe: Path, tmp_path: Path) -> None:
    curves = {w: run_ranks("work:curve", w, tmp_path, str(tiny_recipe), 20) for w in (1, 2, 3, 4)}
    reference = curves[1][0]
    # 20 steps as they were when this file was made (torch 2.13, CPU). A change of numerics says why it changes them.
    golden = [float(line) for line in GOLDEN.read_text().split()]
    assert np.allclose(reference["losses"], golden, rtol=0, atol=1e-3)
    assert reference["losses"][-1] < reference["losses"][0]
    assert len(reference["losses"]) == 20
    for world_size, results in curves.items():
        for result in results:
            assert np.allclose(result["losses"], reference["losses"], rtol=0, atol=1e-4), world_size
            assert np.allclose(result["norms"], reference["norms"], rtol=1e-3), world_size
            assert result["tied"]
            assert result["names"] == reference["names"]
            # All rows of the tied embedding that a gradient reaches move on every rank's shard: the 20 amino acids,
            # <cls> and <eos>. 33 rows are uneven on any number of ranks.
            assert (result["moved"][[0, 2, *range(4, 24)]] > 1e-4).all(), world_size
            assert np.array_equal(result["inv_freq"], reference["inv_freq"])
    assert not any(prefix in name for name in reference["names"] for prefix in ("_checkpoint", "_fsdp", "_orig"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_keeps_fp32_weights_and_follows_the_fp32_curve(tiny_recipe: Path, tmp_path: Path, world_size: int) -> None:
    exact = run_ranks("work:curve", 1, tmp_path, str(tiny_recipe), 6)[0]
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(text.replace("precision: fp32", "precision: bf16, activation_checkpointing: full"))
    half = run_ranks("work:curve", world_size, tmp_path, str(tiny_recipe), 6)[0]
    assert half["kept_dtypes"] == ["torch.float32"]
    assert half["losses"] != exact["losses"]
    assert np.allclose(half["losses"], exact["losses"], rtol=0.02)
    assert not any("_checkpoint" in name for name in half["names"])


def test_a_nan_on_one_rank_leaves_all_ranks_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    for result in run_ranks("work:poisoned", 2, tmp_path, str(tiny_recipe)):
        assert result["skipped"]
        assert result["moved"] == 0


def test_a_tied_weight_in_two_groups_is_refused(tmp_path: Path) -> None:
    for device in ("cpu", "meta"):
        for message in run_ranks("work:split_tie", 2, tmp_path, device):
            assert "shared" in message, device
