"""Every strategy, with every option, on any number of ranks, computes what one plain process computes, also where ranks
compute layers together, by heads and columns or by tokens.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import equality
import ranks
from ranks import run_ranks

from esmshard.model.families.family_registry import FAMILIES
from esmshard.parallel.layout import STRATEGIES

GOLDEN = Path(__file__).parent.parent / "golden" / "contact_losses.txt"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing full": {"activation_checkpointing": "full"},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "unsharded": {"accumulate": "unsharded"},
    "compiled": {"compile": True},
    "compiled, selective": {"compile": True, "activation_checkpointing": "selective"},
    "reduced in bf16": {"reduce_dtype": "bf16"},
    "bf16": {"precision": "bf16"},
    "wrong": {"wrong": True},
}
KINDS = {"tensor": 2, "context": 2}
"""Ranks that compute a layer together, by the key of the recipe. A case of them is named as in `tensor 2: plain`."""
MATRIX: dict[int, dict[str, list[str]]] = {
    # One rank's FSDP is the same under every name; it is there for offload.
    1: {"full_shard": ["plain", "checkpointing full", "offload", "compiled, selective", "reduced in bf16", "wrong"]},
    2: {
        "full_shard": [
            *("plain", "checkpointing selective", "offload", "unsharded", "wrong"),
            *(
                f"tensor 2: {o}"
                for o in ("plain", "checkpointing selective", "offload", "unsharded", "compiled", "wrong")
            ),
            *(f"context 2: {o}" for o in ("plain", "checkpointing full", "compiled", "bf16", "wrong")),
        ],
        "shard_grad_op": ["plain", "unsharded"],
        "no_shard": ["plain", "offload"],
    },
    4: {
        "full_shard": ["plain", "wrong", "tensor 2: plain", "tensor 4: checkpointing selective", "context 2: plain"],
        "hybrid_shard": ["plain", "checkpointing selective", "unsharded"],
        "no_shard": ["plain", *(f"{kind} {n}: plain" for kind, n in KINDS.items())],
    },
}
"""What the suite has minutes for. `pytest -m slow` takes every strategy with every option on each number of ranks."""
TOLERANCE = {"reduced in bf16": (2e-2, 1e-3), "bf16": (0.3, 5e-2)}
"""Of gradients and of losses; 1e-5 and 1e-5 for all others. Kinds of CPUs differ in bf16."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.written(tmp_path_factory.mktemp("equality"))


@pytest.fixture(scope="module")
def reference(recipe: Path) -> dict[str, Any]:
    return equality.plain(str(recipe))


@pytest.fixture(scope="module")
def masked_rows() -> np.ndarray:
    return equality.masked_step(equality.ALONE, None)


def named(matrix: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Settings of cases by name."""
    return {f"{s}, {o}": {"strategy": s} | settings(o) for s, options in matrix.items() for o in options}


def settings(option: str) -> dict[str, Any]:
    kind, _, option = option.rpartition(": ")
    return OPTIONS[option] | ({kind.split()[0]: int(kind.split()[1])} if kind else {})


def worst(mine: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], most: int = 20) -> float:
    """Largest difference, relative to the largest entry of each tensor, or to a hundredth of the largest of all.

    More than `most` tensors must have a gradient above that.

    Some gradients are zero but for rounding (a bias added to all keys changes no softmax): they need the floor.
    """
    assert mine.keys() == reference.keys()
    assert len(reference) > 20
    largest = {name: float(np.abs(g).max()) for name, g in reference.items()}
    floor = max(largest.values()) / 100
    assert sum(value > floor for value in largest.values()) > most, "most gradients vanish: nothing is compared"
    return max(float(np.abs(mine[n] - reference[n]).max()) / max(largest[n], floor) for n in reference)


def compare(results: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], case: str, most: int = 20) -> None:
    option = case.rpartition(", ")[2].rpartition(": ")[2]
    of_gradients, of_losses = TOLERANCE.get(option, (1e-5, 1e-5))
    for result in results:
        assert result["loss"] == pytest.approx(reference["loss"], abs=of_losses), case
        assert worst(result["gradients"], reference["gradients"], most) < of_gradients, case
        assert len(result["losses"]) == len(reference["losses"]) >= equality.STEPS
        assert np.allclose(result["losses"], reference["losses"], rtol=0, atol=of_losses), case
        if option not in TOLERANCE:
            assert np.allclose(result["norms"], reference["norms"], rtol=1e-3), case
        assert result["moved"] == pytest.approx(reference["moved"], rel=0.1), case


@pytest.mark.parametrize("size", MATRIX)
def test_gradients_and_losses_are_those_of_one_process(
    recipe: Path, reference: dict[str, Any], masked_rows: np.ndarray, size: int
) -> None:
    """With the negative control: if each rank divided by its own count, the comparison would notice.

    33 rows of the tied embedding are uneven on any number of ranks, and a broken tie leaves the last ones behind.
    """
    assert reference["moved"] > 1e-2, "nothing was learned that could differ"
    assert (masked_rows > 1e-4).all()
    wanted = named(MATRIX[size])
    of_ranks = run_ranks("equality:cases", size, recipe.parent, str(recipe), wanted)
    whole = sum(map(np.size, reference["gradients"].values()))
    for case, how in wanted.items():
        results = [found[case] for found in of_ranks]
        if how.get("wrong"):
            assert all(worst(result["gradients"], reference["gradients"]) > 1e-2 for result in results), case
        else:
            compare(results, reference, case)
        assert {result["groups"] for result in results} == {equality.CONFIG.n_layers + 1}, "each layer, and the root"
        if "tensor" not in how:
            group = {"no_shard": 1, "hybrid_shard": 2}.get(how["strategy"], size)
            assert {result["group"] for result in results} == {group}
            assert sum(result["held"] for result in results) == whole * size // group
            assert max(result["held"] for result in results) < 1.15 * whole / group
        if how.keys() == {"strategy"}:  # A first AdamW step is as long as the learning rate.
            assert all(np.allclose(result["rows"], masked_rows, rtol=1e-2) for result in results), case
    plain = [found["full_shard, plain"] for found in of_ranks]
    assert [result["count"] for result in plain] == {1: [7], 2: [7, 0], 4: [4, 2, 0, 1]}[size], "uneven, and no label"
    if size == 2:  # two ranks of a group hold the matrices of the layers once, and a share of all the rest
        held = sum(found["full_shard, tensor 2: plain"]["held"] for found in of_ranks)
        assert whole < held < 1.25 * whole * 1.1


def test_every_strategy_and_option_is_in_the_matrix() -> None:
    assert {strategy for row in MATRIX.values() for strategy in row} == set(STRATEGIES)
    options = {option.rpartition(": ")[2] for row in MATRIX.values() for some in row.values() for option in some}
    assert options == set(OPTIONS)


def test_every_family_on_ranks(recipe: Path) -> None:
    """The smallest size of each family, with all of its weights trained, or with a LoRA on every matrix."""
    layouts = {"full": [{}, {"tensor": 2}, {"context": 2}], "lora": [{"tensor": 2}, {"context": 2}]}
    wanted = []
    for family in FAMILIES:
        for method, kinds in layouts.items():
            size = f"{family}_nano".removeprefix("esm2_")
            path = recipe.with_name(f"{size}-{method}.yaml")
            adapt = "" if method == "full" else "adapt: {method: lora, rank: 4, targets: [q, k, v, out, fc1, fc2]}\n"
            path.write_text(recipe.read_text().replace("{name: nano}", f"{{name: {size}}}") + adapt)
            wanted += [(str(path), kind) for kind in kinds]
    results = run_ranks("equality:recipes", 2, recipe.parent, wanted, equality.STEPS, True)
    with equality.double_precision():
        references = {path: equality.plain(path) for path in {path for path, _ in wanted}}
    for n, (path, kind) in enumerate(wanted):
        assert max(references[path]["all_moved"].values()) > 1e-3, "nothing was learned that could differ"
        compare([found[n] for found in results], references[path], f"{Path(path).stem} {kind}", most=10)


def test_heads_over_attention_maps(recipe: Path) -> None:
    """Where ranks compute layers together, queries and keys of all heads and tokens are gathered, and every rank has
    the maps of all.
    """
    path, options = recipe.with_name("both.yaml"), ["plain", "tensor 2: checkpointing full", "context 2: plain"]
    path.write_text(recipe.read_text().replace(", channels: 8, blocks: 0", ", head: both, channels: 8, blocks: 0"))
    reference = equality.plain(str(path))
    assert reference["moved"] > 1e-2
    wanted = named({"full_shard": options})
    results = run_ranks("equality:cases", 2, recipe.parent, str(path), wanted)
    for case in wanted:
        compare([found[case] for found in results], reference, case, 15)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_everything_with_everything(
    recipe: Path, reference: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole cross."""
    strategies = [s for s in STRATEGIES if size == 4 or s != "hybrid_shard"]
    wanted = named({s: [o for o in OPTIONS if o != "wrong"] for s in strategies})
    monkeypatch.setattr(ranks, "TIMEOUT", 1700)
    results = run_ranks("equality:cases", size, recipe.parent, str(recipe), wanted)
    for case in wanted:
        compare([found[case] for found in results], reference, case)


def test_loss_curves_are_equal_on_1_and_3_ranks_and_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    curves = {w: run_ranks("work:curve", w, tmp_path, str(tiny_recipe), 20) for w in (1, 3)}
    reference = curves[1][0]
    # 20 steps as they were when this file was made (torch 2.13, CPU). A change of numerics says why it changes them.
    golden = [float(line) for line in GOLDEN.read_text().split()]
    assert np.allclose(reference["losses"], golden, rtol=0, atol=1e-3)
    assert reference["losses"][-1] < reference["losses"][0]
    for world_size, results in curves.items():
        for result in results:
            assert np.allclose(result["losses"], reference["losses"], rtol=0, atol=1e-4), world_size
            assert np.allclose(result["norms"], reference["norms"], rtol=1e-3), world_size
            assert result["tied"]
            assert result["names"] == reference["names"]
            assert np.array_equal(result["inv_freq"], reference["inv_freq"])
    assert not any(prefix in name for name in reference["names"] for prefix in ("_checkpoint", "_fsdp", "_orig"))


def test_bf16_keeps_fp32_weights_and_is_the_same_on_1_and_2_ranks(tiny_recipe: Path, tmp_path: Path) -> None:
    """An fp32 residual stream on one of the sides is 2e-4 and 4e-3 apart."""
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(text.replace("precision: fp32", "precision: bf16, activation_checkpointing: full"))
    alone, half = (run_ranks("work:curve", size, tmp_path, str(tiny_recipe), 6)[0] for size in (1, 2))
    assert half["kept_dtypes"] == ["torch.float32"]
    exact = float(GOLDEN.read_text().split()[0])
    assert 1e-6 < abs(half["losses"][0] - exact) < 0.02 * exact
    assert not any("_checkpoint" in name for name in half["names"])
    assert alone["losses"][0] == pytest.approx(half["losses"][0], abs=2e-5)
    assert alone["norms"][0] == pytest.approx(half["norms"][0], rel=5e-4)
    assert np.allclose(alone["losses"], half["losses"], rtol=0, atol=1e-3)


def test_a_nan_on_one_rank_leaves_all_ranks_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    for result in run_ranks("work:poisoned", 2, tmp_path, str(tiny_recipe)):
        assert result["skipped"]
        assert result["moved"] == 0


def test_mistakes_are_noticed(recipe: Path) -> None:
    """The negative control: with a part of the communication left out, these tests would notice."""
    normed = recipe.with_name("mistake.yaml")
    normed.write_text(recipe.read_text().replace("{name: nano}", "{name: esmc_nano}"))
    for mistake in ("norm of own heads", "bias of every rank", "gradients that count twice"):
        path = normed if mistake == "norm of own heads" else recipe
        reference = equality.plain(str(path), 1)
        for found in run_ranks("equality:mistaken", 2, recipe.parent, str(path), mistake):
            assert worst(found["gradients"], reference["gradients"], 10) > 1e-2, mistake


def test_what_selective_checkpointing_computes_again(recipe: Path) -> None:
    """Of a layer's six products none, whatever their shapes are on a rank. Divided ranks keep the sum of `out` and
    compute the product again. With four, fc1 and fc2 have the same shape, and fc1 is the one that is kept.
    """
    layers = equality.CONFIG.n_layers
    for tensor in (1, 2, 4):
        wanted = {mode: {"activation_checkpointing": mode, "tensor": tensor} for mode in ("none", "selective", "full")}
        for found in run_ranks("equality:operations", tensor, recipe.parent, str(recipe), wanted):
            again = {
                name: {mode: calls.get(name, 0) - found["none"].get(name, 0) for mode, calls in found.items()}
                for name in ("addmm", "reduce_scatter_tensor", "all_gather_into_tensor")
            }
            assert again["addmm"] == {"none": 0, "selective": layers * (tensor > 1), "full": layers * 5}
            if tensor > 1:
                assert again["reduce_scatter_tensor"] == {"none": 0, "selective": 0, "full": layers}
                assert again["all_gather_into_tensor"] == {"none": 0, "selective": layers * 2, "full": layers * 2}


def test_ranks_exchange_what_was_planned(recipe: Path) -> None:
    """The plan leaves out the sums of a few numbers."""
    wanted = {
        f"{kind}, {mode}": {kind: n, "activation_checkpointing": mode}
        for kind, n in KINDS.items()
        for mode in ("none", "full", "selective")
    }
    for size in ("nano", "esmc_nano"):
        path = recipe.with_name(f"{size}-traffic.yaml")
        path.write_text(recipe.read_text().replace("{name: nano}", f"{{name: {size}}}"))
        for found in run_ranks("equality:operations", 2, recipe.parent, str(path), wanted):
            for name, calls in found.items():
                assert calls["bytes"] == calls["planned bytes"], (size, name)


def test_layers_are_compiled_once_for_all_packs(recipe: Path) -> None:
    """The compiler sees plain tensors. If it saw how the parts of a rank are put in their place, it would compile each
    layer, and give up after eight.
    """
    modes = ("none", "full", "selective")
    wanted = {mode: {"tensor": 2, "activation_checkpointing": mode} for mode in modes}
    wanted |= {f"context, {mode}": {"context": 2, "activation_checkpointing": mode} for mode in modes}
    for found in run_ranks("equality:graphs", 2, recipe.parent, str(recipe), wanted):
        assert {tuple(found[mode]) for mode in modes} == {(1, 1, 1, 1)}
        for first, *_, last in (found[f"context, {mode}"] for mode in modes):
            assert first > 1
            # Once more for other numbers of tokens. torch 2.11 compiles for each number of records, too.
            assert last <= first + 1 or Version(torch.__version__) < Version("2.13")
