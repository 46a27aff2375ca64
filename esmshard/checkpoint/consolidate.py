"""One model directory out of a sharded checkpoint, or out of a model of the other layout: one process, no GPU."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from esmshard import __version__
from esmshard.checkpoint import sharded
from esmshard.errors import UsageError
from esmshard.model import export, weights
from esmshard.model.config import SIZES, EsmConfig
from esmshard.model.export import DTYPES, MAX_FILE_BYTES, Source, Target
from esmshard.model.files import read_json
from esmshard.model.weights import Weights

FORMAT, VERSION = "esmshard-model", 1

Sizes = Mapping[str, torch.Size]


def consolidate(
    source: Path | str,
    out: Path,
    *,
    to: Target = "hf",
    dtype: str = "fp32",
    overwrite: bool = False,
    warn: Callable[[str], None] = lambda message: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the model of a run (its newest good checkpoint), of one checkpoint, or of a model file to a directory.

    Args:
        source: run directory, checkpoint directory, or any model that `esmshard.model.weights.read` knows.
        out: directory to make; it appears only when it is whole.
        to: `hf` for `transformers.EsmForMaskedLM` (and all commands here), `fair-esm` for its `.pt` loader.
        dtype: of the written weights: fp32, bf16 or fp16. Rotary frequencies stay fp32.
        overwrite: replace `out` if it exists.
        warn: called with a sentence for each damaged checkpoint that was passed over, and for what a model lacks.
        max_file_bytes: above this the weights are split over several files with an index.

    Raises:
        InputError: if there is no good checkpoint, or what was written does not read back equal.
        UsageError: if `out` exists, or is where the source lies.
    """
    if out.exists() and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    if out.exists() and Path(source).exists() and Path(source).resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out}: holds the model to read; choose another directory")
    config, sizes, read, about = _open_model(source, to, warn) if _is_model(source) else _open_run(Path(source), warn)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".tmp-{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)  # mkdtemp's private mode is for secrets
        if to == "hf":
            digest = export.write_transformers(work, config, sizes, read, DTYPES[dtype], max_file_bytes)
        else:
            digest = export.write_fair_esm(work, out.name, config, sizes, read, DTYPES[dtype])
        if about:
            text = json.dumps(about | {"weights_sha256": digest}, indent=1) + "\n"
            (work / "esmshard.json").write_text(text, encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _is_model(source: Path | str) -> bool:
    path = Path(source).expanduser()
    return path.is_file() or (path / "config.json").is_file() or (not path.exists() and str(source) in SIZES)


def _open_model(
    source: Path | str, to: Target, warn: Callable[[str], None]
) -> tuple[EsmConfig, Sizes, Source, dict[str, Any]]:
    """A model as it is, its head and `esmshard.json` included."""
    found: Weights = weights.read(str(source))
    for notice in found.notices:
        warn(notice)
    head = {f"head.{name}": reader() for name, reader in found.head.items()}
    sizes = weights.shapes(found.config) | {name: tensor.shape for name, tensor in head.items()}
    if to == "hf":  # what it lacks stays lacking, so that whoever reads it is told; fair-esm reads whole models only
        sizes = {name: size for name, size in sizes.items() if name.split(".")[0] not in found.absent}
    path = Path(source).expanduser()
    path = (path.parent if path.suffix == ".safetensors" else path) / "esmshard.json"
    about = read_json(path) if path.is_file() else {}

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: head[name] if name in head else found[name] for name in names}

    return found.config, sizes, read, about


def _open_run(source: Path, warn: Callable[[str], None]) -> tuple[EsmConfig, Sizes, Source, dict[str, Any]]:
    checkpoint = sharded.locate(source, warn)
    state = sharded.read_state(checkpoint)
    entries = {
        key.removeprefix("model.").removeprefix("trunk."): (key, entry)
        for key, entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        wanted = {entries[n][0]: torch.empty(entries[n][1].size, dtype=entries[n][1].properties.dtype) for n in names}
        sharded.load(checkpoint, wanted, alone=True)
        return {name: wanted[entries[name][0]] for name in names}

    about = {
        "format": FORMAT,
        "version": VERSION,
        "esmshard": __version__,
        "step": state["step"],
        "recipe": state["recipe"],
        "baselines": state["baselines"],
    }
    return EsmConfig(**state["config"]), {name: entry.size for name, (_, entry) in entries.items()}, read, about
