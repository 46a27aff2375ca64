"""Opens weight files without running code in them."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from esmshard.errors import InputError, reading
from esmshard.io import paths as files

ALL = slice(None)
REPLACED = "copy or download the file again (with `git lfs pull` in a git repository)"
"""What messages about unreadable files tell the user to do."""


@dataclass(frozen=True)
class WeightReader:
    """Reads a tensor, or some of its rows, when it is called. So memory need not have a second copy of a model."""

    shape: torch.Size
    """The shape of the whole tensor."""
    rows: Callable[[slice], torch.Tensor]
    """The function that reads a slice of the tensor's rows."""

    def __call__(self, rows: slice = ALL) -> torch.Tensor:
        """Read some rows of the tensor, by default all."""
        return self.rows(rows)

    def part(self, part: slice) -> "WeightReader":
        """Return a reader for only the rows in `part`, because some files join several tensors in one tensor."""
        if part == ALL:
            return self
        part_rows = range(self.shape[0])[part]

        def read(rows: slice) -> torch.Tensor:
            chosen = part_rows[rows]
            return self.rows(slice(chosen.start, chosen.stop, chosen.step))

        return WeightReader(torch.Size((len(part_rows), *self.shape[1:])), read)


def read_json(path: Path) -> Any:
    """Read a JSON file in a model directory. Raises `InputError` if the file is missing or is not JSON."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: missing, so the model is not complete; copy or download it again") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}; {REPLACED}") from None


def tokenizer_rows(directory: Path) -> dict[str, int]:
    """Return the embedding's row of each token in the files `tokenizer.json` and `added_tokens.json` of `transformers`,
    if there are such files. A token such as `▁A`, with the mark of a word's start, is listed without this mark, too.
    """
    row_of_token: dict[str, int] = {}
    for path in (directory / name for name in ("tokenizer.json", "added_tokens.json")):
        raw = read_json(path) if path.is_file() else {}
        with reading(f"{path}", REPLACED):
            if "model" in raw:
                vocabulary = raw["model"]["vocab"]  # a list of pieces with their scores, or a dictionary of rows
                if isinstance(vocabulary, list):
                    vocabulary = {piece: row for row, (piece, _) in enumerate(vocabulary)}
                raw = vocabulary | {token["content"]: token["id"] for token in raw["added_tokens"]}
            row_of_token |= {token: int(row) for token, row in raw.items()}
    return {token.removeprefix("▁"): row for token, row in row_of_token.items()} | row_of_token


def read_safetensors(path: Path) -> dict[str, WeightReader]:
    """Return a reader for each tensor in a safetensors file, by key. This call reads only the file's header."""

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
    """Read the dictionary in a torch file without running code in it. Raises `InputError` if the file contains code, or
    cannot be read.
    """
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
                f"{path}: contains code ({code[1]}), which was not run; get the model from its publisher, if possible "
                "as safetensors"
            ) from None
        # torch's own message is left out, because it advises to load files that contain code.
        raise InputError(f"{path}: cannot be read as torch weights ({type(error).__name__}); {REPLACED}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: contains a {type(data).__name__}, not a dictionary of weights")
    return data


def read_tensors(path: Path) -> dict[str, WeightReader]:
    """Return a reader for each tensor in a safetensors or torch file, by key."""
    return read_safetensors(path) if path.suffix == ".safetensors" else tensors(read_pickle(path))


def tensors(state: Mapping[str, Any]) -> dict[str, WeightReader]:
    """Return a reader for each tensor in a dictionary, by key. Other values are left out."""
    return {
        str(k): WeightReader(v.shape, v.detach().__getitem__) for k, v in state.items() if isinstance(v, torch.Tensor)
    }
