"""`batch.tokens_per_rank: auto`: a run fills the memory of the GPU, and not more."""

import json
from pathlib import Path

import pytest
import torch
from shared import alone, only_training, size, steps, write_proteins

import esmshard
from esmshard import planner
from esmshard.checkpoint.sharded import Saver
from esmshard.planner import model_numbers
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.train.inputs import prepare
from esmshard.train.loop import USABLE, largest_fitting

pytestmark = pytest.mark.gpu

LEAST, MOST = 0.80, 0.95
"""Share of the card that has to be in use at the peak, reserved by torch."""


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for a step in which each of two micro-batches fills the card under full checkpointing."""
    directory = tmp_path_factory.mktemp("proteins")
    write_proteins(directory, {"train": size(4500, 40), "valid": 4}, size((100, 500), (10, 30)))
    return directory


def recipe_of(proteins: Path, checkpointing: str, global_tokens: int, number: int) -> tuple[Path, Recipe]:
    content = {
        "task": {"name": "mlm"},
        "model": {"name": size("esm2_t33_650M_UR50D", "nano")},
        "init": "random",
        "data": {"train": "train.fasta", "valid": "valid.fasta", "test": "valid.fasta", "long": "crop"},
        "batch": {"global_tokens": global_tokens, "tokens_per_rank": "auto"},
        "train": {"steps": number, "seed": 0, "eval_every": 1000},
        "parallel": {"activation_checkpointing": checkpointing},
        "out": "nowhere",
    }
    path = proteins / f"{checkpointing}.yaml"
    path.write_text(json.dumps(content))
    return path, recipe_file.load(path)


def fitting(recipe: Recipe, device: torch.device) -> int:
    """Tokens that the planner would let a rank take at once."""
    job = prepare(recipe, 1, 1, device)
    room = int(USABLE * planner.free_bytes(device, 1))
    return largest_fitting(job, model_numbers(recipe, job.weights.config, job.task), room, alone(device))


@pytest.mark.parametrize(("checkpointing", "number"), [("none", 4), ("full", 2)])
def test_a_run_fills_the_card_without_running_out_of_memory(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    proteins: Path,
    tmp_path: Path,
    checkpointing: str,
    number: int,
) -> None:
    """Steps of two micro-batches, each a little smaller than what fits: what is left over is left free by design."""
    _, large = recipe_of(proteins, checkpointing, 1 << 24, 1)
    fits = fitting(large, device)
    assert fits > 0
    path, _ = recipe_of(proteins, checkpointing, size(int(1.98 * fits), 300), number)
    monkeypatch.setattr(Saver, "save", lambda *rest, **options: None)  # no checkpoint, which of 650M is 8 GB
    with only_training():
        esmshard.finetune(path, nproc=1, report=False, out=str(tmp_path / "run"))
    lines = steps(tmp_path / "run")
    resolved = recipe_file.load(tmp_path / "run" / "recipe.yaml")
    taken = resolved.batch.tokens_per_rank
    assert isinstance(taken, int)
    assert [line["step"] for line in lines] == list(range(1, number + 1))
    for line in lines:
        assert not line["skipped"]
        assert line["allocation_retries"] == 0, line
        assert line["residues_per_s"] > 0
        assert line["peak_memory_bytes"] > 0
    if device.type == "cuda":  # of a CPU's memory nobody says how much is reserved, and it is not to be filled
        assert taken == pytest.approx(fits, rel=0.02)
        assert resolved.batch.global_tokens > 1.9 * taken
        total = torch.cuda.get_device_properties(device).total_memory
        share = lines[-1]["reserved_memory_bytes"] / total
        assert LEAST <= share <= MOST, f"{share:.1%} reserved, {lines[-1]['peak_memory_bytes'] / total:.1%} allocated"
