"""Layers in memory and on disk: the same numbers as the plain model, and no more of it in memory than said."""

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
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.families.family_registry import FAMILIES
from esmshard.model.weights import Weights

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHM", "ACDEFGHIKLMNPQRSTVWYACDEFG"]
CPU = torch.device("cpu")
LAYER = 4 * (12 * 64 * 64 + 13 * 64)
"""fp32 bytes of a layer of width 64: four square matrices and two of 4 x 64 x 64, their biases, two LayerNorms."""


def bytes_of(config: EsmConfig, n_layers: int) -> int:
    """Memory for so many layers, rotary frequencies included, and for embedding and heads."""
    rest = 33 * 64 + 64 * 64 + 64 + 33 + 4 * 64 + 33 * 64  # embedding, LM head with its norm and matrix, last norm
    rest += config.n_layers * config.n_heads + 1
    if config.max_positions is not None:
        rest += 64 * (config.max_positions + 2) + (2 * 64 if config.emb_layer_norm_before else 0)
    return 4 * rest + n_layers * (LAYER + (4 * 8 if config.rotary else 0))


@pytest.fixture(params=SMALL)
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Weights:
    config = SMALL[request.param]
    return weights.read(str(write_transformers(tmp_path / "model", ours(fair_esm(config), config), config)))


def offloaded_with(memory: int, found: Weights, folder: Path, dtype: torch.dtype = torch.float32) -> ESM2:
    """The model on a machine with so many bytes of memory for layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": memory})
        patch.setattr(compute, "SHARE", 1.0)
        return offloaded(found, folder, dtype, CPU)


def esm2(tmp_path: Path) -> Weights:
    config = SMALL["ESM-2"]
    return weights.read(str(write_transformers(tmp_path / "model", ours(fair_esm(config), config), config)))


def numbers(model: ESM2, batch: TokenBatch) -> list[torch.Tensor]:
    """Representations of all layers, logits at all places, and contacts."""
    with torch.no_grad():
        output = model(batch, layers=range(4), logits_at=torch.arange(batch.bounds[-1]))
        assert output.logits_PV is not None
        return [output.representations[n] for n in range(4)] + [output.logits_PV] + predict_contacts(model, batch)


def on_meta(model: ESM2) -> list[bool]:
    """Of each layer whether all its weights are elsewhere; in part is an error."""
    kinds = [{parameter.device.type for parameter in layer.parameters()} for layer in model.layers]
    assert all(kind in ({"meta"}, {"cpu"}) for kind in kinds)
    return [kind == {"meta"} for kind in kinds]


def test_the_numbers_are_those_of_the_plain_model(
    found: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory of one layer is kept free, for the layers that come from the disk."""
    _, batch = tokenise(SEQUENCES)
    plain = numbers(weights.build(found, CPU).eval(), batch)
    for memory, less, in_memory in ((2, 1, 0), (3, 1, 1), (3, 0, 3)):
        model = offloaded_with(bytes_of(found.config, memory) - less, found, tmp_path / f"folder-{memory}-{less}")
        expected_places = [n >= in_memory for n in range(3)]
        assert on_meta(model) == expected_places
        assert ("3 on disk" in capsys.readouterr().err) == (in_memory == 0)
        for _ in range(2):
            assert all(torch.equal(mine, other) for mine, other in zip(numbers(model, batch), plain, strict=True))
            assert on_meta(model) == expected_places, "layers go back to where they were"
        assert model.lm_head.weight is model.embed_tokens.weight
        assert not model.training


def test_half_precision_keeps_rotary_angles(tmp_path: Path) -> None:
    found = esm2(tmp_path)
    model = offloaded_with(0, found, tmp_path / "folder", torch.bfloat16)
    assert on_meta(model) == [True] * 3
    file = tmp_path / "folder" / "layers.1.fc1.weight.dat"
    assert file.stat().st_size == 2 * 4 * 64 * 64
    for layer, plain in zip(model.layers, weights.build(found, CPU).layers, strict=True):
        assert torch.equal(layer.self_attn.rot_emb.inv_freq, plain.self_attn.rot_emb.inv_freq)
        assert layer.self_attn.rot_emb.inv_freq.dtype == torch.float32
    _, batch = tokenise(SEQUENCES)
    assert not model(batch).representations[3].requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())
    plain = weights.build(found, CPU, torch.bfloat16).eval()
    for mine, theirs in zip(numbers(model, batch), numbers(plain, batch), strict=True):
        assert torch.equal(mine, theirs)


def test_a_missing_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match=r"'esmshard\[big\]'"):
        offloaded(esm2(tmp_path), tmp_path / "folder", torch.float32, CPU)


def test_other_families_and_their_tracks(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        config = smallest(family)
        found, (_, batch) = weights.fresh(config, 0), tokenise(SEQUENCES)
        model, plain = offloaded_with(0, found, tmp_path / name), weights.build(found, CPU).eval()
        assert on_meta(model) == [True] * config.n_layers
        for track in family.tracks:
            is_xyz = track.kind == "coordinates"
            values = torch.randn(len(batch.tokens_T), 3, 3) if is_xyz else torch.ones(len(batch.tokens_T)).long()
            batch = replace(batch, tracks={**batch.tracks, track.name: values})
        with torch.no_grad():
            mine, other = (one(batch).representations[config.n_layers] for one in (model, plain))
        assert torch.equal(mine, other)
