"""Weights that are not those that were written: what opens them says so."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import in_process
from conftest import write_subset

from esmshard.io.paths import sha256
from esmshard.model import weights

SAYS = "is not the file that"
FEW = ("data.train=train.fasta", "data.valid=valid.fasta", "data.test=valid.fasta", "data.long=crop")
FASTA = ">p\nMKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The starter as `consolidate` writes it."""
    done = in_process("consolidate", "starter", "-o", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    (tmp_path / "some.fasta").write_text(FASTA)
    write_subset(tmp_path, "train", "train", range(3))
    write_subset(tmp_path, "valid", "valid", range(2))
    (tmp_path / "mutants.csv").write_text("mutant\nK2A\n")
    return tmp_path / "model"


def flip_signs(file: Path, count: int = 2000) -> None:
    """Change the sign of numbers in the last part of a weight file. Its size stays."""
    content = np.fromfile(file, np.uint8)
    content[-4 * count :: 4] ^= 0x80
    content[len(content) - 4 * count + 3 :: 4] ^= 0x80
    content.tofile(file)


COMMANDS = [
    ("embed", "model", "some.fasta", "-o", "x.npy"),
    ("predict", "model", "some.fasta", "-o", "x.npz"),
    ("score", "model", "some.fasta", "mutants.csv", "-o", "x.csv"),
    ("evaluate", "model", "valid.fasta", "-o", "scores"),
    ("finetune", "mlm", "model.name=model", *FEW, "train.steps=1", "--no-report", "out=run"),
    ("consolidate", "model", "-o", "again"),
]


def test_altered_weights_are_reported(model: Path) -> None:
    before = in_process("embed", "model", "some.fasta", "-o", "unaltered.npy", cwd=model.parent)
    assert before.returncode == 0, before.stderr
    assert SAYS not in before.stderr
    flip_signs(model / "model.safetensors")
    for command in COMMANDS:
        done = in_process(*command, cwd=model.parent)
        assert done.returncode == 0, done.stderr
        assert f"model.safetensors: {SAYS}" in done.stderr.replace("\n", " "), command


def test_each_file_is_recorded(model: Path) -> None:
    about = json.loads((model / "esmshard.json").read_text())
    assert about["files"] == {"model.safetensors": sha256(model / "model.safetensors")}
    out = model.parent / "starter"
    assert in_process("consolidate", model, "-o", out, "--to", "fair-esm").returncode == 0
    files = weights.read(str(next(out.glob("*[!n].pt")))).files
    assert json.loads((out / "esmshard.json").read_text())["files"] == {path.name: sha256(path) for path in files}
    assert weights.altered(files) is None
    flip_signs(files[0], 10)
    assert str(weights.altered(files)).startswith(str(files[0]))


def test_a_recipe_of_another_kind(model: Path) -> None:
    """Commands answer, in one sentence if they cannot go on."""
    record = model / "esmshard.json"
    about = json.loads(record.read_text())
    for recipe in (None, [], {"task": None}):
        record.write_text(json.dumps(about | {"recipe": recipe}))
        # `embed` uses the language model alone.
        done = in_process("embed", "model", "some.fasta", "-o", f"{recipe}.npy", cwd=model.parent)
        assert done.returncode == 0, done.stderr
        for command in ("predict", "consolidate", "score", "evaluate"):
            given, out = ([] if command == "consolidate" else ["some.fasta"]), {"predict": "x.npz", "score": "x.csv"}
            done = in_process(command, "model", *given, "-o", out.get(command, "again"), cwd=model.parent)
            assert done.returncode in (1, 2), command
            assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
            assert "model" in done.stderr
