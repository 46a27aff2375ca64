"""Layers in memory and on disk: the same numbers as the plain model, within the memory limit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise, write_transformers
from outputs import smallest

from esmshard.batch import TokenBatch
from esmshard.embed import compute
from esmshard.embed.compute import offloaded
from esmshard.errors import UsageError
from esmshard.model import weights
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import FAMILIES
from esmshard.model.weights import Weights

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHM", "ACDEFGHIKLMNPQRSTVWYACDEFG"]
CPU = torch.device("cpu")
LAYER = 4 * (12 * 64 * 64 + 13 * 64 + 8)
"""Bytes of an fp32 layer of width 64: matrices, biases, two LayerNorms and rotary frequencies."""
REST = 4 * (33 * 64 + 64 * 64 + 64 + 33 + 4 * 64 + 33 * 64 + SMALL["ESM-2"].n_maps + 1)
"""Bytes of embedding, LM head, last LayerNorm and contact regression."""


def offloaded_with(memory: int, source: Weights, folder: Path, dtype: torch.dtype = torch.float32) -> ESM2:
    """Build the model as on a machine with this number of bytes of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": memory})
        patch.setattr(compute, "SHARE", 1.0)
        return offloaded(source, folder, dtype, CPU)


@pytest.fixture
def source(tmp_path: Path) -> Weights:
    config = SMALL["ESM-2"]
    return weights.read(str(write_transformers(tmp_path / "model", ours(fair_esm(config), config), config)))


def numbers(model: ESM2, batch: TokenBatch) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model(batch, layers=range(4), logits_at=torch.arange(batch.bounds[-1]))
        assert output.logits_PV is not None
        return [output.representations[n] for n in range(4)] + [output.logits_PV] + predict_contacts(model, batch)


def on_meta(model: ESM2) -> list[bool]:
    """Return whether each layer's weights are outside the memory. A layer must not be divided."""
    kinds = [{parameter.device.type for parameter in layer.parameters()} for layer in model.layers]
    assert all(kind in ({"meta"}, {"cpu"}) for kind in kinds)
    return [kind == {"meta"} for kind in kinds]


def test_the_numbers_are_those_of_the_plain_model(
    source: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory of one layer is kept free, for the layers that come from the disk."""
    _, batch = tokenise(SEQUENCES)
    plain = numbers(weights.build(source, CPU).eval(), batch)
    for memory, less, in_memory in ((2, 1, 0), (3, 1, 1), (3, 0, 3)):
        model = offloaded_with(REST + memory * LAYER - less, source, tmp_path / f"folder-{memory}-{less}")
        expected_places = [n >= in_memory for n in range(3)]
        assert on_meta(model) == expected_places
        assert ("3 on disk" in capsys.readouterr().err) == (in_memory == 0)
        for _ in range(2):
            assert all(torch.equal(mine, other) for mine, other in zip(numbers(model, batch), plain, strict=True))
            assert on_meta(model) == expected_places, "layers go back to where they were"
        assert model.lm_head.weight is model.embed_tokens.weight
        assert not model.training


def test_half_precision_keeps_rotary_angles(source: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = offloaded_with(0, source, tmp_path / "folder", torch.bfloat16)
    assert on_meta(model) == [True] * 3
    assert (tmp_path / "folder" / "layers.1.fc1.weight.dat").stat().st_size == 2 * 4 * 64 * 64
    for layer, plain_layer in zip(model.layers, weights.build(source, CPU).layers, strict=True):
        assert torch.equal(layer.self_attn.rot_emb.inv_freq, plain_layer.self_attn.rot_emb.inv_freq)
        assert layer.self_attn.rot_emb.inv_freq.dtype == torch.float32
    _, batch = tokenise(SEQUENCES)
    assert not model(batch).representations[3].requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())
    plain = weights.build(source, CPU, torch.bfloat16).eval()
    assert all(torch.equal(a, b) for a, b in zip(numbers(model, batch), numbers(plain, batch), strict=True))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match=r"'esmshard\[big\]'"):
        offloaded(source, tmp_path / "folder", torch.float32, CPU)


def test_other_families_and_their_tracks(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        config = smallest(family)
        fresh, (_, batch) = weights.fresh(config, 0), tokenise(SEQUENCES)
        model, plain = offloaded_with(0, fresh, tmp_path / name), weights.build(fresh, CPU).eval()
        assert on_meta(model) == [True] * config.n_layers
        for track in family.tracks:
            is_xyz = track.kind == "coordinates"
            values = torch.randn(len(batch.tokens_T), 3, 3) if is_xyz else torch.ones(len(batch.tokens_T)).long()
            batch = replace(batch, tracks={**batch.tracks, track.name: values})
        with torch.no_grad():
            mine, other = (one(batch).representations[config.n_layers] for one in (model, plain))
        assert torch.equal(mine, other)
