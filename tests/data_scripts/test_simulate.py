"""The simulated variant landscape that is shipped, and `data/variants/simulate.py`, which makes it."""

import csv
import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from esmshard.data.variants import Variants, read_variants
from esmshard.io.paths import shipped

VARIANTS = shipped("data") / "variants"
FILES = ("wild_type.fasta", "landscape.csv", "truth.csv")


@pytest.fixture(scope="module")
def simulate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate", VARIANTS / "simulate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured() -> Variants:
    return read_variants(VARIANTS / "landscape.csv", wild_type=VARIANTS / "wild_type.fasta")


@pytest.fixture(scope="module")
def truth() -> dict[str, tuple[float, float, float]]:
    """Effect, additive and pairwise part by name."""
    with open(VARIANTS / "truth.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["mutant", "effect", "additive", "pairwise"]
    found = {row["mutant"]: (float(row["effect"]), float(row["additive"]), float(row["pairwise"])) for row in rows}
    assert len(found) == len(rows)
    return found


def test_the_script_makes_the_shipped_files_byte_for_byte(simulate: ModuleType, tmp_path: Path) -> None:
    simulate.main(tmp_path / "new" / "directory")
    made = {path.name: path.read_bytes() for path in (tmp_path / "new" / "directory").iterdir()}
    assert made == {name: (VARIANTS / name).read_bytes() for name in FILES}


def test_parts_add_up(measured: Variants, truth: dict[str, tuple[float, float, float]]) -> None:
    assert measured.notices == []
    assert Counter(map(len, measured.mutations)) == {0: 1, 1: 1733, 2: 200}
    assert len(truth) == 1 + 19 * 192 + 200
    assert set(measured.names()) <= set(truth)
    for name, (effect, additive, pairwise) in truth.items():
        assert effect == pytest.approx(additive + pairwise, abs=1e-9)
        assert pairwise == 0 or ":" in name
        if ":" in name:
            assert additive == pytest.approx(sum(truth[part][0] for part in name.split(":")), abs=1e-9)


def test_values_by_hand(truth: dict[str, tuple[float, float, float]]) -> None:
    for name, additive, pairwise in (
        # SD at the end of the chain: m = (3 * -0.8 - 3.5) / 4 = -1.475 and s = 0.2676.
        # d = 1.5 * 2.6 / 9 + 0.4 / 167.7 = 0.4357 and p(S) - p(A) = 0.5.
        ("S1A", 0.5 * 0.5 - 0.2676 * 0.4357, 0),
        # RKE: m = (-4.5 + 3 * -3.9 - 3.5) / 5 = -3.94 and s = 0.1172; a charge turned round.
        ("K12D", 0.5 * (0.26 - 0.69) - 0.1172 * (1.5 * 0.4 / 9 + 57.5 / 167.7 + 1), 0),
        # FDE: m = (2.8 + 3 * -3.5 - 3.5) / 5 = -2.24 and s = 0.1866.
        ("D121K", 0.5 * (0.69 - 0.26) - 0.1866 * (1.5 * 0.4 / 9 + 57.5 / 167.7 + 1), 0),
        # Opposite charges, and one residue grows by what the other shrinks.
        ("K12D:D121K", -0.3802 - 0.0480, 0.5 + 0.7 * (0.1172 + 0.1866) * 57.5 / 167.7),
    ):
        assert truth[name][1:] == pytest.approx((additive, pairwise), abs=3e-4)


def test_noise_is_a_tenth_of_the_spread(measured: Variants, truth: dict[str, tuple[float, float, float]]) -> None:
    effect = np.array([truth[name][0] for name in measured.names()])
    noise = measured.target_NT[:, 0] - effect
    # With 1,934 draws a standard deviation is known to 1.6%, a mean to 2.3% of it; four times that.
    assert noise.std() / effect.std() == pytest.approx(0.1, rel=0.065)
    assert abs(noise.mean()) < 0.01 * effect.std()
    assert abs(np.corrcoef(noise, effect)[0, 1]) < 4 / np.sqrt(len(noise))
