"""Structure tokens are those of the authors' encoder, and its file is read or refused.

`tests/golden/esm3_structure_encoder.safetensors` holds what their code says; `esm3_encoder_golden.py` made it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from esm3_encoder_golden import LENGTHS, proteins
from esm3_golden import weights
from safetensors import safe_open
from safetensors.torch import load_file

from esmshard.errors import InputError
from esmshard.model.families.esm3 import esm3_structure_encoder
from esmshard.model.families.esm3.esm3_structure_encoder import structure_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "esm3_structure_encoder.safetensors"


def authors_state() -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN, framework="pt") as file:
        drawn = weights(json.loads(file.metadata()["shapes"]))
        return drawn | {"codebook.embeddings": file.get_tensor("codes")}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    torch.save(authors_state(), tmp_path / "encoder.pth")
    return tmp_path / "encoder.pth"


@pytest.mark.parametrize("at_once", [256, 7])
def test_tokens_are_those_of_the_authors(published: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(esm3_structure_encoder, "AT_ONCE", at_once)
    golden, encoder = load_file(GOLDEN), esm3_structure_encoder.read(published)
    codes = encoder.codes_CZ
    for name, coordinates in proteins().items():
        described = golden[f"{name}.described"]
        nearest = torch.cdist(described, codes).topk(2, largest=False).values
        assert (nearest[:, 1] - nearest[:, 0]).min() > 1e-4, "no code is chosen by rounding"
        with torch.no_grad():
            assert (encoder.described(torch.from_numpy(coordinates)) - described).abs().max() < 1e-6
        tokens = structure_tokens(published, coordinates)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == golden[f"{name}.tokens"].tolist()
        assert len(tokens) == LENGTHS[name]
    assert len(set(golden["long.tokens"].tolist())) > 20


def test_tokens_depend_on_the_structure_alone(published: Path) -> None:
    """Not on where it lies, and not on residues that are unknown; on the order of residues they do."""
    coordinates = proteins()["long"]
    tokens = structure_tokens(published, coordinates)
    turned = coordinates[..., [1, 2, 0]] + np.array([10, -20, 5], dtype=np.float32)
    assert (structure_tokens(published, turned) == tokens).mean() > 0.95
    mirrored = coordinates[..., [1, 0, 2]]
    assert (structure_tokens(published, mirrored) == tokens).mean() < 0.9
    assert (structure_tokens(published, coordinates[::-1].copy())[::-1] == tokens).mean() < 0.9


def test_the_released_encoder_has_so_many_parameters() -> None:
    """The authors' `StructureTokenEncoder` has as many with d_model 1024, v_heads 128, n_layers 2 and d_out 128."""
    with torch.device("meta"):
        encoder = esm3_structure_encoder.StructureEncoder(1024, 128, 4096, 2, (4096, 128))
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 30_116_224


def test_other_files_are_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "encoder.pth"
    torch.save({"decoder.weight": torch.ones(2)}, path)
    with pytest.raises(
        InputError, match=r"has no relative_positional_embedding.*; give esm3_structure_encoder_v0\.pth"
    ):
        structure_tokens(path, np.zeros((2, 3, 3), dtype=np.float32))
    for name in ("transformer.blocks.1.geom_attn.proj.bias", "transformer.blocks.0.ffn.1.weight"):
        torch.save({key: tensor for key, tensor in authors_state().items() if key != name}, path)
        with pytest.raises(InputError, match=r"blocks\.[01].*; give esm3_structure_encoder_v0\.pth"):
            structure_tokens(path, np.zeros((2, 3, 3), dtype=np.float32))
    torch.save(authors_state() | {"strange.weight": torch.ones(2)}, path)
    with pytest.raises(InputError, match=r"strange\.weight.*; give"):
        structure_tokens(path, np.zeros((2, 3, 3), dtype=np.float32))
    with pytest.raises(InputError, match="cannot be read as torch weights"):
        structure_tokens(tmp_path / "none.pth", np.zeros((2, 3, 3), dtype=np.float32))
