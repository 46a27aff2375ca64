"""Layers that several ranks compute together, by heads and columns or by tokens, give what one process gives."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import equality
import saving
from conftest import RECIPE, write_subset
from ranks import run_ranks
from test_equality import compare, worst
from test_saver import steps

from esmshard.model.families.family_registry import FAMILIES

Found = dict[str, Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing full": {"activation_checkpointing": "full"},
    "checkpointing selective": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "unsharded": {"accumulate": "unsharded"},
    "compiled": {"compile": True},
    "bf16": {"precision": "bf16"},
    "wrong": {"wrong": True},
}
MATRIX: dict[int, dict[str, list[str]]] = {
    2: {"full_shard": [*OPTIONS]},
    4: {"full_shard": ["plain", "checkpointing full", "wrong"], "no_shard": ["plain"]},
}
KINDS = {"tensor": 2, "context": 2}
CASES = [
    (f"{kind} {n}", size, strategy, option)
    for kind, n in KINDS.items()
    for size, row in MATRIX.items()
    for strategy, some in row.items()
    for option in some
]
CASES += [("tensor 4", 4, "full_shard", "checkpointing selective")]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training chains, one without coordinates; steps of about three records."""
    directory = tmp_path_factory.mktemp("tensor")
    write_subset(directory, "train", "train", range(24), unresolved=equality.UNLABELLED)
    write_subset(directory, "valid", "valid", range(5))
    text = RECIPE.replace("global_tokens: 400", "global_tokens: 150").replace("blocks: 1", "blocks: 0")
    path = directory / "tiny.yaml"
    path.write_text(text.format(tokens_per_rank=66, out=directory / "run"))
    return path


@pytest.fixture(scope="module")
def reference(recipe: Path) -> dict[str, Any]:
    return equality.plain(str(recipe))


@pytest.fixture(scope="module")
def on_ranks(recipe: Path) -> Callable[[int], list[Found]]:
    known: dict[int, list[Found]] = {}

    def run(size: int) -> list[Found]:
        if size not in known:
            wanted = {
                f"{kind}, {strategy}, {option}": {"strategy": strategy, kind.split()[0]: int(kind.split()[1])}
                | OPTIONS[option]
                for kind, size_, strategy, option in CASES
                if size_ == size
            }
            known[size] = run_ranks("equality:cases", size, recipe.parent, str(recipe), wanted)
        return known[size]

    return run


@pytest.mark.parametrize(("kind", "size", "strategy", "option"), [case for case in CASES if case[3] != "wrong"])
def test_gradients_and_losses(
    on_ranks: Callable[[int], list[Found]],
    reference: dict[str, Any],
    kind: str,
    size: int,
    strategy: str,
    option: str,
) -> None:
    compare([found[f"{kind}, {strategy}, {option}"] for found in on_ranks(size)], reference, option)


@pytest.mark.parametrize(("kind", "size", "strategy", "option"), [case for case in CASES if case[3] == "wrong"])
def test_the_mean_of_means_is_noticed(
    on_ranks: Callable[[int], list[Found]],
    reference: dict[str, Any],
    kind: str,
    size: int,
    strategy: str,
    option: str,
) -> None:
    for found in on_ranks(size):
        assert worst(found[f"{kind}, {strategy}, {option}"]["gradients"], reference["gradients"]) > 1e-2


def test_every_family(recipe: Path) -> None:
    """The smallest size of each family, with all of its weights trained, and with a LoRA on every matrix."""
    text, wanted = recipe.read_text(), []
    for name in FAMILIES:
        size = "nano" if name == "esm2" else f"{name}_nano"
        for method in ("full", "lora"):
            path = recipe.with_name(f"{size}-{method}.yaml")
            adapt = "" if method == "full" else "adapt: {method: lora, rank: 4, targets: [q, k, v, out, fc1, fc2]}\n"
            path.write_text(text.replace("{name: nano}", f"{{name: {size}}}") + adapt)
            wanted += [(str(path), {"strategy": "full_shard", kind: n}) for kind, n in KINDS.items()]
    results = run_ranks("equality:recipes", 2, recipe.parent, wanted, equality.STEPS, True)
    for n, (path, _) in enumerate(wanted):
        with equality.double_precision():
            reference = equality.plain(path)
        assert max(reference["all_moved"].values()) > 1e-3, "nothing was learned that could differ"
        compare([found[n] for found in results], reference, "plain", most=10)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "method"), [("nano", "full"), ("esmc_nano", "lora")])
def test_twenty_steps_on_four_ranks(recipe: Path, size: str, method: str) -> None:
    """(2 x 2), (1 x 4) and (4 x 1), data x tensor, with recomputed layers, beside one process without."""
    path = recipe.with_name(f"{size}-{method}-four.yaml")
    adapt = "" if method == "full" else "adapt: {method: lora, rank: 4, targets: [q, k, v, out, fc1, fc2]}\n"
    path.write_text(recipe.read_text().replace("{name: nano}", f"{{name: {size}}}") + adapt)
    kinds = {"full": [{"tensor": 2}, {"context": 4}], "selective": [{"tensor": 4}, {}]}
    wanted = [
        (str(path), settings | {"activation_checkpointing": mode}) for mode, some in kinds.items() for settings in some
    ]
    results = run_ranks("equality:recipes", 4, recipe.parent, wanted, 20)
    reference = equality.plain(str(path), 20)
    assert len(reference["losses"]) == 20
    for n in range(len(wanted)):
        compare([found[n] for found in results], reference, "plain", most=10)


@pytest.mark.parametrize("head", ["attention", "both"])
def test_heads_over_attention_maps(recipe: Path, head: str) -> None:
    """Queries and keys of all heads and tokens are gathered, and every rank has the maps of all."""
    path, own = recipe.with_name(f"{head}.yaml"), "" if head == "attention" else ", channels: 8, blocks: 0"
    path.write_text(recipe.read_text().replace(", channels: 8, blocks: 0", f", head: {head}{own}"))
    reference = equality.plain(str(path))
    options = ("plain", "checkpointing full")
    wanted = {f"{kind}, {option}": {kind: n} | OPTIONS[option] for option in options for kind, n in KINDS.items()}
    results = run_ranks("equality:cases", 2, recipe.parent, str(path), wanted)
    for name in wanted:
        # What the last layer does after its queries and keys has no part in the attention head.
        compare([found[name] for found in results], reference, "plain", 15)


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


def test_what_each_rank_holds(on_ranks: Callable[[int], list[Found]], recipe: Path) -> None:
    """Two ranks of a group hold the matrices of the layers once, and a share of all the rest."""
    whole = sum(parameter.size for parameter in equality.plain(str(recipe), 0)["gradients"].values())
    for size in MATRIX:
        held = [found["tensor 2, full_shard, plain"]["held"] for found in on_ranks(size)]
        assert whole < sum(held) < 1.25 * whole * 1.1


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
