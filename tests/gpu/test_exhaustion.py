"""What becomes of a run, and of embeddings, when the memory of the GPU does not suffice."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared import random_weights, size, start, steps, texts, write_model, write_proteins

import esmshard
from esmshard.batch import TokenBatch
from esmshard.embed.compute import Computed, Embedder
from esmshard.embed.spec import choose
from esmshard.errors import InputError
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.vocab import encode

pytestmark = pytest.mark.gpu

LEFT = 6 << 30
"""Bytes of the card that are left to a run."""
TOO_MANY = size(250_000, 400)
"""Tokens at once that do not fit into it: of 35M, without checkpointing, about 20,000 do."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Task mlm, one step as large as `TOO_MANY`."""
    write_proteins(tmp_path, {"train": size(1100, 30), "valid": 3}, size((150, 350), (10, 30)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""\
task: {{name: mlm}}
model: {{name: {size("esm2_t12_35M_UR50D", "nano")}}}
init: random
data: {{train: train.fasta, valid: valid.fasta, test: valid.fasta, long: crop}}
batch: {{global_tokens: {TOO_MANY}, tokens_per_rank: auto}}
train: {{steps: 2, seed: 0, eval_every: 100}}
out: {tmp_path / "run"}
"""
    )
    return path


@pytest.fixture
def little_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A card on which others have left 6 GiB. In a rehearsal a model that refuses micro-batches over 310 tokens."""
    if device.type == "cuda":
        held = torch.empty(torch.cuda.mem_get_info()[0] - LEFT, dtype=torch.uint8, device=device)
        yield LEFT
        del held
        return
    forward = ESM2.forward

    def limited(self: ESM2, batch: TokenBatch, *rest: Any, **options: Any) -> Any:
        if batch.bounds[-1] > 310 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, batch, *rest, **options)

    monkeypatch.setattr(ESM2, "forward", limited)
    yield 310


def finetuned(device: torch.device, recipe: Path, tokens: int) -> tuple[int, str]:
    """Exit code and stderr of `esmshard finetune`. A model that is patched is one of this process."""
    if device.type == "cuda":
        process = start(
            "finetune", recipe, f"batch.tokens_per_rank={tokens}", "--nproc", "1", "--no-report", "--resume", "auto"
        )
        _, err = process.communicate(timeout=600)
        return process.returncode, err
    try:
        esmshard.finetune(recipe, nproc=1, report=False, resume="auto", **{"batch.tokens_per_rank": tokens})
    except InputError as error:
        return error.exit_code, f"error: {error}\n"
    return 0, ""


def test_a_run_that_does_not_fit_names_a_number_that_does(
    device: torch.device, little_memory: int, recipe: Path
) -> None:
    code, err = finetuned(device, recipe, TOO_MANY)
    assert code == 1, err
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, err
    found = re.search(r"micro-batches of (\d+) tokens do not fit; set batch.tokens_per_rank=(\d+), or", said[0])
    assert found, said
    assert int(found[1]) == TOO_MANY
    number = int(found[2])
    assert number <= 3 * TOO_MANY // 4
    if device.type == "cuda":
        assert number < TOO_MANY // 4, "the planner's number, which is smaller than three quarters"
    code, err = finetuned(device, recipe, number)
    assert code == 0, err
    assert len(steps(recipe.parent / "run")) == 2


def test_a_model_that_does_not_fit_is_one_sentence(
    device: torch.device, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights alone are too much: no number of tokens would do."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    else:

        def too_much(*rest: Any) -> None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr("esmshard.train.loop.materialise", too_much)
    try:
        with pytest.raises(InputError, match=r"^out of memory: weights and optimizer state of the model do not fit on"):
            esmshard.finetune(recipe, nproc=1, report=False, **{"batch.tokens_per_rank": 1000})
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


# Embeddings

CONFIG = size(SIZES["esm2_t12_35M_UR50D"], EsmConfig(n_layers=2, dim=32, n_heads=4))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", random_weights(CONFIG))


def test_packs_that_do_not_fit_are_halved_and_say_the_same(
    device: torch.device, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = esmshard.load(directory, device=device).esm
    rng = np.random.default_rng(0)
    tokens = [encode(text) for text in texts(rng.integers(*size((50, 300), (5, 30)), size(400, 40)).tolist())]
    outputs = choose(["mean", "residue"], None, CONFIG, "")
    embedder = Embedder(model, outputs, tokens=size(16_384, 100))
    expected = embedder.compute(tokens)
    passes: list[int] = []
    forward = model.forward

    def counted(batch: TokenBatch, *rest: Any, **options: Any) -> Any:
        passes.append(batch.bounds[-1])
        if device.type == "cpu" and batch.bounds[-1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(batch, *rest, **options)

    monkeypatch.setattr(model, "forward", counted)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        # Room for a third or so of what a pack takes: of a token some fifteen vectors in fp32, as wide as the model.
        room = 5_000 * 60 * CONFIG.dim
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        found = embedder.compute(tokens)
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    packs = embedder.packs([len(one) - 2 for one in tokens])
    assert len(packs) > 1
    assert len(passes) > len(packs), "some did not fit"
    for mine, one in zip(found, expected, strict=True):
        assert isinstance(one, Computed)
        assert isinstance(mine, Computed), mine
        assert mine.windowed == 0
        for name, values in one.values.items():
            assert (mine.values[name] - values).abs().max() <= 1e-4 * values.abs().max()
