"""The simulated variant landscape that is shipped, and `data/variants/simulate.py`, which makes it."""

import csv
import importlib.util
import itertools
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from esmshard.data.variants import Variants, read_variants
from esmshard.io.paths import shipped

VARIANTS = shipped("data") / "variants"
FILES = ("wild_type.fasta", "landscape.csv", "truth.csv")
STANDARD = "ACDEFGHIKLMNPQRSTVWY"
CHARGE = {"D": -1, "E": -1, "K": 1, "R": 1}


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


@pytest.fixture(scope="module")
def in_contact() -> set[tuple[int, int]]:
    """Sites i < j, counted from 0: Cb closer than 8 A in the shipped coordinates, at least four apart."""
    with np.load(shipped("data") / "contact" / "train.npz") as file:
        row = list(file["names"]).index("3CS1_A")
        cb = file["cb_dA"][file["offsets"][row] : file["offsets"][row + 1]] / 10
    return {
        (i, j) for i, j in itertools.combinations(range(len(cb)), 2) if j - i > 3 and np.linalg.norm(cb[i] - cb[j]) < 8
    }


def doubles(variants: Variants) -> dict[str, tuple]:
    return {name: pair for name, pair in zip(variants.names(), variants.mutations, strict=True) if len(pair) == 2}


def test_the_script_makes_the_shipped_files_byte_for_byte(simulate: ModuleType, tmp_path: Path) -> None:
    simulate.main(tmp_path / "new" / "directory")
    made = {path.name: path.read_bytes() for path in (tmp_path / "new" / "directory").iterdir()}
    assert made == {name: (VARIANTS / name).read_bytes() for name in FILES}


def test_the_table_reads_without_a_notice(measured: Variants) -> None:
    assert measured.notices == []
    assert measured.target_names == ("score",)
    with open(VARIANTS / "landscape.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert measured.names() == [row["mutant"] for row in rows]
    assert all(re.fullmatch(r"-?\d+\.\d{4}", row["score"]) for row in rows)
    assert measured.target_NT[:, 0].tolist() == [float(row["score"]) for row in rows]
    with np.load(shipped("data") / "contact" / "train.npz") as file:
        sequences = dict(zip(file["names"].tolist(), file["seqs"].tolist(), strict=True))
    assert measured.wild_type == sequences["3CS1_A"]
    assert len(measured.wild_type) == 192


def test_what_is_measured(measured: Variants, in_contact: set[tuple[int, int]]) -> None:
    assert Counter(map(len, measured.mutations)) == {0: 1, 1: 1733, 2: 200}
    at_site = Counter(variant[0].position for variant in measured.mutations if len(variant) == 1)
    assert sorted(at_site) == list(range(192))
    assert set(at_site.values()) == {8, 9, 10}
    pairs = [tuple(mutation.position for mutation in pair) for pair in doubles(measured).values()]
    assert len(set(pairs)) == 200  # each pair of sites once
    assert sum(pair in in_contact for pair in pairs) == 120
    charged = [sum(mutation.mutant in CHARGE for mutation in pair) == 2 for pair in doubles(measured).values()]
    assert 80 <= sum(charged) < 120  # every second, where both sites have such; by chance 1 in 25 of the others
    singles = {name for name in measured.names() if ":" not in name}
    assert {part for name in doubles(measured) for part in name.split(":")} <= singles


def test_truth_has_every_single_substitution_and_the_measured_doubles(
    measured: Variants, truth: dict[str, tuple[float, float, float]]
) -> None:
    singles = [
        f"{wild}{site}{new}" for site, wild in enumerate(measured.wild_type, 1) for new in STANDARD if new != wild
    ]
    assert len(singles) == 19 * 192
    assert list(truth) == ["WT", *singles, *doubles(measured)]
    assert truth["WT"] == (0, 0, 0)
    assert "-0.0000" not in (VARIANTS / "truth.csv").read_text()


def test_parts_add_up(truth: dict[str, tuple[float, float, float]], in_contact: set[tuple[int, int]]) -> None:
    for name, (effect, additive, pairwise) in truth.items():
        assert effect == pytest.approx(additive + pairwise, abs=1e-9)
        if ":" in name:
            parts = name.split(":")
            assert additive == pytest.approx(sum(truth[part][0] for part in parts), abs=1e-9)
            if tuple(int(part[1:-1]) - 1 for part in parts) not in in_contact:
                assert pairwise == 0
        else:
            assert pairwise == 0


@pytest.mark.parametrize(
    ("name", "additive", "pairwise"),
    [
        # SD at the end of the chain: m = (3 * -0.8 - 3.5) / 4 = -1.475 and s = 0.2676.
        # d = 1.5 * 2.6 / 9 + 0.4 / 167.7 = 0.4357 and p(S) - p(A) = 0.5.
        ("S1A", 0.5 * 0.5 - 0.2676 * 0.4357, 0),
        # RKE: m = (-4.5 + 3 * -3.9 - 3.5) / 5 = -3.94 and s = 0.1172; a charge turned round.
        ("K12D", 0.5 * (0.26 - 0.69) - 0.1172 * (1.5 * 0.4 / 9 + 57.5 / 167.7 + 1), 0),
        # FDE: m = (2.8 + 3 * -3.5 - 3.5) / 5 = -2.24 and s = 0.1866.
        ("D121K", 0.5 * (0.69 - 0.26) - 0.1866 * (1.5 * 0.4 / 9 + 57.5 / 167.7 + 1), 0),
        # Opposite charges, and one residue grows by what the other shrinks.
        ("K12D:D121K", -0.3802 - 0.0480, 0.5 + 0.7 * (0.1172 + 0.1866) * 57.5 / 167.7),
    ],
)
def test_values_by_hand(
    truth: dict[str, tuple[float, float, float]], name: str, additive: float, pairwise: float
) -> None:
    assert truth[name][1:] == pytest.approx((additive, pairwise), abs=3e-4)


def test_noise_is_a_tenth_of_the_spread(measured: Variants, truth: dict[str, tuple[float, float, float]]) -> None:
    effect = np.array([truth[name][0] for name in measured.names()])
    noise = measured.target_NT[:, 0] - effect
    # With 1,934 draws a standard deviation is known to 1.6% and a mean to 2.3% of it; four times that.
    assert noise.std() / effect.std() == pytest.approx(0.1, rel=0.065)
    assert abs(noise.mean()) < 0.01 * effect.std()
    assert abs(np.corrcoef(noise, effect)[0, 1]) < 4 / np.sqrt(len(noise))
    assert len(np.unique(noise.round(4))) > 500  # drawn for each variant
    single = np.array([effect for name, (effect, _, _) in truth.items() if ":" not in name and name != "WT"])
    assert 0.05 < (single > 0).mean() < 0.2, "some substitutions improve on the wild type"
