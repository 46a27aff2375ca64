"""Finds or downloads released models and repositories of the Hugging Face hub.

All downloads come from the hub, because fair-esm's server has no checksums that would reveal damaged files.
huggingface_hub is imported inside functions, because the import reads environment variables such as HF_HOME. So a
program can set them after it has imported esmshard.
"""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from esmshard.errors import InputError, UsageError, writing
from esmshard.io.paths import check_replaced, is_hub_name, read_json, sha256, size_text, whole_directory
from esmshard.model.families.family_registry import RELEASED, transformers_config
from esmshard.progress import say

ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
"""The files of a PEFT adapter: the settings, and the matrices in one of two formats."""
LAYOUTS = tuple(
    f"{weights}{index}" for weights in ("model.safetensors", "pytorch_model.bin") for index in (".index.json", "")
)
"""The possible names of a single weight file, or of the index of several weight files. `esmshard.model.weights.read`
tries them in this order."""
_CONFIG = "config.json"
_TOKENIZER = ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "added_tokens.json")
SMALL = (_CONFIG, ADAPTER_CONFIG, *_TOKENIZER, "head.safetensors", "esmshard.json", "README.md")
"""The small files that are downloaded with the weights: settings, tokenizer, task head and model card."""
_ANSWER_SECONDS = 10.0
"""The maximum time to wait for an answer from the hub, in seconds."""


def is_name(name: str) -> bool:
    """Return whether `name` is a released model or has the form OWNER/NAME. Some relative paths have this form, too."""
    return name in RELEASED or is_hub_name(name)


def check(names: Collection[str], to: Path | None = None, overwrite: bool = False) -> None:
    """Check model names, and the output paths `to/NAME`, before any download. Raises `UsageError` with all unknown
    names and, without `overwrite`, all existing outputs.
    """
    expected = f"give one of {', '.join(RELEASED)}, or OWNER/NAME for a repository of the Hugging Face hub"
    problems = [f"{name}: not a released model; {expected}" for name in names if not is_name(name)]
    outputs = [] if to is None else [to / name for name in names]
    if not overwrite:
        existing = filter(os.path.lexists, outputs)
        problems += [f"{path}: exists already; choose another directory or pass --overwrite" for path in existing]
    if problems:
        raise UsageError(*problems)
    for out in outputs:
        check_replaced(out, [*SMALL, "*.safetensors*", "*.bin*", "*.pth"])


def find(name: str) -> Path | None:
    """Return the path of a complete model in the local caches, without using the network; None if there is no such
    model. A released model can also be the fair-esm file `NAME.pt` in the cache of `torch.hub`.
    """
    import torch

    file = Path(torch.hub.get_dir()) / "checkpoints" / f"{name}.pt"
    return file if name in RELEASED and file.is_file() else _snapshot(name)


def fetch(name: str, to: Path | None = None, overwrite: bool = False) -> Path:
    """Find a model in the local caches, or download it from the Hugging Face hub. Return the path of the model's
    directory or of its fair-esm `.pt` file, for `esmshard.model.weights.read`.

    Args:
        name: a name in `RELEASED`, or OWNER/NAME for any repository on the hub.
        to: a directory in which to write the model as `to/NAME`; by default the model stays in the cache.
        overwrite: whether to replace `to/NAME`.

    Raises `UsageError` if the name is unknown or the output exists. Raises `InputError` if the download fails, a file's
    sha256 differs from the sha256 on the hub, or the model's configuration cannot be read.
    """
    check([name], to, overwrite)
    if to is None:
        return find(name) or _download(name)
    with writing(to / name, "free some space, or choose another directory"), whole_directory(to / name) as work:
        if cached := _snapshot(name):
            for file in _wanted(_files(cached)):
                (work / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(cached / file, work / file)
        else:
            _download(name, work)
            shutil.rmtree(work / ".cache", ignore_errors=True)  # huggingface_hub makes this directory.
    say(f"{name}: saved in {to / name}")
    return to / name


def _repository(name: str) -> str:
    return RELEASED[name].repository if name in RELEASED else name


def authors_weights(files: Collection[str]) -> str | None:
    """Return the path `data/weights/NAME.pth` of the language model among the files of a repository; None if there is
    no such file, or several. The files of ESM3's encoders and decoders do not count.
    """
    pattern = re.compile(r"data/weights/(?!\w*(?:encoder|decoder))[^/]+\.pth")
    models = [file for file in files if pattern.fullmatch(file)]
    return models[0] if len(models) == 1 else None


def _wanted(files: Collection[str]) -> list[str]:
    """Choose a model's files from the file names of a repository, the weights last. Pickle files are chosen only if
    there is no safetensors file. The list is empty if the configuration or a weight file is missing.
    """
    adapter = next((file for file in ADAPTERS if ADAPTER_CONFIG in files and file in files), None)
    layout = next((file for file in LAYOUTS if file in files), adapter or authors_weights(files))
    if layout is None or (layout in LAYOUTS and _CONFIG not in files):
        return []
    weights = [layout]
    if layout.endswith(".index.json"):
        stem, suffix, *_ = layout.split(".")
        shard = re.compile(rf"{stem}-\d+-of-(\d+)\.{suffix}")
        counts = {file: int(match[1]) for file in sorted(files) if (match := shard.fullmatch(file))}
        if set(counts.values()) != {len(counts)}:
            return []
        weights = [*counts, layout]
    return [*(file for file in SMALL if file in files), *weights]


def _files(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


def _snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(_repository(name), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return snapshot if _wanted(_files(snapshot)) else None


def _download(name: str, directory: Path | None = None) -> Path:
    """Download a model's files to a directory or to the hub's cache, and check the sha256 of large files."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    address = f"{constants.ENDPOINT}/{_repository(name)}"
    by_hand = "give a model's path instead of its name"
    try:
        info = HfApi().model_info(_repository(name), files_metadata=True, timeout=_ANSWER_SECONDS)
        announced = {sibling.rfilename: sibling for sibling in info.siblings or []}
        files = _wanted(announced)
        if not files:
            raise InputError(f"{name}: {address} has no complete model in a known format; {by_hand}")
        say(f"{name}: downloading {size_text(sum(announced[file].size or 0 for file in files))} from {address}")
        paths = []
        for file in files:  # With `snapshot_download`, Ctrl-C would wait until its threads have downloaded all files.
            paths.append(Path(hf_hub_download(_repository(name), file, local_dir=directory)))
            if file == _CONFIG and name not in RELEASED and files[-1] in LAYOUTS:  # Check this before large downloads.
                try:
                    transformers_config(read_json(paths[-1]))
                except ValueError as error:
                    raise InputError(f"{name}: {file} describes a model that cannot be read: {error}") from None
    except InputError:
        raise
    except Exception as error:  # requests, httpx and hf_xet have no common exception type.
        raise InputError(
            f"{name}: no such file or directory, in no cache, and not downloaded from {address} ({reason(error)}); "
            f"check the name, the network and HF_TOKEN, or {by_hand}"
        ) from None
    for file, path in zip(files, paths, strict=True):
        lfs = announced[file].lfs
        if lfs is not None and sha256(path) != lfs.sha256:  # huggingface_hub compares sizes only.
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise InputError(
                f"{name}: {file} from {constants.ENDPOINT} has a wrong sha256 and was deleted; try again, and if this "
                f"fails look for a proxy that changes files, or {by_hand}"
            )
    return paths[-1].parents[len(Path(files[-1]).parts) - 1]


def reason(error: BaseException) -> str:
    """Return the first line of the original exception's message, which says more than that of huggingface_hub."""
    while error.__cause__:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
