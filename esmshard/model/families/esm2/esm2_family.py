"""The record of the family ESM-2, to which ESM-1b and ESM-1v belong. No torch."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from esmshard.model.families.esm2 import esm2_layouts
from esmshard.model.families.esm2.esm2_config import SIZES, EsmConfig
from esmshard.model.families.family import Family, Paper, Released, TransformersFiles
from esmshard.vocab import PAD

if TYPE_CHECKING:
    import torch

_LIN = Paper(
    "Lin et al. 2023",
    "Lin et al. 2023, Science 379:1123 (ESM-2), doi:10.1126/science.ade2574",
    """\
@article{lin2023evolutionary,
  title   = {Evolutionary-scale prediction of atomic-level protein structure with a language model},
  author  = {Lin, Zeming and Akin, Halil and Rao, Roshan and Hie, Brian and Zhu, Zhongkai and Lu, Wenting and
             Smetanin, Nikita and Verkuil, Robert and Kabeli, Ori and Shmueli, Yaniv and {dos Santos Costa}, Allan and
             Fazel-Zarandi, Maryam and Sercu, Tom and Candido, Salvatore and Rives, Alexander},
  journal = {Science}, volume = {379}, number = {6637}, pages = {1123--1130}, year = {2023},
  doi     = {10.1126/science.ade2574}
}""",
)
_RIVES = Paper(
    "Rives et al. 2021",
    "Rives et al. 2021, PNAS 118:e2016239118 (ESM-1b), doi:10.1073/pnas.2016239118",
    """\
@article{rives2021biological,
  title   = {Biological structure and function emerge from scaling unsupervised learning to 250 million protein
             sequences},
  author  = {Rives, Alexander and Meier, Joshua and Sercu, Tom and Goyal, Siddharth and Lin, Zeming and Liu, Jason and
             Guo, Demi and Ott, Myle and Zitnick, C. Lawrence and Ma, Jerry and Fergus, Rob},
  journal = {Proceedings of the National Academy of Sciences}, volume = {118}, number = {15}, pages = {e2016239118},
  year    = {2021}, doi = {10.1073/pnas.2016239118}
}""",
)
_MEIER = Paper(
    "Meier et al. 2021",
    "Meier et al. 2021 (ESM-1v, zero-shot scores), doi:10.1101/2021.07.09.450648",
    """\
@inproceedings{meier2021language,
  title     = {Language models enable zero-shot prediction of the effects of mutations on protein function},
  author    = {Meier, Joshua and Rao, Roshan and Verkuil, Robert and Liu, Jason and Sercu, Tom and Rives, Alexander},
  booktitle = {Advances in Neural Information Processing Systems}, volume = {34}, year = {2021},
  doi       = {10.1101/2021.07.09.450648}
}""",
)


def _released(name: str) -> Released:
    papers = {"esm2": ("ESM-2", _LIN), "esm1b": ("ESM-1b", _RIVES), "esm1v": ("ESM-1v", _MEIER)}
    title, paper = papers[name.partition("_")[0]]
    return Released(title, f"facebook/{name}", "mit", "Meta Platforms, Inc. and affiliates", paper)


def _initial(config: EsmConfig, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor of a new model.

    Linear layers are Xavier-uniform (q, k and v with gain 1/sqrt 2, as in fair-esm's attention). The embedding, whose
    matrix is the LM head's too, is normal with deviation 0.02, so that first logits are small, and so are learned
    positions. Biases are 0 and LayerNorm weights 1.
    """
    import torch

    from esmshard.model.attention import inverse_frequencies

    if name.endswith("inv_freq"):
        return inverse_frequencies(config.head_dim)
    if re.search(r"layer_norm(_before|_after)?\.weight$", name):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.startswith("embed_"):
        table = 0.02 * torch.randn(shape, generator=generator)
        table[PAD] = 0.0
        return table
    gain = 1 / math.sqrt(2) if re.search(r"\.[qkv]_proj\.", name) else 1.0
    bound = gain * math.sqrt(6 / (shape[0] + shape[1]))
    return torch.rand(shape, generator=generator) * 2 * bound - bound


FAMILY = Family(
    name=EsmConfig.family,
    title="ESM-2",
    config=EsmConfig,
    sizes=SIZES,
    released={name: _released(name) for name in SIZES if re.match(r"esm\d", name)},
    paper=_LIN,
    window=1022,
    trunk="esmshard.model.families.esm2.esm2_model:ESM2",
    initial=_initial,
    files=TransformersFiles(
        model_types=("esm",),
        read_config=esm2_layouts.config_of_transformers,
        pieces=esm2_layouts.from_transformers,
        write_config=esm2_layouts.transformers_config,
        key=esm2_layouts.to_transformers,
        write_tokenizer=esm2_layouts.write_tokenizer,
        model_class="EsmForMaskedLM",
        model_module="transformers.models.esm.modeling_esm",
        prefix="esm.",
    ),
    read_pickle="esmshard.model.families.esm2.esm2_pickle:read",
    pickles={"fair-esm": "esmshard.model.families.esm2.esm2_pickle:FAIR_ESM"},
    peers={
        "fair-esm": "esmshard.model.families.esm2.esm2_peers:fair_esm",
        "transformers": "esmshard.model.families.esm2.esm2_peers:transformers",
    },
)
