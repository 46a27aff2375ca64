"""Released models by name, and repositories of the Hugging Face hub: from the local caches, else downloaded.

Downloads come only from the hub: fair-esm's own server announces no checksums, so a damaged file could not be detected.
huggingface_hub reads its environment variables on import, and torch is slow to import, so both are imported late.
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
"""Files of an adapter of PEFT: its settings, and its matrices in one of two formats."""
LAYOUTS = tuple(
    f"{weights}{index}" for weights in ("model.safetensors", "pytorch_model.bin") for index in (".index.json", "")
)
"""Files that hold the weights of a model, in the order in which `esmshard.model.weights.read` looks for them. A
repository that has none of them may hold the file of its authors' own code, see `authors_weights`.
"""
_CONFIG = "config.json"
_TOKENIZER = ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "added_tokens.json")
SMALL = (_CONFIG, ADAPTER_CONFIG, *_TOKENIZER, "head.safetensors", "esmshard.json", "README.md")
"""Files that are copied besides the weights: those of `transformers` and PEFT, what esmshard writes, and the card."""
_ANSWER = 10.0
"""Most seconds until the hub's first answer."""


def is_name(name: str) -> bool:
    """Return whether `fetch` takes a name: that of a released model, or OWNER/NAME, which may be a path too."""
    return name in RELEASED or is_hub_name(name)


def check(names: Collection[str], to: Path | None = None, overwrite: bool = False) -> None:
    """Check the names and outputs of a command before anything is downloaded.

    Raises:
        UsageError: names are neither in `RELEASED` nor OWNER/NAME, or outputs exist; all problems are listed.
    """
    known = f"one of {', '.join(RELEASED)}, or OWNER/NAME for a repository of the Hugging Face hub, is expected"
    problems = [f"{name}: not a released model; {known}" for name in names if not is_name(name)]
    outputs = [] if to is None else [to / name for name in names]
    if not overwrite:
        taken = filter(os.path.lexists, outputs)
        problems += [f"{path}: exists already; choose another directory or pass --overwrite" for path in taken]
    if problems:
        raise UsageError(*problems)
    for out in outputs:
        check_replaced(out, [*SMALL, "*.safetensors*", "*.bin*", "*.pth"])


def find(name: str) -> Path | None:
    """Find a model in the local caches: fair-esm's `NAME.pt` in torch hub's cache, or a complete snapshot of `main` in
    the hub's cache. For OWNER/NAME only the snapshot counts.

    Never uses the network. A cache that holds the tokenizer only, or lacks a shard, is not a model.
    """
    import torch

    file = Path(torch.hub.get_dir()) / "checkpoints" / f"{name}.pt"
    return file if name in RELEASED and file.is_file() else _snapshot(name)


def fetch(name: str, to: Path | None = None, overwrite: bool = False) -> Path:
    """Find a model in the local caches, or download it into the hub's cache.

    Args:
        name: one of `RELEASED`, or OWNER/NAME for any repository of the hub.
        to: make the directory `to/name` of plain files, and leave the caches unchanged.
        overwrite: replace `to/NAME` if it exists.

    Returns:
        A directory that `esmshard.model.weights.read` opens, or a fair-esm `.pt` file.

    Raises:
        UsageError: the name is unknown or the output exists.
        InputError: the model is not here and cannot be downloaded, the download is not what the hub announced, or the
            configuration of a repository is that of no model that can be read.
    """
    check([name], to, overwrite)
    if to is None:
        return find(name) or _download(name)
    with writing(to / name, "make room, or choose another place"), whole_directory(to / name) as work:
        if cached := _snapshot(name):
            for file in _wanted(_files(cached)):
                (work / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(cached / file, work / file)
        else:
            _download(name, work)
            shutil.rmtree(work / ".cache", ignore_errors=True)  # files of the library
    say(f"{name}: in {to / name}")
    return to / name


def repository(name: str) -> str:
    """Return OWNER/NAME on the hub for a released name; OWNER/NAME itself stays as it is."""
    return RELEASED[name].repository if name in RELEASED else name


def authors_weights(files: Collection[str]) -> str | None:
    """Return the file with the language model in a repository of files that the authors' own code reads
    (`data/weights/NAME.pth`); None if there is no such file, or more than one.

    Encoders and decoders of structures and functions, which lie beside an ESM3, are left out.
    """
    pattern = re.compile(r"data/weights/(?!\w*(?:encoder|decoder))[^/]+\.pth")
    of_models = [file for file in files if pattern.fullmatch(file)]
    return of_models[0] if len(of_models) == 1 else None


def _wanted(files: Collection[str]) -> list[str]:
    """Choose the files of a model among those of a repository, the weights last: one format, safetensors before
    pickles. The list is empty if there is no model, a shard is missing, or no configuration says what model it is.
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
        snapshot = Path(snapshot_download(repository(name), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return snapshot if _wanted(_files(snapshot)) else None


def _download(name: str, directory: Path | None = None) -> Path:
    """Download the files of a model to a directory, or to the hub's cache, and compare the announced sha256."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    address = f"{constants.ENDPOINT}/{repository(name)}"
    by_hand = "give a model's path instead of its name"
    try:
        info = HfApi().model_info(repository(name), files_metadata=True, timeout=_ANSWER)
        announced = {sibling.rfilename: sibling for sibling in info.siblings or []}
        files = _wanted(announced)
        if not files:
            raise InputError(f"{name}: {address} holds no complete model in a form that is read here; {by_hand}")
        say(f"{name}: downloading {size_text(sum(announced[file].size or 0 for file in files))} from {address}")
        paths = []
        for file in files:  # `snapshot_download` would download in threads, for whose gigabytes Ctrl-C would wait.
            paths.append(Path(hf_hub_download(repository(name), file, local_dir=directory)))
            if file == _CONFIG and name not in RELEASED and files[-1] in LAYOUTS:  # not for an adapter
                try:  # before the weights are downloaded
                    transformers_config(read_json(paths[-1]))
                except ValueError as error:
                    raise InputError(f"{name}: {file} is not that of a model that can be read: {error}") from None
    except InputError:
        raise
    except Exception as error:  # requests, httpx and hf_xet have no common exception type.
        raise InputError(
            f"{name}: no such file or directory, in no cache, and not downloaded from {address} ({reason(error)}); "
            f"check the name, the network and HF_TOKEN, or {by_hand}"
        ) from None
    for file, path in zip(files, paths, strict=True):
        lfs = announced[file].lfs
        if lfs is not None and sha256(path) != lfs.sha256:  # The library compares sizes only.
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise InputError(
                f"{name}: {file} from {constants.ENDPOINT} has not the sha256 that was announced, and it was deleted; "
                f"try again, and if it stays so look for a proxy that alters files, or {by_hand}"
            )
    return paths[-1].parents[len(Path(files[-1]).parts) - 1]


def reason(error: BaseException) -> str:
    """Return the first line of what caused an error of huggingface_hub, whose own message advises to check the
    connection, whatever failed.
    """
    while error.__cause__:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
