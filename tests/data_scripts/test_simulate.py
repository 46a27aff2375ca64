"""The simulated variant landscape that is shipped, and `data/variants/simulate.py`, which makes it."""

import csv
import importlib.util
from pathlib import Path

import pytest

from esmshard.io.paths import shipped

VARIANTS = shipped("data") / "variants"
FILES = ("wild_type.fasta", "landscape.csv", "truth.csv")


def test_the_script_makes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("simulate", VARIANTS / "simulate.py")
    simulate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(simulate)
    simulate.main(tmp_path / "new" / "directory")
    made = {path.name: path.read_bytes() for path in (tmp_path / "new" / "directory").iterdir()}
    assert made == {name: (VARIANTS / name).read_bytes() for name in FILES}


def test_values_by_hand() -> None:
    with open(VARIANTS / "truth.csv", newline="") as file:
        truth = {row["mutant"]: row for row in csv.DictReader(file)}
    assert len(truth) == 1 + 19 * 192 + 200
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
        effect = [float(truth[name][column]) for column in ("effect", "additive", "pairwise")]
        assert effect == pytest.approx([additive + pairwise, additive, pairwise], abs=3e-4)
