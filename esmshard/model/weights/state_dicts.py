"""Files that hold the tensors of a model and nothing about its sizes, such as the result of `model.state_dict()`.

They are named as `FILE@SIZE`. Names of tensors are ours, which are fair-esm's, or those of `transformers`, after the
prefixes that wrappers of a model add.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError
from esmshard.model import weight_reader
from esmshard.model.config import ModelConfig
from esmshard.model.families import family_registry
from esmshard.model.families.family import Piece
from esmshard.model.families.family_registry import SIZES
from esmshard.model.weight_reader import WeightReader

_AROUND = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs, such as Lightning, put the tensors. Beside them lies what is not read here."""
_WRAPPERS = re.compile(r"^(?:(?:module|model|_orig_mod)\.)+")
"""Prefixes of DataParallel, of a Lightning module that holds the model, and of `torch.compile`."""
_HEADS = "classifier."
"""Beginning of the names of a head of `transformers`, which is of another task."""
_LAYER = re.compile(r"layers\.(\d{1,6})\.")


def file_and_size(model: str) -> tuple[Path, str] | None:
    """Split `FILE@SIZE`; None if there is no such file. Whether the size is one is not checked."""
    file, at, size = model.rpartition("@")
    path = Path(file).expanduser()
    return (path, size) if at and size and path.is_file() else None


def bare(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the tensors of a file that says nothing about sizes; None if it holds something else.

    That is the content itself if it is tensors only, else what lies under a key of training programs.
    """
    if _tensors_only(data):
        return data
    if "cfg" in data or "args" in data:  # A file of fair-esm, which says its sizes.
        return None
    return next((data[key] for key in _AROUND if _tensors_only(data.get(key))), None)


def _tensors_only(found: Any) -> bool:
    kinds = (torch.Tensor, WeightReader)
    return isinstance(found, dict) and bool(found) and all(isinstance(value, kinds) for value in found.values())


def without_size(path: Path, state: Mapping[str, Any]) -> str:
    """Return the sentence on a file whose size was not given, with the sizes that fit its tensors."""
    fitting = sizes_of(state)
    what = f"{path}: holds tensors only and does not say the size of their model"
    if not fitting:
        names = f"{len(state):,} tensors, the first is {next(iter(state))}"
        return f"{what}, and no size that is known here fits them ({names}); give a model with its config.json"
    others = f" (or {', '.join(fitting[1:])})" if fitting[1:] else ""
    return f"{what}; give it as {path}@{fitting[0]}{others}"


def sizes_of(state: Mapping[str, Any]) -> list[str]:
    """Return the names of all sizes with the layers, the embedding and the names of tensors of a state dict."""
    readers = _readers(state)
    return [size for size, config in SIZES.items() if _fits(readers, config)]


def by_our_names(path: Path, state: Mapping[str, Any], size: str) -> tuple[dict[str, WeightReader], tuple[str, ...]]:
    """Return readers of the tensors by our names, and the heads of another task, which are left out.

    Raises:
        InputError: tensors are of another size, or do not belong to such a model; the message names a key.
    """
    config, readers = SIZES[size], _readers(state)
    pieces = {key: _pieces(key, config) for key in readers}
    strange = [key for key in readers if not _known(pieces[key], config)]
    *found, _ = _sizes_told(readers, config)
    if all(found) and found != [config.n_layers, config.dim]:
        fitting = " or ".join(f"{path}@{other}" for other in sizes_of(state))
        raise InputError(
            f"{path}: has {found[0]} layers of width {found[1]}, and {size} has {config.n_layers} of {config.dim}; "
            + (f"give {fitting}" if fitting else "no size that is known here fits it")
        )
    if strange:
        more = f" and {len(strange) - 1} more" if strange[1:] else ""
        raise InputError(f"{path}: is not {size}, to which {strange[0]}{more} of its tensors do not belong")
    left_out = tuple(sorted({key.split(".")[0] for key in _plain(state) if key.startswith(_HEADS)}))
    return {piece.name: readers[key].part(piece.rows) for key in readers for piece in pieces[key]}, left_out


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the prefixes of wrappers."""
    return {_WRAPPERS.sub("", str(key)): value for key, value in state.items()}


def _readers(state: Mapping[str, Any]) -> dict[str, WeightReader]:
    """Return readers of the tensors, without the prefixes of wrappers and without heads of another task."""
    plain = {key: value for key, value in _plain(state).items() if not key.startswith(_HEADS)}
    return {key: value for key, value in plain.items() if isinstance(value, WeightReader)} | weight_reader.tensors(
        plain
    )


@cache
def _shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of all tensors of a model of one such layer, by name. No memory is used."""
    with torch.device("meta"):
        state = family_registry.build(replace(config, n_layers=1)).state_dict()
    return {name: tensor.shape for name, tensor in state.items()}


def _pieces(key: str, config: ModelConfig) -> tuple[Piece, ...]:
    """Return our tensors in a key, whose name may be ours."""
    own = (Piece(key),)
    return own if _known(own, config) else tuple(family_registry.family_of(config).files.pieces(key, config))


def _known(pieces: Sequence[Piece], config: ModelConfig) -> bool:
    return all(_LAYER.sub("layers.0.", piece.name, count=1) in _shapes(config) for piece in pieces)


def _sizes_told(readers: Mapping[str, WeightReader], config: ModelConfig) -> tuple[int, int, int]:
    """Return the number of layers, the width and the rows of the embedding; 0 for what no tensor tells."""
    layers, width, rows = 0, 0, 0
    for key, reader in readers.items():
        pieces = _pieces(key, config)
        numbers = {int(match[1]) for piece in pieces if (match := _LAYER.match(piece.name))}
        if len(numbers) == 1:  # one tensor for all layers, such as the frequencies of positions, counts none
            layers = max(layers, min(numbers) + 1)
        for piece in pieces:
            if piece.name == "embed_tokens.weight" and len(reader.shape) == 2:
                rows, width = reader.shape
    return layers, width, rows


def _fits(readers: Mapping[str, WeightReader], config: ModelConfig) -> bool:
    rows = _shapes(config)["embed_tokens.weight"][0]
    if _sizes_told(readers, config) != (config.n_layers, config.dim, rows):
        return False
    return all(_known(_pieces(key, config), config) for key in readers)
