"""The optimizer step on one rank: its loss scale in fp16, micro-batches, and advice when memory does not suffice."""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import work

from esmshard.data.splits.recipe_splits import open_split
from esmshard.errors import InputError
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import world
from esmshard.recipe import recipe_file
from esmshard.tasks.base import collate
from esmshard.train import finetune
from esmshard.train import step as steps
from esmshard.train.loop import Training
from esmshard.train.optim import adamw, set_learning_rate
from esmshard.train.step import LossScale, train_step


def test_the_scale_halves_after_an_overflow_and_doubles_after_2000_good_steps() -> None:
    for scale, overflow, expected in (
        (LossScale(), True, (32768, 0)),
        (LossScale(32768, 1998), False, (32768, 1999)),
        (LossScale(32768, 1999), False, (65536, 0)),
        (LossScale(1.0), True, (1, 0)),
    ):
        scale.update(overflow=overflow)
        assert (scale.value, scale.good_steps) == expected


class Watching:
    seen = 0.0

    def data(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.seen += 1
            yield batch

    def wait_for_device(self) -> None:
        assert self.seen == 2, "all backward passes have begun"
        self.seen += 5

    def numbers(self) -> list[float]:
        return [self.seen, 8.0]


def one_step(recipe: Any, precision: str, scale: LossScale | None) -> tuple[steps.StepResult, float]:
    """Return the result of a step, and the maximum change of the embedding."""
    with world() as one:
        laid = Layout(precision=precision)  # type: ignore[arg-type]
        model, task = work.sharded_model(recipe, one, laid)
        data = open_split(recipe, "train", task.labels)
        optimizer = adamw(model, recipe.optim)
        set_learning_rate(optimizer, 1.0)
        before = model.trunk.embed_tokens.weight.detach().clone()
        batches = [(*collate(task, [data.get(n)]), False) for n in range(2)]
        result = train_step(model, task, optimizer, batches, 1.0, one, laid, scale=scale, watch=Watching())
        return result, float((model.trunk.embed_tokens.weight.detach() - before).abs().max())


def test_a_step_in_fp16_is_close_to_fp32_and_an_overflow_skips_it(tiny_recipe: Path) -> None:
    recipe = work.load(str(tiny_recipe))
    exact, _ = one_step(recipe, "fp32", None)
    scale = LossScale(1024.0)
    half, moved = one_step(recipe, "fp16", scale)
    assert (half.skipped, moved > 1e-4) == (False, True)
    assert half.loss == pytest.approx(exact.loss, rel=1e-2)
    assert half.grad_norm == pytest.approx(exact.grad_norm, rel=5e-2), "the scale is divided out"
    assert half.loss != exact.loss
    assert (scale.value, scale.good_steps) == (1024.0, 1)
    assert half.ranks == exact.ranks == [[7.0, 8.0]]
    scale = LossScale(2.0**40)
    result, moved = one_step(recipe, "fp16", scale)
    assert (result.skipped, moved, math.isfinite(result.loss)) == (True, 0, True)
    assert (scale.value, scale.good_steps) == (2.0**39, 0)


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
FULL = "parallel.activation_checkpointing=full"


def test_out_of_memory_in_a_step_names_a_number_that_fits() -> None:
    for longest, fitting, checkpointing, says in (
        (100, 8000, "none", f"set batch.tokens_per_rank=3072, or {FULL}, and go on with --resume auto"),
        (100, 1500, "full", "set batch.tokens_per_rank=1500, and go on"),
        (3500, 4000, "none", f"set batch.tokens_per_rank=3500, or {FULL}, "),
        (3500, 0, "none", f"set {FULL}, and go on"),
        (3500, 0, "full", "share the model among more GPUs (--nproc), or set parallel.cpu_offload=true, and go on"),
    ):
        training = SimpleNamespace(
            job=SimpleNamespace(
                recipe=SimpleNamespace(
                    batch=SimpleNamespace(global_tokens=10**6), task=SimpleNamespace(whole_steps=False)
                ),
                train=SimpleNamespace(tokens=np.array([longest])),
                layout=SimpleNamespace(activation_checkpointing=checkpointing),
            ),
            tokens_per_rank=4096,
            ranks=SimpleNamespace(data_size=1),
            largest_fitting=lambda fitting=fitting: fitting,
        )
        assert f"4096 tokens do not fit; {says}" in Training.out_of_memory_advice(cast(Training, training))


def test_out_of_memory_in_the_evaluation_keeps_the_checkpoint(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = recipe_file.load(tiny_recipe, ["train.steps=1"]), tiny_recipe.parent / "run"

    def too_much(*args: Any, **how: Any) -> None:
        raise CUDA

    with monkeypatch.context() as patch:
        patch.setattr(finetune.evaluate, "score", too_much)
        with pytest.raises(
            InputError, match="the evaluation does not fit on cpu; the trained model is saved"
        ) as caught:
            finetune.run(recipe)
    said = json.loads((out / "status.json").read_text())
    assert (said["state"], said["message"]) == ("failed", str(caught.value))
    assert finetune.run(recipe, "auto") == out
    assert (out / "evaluation.json").is_file()
