"""Embeddings, contacts, logits, scores and predictions on the GPU against the CPU, as users ask for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from shared import random_weights, size, texts, write_model

import esmshard
from esmshard.embed.compute import Computed, Embedder
from esmshard.embed.spec import Long, choose
from esmshard.io.paths import shipped
from esmshard.model.families.esm2 import EsmConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.vocab import encode

pytestmark = pytest.mark.gpu

TINY = EsmConfig(n_layers=2, dim=32, n_heads=4)
SHAPES = {name: size(SIZES[f"esm2_{name}_UR50D"], TINY) for name in ("t6_8M", "t33_650M")}
LENGTHS = size([1, 40, 7, 250, 129, 2], [1, 20, 7, 2])


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random model of this shape, as a directory."""
    path = tmp_path_factory.mktemp("model") / request.param
    yield write_model(path, random_weights(SHAPES[request.param]))
    (path / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def on_cpu(directory: Path) -> esmshard.Model:
    """In fp32, the reference."""
    return esmshard.load(directory, device="cpu")


@pytest.fixture(scope="module")
def model(device: torch.device, directory: Path) -> esmshard.Model:
    """In fp32 on the device."""
    return esmshard.load(directory, device=device)


def near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """The tolerance is relative to the largest value of the layer."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_all_layers_and_outputs_in_fp32_are_those_of_the_cpu(
    device: torch.device, model: esmshard.Model, on_cpu: esmshard.Model
) -> None:
    assert (model.device.type, model.dtype) == (device.type, torch.float32)
    layers = list(range(model.config.n_layers + 1))
    proteins = texts(LENGTHS)
    asked: dict[str, Any] = {"pool": ["residue", "mean", "max", "cls"], "layers": layers}
    found, expected = (one.embed(proteins, **asked) for one in (model, on_cpu))
    assert len(found) == len(expected) == 4 * len(layers)
    for name, arrays in expected.items():
        join = np.concatenate if name.startswith("residue") else np.asarray
        near(join(found[name]), join(arrays), 1e-4)
    for mine, theirs in zip(model.embed(proteins, "logits"), on_cpu.embed(proteins, "logits"), strict=True):
        near(mine, theirs, 1e-4)
    for mine, theirs in zip(model.contacts(proteins), on_cpu.contacts(proteins), strict=True):
        assert np.abs(mine - theirs).max() <= 1e-4
    spread = on_cpu.contacts(proteins[1])
    assert spread.std() > 1e-3, "contacts differ from pair to pair"


def test_half_precision_weights_point_the_same_way(
    device: torch.device, varlen: None, directory: Path, on_cpu: esmshard.Model
) -> None:
    """Cosine of each residue's vector, in all layers but the embedding, and of the mean."""
    proteins = texts(LENGTHS)
    layers = list(range(1, on_cpu.config.n_layers + 1))
    expected = on_cpu.embed(proteins, ["residue", "mean"], layers)
    for dtype in ("bf16", "fp16"):
        model = esmshard.load(directory, device=device, dtype=dtype)
        found = model.embed(proteins, ["residue", "mean"], layers)
        for name, arrays in expected.items():
            whole = name.startswith("mean")
            a, b = (torch.from_numpy(x if whole else np.concatenate(x)) for x in (found[name], arrays))
            worst = float(F.cosine_similarity(a, b, dim=-1).min())
            assert worst > 0.999, f"{dtype} {name}: {worst}"
        for mine, theirs in zip(model.contacts(proteins), on_cpu.contacts(proteins), strict=True):
            assert np.isfinite(mine).all()
            assert np.abs(mine - theirs).max() <= 5e-2  # attention is sharp, and the regression's weights about 1


def test_windows_of_a_long_protein_are_those_of_the_cpu(model: esmshard.Model, on_cpu: esmshard.Model) -> None:
    protein = texts([size(700, 150)])[0]
    window, overlap = size((256, 64), (64, 16))
    for mode in ("window", "truncate"):
        long = Long(mode, window, overlap)  # type: ignore[arg-type]
        found, expected = (
            one.embed(protein, ["residue", "mean", "cls", "logits"], long=long) for one in (model, on_cpu)
        )
        for name, array in expected.items():
            near(found[name], array, 1e-4)
    mine, theirs = (one.embed(protein, "contacts", long=Long("window", window, overlap)) for one in (model, on_cpu))
    assert np.array_equal(np.isnan(mine), np.isnan(theirs)), "pairs that no window sees"
    assert np.nanmax(np.abs(mine - theirs)) <= 1e-4


def test_scores_of_variants_are_those_of_the_cpu(model: esmshard.Model, on_cpu: esmshard.Model) -> None:
    protein = texts([20])[0]
    variants = ["WT", f"{protein[2]}3W", f"{protein[0]}1A:{protein[9]}10C"]
    for method in ("masked-marginals", "wild-type-marginals", "pseudo-perplexity"):
        mine, theirs = (one.score(protein, variants, method) for one in (model, on_cpu))
        assert np.abs(mine - theirs).max() <= 1e-3, method  # sums of some logarithms, up to a hundred of them


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_predictions_of_a_contact_head_are_those_of_the_cpu(device: torch.device, varlen: None, dtype: Any) -> None:
    """The starter, trained, with its pairwise head: convolutions, which cuDNN would compute in TF32."""
    starter = shipped("data") / "starter" / "model"
    model, reference = esmshard.load(starter, device=device, dtype=dtype), esmshard.load(starter, device="cpu")
    if model.task is None:
        pytest.fail("the starter has a contact head")
    before = torch.backends.cudnn.conv.fp32_precision
    proteins = texts(size([250, 64, 9], [40, 9]))
    for mine, theirs in zip(model.predict(proteins), reference.predict(proteins), strict=True):
        assert np.abs(mine - theirs).max() <= (1e-4 if dtype == "fp32" else 5e-2)
    assert torch.backends.cudnn.conv.fp32_precision == before


def test_a_pack_says_what_each_sequence_says_alone(device: torch.device, varlen: None) -> None:
    """In bf16 on the device, many sequences in some packs."""
    model = esmshard.load("starter", device=device, dtype="bf16").esm
    tokens = [encode(text) for text in texts(size([300, 2, 40, 77, 1] * 8, [30, 2, 11]))]
    outputs = choose(["residue"], None, model.config, "starter")
    together = Embedder(model, outputs, tokens=size(1024, 20)).compute(tokens)
    for n, one in enumerate(tokens):
        (alone,) = Embedder(model, outputs).compute([one])
        mine = together[n]
        assert isinstance(alone, Computed)
        assert isinstance(mine, Computed)
        for name, values in alone.values.items():
            # Other shapes may choose other kernels of cuBLAS, which add up in another order.
            assert (mine.values[name] - values).abs().max() <= 2e-2 * values.abs().max()
