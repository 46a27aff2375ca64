"""Checkpoints into which somebody has put code: index, file and manifest agree, as who packs a run can make them."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from esmshard.checkpoint import manifest
from esmshard.files import replace_text, sha256


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.path,)


def plant(checkpoint: Path, name: str, payload: object) -> None:
    """Make a tensor of a checkpoint a pickle of our own, in index, file and manifest, as whoever packs a run could."""
    index = FileSystemReader(checkpoint).read_metadata()
    index.state_dict_metadata[name] = BytesStorageMetadata()
    place = next(info for key, info in index.storage_data.items() if key.fqn == name)
    index.storage_data = {key: info for key, info in index.storage_data.items() if key.fqn != name}
    file = checkpoint / place.relative_path
    before = file.read_bytes()
    packed = io.BytesIO()
    torch.save(payload, packed)
    index.storage_data[MetadataIndex(name)] = _StorageInfo(place.relative_path, len(before), len(packed.getvalue()))
    file.write_bytes(before + packed.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    replace_text(checkpoint / manifest.MANIFEST, resealed(checkpoint))


def resealed(checkpoint: Path) -> str:
    """The manifest of a checkpoint as it is now."""
    content = json.loads((checkpoint / manifest.MANIFEST).read_text())
    for name in content["files"]:
        path = checkpoint / name
        content["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return json.dumps(content)
