"""One model directory out of a sharded checkpoint: one process, no process group, no GPU.

`transformers` layout (`model.safetensors`, `config.json`, tokenizer files), or fair-esm's (`NAME.pt` and its contact
regression). A fine-tuned head goes along under `head.`. Tensors are read one output file at a time, so the memory
needed is that of the largest file (5 GB), not of the model.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from esmshard import __version__
from esmshard.checkpoint import sharded
from esmshard.errors import InputError, UsageError
from esmshard.model.config import EsmConfig
from esmshard.model.weights import TIED, to_transformers, transformers_config
from esmshard.vocab import CLS, EOS, MASK, PAD, TOKENS, UNK

FORMAT, VERSION = "esmshard-model", 1
MAX_FILE_BYTES = 5_000_000_000

Target = Literal["hf", "fair-esm"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def consolidate(
    source: Path,
    out: Path,
    *,
    to: Target = "hf",
    dtype: str = "fp32",
    overwrite: bool = False,
    warn: Callable[[str], None] = lambda message: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the model of a run (its newest good checkpoint) or of one checkpoint to the directory `out`.

    Args:
        source: run directory or checkpoint directory.
        out: directory to make; it appears only when it is whole.
        to: `hf` for `transformers.EsmForMaskedLM` (and all commands here), `fair-esm` for its `.pt` loader.
        dtype: of the written weights: fp32, bf16 or fp16. Rotary frequencies stay fp32.
        overwrite: replace `out` if it exists.
        warn: called with a sentence for each damaged checkpoint that was passed over.
        max_file_bytes: above this the weights are split over several files with an index.

    Raises:
        InputError: if there is no good checkpoint, or what was written does not read back equal.
        UsageError: if `out` exists.
    """
    if out.exists() and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    checkpoint = sharded.locate(source, warn)
    state = sharded.read_state(checkpoint)
    config = EsmConfig(**state["config"])
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".tmp-{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)  # mkdtemp's private mode is for secrets
        if to == "hf":
            digest = _write_transformers(checkpoint, work, config, DTYPES[dtype], max_file_bytes)
        else:
            digest = _write_fair_esm(checkpoint, work, config, DTYPES[dtype], out.name)
        about = {
            "format": FORMAT,
            "version": VERSION,
            "esmshard": __version__,
            "step": state["step"],
            "recipe": state["recipe"],
            "baselines": state["baselines"],
            "weights_sha256": digest,
        }
        (work / "esmshard.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _names(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Weights of the checkpoint, without optimizer state: `trunk.layers.0...`, `head...`, and how they are stored."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        key.removeprefix("model."): entry
        for key, entry in entries.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _read(checkpoint: Path, names: list[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Full tensors by checkpoint name."""
    entries = _names(checkpoint)
    tensors = {f"model.{n}": torch.empty(entries[n].size, dtype=entries[n].properties.dtype) for n in names}
    sharded.load(checkpoint, tensors, alone=True)
    return {n: _cast(n, tensors[f"model.{n}"], dtype) for n in names}


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if name.endswith("inv_freq") else tensor.to(dtype)


def _output_name(name: str) -> str:
    return to_transformers(name.removeprefix("trunk.")) if name.startswith("trunk.") else name


def _write_transformers(checkpoint: Path, work: Path, config: EsmConfig, dtype: torch.dtype, most: int) -> str:
    sizes = {
        name: entry.size.numel() * (4 if name.endswith("inv_freq") else dtype.itemsize)
        for name, entry in sorted(_names(checkpoint).items())
    }
    parts = list(_cut(sizes, most))
    files = ["model.safetensors"]
    if len(parts) > 1:
        files = [f"model-{n + 1:05d}-of-{len(parts):05d}.safetensors" for n in range(len(parts))]
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    for file, names in zip(files, parts, strict=True):
        tensors = {_output_name(n): t for n, t in _read(checkpoint, names, dtype).items()}
        save_file(tensors, work / file, metadata={"format": "pt"})
        digests |= {key: _digest(t) for key, t in tensors.items()}
        weight_map |= dict.fromkeys(tensors, file)
        del tensors
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for file in files:
        with safe_open(work / file, framework="pt") as written:
            for key in written.keys():  # noqa: SIM118  # not a dictionary
                if _digest(written.get_tensor(key)) != digests.pop(key):
                    raise InputError(f"{work / file}: {key} was not written as it was read; check the disk")
    assert not digests, "every tensor is in one of the files"
    settings = transformers_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (work / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    _write_tokenizer(work)
    return _files_digest(work, files)


def _write_fair_esm(checkpoint: Path, work: Path, config: EsmConfig, dtype: torch.dtype, stem: str) -> str:
    """`NAME.pt` and `NAME-contact-regression.pt`, as `esm.pretrained.load_model_and_alphabet_local` reads them."""
    # fair-esm takes the architecture from the file name: only `esm2...` is read as ESM-2.
    stem = stem if stem.startswith("esm2") else f"esm2_{stem}"
    trunk = [n for n in _names(checkpoint) if n.startswith("trunk.")]
    tensors = {n.removeprefix("trunk."): t for n, t in _read(checkpoint, trunk, dtype).items()}
    tensors[TIED] = tensors["embed_tokens.weight"]
    regression = {n: tensors.pop(n) for n in list(tensors) if n.startswith("contact_head.")}
    sizes = argparse.Namespace(
        encoder_layers=config.n_layers,
        encoder_embed_dim=config.dim,
        encoder_attention_heads=config.n_heads,
        token_dropout=config.token_dropout,
    )
    files = [f"{stem}.pt", f"{stem}-contact-regression.pt"]
    torch.save({"cfg": {"model": sizes}, "model": tensors}, work / files[0])
    torch.save({"model": regression}, work / files[1])
    return _files_digest(work, files)


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
