"""What the ranks of the tests of saving do."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import work
from torch.distributed.tensor import DTensor, Replicate, Shard

from esmshard.checkpoint import manifest, sharded
from esmshard.checkpoint.sharded import Saver
from esmshard.errors import InputError
from esmshard.parallel.preemption import Preempted, Preemption
from esmshard.parallel.process_group import World, world
from esmshard.train import finetune, loop
from esmshard.train.step import StepResult


def some(ranks: World, value: float) -> dict[str, torch.Tensor]:
    """An uneven, a whole and a plain tensor."""
    rows = len(torch.arange(7).tensor_split(ranks.size)[ranks.rank]) if ranks.size > 1 else 7
    cut = torch.full((rows, 3), value) + ranks.rank
    if ranks.mesh is None:
        return {"cut": cut, "whole": torch.full((2,), value), "plain": torch.tensor(value)}
    stride, size = (3, 1), torch.Size((7, 3))
    return {
        "cut": DTensor.from_local(cut, ranks.mesh, [Shard(0)], run_check=False, shape=size, stride=stride),
        "whole": DTensor.from_local(torch.full((2,), value), ranks.mesh, [Replicate()], run_check=False),
        "plain": torch.tensor(value),
    }


def background(directory: str) -> dict[str, Any]:
    """Two saves in the background while the tensors change; then one that cannot be written."""
    found: dict[str, Any] = {}
    with world() as ranks:
        saver = Saver(Path(directory), 5, True)
        tensors = some(ranks, 1.0)
        saver.save(1, tensors, {"n": 1})
        found["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")]
        for tensor in tensors.values():  # training goes on, and talks to the other ranks meanwhile
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
        for _ in range(20):
            ranks.sum([1.0])
        saver.save(2, tensors, {"n": 2})
        found["first was whole"] = manifest.path_of(Path(directory), 1).is_dir()
        saver.finish()
        for step in (1, 2):
            target = {name: torch.zeros(()) if t.ndim == 0 else torch.zeros_like(t) for name, t in tensors.items()}
            path = manifest.path_of(Path(directory), step)
            manifest.verify(path)
            sharded.load(path, target)
            found[f"loaded {step}"] = {
                name: (t.full_tensor() if isinstance(t, DTensor) else t).tolist() for name, t in target.items()
            }
            found[f"state {step}"] = sharded.read_state(path)["n"]
        (Path(directory) / ".tmp-step_000003").unlink(missing_ok=True)
        ranks.sum([1])
        if ranks.is_first:
            (Path(directory) / ".tmp-step_000003").write_text("in the way: not a directory")
        ranks.sum([1])
        saver.save(3, tensors, {})
        found["errors"] = []
        for call in (saver.finish, saver.finish):
            try:
                call()
                found["errors"].append("")
            except InputError as error:
                found["errors"].append(str(error))
    return found


def until(recipe: str, out: str, stop: int | None, background: bool = False) -> str:
    """Train with `--resume auto`; the last rank is asked to stop in step `stop`, counted from 1. What the run said."""
    loaded = work.load(recipe)
    loaded = loaded.model_copy(
        update={"out": out, "checkpoint": loaded.checkpoint.model_copy(update={"async_save": background})}
    )
    step, asked = first_step(out), 0
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    train_step = loop.train_step

    def stopping_step(*args: Any, **settings: Any) -> StepResult:
        nonlocal step, asked
        step += 1
        asked = asked or (int(signal.SIGTERM) if last and step == stop else 0)
        return train_step(*args, **settings | {"asked": asked})

    class Stops(Preemption):
        @property
        def asked(self) -> int:
            return asked

    finetune.Preemption, loop.train_step = Stops, stopping_step  # type: ignore[misc]
    torch.manual_seed(int(os.environ["RANK"]) + 77 * (stop or 0))
    try:
        finetune.run(loaded, "auto")
        return ""
    except Preempted as error:
        return str(error)


def first_step(out: str) -> int:
    found = manifest.pointed(Path(out) / "checkpoints", "LATEST")
    return manifest.step_of(found) or 0 if found else 0


def weights_of(step: str) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    names, read = sharded.reader(Path(step))
    return {name: np.asarray(read(name)) for name in names}
