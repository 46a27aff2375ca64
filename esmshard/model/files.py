"""Open weight files without running anything that is in them, and say what a wrong file is."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from esmshard import files
from esmshard.errors import InputError

ALL = slice(None)


@dataclass(frozen=True)
class Reader:
    """Reads one tensor, or some rows of it, when they are wanted, so that nobody needs a second copy of a model."""

    shape: torch.Size
    """Of the whole tensor."""
    rows: Callable[[slice], torch.Tensor]

    def __call__(self, rows: slice = ALL) -> torch.Tensor:
        """The tensor, or these rows of it."""
        return self.rows(rows)

    def then(self, change: Callable[[torch.Tensor, slice], torch.Tensor]) -> "Reader":
        """The same, passed through `change(tensor, rows)`."""
        return Reader(self.shape, lambda rows: change(self.rows(rows), rows))


def read_json(path: Path) -> Any:
    """What a JSON file holds; `InputError` if it is missing or something else."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: missing; the directory is not a complete model") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON{_really(path, f': {error}')}") from None


def read_safetensors(path: Path) -> dict[str, Reader]:
    """Tensors by key. Only the header is read now."""

    def rows(key: str, rows: slice) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key) if rows == ALL else file.get_slice(key)[rows]
            return tensor

    try:
        with safe_open(path, framework="pt") as file:
            sizes = {key: torch.Size(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            return {key: Reader(size, partial(rows, key)) for key, size in sizes.items()}
    except (OSError, SafetensorError) as error:
        why = _really(path, f" ({error}); copy or download it again")
        raise InputError(f"{path}: not a readable safetensors file{why}") from None


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a torch file. Only tensors, containers and `argparse.Namespace` may occur; no code is run."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of the format before torch 1.6 cannot be mapped
                data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises whatever it likes
        code = re.search(r"unsupported (?:global: )?GLOBAL ([\w.]+)", str(error), re.IGNORECASE)
        if code:
            raise InputError(
                f"{path}: holds code ({code[1]}), and none of it was run; weights are tensors only, so get the model "
                "from its publisher, best as safetensors"
            ) from None
        reason = str(error).split("\n")[0].split(". ")[0] or type(error).__name__
        if reason.startswith("Weights only load failed"):  # torch goes on to advise the load that runs code
            reason = "not a torch file"
        why = _really(path, f" ({reason}); copy or download it again")
        raise InputError(f"{path}: cannot be read as torch weights{why}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds a {type(data).__name__}, not a dictionary of weights")
    return data


def read_state_dict(path: Path) -> dict[str, Reader]:
    """Tensors by key of a torch file that holds nothing else."""
    return tensors(read_pickle(path))


def tensors(state: Mapping[str, Any]) -> dict[str, Reader]:
    """Readers of the tensors of a dictionary in memory."""
    return {str(k): Reader(v.shape, v.detach().__getitem__) for k, v in state.items() if isinstance(v, torch.Tensor)}


def _really(path: Path, otherwise: str) -> str:
    """What often lies in the place of a weight file: a git-LFS pointer, or a page that a proxy or hub sent."""
    try:
        with open(path, "rb") as file:
            start = file.read(512).lstrip().lower()
    except OSError:
        return otherwise
    if start.startswith(b"version https://git-lfs"):
        return ": it is a git-LFS pointer and not the file it stands for; run `git lfs pull`, or download the file"
    if start.startswith((b"<!doctype html", b"<html")):
        return ": it is an HTML page, so the download went wrong; download the file again"
    return otherwise
