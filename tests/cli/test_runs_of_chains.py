"""A run on records of several chains: what it records of how they were joined, and what its model does with it."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import in_process
from ruamel.yaml import YAML

A, B = "MKTAYIAKQRQISFVKSHFSRQ", "GQISFVKSHFSRQLEERLGL"
RECIPE = """\
task: {name: mlm}
model: {name: nano}
init: random
data: {train: train.csv, valid: test.csv, test: test.csv, max_length: 30}
batch: {global_tokens: 200}
train: {steps: 2, eval_every: 2}
checkpoint: {every: 2}
out: run
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [f"r{n},{A[n:]},{B[: 20 - n]}" for n in range(8)]
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("\n".join(["id,heavy,light", *rows]) + "\n")
    (tmp_path / "x.fasta").write_text(f">ab\n{A}:{B}\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_a_run_records_how_chains_were_joined_and_its_model_keeps_it(directory: Path) -> None:
    done = in_process("finetune", "recipe.yaml", "data.join.linker=5", "data.join.gap=100")
    assert done.returncode == 0, done.stderr
    assert "chains were joined by a linker of 5 in 8 records (r0, r1, r2, ...)" in done.stderr
    resolved = YAML(typ="safe").load(Path("run/recipe.yaml"))
    assert resolved["data"]["join"] == {"linker": 5, "gap": 100}
    assert json.loads(Path("run/model/config.json").read_text())["joined_chains"] == "linker:5,gap:100"
    written = {}
    for name, model, more in (("own", "run/model", ()), ("same", "run/model", ("--join", "linker:5,gap:100"))):
        done = in_process("embed", model, "x.fasta", "-o", f"{name}.npy", *more)
        assert done.returncode == 0, done.stderr
        written[name] = np.load(f"{name}.npy")
    np.testing.assert_array_equal(written["own"], written["same"])
    assert json.loads(Path("own.npy.json").read_text())["join"] == "linker:5,gap:100"
    again = in_process("finetune", "recipe.yaml", "model.name=run/model", "init=pretrained", "out=more", "--dry-run")
    assert again.returncode == 0, again.stderr
    assert "chains were joined by a linker of 5" in again.stderr + again.stdout


def test_a_store_that_was_joined_otherwise_is_refused(directory: Path) -> None:
    done = in_process("ingest", "train.csv", "-o", "train.store", "--join", "linker:3")
    assert done.returncode == 0, done.stderr
    done = in_process("finetune", "recipe.yaml", "data.train=train.store", "data.join.linker=4")
    assert done.returncode == 1
    assert "train.store: its chains were joined by a linker of 3" in done.stderr
    done = in_process("finetune", "recipe.yaml", "data.train=train.store", "data.join.linker=3", "--dry-run")
    assert done.returncode == 0, done.stderr
    done = in_process("ingest", "train.csv", "-o", "gap.store", "--join", "gap:3")
    assert done.returncode == 2
    assert "--join gap:3: a store cannot save a gap" in done.stderr
