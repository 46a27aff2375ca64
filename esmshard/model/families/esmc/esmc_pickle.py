"""The `.pth` files in which ESM-C was published in 2024-12: tensors alone, without sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esmshard.model import weight_reader
from esmshard.model.families.authors_blocks import sizes_of
from esmshard.model.families.esmc.esmc_config import EsmcConfig
from esmshard.model.families.esmc.esmc_layouts import pieces
from esmshard.model.weight_reader import WeightReader


def read(data: Mapping[str, Any], path: Path) -> tuple[EsmcConfig, dict[str, WeightReader], tuple[Path, ...]] | None:
    """Return the architecture, the tensors and the file of a published ESM-C; None for other content."""
    table = data.get("embed.weight")
    if table is None or not any(str(key).startswith("transformer.blocks.") for key in data):
        return None
    config = EsmcConfig(**sizes_of(map(str, data), "embed.weight", table.shape))
    found = weight_reader.tensors(data)
    tensors = {piece.name: reader.part(piece.rows) for key, reader in found.items() for piece in pieces(key, config)}
    return config, tensors, (path,)
