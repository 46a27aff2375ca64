"""Reads weights from files, directories or the Hugging Face hub, or makes random weights. Builds models with weights.
Computes the identity of a model, which `esmshard.json` and checkpoints store.

The class `Weights` reads one tensor at a time by name, so memory never holds a second copy of a model. Each key
of a file must belong to a tensor of the model's family (`esmshard.model.families`).
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
"""The file that esmshard writes next to weights. It has the sha256 of the weights, and the recipe of the run."""


@dataclass(frozen=True)
class Weights:
    """The tensors of one model. Each tensor is read from disk only when this tensor is used."""

    config: ModelConfig
    source: str
    """Where the weights come from, for messages: a path, or the words `fresh weights, seed N`."""
    read: Mapping[str, WeightReader]
    """The reader of each tensor, by esmshard's name. The tensors of a fine-tuned task head have names `head.*`."""
    absent: tuple[str, ...] = ()
    """The parts `lm_head` and `contact_head`, if the files lack them. The values of a missing part are random."""
    notices: tuple[str, ...] = ()
    """Sentences about parts of the files that are ignored, such as the head `classifier` of `transformers`."""
    files: tuple[Path, ...] = ()
    """The weight files, for the functions `identity` and `altered`; empty for new random weights."""
    seed: int | None = None
    """The random seed of new weights; None for weights from files."""
    made: str = ""
    """For an adapter, a hash of what the weight files lack: the LoRA scales, and the seed of a random base model."""

    @property
    def unlearned(self) -> tuple[str, ...]:
        """The parts `lm_head` and `contact_head` if their values are random. Most tasks do not train these parts."""
        return self.absent if self.seed is None else ("lm_head", "contact_head")

    def lacking(self, *parts: str) -> list[str]:
        """Return a sentence for each part of the model that is in `parts` (the needed parts) but not in the files."""
        return [f"{self.source}: has no {part}; its output is random" for part in self.absent if part in parts]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, ALL)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return the rows `rows` of the tensor `name`. Raises `InputError` if a value in them is not finite."""
        tensor = self.read[tied(self.config).get(name, name)](rows)
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"{self.source}: {name} holds a value that is not finite; the run that made it diverged, or the file "
                "is damaged: take an earlier checkpoint, or copy or download it again"
            )
        return tensor

    @property
    def head(self) -> dict[str, WeightReader]:
        """The readers of the task head's tensors, by name without the prefix `head.`; empty without a task head."""
        return {name.removeprefix("head."): reader for name, reader in self.read.items() if name.startswith("head.")}

    def head_state(self) -> dict[str, torch.Tensor]:
        """Read the tensors of the task head, by name. Raises `InputError` if a value is not finite."""
        return {name: self[f"head.{name}"] for name in self.head}


@lru_cache(maxsize=8)  # A call takes tenths of a second for a large model, and the same model is opened many times.
def shapes(config: ModelConfig) -> Mapping[str, torch.Size]:
    """Return the shapes of all parameters and buffers of a model, by name, without memory for their values."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in family_registry.build(config).state_dict().items()}


def tied(config: ModelConfig) -> Mapping[str, str]:
    """Return `Trunk.tied`: for each tensor with two names, the second name mapped to the name that files use."""
    return family_registry.family_of(config).trunk.tied


def stored_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in files and checkpoints, by name. A tensor with two names is stored once."""
    return {name: shape for name, shape in shapes(config).items() if name not in tied(config)}


def fresh(config: ModelConfig, seed: int) -> Weights:
    """Make new random weights, with the distributions of `Family.initial`. The values of a tensor depend only on the
    seed and the tensor's name and shape, so each rank can compute its own rows.
    """
    return Weights(config, f"fresh weights, seed {seed}", drawn(config, shapes(config), seed), seed=seed)


def drawn(config: ModelConfig, wanted: Mapping[str, torch.Size], seed: int) -> dict[str, WeightReader]:
    """Return readers of random tensors with the shapes `wanted`. LoRA A is Kaiming-uniform, and B is 0, as in PEFT."""

    @lru_cache(maxsize=1)  # Successive calls read rows of the same tensor.
    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])  # as kaiming_uniform_(a=sqrt(5))
            return torch.rand(shape, generator=generator) * 2 * bound - bound
        return family_registry.family_of(config).initial(config, name, shape, generator)

    def rows(name: str, rows: slice) -> torch.Tensor:
        return draw(name, wanted[name])[rows]

    return {name: WeightReader(shape, partial(rows, name)) for name, shape in wanted.items()}


def place(model: str | Path) -> Path:
    """Return the local path of a model: its directory in the package (`SHIPPED`), the directory `model` of a run, the
    copy of a model from a cloud bucket, or simply `model`, if `model` is the path of a model.
    """
    path = _copy_of(url) if (url := remote.address(model)) is not None else Path(model).expanduser()
    if str(model) in SHIPPED and not path.exists():
        return shipped("data") / str(model) / "model"
    model_of_run = path / "model"
    return model_of_run if not _has_config(path) and _has_config(model_of_run) else path


@cache
def _copy_of(url: str) -> Path:
    """Copy a model from a cloud bucket, and return the path of the copy. Of a run, copy only the directory `model`."""
    model_of_run = f"{url}/model"
    is_run = not remote.exists(f"{url}/config.json") and remote.exists(f"{model_of_run}/config.json")
    return remote.local(model_of_run if is_run else url)


def directory(model: str | Path) -> Path:
    """Return the local path of a model from `place`. If this path does not exist and `model` is a name on the hub,
    return the path of a copy in the cache, after a download if necessary. Raises `InputError` if the download fails.
    """
    path = place(model)
    return hub.fetch(str(model)) if not path.exists() and hub.is_name(str(model)) else path


def is_far(model: str) -> bool:
    """Return whether the function `read` would use the network for this model. `is_far` itself uses no network."""
    if remote.address(model) is not None:
        return True
    return hub.is_name(model) and not place(model).exists() and hub.find(model) is None


def read(model: str) -> Weights:
    """Open the weights of a model. Raises `InputError` if the model cannot be read.

    Args:
        model: the path of a file for the authors' code, of a directory in `transformers`' layout, of a run, or of an
            adapter. Or the name of a released model, OWNER/NAME on the Hugging Face hub, `starter` or `demo`. Or the
            address of a file or directory in a bucket. See docs/models.md.
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
            raise InputError(f"{fetched.source}: its sizes are not those of {name}; download it again")
        return replace(fetched, config=SIZES[name])  # Released files do not contain the window.
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
        # The directory has an ESM3 model, or an ESM-C model in the layout of 2024-12.
        file = hub.authors_weights([f"data/weights/{file.name}" for file in published.iterdir()])
        if file is None:
            raise InputError(f"{published}: holds no or several language models; give the path of a .pth file")
        return _read_file(path / file)
    return _read_transformers(path)


def _weight_files(path: Path) -> list[Path]:
    """Return the paths of the weight files in a model directory: pickle files only if there is no safetensors file."""
    for file in (path / name for name in hub.LAYOUTS):
        if file.is_file() and file.name.endswith(".index.json"):
            with reading(f"{file}", "copy or download the model again"):
                return sorted({path / Path(shard).name for shard in read_json(file)["weight_map"].values()})
        if file.is_file():
            return [file]
    raise InputError(f"{path}: holds no model.safetensors and no pytorch_model.bin; it is not a complete model")


def _read_transformers(path: Path, single: Path | None = None) -> Weights:
    """Open the weights of a directory in `transformers`' layout, or only the file `single` of this directory."""
    try:
        config = family_registry.transformers_config(weight_reader.read_json(path / "config.json"))
    except ValueError as error:
        raise InputError(f"{path / 'config.json'}: not a model that can be read: {error}") from None
    files = _weight_files(path) if single is None else [single]
    source = str(single or path)
    readers = {key: reader for file in files for key, reader in weight_reader.read_tensors(file).items()}
    used = {key: reader for key, reader in readers.items() if not key.startswith("classifier.")}
    has_classifier = len(used) < len(readers)
    notices = (f"{source}: its classifier belongs to another task and is ignored",) if has_classifier else ()
    tensors = family_registry.family_of(config).tensors(used, config)
    return _complete(Opened(config, tensors, tuple(files)), source, notices)


def _read_file(path: Path) -> Weights:
    """Open one weight file: a file of a directory in `transformers`' layout, or a file for any authors' code."""
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
    """Check names and shapes of all tensors except `head.*`. A missing LM head or contact regression is random."""
    config, readers, files = opened
    for name, first in tied(config).items():
        second, shared = readers.pop(name, None), readers.get(first)
        if second is None or shared is None or second.shape != shared.shape:
            continue
        if not torch.equal(second().nan_to_num(), shared().nan_to_num()):  # Logits would differ from the authors' code.
            raise InputError(f"{source}: {name} differs from {first}, but such a model shares one tensor for both")
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
    """Return a text for messages with the first three names and the number of all further tensors."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more tensor{'s' if more > 1 else ''}" if more > 0 else "")


def _read_adapter(path: Path) -> Weights:
    """Open an adapter: return the weights of the base model, changed by the adapter's tensors.

    `adapter_config.json` has the name of the base model. If the name is a path, this path is relative to the working
    directory, as for PEFT, or to the adapter. If `esmshard.json` has the sha256 of the base model, it is checked.
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
    """Return the weights for a model that joins chains with the settings `chains`. None keeps the model's settings.

    Raises `UsageError` if the model cannot join chains like this. The message begins with `where`, the option or key.
    """
    if chains is None:
        return weights
    try:
        return replace(weights, config=replace(weights.config, chains=chains))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def build(weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> Trunk:
    """Build a model with these weights on one device. Only `load_model` warns about missing parts of the model."""
    with torch.device("meta"):
        trunk = family_registry.build(weights.config)
    trunk.to(dtype).to_empty(device=device)
    trunk.tie_weights()
    with torch.no_grad():
        for name, tensor in trunk.state_dict().items():
            tensor.copy_(weights[name])
    return trunk


def load_model(model: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Trunk:
    """Load a language model on one device, in evaluation mode. Warns about a missing LM head or contact regression
    (random outputs), about ignored parts of files, and about a weight file whose sha256 differs from `esmshard.json`.

    Args:
        model: see `read`.
        device: the device; by default the first GPU, or the CPU without a GPU.
        dtype: the type of weights and arithmetic. Rotary angles and contact maps are always fp32.
    """
    weights = read(model)
    changed = altered(weights.files)
    for notice in [*weights.lacking("lm_head", "contact_head"), *weights.notices, *([changed] if changed else [])]:
        warnings.warn(notice, stacklevel=2)
    return build(weights, chosen_device(device), dtype).eval()


def record(digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries about weight files in `esmshard.json`, from the sha256 of each file in order of writing."""
    joint_digest = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    return {"weights_sha256": joint_digest, "files": dict(digests)}


def altered(files: Sequence[Path]) -> str | None:
    """Return a sentence about the first weight file whose sha256 differs from `esmshard.json`; None if no file differs.
    Files without `esmshard.json` in their directory, such as files of released models, are not checked.
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
    """Print to stderr the sentence that the function `altered` returns for a weight file that has changed."""
    if sentence := altered(files):
        say(sentence)


def record_of(files: Sequence[Path]) -> dict[str, Any]:
    """Return the content of `esmshard.json` next to the weight files of a fine-tuned model; empty for other weights."""
    return next((about for _, about in _records(files) if "recipe" in about), {})


def _records(files: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each directory of weight files with the content of its `esmshard.json`, if this file can be read."""
    for folder in dict.fromkeys(file.parent for file in files):
        try:
            about = read_json(folder / ABOUT)
        except (OSError, ValueError):
            continue
        if isinstance(about, dict):
            yield folder, about


def identity(weights: Weights, name: str) -> dict[str, Any]:
    """Return the identity of a model: a dictionary with the architecture, the seed of new random weights, and the size
    and sha256 of each weight file.

    With `adapt.method` lora or head, checkpoints store the identity of the base model. `name` is the model for `read`.
    """
    files: dict[str, Any] = {}
    for file in weights.files:
        # If the base of an adapter is an adapter too, two files have the same name.
        key = file.name if file.name not in files else f"{len(files)}/{file.name}"
        files[key] = {"bytes": file.stat().st_size, "sha256": remembered_sha256(file)}
    made = {"made": weights.made} if weights.made else {}
    return {"name": name, "config": weights.config.recorded(), "seed": weights.seed, "files": files} | made


def model_hash(weights: Weights) -> str:
    """Return a sha256 of architecture and weights in hexadecimal digits. File names do not influence the result."""
    return hashlib.sha256(json.dumps(_model_of(identity(weights, "")), sort_keys=True).encode()).hexdigest()


def check(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str, fix: str = "give the model that it was trained on"
) -> None:
    """Raise `InputError` if the identities `now` and `before` belong to different models. Names and paths may differ.
    `where` is the checkpoint that stores `before`, and `fix` is the advice in the message.
    """
    present, expected = _model_of(now), _model_of(before)
    if wrong := sorted(key for key in present.keys() | expected.keys() if present.get(key) != expected.get(key)):
        hashes = ", ".join(f"sha256 of {name}: {entry['sha256']}" for name, entry in before["files"].items())
        raise InputError(
            f"{where}: was trained on top of {before['name']}, and {now['name']} is another model (other "
            f"{', '.join(wrong)}); {fix}{hashes and f' ({hashes})'}"
        )


def _model_of(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity without file names, window and chains, because these do not change the tensors."""
    model = {key: full[key] for key in ("seed", "made") if key in full}
    model["files"] = sorted(str(entry["sha256"]) for entry in full["files"].values())
    config = {key: value for key, value in full["config"].items() if key not in ("window", "chains")}
    return model | {"config": config}
