"""`esmshard.json` of a model with values of another kind: commands answer, in one sentence if they cannot go on."""

import json
from pathlib import Path

from command import in_process


def test_a_recipe_of_another_kind(tmp_path: Path) -> None:
    assert in_process("consolidate", "starter", "-o", tmp_path / "model").returncode == 0
    (tmp_path / "some.fasta").write_text(">p\nMKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ\n")
    record = tmp_path / "model" / "esmshard.json"
    about = json.loads(record.read_text())
    assert about["recipe"]["task"]["name"] == "contact"
    for recipe in (None, [], {"task": None}):
        record.write_text(json.dumps(about | {"recipe": recipe}))
        # `embed` uses the language model alone.
        assert in_process("embed", "model", "some.fasta", "-o", f"{recipe}.npy", cwd=tmp_path).returncode == 0
        for command, out in (
            ("predict", "x.npz"),
            ("consolidate", "again"),
            ("score", "x.csv"),
            ("evaluate", "scores"),
        ):
            done = in_process(command, "model", *(["some.fasta"] if out != "again" else []), "-o", out, cwd=tmp_path)
            assert done.returncode in (1, 2), command
            assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
            assert "model" in done.stderr
