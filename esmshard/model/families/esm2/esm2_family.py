"""The record of the family ESM-2, to which ESM-1b and ESM-1v belong. No torch."""

import re
from functools import partial

from esmshard.model.families import esm_layouts
from esmshard.model.families.esm2.esm2_config import SIZES, EsmConfig
from esmshard.model.families.esm_shapes import initial
from esmshard.model.families.family import Corruption, Family, Released, TransformersFiles
from esmshard.vocab import VOCAB_SIZE

_LIN = """\
@article{lin2023evolutionary,
  title   = {Evolutionary-scale prediction of atomic-level protein structure with a language model},
  author  = {Lin, Zeming and Akin, Halil and Rao, Roshan and Hie, Brian and Zhu, Zhongkai and Lu, Wenting and
             Smetanin, Nikita and Verkuil, Robert and Kabeli, Ori and Shmueli, Yaniv and {dos Santos Costa}, Allan and
             Fazel-Zarandi, Maryam and Sercu, Tom and Candido, Salvatore and Rives, Alexander},
  journal = {Science}, volume = {379}, number = {6637}, pages = {1123--1130}, year = {2023},
  doi     = {10.1126/science.ade2574}
}"""
_RIVES = """\
@article{rives2021biological,
  title   = {Biological structure and function emerge from scaling unsupervised learning to 250 million protein
             sequences},
  author  = {Rives, Alexander and Meier, Joshua and Sercu, Tom and Goyal, Siddharth and Lin, Zeming and Liu, Jason and
             Guo, Demi and Ott, Myle and Zitnick, C. Lawrence and Ma, Jerry and Fergus, Rob},
  journal = {Proceedings of the National Academy of Sciences}, volume = {118}, number = {15}, pages = {e2016239118},
  year    = {2021}, doi = {10.1073/pnas.2016239118}
}"""
_MEIER = """\
@inproceedings{meier2021language,
  title     = {Language models enable zero-shot prediction of the effects of mutations on protein function},
  author    = {Meier, Joshua and Rao, Roshan and Verkuil, Robert and Liu, Jason and Sercu, Tom and Rives, Alexander},
  booktitle = {Advances in Neural Information Processing Systems}, volume = {34}, year = {2021},
  doi       = {10.1101/2021.07.09.450648}
}"""


def _released(name: str) -> Released:
    paper = {"esm2": _LIN, "esm1b": _RIVES, "esm1v": _MEIER}[name.partition("_")[0]]
    return Released(f"facebook/{name}", "mit", "Meta Platforms, Inc. and affiliates", paper)


FAMILY = Family(
    name=EsmConfig.family,
    title="ESM-2",
    config=EsmConfig,
    sizes=SIZES,
    released={name: _released(name) for name in SIZES if re.match(r"esm\d", name)},
    paper=_LIN,
    window=1022,
    corruption=Corruption(random=0.1, unchanged=0.1, letters=20),
    trunk="esmshard.model.families.esm2.esm2_model:ESM2",
    initial=initial,
    files=TransformersFiles(
        model_types=("esm",),
        vocab_size=VOCAB_SIZE,
        read_config=partial(esm_layouts.config_of_transformers, EsmConfig),
        pieces=esm_layouts.from_transformers,
        write_config=esm_layouts.transformers_config,
        key=esm_layouts.to_transformers,
        write_tokenizer=partial(esm_layouts.write_tokenizer, EsmConfig.vocabulary),
        model_class="EsmForMaskedLM",
        model_module="transformers.models.esm.modeling_esm",
        prefix="esm.",
    ),
    read_pickle="esmshard.model.families.esm2.esm2_pickle:read",
    pickles={"fair-esm": "esmshard.model.families.esm2.esm2_pickle:FAIR_ESM"},
)
