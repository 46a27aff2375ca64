"""Writes a model in `transformers`' layout with tokenizer files, or as fair-esm's `.pt` with its contact regression.

A few tensors are read at a time, with no more numbers than the largest tensor, and written at once. The memory needed
is a few times that of the largest tensor, whatever the size of the model or of a file.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from esmshard.files import replace_json, sha256
from esmshard.model.config import EsmConfig
from esmshard.model.weights.key_maps import TIED, fair_esm_settings, to_transformers, transformers_config
from esmshard.vocab import CLS, EOS, MASK, PAD, TOKENS, UNK

MAX_FILE_BYTES = 5_000_000_000

Target = Literal["hf", "fair-esm"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Source = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""A function that reads the tensors of these names: our names for the trunk, `head.*` for a task head."""

# The names of the types in safetensors.
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_transformers(
    directory: Path,
    config: EsmConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, str]:
    """Write `model.safetensors`, `config.json` and tokenizer files for `transformers.EsmForMaskedLM`.

    Args:
        directory: an existing, empty directory.
        config: architecture of the trunk.
        sizes: shape of every tensor to write, by name; the tied `lm_head.weight` is left out.
        source: reads tensors.
        dtype: type of the written weights. Rotary frequencies stay fp32.
        max_file_bytes: larger weights are split over several files with an index.

    Returns:
        sha256 of each weight file, by file name.

    Raises:
        FloatingPointError: a weight is not finite, or too large for `dtype`.
    """
    stored = {name: sizes[name].numel() * stored_dtype(name, dtype).itemsize for name in sorted(sizes) if name != TIED}
    parts = list(_cut(stored, max_file_bytes))
    files = ["model.safetensors"]
    if len(parts) > 1:
        files = [f"model-{n + 1:05d}-of-{len(parts):05d}.safetensors" for n in range(len(parts))]
    for file, names in zip(files, parts, strict=True):
        _write_safetensors(directory / file, {name: sizes[name] for name in names}, source, dtype, to_transformers)
    if len(parts) > 1:
        weight_map = {to_transformers(n): file for file, names in zip(files, parts, strict=True) for n in names}
        index = {"metadata": {"total_size": sum(stored.values())}, "weight_map": weight_map}
        replace_json(directory / "model.safetensors.index.json", index)
    replace_json(
        directory / "config.json", transformers_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    )
    _write_tokenizer(directory)
    return {file: sha256(directory / file) for file in files}


def write_fair_esm(
    directory: Path,
    stem: str,
    config: EsmConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
) -> dict[str, str]:
    """Write `NAME.pt` and `NAME-contact-regression.pt` for `esm.pretrained.load_model_and_alphabet_local`.

    NAME is `stem`, after the family's name if `stem` does not begin with one, since fair-esm takes the architecture
    from the file's name. A task head is left out. Arguments, result and errors are as in `write_transformers`.

    `torch.save` needs all tensors at once. So they are first written to a temporary file and mapped from there, which
    takes the model's size on disk once more for a while, and no memory.
    """
    names = {name: size for name, size in sizes.items() if not name.startswith("head.") and name != TIED}
    mapped = directory / "tensors.safetensors"
    _write_safetensors(mapped, names, source, dtype, str)
    tensors = load_file(mapped)
    mapped.unlink()  # If a mapped file cannot be removed (Windows), this raises an error.
    tensors[TIED] = tensors["embed_tokens.weight"]
    regression = {name: tensors.pop(name) for name in list(tensors) if name.startswith("contact_head.")}
    file = fair_esm_file(directory, stem, config)
    torch.save(fair_esm_settings(config) | {"model": tensors}, file)
    beside = file.with_name(f"{file.stem}-contact-regression.pt")
    torch.save({"model": regression}, beside)
    return {path.name: sha256(path) for path in (file, beside)}


def fair_esm_file(directory: Path, stem: str, config: EsmConfig) -> Path:
    """Return the path of the `.pt` that `write_fair_esm` makes."""
    family = "esm2" if config.rotary else "esm1b" if config.emb_layer_norm_before else "esm1v"
    whole = stem if stem.startswith("esm2" if config.rotary else ("esm1b", "esm1v")) else f"{family}_{stem}"
    return directory / f"{whole}.pt"


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


def digest(tensor: torch.Tensor) -> str:
    """Return the sha256 of the bytes of a tensor."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _write_safetensors(
    path: Path, sizes: Mapping[str, torch.Size], source: Source, dtype: torch.dtype, key_of: Callable[[str], str]
) -> None:
    """Write the same bytes as `safetensors.torch.save_file`, which needs all tensors of a file in memory.

    The format is the header's length (8 bytes, little-endian), a JSON header padded with spaces to a multiple of 8, and
    the tensors, the wider types first so that all are aligned (https://github.com/huggingface/safetensors).
    """
    order = sorted(sizes, key=lambda name: (-stored_dtype(name, dtype).itemsize, key_of(name)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        kept = stored_dtype(name, dtype)
        end = at + sizes[name].numel() * kept.itemsize
        header[key_of(name)] = {"dtype": _CODES[kept], "shape": list(sizes[name]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for names in few({name: sizes[name] for name in order}):
            tensors = dict(source(names))
            for name in names:
                tensor = tensors.pop(name)
                assert tensor.shape == sizes[name], f"{name} is {list(tensor.shape)}, {list(sizes[name])} was announced"
                file.write(_bytes(cast(name, tensor, dtype)))


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


def _write_tokenizer(work: Path) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes its EsmTokenizer."""
    special: dict[str, Any] = {
        "cls_token": TOKENS[CLS],
        "eos_token": TOKENS[EOS],
        "mask_token": TOKENS[MASK],
        "pad_token": TOKENS[PAD],
        "unk_token": TOKENS[UNK],
    }
    (work / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    replace_json(work / "special_tokens_map.json", special)
    replace_json(work / "tokenizer_config.json", special | {"tokenizer_class": "EsmTokenizer"})
