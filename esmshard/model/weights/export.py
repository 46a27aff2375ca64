"""Writes a model in `transformers`' layout with tokenizer files, or as the file of its authors' own code.

A few tensors are read at a time, with no more numbers than the largest tensor, and written at once. The memory needed
is a few times that of the largest tensor, whatever the size of the model or of a file.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from esmshard.errors import InputError
from esmshard.files import replace_json, sha256
from esmshard.joined_chains import Chains
from esmshard.model.config import ModelConfig
from esmshard.model.families.family import AuthorsFile
from esmshard.model.families.family_registry import CHAINS, WINDOW, family_of

MAX_FILE_BYTES = 5_000_000_000

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Source = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""A function that reads the tensors of these names: our names for the trunk, `head.*` for a task head."""

# The names of the types in safetensors.
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_transformers(
    directory: Path,
    config: ModelConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, str]:
    """Write `model.safetensors`, `config.json` and tokenizer files for the class of `transformers`.

    Args:
        directory: an existing, empty directory.
        config: architecture of the trunk.
        sizes: shape of every tensor to write, by name, without tied ones.
        source: reads tensors.
        dtype: type of the written weights. Rotary frequencies stay fp32.
        max_file_bytes: larger weights are split over several files with an index.

    Returns:
        sha256 of each weight file, by file name.

    Raises:
        FloatingPointError: a weight is not finite, or too large for `dtype`.
    """
    theirs = family_of(config).files
    keys = _keys(config, sizes)
    stored = {
        key: sum(sizes[name].numel() * stored_dtype(name, dtype).itemsize for name in names)
        for key, names in keys.items()
    }
    parts = [{key: keys[key] for key in group} for group in _cut(stored, max_file_bytes)]
    files = ["model.safetensors"]
    if len(parts) > 1:
        files = [f"model-{n + 1:05d}-of-{len(parts):05d}.safetensors" for n in range(len(parts))]
    digests = {
        file: _write_safetensors(directory / file, part, sizes, source, dtype)
        for file, part in zip(files, parts, strict=True)
    }
    if wrong := [file for file, digest in digests.items() if sha256(directory / file) != digest]:
        raise InputError(f"{directory / wrong[0]}: does not read back as it was written; check the disk, and try again")
    if len(parts) > 1:
        weight_map = {key: file for file, part in zip(files, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": sum(stored.values())}, "weight_map": weight_map}
        replace_json(directory / "model.safetensors.index.json", index)
    about = theirs.write_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    if config.window is not None:
        about[WINDOW] = config.window
    if config.chains != Chains():
        about[CHAINS] = config.chains.text
    replace_json(directory / "config.json", about)
    theirs.write_tokenizer(directory)
    return digests


def write_pickle(
    path: Path,
    kind: AuthorsFile,
    config: ModelConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
) -> dict[str, str]:
    """Write the file of a family's own code, at `kind.path(...)`.

    What it cannot hold, such as a task head, is left out. Other arguments, result and errors are as in
    `write_transformers`. `torch.save` needs all tensors at once. So they are first written to a temporary file and
    mapped from there, which takes the model's size on disk once more for a while, and no memory.
    """
    joined = kind.joined(config)
    parts = {name for names in joined.values() for name in names}
    single = {name: [name] for name in sizes if name not in parts and not name.startswith(kind.lacks)}
    mapped = path.with_name("tensors.safetensors")
    _write_safetensors(mapped, single | {key: [*names] for key, names in joined.items()}, sizes, source, dtype)
    tensors = load_file(mapped)
    mapped.unlink()  # If a mapped file cannot be removed (Windows), this raises an error.
    return {file.name: sha256(file) for file in kind.write(path, config, tensors)}


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor of a model of this precision is written."""
    return torch.float32 if name.endswith("inv_freq") else dtype


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a tensor to the type in which it is written.

    Raises:
        FloatingPointError: a value is not finite, or too large for `dtype`.
    """
    written = tensor.to(stored_dtype(name, dtype)).contiguous()
    # NaN and infinity appear as least or largest value; a mask or a copy of a tensor may be too large.
    if written.numel() and not torch.isfinite(torch.stack(torch.aminmax(written))).all():
        low, high = (float(value) for value in torch.aminmax(tensor))
        if max(-low, high) < float("inf"):
            raise FloatingPointError(
                f"{name} holds {high if high > -low else low:.3g}, which is beyond the largest "
                f"{str(dtype).removeprefix('torch.')}, {torch.finfo(dtype).max:.5g}; write it as fp32 or bf16"
            )
        raise FloatingPointError(f"{name} holds a value that is not finite; the run that made it diverged")
    return written


def few(sizes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    """Yield the names in order, in groups that together have no more numbers than the largest tensor."""
    numbers = {name: size.numel() for name, size in sizes.items()}
    return _cut(numbers, max(numbers.values()))


def _keys(config: ModelConfig, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of a `transformers` directory with the tensors that each of them joins, in their order."""
    files = family_of(config).files
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if (key := files.key(name)) is not None:
            found.setdefault(key, []).append(name)
    for key, together in found.items():
        if len(together) > 1:
            together.sort(key=[piece.name for piece in files.pieces(key, config)].index)
    return found


def _write_safetensors(
    path: Path,
    keys: Mapping[str, Sequence[str]],
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype,
) -> str:
    """Write the tensors that `keys` names for each key, joined along the rows. The bytes are those of
    `safetensors.torch.save_file`, which needs all tensors of a file in memory. Return their sha256.

    The format is the header's length (8 bytes, little-endian), a JSON header padded with spaces to a multiple of 8, and
    the tensors, the wider types first so that all are aligned (https://github.com/huggingface/safetensors).
    """
    order = sorted(keys, key=lambda key: (-stored_dtype(keys[key][0], dtype).itemsize, key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key in order:
        first, *more = keys[key]
        kept, shape = stored_dtype(first, dtype), list(sizes[first])
        for name in more:
            shape[0] += sizes[name][0]
        end = at + math.prod(shape) * kept.itemsize
        header[key] = {"dtype": _CODES[kept], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    written = hashlib.sha256(head)
    with open(path, "wb") as file:
        file.write(head)
        for names in few({name: sizes[name] for key in order for name in keys[key]}):
            tensors = dict(source(names))
            for name in names:
                tensor = tensors.pop(name)
                assert tensor.shape == sizes[name], f"{name} is {list(tensor.shape)}, {list(sizes[name])} was announced"
                data = _bytes(cast(name, tensor, dtype))
                file.write(data)
                written.update(data)
    return written.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return view


def _cut(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the names in order, in groups with at most `most` in all. A larger item is a group of its own."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
