"""Rows of NVIDIA's and PyTorch's published tables, and which wheel follows from them."""

import pytest

from esmshard.cluster.doctor.drivers import TORCH_FLOOR, WHEELS, runs_on, version_of, wheel_for


@pytest.mark.parametrize(
    ("driver", "capabilities", "index"),
    [
        ("470.82.01", ((7, 0),), None),  # CUDA 11 only, for which no torch of today is built
        ("525.60.13", ((8, 0),), "cu126"),  # the first driver of CUDA 12; cu128 ended with torch 2.11
        ("525.60.12", ((8, 0),), None),
        ("535.104.05", ((7, 0), (8, 0)), "cu126"),  # V100: gone from cu128 with torch 2.11
        ("570.133.20", ((10, 0),), "cu128"),  # B200: not in cu126
        ("580.65.06", ((8, 9),), "cu130"),  # cu132 would run, without what only its own driver can do
        ("595.58.03", ((8, 9),), "cu132"),
        ("580.65.06", ((6, 1),), "cu126"),  # P40 on a new driver
        ("580.65.06", (), "cu130"),
        ("580.65.06", ((5, 2), (9, 0)), "cu126"),
        ("580.65.06", ((7, 0), (10, 0)), None),  # V100 and B200 in one machine
    ],
)
def test_newest_wheel_for_driver_and_gpus(driver: str, capabilities: tuple[tuple[int, int], ...], index: str) -> None:
    found = wheel_for(driver, capabilities)
    assert (found and found.index) == index


def test_table_is_that_of_the_release_notes() -> None:
    """CUDA Toolkit release notes, minor version compatibility: 11.x 450.80.02, 12.x 525.60.13, 13.x 580."""
    least = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
    for name, wheel in WHEELS.items():
        assert name == "cu" + wheel.cuda.replace(".", "")
        assert wheel.driver == least[wheel.cuda.split(".")[0]]
        assert version_of(wheel.driver) <= version_of(wheel.native_driver)
    assert {name for name, wheel in WHEELS.items() if wheel.is_usable} == {"cu126", "cu128", "cu130", "cu132"}
    assert WHEELS["cu128"].address == "https://download.pytorch.org/whl/cu128"


def test_floor_is_that_of_the_metadata() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={TORCH_FLOOR}" in project["dependencies"]


def test_code_runs_within_a_generation_only() -> None:
    assert runs_on((8, 6), ((8, 0),))
    assert runs_on((8, 9), ((8, 6),))
    assert not runs_on((8, 0), ((8, 6),))
    assert not runs_on((9, 0), ((8, 0), (8, 6)))
