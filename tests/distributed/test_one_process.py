"""One process: no group, no mesh, plain parameters, and the numbers of a run all the same."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))
import work

from esmshard.data.splits.recipe_splits import open_split
from esmshard.model.attention import TrunkBlock
from esmshard.parallel import load, shard
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World, world
from esmshard.tasks.base import collate
from esmshard.train import finetune, loop
from esmshard.train.evaluate import validate
from esmshard.train.optim import adamw, set_learning_rate
from esmshard.train.step import train_step

LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}


@pytest.fixture(params=["no launcher", "a launcher of one"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world of one, in which whatever starts or needs a group raises."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("one process needs no process group and no FSDP")

    for name, value in LAUNCHER.items():
        if request.param == "no launcher":
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    for name in ("init_process_group", "barrier", "all_reduce", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    monkeypatch.setattr(shard, "fully_shard", refuse)
    with world() as one:
        yield one


def metrics(out: Path) -> list[tuple[int, float]]:
    """Step and training loss of each step of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "lr" in line]


def test_a_run_in_one_process_starts_no_group_and_shards_nothing(
    alone: World, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built, optimizers = [], []

    def materialise(model: Any, *rest: Any) -> None:
        load.materialise(model, *rest)
        built.append(model)

    def optimizer_of(*rest: Any) -> torch.optim.Optimizer:
        optimizers.append(adamw(*rest))
        return optimizers[-1]

    monkeypatch.setattr(loop, "materialise", materialise)
    monkeypatch.setattr(loop, "adamw", optimizer_of)
    out = finetune.run(work.load(str(tiny_recipe)))
    assert out is not None
    assert (out / "evaluation.json").is_file()
    (model,), (optimizer,) = built, optimizers
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert {type(p.data) for p in model.parameters()} == {torch.Tensor}
    assert model.trunk.lm_head.weight is model.trunk.embed_tokens.weight
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} <= {id(p) for p in model.parameters()}
    losses = metrics(out)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(out / "checkpoints" / "step_000006")
    assert finetune.run(work.load(str(tiny_recipe)), resume="auto") == out
    assert "going on after step 4" in "".join(capsys.readouterr())
    assert metrics(out) == losses, "the same bits after going on from step 4"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_and_validation_compute_in_bf16_on_fp32_weights(tiny_recipe: Path, checkpointing: bool) -> None:
    recipe = work.load(str(tiny_recipe))
    laid = Layout(precision="bf16", activation_checkpointing="full" if checkpointing else "none")
    with world() as one:
        model, task = work.sharded_model(recipe, one, laid)
        seen = set()
        for layer in model.layers:
            layer.fc1.register_forward_hook(lambda module, _, output: seen.add((module.training, output.dtype)))
        optimizer = adamw(model, recipe.optim)
        set_learning_rate(optimizer, 1.0)
        batch = collate(task, [open_split(recipe, "train", task.labels).get(0)])
        train_step(model, task, optimizer, [(*batch, False)], 1.0, one, laid)
        validate(model, task, open_split(recipe, "valid", task.labels), 130, one)
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert {s.dtype for state in optimizer.state.values() for s in state.values()} == {torch.float32}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_recipe_can_compile_its_layers(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    compiled, compile_in_place = [], TrunkBlock.compile

    def record(block: TrunkBlock, *, dynamic: bool) -> None:
        compiled.append(dynamic)
        compile_in_place(block, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(TrunkBlock, "compile", record)
    text, losses = tiny_recipe.read_text(), []
    for wanted in ("false", "true"):
        options = f"precision: fp32, compile: {wanted}, activation_checkpointing: {checkpointing}"
        tiny_recipe.write_text(text.replace("precision: fp32", options))
        recipe = work.load(str(tiny_recipe))
        finetune.run(recipe.model_copy(update={"out": str(tiny_recipe.parent / wanted)}))
        losses.append([loss for _, loss in metrics(tiny_recipe.parent / wanted)])
    assert compiled == [True, True], "two layers, for all lengths"
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class _Host(torch.Tensor):
    """A tensor that was copied to the host, or was made of such ones."""


class _NoDouble(TorchFunctionMode):
    """Stands for a device without float64: only what is on the host may be of double precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.cpu:
            return result.as_subclass(_Host)
        double = isinstance(result, torch.Tensor) and result.dtype == torch.float64
        assert not double or isinstance(result, _Host), f"{function} makes float64 on the device"
        return result


def test_a_step_needs_no_float64_on_the_device(tiny_recipe: Path) -> None:
    recipe = work.load(str(tiny_recipe))
    with world() as one:
        model, task = work.sharded_model(recipe, one)
        data = open_split(recipe, "train", task.labels)
        batches = [(*collate(task, [data.get(n)]), False) for n in range(2)]
        with _NoDouble():
            result = train_step(model, task, adamw(model, recipe.optim), batches, 1.0, one, Layout())
    assert result.loss > 0
    assert result.grad_norm > 0
