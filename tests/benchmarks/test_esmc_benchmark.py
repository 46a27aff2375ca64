"""The benchmark of ESM-C: both sides compute the same, and every figure is written."""

import json
import sys
from pathlib import Path

import pytest

from esmshard.model.families.esmc import EsmcConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import esmc


def test_both_sides_compute_the_same_and_every_run_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(esmc, "CONFIG", EsmcConfig(n_layers=2, dim=64, n_heads=1))
    monkeypatch.setattr(
        sys, "argv", ["esmc.py", "--count", "4", "--budget", "1024", "--rounds", "2", "--out", str(tmp_path)]
    )
    esmc.main()
    (written,) = tmp_path.glob("*.json")
    work = json.loads(written.read_text())["work"]
    assert list(work) == ["embed", "train"]
    for one in work.values():
        assert one["relative_difference"] < 1e-5
        assert {name: len(runs) for name, runs in one["seconds"].items()} == {"esmshard": 2, esmc.THEIRS: 2}
        assert all(run > 0 for runs in one["seconds"].values() for run in runs)
    rows = [
        line for line in written.with_suffix(".md").read_text().splitlines() if line.startswith(("| embed", "| train"))
    ]
    assert len(rows) == 2
