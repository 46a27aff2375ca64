"""Every strategy, with every option, on any number of ranks, computes what one plain process computes, also where ranks
compute layers together, by heads and columns or by tokens.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
import saving
from ranks import run_ranks
from test_saver import steps

from esmshard.model.families.family_registry import FAMILIES
from esmshard.parallel.layout import STRATEGIES

GOLDEN = Path(__file__).parent.parent / "golden" / "contact_losses.txt"

Found = dict[str, dict[str, Any]]

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
TOGETHER = [option for option in OPTIONS if option not in ("compiled, selective", "reduced in bf16")]
MATRIX: dict[int, dict[str, list[str]]] = {
    # One rank's FSDP is the same under every name; it is there for offload.
    1: {
        "full_shard": [
            *("plain", "checkpointing full", "checkpointing selective", "offload"),
            *("compiled", "compiled, selective", "reduced in bf16", "bf16", "wrong"),
        ]
    },
    2: {
        "full_shard": [*[*OPTIONS][:5], "wrong", *(f"{kind} {n}: {o}" for kind, n in KINDS.items() for o in TOGETHER)],
        "shard_grad_op": ["plain", "unsharded"],
        "no_shard": ["plain", "offload", "unsharded"],
    },
    4: {
        "full_shard": [
            *("plain", "wrong", "tensor 4: checkpointing selective"),
            *(f"{kind} {n}: {o}" for kind, n in KINDS.items() for o in ("plain", "checkpointing full", "wrong")),
        ],
        "shard_grad_op": ["plain"],
        "hybrid_shard": ["plain", "checkpointing selective", "offload", "unsharded"],
        "no_shard": ["plain", *(f"{kind} {n}: plain" for kind, n in KINDS.items())],
    },
}
"""What the suite has minutes for. `pytest -m slow` takes every strategy with every option on each number of ranks."""

CASES = [(size, strategy, option) for size, row in MATRIX.items() for strategy, some in row.items() for option in some]
TOLERANCE = {"reduced in bf16": (2e-2, 1e-3), "bf16": (0.3, 5e-2)}
"""Of gradients and of losses; 1e-5 and 1e-5 for all others. Kinds of CPUs differ in bf16."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.written(tmp_path_factory.mktemp("equality"))


@pytest.fixture(scope="module")
def reference(recipe: Path) -> dict[str, Any]:
    return equality.plain(str(recipe))


def named(size: int, matrix: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Settings of the cases of a world size, by name."""
    return {f"{s}, {o}": {"strategy": s} | settings(o) for s, some in matrix.items() for o in some}


def settings(option: str) -> dict[str, Any]:
    kind, _, option = option.rpartition(": ")
    return OPTIONS[option] | ({kind.split()[0]: int(kind.split()[1])} if kind else {})


@pytest.fixture(scope="module")
def on_ranks(recipe: Path) -> Callable[[int], list[Found]]:
    """All cases of a world size, on all its ranks. Processes are started once for all of them."""
    known: dict[int, list[Found]] = {}

    def run(size: int) -> list[Found]:
        if size not in known:
            known[size] = run_ranks("equality:cases", size, recipe.parent, str(recipe), named(size, MATRIX[size]))
        return known[size]

    return run


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


@pytest.mark.parametrize(("size", "strategy", "option"), [case for case in CASES if not case[2].endswith("wrong")])
def test_gradients_and_ten_losses(
    on_ranks: Callable[[int], list[Found]], reference: dict[str, Any], size: int, strategy: str, option: str
) -> None:
    results = [found[f"{strategy}, {option}"] for found in on_ranks(size)]
    assert len(results) == size
    assert reference["moved"] > 1e-2, "nothing was learned that could differ"
    compare(results, reference, option)


def compare(results: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], option: str, most: int = 20) -> None:
    option = option.rpartition(": ")[2]
    of_gradients, of_losses = TOLERANCE.get(option, (1e-5, 1e-5))
    for result in results:
        assert result["loss"] == pytest.approx(reference["loss"], abs=of_losses)
        assert worst(result["gradients"], reference["gradients"], most) < of_gradients
        assert len(result["losses"]) == len(reference["losses"]) >= equality.STEPS
        assert np.allclose(result["losses"], reference["losses"], rtol=0, atol=of_losses)
        if option not in TOLERANCE:
            assert np.allclose(result["norms"], reference["norms"], rtol=1e-3)
        assert result["moved"] == pytest.approx(reference["moved"], rel=0.1)


@pytest.mark.parametrize(
    ("size", "settings", "methods", "double"),
    [
        (2, [{"strategy": strategy} for strategy in ("full_shard", "shard_grad_op", "no_shard")], ["full"], False),
        (4, [{"strategy": "hybrid_shard"}], ["full"], False),
        (2, [{kind: n} for kind, n in KINDS.items()], ["full", "lora"], True),
    ],
)
def test_every_family_on_any_number_of_ranks(
    recipe: Path, size: int, settings: list[dict[str, Any]], methods: list[str], double: bool
) -> None:
    """The smallest size of each family, with all of its weights trained, or with a LoRA on every matrix."""
    paths = [adapted(recipe, f"{f}_nano".removeprefix("esm2_"), method) for f in FAMILIES for method in methods]
    wanted = [(str(path), some) for path in paths for some in settings]
    results = run_ranks("equality:recipes", size, recipe.parent, wanted, equality.STEPS, double)
    for n, (path, _) in enumerate(wanted):
        with equality.double_precision() if double else nullcontext():
            reference = equality.plain(path)
        assert max(reference["all_moved"].values()) > 1e-3, "nothing was learned that could differ"
        compare([found[n] for found in results], reference, "plain", most=10)


def adapted(recipe: Path, size: str, method: str) -> Path:
    """The recipe for another model, all of which is trained, or a LoRA on every matrix."""
    path = recipe.with_name(f"{size}-{method}.yaml")
    adapt = "" if method == "full" else "adapt: {method: lora, rank: 4, targets: [q, k, v, out, fc1, fc2]}\n"
    path.write_text(recipe.read_text().replace("{name: nano}", f"{{name: {size}}}") + adapt)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("size", "method"), [("nano", "full"), ("esmc_nano", "lora")])
def test_twenty_steps_on_four_ranks(recipe: Path, size: str, method: str) -> None:
    """(2 x 2), (1 x 4) and (4 x 1), data x tensor, with recomputed layers, beside one process without."""
    path = adapted(recipe, size, method)
    kinds = {"full": [{"tensor": 2}, {"context": 4}], "selective": [{"tensor": 4}, {}]}
    wanted = [
        (str(path), settings | {"activation_checkpointing": mode}) for mode, some in kinds.items() for settings in some
    ]
    results = run_ranks("equality:recipes", 4, recipe.parent, wanted, 20)
    reference = equality.plain(str(path), 20)
    assert len(reference["losses"]) == 20
    for n in range(len(wanted)):
        compare([found[n] for found in results], reference, "plain", most=10)


def test_a_track_on_two_ranks(recipe: Path) -> None:
    """Structure letters of all records but one, in crops and in dummy micro-batches too."""
    (size,) = (f"{family.name}_nano" for family in FAMILIES.values() if "3di" in {one.name for one in family.tracks})
    text = recipe.read_text().replace("{name: nano}", f"{{name: {size}}}")
    letters = [one.split() for one in (recipe.parent / "train.fasta").read_text().split(">")[2:]]
    (recipe.parent / "3di.fasta").write_text("".join(f">{name}\n{letter[::-1]}\n" for name, letter in letters))
    without, path = recipe.with_name("without.yaml"), recipe.with_name("tracks.yaml")
    without.write_text(text)
    path.write_text(text.replace("long: crop", "long: crop, tracks: {3di: 3di.fasta}"))
    reference = equality.plain(str(path))
    assert worst(equality.plain(str(without))["gradients"], reference["gradients"], 10) > 1e-3, "the track is not read"
    wanted = [(str(path), {"strategy": strategy}) for strategy in ("full_shard", "no_shard")]
    results = run_ranks("equality:recipes", 2, recipe.parent, wanted, equality.STEPS)
    for n in range(len(wanted)):
        compare([found[n] for found in results], reference, "plain", most=10)


@pytest.mark.parametrize("head", ["attention", "both"])
def test_heads_over_attention_maps(recipe: Path, head: str) -> None:
    """Where ranks compute layers together, queries and keys of all heads and tokens are gathered, and every rank has
    the maps of all.
    """
    path, options = recipe.with_name(f"{head}.yaml"), ["plain", "checkpointing selective"]
    options += [f"{kind} {n}: {option}" for kind, n in KINDS.items() for option in ("plain", "checkpointing full")]
    own = "" if head == "attention" else ", channels: 8, blocks: 0"
    path.write_text(recipe.read_text().replace(", channels: 8, blocks: 0", f", head: {head}{own}"))
    reference = equality.plain(str(path))
    assert reference["moved"] > 1e-2
    results = run_ranks("equality:cases", 2, recipe.parent, str(path), named(2, {"full_shard": options}))
    for option in options:
        # What the last layer does after its queries and keys has no part in the attention head.
        compare([found[f"full_shard, {option}"] for found in results], reference, option, 15)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_everything_with_everything(
    recipe: Path, reference: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole cross."""
    strategies = [s for s in STRATEGIES if size == 4 or s != "hybrid_shard"]
    matrix = {s: [o for o in OPTIONS if o != "wrong"] for s in strategies}
    wanted = named(size, matrix)
    monkeypatch.setattr(ranks, "TIMEOUT", 1700)
    results = run_ranks("equality:cases", size, recipe.parent, str(recipe), wanted)
    assert len(wanted) >= {1: 27, 2: 27, 4: 36}[size]
    for strategy, some in matrix.items():
        for option in some:
            compare([found[f"{strategy}, {option}"] for found in results], reference, option)


@pytest.mark.parametrize(("size", "strategy", "option"), [case for case in CASES if case[2].endswith("wrong")])
def test_mean_of_means_is_noticed(
    on_ranks: Callable[[int], list[Found]], reference: dict[str, Any], size: int, strategy: str, option: str
) -> None:
    """The negative control: were each rank to divide by its own count, these tests would notice."""
    for found in on_ranks(size):
        assert worst(found[f"{strategy}, {option}"]["gradients"], reference["gradients"]) > 1e-2


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_had_uneven_work_and_one_had_no_label(on_ranks: Callable[[int], list[Found]], size: int) -> None:
    results = [found["full_shard, plain"] for found in on_ranks(size)]
    assert [result["count"] for result in results] == {2: [7, 0], 4: [4, 2, 0, 1]}[size]
    assert len({result["micro_batches"] for result in results}) == 2, "no rank took part without work"


def test_what_lies_where(on_ranks: Callable[[int], list[Found]]) -> None:
    """Each rank's share of the weights; the layers and the root are one group each."""
    whole = on_ranks(1)[0]["full_shard, plain"]["held"]
    for size, strategy, option in [case for case in CASES if not case[2].startswith("tensor")]:
        results = [found[f"{strategy}, {option}"] for found in on_ranks(size)]
        group = {"no_shard": 1, "hybrid_shard": 2}.get(strategy, size)
        assert {result["group"] for result in results} == {group}
        assert {result["groups"] for result in results} == {equality.CONFIG.n_layers + 1}
        assert sum(result["held"] for result in results) == whole * size // group
        assert max(result["held"] for result in results) < 1.15 * whole / group
    for size in (2, 4):  # two ranks of a group hold the matrices of the layers once, and a share of all the rest
        held = sum(found["full_shard, tensor 2: plain"]["held"] for found in on_ranks(size))
        assert whole < held < 1.25 * whole * 1.1


@pytest.mark.parametrize("option", ["plain", "checkpointing full", "checkpointing selective"])
def test_checkpointing_computes_each_layer_twice(on_ranks: Callable[[int], list[Found]], option: str) -> None:
    result = on_ranks(2)[0][f"full_shard, {option}"]
    assert result["passes"] == 3 * (1 if option == "plain" else 2), "three micro-batches"


def test_every_strategy_is_in_the_matrix() -> None:
    assert {strategy for row in MATRIX.values() for strategy in row} == set(STRATEGIES)
    options = {option.rpartition(": ")[2] for row in MATRIX.values() for some in row.values() for option in some}
    assert options == set(OPTIONS)


def test_every_row_of_the_tied_embedding_moves(on_ranks: Callable[[int], list[Found]]) -> None:
    """33 rows are uneven on any number of ranks, and the last ones are what a broken tie leaves behind."""
    alone = equality.masked_step(equality.ALONE, None)
    assert (alone > 1e-4).all()
    seen = 0
    for size, row in MATRIX.items():
        for strategy in row:
            for found in on_ranks(size):
                moved, seen = found[f"{strategy}, plain"]["rows"], seen + 1
                assert moved.shape == (33,)
                assert np.allclose(moved, alone, rtol=1e-2), "a first AdamW step is as long as the learning rate"
    assert seen == 1 + 2 * 3 + 4 * 4


def test_loss_curves_are_equal_on_1_and_3_ranks_and_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    curves = {w: run_ranks("work:curve", w, tmp_path, str(tiny_recipe), 20) for w in (1, 3)}
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
            assert np.array_equal(result["inv_freq"], reference["inv_freq"])
    assert not any(prefix in name for name in reference["names"] for prefix in ("_checkpoint", "_fsdp", "_orig"))


def test_bf16_keeps_fp32_weights_and_follows_the_fp32_curve(tiny_recipe: Path, tmp_path: Path) -> None:
    exact = run_ranks("work:curve", 1, tmp_path, str(tiny_recipe), 6)[0]
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(text.replace("precision: fp32", "precision: bf16, activation_checkpointing: full"))
    half = run_ranks("work:curve", 2, tmp_path, str(tiny_recipe), 6)[0]
    assert half["kept_dtypes"] == ["torch.float32"]
    assert half["losses"] != exact["losses"]
    assert np.allclose(half["losses"], exact["losses"], rtol=0.02)
    assert not any("_checkpoint" in name for name in half["names"])
    # One process computes in bf16 what two compute. An fp32 residual stream on one of the sides is 2e-4 and 4e-3 apart.
    alone = run_ranks("work:curve", 1, tmp_path, str(tiny_recipe), 6)[0]
    assert alone["losses"][0] == pytest.approx(half["losses"][0], abs=2e-5)
    assert alone["norms"][0] == pytest.approx(half["norms"][0], rel=5e-4)
    assert np.allclose(alone["losses"], half["losses"], rtol=0, atol=1e-3)


def test_a_nan_on_one_rank_leaves_all_ranks_as_they_were(tiny_recipe: Path, tmp_path: Path) -> None:
    for result in run_ranks("work:poisoned", 2, tmp_path, str(tiny_recipe)):
        assert result["skipped"]
        assert result["moved"] == 0


@pytest.mark.parametrize("mistake", ["norm of own heads", "bias of every rank", "gradients that count twice"])
def test_mistakes_are_noticed(recipe: Path, mistake: str) -> None:
    """The negative control: with a part of the communication left out, these tests would notice."""
    path = recipe.with_name("mistake.yaml")
    path.write_text(recipe.read_text().replace("{name: nano}", "{name: esmc_nano}"))
    path = path if mistake == "norm of own heads" else recipe
    reference = equality.plain(str(path), 1)
    for found in run_ranks("equality:mistaken", 2, recipe.parent, str(path), mistake):
        assert worst(found["gradients"], reference["gradients"], 10) > 1e-2


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_what_selective_checkpointing_computes_again(recipe: Path, tensor: int) -> None:
    """Of a layer's six products none, whatever their shapes are on a rank. Divided ranks keep the sum of `out` and
    compute the product again. With four, fc1 and fc2 have the same shape, and fc1 is the one that is kept.
    """
    wanted = {mode: {"activation_checkpointing": mode, "tensor": tensor} for mode in ("none", "selective", "full")}
    layers = equality.CONFIG.n_layers
    for found in run_ranks("equality:operations", tensor, recipe.parent, str(recipe), wanted):
        products = {mode: calls["addmm"] - found["none"]["addmm"] for mode, calls in found.items()}
        assert products == {"none": 0, "selective": layers * (tensor > 1), "full": layers * 5}
        if tensor > 1:
            sums, gathers = (
                {mode: calls[name] - found["none"][name] for mode, calls in found.items()}
                for name in ("reduce_scatter_tensor", "all_gather_into_tensor")
            )
            assert sums == {"none": 0, "selective": 0, "full": layers}
            assert gathers == {"none": 0, "selective": layers * 2, "full": layers * 2}


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


def test_a_checkpoint_is_the_same_whatever_divided_the_model(tiny_recipe: Path, tmp_path: Path) -> None:
    """Stopped and continued as 2 x 2, 4 x 1, 1 x 2, 1 x 1 and 2 x 2 (data x tensor), beside an unbroken run. At last
    two ranks divide the tokens.
    """
    text = tiny_recipe.read_text()

    def until(size: int, together: str, out: Path, stop: int | None) -> None:
        tiny_recipe.write_text(text.replace("precision: fp32", f"precision: fp32, {together}"))
        assert len(set(run_ranks("saving:until", size, tmp_path, str(tiny_recipe), str(out), stop))) == 1

    until(1, "tensor: 1", tmp_path / "whole", None)
    two, one, tokens = "tensor: 2", "tensor: 1", "context: 2"
    for size, together, stop in ((4, two, 1), (4, one, 2), (2, two, 3), (1, one, 4), (4, two, 5), (2, tokens, None)):
        until(size, together, tmp_path / "run", stop)
    mine, theirs = steps(tmp_path / "run"), steps(tmp_path / "whole")
    for key in ("step", "split", "lr", "epoch", "records", "residues"):
        assert [line.get(key) for line in mine] == [line.get(key) for line in theirs], key
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], abs=1e-4)
    ours, others = (saving.weights_of(str(tmp_path / out / "checkpoints" / "step_000006")) for out in ("run", "whole"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in others.items()}
    weights = [name for name in others if name.startswith("model.")]
    assert all(np.allclose(ours[name], others[name], rtol=0, atol=1e-4) for name in weights)


def test_a_stopped_run_goes_on_bit_for_bit(tiny_recipe: Path, tmp_path: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("precision: fp32", "precision: fp32, tensor: 2"))
    for out, stops in (("whole", (None,)), ("run", (3, None))):
        for stop in stops:
            run_ranks("saving:until", 2, tmp_path, str(tiny_recipe), str(tmp_path / out), stop)
    ours, others = (saving.weights_of(str(tmp_path / out / "checkpoints" / "step_000006")) for out in ("run", "whole"))
    assert ours.keys() == others.keys()
    assert all(np.array_equal(ours[name], others[name]) for name in ours)
