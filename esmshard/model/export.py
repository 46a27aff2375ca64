"""Writes a model in `transformers`' layout or in the format of the authors' code, and uploads model directories.

A model is written file by file. Only the tensors of one file, at most 5 GB, are in memory at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import is_hub_name, replace_json, sha256, size_text
from esmshard.model import adapters, hub, weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.family import AuthorsFile, Family
from esmshard.model.families.family_registry import CHAINS, WINDOW, family_of
from esmshard.progress import say
from esmshard.vocab import Chains

MAX_FILE_BYTES = 5_000_000_000

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Source = Callable[[str], torch.Tensor]
"""The type of a function that returns a tensor by esmshard's name. The tensors of a task head are named `head.*`."""


def write_transformers(
    directory: Path,
    config: ModelConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, str]:
    """Write the weights, `config.json` and the tokenizer files of a model in the layout of `transformers`.

    Returns the sha256 of each weight file by file name. Raises `FloatingPointError` if a weight is not finite, or is
    too large for `dtype`.

    Args:
        directory: an existing, empty directory.
        config: the architecture of the trunk.
        sizes: the shapes of the tensors to write, by name. A tensor with two names (`Trunk.tied`) is listed once.
        source: the function that returns a tensor by name.
        dtype: the type of the written weights. Rotary frequencies stay fp32.
        max_file_bytes: the maximum size of a weight file. Larger models become several files with an index.
    """
    family = family_of(config)
    digests = _write_safetensors(directory, _by_key(family, config, sizes), sizes, source, dtype, max_file_bytes)
    settings = family.write_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    if config.window is not None:
        settings[WINDOW] = config.window
    if config.chains != Chains():
        settings[CHAINS] = config.chains.text
    replace_json(directory / "config.json", settings)
    family.write_tokenizer(directory)
    return digests


def write_pickle(
    path: Path,
    kind: AuthorsFile,
    config: ModelConfig,
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype = torch.float32,
) -> dict[str, str]:
    """Write a model file in the format `kind` for the authors' code. `path` must be a result of `kind.path`. Tensors
    that the format cannot contain, such as a task head, are left out. The other arguments, the result and the errors
    are as in `write_transformers`.

    `torch.save` needs all tensors at once, so they are first written to temporary files and mapped into memory.
    """
    names = [name for name in sizes if not name.startswith(kind.lacks)]
    keys = {name: [name] for name in names} if kind.our_names else _by_key(family_of(config), config, names)
    with TemporaryDirectory(dir=path.parent) as scratch:
        files = _write_safetensors(Path(scratch), keys, sizes, source, dtype, MAX_FILE_BYTES)
        tensors = {key: tensor for file in files for key, tensor in load_file(Path(scratch) / file).items()}
        return {file.name: sha256(file) for file in kind.write(path, config, tensors)}


def _by_key(family: Family, config: ModelConfig, names: Iterable[str]) -> dict[str, list[str]]:
    """Map each key of a model file to esmshard's names of the tensors joined under this key, in the file's order."""
    keys: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if (key := family.key(name)) is not None:
            keys[key].append(name)
    for key, joined in keys.items():
        if len(joined) > 1:
            joined.sort(key=[piece.name for piece in family.pieces(key, config)].index)
    return keys


def _write_safetensors(
    directory: Path,
    keys: Mapping[str, Sequence[str]],
    sizes: Mapping[str, torch.Size],
    source: Source,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> dict[str, str]:
    """Join the tensors of each key along the rows, write safetensors files, and return the sha256 by file name."""
    from huggingface_hub import split_torch_state_dict_into_shards  # The import reads environment variables.

    planned = {
        key: torch.empty(sum(sizes[name].numel() for name in names), dtype=stored_dtype(names[0], dtype), device="meta")
        for key, names in keys.items()
    }
    plan = split_torch_state_dict_into_shards(planned, max_shard_size=max_file_bytes)
    for file, keys_of_file in plan.filename_to_tensors.items():
        tensors: dict[str, torch.Tensor] = {}
        for key in keys_of_file:
            parts = [cast(name, source(name), dtype) for name in keys[key]]
            tensors[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
        save_file(tensors, directory / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        replace_json(directory / "model.safetensors.index.json", index)
    return {file: sha256(directory / file) for file in plan.filename_to_tensors}


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in files: fp32 for rotary frequencies, and `dtype` for all other tensors."""
    return torch.float32 if name.endswith("inv_freq") else dtype


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of the tensor `name` in the type that `stored_dtype` returns. Raises `FloatingPointError` if a
    value is not finite, or is too large for this type.
    """
    written = tensor.to(stored_dtype(name, dtype), copy=True, memory_format=torch.contiguous_format)
    # A NaN or an infinity shows in the minimum or maximum. A mask of the whole tensor would need more memory.
    if written.numel() and not torch.isfinite(torch.stack(torch.aminmax(written))).all():
        largest = float(tensor.abs().max())
        if largest < float("inf"):
            raise FloatingPointError(
                f"{name} contains {largest:.3g}, which is too large for {dtype}; pass --dtype fp32 or bf16"
            )
        raise FloatingPointError(
            f"{name} holds a value that is not finite, so the training has diverged; use an earlier checkpoint"
        )
    return written


def push(model: str, name: str, *, private: bool = False, overwrite: bool = False) -> str:
    """Upload the files of a model directory to the Hugging Face hub as one commit. Return the repository's address.

    `model` is the directory of a run or of an adapter, or an output of `esmshard consolidate`. With `private=True`, a
    new repository is private. With `overwrite=True`, an existing repository gets one more commit. Raises `UsageError`
    if `name` is not OWNER/NAME, or if the repository exists and `overwrite` is False. Raises `InputError` if the model
    is not complete, a file's sha256 differs from `esmshard.json`, an adapter's base model is not on the hub, or the
    upload fails.
    """
    if not is_hub_name(name):
        raise UsageError(f"{name}: give OWNER/NAME as the name of the repository, such as me/model")
    path = weights.place(model)
    if not path.is_dir():
        raise InputError(f"{model}: not a model directory; give a run, or a directory from `esmshard consolidate`")
    if adapters.is_adapter(path):
        base = adapters.read_settings(path)["base_model_name_or_path"]
        if not hub.is_name(base):
            raise InputError(
                f"{path}: an adapter for {base}, which is not on the hub; push the complete model, or consolidate the "
                "run again with --adapter --base OWNER/NAME"
            )
    if changed := weights.altered(weights.read(str(path)).files):
        raise InputError(changed)
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    size = sum(file.stat().st_size for file in files)
    say(f"{name}: uploading {size_text(size)} to {constants.ENDPOINT}: {', '.join(file.name for file in files)}")
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=private or None, exist_ok=overwrite))
        api.upload_folder(
            repo_id=name,
            folder_path=path,
            allow_patterns=[file.name for file in files],
            commit_message=f"Model of {Path(model).name}",
        )
    except Exception as error:  # requests, httpx and hf_xet have no common exception type.
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 409:
            raise UsageError(
                f"{name}: exists already on {constants.ENDPOINT}; choose another name or pass --overwrite"
            ) from None
        raise InputError(
            f"{name}: the upload to {constants.ENDPOINT} failed ({hub.reason(error)}); set HF_TOKEN to a token that "
            "may write, and try again"
        ) from None
    return address
