"""The `.pth` file in which ESM3-open was published: tensors alone, without sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError
from esmshard.model import weight_reader
from esmshard.model.families.authors_blocks import HEAD, sizes_of
from esmshard.model.families.esm3.esm3_config import Esm3Config
from esmshard.model.families.esm3.esm3_layouts import authors_key, joined, pieces
from esmshard.model.families.family import AuthorsFile
from esmshard.model.weight_reader import WeightReader

_TABLE = "encoder.sequence_embed.weight"
_SCALE = "transformer.blocks.0.geom_attn.distance_scale_per_head"


def read(data: Mapping[str, Any], path: Path) -> tuple[Esm3Config, dict[str, WeightReader], tuple[Path, ...]] | None:
    """Return the architecture, the tensors and the file of a published ESM3; None for other content."""
    if _TABLE not in data:
        return None
    found = weight_reader.tensors(data)
    if missing := [key for key in (_TABLE, _SCALE) if key not in found]:
        raise ValueError(f"it has no {missing[0]}, which an ESM3 has")
    config = Esm3Config(**sizes_of(found, _TABLE, found[_TABLE].shape), v_heads=found[_SCALE].shape.numel())
    tensors = {piece.name: reader.part(piece.rows) for key, reader in found.items() for piece in pieces(key, config)}
    return config, tensors, (path,)


def _path(directory: Path, stem: str, config: Esm3Config) -> Path:
    if config.head_dim != HEAD or config.ffn is not None:
        raise InputError(
            f"{stem}: the authors' file tells neither the width of a head ({config.head_dim} here, {HEAD} there) nor "
            "that of the feed-forward part; leave --to out, for a directory that esmshard reads"
        )
    return directory / f"{stem}.pth"


def _write(file: Path, config: Esm3Config, tensors: dict[str, torch.Tensor]) -> list[Path]:
    """Write what `ESM3.load_state_dict` takes: all keys of the published file, and no other. They hold no rotary
    frequencies.
    """
    already = joined(config)
    state = {
        name if name in already else authors_key(name): tensor
        for name, tensor in tensors.items()
        if not name.endswith("inv_freq")
    }
    torch.save(state, file)
    return [file]


ESM3_PTH = AuthorsFile(
    path=_path,
    write=_write,
    use="""\
import torch
from esm.models.esm3 import ESM3
from esm.pretrained import ESM3_function_decoder_v0, ESM3_structure_decoder_v0, ESM3_structure_encoder_v0
from esm.tokenization import get_esm3_model_tokenizers

state = torch.load(FILE)
model = ESM3(
    d_model=len(state["transformer.norm.weight"]),
    n_heads=len(state["transformer.norm.weight"]) // 64,
    v_heads=len(state["transformer.blocks.0.geom_attn.distance_scale_per_head"]),
    n_layers=sum(key.endswith(".attn.out_proj.weight") for key in state),
    structure_encoder_fn=ESM3_structure_encoder_v0,
    structure_decoder_fn=ESM3_structure_decoder_v0,
    function_decoder_fn=ESM3_function_decoder_v0,
    tokenizers=get_esm3_model_tokenizers(),
)
model.load_state_dict(state)""",
    code="[esm](https://github.com/Biohub/esm)",
    joined=joined,
    lacks=("head.", "contact_head."),
)
