"""`esmshard plan` on the shipped recipe, with small and large models and machines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import esmshard
from plan_model import counted_numbers

from esmshard.errors import InputError, UsageError
from esmshard.model import hub
from esmshard.model.families.esm2.esm2_model import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import Layout
from esmshard.planner import recipe_plan
from esmshard.planner.cost import Work, cost
from esmshard.planner.machines import parse
from esmshard.planner.parameter_counts import numbers_of
from esmshard.planner.plan_text import as_json, as_text, keys
from esmshard.planner.recipe_plan import Option, RecipePlan, head_bytes
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks.contact.contact_settings import ContactSettings
from esmshard.tasks.finetuner import FineTuner
from esmshard.tasks.mlm_settings import MlmSettings
from esmshard.tasks.registry import new_task


def planned(gpus: str, *overrides: str, nodes: int = 1) -> RecipePlan:
    small = ("data.max_length=128", "task.channels=32")
    return recipe_plan.plan(recipe_file.load(recipe_file.resolve("contact"), [*small, *overrides]), parse(gpus, nodes))


def option(found: RecipePlan, strategy: str, checkpointing: str = "none", offload: bool = False) -> Option:
    (one,) = (
        o for o in found.options if (o.strategy, o.checkpointing, o.cpu_offload) == (strategy, checkpointing, offload)
    )
    return one


THREE_B = ("model.name=esm2_t36_3B_UR50D", "init=pretrained", "batch.global_tokens=131072", "task.blocks=0")


@pytest.fixture(scope="module")
def three_b() -> RecipePlan:
    return planned("8xA100-40GB", *THREE_B)


def test_a_released_model_is_planned_without_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("the planner must not download")

    monkeypatch.setattr(hub, "fetch", never)
    found = planned("8xH200-141GB", "model.name=esm2_t48_15B_UR50D", "init=pretrained")
    assert (found.numbers.n_layers, found.numbers.dim) == (48, 5120)
    assert found.numbers.parameters > 15e9
    # LM head (but for the tied matrix) and contact regression do not learn here.
    frozen = 5120**2 + 5120 + 2 * 5120 + 33 + 48 * 40 + 1
    assert found.numbers.parameters - found.numbers.trained == frozen
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InputError, match="not a model that can be read"):
        planned("A100-40GB", f"model.name={tmp_path}")


def test_lengths_are_those_that_training_sees() -> None:
    found = planned("A100-40GB", "data.max_length=100", "data.long=crop")
    tokens = np.minimum(recipe_plan.open_split(found.recipe, "train", None).store.lengths, 100) + 2
    assert found.lengths.longest == 102
    assert found.lengths.records == len(tokens) == 776
    assert found.lengths.mean == pytest.approx(tokens.mean())
    assert found.lengths.attended == pytest.approx((tokens.astype(float) ** 2).sum() / tokens.sum())


def _task(channels: int = 32) -> ContactSettings:
    return ContactSettings(name="contact", channels=channels)


def test_every_strategy_and_mode_has_a_line(three_b: RecipePlan) -> None:
    assert [(o.strategy, o.checkpointing) for o in three_b.options] == [
        (strategy, mode)
        for strategy in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
        for mode in ("none", "selective", "full")
    ]
    assert "which is full_shard" in option(three_b, "hybrid_shard").impossible
    assert option(three_b, "hybrid_shard").memory is None
    assert three_b.precision == "bf16"
    assert three_b.room == int((40536 * 2**20 - 2**30) * 0.9)


def test_more_memory_for_less_work_and_traffic(three_b: RecipePlan) -> None:
    full, kept = option(three_b, "full_shard"), option(three_b, "shard_grad_op")
    again = option(three_b, "full_shard", "full")
    assert full.memory is not None
    assert kept.memory is not None
    assert again.memory is not None
    assert full.cost is not None
    assert kept.cost is not None
    assert again.cost is not None
    assert full.memory.total < kept.memory.total
    assert full.cost.traffic.total > kept.cost.traffic.total
    assert again.largest > full.largest
    assert again.cost.recompute > 0 == full.cost.recompute
    assert not option(three_b, "no_shard").fits  # 45 GB of state
    assert full.memory.parameters == pytest.approx(2.84e9 * 4 / 8, rel=0.01)


def test_a_step_is_cut_into_what_fits(three_b: RecipePlan) -> None:
    """16,384 tokens a GPU; a smaller GPU takes them in more parts, none over what fits beside earlier gradients."""
    assert any(o.fits and o.micro_batches == 1 for o in three_b.options)
    for o in three_b.options:
        if o.fits:
            if o.micro_batches == 1:
                assert o.tokens == 16384
            else:
                assert o.micro_batches == -(-16384 // o.largest)
                assert o.tokens <= o.largest
            assert o.memory is not None
            assert o.memory.total <= three_b.room


def test_the_best_is_the_fastest_that_fits(three_b: RecipePlan) -> None:
    best = three_b.best
    assert best is not None
    assert best.cost is not None
    fitting = [o for o in three_b.options if o.fits and o.cost]
    assert best.cost.seconds <= 1.03 * min(o.cost.seconds for o in fitting if o.cost)
    equal = [o for o in fitting if o.cost and o.cost.seconds <= 1.03 * min(x.cost.seconds for x in fitting if x.cost)]
    assert best.memory is not None
    assert best.memory.total == min(o.memory.total for o in equal if o.memory)
    assert keys(three_b) == [
        f"parallel.strategy={best.strategy}",
        f"parallel.activation_checkpointing={best.checkpointing}",
        f"batch.tokens_per_rank={best.largest}",
    ]
    recipe_file.load(recipe_file.resolve("contact"), [*THREE_B, *keys(three_b)])  # they can be pasted


def test_what_the_user_asked_for_is_planned_with() -> None:
    found = planned(
        "8xA100-80GB", *THREE_B, "batch.tokens_per_rank=4096", "parallel.reduce_dtype=bf16", "parallel.precision=fp32"
    )
    full = option(found, "full_shard")
    assert (full.tokens, full.micro_batches) == (4096, 4)
    assert found.precision == "fp32"
    assert keys(found)[2] == "batch.tokens_per_rank=4096"
    faster = planned("8xA100-80GB", *THREE_B, "batch.tokens_per_rank=4096")
    other = option(faster, "full_shard")
    assert full.cost is not None
    assert other.cost is not None
    assert full.cost.traffic.reduce_scatter == pytest.approx(other.cost.traffic.reduce_scatter / 2, abs=2)
    assert full.cost.compute > 5 * other.cost.compute


def test_what_the_time_is_reckoned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 tokens a GPU in parts of at most 5,000 are four of 4,096."""
    seen: list[Work] = []

    def listen(numbers: object, layout: object, work: Work, machines: object) -> object:
        seen.append(work)
        return cost(numbers, layout, work, machines)  # type: ignore[arg-type]

    monkeypatch.setattr(recipe_plan, "cost", listen)
    found = planned("8xA100-80GB", *THREE_B, "batch.tokens_per_rank=5000")
    assert (found.options[0].tokens, found.options[0].micro_batches) == (4096, 4)
    assert (seen[0].tokens, seen[0].micro_batches, seen[0].attended) == (4096, 4, found.lengths.attended)
    assert seen[0].head_bytes == head_bytes(
        found.recipe.task, _tokens(found), Layout(world_size=2, precision="bf16"), 33
    )(4096)
    seen.clear()
    planned("8xV100-32GB", *THREE_B, "batch.tokens_per_rank=5000")
    assert seen[0].attended == 130  # padded to the longest


def _tokens(found: RecipePlan) -> recipe_plan.npt.NDArray[np.int32]:
    return recipe_plan.open_split(found.recipe, "train", None).tokens


def test_groups_and_machines() -> None:
    found = planned("4xA100-40GB", *THREE_B, nodes=2)
    hybrid, full = option(found, "hybrid_shard"), option(found, "full_shard")
    assert hybrid.memory is not None
    assert full.memory is not None
    assert hybrid.memory.parameters == pytest.approx(2 * full.memory.parameters, rel=1e-6)
    assert hybrid.cost is not None
    assert hybrid.cost.traffic.all_reduce > 0
    assert "200 Gbit/s a GPU between machines" in as_text(found)
    asked = planned("8xA100-40GB", *THREE_B, "parallel.strategy=hybrid_shard", "parallel.group_size=2")
    small = option(asked, "hybrid_shard")
    assert small.memory is not None
    assert small.memory.parameters == pytest.approx(2.84e9 * 4 / 2, rel=0.01)
    assert option(asked, "full_shard").memory is not None  # the group size is the other strategy's


def test_where_nothing_fits_offloading_is_tried() -> None:
    found = planned("1xA100-40GB", *THREE_B)
    assert [o.strategy for o in found.options] == ["full_shard"] * 6
    assert not option(found, "full_shard", "full").fits
    away = option(found, "full_shard", "full", offload=True)
    assert away.fits
    assert away.memory is not None
    assert away.memory.host == pytest.approx(16 * 2.84e9, rel=0.01)
    assert found.best is not None
    assert found.best.memory is not None
    assert "parallel.cpu_offload=true" in keys(found)
    lines = as_text(found).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("strategy"))
    table = lines[first : first + 7]
    assert table[-1].startswith("full_shard + cpu_offload  full ")
    assert len({len(line.rstrip()) for line in table}) == 1, "the last column ends in one place"
    assert len({line.index("  ", line.index("full")) for line in table[4:]}) == 1
    ends = [table[0].index(name) + len(name) for name in ("weights", "grads", "total", "exposed")]
    assert all(line[end - 1].isdigit() and line[end] == " " for line in table[1:] for end in ends)
    assert f"each machine needs {found.best.memory.host / 2**30:.0f} GiB of its own memory" in as_text(found)
    asked = planned("1xA100-40GB", *THREE_B, "parallel.cpu_offload=true")
    assert [o.cpu_offload for o in asked.options] == [True] * 3


def test_nothing_at_all_fits() -> None:
    large_head = ("task.channels=512", "task.blocks=64", "parallel.precision=fp32")
    found = planned("1xT4-16GB", "model.name=esm2_t48_15B_UR50D", *large_head)
    assert found.best is None
    assert keys(found) == []
    assert found.reasons()[0].startswith("nothing fits: the least needs ")
    assert "nothing fits" in as_text(found)
    assert "take      " not in as_text(found)


def test_settings_that_no_strategy_can_have_are_refused() -> None:
    with pytest.raises(UsageError, match=r"parallel\.accumulate: unsharded keeps all gradients on the device"):
        planned("4xA100-40GB", "parallel.cpu_offload=true", "parallel.accumulate=unsharded")


def test_older_gpus_pad() -> None:
    assert planned("V100-16GB").precision == "fp16"
    new, old = (option(planned(gpu, *THREE_B), "full_shard") for gpu in ("8xA100-40GB", "8xV100-32GB"))
    assert new.memory is not None
    assert old.memory is not None
    assert old.memory.activations / old.tokens > 1.02 * new.memory.activations / new.tokens
    with pytest.raises(UsageError, match="T4-16GB has no bf16"):
        planned("T4-16GB", "parallel.precision=bf16")


def test_too_few_records() -> None:
    with pytest.raises(InputError, match="train has 776 records, fewer than the 1024 GPUs"):
        planned("8xA100-40GB", nodes=128)


def test_training_data_that_are_not_there() -> None:
    with pytest.raises(InputError) as error:
        planned("8xA100-40GB", "data.train=/none.fasta", "data.valid=/none.fasta", "data.test=/none.fasta")
    assert str(error.value) == (
        "/none.fasta: no such file or directory, which data.train of the recipe names; to plan without the data, pass "
        "data.train=sample:contact/train"
    )


class Squares:
    """A head that keeps as many bytes as the square of a record's tokens."""

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        assert n_logits == 64
        return tokens**2


@pytest.mark.parametrize(
    ("layout", "share"), [(Layout(), 1), (Layout(precision="bf16"), 0.5), (Layout(world_size=2, precision="bf16"), 0.5)]
)
def test_head_bytes_are_the_longest_record_and_the_usual_mix(layout: Layout, share: float) -> None:
    tokens_N = np.array([10, 10, 20, 40], dtype=np.int32)
    bytes_of = head_bytes(Squares(), tokens_N, layout, 64)  # type: ignore[arg-type]
    per_token = (100 + 100 + 400 + 1600) / 80
    assert bytes_of(40) == 1600 * share
    assert bytes_of(10) == 1600 * share  # it is there, however small the rest
    assert bytes_of(120) == round(share * (1600 + 80 * per_token))


def test_a_plan_counts_the_columns_of_the_models_logits(three_b: RecipePlan) -> None:
    """ESM-C has 64 columns, and ESM-2 has 33."""
    train = recipe_plan.open_split(three_b.recipe, "train", None)
    recipe = three_b.recipe.model_copy(update={"task": MlmSettings(name="mlm")})
    names = {"esmc_mini": 64, "mini": 33}
    numbers = {
        columns: recipe_plan.model_numbers(
            recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": name})})
        )
        for name, columns in names.items()
    }
    head = {
        columns: recipe_plan.MicroBatches(recipe, train, found, Layout(), "cpu").head(4096)
        for columns, found in numbers.items()
    }
    assert head[64] / head[33] == pytest.approx(64 / 33, rel=1e-3)


FIFTEEN_B = ("model.name=esm2_t48_15B_UR50D", "init=pretrained", "batch.global_tokens=100000", "task.blocks=0")


def test_divided_layers_are_taken_where_they_pay() -> None:
    """On 40 GB cards, 15B needs full checkpointing, unless ranks share activations."""
    found = planned("8xA100-40GB", *FIFTEEN_B)
    best = found.best
    assert best is not None
    assert best.cost is not None
    assert best.tensor > 1
    assert f"parallel.tensor={best.tensor}" in keys(found)
    whole = [o for o in found.options if o.tensor == 1]
    assert len(whole) == 12
    shortest = min(o.cost.seconds for o in whole if o.fits and o.cost)
    assert best.cost.seconds < shortest / 1.03
    assert all(o.fits and o.cost and o.cost.seconds < shortest / 1.03 for o in found.options if o.tensor > 1)
    assert {o.tensor for o in found.options + found.left_out} == {1, 2, 4, 8}
    reason = found.reasons()[-1]
    assert reason.startswith(f"parallel.tensor={best.tensor}: in a micro-batch a GPU receives ")
    assert "NVLink at 300 GB/s carries in" in reason
    assert reason.endswith(f"the step is {1 - best.cost.seconds / shortest:.0%} shorter than the shortest without it")
    assert f"{best.strategy}, tensor {best.tensor} " in as_text(found)
    assert len(as_json(found)["left_out"]) == len(found.left_out) > 0
    recipe = recipe_file.load(recipe_file.resolve("contact"), [*FIFTEEN_B, *keys(found)])
    again = recipe_plan.plan(recipe, parse("8xA100-40GB"))  # only the recipe's own number
    assert {o.tensor for o in again.options} == {best.tensor}
    assert again.left_out == []
    assert "in place of" in again.reasons()[-1]
    assert "shorter than" not in again.reasons()[-1]


def test_divided_layers_are_left_out_where_the_link_is_slow() -> None:
    esmc = ("model.name=esmc_6b", "init=pretrained", "batch.global_tokens=100000", "task.blocks=0")
    slow = planned("4xL40S-48GB", *esmc)
    assert {o.tensor for o in slow.options} == {1}
    assert {o.tensor for o in slow.left_out} == {2, 4}
    assert "tensor" not in as_text(slow)
    forced = planned("4xL40S-48GB", *esmc, "parallel.tensor=4")
    assert "PCIe at 32 GB/s carries in" in forced.reasons()[-1]
    assert forced.best is not None
    assert slow.best is not None
    assert forced.best.cost is not None
    assert slow.best.cost is not None
    assert forced.best.cost.seconds > slow.best.cost.seconds
    # 25,000 tokens a GPU are 100,000 for the four that compute each layer together.
    assert forced.best.micro_batches * forced.best.tokens == pytest.approx(100_000, rel=0.01)
    alone = planned("4xL40S-48GB", *esmc, "parallel.tensor=1")
    assert (alone.options, alone.left_out) == (slow.options, [])


def test_divided_layers_may_be_all_that_fits() -> None:
    """Cards on which a gathered layer of 15B leaves no room for its activations, and a part of a layer does."""
    recipe = recipe_file.load(recipe_file.resolve("contact"), ["data.max_length=128", "task.channels=32", *FIFTEEN_B])
    found = recipe_plan.plan(recipe, parse("8xA100-40GB", memory="35.5GB"))
    assert found.best is not None
    assert not any(o.fits for o in found.options if o.tensor == 1)
    assert found.best.tensor > 1
    assert found.reasons()[-1].endswith("; nothing fits without it")
    assert "parallel.cpu_offload=true" not in keys(found)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("parallel.tensor=5",), "groups of 5 processes do not divide the 8 of one machine"),
        (("parallel.tensor=3",), "3 does not divide the 40 attention heads"),
        (("parallel.tensor=8", "model.name=esm2_t33_650M_UR50D"), "8 does not divide the 20 attention heads"),
        (("parallel.tensor=2", "adapt.method=lora", "model.quantize=nf4"), "quantised matrices are whole"),
    ],
)
def test_divided_layers_that_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=rf"parallel\.tensor: {said}"):
        planned("8xA100-40GB", *("model.name=esm2_t36_3B_UR50D", "init=pretrained"), *overrides)


def test_numbers_that_do_not_divide_the_model_are_not_estimated() -> None:
    found = planned("8xA100-40GB", "model.name=esm2_t33_650M_UR50D", "init=pretrained")
    assert {o.tensor for o in found.options + found.left_out} == {1, 2, 4}  # 20 heads


def test_reasons(three_b: RecipePlan) -> None:
    first, second, third = three_b.reasons()
    assert first.startswith("it fits: ")
    assert second == "no other option that fits has a shorter step" or second.startswith("the faster options (")
    assert third.startswith("the link hides its ")
    small = planned("8xL4-24GB", "model.name=esm2_t33_650M_UR50D", nodes=2)
    assert "of the step is waiting" in small.reasons()[2]
    assert planned("A100-40GB").reasons()[2] == "nothing travels between GPUs"


def test_the_command() -> None:
    done = esmshard("plan", "contact", "--gpus", "2xa100-40gb", "--nodes", "2", "--network", "100", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["machines"]["world_size"], found["machines"]["network"]) == (4, 12.5e9)
    assert found["lengths"]["longest"] == 162
    assert len(found["options"]) == 12
    memory = found["best"]["memory"]
    assert memory["total"] == sum(v for k, v in memory.items() if k not in ("total", "host", "when"))
    assert found["best"]["cost"]["seconds"] > 0
    assert found["keys"][0].startswith("parallel.strategy=")
    missing = esmshard("plan", "contact")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: --gpus is missing; pass, for example, 8xA100-40GB; known are V100-16GB")


def test_the_table_and_json_say_the_same(three_b: RecipePlan) -> None:
    text, found = as_text(three_b), as_json(three_b)
    assert text.count("not possible: strategy hybrid_shard") == 1
    assert f"take      {' '.join(found['keys'])}" in text
    assert all(reason in text for reason in found["reasons"])
    lines = [line for line in text.splitlines() if line.startswith(("full_shard", "shard_grad_op", "no_shard"))]
    rows = [row for row in found["options"] if row["memory"]]
    assert len(lines) == len(rows) == 9
    for line, row in zip(lines, rows, strict=True):
        parts = line.split()
        kinds = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "workspace", "total")
        assert parts[2:10] == [f"{row['memory'][kind] / 2**30:.2f}" for kind in kinds]
        assert parts[10] == ("yes" if row["fits"] else "no")
        assert parts[11] == (str(row["largest"]) if row["largest"] else "-")
        assert parts[-3:] == [
            f"{1e3 * row['cost']['seconds']:.1f}",
            f"{1e3 * row['cost']['exposed']:.1f}",
            f"{row['cost']['traffic']['total'] / 2**30:.2f}",
        ]


def test_quantised_matrices_are_planned_with() -> None:
    lora = (*THREE_B, "adapt.method=lora")
    plain, *others = (planned("2xA100-40GB", *lora, f"model.quantize={kind}") for kind in ("null", "nf4", "int8"))
    # 36 layers of 12 x 2,560 x 2,560 numbers, which have 9 D rows: D for q, k, v, out and fc2, 4 D for fc1.
    numbers, rows = 36 * 12 * 2560**2, 36 * 9 * 2560
    packed = {"nf4": numbers // 2 + numbers // 16, "int8": numbers + 4 * rows}
    before = option(plain, "full_shard", "full").memory
    assert before is not None
    for found, (kind, size) in zip(others, packed.items(), strict=True):
        assert found.numbers.parameters == plain.numbers.parameters
        assert found.numbers.trained == plain.numbers.trained
        need = option(found, "full_shard", "full").memory
        assert need is not None
        # Half of the weights is on each of two GPUs; what is quantised is whole on both.
        assert need.parameters == pytest.approx(before.parameters - 4 * numbers / 2 + size, abs=8)
        assert need.gathered < before.gathered
        assert found.best is not None
        assert plain.best is not None
        assert found.best.largest > plain.best.largest
        assert found.best.cost is not None
        assert found.best.cost.traffic.total < 0.2 * option(plain, "full_shard", "full").cost.traffic.total  # type: ignore[union-attr]
        text = as_text(found)
        assert f"model.quantize={kind} keeps the frozen matrices of the layers in {size / 2**30:.2f} GiB, whole" in text
        assert "unpacking them takes time, which the times above do not include" in text
    assert "quantize" not in as_text(plain)


def test_a_long_test_record_is_planned_with(tmp_path: Path) -> None:
    """Records are cropped for training only. Without gradients a token takes its layer's widest moment once."""
    small, peaks = ["data.max_length=128", "batch.global_tokens=4096"], []
    for residues in (100, 30_000):
        (tmp_path / "test.fasta").write_text(f">a\n{'A' * residues}\n")
        found = recipe_plan.plan(
            recipe_file.load(recipe_file.resolve("mlm"), [*small, f"data.test={tmp_path / 'test.fasta'}"]),
            parse("2xA100-40GB"),
        )
        need = option(found, "full_shard").memory
        assert need is not None
        peaks.append(need)
    assert peaks[0].when != peaks[1].when == "validation and evaluation"
    numbers = found.numbers
    widest = 2 * max(numbers.ffn_width * 2, numbers.ffn_width)  # bf16, before and after gelu
    assert peaks[1].activations == pytest.approx(30_002 * (widest + 3 * 2 * numbers.dim), rel=0.01)


def test_frozen_weights_are_planned_with() -> None:
    found = {m: planned("2xA100-40GB", *THREE_B, f"adapt.method={m}").numbers for m in ("full", "lora", "head")}
    assert found["full"].trained > 0.99 * found["full"].parameters > 2.8e9
    assert found["head"].trained == 2_560 * 2 + 2 * (2_560 * 32 + 32) + 65 * 32 + 33
    # 36 layers: rank 4 beside four D x D and two D x 4 D matrices, 11 D of biases; and the last norm's.
    lora = 36 * (4 * (4 * 2 + 2 * 5) * 2_560 + 11 * 2_560) + 2_560
    assert found["lora"].trained == lora + found["head"].trained


@pytest.mark.parametrize(
    "adapt",
    [
        {},
        {"method": "head"},
        {"method": "lora"},
        {"method": "lora", "rank": 2, "targets": ["k", "fc1"], "bias": "none"},
        {"method": "lora", "rank": 3, "targets": ["out", "fc2"]},
        {"freeze": ["embedding", "layers.0"]},
    ],
)
@pytest.mark.parametrize("name", ["contact", "mlm"])
@pytest.mark.parametrize("size", ["nano", "esm2_t12_35M_UR50D", "esm1b_t33_650M_UR50S"])
def test_the_numbers_of_a_model_are_those_that_it_has(size: str, adapt: dict[str, Any], name: str) -> None:
    settings = {"contact": ContactSettings(name="contact", channels=12, blocks=2), "mlm": MlmSettings(name="mlm")}[name]
    config, task = SIZES[size], new_task(settings, {})
    with torch.device("meta"):
        model = FineTuner(ESM2(config), task.head(config))
    model.adapt(AdaptSettings(**adapt), 0)
    found = numbers_of(config, task.head_parameters(config), AdaptSettings(**adapt), logits=settings.trains_lm_head)
    assert settings.head_parameters(config) == task.head_parameters(config)
    assert found == counted_numbers(model, config)


def test_a_plan_needs_no_torch() -> None:
    """Importing it takes longer than all the rest."""
    code = (
        "import sys; sys.modules['torch'] = None; from esmshard.cli import app as cli; "
        "sys.argv = ['esmshard', 'plan', 'contact', '--gpus', '8xA100-40GB']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "take      parallel.strategy=" in done.stdout, done.stderr
