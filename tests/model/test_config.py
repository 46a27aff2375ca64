"""Names, sizes and configurations of ESM-2, ESM-1b and ESM-1v, against fair-esm and `transformers`."""

import pytest
import torch
from esm.model.esm1 import ProteinBertModel
from model_files import ALPHABET, SMALL, esm1_settings
from transformers import EsmConfig as HfConfig
from transformers import EsmForMaskedLM

from esmshard.model import weights
from esmshard.model.families.esm2 import FAMILY, SIZES, EsmConfig, config_of_fair_esm, fair_esm_settings
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


def test_names_of_transformers_and_back() -> None:
    for config in SMALL.values():
        names = list(weights.shapes(config))
        assert names == [piece.name for name in names for piece in FAMILY.pieces(str(FAMILY.key(name)), config)]
        assert len({FAMILY.key(name) for name in names}) == len(names) > 50
        with torch.device("meta"):
            theirs = EsmForMaskedLM(HfConfig(**FAMILY.write_config(config)))
        keys = {FAMILY.key(name) for name in names if not name.endswith("inv_freq")}
        assert keys == {name for name, _ in theirs.named_parameters(remove_duplicate=False)}


def test_settings_of_each_world_and_back() -> None:
    for base in [*SIZES.values(), *SMALL.values()]:
        for token_dropout in (True, False):
            config = EsmConfig(**vars(base) | {"token_dropout": token_dropout})
            assert FAMILY.read_config(FAMILY.write_config(config)) == config
            assert FAMILY.read_config(HfConfig(**FAMILY.write_config(config)).to_dict()) == config
            keys = ["encoder.sentence_encoder.emb_layer_norm_before.weight"] * config.emb_layer_norm_before
            assert config_of_fair_esm(fair_esm_settings(config) | {"model": dict.fromkeys(keys)}) == config


def test_every_released_size_has_its_published_parameters() -> None:
    for name, published in PUBLISHED.items():
        assert n_parameters(SIZES[name]) == pytest.approx(published, rel=0.004)
        assert name.split("_")[1] == f"t{SIZES[name].n_layers}"
    config = SIZES["esm1b_t33_650M_UR50S"]
    with torch.device("meta"):
        theirs = ProteinBertModel(esm1_settings(config), ALPHABET)
    assert n_parameters(config) == sum(p.numel() for p in theirs.parameters())
