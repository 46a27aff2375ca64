"""The record of the family ESM-C. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esmshard.model.families.esmc import esmc_layouts
from esmshard.model.families.esmc.esmc_config import SIZES, EsmcConfig
from esmshard.model.families.family import Family, Released, TransformersFiles

if TYPE_CHECKING:
    import torch

_CANDIDO = """\
@misc{candido2026language,
  title  = {Language Modeling Materializes a World Model of Protein Biology},
  author = {Candido, Salvatore and Hayes, Thomas and Derry, Alexander and Rao, Roshan and Lin, Zeming and
            Verkuil, Robert and others},
  year   = {2026}, note = {Preprint}, url = {https://biohub.ai/papers/esm_protein.pdf}
}"""
_HOLDER = "Chan Zuckerberg Biohub and the ESM-C authors"


def _initial(config: EsmcConfig, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor of a new model: matrices and embedding are normal with deviation 0.02, as in `transformers`; biases
    are 0 and LayerNorm weights 1.
    """
    import torch

    from esmshard.model.attention import inverse_frequencies

    if name.endswith("inv_freq"):
        return inverse_frequencies(config.head_dim)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return 0.02 * torch.randn(shape, generator=generator)


FAMILY = Family(
    name=EsmcConfig.family,
    title="ESM-C",
    config=EsmcConfig,
    sizes=SIZES,
    released={
        f"esmc_{size.lower()}": Released(f"biohub/ESMC-{size}", "mit", _HOLDER, _CANDIDO)
        for size in ("300M", "600M", "6B")
    },
    paper=_CANDIDO,
    window=2046,
    trunk="esmshard.model.families.esmc.esmc_model:ESMC",
    initial=_initial,
    files=TransformersFiles(
        model_types=("esmc", "ESMplusplus"),
        read_config=esmc_layouts.config_of_transformers,
        pieces=esmc_layouts.pieces,
        write_config=esmc_layouts.transformers_config,
        key=esmc_layouts.to_transformers,
        write_tokenizer=esmc_layouts.write_tokenizer,
        model_class="EsmcForMaskedLM",
        model_module="transformers.models.esmc.modeling_esmc",
        prefix="esmc.",
    ),
    read_pickle="esmshard.model.families.esmc.esmc_pickle:read",
    pickles={},
)
