"""The record of the family ESM3. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esmshard.model.families.esm3 import esm3_layouts
from esmshard.model.families.esm3.esm3_config import (
    COORDINATES,
    SIZES,
    STRUCTURE,
    STRUCTURE_MASK,
    STRUCTURE_TOKENS,
    Esm3Config,
)
from esmshard.model.families.family import Family, Released, TransformersFiles
from esmshard.vocab import Track

if TYPE_CHECKING:
    import torch

_HAYES = """\
@article{hayes2025simulating,
  title   = {Simulating 500 million years of evolution with a language model},
  author  = {Hayes, Thomas and Rao, Roshan and Akin, Halil and Sofroniew, Nicholas J. and Oktay, Deniz and Lin, Zeming
             and Verkuil, Robert and Tran, Vincent Q. and Deaton, Jonathan and Wiggert, Marius and others},
  journal = {Science}, volume = {387}, number = {6736}, pages = {850--858}, year = {2025},
  doi     = {10.1126/science.ads0018}
}"""


def _initial(config: Esm3Config, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor of a new model: matrices and embeddings are normal with deviation 0.02, as in ESM-C; biases and
    scales of geometric attention are 0, and LayerNorm weights 1.
    """
    import torch

    from esmshard.model.attention import inverse_frequencies

    if name.endswith("inv_freq"):
        return inverse_frequencies(config.head_dim)
    if name.endswith(("bias", "_scale_per_head")):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return 0.02 * torch.randn(shape, generator=generator)


FAMILY = Family(
    name=Esm3Config.family,
    title="ESM3",
    config=Esm3Config,
    sizes=SIZES,
    released={
        "esm3_sm_open_v1": Released(
            "biohub/esm3-sm-open-v1",
            "mit",
            "Chan Zuckerberg Biohub and the ESM3 authors",
            _HAYES,
        )
    },
    paper=_HAYES,
    window=2046,
    trunk="esmshard.model.families.esm3.esm3_model:ESM3",
    initial=_initial,
    files=TransformersFiles(
        model_types=("esm3",),
        read_config=esm3_layouts.config_of_own,
        pieces=esm3_layouts.pieces,
        write_config=esm3_layouts.own_config,
        key=esm3_layouts.own_key,
        write_tokenizer=esm3_layouts.write_no_tokenizer,
        model_class="",
        model_module="",
    ),
    read_pickle="esmshard.model.families.esm3.esm3_pickle:read",
    pickles={"esm3-pth": "esmshard.model.families.esm3.esm3_pickle:ESM3_PTH"},
    tracks=(
        Track(COORDINATES, "coordinates of N, CA and C", "coordinates", float("nan")),
        Track(STRUCTURE, "structure tokens", "codes", STRUCTURE_MASK, n_codes=STRUCTURE_TOKENS),
    ),
    encoders={STRUCTURE: "esmshard.model.families.esm3.esm3_structure_encoder:structure_tokens"},
)
