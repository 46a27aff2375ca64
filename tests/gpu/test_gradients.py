"""Gradients of a step and losses of several, of every task, on the GPU against the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, loaded
from shared import apart, masked_pack, size
from small_model import FULL, built
from training import set_up

from esmshard.devices import exact_convolutions
from esmshard.parallel.layout import Layout
from esmshard.recipe.sections import AdaptSettings, Recipe
from esmshard.tasks.mlm import MlmSettings, MlmTask
from esmshard.tasks.registry import TASKS

pytestmark = pytest.mark.gpu

STEPS = size(4, 2)
_CPU: dict[tuple[str, str], tuple[dict[str, torch.Tensor], list[float], float]] = {}


@pytest.fixture(autouse=True)
def _exact(device: torch.device) -> Iterator[None]:
    """As in a run: convolutions in fp32 and not in TF32."""
    with exact_convolutions(device):
        yield


def on_cpu(recipe: Recipe, case: str, kind: str = "full") -> tuple[dict[str, torch.Tensor], list[float], float]:
    """The same in fp32 on the CPU; computed once for each case."""
    if (case, kind) not in _CPU:
        _CPU[case, kind] = set_up(recipe, torch.device("cpu")).run(STEPS)
    return _CPU[case, kind]


def test_every_task_has_a_case() -> None:
    assert {case.split("-")[0] for case in CASES} == set(TASKS)


LORA = AdaptSettings(method="lora", rank=4, alpha=8.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("case", "checkpointing", "adapt"),
    [
        *((case, "none", FULL) for case in CASES),
        *((case, kind, FULL) for case in ("contact-both", "mlm") for kind in ("full", "selective")),
        *((case, "none", LORA) for case in ("mlm", "sequence-class")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.method,
)
def test_training_in_fp32_is_that_of_the_cpu(
    device: torch.device, tmp_path: Path, case: str, checkpointing: str, adapt: AdaptSettings
) -> None:
    recipe = loaded(tmp_path, case).model_copy(update={"adapt": adapt})
    changed = loaded(tmp_path, case, parallel={"activation_checkpointing": checkpointing})
    gradients, losses, validation = set_up(changed.model_copy(update={"adapt": adapt}), device).run(STEPS)
    expected, theirs, loss = on_cpu(recipe, case, adapt.method)
    assert any("lora_B" in name for name in expected) is (adapt is LORA)
    assert apart(gradients, expected) <= 1e-4
    assert [*losses, validation] == pytest.approx([*theirs, loss], rel=1e-4, abs=1e-5)
    assert adapt is LORA or np.ptp(theirs) > 1e-4, "the steps change something"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_losses_in_half_precision_are_near_those_in_fp32(
    device: torch.device, varlen: None, tmp_path: Path, case: str, precision: Any
) -> None:
    """Without activation checkpointing, and with it: maps and convolutions are computed again there, too."""
    recipe = loaded(tmp_path, case)
    _, theirs, loss = on_cpu(recipe, case)
    if device.type == "cuda" or precision == "bf16":  # `prepare` refuses fp16 on a CPU
        checkpointing = "full" if precision == "fp16" else "none"
        changed = {"precision": precision, "activation_checkpointing": checkpointing}
        _, losses, validation = set_up(loaded(tmp_path, case, parallel=changed), device).run(STEPS)
        # A tolerance of 0.03 for a loss of one nat or standard deviation; a larger one has as many digits.
        for mine, other in zip([*losses, validation], [*theirs, loss], strict=True):
            assert abs(mine - other) <= 3e-2 * max(1.0, abs(other))


@pytest.mark.parametrize("case", ["contact-attention", "sequence-class", "residue-number", "variant-wild_type"])
def test_probes_and_baselines_find_the_same_on_both(device: torch.device, tmp_path: Path, case: str) -> None:
    """Fitted by scikit-learn on what the frozen model says on the device; all of it comes back to the host."""
    task = {} if case == "contact-attention" else {"hidden": 0}
    recipe = loaded(tmp_path, case, task=task)
    told = []
    for where in (device, torch.device("cpu")):
        training = set_up(recipe, where)
        job, model = training.job, training.model.eval()
        every = [job.train.get(n) for n in range(len(job.train))]
        known = job.task.baselines(every, model)
        said = {name: each[0] for name, each in job.task.baseline_outputs([job.valid.get(0)], known, model).items()}
        job.task.probe(model.head, every, model, 0)
        outputs = model.outputs([job.task.inputs(job.valid.get(n)) for n in range(2)])
        told.append([*outputs, *(x for x in said.values() if isinstance(x, np.ndarray))])
    assert len(told[0]) == len(told[1]) > 2
    for mine, theirs in zip(*told, strict=True):
        # Fits of a few examples are loose in some directions, in which 1e-6 of a feature is more of a weight.
        assert np.abs(mine - theirs).max() <= 2e-2 * max(1.0, float(np.abs(theirs).max()))


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_the_host_does_not_wait_in_a_micro_batch(device: torch.device, varlen: None, checkpointing: Any) -> None:
    """Copy, forward pass, loss and backward pass of task mlm: nothing is read back. (A CPU has nothing to wait for.)"""
    model = built(device, FULL, Layout(precision="bf16", activation_checkpointing=checkpointing))
    task = MlmTask(MlmSettings(name="mlm"), {})  # type: ignore[call-arg]
    batch, target_P = masked_pack(size([300, 40, 128], [30, 4]))
    targets = list(target_P.split(batch.logit_counts))

    def micro_batch() -> torch.Tensor:
        part = task.loss(model(batch.to(device)), targets)
        torch.autograd.backward(part.sum * 1.0)
        return torch.stack([part.sum.detach(), part.count])

    micro_batch()  # libraries are loaded, and memory is taken
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        sums = micro_batch()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert sums.isfinite().all()
