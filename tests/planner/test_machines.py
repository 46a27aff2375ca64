import re

import pytest

from esmshard.errors import UsageError
from esmshard.planner.machines import GPUS, data_sheet, parse


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xA100-40GB", "A100-40GB", 8),
        ("A100-80GB", "A100-80GB", 1),
        ("2XH100-80gb", "H100-80GB", 2),
        (" 4 x t4-16GB ", "T4-16GB", 4),
        ("rtx4090-24gb", "RTX4090-24GB", 1),
        ("4xL4", "L4-24GB", 4),
        ("2 x RTX 3090", "RTX3090-24GB", 2),
        ("GeForce RTX 3060 Ti", "RTX3060TI-8GB", 1),
    ],
)
def test_what_a_user_types(text: str, name: str, count: int) -> None:
    found = parse(text)
    assert (found.gpu.name, found.per_machine, found.nodes, found.world_size) == (name, count, 1, count)
    assert found.network == 25e9


def test_machines_multiply() -> None:
    found = parse("8xH200-141GB", nodes=4, network_gbit=400)
    assert (found.world_size, found.per_machine, found.network) == (32, 8, 50e9)
    assert str(found) == "8 x H200-141GB on each of 4 machines"


@pytest.mark.parametrize(
    ("text", "nodes", "network", "message"),
    [
        ("8xA100-40", 1, 200, "no GPU is known as 'A100-40'; did you mean A100-40GB? known are V100-16GB, "),
        ("8xTPU", 1, 200, "no GPU is known as 'TPU'; known are V100-16GB"),
        ("", 1, 200, "no GPU is known as ''"),
        ("0xA100-40GB", 1, 200, "at least one GPU"),
        ("8xA100", 1, 200, "--gpus 8xA100: say which: A100-40GB or A100-80GB"),
        ("8xTPU", 1, 200, "for another one give its memory, as --memory 24GB"),
        ("A100-40GB", 0, 200, "--nodes 0: at least one machine"),
        ("A100-40GB", 2, 0, "--network 0: the network needs a speed above 0"),
    ],
)
def test_mistakes_are_one_sentence(text: str, nodes: int, network: float, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(text, nodes, network)


# NVIDIA's data sheets: dense bf16 (fp16) TFLOP/s, GB/s of memory, GB/s of the link one way.
DATA_SHEETS = {
    "V100-16GB": (125, 900, 150),
    "V100-32GB": (125, 900, 150),
    "T4-16GB": (65, 320, 16),
    "RTX3090-24GB": (71, 936, 32),
    "RTX4090-24GB": (165.2, 1008, 32),
    "A10-24GB": (125, 600, 32),
    "A10G-24GB": (70, 600, 32),
    "L4-24GB": (121, 300, 32),
    "A6000-48GB": (154.8, 768, 32),
    "L40S-48GB": (362, 864, 32),
    "A100-40GB": (312, 1555, 300),
    "A100-80GB": (312, 2039, 300),
    "H100-80GB": (989, 3350, 450),
    "H200-141GB": (989, 4800, 450),
    "B200-180GB": (2250, 7700, 900),
    "A30-24GB": (165, 933, 32),
    "A40-48GB": (149.7, 696, 32),
    "A5000-24GB": (111.1, 768, 32),
    "RTX6000ADA-48GB": (364.2, 960, 32),
    "QUADRORTX6000-24GB": (130.5, 672, 16),
    "RTX2080TI-11GB": (53.8, 616, 16),
    "RTX3060-12GB": (25.4, 360, 32),
    "RTX3080-10GB": (59.5, 760, 32),
    "RTX4080-16GB": (97.5, 717, 32),
    "RTX5090-32GB": (209.5, 1792, 64),
    "H100PCIE-80GB": (756, 2000, 64),
}
BEFORE_BF16 = ("V100", "T4", "RTX20", "QUADRO", "TITANRTX")


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_figures_are_those_of_the_data_sheets(name: str) -> None:
    gpu = GPUS[name]
    tera, memory, link = DATA_SHEETS[name]
    assert gpu.half_flops == pytest.approx(tera * 1e12, rel=0.005)
    assert gpu.hbm == pytest.approx(memory * 1e9)
    assert gpu.link == pytest.approx(link * 1e9)


@pytest.mark.parametrize("name", GPUS)
def test_every_row_is_possible(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert gpu.fp32_flops < gpu.half_flops
    assert gpu.has_bf16 == (not name.startswith(BEFORE_BF16))
    assert 0.15e12 < gpu.hbm < 10e12
    said = int(re.search(r"(\d+)GB$", name)[1])  # type: ignore[index]
    assert 0.9 * said <= gpu.memory_bytes / 2**30 <= said
    assert parse(name).room == gpu.memory_bytes - 2**30  # CUDA's own


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 80, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 80, "H100-80GB"),
        ("NVIDIA H200", 141, "H200-141GB"),
        ("NVIDIA B200", 180, "B200-180GB"),
        ("Tesla T4", 15, "T4-16GB"),
        ("NVIDIA L4", 23, "L4-24GB"),
        ("NVIDIA L40S", 46, "L40S-48GB"),
        ("NVIDIA RTX A6000", 48, "A6000-48GB"),
        ("NVIDIA GeForce RTX 3090", 24, "RTX3090-24GB"),
        ("NVIDIA GeForce RTX 3090 Ti", 24, "RTX3090TI-24GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, "RTX4070TISUPER-16GB"),
        ("NVIDIA GeForce RTX 3080", 12, "RTX3080-12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 16, "RTX4060TI-16GB"),
        ("NVIDIA RTX A5000", 24, "A5000-24GB"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "RTX6000ADA-48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, "RTXPRO6000-96GB"),
        ("Quadro RTX 8000", 48, "QUADRORTX8000-48GB"),
        ("NVIDIA TITAN RTX", 24, "TITANRTX-24GB"),
        ("NVIDIA H100 PCIe", 80, "H100PCIE-80GB"),
        ("NVIDIA H100 NVL", 94, "H100NVL-94GB"),
        ("NVIDIA A100-PCIE-40GB", 40, "A100-40GB"),
        ("NVIDIA A10", 22, "A10-24GB"),
        ("NVIDIA A10G", 22, "A10G-24GB"),
        ("NVIDIA A30", 24, "A30-24GB"),
        ("NVIDIA L40", 48, "L40-48GB"),
        ("NVIDIA GeForce RTX 5090", 32, "RTX5090-32GB"),
        ("NVIDIA GeForce GTX 1080 Ti", 11, None),
        ("Quadro P4000", 8, None),
    ],
)
def test_names_of_drivers(name: str, gib: int, expected: str | None) -> None:
    found = data_sheet(name, gib * 2**30)
    assert (found and found.name) == expected


def test_a_card_of_a_given_memory() -> None:
    mine = parse("2xMyCard", memory="24GB").gpu
    assert (mine.name, mine.speed_of) == ("MyCard", "A10G-24GB")
    assert 23 < mine.memory_bytes / 2**30 < 24
    assert (mine.half_flops, mine.hbm) == (GPUS["A10G-24GB"].half_flops, GPUS["A10G-24GB"].hbm)
    known = parse("rtx3080", memory="20").gpu
    assert (known.name, known.speed_of, known.half_flops) == ("RTX3080-20GB", "", GPUS["RTX3080-10GB"].half_flops)
    assert 19 < known.memory_bytes / 2**30 < 20
    for text in ("big", "0GB", "1", "24TB"):
        with pytest.raises(UsageError, match=f"--memory {text}: the memory of a GPU in GB is expected, such as 24GB"):
            parse("2xMyCard", memory=text)
