"""Predictions and tests of a fine-tuned model that reads structure letters."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structure_texts import backbone, chain, pdb, three
from tracked_model import LETTERS, random_pairs, track, write_model, write_pairs

import esmshard
from esmshard.batch import batch_of, pack
from esmshard.checkpoint.consolidate import FORMAT, VERSION
from esmshard.cli import infer
from esmshard.data.splits.recipe_splits import open_split
from esmshard.data.tracks import TrackFile
from esmshard.errors import InputError, UsageError
from esmshard.model.trunk import Trunk
from esmshard.predict.heads import predict
from esmshard.recipe import recipe_file
from esmshard.tasks.registry import new_task
from esmshard.vocab import STANDARD, TOKENS, Track, encode

PAIRS = random_pairs({"a": 20, "b": 7, "c": 33}) | {"bare": ("MKTAYIAKQR", "")}
VARIANTS = """\
task: {name: variant, pool: sites}
model: {name: saprot_nano}
init: random
data: {table: v.csv, wild_type: wt.fasta, folds: 3, fold: 0, long: window, max_length: 14}
out: run
"""
RECIPE = """\
task: {name: mlm}
model: {name: saprot_nano}
init: random
data: {train: x.fasta, valid: x.fasta, test: x.fasta, tracks: {3di: 3di.fasta}}
out: run
"""


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[Path, Trunk]:
    """What `consolidate` leaves of a model of hidden residues that reads letters, and letters of all but one."""
    write_pairs(tmp_path, PAIRS)
    name, model = write_model(tmp_path / "model")
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = recipe_file.load(tmp_path / "r.yaml").model_dump(mode="json")
    about = {"format": FORMAT, "version": VERSION, "esmshard": "0", "step": 7, "recipe": recipe, "facts": {}}
    (Path(name) / "esmshard.json").write_text(json.dumps(about | {"weights_sha256": {}}))
    return Path(name), model


@torch.no_grad()
def by_hand(model: Trunk, sequence: str, letters: str) -> np.ndarray:
    places = np.arange(1, len(sequence) + 1)
    batch = pack([encode(sequence)], logits_at=[places], tracks=[{"3di": track(letters)}] if letters else None)
    logits_PV = model(batch, logits_at=batch.logits_at_P).logits_PV
    assert logits_PV is not None
    return logits_PV[:, [TOKENS.index(letter) for letter in STANDARD]].softmax(-1).numpy()


def test_predictions_see_letters(tuned: tuple[Path, Trunk], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, model = tuned
    for tracks, notice in (
        ({"3di": str(tmp_path / "3di.fasta")}, "structure letters (3Di) of 3 of 4 records, and 60 of 70 residues"),
        ({}, "was fine-tuned with the track 3di, which it is not given"),
    ):
        predict(str(name), tmp_path / "x.fasta", tmp_path / "out.npz", tracks=tracks, overwrite=True)
        assert notice in capsys.readouterr().err
        with np.load(tmp_path / "out.npz") as found:
            for record, (sequence, letters) in PAIRS.items():
                expected = by_hand(model, sequence, letters if tracks else "")
                np.testing.assert_allclose(found[record], expected, rtol=0, atol=1e-4)


def test_a_test_takes_tracks(tuned: tuple[Path, Trunk], tmp_path: Path) -> None:
    scores, rows = [], []
    for out, tracks in (("with", [f"3di={tmp_path / '3di.fasta'}"]), ("without", [])):
        infer.evaluate(str(tuned[0]), str(tmp_path / "x.fasta"), tmp_path / out, track=tracks)
        scores.append(json.loads((tmp_path / out / "evaluation.json").read_text()))
        rows.append((tmp_path / out / "per_protein.csv").read_text())
    assert scores[0]["tracks"] == {"3di": "../3di.fasta"}
    assert ["which it is not given" in str(score["left_out"]) for score in scores] == [False, True]
    assert rows[0] != rows[1]
    with pytest.raises(UsageError, match="takes no such track"):
        predict(str(tuned[0]), tmp_path / "x.fasta", tmp_path / "y.csv", tracks={"3dii": "x"})
    (tuned[0] / "esmshard.json").write_text(json.dumps({"recipe": {"task": {"name": "variant"}}}))
    with pytest.raises(UsageError, match="--track"):
        infer.predict(str(tuned[0]), out=tmp_path / "x.csv", all_singles=True, track=["3di=x"])


def test_tracks_in_every_form(tuned: tuple[Path, Trunk], tmp_path: Path) -> None:
    model = esmshard.load(tuned[0])
    sequences = {name: sequence for name, (sequence, _) in PAIRS.items()}
    letters = {name: letters for name, (_, letters) in PAIRS.items() if letters}
    expected = [by_hand(tuned[1], *pair) for pair in PAIRS.values()]
    for given, known, wanted in (
        (sequences, letters, expected),
        (tmp_path / "x.fasta", letters, expected),
        (list(sequences.values()), [letters.get(name) for name in sequences], expected),
        ([sequences["b"]], [letters["b"]], expected[1:2]),
    ):
        for found, array in zip(model.predict(given, tracks={"3di": known}), wanted, strict=True):
            np.testing.assert_allclose(found, array, rtol=0, atol=1e-4)
    with_letters = model.embed(sequences, tracks={"3di": letters})
    variants = [f"{sequences['a'][3]}4{'C' if sequences['a'][3] != 'C' else 'W'}"]
    (high,) = model.score(sequences["a"], variants, tracks={"3di": letters["a"]})
    with pytest.warns(UserWarning, match="fine-tuned with the track 3di"):
        without, (low,) = model.embed(sequences), model.score(sequences["a"], variants)
    assert (np.abs(with_letters - without).max(1) > 1e-4).tolist() == [True, True, True, False]
    assert abs(high - low) > 1e-5
    for tracks in ({"3d": ["vvv"]}, {"3di": "vvv"}, {"3di": ["vvv", "v"]}, {"3di": {"a": "vvv"}}):
        with pytest.raises(UsageError, match=f"tracks: {next(iter(tracks))}"):
            model.embed(["MKT"], tracks=tracks)
    for wrong, track_of in ((["MKT"], ["vv"]), ("MKT", "vvx")):
        with pytest.raises(InputError, match=r"tracks\['3di'\]"):
            model.embed(wrong, tracks={"3di": track_of})


@pytest.mark.parametrize("kind", ["letters", "coordinates"])
def test_a_model_of_variants_keeps_the_tracks_of_its_wild_type(kind: str, tmp_path: Path) -> None:
    """Those of the part of it that the model sees; facts are JSON in a checkpoint and in a model."""
    sequence, letters = PAIRS["a"]
    changes = [f"{sequence[n]}{n + 1}{'C' if sequence[n] != 'C' else 'W'}" for n in range(5, 17)]
    for name, text in (
        ("wt.fasta", f">wt\n{sequence}\n"),
        ("3di.fasta", f">wt\n{letters}\n"),
        ("wt.pdb", pdb(chain(sequence, missing=[7]), {"A": three(sequence)})),
        ("v.csv", "mutant,score\n" + "".join(f"{change},{n}\n" for n, change in enumerate(changes))),
        ("r.yaml", VARIANTS),
    ):
        (tmp_path / name).write_text(text)
    recipe, notice = recipe_file.load(tmp_path / "r.yaml"), "letters of 14 of 14"
    file = TrackFile(Track("3di", "letters", "letters", 20, letters=LETTERS), tmp_path / "3di.fasta")
    expected = track(letters)[[0, *range(5, 19), -1]]
    if kind == "coordinates":
        file = TrackFile(Track("xyz", "coordinates", "coordinates", math.nan), tmp_path / "wt.pdb")
        expected, notice = np.full((16, 3, 3), np.nan, np.float32), "coordinates of 13 of 14"
        expected[1:-1] = backbone(20)[4:18, :3]
        expected[8 - 4] = np.nan
    split = open_split(recipe, "train", None, [file])
    assert f"{notice} residues of the wild type" in str(split.notices)
    example, task = split.get(0), new_task(recipe.task, {}).learn(split)
    again = new_task(recipe.task, json.loads(json.dumps(dict(task.facts), allow_nan=False)))
    for asked in (task.inputs(example), again.question(replace(example, tracks={}))):
        ((name, values),) = asked.tracks.items()
        assert (name, values.dtype) == (file.track.name, expected.dtype)
        np.testing.assert_allclose(values, expected, atol=1e-5)
    if kind == "letters":
        batch = batch_of([task.inputs(split.get(n)) for n in (0, 1)])
        assert batch.tracks["3di"].tolist() == expected.tolist() * 3, "two variants and the wild type"
