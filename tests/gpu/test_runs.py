"""Whole runs on the GPU: every task from its files to the evaluated model, the options of `parallel`, and stops."""

import gc
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import written
from shared import only_training, size, start, steps, texts

import esmshard
from esmshard.model.families.esm2 import TransformerLayer

pytestmark = pytest.mark.gpu

WHOLE = ("contact-both", "mlm", "residue-class", "sequence-number", "variant-wild_type")


def trained(recipe: Path, out: Path, **overrides: Any) -> list[dict[str, Any]]:
    """The steps of a run, without what comes after the last one."""
    with only_training():
        run(recipe, out, **overrides)
    return steps(out)


def run(recipe: Path, out: Path, **overrides: Any) -> esmshard.Run:
    """`esmshard.finetune` in this process."""
    resume = overrides.pop("resume", None)
    return esmshard.finetune(recipe, nproc=1, report=False, resume=resume, out=str(out), **overrides)


@pytest.mark.parametrize("case", WHOLE)
def test_a_run_of_each_task_ends_with_a_model_that_predicts(device: torch.device, tmp_path: Path, case: str) -> None:
    """In the precision that `auto` takes: trained, checkpointed, consolidated, evaluated beside baselines."""
    recipe = written(
        tmp_path, case, parallel={"precision": "auto"}, checkpoint={"every": 2}, batch={"tokens_per_rank": "auto"}
    )
    done = run(recipe, tmp_path / "run")
    assert done.status == "done"
    losses = [line["loss"] for line in steps(done.path)]
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    resolved = (done.path / "recipe.yaml").read_text()
    assert ("precision: bf16" if device.type == "cuda" else "precision: fp32") in resolved
    assert len(done.evaluation["metrics"]) > 1, "the model and its baselines"
    facts = json.loads((done.path / "versions.json").read_text())
    assert facts["device"] == str(device)
    model = done.model()
    assert model.device.type == device.type
    protein = (tmp_path / "wild_type.fasta").read_text().split()[1] if case.startswith("variant") else ""
    values = model.predict([f"{protein[3]}4W", "WT"] if protein else texts([20, 9]))
    assert len(values) == 2
    assert all(np.isfinite(value).all() for value in values)


MIXED = {"precision": "bf16", "cpu_offload": True, "activation_checkpointing": "selective"}
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "offload": ({"cpu_offload": True}, 1e-4),
    "compiled": ({"compile": True}, 1e-3),
    "bf16, offload, selective checkpointing": (MIXED, 3e-2),
    "fp16": ({"precision": "fp16"}, 3e-2),
}


@pytest.fixture(scope="module")
def plain(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in fp32 without any option."""
    directory = tmp_path_factory.mktemp("plain")
    recipe = written(
        directory, "contact-pairwise", train={"steps": 6, "eval_every": 3}, model={"name": "nano"}, init="random"
    )
    trained(recipe, directory / "run")
    return directory


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_loss(
    device: torch.device, varlen: None, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, tolerance = OPTIONS[name]
    if device.type == "cpu":  # fp16 is refused there, and the last stage of the compiler takes a minute
        options = options | ({"precision": "bf16"} if name == "fp16" else {})
        compile_in_place = TransformerLayer.compile
        monkeypatch.setattr(
            TransformerLayer, "compile", lambda self, **how: compile_in_place(self, **how, backend="eager")
        )
    found = trained(plain / "recipe.yaml", tmp_path / "run", parallel=options)
    losses = [[line["loss"] for line in lines if not line["skipped"]] for lines in (found, steps(plain / "run"))]
    assert len(losses[0]) >= 4
    if options.get("precision") != "fp16":  # it skips some steps until it has found its scale
        assert losses[0] == pytest.approx(losses[1], abs=tolerance)
    for line in found:
        assert line["peak_memory_bytes"] > 0
        assert line["mfu"] is None or 0 < line["mfu"] < 1
        if device.type == "cuda":
            assert line["mfu"] is not None, "an H200 has a data sheet"


# Stops


STEPS = size(100, 60)


def until(recipe: Path, out: Path, taken: int, number: int) -> tuple[int, str]:
    """Begin or go on with a run, and send it a signal as soon as it has taken some steps; exit code and stderr."""
    process = start("finetune", recipe, f"out={out}", "--nproc", "1", "--no-report", "--resume", "auto")
    end = time.monotonic() + 600
    path, before = out / "metrics.jsonl", attempts(out)
    while process.poll() is None:
        if attempts(out) > before and len(path.read_text().rpartition('"from_step"')[2].splitlines()) > taken:
            break
        assert time.monotonic() < end, "the run does not come so far"
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    return process.returncode, err


def attempts(out: Path) -> int:
    """How often the run in this directory has begun its steps."""
    path = out / "metrics.jsonl"
    return path.read_text().count('"from_step"') if path.is_file() else 0


def test_a_run_that_is_killed_and_stopped_goes_on_as_if_it_had_not_been(device: torch.device, tmp_path: Path) -> None:
    """With dropout, which must draw on the device as if nothing had happened."""
    recipe = written(
        tmp_path, "sequence-number", task={"dropout": 0.3}, train={"steps": STEPS}, checkpoint={"every": 10, "keep": 2}
    )
    # On a CPU, where sums have one order, a second run would only be the first one again.
    names = ("one", "two") if device.type == "cuda" else ("one",)
    whole = [[line["loss"] for line in trained(recipe, tmp_path / name)] for name in names]
    assert len(whole[0]) == STEPS
    spread = max(abs(a - b) / abs(b) for a, b in zip(whole[0], whole[-1], strict=True))
    out = tmp_path / "stopped"
    code, err = until(recipe, out, 25, signal.SIGKILL)
    assert code == -signal.SIGKILL, err
    killed = steps(out)[-1]["step"]
    assert 20 <= killed < STEPS
    code, err = until(recipe, out, 5, signal.SIGTERM)
    assert code == 75, err
    assert "Traceback" not in err
    assert "going on after step" in err
    assert "stopped by SIGTERM after step" in err
    assert json.loads((out / "status.json").read_text())["state"] == "preempted"
    assert steps(out)[-1]["step"] < STEPS
    assert run(recipe, out, resume="auto").status == "done"
    lines = steps(out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    found = [line["loss"] for line in lines]
    if device.type == "cpu":
        assert found == whole[0], "to the bit"
    # Sums by atomic operations come in another order each time; two runs that nobody stopped show by how much.
    allowed = max(1e-5, 10 * spread)
    assert allowed < 2e-2, "or other draws of dropout would not show"
    assert found == pytest.approx(whole[0], rel=allowed)


def test_the_second_run_of_a_process_is_the_first_one_again(device: torch.device, tmp_path: Path) -> None:
    """Nothing of the first is left on the device: neither memory that the planner would miss, nor a random state."""
    recipe = written(
        tmp_path, "mlm", task={"mask": 0.2}, batch={"tokens_per_rank": "auto", "global_tokens": size(4000, 300)}
    )

    def drawn() -> torch.Tensor:
        return torch.rand(4, device=device)

    torch.manual_seed(5)
    drawn()
    expected = drawn()
    losses, tokens, held = [], [], []
    for name in ("one", "two"):
        torch.manual_seed(5)
        drawn()
        losses.append([line["loss"] for line in trained(recipe, tmp_path / name)])
        assert torch.equal(drawn(), expected), "the random state of the process is as it was"
        lines = (tmp_path / name / "recipe.yaml").read_text().splitlines()
        tokens.append([line for line in lines if "tokens_per_rank" in line])
        gc.collect()
        held.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert tokens[0] == tokens[1]
    assert held[1] - held[0] < 1 << 20  # what libraries hold after the first run, they have by then
