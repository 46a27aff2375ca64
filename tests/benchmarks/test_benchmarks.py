"""The benchmark of the model beside its peers, with a model so small that its figures say nothing."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measure
import model


def test_all_variants_do_the_same_and_every_turn_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CEILING_SECONDS", 0.01), ("CEILING_WIDTH", {"cpu": 64})):
        monkeypatch.setattr(measure, name, value)
    command = "model.py --models nano --work embed mlm --count 4 --rounds 2 --device cpu --no-memory --out"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(tmp_path)])
    model.main()
    (written,) = tmp_path.glob("*-model-cpu-nano-embed-mlm.json")
    embed, mlm = json.loads(written.read_text())["measured"]
    assert [row["name"] for row in embed["rows"]][:2] == ["esmshard", "fair-esm, extract.py"]
    assert {len(row["seconds"]) for table in (embed, mlm) for row in table["rows"]} == {2}
    for table in (embed, mlm):
        note = next(note for note in table["notes"] if note.startswith("Largest difference from ours"))
        assert float(note.split()[-1].rstrip(".")) < 1e-4
    assert written.with_suffix(".md").read_text().count("| esmshard |") == 2
