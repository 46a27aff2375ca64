"""Names, sizes and configurations of ESM-2, ESM-1b and ESM-1v, against fair-esm and `transformers`."""

import pytest
import torch
from esm.model.esm1 import ProteinBertModel
from esm.model.esm2 import ESM2 as FairEsm
from model_files import ALPHABET, SMALL, TINY, esm1_settings
from torch import nn
from transformers import EsmConfig as HfConfig
from transformers import EsmForMaskedLM

from esmshard.model import weights
from esmshard.model.config import SHIPPED
from esmshard.model.families.esm2 import ESM2, FAMILY, SIZES, EsmConfig, config_of_fair_esm, fair_esm_settings
from esmshard.model.families.family_registry import n_parameters

PUBLISHED = {
    "esm2_t6_8M_UR50D": 7.5e6,
    "esm2_t12_35M_UR50D": 33.5e6,
    "esm2_t30_150M_UR50D": 148e6,
    "esm2_t33_650M_UR50D": 651e6,
    "esm2_t36_3B_UR50D": 2.84e9,
    "esm2_t48_15B_UR50D": 15.1e9,
    "esm1b_t33_650M_UR50S": 652e6,
    **{f"esm1v_t33_650M_UR90S_{n}": 652e6 for n in range(1, 6)},
}


def _names(key: str, config: EsmConfig) -> tuple[str, ...]:
    return tuple(piece.name for piece in FAMILY.pieces(key, config))


@pytest.mark.parametrize("family", SMALL)
def test_names_of_transformers_and_back(family: str) -> None:
    config = SMALL[family]
    names = list(weights.shapes(config))
    assert names == [name for key in map(FAMILY.key, names) for name in _names(key, config)]
    assert len({FAMILY.key(name) for name in names}) == len(names) > 50
    with torch.device("meta"):
        theirs = EsmForMaskedLM(HfConfig(**FAMILY.write_config(config)))
    found = {FAMILY.key(name) for name in names if not name.endswith("inv_freq")}
    assert found == {name for name, _ in theirs.named_parameters(remove_duplicate=False)}


def test_names_that_mean_nothing_and_names_of_one_table_for_all() -> None:
    assert FAMILY.key("layers.11.fc1.weight") == "esm.encoder.layer.11.intermediate.dense.weight"
    for key in ("pooler.dense.weight", "esm.pooler.dense.bias", "esm.embeddings.position_ids"):
        assert _names(key, TINY) == ()
    table = "esm.embeddings.position_embeddings.weight"
    assert _names(table, TINY) == ()
    assert _names(table, SMALL["ESM-1v"]) == ("embed_positions.weight",)
    every = tuple(f"layers.{n}.self_attn.rot_emb.inv_freq" for n in range(TINY.n_layers))
    for key in ("rotary_embeddings", "encoder.layer.*.attention.self.rotary_embeddings"):
        assert _names(f"esm.{key}.inv_freq", TINY) == every
    assert _names("esm.encoder.layer.1.attention.self.rotary_embeddings.inv_freq", TINY) == every[1:]


@pytest.mark.parametrize("name", [*SIZES, *SMALL])
@pytest.mark.parametrize("token_dropout", [True, False])
def test_settings_of_each_world_and_back(name: str, token_dropout: bool) -> None:
    base = vars(SIZES.get(name) or SMALL[name])
    config = EsmConfig(**base | {"token_dropout": token_dropout})
    assert FAMILY.read_config(FAMILY.write_config(config)) == config
    assert FAMILY.read_config(HfConfig(**FAMILY.write_config(config)).to_dict()) == config
    keys = ["encoder.sentence_encoder.emb_layer_norm_before.weight"] * config.emb_layer_norm_before
    assert config_of_fair_esm(fair_esm_settings(config) | {"model": dict.fromkeys(keys)}) == config


def test_released_names_are_sizes() -> None:
    assert set(FAMILY.released) == set(PUBLISHED) == SIZES.keys() - {"nano", "mini", *SHIPPED}


@pytest.mark.parametrize("name", [n for n in SIZES if not n.startswith("esm1v") or n.endswith("_1")])
def test_every_size_counts_its_parameters_as_fair_esm_does(name: str) -> None:
    config = SIZES[name]
    theirs: nn.Module
    with torch.device("meta"):
        mine = ESM2(config)
        if config.rotary:
            theirs = FairEsm(config.n_layers, config.dim, config.n_heads)
        else:
            theirs = ProteinBertModel(esm1_settings(config), ALPHABET)
    shapes = {n: p.shape for n, p in mine.named_parameters()}
    assert shapes == {n: p.shape for n, p in theirs.named_parameters()}
    if name in PUBLISHED:
        assert n_parameters(config) == pytest.approx(PUBLISHED[name], rel=0.004)
        layers, size = name.split("_")[1:3]
        assert layers == f"t{config.n_layers}"
        assert size.endswith(("M", "B"))


def test_the_five_models_for_variant_effects_are_of_one_shape() -> None:
    assert len({SIZES[f"esm1v_t33_650M_UR90S_{n}"] for n in range(1, 6)}) == 1
    assert not SIZES["esm1v_t33_650M_UR90S_1"].emb_layer_norm_before
    assert SIZES["esm1b_t33_650M_UR50S"].emb_layer_norm_before


@pytest.mark.parametrize("heads", [3, 5, 32])
def test_a_head_must_be_of_even_width(heads: int) -> None:
    with pytest.raises(ValueError, match="multiple of 2 x n_heads"):
        EsmConfig(n_layers=2, dim=32, n_heads=heads)


@pytest.mark.parametrize(
    ("size", "value"), [("n_layers", 0), ("dim", 0), ("n_heads", 0), ("n_heads", -4), ("max_positions", 0)]
)
def test_sizes_must_be_positive(size: str, value: int) -> None:
    with pytest.raises(ValueError, match=size):
        EsmConfig(**({"n_layers": 2, "dim": 32, "n_heads": 4} | {size: value}))
