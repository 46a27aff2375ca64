"""The benchmark of sharding runs, with a model so small that its figures say nothing."""

from dataclasses import asdict
from pathlib import Path

import pytest

from esmshard.parallel.layout import Layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharding as benchmark

    (seconds,) = benchmark.step_rank("nano", asdict(Layout()), 512)
    assert seconds > 0
