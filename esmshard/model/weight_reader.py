"""Opens weight files without running any code in the files. Error messages say what is wrong with a file."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from esmshard.errors import InputError
from esmshard.io import paths as files

ALL = slice(None)
REPLACED = "copy or download it again; a git-LFS pointer needs `git lfs pull`, and a web page a new download"
"""The advice in messages about unreadable weight files."""


@dataclass(frozen=True)
class WeightReader:
    """Reads a tensor, or only some rows of the tensor, so memory need not hold a second copy of a model."""

    shape: torch.Size
    """The shape of the whole tensor."""
    rows: Callable[[slice], torch.Tensor]
    """The function that reads a slice of the tensor's rows."""

    def __call__(self, rows: slice = ALL) -> torch.Tensor:
        """Read and return the whole tensor, or only the rows in the slice `rows`."""
        return self.rows(rows)

    def part(self, part: slice) -> "WeightReader":
        """Return a reader of only the rows in `part`, for a file that joins several tensors in one tensor."""
        if part == ALL:
            return self
        part_rows = range(self.shape[0])[part]

        def read(rows: slice) -> torch.Tensor:
            chosen = part_rows[rows]
            return self.rows(slice(chosen.start, chosen.stop, chosen.step))

        return WeightReader(torch.Size((len(part_rows), *self.shape[1:])), read)


def read_json(path: Path) -> Any:
    """Read a JSON file of a model directory. Raises `InputError` if the file is missing or is not JSON."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: missing; the directory is not a complete model") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}; {REPLACED}") from None


def read_safetensors(path: Path) -> dict[str, WeightReader]:
    """Return a reader for each tensor of a safetensors file, by key. This call reads only the header of the file."""

    def rows(key: str, rows: slice) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key) if rows == ALL else file.get_slice(key)[rows]
            return tensor

    try:
        with safe_open(path, framework="pt") as file:
            sizes = {key: torch.Size(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            return {key: WeightReader(size, partial(rows, key)) for key, size in sizes.items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}); {REPLACED}") from None


def read_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary in a torch file without running code. Raises `InputError` for code or an unreadable file."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # Files of the format before torch 1.6 cannot be mapped.
                data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # A broken pickle may raise any exception.
        code = re.search(r"unsupported (?:global: )?GLOBAL ([\w.]+)", str(error), re.IGNORECASE)
        if code:
            raise InputError(
                f"{path}: holds code ({code[1]}), and none of it was run; weights are tensors only, so get the model "
                "from its publisher, best as safetensors"
            ) from None
        # The message omits torch's text, because this text advises to load files that contain code.
        raise InputError(f"{path}: cannot be read as torch weights ({type(error).__name__}); {REPLACED}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds a {type(data).__name__}, not a dictionary of weights")
    return data


def read_tensors(path: Path) -> dict[str, WeightReader]:
    """Return a reader for each tensor of a safetensors file or of a torch file, by key."""
    return read_safetensors(path) if path.suffix == ".safetensors" else tensors(read_pickle(path))


def tensors(state: Mapping[str, Any]) -> dict[str, WeightReader]:
    """Return a reader for each tensor of a dictionary in memory, by key."""
    return {
        str(k): WeightReader(v.shape, v.detach().__getitem__) for k, v in state.items() if isinstance(v, torch.Tensor)
    }
