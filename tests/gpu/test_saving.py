"""Checkpoints of what lies on the GPU: written at once and in the background."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import loaded
from shared import alone
from training import Training, set_up

from esmshard.checkpoint import sharded
from esmshard.checkpoint.sharded import Saver
from esmshard.model.finetuner import RecordDropout
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import local
from esmshard.train.optim import state_tensors

pytestmark = pytest.mark.gpu

KINDS: dict[str, Layout | None] = {"plain": None, "sharded": Layout(), "offload": Layout(cpu_offload=True)}


@pytest.fixture(params=KINDS)
def training(device: torch.device, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Training]:
    """A run that has taken two steps, with dropout."""
    recipe, laid = loaded(tmp_path, "sequence-number", task={"dropout": 0.2}), KINDS[request.param]
    if laid is None:
        yield begun(recipe, device, alone(device), None)
        return
    with world(alone_too=True) as ranks:
        yield begun(recipe, device, ranks, laid)


def begun(recipe: Any, device: torch.device, ranks: World, laid: Layout | None) -> Training:
    training = set_up(recipe, device, ranks, laid)
    for step in range(2):
        training.step(step)
    return training


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    """As the main job saves them."""
    return state_tensors(training.model, training.optimizer)


def digests(checkpoint: Path) -> dict[str, str]:
    """sha256 of every tensor. Files of the same tensors differ in the order of their headers."""
    names, read = sharded.reader(checkpoint)
    assert names
    return {name: hashlib.sha256(read(name).flatten().view(torch.uint8).numpy()).hexdigest() for name in names}


def test_a_save_in_the_background_has_the_bytes_of_one_at_once(
    device: torch.device, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written only when training has gone on for two steps, from a copy on the host that these do not touch."""
    tensors = tensors_of(training)
    with Saver(tmp_path / "at once", 3, background=False) as saver:
        saver.save(2, tensors, {"x": 1})
    may_write, seen = threading.Event(), []
    write = sharded.write

    def later(*args: Any, **options: Any) -> Path:
        assert may_write.wait(600)
        seen.append(threading.current_thread().name)
        return write(*args, **options)

    monkeypatch.setattr(sharded, "write", later)
    with Saver(tmp_path / "later", 3, background=True) as saver:
        for number in range(2):  # the second one takes the buffers of the first
            now = tensors_of(training)
            before = {name: local(tensor).detach().cpu().clone() for name, tensor in now.items()}
            saver.save(2 + number, now, {"x": 1})
            training.step(2 + number)
            training.step(2 + number)
            assert not all(torch.equal(local(tensor).detach().cpu(), before[name]) for name, tensor in now.items())
            may_write.set()
            saver.finish()
            may_write.clear()
    assert seen == ["checkpoint_0", "checkpoint_0"]
    assert digests(tmp_path / "later" / "step_000002") == digests(tmp_path / "at once" / "step_000002")
    assert digests(tmp_path / "later" / "step_000003") != digests(tmp_path / "later" / "step_000002")


def test_what_is_loaded_goes_on_as_what_was_saved(device: torch.device, training: Training, tmp_path: Path) -> None:
    """Weights and moments: the next step, dropout and all, is the same one, whatever was drawn meanwhile."""
    with Saver(tmp_path / "saved", 1, background=True) as saver:
        saver.save(2, tensors_of(training), {})
    checkpoint = tmp_path / "saved" / "step_000002"

    def next_losses(load: bool) -> list[float]:
        """Of two steps: the second shows what the optimizer's moments were."""
        if load:
            torch.rand(3, device=device)
            sharded.load(checkpoint, tensors_of(training))
        return [training.step(2).loss, training.step(3).loss]

    expected = next_losses(load=False)
    assert next_losses(load=False)[0] != pytest.approx(expected[0], rel=1e-4), "other weights show"
    again = next_losses(load=True)
    assert again == pytest.approx(expected, rel=1e-5)
    assert device.type == "cuda" or again == expected, "to the bit"


def test_dropout_of_the_device_is_that_of_the_host(device: torch.device) -> None:
    """Integers have no rounding: the mask is the same to the bit, and the scale a plain division."""
    draw_R, x_RF = torch.tensor([5, -7, 2**31 - 1, -(2**31)], dtype=torch.int32), torch.ones(4, 3000)
    for layer in (0, 1):
        dropout = RecordDropout(0.3, layer)
        assert torch.equal(dropout(x_RF.to(device), draw_R.to(device)).cpu(), dropout(x_RF, draw_R))
