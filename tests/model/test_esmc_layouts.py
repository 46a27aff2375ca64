"""The four file layouts of ESM-C give the same tensors. `tests/parity` compares layout A with `transformers`."""

from pathlib import Path

import esmc_files
import pytest
import torch
from esmc_files import FFN, HEADS, LAYERS, WIDTH
from model_files import edit_config, edit_tensors
from transformers import EsmcForMaskedLM

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.esmc import EsmcConfig


@pytest.fixture(scope="module")
def reference() -> EsmcForMaskedLM:
    return esmc_files.random_esmc()


def test_all_four_layouts_hold_the_same_tensors(reference: EsmcForMaskedLM, tmp_path: Path) -> None:
    found = {layout: weights.read(str(esmc_files.write(tmp_path / layout, layout, reference))) for layout in "ABCD"}
    for layout, read in found.items():
        assert read.config == EsmcConfig(n_layers=LAYERS, dim=WIDTH, n_heads=HEADS), layout
        assert read.config.ffn_width == FFN
        assert read.absent == ("contact_head",), "no ESM-C has a contact regression"
        for name in weights.stored_shapes(read.config):
            assert torch.equal(read[name], found["A"][name]), (layout, name)


def test_a_file_that_lacks_a_joined_tensor_is_refused(reference: EsmcForMaskedLM, tmp_path: Path) -> None:
    directory = esmc_files.write(tmp_path / "model", "B", reference)
    edit_tensors(directory, lambda state: state.pop("esmc.transformer.blocks.1.attn.layernorm_qkv.weight"))
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\..*are missing"):
        weights.read(str(directory))


def test_an_esm_plusplus_under_the_type_of_an_esm2_is_refused(reference: EsmcForMaskedLM, tmp_path: Path) -> None:
    directory = esmc_files.write(tmp_path / "model", "D", reference)
    edit_config(directory, model_type="esm")
    with pytest.raises(InputError, match="vocab_size is 64, not 33"):
        weights.read(str(directory))
