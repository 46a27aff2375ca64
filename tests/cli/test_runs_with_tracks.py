"""Runs of a model that reads structure letters, from the recipe to the result files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command import in_process
from tracked_model import random_pairs, write_pairs

from esmshard.errors import InputError, UsageError
from esmshard.recipe import recipe_file
from esmshard.train.inputs import RunInputs, prepare

RECIPE = """\
task: {name: mlm}
model: {name: saprot_nano}
init: random
data: {train: x.fasta, valid: x.fasta, test: t.fasta, max_length: 25, tracks: {3di: 3di.fasta}}
batch: {global_tokens: 90, tokens_per_rank: 90}
train: {steps: 2, eval_every: 2}
parallel: {precision: fp32}
out: run
"""
PAIRS = random_pairs({f"r{n}": 20 + n for n in range(10)}) | {"bare": ("MKTAYIAKQR", "")}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path, PAIRS)
    shutil.copy(tmp_path / "x.fasta", tmp_path / "t.fasta")
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path / "r.yaml"


def prepared(recipe: Path, *overrides: str) -> RunInputs:
    return prepare(recipe_file.load(recipe, overrides), 1, 1, torch.device("cpu"))


def test_a_run_keeps_what_was_known_and_goes_on_with_it_alone(recipe: Path) -> None:
    """That ranks train as one process does is looked at in tests/distributed/test_with_tracks.py."""
    done = in_process("finetune", recipe)
    assert done.returncode == 0, done.stderr
    known, total = sum(range(20, 30)), sum(range(20, 30)) + 10
    notice = f"structure letters (3Di) of 10 of 11 records, and {known} of {total} residues, from {recipe.parent}"
    assert notice in done.stderr
    about = json.loads(Path("run/versions.json").read_text())["data"]
    assert all(any(notice in one for one in about[split]["notices"]) for split in ("train", "valid", "test"))
    assert json.loads(Path("run/model/esmshard.json").read_text())["recipe"]["data"]["tracks"] == {"3di": "3di.fasta"}

    letters = Path("3di.fasta")
    letters.write_text(letters.read_text().replace("V", "L"))
    done = in_process("finetune", recipe, "--resume", "auto")
    assert done.returncode == 2
    assert "x.fasta holds other sequences or tracks than it did" in done.stderr
    done = in_process("finetune", recipe, "--resume", "auto", "data.tracks=null")
    assert done.returncode == 2
    assert "data.tracks" in done.stderr


def test_paths_are_those_of_the_recipe_or_of_the_shell(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = recipe.parent
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    monkeypatch.setenv("WORK", "more.fasta")
    for overrides, expected in (
        ((), here / "3di.fasta"),
        (("data.tracks.3di=${WORK}",), here / "elsewhere" / "more.fasta"),
        (("data.tracks={3di: more.fasta}",), here / "elsewhere" / "more.fasta"),
        (("data.tracks.3di=inside",), "inside"),
    ):
        assert recipe_file.load(recipe, overrides).data.tracks == {"3di": str(expected)}
    shared = recipe_file.for_others(recipe_file.load(recipe).model_dump(mode="json"), here)
    assert shared["data"]["tracks"] == {"3di": "3di.fasta"}


def test_mistakes_are_found_before_training(recipe: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.tracks\.3di: nano reads the sequence alone and takes no track"):
        prepared(recipe, "model.name=nano")
    with pytest.raises(UsageError, match=r"data\.tracks\.ss: saprot_nano takes no such track; it takes 3di"):
        prepared(recipe, "data.tracks={ss: 3di.fasta}")
    with pytest.raises(InputError, match=r"nowhere\.fasta: no such file"):
        prepared(recipe, "data.tracks.3di=nowhere.fasta")
    with pytest.raises(UsageError, match=r"data\.tracks: .*dictionary"):
        recipe_file.load(recipe, ["data.tracks=3di.fasta"])
