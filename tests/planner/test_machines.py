import re

import pytest

from esmshard.errors import UsageError
from esmshard.planner.machines import GPUS, data_sheet, parse


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xA100-40GB", "A100-40GB", 8),
        ("A100-80GB", "A100-80GB", 1),
        (" 4 x t4-16GB ", "T4-16GB", 4),
        ("4xL4", "L4-24GB", 4),
        ("2 x RTX 3090", "RTX3090-24GB", 2),
    ],
)
def test_what_a_user_types(text: str, name: str, count: int) -> None:
    found = parse(text)
    assert (found.gpu.name, found.per_machine, found.nodes, found.world_size) == (name, count, 1, count)
    assert (found.network, found.room) == (25e9, found.gpu.memory_bytes - 2**30)


def test_machines_multiply() -> None:
    found = parse("8xH200-141GB", nodes=4, network_gbit=400)
    assert (found.world_size, found.per_machine, found.network) == (32, 8, 50e9)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("8xA100-40", {}, "did you mean A100-40GB?"),
        ("8xTPU", {}, "for another one give its memory, as --memory 24"),
        ("8xA100", {}, "A100-40GB or A100-80GB"),
        ("", {}, "no GPU is known as ''"),
        ("0xA100-40GB", {}, "at least 1"),
        ("A100-40GB", {"nodes": 0}, "at least 1"),
        ("A100-40GB", {"network_gbit": 0}, "at least 1"),
        ("Mine", {"memory_gb": 0}, "at least 1"),
    ],
)
def test_mistakes_are_one_sentence(text: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(text, **options)


@pytest.mark.parametrize("name", GPUS)
def test_every_row_is_possible(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert gpu.fp32_flops < gpu.half_flops
    assert gpu.has_bf16 == (not name.startswith(("V100", "T4")))
    assert 0.15e12 < gpu.hbm < 10e12
    size = int(re.search(r"(\d+)GB$", name)[1])  # type: ignore[index]
    assert 0.9 * size <= gpu.memory_bytes / 2**30 <= size


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 80, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 80, "H100-80GB"),
        ("NVIDIA H100 PCIe", 80, None),
        ("NVIDIA L4", 23, "L4-24GB"),
        ("NVIDIA L40S", 46, "L40S-48GB"),
        ("NVIDIA RTX A6000", 48, "A6000-48GB"),
        ("NVIDIA GeForce RTX 3090", 24, "RTX3090-24GB"),
        ("NVIDIA GeForce RTX 3090 Ti", 24, None),
        ("NVIDIA A10G", 22, "A10G-24GB"),
        ("NVIDIA A10", 22, None),
        ("Quadro P4000", 8, None),
    ],
)
def test_names_of_drivers(name: str, gib: int, expected: str | None) -> None:
    found = data_sheet(name, gib * 2**30)
    assert (found and found.name) == expected


def test_a_card_of_a_given_memory() -> None:
    mine = parse("2xMyCard", memory_gb=24).gpu
    assert (mine.name, mine.half_flops) == ("MyCard", GPUS["A10G-24GB"].half_flops)
    assert 23 < mine.memory_bytes / 2**30 < 24
