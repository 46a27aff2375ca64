"""Released models by name, and repositories of the Hugging Face hub: from the local caches, else downloaded.

Downloads come only from the hub: fair-esm's own server announces no checksums, so a damaged file could not be detected.
huggingface_hub reads its environment variables on import, and torch is slow to import, so both are imported late.
This file is longer than others, because what the caches must hold and what is downloaded are the same files.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from esmshard.errors import InputError, UsageError
from esmshard.files import check_replaced, is_hub_name, read_json, sha256, size_text, whole_directory
from esmshard.model.families.family_registry import FAMILIES, RELEASED, transformers_config
from esmshard.progress import say

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_CONFIG = "config.json"
_TOKENIZER = ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "added_tokens.json")
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter of PEFT: its settings, and its matrices in one of two formats."""
_CARD = "README.md"
"""The card of a repository, which may state a licence."""
_OWN = ("head.safetensors", "esmshard.json")
"""Files that esmshard writes beside the weights, if it wrote them."""
LAYOUTS = tuple(
    f"{weights}{index}" for weights in ("model.safetensors", "pytorch_model.bin") for index in (".index.json", "")
)
"""Files that hold the weights of a model, in the order in which `open_weights.read` looks for them. A repository that
has none of them may hold the file of its authors' own code, see `authors_weights`.
"""

ANSWER = 10.0
"""Most seconds until the hub's first answer."""
PATIENCE = 3.0
"""Seconds that a process waits for another process's download before it reports this."""


def check(names: Collection[str], to: Path | None = None, overwrite: bool = False) -> None:
    """Check the names and outputs of a command before anything is downloaded.

    Raises:
        UsageError: names are neither in `RELEASED` nor OWNER/NAME, or outputs exist; all problems are listed.
    """
    known = f"one of {', '.join(RELEASED)}, or OWNER/NAME for a repository of the Hugging Face hub, is expected"
    unknown = [name for name in names if name not in RELEASED and not is_hub_name(name)]
    problems = [f"{name}: not a released model; {known}" for name in unknown]
    if to is not None and not overwrite:
        taken = [to / name for name in names if os.path.lexists(to / name)]
        problems += [f"{path}: exists already; choose another directory or pass --overwrite" for path in taken]
    if problems:
        raise UsageError(*problems)
    written = [_CONFIG, ADAPTER_CONFIG, _CARD, "*.safetensors*", "*.bin*", "*.pth", *_TOKENIZER, *_OWN]
    for out in [] if to is None else [to / name for name in names]:
        check_replaced(out, written)


def find(name: str) -> Path | None:
    """Find a model in the local caches: fair-esm's `NAME.pt` in torch hub's cache, or a complete snapshot in the hub's
    cache. For OWNER/NAME only the snapshot counts.

    Never uses the network. A cache that holds the tokenizer only, or lacks a shard, is not a model.
    """
    check([name])
    if name in RELEASED and (file := _torch_hub_file(name)).is_file():
        return file
    return _snapshot(name)


def fetch(name: str, to: Path | None = None, overwrite: bool = False) -> Path:
    """Find a model in the local caches, or download it into the hub's cache. One process of a machine downloads.

    Args:
        name: one of `RELEASED`, or OWNER/NAME for any repository of the hub.
        to: make the directory `to/name` of plain files, and leave the caches unchanged.
        overwrite: replace `to/NAME` if it exists.

    Returns:
        A directory that `open_weights.read` opens, or a fair-esm `.pt` file.

    Raises:
        UsageError: the name is unknown or the output exists.
        InputError: the model is not here and cannot be downloaded, or the download is not what the hub announced, or
            the configuration of a repository is that of no model that can be read.
    """
    check([name], to, overwrite)
    if to is not None:
        return _fetch_to(name, to)
    found = find(name)
    if found:
        return found
    # The hub is asked before the lock is taken: without a network, all ranks learn this at once, not one by one.
    info = _ask(name, _not_here(name))
    with _alone(name):
        return find(name) or _download(name, info)


def _fetch_to(name: str, to: Path) -> Path:
    target = to / name
    cached = _snapshot(name)
    info = None if cached else _ask(name, f"not whole in {_hub_cache()}")
    with _one_sentence(f"{name}:", name, to), whole_directory(target) as work:
        if cached:
            for wanted in dict.fromkeys((_CONFIG, ADAPTER_CONFIG, _CARD, *_TOKENIZER, *_OWN, *_weights(cached))):
                if (cached / wanted).is_file():
                    (work / wanted).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(cached / wanted, work / wanted)
        elif info:
            _download(name, info, work)
            shutil.rmtree(work / ".cache", ignore_errors=True)  # files of the library
    say(f"{name}: in {target}")
    return target


def repository(name: str) -> str:
    """Return OWNER/NAME on the hub for a released name; OWNER/NAME itself stays as it is."""
    return RELEASED[name].repository if name in RELEASED else name


def authors_weights(files: Collection[str]) -> str | None:
    """Return the file with the language model in a repository of files that the authors' own code reads
    (`data/weights/NAME.pth`); None if there is no such file, or more than one.

    Encoders and decoders of structures and functions, which lie beside an ESM3, are left out.
    """
    pattern = re.compile(r"data/weights/(?!\w*(?:encoder|decoder))[^/]+\.pth")
    found = [file for file in files if pattern.fullmatch(file)]
    return found[0] if len(found) == 1 else None


def _adapter(files: Collection[str]) -> str | None:
    """Return the file with the matrices of an adapter of PEFT; None for a repository or directory of a whole model."""
    if ADAPTER_CONFIG not in files or any(layout in files for layout in LAYOUTS):
        return None
    return next((file for file in ADAPTERS if file in files), None)


def _not_here(name: str) -> str:
    if name in RELEASED:
        return f"neither {_torch_hub_file(name)} nor a whole copy in {_hub_cache()} is here"
    return f"no such file or directory, and no whole copy of that repository is in {_hub_cache()}"


def _torch_hub_file(name: str) -> Path:
    import torch

    return Path(torch.hub.get_dir()) / "checkpoints" / f"{name}.pt"


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(name: str) -> Path | None:
    """Find a complete snapshot in the hub's cache: the snapshot of `main`, else the newest."""
    folder = _hub_cache() / f"models--{repository(name).replace('/', '--')}"
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        main = ""
    found = [snapshot for snapshot in (folder / "snapshots").glob("*") if _weights(snapshot)]
    return max(found, key=lambda snapshot: (snapshot.name == main, snapshot.stat().st_mtime), default=None)


def _weights(directory: Path) -> list[str]:
    """Return the names of the weight files of a complete model, with the index; nothing if a file is missing."""
    layout = next((layout for layout in LAYOUTS if (directory / layout).is_file()), None)
    here = filter(Path.is_file, directory.glob("data/weights/*.pth"))
    if layout is None and (file := authors_weights([path.relative_to(directory).as_posix() for path in here])):
        return [file]
    if file := _adapter([path.name for path in directory.glob("*") if path.is_file()]):
        return [file]
    if not (directory / _CONFIG).is_file():
        return []
    if layout is None or not layout.endswith(".index.json"):
        return [layout] if layout else []
    try:
        index = read_json(directory / layout)
        shards = sorted({str(shard) for shard in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [layout, *shards] if shards and all((directory / shard).is_file() for shard in shards) else []


def _ask(name: str, tried: str) -> "ModelInfo":
    """Ask the hub for the files of a model, with their sizes and checksums."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise InputError(
            f"{name}: {tried}, and offline mode is on (HF_HUB_OFFLINE); download it where there is a network, or "
            f"{_by_hand(name)}"
        )
    with _one_sentence(f"{name}: {tried}, and", name, _hub_cache()):
        return HfApi().model_info(repository(name), files_metadata=True, timeout=ANSWER)


def _download(name: str, info: "ModelInfo", directory: Path | None = None) -> Path:
    """Download the files of a model to a directory, or to the hub's cache, and check each file."""
    from huggingface_hub import constants, hf_hub_download

    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    weights = _choose(name, siblings.keys())
    # The configuration comes last: a directory without it is never taken for a model, even after a crash.
    files = [*weights, *(file for file in (*_TOKENIZER, *_OWN) if file in siblings)]
    files += [_CARD] if _CARD in siblings and name not in RELEASED else []  # Licences of released models are known.
    by_authors = weights == [authors_weights(siblings.keys())]  # Their `config.json` is empty, or missing.
    config = ADAPTER_CONFIG if weights == [_adapter(siblings.keys())] else _CONFIG
    files += [config] if config in siblings or not by_authors else []
    place = directory or _hub_cache()
    if name not in RELEASED and not by_authors and config == _CONFIG:
        _check_has_config(name, siblings.keys())
        _check_config(name, place)
    size = sum(siblings[file].size or 0 for file in files if file in siblings)
    say(f"{name}: downloading {size_text(size)} from {constants.ENDPOINT}/{repository(name)}")
    free = shutil.disk_usage(place).free
    if size > free:
        raise InputError(
            f"{name}: needs {size_text(size)}, and {place} has {size_text(free)} left; {_elsewhere(place)}"
        )
    path = place
    # `snapshot_download` would bring the configuration first, and in a thread for whose gigabytes Ctrl-C would wait.
    for file in files:
        with _one_sentence(f"{name}: {file} did not come whole:", name, place):
            path = Path(hf_hub_download(repository(name), file, local_dir=directory))
        if file == _CARD:
            continue  # It may begin as a web page does.
        lfs = siblings[file].lfs if file in siblings else None
        _verify(name, path, lfs.sha256 if lfs else None, binary=Path(file).suffix in (".safetensors", ".bin", ".pth"))
    top = path.parents[len(Path(files[-1]).parts) - 1]
    if not _weights(top):
        raise InputError(f"{name}: {top} lacks files after the download; try again, or {_by_hand(name)}")
    if directory is None:
        say(f"{name}: in {top}")
    return top


def _check_has_config(name: str, files: Collection[str]) -> None:
    if _CONFIG not in files:
        raise InputError(f"{name}: the repository has no {_CONFIG}, which says what model it holds; {_by_hand(name)}")


def _check_config(name: str, place: Path) -> None:
    """Refuse a repository before its weights are downloaded, if its `config.json` is that of no model that can be read.

    The file is downloaded to a directory of its own: in the cache it must come last.
    """
    from huggingface_hub import hf_hub_download

    with TemporaryDirectory() as directory:
        with _one_sentence(f"{name}: {_CONFIG} did not come whole:", name, place):
            path = Path(hf_hub_download(repository(name), _CONFIG, local_dir=directory))
        _verify(name, path, None, binary=False)
        raw = read_json(path)
    try:
        transformers_config(raw)
    except ValueError as error:
        raise InputError(f"{name}: {_CONFIG} is not that of a model that can be read: {error}") from None


def _choose(name: str, files: Collection[str]) -> list[str]:
    """Choose the weight files to download: one format, and safetensors if the repository has it."""
    for layout in LAYOUTS:
        if layout in files:
            if not layout.endswith(".index.json"):
                return [layout]
            whole = Path(layout.removesuffix(".index.json"))
            shards = re.compile(rf"{whole.stem}-\d+-of-\d+{re.escape(whole.suffix)}")
            return [*sorted(filter(shards.fullmatch, files)), layout]
    if file := _adapter(files) or authors_weights(files):
        return [file]
    raise InputError(f"{name}: {repository(name)} holds no weights in a form that is read here; {_by_hand(name)}")


def _verify(name: str, path: Path, announced: str | None, *, binary: bool) -> None:
    """Compare a file with its announced sha256, and check that it is no web page. A bad file is removed."""
    from huggingface_hub import constants

    with path.open("rb") as file:
        start = file.read(512).lstrip().lower()
    digest = sha256(path) if announced else None  # The library compares sizes only.
    fault = None
    if start.startswith((b"<!doctype", b"<html")):
        fault = "is a web page; a proxy or the network's login page answered"
    elif digest != announced:
        fault = f"has sha256 {str(digest)[:12]}..., and {str(announced)[:12]}... was announced"
    elif path.suffix == ".json":
        try:
            read_json(path)
        except ValueError:
            fault = "is not JSON"
    if fault:
        _discard(path)
        raise InputError(
            f"{name}: {path.name} from {constants.ENDPOINT} {fault}, and it was deleted; try again, and if it stays "
            f"so look for a proxy that alters files, or {_by_hand(name)}"
        )
    if binary and not announced:
        say(f"{name}: {constants.ENDPOINT} announces no sha256 of {path.name}, so it could not be checked")


def _discard(path: Path) -> None:
    """Remove a file and everything that its links lead to: in the cache, the blob and the target of the blob."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let one process of a machine in at a time. The system frees the lock of a process that dies."""
    from filelock import FileLock, Timeout

    path = _hub_cache() / ".locks" / f"esmshard-{name.replace('/', '--')}.lock"
    lock = FileLock(path)
    with _one_sentence(f"{name}:", name, _hub_cache()):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            say(f"{name}: waiting for another process that downloads it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _one_sentence(what: str, name: str, place: Path) -> Iterator[None]:
    """Turn any failure into one sentence. The libraries retry by themselves if this may help."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # requests, httpx and hf_xet have no common exception type.
        raise InputError(f"{what} {_reason(error, name, place)}") from None


def _reason(error: BaseException, name: str, place: Path) -> str:
    """Describe what went wrong, and the fix."""
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, RepositoryNotFoundError

    chain = [error]  # The library advises to check the connection after every error; the cause is further down.
    while chain[-1].__cause__:
        chain.append(chain[-1].__cause__)
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{place} has no space left; {_elsewhere(place)}"
        if isinstance(link, OSError) and link.filename:  # The error is about a file; network errors have no file name.
            return f"{link.filename} cannot be written ({str(link.strerror).lower()}); {_elsewhere(place)}"
    again = f"try again, or {_by_hand(name)}"
    if any(isinstance(link, RepositoryNotFoundError) for link in chain):
        return f"{constants.ENDPOINT} has no repository {repository(name)}, or asks for a token (HF_TOKEN); {again}"
    if any(isinstance(link, (FileMetadataError, json.JSONDecodeError, UnicodeDecodeError)) for link in chain):
        return (
            f"{constants.ENDPOINT} does not answer as a Hugging Face hub does (a proxy or the network's login page may "
            f"answer for it; HF_ENDPOINT says where the hub is); {again}"
        )
    said = next((str(link).strip().splitlines()[0] for link in reversed(chain) if str(link).strip()), "no reason given")
    return f"{constants.ENDPOINT} could not be reached or broke off ({said}); {again}"


def _elsewhere(place: Path) -> str:
    return "set HF_HOME to another directory" if place == _hub_cache() else "choose another directory"


def _by_hand(name: str) -> str:
    theirs = any(name in family.released and "fair-esm" in family.pickles for family in FAMILIES.values())
    file = f"put fair-esm's {name}.pt at {_torch_hub_file(name)}, or " if theirs else ""
    return f"{file}give a model's path instead of its name"
