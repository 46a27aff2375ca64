"""Sizes, packs, random models and commands of the GPU tests."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from esmshard.batch import TokenBatch, pack
from esmshard.model import weight_reader, weights
from esmshard.model.families.esm2 import FAMILY, TIED, EsmConfig
from esmshard.model.weights import Weights
from esmshard.parallel.process_group import World
from esmshard.train import finetune
from esmshard.vocab import MASK, STANDARD, encode

T = TypeVar("T")

REHEARSAL = os.environ.get("ESMSHARD_REHEARSAL") == "1"


def size(real: T, tiny: T) -> T:
    """A size: on a GPU, or in a rehearsal on the CPU."""
    return tiny if REHEARSAL else real


def alone(device: torch.device) -> World:
    """One process that shards nothing."""
    return World(0, 1, device, None)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest value of the second."""
    b = b.double().cpu()
    return float((a.double().cpu() - b).abs().max() / b.abs().max())


def apart(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], floor: float = 1e-3) -> float:
    """The largest norm of a difference of two tensors of one name, relative to the norm of the expected one, or to
    `floor` of all together: the gradient of a bias of keys is nothing but rounding.
    """
    assert found.keys() == expected.keys()
    assert len(expected) > 0
    every = torch.stack([x.double().cpu().norm() for x in expected.values()]).norm()
    worst = 0.0
    for name, tensor in expected.items():
        assert found[name].isfinite().all(), name
        b = tensor.double().cpu()
        worst = max(worst, float((found[name].double().cpu() - b).norm() / b.norm().clamp(min=floor * every)))
    return worst


# Sequences


def write_proteins(directory: Path, numbers: Mapping[str, int], lengths: tuple[int, int]) -> None:
    """Random proteins of these lengths as `NAME.fasta`, so many of each name."""
    rng = np.random.default_rng(0)
    for name, number in numbers.items():
        found = texts(rng.integers(*lengths, number).tolist(), number)
        (directory / f"{name}.fasta").write_text("".join(f">{name}{n}\n{text}\n" for n, text in enumerate(found)))


def texts(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Random proteins."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(STANDARD), length)) for length in lengths]


def bare_pack(tokens: Sequence[int]) -> TokenBatch:
    """Sequences of so many tokens, one and two too, for what sees places and no residues."""
    bounds = np.concatenate([[0], np.cumsum(tokens)])
    return TokenBatch(
        torch.zeros(int(bounds[-1]), dtype=torch.int64),
        torch.from_numpy(np.concatenate([np.arange(n) for n in tokens])),
        torch.from_numpy(bounds.astype(np.int32)),
        max(tokens),
        tuple(map(str, range(len(tokens)))),
        tuple(int(b) for b in bounds),
    )


def masked_pack(lengths: Sequence[int], seed: int = 0) -> tuple[TokenBatch, torch.Tensor]:
    """Random proteins of which every seventh residue is hidden, and these residues, int64 [P]. A share of `<mask>` that
    differs from protein to protein, so that token dropout must be counted for each of them.
    """
    tokens, places, targets = [encode(text).copy() for text in texts(lengths, seed)], [], []
    for n, one in enumerate(tokens):
        places.append(np.arange(1 + n % 3, len(one) - 1, 7 + n % 5).astype(np.int64))
        targets.append(one[places[-1]].astype(np.int64))
        one[places[-1]] = MASK
    return pack(tokens, logits_at=places), torch.from_numpy(np.concatenate(targets))


# Models


def random_weights(config: EsmConfig, seed: int = 0) -> Weights:
    """Fresh weights whose biases, LayerNorms and contact regression are moved off 0 and 1, so that a swap shows, with
    sharper attention and a larger embedding. `inv_freq` is rounded as in released files.
    """
    base, generator = weights.fresh(config, seed), torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, read in base.read.items():
        if name == TIED:
            continue
        tensor = read().clone()
        if name.endswith("inv_freq"):
            tensor = tensor.half().float()
        elif name.startswith("contact_head.regression.weight"):
            tensor = torch.randn(tensor.shape, generator=generator)
        elif tensor.ndim == 1:
            tensor += 0.03 * torch.randn(tensor.shape, generator=generator)
        elif name.endswith("q_proj.weight"):
            tensor *= 2
        elif name == "embed_tokens.weight":
            tensor *= 5
        state[name] = tensor
    return replace(base, read=weight_reader.tensors(state), seed=None)


def write_model(directory: Path, found: Weights) -> Path:
    """A directory that `esmshard.load` opens."""
    directory.mkdir(parents=True)
    state = {FAMILY.key(name): read().contiguous() for name, read in found.read.items() if name != TIED}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(FAMILY.write_config(found.config)))
    return directory


# Runs


class TrainedError(Exception):
    """Ends a run after its last step."""


@contextmanager
def only_training() -> Iterator[None]:
    """Runs end after the last step: what comes then is the same whatever the options, and is looked at elsewhere."""

    def enough(*rest: Any) -> None:
        raise TrainedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "_evaluate", enough)
        with pytest.raises(TrainedError):
            yield


def start(*arguments: str | Path) -> "subprocess.Popen[str]":
    """Begin `esmshard ARGUMENTS` in a fresh process: a forked one could not use CUDA once this one has."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if REHEARSAL else "8"}
    command = [sys.executable, "-m", "esmshard", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps(run: Path) -> list[dict[str, Any]]:
    """The lines of optimizer steps in a run's metrics.jsonl, as far as they are written."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in found if "loss" in line and "split" not in line]
