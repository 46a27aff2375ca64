"""The record of the family AMPLIFY. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esmshard.model.families.amplify import amplify_layouts
from esmshard.model.families.amplify.amplify_config import SIZES, AmplifyConfig
from esmshard.model.families.family import Family, Released, TransformersFiles

if TYPE_CHECKING:
    import torch

_FOURNIER = """\
@article{fournier2024protein,
  title   = {Protein Language Models: Is Scaling Necessary?},
  author  = {Fournier, Quentin and Vernon, Robert M. and {van der Sloot}, Almer and Schulz, Benjamin and
             Chandar, Sarath and Langmead, Christopher James},
  journal = {bioRxiv}, year = {2024}, doi = {10.1101/2024.09.23.614603}
}"""


def _initial(config: AmplifyConfig, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor of a new model: matrices and embedding are uniform up to 0.02, as in the authors' code; biases are
    0 and norms 1.
    """
    import torch

    from esmshard.model.attention import inverse_frequencies

    if name.endswith("inv_freq"):
        return inverse_frequencies(config.head_dim)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return 0.04 * torch.rand(shape, generator=generator) - 0.02


FAMILY = Family(
    name=AmplifyConfig.family,
    title="AMPLIFY",
    config=AmplifyConfig,
    sizes=SIZES,
    released={
        f"amplify_{size.lower()}": Released(f"chandar-lab/AMPLIFY_{size}", "mit", "chandar-lab", _FOURNIER)
        for size in ("120M", "350M", "120M_base", "350M_base")
    },
    paper=_FOURNIER,
    window=2046,
    trunk="esmshard.model.families.amplify.amplify_model:Amplify",
    initial=_initial,
    files=TransformersFiles(
        model_types=("AMPLIFY",),
        read_config=amplify_layouts.config_of_transformers,
        pieces=amplify_layouts.pieces,
        write_config=amplify_layouts.transformers_config,
        key=amplify_layouts.to_transformers,
        write_tokenizer=amplify_layouts.write_tokenizer,
        model_class="AutoModel",
        model_module="transformers",
        remote_code=True,
    ),
    read_pickle=None,
    pickles={},
)
