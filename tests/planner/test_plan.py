"""`esmshard plan` on the shipped recipe, with small and large models and machines."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command import esmshard
from plan_model import MODEL

from esmshard import planner as plans
from esmshard.errors import UsageError
from esmshard.model import hub
from esmshard.model.families.family_registry import SIZES, build
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.parallel.layout import Layout
from esmshard.planner import MIB, MicroBatches, Option, Plan, head_bytes, memory, numbers_of, parse
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import AdaptSettings


def planned(gpus: str, *overrides: str, nodes: int = 1, memory: float | None = None) -> Plan:
    small = ("data.max_length=128", "task.channels=32")
    recipe = recipe_file.load(recipe_file.resolve("contact"), [*small, *overrides])
    return plans.plan(recipe, parse(gpus, nodes, memory_gb=memory))


def option(found: Plan, strategy: str, checkpointing: str = "none", offload: bool = False) -> Option:
    wanted = {"strategy": strategy, "activation_checkpointing": checkpointing, "cpu_offload": offload, "tensor": 1}
    (matching,) = (o for o in found.options if wanted.items() <= vars(o.layout).items())
    return matching


THREE_B = ("model.name=esm2_t36_3B_UR50D", "init=pretrained", "batch.global_tokens=131072", "task.blocks=0")
FIFTEEN_B = ("model.name=esm2_t48_15B_UR50D", "init=pretrained", "batch.global_tokens=100000", "task.blocks=0")


@pytest.fixture(scope="module")
def three_b() -> Plan:
    return planned("8xA100-40GB", *THREE_B)


def test_a_released_model_is_planned_without_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("the planner must not download")

    monkeypatch.setattr(hub, "fetch", never)
    found = planned("8xH200-141GB", "model.name=esm2_t48_15B_UR50D", "init=pretrained")
    assert found.numbers.config == SIZES["esm2_t48_15B_UR50D"]
    assert found.numbers.parameters > 15e9
    # LM head (but for the tied matrix) and contact regression do not learn here.
    frozen = 5120**2 + 5120 + 2 * 5120 + 33 + 48 * 40 + 1
    assert found.numbers.parameters - found.numbers.trained == frozen


def test_every_possible_strategy_and_mode_is_estimated(three_b: Plan) -> None:
    """The 40 heads allow 1, 2, 4 and 8 GPUs for each layer; with 8 there is nothing left for a strategy to divide."""
    for tensor, strategies in {1: 3, 2: 3, 4: 3, 8: 1}.items():
        assert sum(o.layout.tensor == tensor for o in three_b.options) == 3 * strategies
    assert three_b.options[0].layout.precision == "bf16"
    assert three_b.room == int((40536 * 2**20 - 2**30) * 0.9)
    found = planned("8xA100-40GB", "model.name=esm2_t33_650M_UR50D", "init=pretrained")
    assert {o.layout.tensor for o in found.options} == {1, 2, 4}  # 20 heads


def test_more_memory_for_less_work_and_traffic(three_b: Plan) -> None:
    full, kept = option(three_b, "full_shard"), option(three_b, "shard_grad_op")
    again = option(three_b, "full_shard", "full")
    assert full.memory.total < kept.memory.total
    assert full.cost.received > kept.cost.received
    assert again.largest > full.largest
    assert again.cost.recompute > 0 == full.cost.recompute
    assert not option(three_b, "no_shard").fits  # 45 GB of state
    assert full.memory.parameters == pytest.approx(2.84e9 * 4 / 8, rel=0.01)


def test_a_step_is_cut_into_what_fits(three_b: Plan) -> None:
    """16,384 tokens a GPU; what does not fit at once comes in more parts, none over what fits."""
    fitting = [o for o in three_b.options if o.fits and o.layout.tensor == 1]
    assert any(o.micro_batches == 1 for o in fitting)
    for o in fitting:
        if o.micro_batches > 1:
            assert o.micro_batches == -(-16384 // o.largest)
            assert o.tokens <= o.largest
        assert o.memory.total <= three_b.room


def test_the_best_is_the_fastest_that_fits(three_b: Plan) -> None:
    best, fitting = three_b.best, [o for o in three_b.options if o.fits]
    assert best is not None
    shortest = min(o.cost.seconds for o in fitting)
    assert best.cost.seconds <= 1.03 * shortest
    assert best.memory.total == min(o.memory.total for o in fitting if o.cost.seconds <= 1.03 * shortest)
    assert three_b.keys == [
        f"parallel.strategy={best.layout.strategy}",
        f"parallel.activation_checkpointing={best.layout.activation_checkpointing}",
        f"batch.tokens_per_rank={best.largest}",
    ]
    recipe_file.load(recipe_file.resolve("contact"), [*THREE_B, *three_b.keys])  # they can be pasted
    assert f"{best.memory.total / 2**30:.1f} of {three_b.room / 2**30:.1f} GiB" in three_b.reason
    assert [o.fits for o in three_b.options] == sorted((o.fits for o in three_b.options), reverse=True)


def test_what_the_user_asked_for_is_planned_with() -> None:
    asked = ("batch.tokens_per_rank=4096", "parallel.reduce_dtype=bf16", "parallel.precision=fp32")
    found = planned("8xA100-80GB", *THREE_B, *asked)
    full = option(found, "full_shard")
    assert (full.tokens, full.micro_batches, full.layout.precision) == (4096, 4, "fp32")
    assert found.keys[2] == "batch.tokens_per_rank=4096"
    faster = option(planned("8xA100-80GB", *THREE_B, asked[0]), "full_shard")
    assert full.cost.compute > 5 * faster.cost.compute


def test_where_nothing_fits_offloading_is_tried() -> None:
    found = planned("1xA100-40GB", *THREE_B)
    assert len(found.options) == 6
    assert not option(found, "full_shard", "full").fits
    away = option(found, "full_shard", "full", offload=True)
    assert away.fits
    assert away.memory.host == pytest.approx(16 * 2.84e9, rel=0.01)
    assert "parallel.cpu_offload=true" in found.keys
    assert f"{away.memory.host / 2**30:.0f} GiB of each machine's memory" in found.reason
    asked = planned("1xA100-40GB", *THREE_B, "parallel.cpu_offload=true")
    assert [o.layout.cpu_offload for o in asked.options] == [True] * 3


def test_settings_that_no_strategy_can_have_are_refused() -> None:
    for overrides, token in (
        (("parallel.cpu_offload=true", "parallel.accumulate=unsharded"), r"parallel\.accumulate"),
        (("parallel.tensor=3",), r"parallel\.tensor: 3 does not divide the 40 attention heads"),
        (("parallel.tensor=2", "adapt.method=lora", "model.quantize=nf4"), "quantised matrices cannot"),
    ):
        with pytest.raises(UsageError, match=token):
            planned("8xA100-40GB", *THREE_B, *overrides)


def test_head_bytes_are_the_longest_record_and_the_usual_mix() -> None:
    task: Any = SimpleNamespace(head_bytes=lambda tokens, n_logits, dim: tokens**2 * (n_logits == 64) * (dim == 9))
    config: Any = SimpleNamespace(n_logits=64, dim=9)
    bytes_of = head_bytes(task, np.array([10, 10, 20, 40], dtype=np.int32), Layout(precision="bf16"), config)
    per_token = (100 + 100 + 400 + 1600) / 80
    assert bytes_of(40) == bytes_of(10) == 800, "the longest is there, however small the rest"
    assert bytes_of(120) == round((1600 + 80 * per_token) / 2)


def micro_batches(share: int, longest: int) -> MicroBatches:
    """Those of MODEL on eight GPUs in bf16, with a head that keeps 500 bytes a token."""
    task = SimpleNamespace(head_bytes=lambda tokens, n_logits, dim: 1000 * tokens)
    recipe: Any = SimpleNamespace(task=task, batch=SimpleNamespace(global_tokens=8 * share))
    train: Any = SimpleNamespace(tokens=np.array([longest], dtype=np.int32), beside=0)
    return MicroBatches(recipe, train, MODEL, Layout(precision="bf16", world_size=8), "cuda")


def test_the_largest_micro_batch_fits_and_one_token_more_does_not() -> None:
    layout, share = Layout(precision="bf16", world_size=8), 1_000_000

    def need(tokens: int) -> int:
        return memory(MODEL, layout, tokens, 500 * tokens, "cuda", micro_batches=-(-share // tokens)).total

    for room in (600 * MIB, 9000 * MIB):
        found = micro_batches(share, 100).largest(room)
        assert 100 < found < share
        assert need(found) <= room < need(found + 1)
    # Never more than a share, and never less than the longest record.
    assert micro_batches(4096, 100).largest(2**40) == 4096
    assert micro_batches(4096, 5000).largest(2**40) == 5000
    assert micro_batches(4096, 100).largest(300 * MIB) == 0
    assert micro_batches(4096, 100).largest(2**40, share=8192) == 8192


def test_divided_layers_are_taken_where_they_pay() -> None:
    """On 40 GB cards, 15B needs full checkpointing, unless ranks share activations."""
    found = planned("8xA100-40GB", *FIFTEEN_B)
    best = found.best
    assert best is not None
    assert best.layout.tensor > 1
    assert f"parallel.tensor={best.layout.tensor}" in found.keys
    assert best.cost.seconds < min(o.cost.seconds for o in found.options if o.fits and o.layout.tensor == 1) / 1.03
    assert f"{best.layout.strategy}, tensor {best.layout.tensor} " in found.as_text()
    again = planned("8xA100-40GB", *FIFTEEN_B, *found.keys)  # only the recipe's own number
    assert {o.layout.tensor for o in again.options} == {best.layout.tensor}


def test_the_command() -> None:
    done = esmshard("plan", "contact", "--gpus", "2xa100-40gb", "--nodes", "2", "--network", "100", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["machines"]["world_size"], found["machines"]["network"]) == (4, 12.5e9)
    memory = found["best"]["memory"]
    assert memory["total"] == sum(v for k, v in memory.items() if k not in ("total", "host", "when"))
    assert found["best"]["cost"]["seconds"] > 0
    assert found["keys"][0].startswith("parallel.strategy=")
    missing = esmshard("plan", "contact")
    assert missing.returncode == 2
    assert "--gpus is missing" in missing.stderr


def test_quantised_matrices_are_planned_with() -> None:
    lora = (*THREE_B, "adapt.method=lora")
    plain, *others = (planned("2xA100-40GB", *lora, f"model.quantize={kind}") for kind in ("null", "nf4", "int8"))
    # 36 layers of 12 x 2,560 x 2,560 numbers, which have 9 D rows: D for q, k, v, out and fc2, 4 D for fc1.
    numbers, rows = 36 * 12 * 2560**2, 36 * 9 * 2560
    before = option(plain, "full_shard", "full")
    for found, size in zip(others, (numbers // 2 + numbers // 16, numbers + 4 * rows), strict=True):
        assert found.numbers.parameters == plain.numbers.parameters
        assert found.numbers.trained == plain.numbers.trained
        need = option(found, "full_shard", "full")
        # Half of the weights is on each of two GPUs; what is quantised is whole on both.
        assert need.memory.parameters == pytest.approx(before.memory.parameters - 4 * numbers / 2 + size, abs=8)
        assert need.memory.gathered < before.memory.gathered
        assert need.cost.received < 0.2 * before.cost.received


def test_a_long_test_record_is_planned_with(tmp_path: Path) -> None:
    """Records are cropped for training only. Without gradients a token takes its layer's widest moment once."""
    small, peaks = ["data.max_length=128", "batch.global_tokens=4096"], []
    for residues in (100, 30_000):
        (tmp_path / "test.fasta").write_text(f">a\n{'A' * residues}\n")
        overrides = [*small, f"data.test={tmp_path / 'test.fasta'}"]
        found = plans.plan(recipe_file.load(recipe_file.resolve("mlm"), overrides), parse("2xA100-40GB"))
        peaks.append(option(found, "full_shard").memory)
    assert peaks[0].when != peaks[1].when == "validation and evaluation"
    widest = 2 * 2 * found.numbers.config.ffn_width  # bf16, before and after gelu
    assert peaks[1].activations == pytest.approx(30_002 * (widest + 3 * 2 * found.numbers.config.dim), rel=0.01)


def test_the_numbers_of_a_frozen_and_of_an_adapted_model() -> None:
    config = SIZES["nano"]
    layer = 12 * 32 * 32 + 13 * 32

    def found(**adapt: Any) -> tuple[int, int, tuple[str, ...], int]:
        with torch.device("meta"):
            model = FineTuner(build(config), LanguageModelHead())
        model.adapt(AdaptSettings(**adapt), 0)
        numbers = numbers_of(model, config)
        assert numbers.parameters == sum(p.numel() for p in model.parameters())
        return numbers.layer_parameters, numbers.layer_trained, numbers.inputs, numbers.lora

    every = ("fc1", "fc2", "out", "qkv")
    assert found() == (layer, layer, every, 0)
    model = build(config)
    model.layers[0].fc1.requires_grad_(False)
    assert numbers_of(model, config).inputs == every, "the other layer keeps all of its inputs"
    assert found(freeze=("layers.0", "embedding")) == (layer, layer // 2, every, 0), "of the two layers on average"
    assert found(method="head") == (layer, 0, (), 0)
    lora = 2 * (32 + 32) + 2 * (32 + 128)
    adapted = found(method="lora", rank=2, targets=("k", "fc1"), bias="none")
    assert adapted == (layer + lora, lora, ("fc1", "qkv"), 4)
