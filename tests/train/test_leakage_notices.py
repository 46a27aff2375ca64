"""What a run says at its start about records that the sets share, and an evaluation about records seen in training."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from esmshard.data.batching.loader import Examples
from esmshard.io.store import ingest
from esmshard.recipe import recipe_file
from esmshard.train import evaluate, inputs
from esmshard.train.finetune import run


def test_a_run_and_an_evaluation_name_records_seen_in_training(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending in ("fasta", "npz"):
        shutil.copy(tiny_recipe.with_name(f"train.{ending}"), tiny_recipe.with_name(f"test.{ending}"))
    tiny_recipe.write_text(tiny_recipe.read_text().replace("test: valid.fasta", "test: test.fasta"))
    run(recipe_file.load(tiny_recipe, ["train.steps=1"]))
    err = capsys.readouterr().err
    assert err.count("leakage: of 24 test records 24 are identical and 0 similar to training records (") == 1
    assert "leakage: none of 5 valid records is" in err
    out = tiny_recipe.with_name("run")
    assert "In sample: 24 of 24 test records" in json.loads((out / "evaluation.json").read_text())["verdict"]

    about = json.loads((out / "model" / "esmshard.json").read_text())
    trained = evaluate.read_baselines(out / "model" / "baselines.npz")[evaluate.TRAINED_ON]
    train, some = tiny_recipe.with_name("train.fasta"), tmp_path / "some.fasta"
    some.write_text("".join(f">{record}" for record in train.read_text().split(">")[1:4]) + ">new\nMKTAYIAKQR\n")

    def seen(path: Path, hashes: bool = True) -> str:
        data = Examples("test", path, ingest([path], tmp_path / f"{path.stem}{hashes}"), None)
        (sentence,), _ = evaluate.seen_before("M", about["data"], trained if hashes else None, data)
        return sentence

    assert "was trained on these" in seen(train)
    assert "3 of 4 records are training records of M" in seen(some)
    assert "trained on 24 records of train.fasta, with which" in seen(some, hashes=False)


def test_variants_are_compared_by_all_positions_that_they_change(tmp_path: Path) -> None:
    """Of three test variants with two changes, two change only positions of training, and all change one of them."""
    (tmp_path / "wt.fasta").write_text(">wt\nMKTAYIAKQRQISFVKSHFS\n")
    rows = ["K2A,1", "K2R,2", "T3A,3", "A4G,1", "Y5F,2", "K2A:T3A,2", "K2A:S13A,1", "T3A:A4G,1"]
    (tmp_path / "v.csv").write_text("\n".join(["mutant,score", *rows]) + "\n")
    (tmp_path / "r.yaml").write_text(
        "task: {name: variant, zero_shot: false}\nmodel: {name: nano}\ninit: random\n"
        "data: {table: v.csv, wild_type: wt.fasta, split: mutations}\nout: run\n"
    )
    job = inputs.prepare(recipe_file.load(tmp_path / "r.yaml"), 1, 1, torch.device("cpu"))
    notice = inputs.leakage_notices(job)[-1]
    assert notice.startswith("leakage: of 3 test variants 0 are training variants, 2 change only positions")
    assert "and 3 change at least one" in notice
