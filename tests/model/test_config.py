"""Names, sizes and configurations of ESM-2, ESM-1b and ESM-1v, against fair-esm and `transformers`."""

import pytest
import torch
from esm.model.esm1 import ProteinBertModel
from esm.model.esm2 import ESM2 as FairEsm
from model_files import ALPHABET, SMALL, esm1_settings
from torch import nn
from transformers import EsmConfig as HfConfig
from transformers import EsmForMaskedLM

from esmshard.model import weights
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


@pytest.mark.parametrize("name", [*SIZES, *SMALL])
@pytest.mark.parametrize("token_dropout", [True, False])
def test_settings_of_each_world_and_back(name: str, token_dropout: bool) -> None:
    base = vars(SIZES.get(name) or SMALL[name])
    config = EsmConfig(**base | {"token_dropout": token_dropout})
    assert FAMILY.read_config(FAMILY.write_config(config)) == config
    assert FAMILY.read_config(HfConfig(**FAMILY.write_config(config)).to_dict()) == config
    keys = ["encoder.sentence_encoder.emb_layer_norm_before.weight"] * config.emb_layer_norm_before
    assert config_of_fair_esm(fair_esm_settings(config) | {"model": dict.fromkeys(keys)}) == config


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
