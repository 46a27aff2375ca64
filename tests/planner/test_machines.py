import re

import pytest

from esmshard.errors import UsageError
from esmshard.planner.machines import data_sheet, parse


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xA100-40GB", "A100-40GB", 8),
        ("A100-80GB", "A100-80GB", 1),
        (" 4 x t4-16GB ", "T4-16GB", 4),
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
    ],
)
def test_mistakes_are_one_sentence(text: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(text, **options)


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
