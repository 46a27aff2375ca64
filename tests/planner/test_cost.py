"""What a user types for machines; bytes and seconds worked out by hand for round numbers; published runs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import UsageError
from esmshard.model.families.esmc import EsmcConfig
from esmshard.parallel.layout import Layout
from esmshard.planner import (
    GPU,
    GPUS,
    Cost,
    Machines,
    ModelNumbers,
    Work,
    cost,
    data_sheet,
    exchanged,
    our_passes,
    parse,
    training_flops,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from plan_model import MODEL, bf16
from published import RUNS

ROUND = GPU("round", 2**36, half_flops=100e12, fp32_flops=10e12, hbm=1e12, link=100e9)
FOUR = Machines(ROUND, 4)
TWO_BY_FOUR = Machines(ROUND, 4, 2, network=10e9)
MB = 1_000_000


def received(layout: Layout, machines: Machines = FOUR, numbers: ModelNumbers = MODEL, **work: Any) -> int:
    return cost(numbers, layout, Work(**{"tokens": 10_000, **work}), machines).received


def test_bytes_of_strategies_and_options() -> None:
    def found(micro_batches: int = 1, **options: Any) -> int:
        return received(bf16(world_size=4, group=4, **options), micro_batches=micro_batches)

    assert found() == (256 + 240 + 512) * MB * 3 // 4  # forward pass, backward pass, where the root stays, gradients
    assert found() - found(strategy="shard_grad_op") == 240 * MB * 3 // 4
    assert found() - found(reduce_dtype="bf16") == 256 * MB * 3 // 4
    assert found(3) == 3 * found()
    assert found(3) - found(3, accumulate="unsharded") == 2 * 512 * MB * 3 // 4


def test_bytes_between_copies() -> None:
    hybrid = bf16(world_size=8, strategy="hybrid_shard", group=4)
    one = (256 + 240 + 512) * MB * 3 // 4
    assert received(hybrid, TWO_BY_FOUR, micro_batches=2) == 2 * one + 512 * MB // 4  # copies are added once a step
    assert received(bf16(world_size=8, strategy="no_shard"), TWO_BY_FOUR) == 2 * 512 * MB * 7 // 8
    assert received(bf16(), Machines(ROUND, 1)) == 0


def one(work: Work, **options: Any) -> Cost:
    return cost(MODEL, bf16(**options), work, Machines(ROUND, 1))


# A layer's products for 10,000 tokens: 2.4e11 FLOP at 68 TFLOP/s.
PRODUCTS = 10_000 * 24e6 / 68e12


def test_seconds_of_arithmetic() -> None:
    products = one(Work(tokens=10_000, passes=0))
    assert products.compute == pytest.approx(10 * 3 * PRODUCTS)
    assert (products.recompute, products.exposed) == (0, 0)
    attending = one(Work(tokens=10_000, attended=500, passes=0))
    assert attending.compute - products.compute == pytest.approx(10 * 3 * 10_000 * 4 * 1000 * 500 / 40e12)
    moving = one(Work(tokens=10_000, passes=50))
    assert moving.compute - products.compute == pytest.approx(10 * 3 * 10_000 * 50 * 1000 * 2 / 0.8e12)
    head = one(Work(tokens=10_000, passes=0, head_bytes=8 * 10**9))
    assert head.compute - products.compute == pytest.approx(3 * 8e9 / 0.8e12)
    matrix = one(Work(tokens=10_000, passes=0, head_products=12_000_000))
    assert matrix.compute == pytest.approx(11 * 3 * PRODUCTS)
    assert one(Work(tokens=10_000, micro_batches=3, passes=0)).compute == pytest.approx(3 * products.compute)
    assert products.optimizer == pytest.approx(128e6 * 40 / 0.8e12)
    assert products.seconds == pytest.approx(products.compute + products.optimizer)
    assert our_passes(MODEL) == 47
    assert one(Work(tokens=10_000)).compute == pytest.approx(one(Work(tokens=10_000, passes=47)).compute)


def test_seconds_of_what_is_computed_again() -> None:
    work = Work(tokens=10_000, passes=50)
    plain = one(work)
    full = one(work, activation_checkpointing="full")
    assert full.recompute == pytest.approx(plain.compute / 3)
    assert full.compute == pytest.approx(plain.compute)
    selective = one(work, activation_checkpointing="selective")
    assert selective.recompute == pytest.approx(10 * 10_000 * 50 * 1000 * 2 / 0.8e12)
    halves = one(replace(work, recomputed_products=0.5), activation_checkpointing="selective")
    assert halves.recompute - selective.recompute == pytest.approx(10 * PRODUCTS / 2)


def four(work: Work, machines: Machines = FOUR, **options: Any) -> Cost:
    return cost(MODEL, bf16(world_size=machines.world_size, **options), work, machines)


LONG = Work(tokens=200_000)
"""So many tokens that each layer hides its collectives."""
# Three quarters of 24 MB at 75 GB/s, the copy out of the buffer, and the latency.
GATHER = 30e-6 + 18e6 / 75e9 + 2 * 24e6 / 0.8e12
REDUCE = 30e-6 + 36e6 / 75e9
ROOT_GATHER = 30e-6 + 12e6 / 75e9 + 2 * 16e6 / 0.8e12
ROOT_REDUCE = 30e-6 + 24e6 / 75e9


def test_what_a_long_layer_hides() -> None:
    """Shown: the root, the first gather, the gather that the backward pass begins with, and the last reduction."""
    found = four(LONG)
    ends = ROOT_GATHER + ROOT_REDUCE + GATHER + REDUCE
    assert found.exposed == pytest.approx(ends + GATHER)
    assert four(LONG, strategy="shard_grad_op").exposed == pytest.approx(ends)
    assert four(replace(LONG, micro_batches=2)).exposed == pytest.approx(2 * found.exposed)
    once = four(replace(LONG, micro_batches=2), accumulate="unsharded")
    assert once.exposed == pytest.approx(2 * found.exposed - REDUCE - ROOT_REDUCE)
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.optimizer)


SHORT = Work(tokens=10)


def exchange(machines: Machines, **options: Any) -> float:
    """The seconds of all collectives of a model with one layer, which overlap with nothing."""
    numbers = replace(MODEL, config=replace(MODEL.config, n_layers=1))
    return cost(numbers, bf16(world_size=8, **options), SHORT, machines).exposed


def test_machines_share_a_network() -> None:
    """Half of the weights comes from the other machine, over four ports; slower than what NVLink carries meanwhile."""
    gather = 30e-6 + 5e-6 + 24e6 / 2 / 4 / 7.5e9 + 2 * 24e6 / 0.8e12
    reduce = 30e-6 + 5e-6 + 48e6 / 2 / 4 / 7.5e9
    root = 70e-6 + (16e6 + 32e6) / 2 / 4 / 7.5e9 + 2 * 16e6 / 0.8e12
    assert exchange(TWO_BY_FOUR) == pytest.approx(2 * gather + reduce + root)
    # A quarter of the layer twice, half of it from the other machine, over this rank's own port.
    layer, whole = (30e-6 + 5e-6 + 2 * size / 4 / 2 / 7.5e9 for size in (48e6, 32e6))
    inside = 2 * GATHER + REDUCE + ROOT_GATHER + ROOT_REDUCE
    assert exchange(TWO_BY_FOUR, strategy="hybrid_shard", group=4) == pytest.approx(inside + layer + whole)
    layer, root = (2 * size * 3 / 4 / 75e9 + size / 4 / 7.5e9 for size in (48e6, 32e6))
    copied = 2 * (2 * 24e6 / 0.8e12) + 2 * 16e6 / 0.8e12
    assert exchange(TWO_BY_FOUR, strategy="no_shard") == pytest.approx(70e-6 + layer + root + copied)


def test_bytes_that_ranks_of_a_layer_exchange() -> None:
    """A layer of 10,000 tokens and 1,000 numbers has 20 MB in bf16, of which half comes from the other rank."""
    half = 10_000 * 1000 * 2 // 2

    def found(numbers: ModelNumbers = MODEL, **options: Any) -> int:
        return exchanged(numbers, bf16(world_size=4, tensor=2, **options), FOUR, 10_000).received

    # Four in each layer and pass; what the last norm reads, and its gradient.
    assert found() == (10 * 8 + 2) * half
    # The last sum of a recomputed layer is not needed, and selective checkpointing keeps the other one.
    assert found(activation_checkpointing="full") == (10 * 11 + 2) * half
    assert found(activation_checkpointing="selective") == (10 * 10 + 2) * half
    assert found(HEAD) == (10 * 4 + 1) * half
    # Two ranks divide half of each layer, and all four the root.
    weights = (120 + 120 + 240) * MB // 2 + (16 + 32) * MB * 3 // 4
    assert received(bf16(world_size=4, group=2, tensor=2), micro_batches=3) == 3 * (found() + weights)


def test_seconds_of_divided_layers() -> None:
    work = Work(tokens=200_000, attended=500, micro_batches=2)
    plain, divided = four(work), four(work, group=2, tensor=2)
    assert divided.compute == pytest.approx(plain.compute / 2)
    assert divided.optimizer == pytest.approx((60e6 + 4e6) / 2 * 40 / 0.8e12)
    # In each micro-batch 82 of 400 MB, and a sum of small gradients in each layer that takes the time of an empty one.
    exchange = 2 * ((82 + 10) * 30e-6 + 82 * 200e6 / 75e9)
    gather, reduce = 30e-6 + 6e6 / 75e9 + 2 * 12e6 / 0.8e12, 30e-6 + 12e6 / 75e9
    root = ROOT_GATHER + ROOT_REDUCE
    assert divided.exposed == pytest.approx(2 * (2 * gather + reduce + root) + exchange)
    assert divided.seconds == pytest.approx(divided.compute + divided.exposed + divided.optimizer)
    assert divided.tokens_per_second == pytest.approx(2 * 200_000 / 2 / divided.seconds)
    assert divided.mfu == pytest.approx(2 * 200_000 * training_flops(MODEL, 500) / 2 / divided.seconds / 100e12)
    full = four(work, group=2, tensor=2, activation_checkpointing="full")
    assert full.recompute == pytest.approx(full.compute / 3)
    normed = replace(MODEL, config=EsmcConfig(n_layers=10, dim=1000, n_heads=10, ffn=4000))
    more, less = (exchanged(numbers, bf16(world_size=4, tensor=2), FOUR, 10_000) for numbers in (normed, MODEL))
    assert more.seconds - less.seconds == pytest.approx(10 * 8 * 30e-6)  # four more sums in each pass


def test_published_runs_come_out_within_15_percent() -> None:
    """From one machine to 32, BioNeMo's ESM-2 3B reached 96.85% of linear."""
    assert len(RUNS) == 3
    for run in RUNS:
        assert abs(run.error()) < 0.15, (run.name, run.predicted(), run.published)
    wide = RUNS[0]
    near = cost(wide.numbers, replace(wide.layout, world_size=8, group=8), wide.work, Machines(GPUS["A100-80GB"], 8))
    assert wide.cost().tokens_per_second / near.tokens_per_second == pytest.approx(0.9685, rel=0.15)


LORA = replace(MODEL, layer_trained=120_000, root_trained=10_000, lora=24)
HEAD = replace(MODEL, layer_trained=0, root_trained=10_000, inputs=())


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    """Of each parameter two FLOPs forward; two for the gradient of its input; two for its own, if it learns."""
    attention = 4 * 1000 * 300
    assert training_flops(MODEL, 300) == 10 * 3 * (24e6 + attention)
    assert training_flops(LORA, 300) == 10 * (24e6 + 24e6 + 2 * 120_000 + 3 * attention)
    assert training_flops(HEAD, 300) == 10 * (24e6 + attention), "no gradient goes into the trunk"


def test_seconds_of_frozen_weights() -> None:
    work, alone = Work(tokens=10_000, attended=500), Machines(ROUND, 1)

    def seconds(numbers: ModelNumbers, **options: Any) -> Cost:
        return cost(numbers, bf16(**options), work, alone)

    whole = seconds(MODEL).compute
    assert seconds(LORA).compute == pytest.approx(whole - 10 * 0.99 * PRODUCTS)
    assert seconds(HEAD).compute == pytest.approx(whole / 3)
    assert seconds(HEAD, activation_checkpointing="full").recompute == 0
    assert seconds(LORA, activation_checkpointing="full").recompute == pytest.approx(whole / 3)
    assert seconds(LORA).optimizer == pytest.approx(seconds(MODEL).optimizer * 1_210_000 / 128_000_000)


def test_what_a_user_types() -> None:
    typed: list[tuple[str, dict[str, Any], str, int, float]] = [
        ("8xA100-40GB", {}, "8 x A100-40GB", 8, 25e9),
        ("A100-80GB", {}, "1 x A100-80GB", 1, 25e9),
        (" 4 x t4-16GB ", {}, "4 x T4-16GB", 4, 25e9),
        ("4xl4", {}, "4 x L4-24GB", 4, 25e9),
        ("8xH200-141GB", {"nodes": 4, "network_gbit": 400}, "8 x H200-141GB on each of 4 machines", 32, 50e9),
    ]
    for text, options, name, world_size, network in typed:
        found = parse(text, **options)
        assert (str(found), found.world_size, found.network) == (name, world_size, network)
        assert found.room == found.gpu.memory_bytes - 2**30
    assert parse("2xMine", memory_gb=12).gpu == replace(GPUS["A10G-24GB"], name="Mine", memory_bytes=12498354831)
    for text, token in (("8xA100", "A100-40GB, A100-80GB;"), ("8xTPU", "--memory 24"), ("0xL4", "at least 1")):
        with pytest.raises(UsageError, match=token):
            parse(text)


def test_names_of_drivers() -> None:
    for name, gib, expected in (
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 80, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 80, "H100-80GB"),
        ("NVIDIA H100 PCIe", 80, None),
        ("NVIDIA L40S", 46, "L40S-48GB"),
        ("NVIDIA RTX A6000", 48, "A6000-48GB"),
        ("NVIDIA GeForce RTX 3090", 24, "RTX3090-24GB"),
        ("NVIDIA GeForce RTX 3090 Ti", 24, None),
        ("NVIDIA A10", 22, None),
        ("Tesla V100-SXM2-16GB", 16, "V100-16GB"),
        ("Quadro P4000", 8, None),
    ):
        found = data_sheet(name, gib * 2**30)
        assert (found and found.name) == expected
