"""Every strategy, with every option, on any number of ranks, computes what one plain process computes, also where ranks
compute layers together, by heads and columns or by tokens; with all weights, with LoRA, and with a new head only.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
from conftest import RECIPE, write_subset
from ranks import run_ranks

from esmshard.model.families.family_registry import FAMILIES, SIZES
from esmshard.parallel.layout import STRATEGIES

GOLDEN = Path(__file__).parent.parent / "golden" / "contact_losses.txt"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing full": {"activation_checkpointing": "full"},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "unsharded": {"accumulate": "unsharded"},
    "compiled, selective": {"compile": True, "activation_checkpointing": "selective"},
    "reduced in bf16": {"reduce_dtype": "bf16"},
    "bf16": {"precision": "bf16"},
    "wrong": {"wrong": True},
}
MATRIX: dict[int, dict[str, list[str]]] = {
    # One rank's FSDP is the same under every name; it is there for offload.
    1: {"full_shard": ["plain", "checkpointing full", "offload", "compiled, selective", "reduced in bf16", "wrong"]},
    2: {
        "full_shard": [
            *("plain", "checkpointing selective", "offload", "unsharded", "wrong"),
            *("tensor 2: plain", "tensor 2: offload", "tensor 2: compiled, selective", "tensor 2: wrong"),
            *("context 2: plain", "context 2: checkpointing full", "context 2: bf16", "context 2: wrong"),
        ],
        "shard_grad_op": ["plain"],
        "no_shard": ["plain"],
    },
    4: {
        "full_shard": ["plain", "wrong", "tensor 4: checkpointing selective", "context 2: plain"],
        "hybrid_shard": ["plain", "unsharded"],
        "no_shard": ["tensor 2: plain"],
    },
}
"""Of the recipe `contact`. In `tensor 2: plain`, two ranks compute each layer together. `pytest -m slow` takes every
strategy with every option on each number of ranks."""
OTHERS: dict[int, list[tuple[str, str]]] = {
    1: [
        ("lora of some", "full_shard, checkpointing full"),
        ("lora on nf4", "full_shard, checkpointing selective"),
    ],
    2: [
        *[("mlm", f"{strategy}, plain") for strategy in ("full_shard", "no_shard")],
        *[("maps", f"full_shard, {how}") for how in ("plain", "tensor 2: checkpointing full", "context 2: plain")],
        *[("lora", "full_shard, offload"), ("lora of some", "shard_grad_op, unsharded")],
        *[("head", "shard_grad_op, unsharded"), ("lora on nf4", "full_shard, checkpointing full")],
        ("head on int8", "no_shard, plain"),
    ],
    4: [("mlm", "hybrid_shard, plain")],
}
"""Of other recipes. An uneven number of rows of the embedding is tied to the LM head of `mlm`."""
ADAPT = {
    "lora": "adapt: {method: lora, rank: 3, alpha: 2.0}\n",
    "lora of some": "adapt: {method: lora, rank: 2, targets: [k, fc2], bias: none}\n",
    "head": "adapt: {method: head}\n",
}
LEAST = {"lora": 26, "lora of some": 10, "head": 5, "maps": 10}
"""The number of tensors with a considerable gradient; 20 for other recipes."""
TOLERANCE = {"reduced in bf16": (2e-2, 1e-3), "bf16": (0.3, 5e-2)}
"""Of gradients and of losses; 1e-5 and 1e-5 for all others. Kinds of CPUs differ in bf16."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write recipes on 24 training chains, one without coordinates; steps of about three records."""
    directory = tmp_path_factory.mktemp("equality")
    write_subset(directory, "train", "train", range(24), unresolved=equality.UNLABELLED)
    write_subset(directory, "valid", "valid", range(5))
    text = RECIPE.replace("global_tokens: 400", "global_tokens: 150").replace("blocks: 1", "blocks: 0")
    text = text.format(tokens_per_rank=66, out=directory / "run")

    def write(name: str, *changes: tuple[str, str], adapt: str = "") -> str:
        changed = text + adapt
        for old, new in changes:
            assert old in changed
            changed = changed.replace(old, new)
        (directory / f"{name}.yaml").write_text(changed)
        return str(directory / f"{name}.yaml")

    return write


@pytest.fixture(scope="module")
def recipes(written: Callable[..., str]) -> dict[str, str]:
    """Recipes with a nano model, by name."""
    found = {"contact": written("contact")}
    found["mlm"] = written("mlm", ("{name: contact, channels: 8, blocks: 0}", "{name: mlm}"))
    found["maps"] = written("maps", ("name: contact", "name: contact, head: both"))
    for name, adapt in ADAPT.items():
        found[name] = written(name, adapt=adapt)
    for name in ("lora on nf4", "head on int8"):
        method, _, kind = name.partition(" on ")
        found[name] = written(name, ("name: nano", f"name: nano, quantize: {kind}"), adapt=ADAPT[method])
    return found


plain = cache(equality.plain)


def settings(case: str) -> dict[str, Any]:
    """The `parallel` section of a case such as `full_shard, tensor 2: plain`."""
    strategy, _, how = case.partition(", ")
    kind, _, option = how.rpartition(": ")
    return {"strategy": strategy} | OPTIONS[option] | ({kind.split()[0]: int(kind.split()[1])} if kind else {})


def worst(mine: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], least: int = 20) -> float:
    """Largest difference, relative to the largest entry of each tensor, or to a hundredth of the largest of all.

    Some gradients are zero but for rounding (a bias added to all keys changes no softmax): they need this floor. At
    least so many tensors must have a gradient above the floor.
    """
    assert mine.keys() == reference.keys()
    largest = {name: float(np.abs(g).max()) for name, g in reference.items()}
    floor = max(largest.values()) / 100
    assert sum(value > floor for value in largest.values()) >= least, "most gradients vanish: nothing is compared"
    return max(float(np.abs(mine[n] - reference[n]).max()) / max(largest[n], floor) for n in reference)


def compare(results: Sequence[Mapping[str, Any]], path: str, case: str, least: int = 20) -> None:
    reference, case = plain(path), f"{Path(path).stem}: {case}"
    assert max(reference["moved"].values()) > 1e-3, "nothing was learned that could differ"
    of_gradients, of_losses = TOLERANCE.get(case.rpartition(", ")[2].rpartition(": ")[2], (1e-5, 1e-5))
    for result in results:
        assert result["loss"] == pytest.approx(reference["loss"], abs=of_losses), case
        assert worst(result["gradients"], reference["gradients"], least) < of_gradients, case
        assert len(result["losses"]) == len(reference["losses"]) == equality.STEPS
        assert np.allclose(result["losses"], reference["losses"], rtol=0, atol=of_losses), case
        if of_losses == 1e-5:
            assert np.allclose(result["norms"], reference["norms"], rtol=1e-3), case
        for name, moved in result["moved"].items():
            assert (moved > 0) == (name in reference["gradients"]) or name.endswith("k_proj.bias"), (case, name)


@pytest.mark.parametrize("size", MATRIX)
def test_gradients_and_losses_are_those_of_one_process(recipes: dict[str, str], size: int) -> None:
    """With the negative control: if each rank divided by its own count, the comparison would notice."""
    named = [("contact", f"{strategy}, {how}") for strategy, hows in MATRIX[size].items() for how in hows]
    named += OTHERS[size]
    wanted = [(recipes[name], settings(case)) for name, case in named]
    of_ranks = run_ranks("equality:cases", size, Path(recipes["contact"]).parent, wanted)
    whole = sum(map(np.size, plain(recipes["contact"])["gradients"].values()))
    for n, (name, case) in enumerate(named):
        results, how, path = [results[n] for results in of_ranks], settings(case), recipes[name]
        if how.get("wrong"):
            assert all(worst(r["gradients"], plain(path)["gradients"]) > 1e-2 for r in results), case
        else:
            compare(results, path, case, LEAST.get(name.partition(" on ")[0], 20))
        assert {result["groups"] for result in results} == {SIZES["nano"].n_layers + 1}, "each layer, and the root"
        assert {dtype for result in results for dtype in result["dtypes"]} <= {"torch.float32", "torch.uint8"}
        if name == "contact" and "tensor" not in how:
            group = {"no_shard": 1, "hybrid_shard": 2}.get(how["strategy"], size)
            assert {result["group"] for result in results} == {group}
            assert sum(result["held"] for result in results) == whole * size // group
            assert max(result["held"] for result in results) < 1.2 * whole / group
        if case == "full_shard, plain" and name == "contact":
            counts = {1: [7], 2: [7, 0], 4: [4, 2, 0, 1]}[size]
            assert [result["count"] for result in results] == counts, "uneven, and no label"
        if case == "full_shard, tensor 2: plain" and size == 2 and name == "contact":
            # The two ranks hold the matrices of the layers once, and a share of all the rest.
            assert whole < sum(result["held"] for result in results) < 1.25 * whole * 1.1


def test_what_is_trained_by_each_method(recipes: dict[str, str]) -> None:
    """Written out anew, and not asked of the code."""
    for method in ADAPT:
        for name in plain(recipes[method])["moved"]:
            of_trunk = name.startswith(("trunk.layers.", "trunk.emb_layer_norm_after."))
            trained = name.startswith("head.") or (method != "head" and "lora_" in name)
            trained |= method == "lora" and of_trunk and name.endswith("bias")
            assert (name in plain(recipes[method])["gradients"]) == trained, (method, name)


def test_every_strategy_and_option_is_in_the_matrix() -> None:
    assert {strategy for row in MATRIX.values() for strategy in row} == set(STRATEGIES)
    assert {how.rpartition(": ")[2] for row in MATRIX.values() for hows in row.values() for how in hows} == set(OPTIONS)


def test_every_family_on_ranks(written: Callable[..., str]) -> None:
    """The smallest size of each family, with all weights trained, and of two families with a LoRA on every matrix.

    ESM3 reads coordinates and structure tokens, which one rank does not have, and which are never rounded.
    """
    layouts = {"full": [{"tensor": 2}, {"context": 2}], "lora": [{"tensor": 2}]}
    wanted = []
    for family in FAMILIES:
        for method, kinds in layouts.items() if family in ("esmc", "esm3") else [("full", layouts["full"])]:
            size = f"{family}_nano".removeprefix("esm2_")
            adapt = "" if method == "full" else "adapt: {method: lora, rank: 4, targets: [q, k, v, out, fc1, fc2]}\n"
            path = written(f"{size}-{method}", ("{name: nano}", f"{{name: {size}}}"), adapt=adapt)
            wanted += [(path, kind) for kind in kinds]
            if (family, method) == ("esm3", "full"):
                wanted.append((path, {"precision": "bf16", "activation_checkpointing": "selective"}))
    results = run_ranks("equality:cases", 2, Path(path).parent, wanted, equality.STEPS, True)
    plain.cache_clear()
    with equality.double_precision():
        for path in {path for path, _ in wanted}:
            plain(path)
    for n, (path, kind) in enumerate(wanted):
        if "precision" in kind:
            assert results[0][n]["loss"] == pytest.approx(plain(path)["loss"], abs=5e-3)
        else:
            compare([of_rank[n] for of_rank in results], path, str(kind), 10)
        if Path(path).stem == "esm3_nano-full":
            assert all(of_rank[n]["coordinates"] == {"torch.float32"} for of_rank in results)
            learned = [name for name in plain(path)["gradients"] if "geom_attn" in name or "structure_tokens" in name]
            assert len(learned) == 6
            assert all(plain(path)["moved"][name] > 1e-4 for name in learned)
    plain.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_everything_with_everything(recipes: dict[str, str], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = [s for s in STRATEGIES if size == 4 or s != "hybrid_shard"]
    named = [f"{s}, {o}" for s in strategies for o in OPTIONS if o != "wrong"]
    monkeypatch.setattr(ranks, "TIMEOUT", 1700)
    path = recipes["contact"]
    results = run_ranks("equality:cases", size, Path(path).parent, [(path, settings(case)) for case in named])
    for n, case in enumerate(named):
        compare([of_rank[n] for of_rank in results], path, case)


def test_loss_curves_are_equal_on_1_and_3_ranks_and_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    """20 steps as they were when the file was made (torch 2.13, CPU). A change of numerics says why it changes them."""
    golden = [float(line) for line in GOLDEN.read_text().split()]
    given = ([(str(tiny_recipe), {})], 20, False, False)
    (reference,), *others = (found for size in (1, 3) for found in run_ranks("equality:cases", size, tmp_path, *given))
    assert np.allclose(reference["losses"], golden, rtol=0, atol=1e-3)
    assert reference["losses"][-1] < reference["losses"][0]
    for (other,) in others:
        assert np.allclose(other["losses"], reference["losses"], rtol=0, atol=1e-4)
        assert np.allclose(other["norms"], reference["norms"], rtol=1e-3)


def test_bf16_keeps_fp32_weights_and_is_the_same_on_1_and_2_ranks(tiny_recipe: Path, tmp_path: Path) -> None:
    """An fp32 residual stream on one of the sides is 2e-4 and 4e-3 apart."""
    given = ([(str(tiny_recipe), {"precision": "bf16", "activation_checkpointing": "full"})], 6, False, False)
    alone, half = (run_ranks("equality:cases", size, tmp_path, *given)[0][0] for size in (1, 2))
    assert alone["dtypes"] == half["dtypes"] == {"torch.float32"}
    exact = float(GOLDEN.read_text().split()[0])
    assert 1e-6 < abs(half["losses"][0] - exact) < 0.02 * exact
    assert alone["losses"][0] == pytest.approx(half["losses"][0], abs=2e-5)
    assert alone["norms"][0] == pytest.approx(half["norms"][0], rel=5e-4)
    assert np.allclose(alone["losses"], half["losses"], rtol=0, atol=1e-3)


def test_a_nan_on_one_rank_leaves_all_ranks_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    for result in run_ranks("work:poisoned", 2, tmp_path, str(tiny_recipe)):
        assert result == {"skipped": True, "moved": 0}


def test_mistakes_are_noticed(recipes: dict[str, str], written: Callable[..., str], tmp_path: Path) -> None:
    """The negative control: with a part of the communication left out, these tests would notice."""
    paths = dict.fromkeys(("bias of every rank", "gradients that count twice"), recipes["contact"])
    paths["norm of own heads"] = written("normed", ("{name: nano}", "{name: esmc_nano}"))
    for of_rank in run_ranks("equality:mistaken", 2, tmp_path, paths):
        for mistake, path in paths.items():
            assert worst(of_rank[mistake]["gradients"], plain(path)["gradients"], 10) > 1e-2, mistake


def test_what_is_computed_and_sent_again(recipes: dict[str, str], written: Callable[..., str], tmp_path: Path) -> None:
    """With selective checkpointing none of a layer's six products runs again, whatever their shapes are on a rank.
    Divided ranks keep the sum of `out` and compute the product again. With four, fc1 and fc2 have the same shape, and
    fc1 is the one that is kept. The traffic is that of the plan, which leaves out the sums of a few numbers.
    """
    normed, layers = written("normed", ("{name: nano}", "{name: esmc_nano}")), SIZES["nano"].n_layers
    modes = ("none", "selective", "full")
    for size in (1, 2, 4):
        wanted = [(recipes["contact"], {"activation_checkpointing": mode, "tensor": size}) for mode in modes]
        if size == 2:
            wanted += [(normed, how) for _, how in wanted]
            wanted += [(path, {**how, "tensor": 1, "context": 2}) for path, how in wanted]
        for of_rank in run_ranks("equality:operations", size, tmp_path, wanted):
            names = ("addmm", "reduce_scatter_tensor", "all_gather_into_tensor")
            again = {name: [calls.get(name, 0) - of_rank[0].get(name, 0) for calls in of_rank[1:3]] for name in names}
            assert again["addmm"] == [layers * (size > 1), layers * 5]
            if size > 1:
                assert again["reduce_scatter_tensor"] == [0, layers]
                assert again["all_gather_into_tensor"] == [layers * 2, layers * 2]
            if size == 2:
                assert all(calls["bytes"] == calls["planned bytes"] > 0 for calls in of_rank)


def test_layers_are_compiled_once_for_all_packs(recipes: dict[str, str], tmp_path: Path) -> None:
    """The compiler sees plain tensors. If it saw how the parts of a rank are put in their place, it would compile each
    layer, and give up after eight. 0 graphs would mean that nothing is compiled.
    """
    full, selective = ({"activation_checkpointing": mode} for mode in ("full", "selective"))
    (alone,) = run_ranks("equality:graphs", 1, tmp_path, recipes["contact"], [full, selective])
    wanted = [{**selective, "tensor": 2}, {**full, "context": 2}]
    for of_rank in run_ranks("equality:graphs", 2, tmp_path, recipes["contact"], wanted):
        assert max(difference for _, difference in [*alone, *of_rank]) < 1e-5
        assert [counts for counts, _ in [*alone, of_rank[0]]] == [[1, 1, 1]] * 3
        first, *_, last = of_rank[1][0]
        assert first > 1
        # Once more for other numbers of tokens. torch 2.11 compiles for each number of records, too.
        assert last <= first + 1 or Version(torch.__version__) < Version("2.13")
