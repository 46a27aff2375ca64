"""`esmshard.json` of a model with values of another kind: commands answer, in one sentence if they cannot go on."""

import json
from pathlib import Path

import pytest
from command import esmshard

COMMANDS = {
    "embed": ("embed", "model", "some.fasta", "-o", "x.npy"),
    "predict": ("predict", "model", "some.fasta", "-o", "x.npz"),
    "consolidate": ("consolidate", "model", "-o", "again"),
    "score": ("score", "model", "some.fasta", "-o", "x.csv"),
    "evaluate": ("evaluate", "model", "some.fasta", "-o", "scores"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("recipe", [None, [], {"task": None}], ids=str)
def test_a_recipe_of_another_kind(tmp_path: Path, command: str, recipe: object) -> None:
    assert esmshard("consolidate", "starter", "-o", tmp_path / "model").returncode == 0
    (tmp_path / "some.fasta").write_text(">p\nMKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ\n")
    record = tmp_path / "model" / "esmshard.json"
    about = json.loads(record.read_text())
    assert about["recipe"]["task"]["name"] == "contact"
    record.write_text(json.dumps(about | {"recipe": recipe}))
    done = esmshard(*COMMANDS[command], cwd=tmp_path)
    assert "Traceback" not in done.stderr
    if command == "embed":  # takes the language model alone, and has no use for the recipe
        assert done.returncode == 0
        return
    assert done.returncode in (1, 2)
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "model" in done.stderr
