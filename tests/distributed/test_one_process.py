"""One process: no group, no mesh, plain parameters, and the numbers of a run all the same."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))
import work

from esmshard.data.splits.recipe_splits import open_split
from esmshard.parallel import load, shard
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import world
from esmshard.tasks.base import collate
from esmshard.train import finetune, loop
from esmshard.train.optim import adamw
from esmshard.train.step import train_step

LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}


def test_a_run_in_one_process_starts_no_group_and_shards_nothing(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a launcher of one process."""
    built, optimizers = [], []

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("one process needs no process group and no FSDP")

    def materialise(model: Any, *rest: Any) -> None:
        load.materialise(model, *rest)
        built.append(model)

    def optimizer_of(*rest: Any) -> torch.optim.Optimizer:
        optimizers.append(adamw(*rest))
        return optimizers[-1]

    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    for name in ("init_process_group", "barrier", "all_reduce", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    monkeypatch.setattr(shard, "fully_shard", refuse)
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
