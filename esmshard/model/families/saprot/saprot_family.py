"""The record of the family SaProt. No torch."""

from functools import partial

from esmshard.model.families import esm_layouts
from esmshard.model.families.esm_shapes import initial
from esmshard.model.families.family import Family, Released, TransformersFiles
from esmshard.model.families.saprot.saprot_config import SIZES, STRUCTURE, VOCABULARY, SaprotConfig

_SU = """\
@inproceedings{su2024saprot,
  title     = {{SaProt}: Protein Language Modeling with Structure-aware Vocabulary},
  author    = {Su, Jin and Han, Chenchen and Zhou, Yuyang and Shan, Junjie and Zhou, Xibin and Yuan, Fajie},
  booktitle = {International Conference on Learning Representations}, year = {2024},
  doi       = {10.1101/2023.10.01.560349}
}"""


def _released(size: str) -> Released:
    return Released(f"westlake-repl/SaProt_{size}", "mit", "westlake-repl", _SU)


FAMILY = Family(
    name=SaprotConfig.family,
    title="SaProt",
    config=SaprotConfig,
    sizes=SIZES,
    released={f"saprot_{size.lower()}": _released(size) for size in ("35M_AF2", "650M_AF2", "650M_PDB")},
    paper=_SU,
    window=1022,
    trunk="esmshard.model.families.saprot.saprot_model:SaProt",
    initial=initial,
    files=TransformersFiles(
        model_types=("esm",),
        vocab_size=len(VOCABULARY),
        read_config=partial(esm_layouts.config_of_transformers, SaprotConfig),
        pieces=esm_layouts.from_transformers,
        write_config=esm_layouts.transformers_config,
        key=esm_layouts.to_transformers,
        write_tokenizer=partial(esm_layouts.write_tokenizer, VOCABULARY),
        model_class="EsmForMaskedLM",
        model_module="transformers.models.esm.modeling_esm",
        prefix="esm.",
    ),
    read_pickle=None,
    pickles={},
    tracks=(STRUCTURE,),
)
