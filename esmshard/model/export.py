"""Write a model: `transformers`' layout, with tokenizer files, or fair-esm's `.pt` with its contact regression.

Tensors are asked for one output file at a time, so the memory needed is that of the largest file, not of the model.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from esmshard.errors import InputError
from esmshard.model.config import EsmConfig
from esmshard.model.layouts import TIED, fair_esm_settings, to_transformers, transformers_config
from esmshard.vocab import CLS, EOS, MASK, PAD, TOKENS, UNK

MAX_FILE_BYTES = 5_000_000_000

Target = Literal["hf", "fair-esm"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Source = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Reads the tensors of these names: ours for the trunk, `head.*` for a task head."""


def write_transformers(
    directory: Path,
    config: EsmConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> str:
    """Write `model.safetensors`, `config.json` and tokenizer files for `transformers.EsmForMaskedLM`.

    Args:
        directory: exists, and is empty.
        config: of the trunk.
        sizes: shape by name of all that is to be written; the tied `lm_head.weight` is left out.
        source: reads tensors.
        dtype: of the written weights. Rotary frequencies stay fp32.
        max_file_bytes: above this the weights are split over several files with an index.

    Returns:
        sha256 of the weight files, one after the other.

    Raises:
        InputError: if what was written does not read back equal.
    """
    stored = {
        name: sizes[name].numel() * (4 if name.endswith("inv_freq") else dtype.itemsize)
        for name in sorted(sizes)
        if name != TIED
    }
    parts = list(_cut(stored, max_file_bytes))
    files = ["model.safetensors"]
    if len(parts) > 1:
        files = [f"model-{n + 1:05d}-of-{len(parts):05d}.safetensors" for n in range(len(parts))]
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    for file, names in zip(files, parts, strict=True):
        tensors = {to_transformers(n): _cast(n, t, dtype) for n, t in source(names).items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        digests |= {key: _digest(t) for key, t in tensors.items()}
        weight_map |= dict.fromkeys(tensors, file)
        del tensors
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(stored.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for file in files:
        with safe_open(directory / file, framework="pt") as written:
            for key in written.keys():  # noqa: SIM118  # not a dictionary
                if _digest(written.get_tensor(key)) != digests.pop(key):
                    raise InputError(f"{directory / file}: {key} was not written as it was read; check the disk")
    assert not digests, "every tensor is in one of the files"
    settings = transformers_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    _write_tokenizer(directory)
    return _files_digest(directory, files)


def write_fair_esm(
    directory: Path,
    stem: str,
    config: EsmConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write `NAME.pt` and `NAME-contact-regression.pt` for `esm.pretrained.load_model_and_alphabet_local`.

    NAME is `stem`, with the family before it where it does not begin with one: fair-esm takes the architecture from
    the file's name. A task head is left out. Arguments and result as for `write_transformers`.
    """
    family = "esm2" if config.rotary else "esm1b" if config.emb_layer_norm_before else "esm1v"
    stem = stem if stem.startswith("esm2" if config.rotary else ("esm1b", "esm1v")) else f"{family}_{stem}"
    names = [name for name in sizes if not name.startswith("head.") and name != TIED]
    tensors = {name: _cast(name, tensor, dtype) for name, tensor in source(names).items()}
    tensors[TIED] = tensors["embed_tokens.weight"]
    regression = {name: tensors.pop(name) for name in list(tensors) if name.startswith("contact_head.")}
    files = [f"{stem}.pt", f"{stem}-contact-regression.pt"]
    torch.save(fair_esm_settings(config) | {"model": tensors}, directory / files[0])
    torch.save({"model": regression}, directory / files[1])
    return _files_digest(directory, files)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if name.endswith("inv_freq") else tensor.to(dtype)


def _cut(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Names in order, cut into groups of at most `most` bytes (a larger tensor stands alone)."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _files_digest(work: Path, files: list[str]) -> str:
    total = hashlib.sha256()
    for name in files:
        with open(work / name, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _write_tokenizer(work: Path) -> None:
    """Files from which `transformers.AutoTokenizer` makes its EsmTokenizer."""
    special: dict[str, Any] = {
        "cls_token": TOKENS[CLS],
        "eos_token": TOKENS[EOS],
        "mask_token": TOKENS[MASK],
        "pad_token": TOKENS[PAD],
        "unk_token": TOKENS[UNK],
    }
    (work / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    (work / "special_tokens_map.json").write_text(json.dumps(special, indent=1) + "\n", encoding="utf-8")
    settings = special | {"tokenizer_class": "EsmTokenizer"}
    (work / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
