"""One process: no group, plain parameters, and a step that needs no float64 on the device."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))
import work

from esmshard.parallel import shard
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import world
from esmshard.tasks.base import collate
from esmshard.train import finetune
from esmshard.train.optim import adamw
from esmshard.train.step import train_step

LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}


def test_a_run_in_one_process_starts_no_group_and_shards_nothing(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a launcher of one process."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("one process needs no process group and no FSDP")

    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(shard, "fully_shard", refuse)
    tiny_recipe.write_text(tiny_recipe.read_text().replace("steps: 6", "steps: 1"))
    out = finetune.run(work.load(str(tiny_recipe)))
    assert out is not None
    assert (out / "evaluation.json").is_file()


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
        data = work.examples(recipe, task)
        batches = [(*collate(task, [data.get(n)]), False) for n in range(2)]
        with _NoDouble():
            result = train_step(model, task, adamw(model, recipe.optim), batches, 1.0, one, Layout())
    assert result.loss > 0
    assert result.grad_norm > 0
