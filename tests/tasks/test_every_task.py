"""What every task of the registry must fulfil, on the sample of its own shipped recipe."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_files import LabelFiles
from model_files import TINY, fair_esm, ours, perturb
from pydantic import ValidationError

from esmshard.data.batching.loader import Example
from esmshard.data.splits.recipe_splits import open_split
from esmshard.errors import InputError, UsageError
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


@pytest.fixture
def one_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esmshard.tasks.baselines.CS", (0.1,))


@cache
def learned(name: str, **changes: Any) -> tuple[Task, list[Example]]:
    """A task that has read the labels of its sample, and the six shortest training records."""
    recipe = shipped_recipe(name)
    settings = recipe.task.model_copy(update=changes)
    train = open_split(recipe, "train", new_task(settings, {}).labels)
    task = new_task(settings, {}).learn(train)
    return task, [train.get(int(n)) for n in np.argsort(train.tokens, kind="stable")[:6]]


def test_every_task_is_registered_under_the_name_that_recipes_write() -> None:
    assert len(TASKS) >= 5
    assert registered().unusable == {}
    for name, settings in registered().settings.items():
        assert settings.model_fields["name"].annotation.__args__ == (name,)


REFUSED: dict[str, dict[str, Any]] = {"mlm": {}, "variant": {"zero_shot": True}, "contact": {"head": "attention"}}
"""Settings of tasks that a model without an LM head and without readable attention maps cannot have."""


@pytest.mark.parametrize("size", ["tiny", "t5_nano"])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_fulfils_the_base(name: str, size: str, one_penalty: None) -> None:
    """On an ESM-2, and on a model without an LM head, which task mlm refuses."""
    config = SIZES.get(size, TINY)
    task, examples = learned(name, **({"zero_shot": False} if (name, size) == ("variant", "t5_nano") else {}))
    assert 1 <= len(task.columns) == len(set(task.columns))
    trunk = (
        weights.build(weights.fresh(config, 0), torch.device("cpu")) if size in SIZES else ours(fair_esm(TINY), TINY)
    )
    if config.only_represents:
        if name in REFUSED:
            with pytest.raises(UsageError, match="family t5"):
                FineTuner(trunk, learned(name, **REFUSED[name])[0].head(config))
        if name == "mlm":
            return
    model = FineTuner(trunk, task.head(config))
    model.adapt(AdaptSettings(), 0)
    perturb(model.head, deviation=0.3)
    batch, targets = collate(task, [replace(example, draw="0:1") for example in examples])  # of an epoch, for dropout
    loss = task.loss(model(batch), targets)
    loss.sum.backward()
    assert float(loss.count) > 0
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is not None and p.grad.any() for p in model.head.parameters())

    def summary(outputs: Any) -> dict[str, float]:
        pairs = zip(outputs, inputs, strict=True)
        return task.summary([task.score(x, i.target) if isinstance(x, np.ndarray) else x for x, i in pairs])

    inputs = [task.inputs(example) for example in examples]
    arrays = model.eval().outputs(inputs)
    assert math.isfinite(summary(arrays)[task.columns[0]])
    assert all(isinstance(value, float) for value in summary(arrays).values())
    for example, output in zip(examples, arrays, strict=True):
        (alone,) = model.outputs([task.question(example)])
        assert task.predict(output).dtype == task.predict(alone).dtype == np.float32
    known = task.baselines(examples, model)
    for base in (model, None):
        by_name = task.baseline_outputs(examples, known, base)
        assert by_name or base is None
        assert all(task.columns[0] in summary(of_baseline) for of_baseline in by_name.values())


@pytest.mark.parametrize("name", TASKS)
def test_every_task_and_its_baselines_read_tracks(name: str, one_penalty: None) -> None:
    """On a SaProt, of which every output of a frozen model depends on the letters."""
    task, shortest = learned(name)
    config = SIZES["saprot_nano"]
    model = FineTuner(weights.build(weights.fresh(config, 0), torch.device("cpu")), task.head(config)).eval()
    perturb(model, deviation=0.3)
    outputs, fitted, base_outputs = [], [], []
    for shift in (0, 1):
        model.remembered.clear()  # a run has one set of tracks
        examples = [
            replace(e, tracks={"3di": ((np.arange(len(e.tokens)) * 7 + shift) % 20).astype(np.uint8)}) for e in shortest
        ]
        batch, _ = collate(task, examples)
        first = len(task.inputs(examples[0]).tokens) - 1
        assert batch.tracks["3di"].tolist()[:first] == examples[0].tracks["3di"].tolist()[:first]
        questions = [task.question(example) for example in examples]
        outputs.append([*model.outputs(questions), *model.outputs([task.inputs(example) for example in examples])])
        fitted.append(task.baselines(examples, model))
        # No weight of these is 0, as L1 may have made them on twelve records.
        rough = {key: array + 0.1 if array.dtype.kind == "f" else array for key, array in fitted[0].items()}
        base_outputs.append(task.baseline_outputs(examples[:1], rough, model))
    for before, after in zip(*outputs, strict=True):
        assert not np.allclose(before, after, atol=1e-6)
    for baseline in task.of_base:
        assert not np.array_equal(*(found[baseline][0] for found in base_outputs)), baseline
    for key in fitted[0]:
        if key.startswith(("log_p", "frozen embedding")):
            assert not np.array_equal(fitted[0][key], fitted[1][key]), key


def test_settings_and_labels_that_nothing_can_be_learned_from_are_refused(tmp_path: Path) -> None:
    for name, given, token in (
        ("sequence", {"kind": "class", "loss": "huber"}, "huber"),
        ("sequence", {"balance": 0.5}, "is for classes"),
        ("residue", {"kind": "number", "classes": ["A", "B"]}, "kind class"),
        ("residue", {"classes": ["HGI", "EB", "STH"]}, "letter H twice"),
        ("residue", {"classes": ["HGI"]}, "only one class"),
        ("residue", {"classes": ["H", ""]}, "ASCII"),
    ):
        with pytest.raises(ValidationError, match=token):
            settings_of({"name": name, **given})
    for name, given, text, token in (
        ("sequence", {}, "a TARGET=2 MKT\nb TARGET=2 ACD", "'TARGET' has only the value 2"),
        ("sequence", {}, "a TARGET=tall MKT\nb TARGET=2 ACD", "task.kind=class"),
        ("sequence", {"kind": "class"}, "a TARGET=x MKT\nb TARGET=x ACD", "class 'x'"),
        ("sequence", {"kind": "multilabel"}, "a TARGET=x;y MKT\nb TARGET=y;x ACD", "same labels"),
        ("residue", {}, "a TARGET=HHH MKT\nb TARGET=HH AC", "class 'H'"),
        ("residue", {"classes": ["HG", "E", "C"]}, "a TARGET=HEH MKT", "class 'C'"),
        ("residue", {"classes": ["H", "E"]}, "a TARGET=HEC MKT", "position 3"),
        ("residue", {"kind": "number"}, "a TARGET=2;2;nan MKT\nb TARGET=2;2 AC", "only the value 2"),
        ("pair", {}, "x TARGET=1 MKT:ACD\ny TARGET=2 MKT", "record 'y' has 1 chain"),
    ):
        with pytest.raises(InputError, match=rf"train\.fasta.*{token}"):
            LabelFiles(tmp_path).learned(new_task(settings_of({"name": name, **given}), {}), text)
