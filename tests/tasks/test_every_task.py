"""What every task of the registry must fulfil, on the sample of its own shipped recipe."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_files import LabelFiles
from model_files import TINY, fair_esm, ours, perturb, tokenise
from pydantic import ValidationError

from esmshard.data.batching.loader import Example
from esmshard.data.splits.recipe_splits import open_split
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import AdaptSettings, Recipe
from esmshard.tasks.base import Task, collate
from esmshard.tasks.registry import TASKS, new_task, registered, settings_of


def shipped_recipe(name: str) -> Recipe:
    """The first shipped recipe of a task whose data are a sample."""
    recipes = (recipe_file.load(recipe_file.resolve(one)) for one in recipe_file.names())
    found = (one for one in recipes if one.task.name == name)
    return next(one for one in found if str(one.data.train or one.data.table).startswith("sample:"))


def test_every_task_is_registered_under_the_name_that_recipes_write() -> None:
    assert len(TASKS) >= 5
    assert registered().unusable == {}
    for name, settings in registered().settings.items():
        assert settings.model_fields["name"].annotation.__args__ == (name,)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_fulfils_the_base(name: str) -> None:
    recipe = shipped_recipe(name)
    train = open_split(recipe, "train", new_task(recipe.task, {}).labels)
    task: Any = new_task(recipe.task, {}).learn(train)
    assert isinstance(task, Task)
    shortest = np.argsort(train.tokens, kind="stable")[:12]
    examples = [train.get(int(n)) for n in shortest]
    assert len(examples) >= 3
    assert len(task.columns) >= 1
    assert len(set(task.columns)) == len(task.columns)

    model = FineTuner(ours(fair_esm(TINY), TINY), task.head(TINY))
    model.adapt(AdaptSettings(), 0)
    perturb(model.head, deviation=0.3)
    batch, targets = collate(task, [replace(example, draw="0:1") for example in examples])  # of an epoch, for dropout
    outputs = model(batch)
    found = task.loss(outputs, targets)
    found.sum.backward()
    assert float(found.count) > 0
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is not None and p.grad.any() for p in model.head.parameters())

    inputs = [task.inputs(example) for example in examples]
    arrays = model.eval().outputs(inputs)
    rows = [task.score(output, i.target) for output, i in zip(arrays, inputs, strict=True)]
    assert len(rows) == len(examples)
    summary = task.summary(rows)
    assert task.columns[0] in summary
    assert math.isfinite(summary[task.columns[0]])
    assert all(isinstance(value, float) for value in summary.values())
    for example, output in zip(examples, arrays, strict=True):
        (alone,) = model.outputs([task.question(example)])
        assert task.predict(output).dtype == task.predict(alone).dtype == np.float32
    known = task.baselines(examples, model)
    for base in (model, None):
        by_name = task.baseline_outputs(examples, known, base)
        assert by_name or base is None
        for of_baseline in by_name.values():
            pairs = zip(of_baseline, inputs, strict=True)
            rows = [task.score(one, i.target) if isinstance(one, np.ndarray) else one for one, i in pairs]
            assert task.columns[0] in task.summary(rows)


def with_letters(example: Example, shift: int) -> Example:
    """A record with made-up structure letters."""
    letters = (np.arange(len(example.tokens)) * 7 + shift) % 20
    return replace(example, tracks={"3di": letters.astype(np.uint8)})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_and_its_baselines_read_tracks(name: str) -> None:
    """On a SaProt, of which every output of a frozen model depends on the letters."""
    recipe = shipped_recipe(name)
    train = open_split(recipe, "train", new_task(recipe.task, {}).labels)
    task: Any = new_task(recipe.task, {}).learn(train)
    shortest = [train.get(int(n)) for n in np.argsort(train.tokens, kind="stable")[:12]]
    config = SIZES["saprot_nano"]
    model = FineTuner(weights.build(weights.fresh(config, 0), torch.device("cpu")), task.head(config)).eval()
    perturb(model, deviation=0.3)
    outputs, fitted, base_outputs = [], [], []
    for shift in (0, 1):
        model.remembered.clear()  # a run has one set of tracks
        examples = [with_letters(example, shift) for example in shortest]
        batch, _ = collate(task, examples)
        first = len(task.inputs(examples[0]).tokens) - 1
        assert batch.tracks["3di"].tolist()[:first] == examples[0].tracks["3di"].tolist()[:first]
        questions = [task.question(example) for example in examples]
        outputs.append([*model.outputs(questions), *model.outputs([task.inputs(example) for example in examples])])
        known = task.baselines(examples, model)
        fitted.append(known)
        # No weight of these is 0, as L1 may have made them on twelve records.
        rough = {key: array + 0.1 if array.dtype.kind == "f" else array for key, array in fitted[0].items()}
        found = task.baseline_outputs(examples[:1], rough, model)
        base_outputs.append({name: found[name][0] for name in task.of_base})
    for before, after in zip(*outputs, strict=True):
        assert not np.allclose(before, after, atol=1e-6)
    for baseline in task.of_base:
        one, other = (found[baseline] for found in base_outputs)
        assert not np.array_equal(one, other), baseline
    for key in known:
        if key.startswith(("zero-shot.log_p", "frozen embedding")):
            assert not np.array_equal(fitted[0][key], fitted[1][key]), key


# Tasks of labels

SEQUENCE_NUMBERS = {"targets": ["a", "b"], "mean": [1.0, -1.0], "std": [2.0, 10.0]}
RESIDUE_NUMBER = {"targets": ["value"], "mean": [10.0], "std": [5.0]}
STATES = {"classes": ["HGI", "EB", "STC"], "counts": [60, 30, 10], "records": 2}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sequence", {"kind": "class", "loss": "huber"}, "huber is for kind number, and the recipe has class; remove"),
        ("sequence", {"balance": 0.5}, "weighs classes, and the recipe has kind number; remove it"),
        ("residue", {"kind": "number", "classes": ["A", "B"]}, "is for kind class; remove it"),
        ("residue", {"kind": "number", "balance": 0.5}, "weighs classes, and the recipe has kind number; remove it"),
        ("residue", {"classes": ["HGI", "EB", "STH"]}, "has the letter H twice; a letter belongs to one class"),
        ("residue", {"classes": ["HGI"]}, "has one class only, so that there is nothing to learn"),
        ("residue", {"classes": ["H", ""]}, "names each class by its letters in ASCII"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of({"name": name, **given})
    settings_of({"name": "sequence", "kind": "multilabel", "balance": 1})


@pytest.mark.parametrize(
    ("name", "given", "text", "message"),
    [
        ("sequence", {}, "a TARGET=2 MKT\nb TARGET=2 ACD", "the target 'TARGET' is 2 for every record that has one"),
        ("sequence", {}, "a TARGET=nan MKT\nb TARGET=nan ACD", "no record (a, b) has a TARGET="),
        ("sequence", {}, "a TARGET=tall MKT\nb TARGET=2 ACD", "for names of classes, set task.kind=class"),
        ("sequence", {}, "a TARGET=inf MKT\nb TARGET=2 ACD", "which is not a finite number"),
        (
            *("sequence", {"kind": "class"}, "a TARGET=x MKT\nb TARGET=x ACD"),
            "every training record has the class 'x'; give labels of two",
        ),
        (
            *("sequence", {"kind": "multilabel"}, "a TARGET=x;y MKT\nb TARGET=y;x ACD"),
            "every training record has the same labels",
        ),
        ("residue", {}, "a TARGET=HHH MKT\nb TARGET=HH AC", "every training residue has the class 'H'; give labels of"),
        (
            "residue",
            {"classes": ["HG", "E", "C"]},
            "a TARGET=HEH MKT",
            "no training residue has the class 'C', so that",
        ),
        (
            "residue",
            {"classes": ["H", "E"]},
            "a TARGET=HEC MKT",
            "has the class 'C' at position 3, which is none of HE",
        ),
        (
            *("residue", {"kind": "number"}, "a TARGET=2;2;nan MKT\nb TARGET=2;2 AC"),
            "the label is 2 for every residue that has one",
        ),
        ("residue", {"kind": "number"}, "a TARGET=1;inf;3 MKT", "which is not a finite number"),
        ("residue", {}, "a TARGET=HE MKT", "has labels for 2 residues, but 3 residues"),
        (
            *("pair", {}, "x TARGET=1 MKT:ACD\ny TARGET=2 MKT"),
            "record 'y' has 1 chain, and a pair has two; write its sequence as A:B",
        ),
    ],
)
def test_labels_that_nothing_can_be_learned_from_are_refused(
    tmp_path: Path, name: str, given: dict[str, Any], text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        LabelFiles(tmp_path).learned(new_task(settings_of({"name": name, **given}), {}), text)
    assert message in str(caught.value)
    assert "train.fasta" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "facts", "given"),
    [
        *(("sequence", SEQUENCE_NUMBERS, {"hidden": hidden}) for hidden in (None, 0, 5)),
        *(("residue", STATES, {"hidden": hidden}) for hidden in (0, 6)),
        *(("residue", RESIDUE_NUMBER, {"kind": "number", "hidden": hidden}) for hidden in (0, 6)),
    ],
)
def test_a_record_s_output_does_not_depend_on_its_batch(name: str, facts: Any, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    task: Any = new_task(settings_of({"name": name, **given}), facts)
    head = task.head(TINY)
    perturb(head, deviation=0.3)
    torch.nn.init.normal_(head.out.weight)
    model = FineTuner(ours(fair_esm(TINY), TINY), head).eval()
    sequences = ["MKTAYIAK", "W", "ACDEFGHIKLMNPQRSTVWY"]
    with torch.no_grad():
        together = model(tokenise(sequences)[1])
        alone = [model(tokenise([s])[1])[0] for s in sequences]
    for text, a, b in zip(sequences, together, alone, strict=True):
        assert a.shape == ((len(text), len(task.names)) if task.per_residue else (2,))
        assert (a - b).abs().max() < 1e-5
    if task.per_residue:
        assert together[2].std(0).min() > 0.05
    else:
        assert (together[0] - together[2]).abs().max() > 1e-3
