"""Weights from files, directories, the Hugging Face hub or random draws; models with these weights; and the identity of
models, which `esmshard.json` and checkpoints record as sha256.

`Weights` holds tensors by our names and reads one tensor at a time, so that no second copy of a model is needed. Every
key of a file must be known to the family (`esmshard.model.families`).
"""

import hashlib
import json
import math
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from esmshard.devices import chosen_device
from esmshard.errors import InputError, UsageError, reading
from esmshard.io import remote
from esmshard.io.paths import found_place, read_json, remembered_sha256, shipped
from esmshard.model import adapters, hub, weight_reader
from esmshard.model.config import SHIPPED, ModelConfig
from esmshard.model.families import family_registry
from esmshard.model.families.family import Opened, is_computed
from esmshard.model.families.family_registry import SIZES
from esmshard.model.trunk import Trunk
from esmshard.model.weight_reader import ALL, WeightReader
from esmshard.progress import say
from esmshard.vocab import Chains

ABOUT = "esmshard.json"
"""The file in a directory of esmshard's weights: their sha256, and recipe, data and base of a fine-tuned model."""


@dataclass(frozen=True)
class Weights:
    """The tensors of one model. A tensor is read from disk when it is used."""

    config: ModelConfig
    source: str
    """Source of the weights, for messages."""
    read: Mapping[str, WeightReader]
    """Readers by our names. The names of a fine-tuned task head begin with `head.`."""
    absent: tuple[str, ...] = ()
    """Parts that the file lacks and that were drawn at random: `lm_head`, `contact_head`."""
    notices: tuple[str, ...] = ()
    """Sentences about parts of the files that are ignored, such as the head `classifier` of `transformers`."""
    files: tuple[Path, ...] = ()
    """The weight files, for `identity` and `altered`; none for fresh weights."""
    seed: int | None = None
    """Seed of fresh weights; None for weights from files."""
    made: str = ""
    """Digest of the inputs of an adapter that are not in files: the scales, and the seed of a random base."""

    @property
    def unlearned(self) -> tuple[str, ...]:
        """Parts with random values; of fresh weights, the parts that most tasks do not train."""
        return self.absent if self.seed is None else ("lm_head", "contact_head")

    def lacking(self, *parts: str) -> list[str]:
        """Return a sentence about each of these parts that the file lacks, for a caller that uses the parts."""
        return [f"{self.source}: has no {part}; its output is random" for part in self.absent if part in parts]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, ALL)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Read some rows of a tensor. Raises `InputError` if a value is not finite."""
        tensor = self.read[tied(self.config).get(name, name)](rows)
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"{self.source}: {name} holds a value that is not finite; the run that made it diverged, or the file "
                "is damaged: take an earlier checkpoint, or copy or download it again"
            )
        return tensor

    @property
    def head(self) -> dict[str, WeightReader]:
        """Readers of a fine-tuned task head, without the prefix `head.`; empty without a head."""
        return {name.removeprefix("head."): reader for name, reader in self.read.items() if name.startswith("head.")}

    def head_state(self) -> dict[str, torch.Tensor]:
        """Read the tensors of the task head. `InputError` if a value is not finite."""
        return {name: self[f"head.{name}"] for name in self.head}


@lru_cache(maxsize=8)  # A large model takes tenths of a second, and the same directory is opened many times.
def shapes(config: ModelConfig) -> Mapping[str, torch.Size]:
    """Return the shapes of all tensors and buffers of a model by name, without memory for them."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in family_registry.build(config).state_dict().items()}


def tied(config: ModelConfig) -> Mapping[str, str]:
    """Return the names of tied tensors, each with the name under which the tensor is stored."""
    return family_registry.family_of(config).trunk.tied


def stored_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that files and checkpoints hold. A tied tensor is stored once."""
    return {name: shape for name, shape in shapes(config).items() if name not in tied(config)}


def fresh(config: ModelConfig, seed: int) -> Weights:
    """Make new random weights, with the distributions of `Family.initial`. Each tensor depends only on the seed and the
    name, so that every rank can draw its part.
    """
    return Weights(config, f"fresh weights, seed {seed}", drawn(config, shapes(config), seed), seed=seed)


def drawn(config: ModelConfig, wanted: Mapping[str, torch.Size], seed: int) -> dict[str, WeightReader]:
    """Return readers of random values, as in `fresh`. In a LoRA, A is Kaiming-uniform as in PEFT and B is 0."""

    @lru_cache(maxsize=1)  # Successive calls read rows of the same tensor.
    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_(a=sqrt(5))
            return torch.rand(shape, generator=generator) * 2 * bound - bound
        return family_registry.family_of(config).initial(config, name, shape, generator)

    def rows(name: str, rows: slice) -> torch.Tensor:
        return draw(name, wanted[name])[rows]

    return {name: WeightReader(shape, partial(rows, name)) for name, shape in wanted.items()}


def place(model: str | Path) -> Path:
    """Return the path of a shipped model, of the model of a run, of a copy from a bucket, or else this path."""
    path = _copy_of(url) if (url := remote.address(model)) is not None else Path(model).expanduser()
    if str(model) in SHIPPED and not path.exists():
        return shipped("data") / str(model) / "model"
    model_of_run = path / "model"
    return model_of_run if not _has_config(path) and _has_config(model_of_run) else path


@cache
def _copy_of(url: str) -> Path:
    """Return the local copy of a model in a bucket. Of a run only the model is copied."""
    model_of_run = f"{url}/model"
    is_run = not remote.exists(f"{url}/config.json") and remote.exists(f"{model_of_run}/config.json")
    return remote.local(model_of_run if is_run else url)


def directory(model: str | Path) -> Path:
    """Return the result of `place`, or for a repository of the hub the copy in the cache. Downloads a missing copy.
    Raises `InputError` if the download fails.
    """
    path = place(model)
    return hub.fetch(str(model)) if not path.exists() and hub.is_name(str(model)) else path


def is_far(model: str) -> bool:
    """Return whether `read` would use the network for this model. This function does not use the network."""
    if remote.address(model) is not None:
        return True
    return hub.is_name(model) and not place(model).exists() and hub.find(model) is None


def read(model: str) -> Weights:
    """Open the weights of a model. Raises `InputError` if the model cannot be read.

    Args:
        model: a file of the authors' code; a directory in `transformers`' layout, of a run, or of an adapter; a
            released name, or OWNER/NAME of the Hugging Face hub; the address of a file or directory in a bucket;
            `starter` or `demo`. See docs/models.md.
    """
    path = place(model)
    if path.is_dir():
        return _read_directory(path)
    if path.is_file():
        return _read_file(path)
    if hub.is_name(model):
        fetched = read(str(hub.fetch(model)))
        name = family_registry.released_name(model)
        if name is None:
            return fetched
        if fetched.config != SIZES[name]:
            raise InputError(f"{fetched.source}: has not the shape of {name}; download it again")
        return replace(fetched, config=SIZES[name])  # The files do not tell the window.
    if model in SIZES:
        raise InputError(f"{model}: a size without trained weights; give a trained model's path, or init: random")
    nearest = ", ".join(get_close_matches(model, SIZES, n=5, cutoff=0.0))
    raise InputError(
        f"{model}: no such file or directory, no OWNER/NAME on the Hugging Face hub, and no name of a model (the "
        f"nearest are {nearest}); `esmshard finetune` writes the model of a run to OUT/model"
    )


def _has_config(path: Path) -> bool:
    return (path / "config.json").is_file()


def _read_directory(path: Path) -> Weights:
    if adapters.is_adapter(path):
        return _read_adapter(path)
    is_run = (path / "checkpoints").is_dir()
    if not _has_config(path) and (is_run or re.fullmatch(r"step_\d+", path.name)):
        out = (path if is_run else path.absolute().parents[1]) / "model"
        command = shlex.join(["esmshard", "consolidate", str(path), "-o", str(out)])
        raise InputError(f"{path}: holds no model yet; make a model of it with `{command}`, and give {out}")
    published = path / "data" / "weights"
    if published.is_dir() and (not _has_config(path) or weight_reader.read_json(path / "config.json") == {}):
        # An ESM3 or an ESM-C of 2024-12.
        file = hub.authors_weights([f"data/weights/{file.name}" for file in published.iterdir()])
        if file is None:
            raise InputError(f"{published}: holds no or several language models; give the path of a .pth file")
        return _read_file(path / file)
    return _read_transformers(path)


def _weight_files(path: Path) -> list[Path]:
    """Return the files of one model, safetensors before pickles. Large models were released in several files."""
    for file in (path / name for name in hub.LAYOUTS):
        if file.is_file() and file.name.endswith(".index.json"):
            with reading(f"{file}", "copy or download the model again"):
                return sorted({path / Path(shard).name for shard in read_json(file)["weight_map"].values()})
        if file.is_file():
            return [file]
    raise InputError(f"{path}: holds no model.safetensors and no pytorch_model.bin; it is not a complete model")


def _read_transformers(path: Path, single: Path | None = None) -> Weights:
    """Read a directory, or a single file of the directory."""
    try:
        config = family_registry.transformers_config(weight_reader.read_json(path / "config.json"))
    except ValueError as error:
        raise InputError(f"{path / 'config.json'}: not a model that can be read: {error}") from None
    files = _weight_files(path) if single is None else [single]
    source = str(single or path)
    readers = {key: reader for file in files for key, reader in weight_reader.read_tensors(file).items()}
    used = {key: reader for key, reader in readers.items() if not key.startswith("classifier.")}
    notices = (f"{source}: its classifier is of another task and left out",) if len(used) < len(readers) else ()
    tensors = family_registry.family_of(config).tensors(used, config)
    return _complete(Opened(config, tensors, tuple(files)), source, notices)


def _read_file(path: Path) -> Weights:
    """Read one file: a part of a directory in `transformers`' layout, or a file of any authors' code."""
    if path.suffix == ".safetensors" or (path.suffix == ".bin" and _has_config(path.parent)):
        return _read_transformers(path.parent, path)
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise InputError(
            f"{path}: not a model; expected a fair-esm .pt file, a .safetensors file with its config.json beside it, "
            "or a directory in transformers' layout"
        )
    try:
        opened = family_registry.read_pickle(weight_reader.read_pickle(path), path)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: not a model that can be read: {error}") from None
    if opened is None:
        raise InputError(
            f"{path}: not a model file of any authors' code; a state dict has no sizes: load it into its class of "
            "transformers, and give the directory that save_pretrained writes"
        )
    return _complete(opened, str(path))


def _complete(opened: Opened, source: str, notices: tuple[str, ...] = ()) -> Weights:
    """Check all keys outside `head.`. A missing LM head or contact regression is listed and drawn at random."""
    config, readers, files = opened
    for name, first in tied(config).items():
        second, shared = readers.pop(name, None), readers.get(first)
        if second is None or shared is None or second.shape != shared.shape:
            continue
        if not torch.equal(second().nan_to_num(), shared().nan_to_num()):  # The logits would differ from the authors'.
            raise InputError(f"{source}: {name} is not {first}, and the two are one tensor in such a model")
    wanted = stored_shapes(config)
    if unexpected := sorted(name for name in readers.keys() - wanted.keys() if not name.startswith("head.")):
        raise InputError(f"{source}: {some(unexpected)} do not belong to a model of {config.n_layers} such layers")
    missing = sorted(wanted.keys() - readers.keys())
    parts = ("lm_head", "contact_head")
    absent = tuple(part for part in parts if not any(name.startswith(f"{part}.") for name in readers))
    if needed := [name for name in missing if not is_computed(name) and name.split(".")[0] not in absent]:
        raise InputError(f"{source}: {some(needed)} are missing; the file is not a complete model")
    for name, size in wanted.items():
        if name in readers and readers[name].shape != size:
            raise InputError(f"{source}: {name} is {list(readers[name].shape)}, {list(size)} was expected")
    tensors = readers | drawn(config, {name: wanted[name] for name in missing}, seed=0)
    return Weights(config, source, tensors, absent, notices, files)


def some(names: Sequence[str]) -> str:
    """Name the first three tensors, and count the others."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more tensor{'s' if more > 1 else ''}" if more > 0 else "")


def _read_adapter(path: Path) -> Weights:
    """Open the base of an adapter, with the trained tensors in place of the base's.

    `adapter_config.json` has a name of the base for `read`. A path is relative to the working directory, as for PEFT,
    or to the adapter. A base that `esmshard.json` records is compared by hash.
    """
    settings = adapters.read_settings(path)
    about = weight_reader.read_json(path / ABOUT) if (path / ABOUT).is_file() else {}
    name = settings["base_model_name_or_path"]
    with reading(f"{path / ABOUT}", "consolidate the run again"):
        recorded, unlearned = about.get("base"), about.get("unlearned")
        seed = recorded["seed"] if recorded else None
        config = family_registry.recorded_config(recorded["config"]) if recorded else None
    if config is not None and seed is not None:
        base = fresh(config, seed)
    else:
        fix = f"put the base there, or write its place as base_model_name_or_path into {path / hub.ADAPTER_CONFIG}"
        places = (found_place(name, path), name, str(path / name))
        base_name = next((text for text in places if place(text).exists()), family_registry.released_name(name) or name)
        if not place(base_name).exists() and not hub.is_name(base_name):
            raise InputError(f"{path}: adapts {name}, which does not exist; {fix}")
        if directory(base_name).resolve() == path.resolve():
            raise InputError(f"{path}: is named as its own base model; {fix}")
        base = read(base_name)
        if recorded:
            check(identity(base, name), recorded, str(path), fix)
    return adapters.read(path, settings, base, base.unlearned if unlearned is None else unlearned)


def joining(weights: Weights, chains: Chains | None, where: str) -> Weights:
    """Set how a model joins several chains. None keeps the setting of the model's file or family.

    Raises `UsageError` with `where`, the option or key, if the model cannot join chains like this.
    """
    if chains is None:
        return weights
    try:
        return replace(weights, config=replace(weights.config, chains=chains))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def build(weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> Trunk:
    """Build a model with these weights on one device, without a warning about missing parts."""
    with torch.device("meta"):
        trunk = family_registry.build(weights.config)
    trunk.to(dtype).to_empty(device=device)
    trunk.tie_weights()
    with torch.no_grad():
        for name, tensor in trunk.state_dict().items():
            tensor.copy_(weights[name])
    return trunk


def load_model(model: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Trunk:
    """Load a language model on one device, in evaluation mode. Warns if the file has no LM head or no contact
    regression, so that logits or contacts are random, and if a file is not the file that `esmshard.json` records.

    Args:
        model: see `read`.
        device: by default the first GPU, else the CPU.
        dtype: type of weights and arithmetic. Rotary angles and contact maps are always fp32.
    """
    weights = read(model)
    changed = altered(weights.files)
    for notice in [*weights.lacking("lm_head", "contact_head"), *weights.notices, *([changed] if changed else [])]:
        warnings.warn(notice, stacklevel=2)
    return build(weights, chosen_device(device), dtype).eval()


def record(digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of `esmshard.json` about weight files, from their sha256 in the order of writing."""
    joint_digest = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    return {"weights_sha256": joint_digest, "files": dict(digests)}


def altered(files: Sequence[Path]) -> str | None:
    """Describe in one sentence a weight file that differs from the record; None if no file differs. Files without a
    record in their directory, such as files of released models, are not checked.
    """
    for folder, about in _records(files):
        recorded = about.get("files", {})
        for file in files if recorded else ():
            if file.parent == folder and recorded.get(file.name) != remembered_sha256(file):
                return (
                    f"{file}: is not the file that {folder / ABOUT} records (its sha256 is another), and the model may "
                    "have other outputs; copy it again, or consolidate the run again"
                )
    return None


def report_altered(files: Sequence[Path]) -> None:
    """Write the sentence of `altered` to stderr."""
    if sentence := altered(files):
        say(sentence)


def record_of(files: Sequence[Path]) -> dict[str, Any]:
    """Return the `esmshard.json` of the weight files of a fine-tuned model; empty for files of other programs."""
    return next((about for _, about in _records(files) if "recipe" in about), {})


def _records(files: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each directory of weight files with its record. Damaged records are left out."""
    for folder in dict.fromkeys(file.parent for file in files):
        try:
            about = read_json(folder / ABOUT)
        except (OSError, ValueError):
            continue
        if isinstance(about, dict):
            yield folder, about


def identity(weights: Weights, name: str) -> dict[str, Any]:
    """Return the identity of a model, as checkpoints of `adapt.method` lora and head record it for their frozen base.

    Fresh weights follow from architecture and seed. Other weights have the size and sha256 of each file. `name` is the
    name of the model for `read`.
    """
    files: dict[str, Any] = {}
    for file in weights.files:
        # An adapter on an adapter has two files of the same name.
        key = file.name if file.name not in files else f"{len(files)}/{file.name}"
        files[key] = {"bytes": file.stat().st_size, "sha256": remembered_sha256(file)}
    made = {"made": weights.made} if weights.made else {}
    return {"name": name, "config": weights.config.recorded(), "seed": weights.seed, "files": files} | made


def model_hash(weights: Weights) -> str:
    """Return the sha256 of architecture and weights in hexadecimal digits. Names of files do not count."""
    return hashlib.sha256(json.dumps(_model_of(identity(weights, "")), sort_keys=True).encode()).hexdigest()


def check(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str, fix: str = "give the model that it was trained on"
) -> None:
    """Raise `InputError` if the identity `now` is of another model than the recorded identity `before`. Name and place
    of the model may differ. `where` is the checkpoint with the record, and `fix` the advice for the message.
    """
    present, expected = _model_of(now), _model_of(before)
    if wrong := sorted(key for key in present.keys() | expected.keys() if present.get(key) != expected.get(key)):
        hashes = ", ".join(f"sha256 of {name}: {entry['sha256']}" for name, entry in before["files"].items())
        raise InputError(
            f"{where}: was trained on top of {before['name']}, and {now['name']} is another model (other "
            f"{', '.join(wrong)}); {fix}{hashes and f' ({hashes})'}"
        )


def _model_of(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity without names of files, window and chains, which do not change the model."""
    model = {key: known[key] for key in ("seed", "made") if key in known}
    model["files"] = sorted(str(entry["sha256"]) for entry in known["files"].values())
    return model | {"config": {key: value for key, value in known["config"].items() if key not in ("window", "chains")}}
