"""Weights that are not those that were written: what opens them says so."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import esmshard
from conftest import write_subset

from esmshard.io.paths import sha256
from esmshard.model import weights

SAYS = "is not the file that"
FEW = ("data.train=train.fasta", "data.valid=valid.fasta", "data.test=valid.fasta", "data.long=crop")
FASTA = ">p\nMKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ\n"


@pytest.fixture(scope="module")
def consolidated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter as `consolidate` writes it."""
    model = tmp_path_factory.mktemp("consolidated") / "model"
    done = esmshard("consolidate", "starter", "-o", model)
    assert done.returncode == 0, done.stderr
    return model


@pytest.fixture
def model(consolidated: Path, tmp_path: Path) -> Path:
    """A copy of it for each test."""
    shutil.copytree(consolidated, tmp_path / "model")
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


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("embed", "model", "some.fasta", "-o", "x.npy"), 0),
        (("predict", "model", "some.fasta", "-o", "x.npz"), 0),
        (("score", "model", "some.fasta", "mutants.csv", "-o", "x.csv"), 0),
        (("evaluate", "model", "valid.fasta", "-o", "scores"), 0),
        (("finetune", "mlm", "model.name=model", *FEW, "train.steps=1", "--no-report", "out=run"), 0),
        (("consolidate", "model", "-o", "again"), 0),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_altered_weights_are_reported(model: Path, command: tuple[str, ...], code: int) -> None:
    *others, out = command
    elsewhere = out.replace("out=", "out=a-") if "=" in out else f"a-{out}"
    before = esmshard(*others, elsewhere, cwd=model.parent) if code == 0 else None
    assert before is None or (before.returncode == 0 and SAYS not in before.stderr), "unaltered ones are not"
    flip_signs(model / "model.safetensors")
    done = esmshard(*command, cwd=model.parent)
    assert done.returncode == code, done.stderr
    assert SAYS in done.stderr
    assert "model.safetensors: is not the file that" in done.stderr.replace("\n", " ")


def test_each_file_is_recorded(model: Path) -> None:
    about = json.loads((model / "esmshard.json").read_text())
    assert about["files"] == {"model.safetensors": sha256(model / "model.safetensors")}
    file = model.parent / "starter.pt"
    done = esmshard("consolidate", model, "-o", file.with_suffix(""), "--to", "fair-esm")
    assert done.returncode == 0, done.stderr
    about = json.loads((file.with_suffix("") / "esmshard.json").read_text())
    found = weights.read(str(next(file.with_suffix("").glob("*[!n].pt"))))
    assert about["files"] == {path.name: sha256(path) for path in found.files}
    assert weights.altered(found.files) is None
    flip_signs(found.files[0], 10)
    assert str(weights.altered(found.files)).startswith(str(found.files[0]))
