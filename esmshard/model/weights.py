"""Reads weights from files, directories or the Hugging Face hub, or makes random weights. Builds models with weights,
and computes the identity of a model, which `esmshard.json` and checkpoints store.
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
"""The file next to weights in which esmshard records their sha256 and the recipe of the run."""


@dataclass(frozen=True)
class Weights:
    """The tensors of one model. A tensor is read from disk when it is used, so memory has no second copy of a model."""

    config: ModelConfig
    source: str
    """The origin of the weights in messages: a path, or `fresh weights, seed N`."""
    read: Mapping[str, WeightReader]
    """The reader of each tensor, by esmshard's name. The tensors of a fine-tuned task head are named `head.*`."""
    absent: tuple[str, ...] = ()
    """The model parts (`lm_head`, `contact_head`) that the files lack, or that were never trained. Their values are
    random."""
    notices: tuple[str, ...] = ()
    """Sentences about ignored parts of the files, such as the `classifier` of `transformers`."""
    files: tuple[Path, ...] = ()
    """The weight files; empty for new random weights."""
    seed: int | None = None
    """The random seed of new weights; None for weights from files."""
    made: str = ""
    """For an adapter, a hash of what its weight files lack: the LoRA scales, and the seed of a random base model."""

    @property
    def unlearned(self) -> tuple[str, ...]:
        """The model parts (`lm_head`, `contact_head`) whose values are random."""
        return self.absent if self.seed is None else ("lm_head", "contact_head")

    @property
    def origin(self) -> str:
        """A text that differs for other weights: the hashes of the files, or the shape and the seed of new weights."""
        files = [remembered_sha256(file) for file in self.files]
        return f"{self.source} {self.config} {self.seed} {self.made} {' '.join(files)}"

    def lacking(self, *parts: str) -> list[str]:
        """Return a warning for each model part in `parts` that the files lack, although such models have it."""
        absent = () if self.config.only_represents else self.absent
        return [f"{self.source}: has no {part}; its output is random" for part in absent if part in parts]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, ALL)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Read rows of the tensor `name`. Raises `InputError` if a value is not finite."""
        tensor = self.read[tied(self.config).get(name, name)](rows)
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"{self.source}: {name} holds a value that is not finite; if the training diverged use an earlier "
                "checkpoint, and otherwise copy or download the file again"
            )
        return tensor

    @property
    def head(self) -> dict[str, WeightReader]:
        """The readers of the task head's tensors, by name without `head.`; empty without a task head."""
        return {name.removeprefix("head."): reader for name, reader in self.read.items() if name.startswith("head.")}

    def head_state(self) -> dict[str, torch.Tensor]:
        """Read the task head's tensors, by name. Raises `InputError` if a value is not finite."""
        return {name: self[f"head.{name}"] for name in self.head}


@lru_cache(maxsize=8)  # A call takes tenths of a second for a large model.
def shapes(config: ModelConfig) -> Mapping[str, torch.Size]:
    """Return the shapes of a model's parameters and buffers, by name, without memory for their values."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in family_registry.build(config).state_dict().items()}


def tied(config: ModelConfig) -> Mapping[str, str]:
    """Return the dictionary `Trunk.tied` of a model."""
    return family_registry.family_of(config).trunk.tied


def stored_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in files and checkpoints, by name. A tensor with two names is listed once."""
    return {name: shape for name, shape in shapes(config).items() if name not in tied(config)}


def fresh(config: ModelConfig, seed: int) -> Weights:
    """Make new random weights with `Family.initial`. A tensor's values depend only on the seed and on the tensor's name
    and shape, so each rank can make its own rows.
    """
    return Weights(config, f"fresh weights, seed {seed}", drawn(config, shapes(config), seed), seed=seed)


def drawn(config: ModelConfig, wanted: Mapping[str, torch.Size], seed: int) -> dict[str, WeightReader]:
    """Return readers of random tensors with the shapes `wanted`, by name. LoRA matrices A are Kaiming-uniform, and LoRA
    matrices B are 0, as in PEFT. `Family.initial` makes all others.
    """

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
    """Return the local path of a model. For a run, it is the directory RUN/model; for a small model of the package
    (`SHIPPED`), its directory; for an address in a cloud bucket, a local copy; and otherwise the path `model`.
    """
    path = _copy_of(url) if (url := remote.address(model)) is not None else Path(model).expanduser()
    if str(model) in SHIPPED and not path.exists():
        return shipped("data") / str(model) / "model"
    model_of_run = path / "model"
    return model_of_run if not _has_config(path) and _has_config(model_of_run) else path


@cache
def _copy_of(url: str) -> Path:
    """Copy a model from a cloud bucket. If the address is a run, copy only its directory `model`."""
    model_of_run = f"{url}/model"
    is_run = not remote.exists(f"{url}/config.json") and remote.exists(f"{model_of_run}/config.json")
    return remote.local(model_of_run if is_run else url)


def directory(model: str | Path) -> Path:
    """Return the local path of a model, after a download from the hub if necessary. Raises `InputError` if the download
    fails.
    """
    path = place(model)
    return hub.fetch(str(model)) if not path.exists() and hub.is_name(str(model)) else path


def is_far(model: str) -> bool:
    """Return whether `read` would use the network for this model."""
    if remote.address(model) is not None:
        return True
    return hub.is_name(model) and not place(model).exists() and hub.find(model) is None


def read(model: str) -> Weights:
    """Open the weights of a model. Raises `InputError` if the model cannot be read.

    `model` is one of the following (see docs/models.md): the path of a file for the authors' code, a directory in
    `transformers`' layout, a run or an adapter; the name of a released model, OWNER/NAME on the Hugging Face hub,
    `starter` or `demo`; an address in a cloud bucket.
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
            fix = "download the model again, or give the path of its directory"
            raise InputError(f"{fetched.source}: its architecture is not that of {name}; {fix}")
        absent = dict.fromkeys((*fetched.absent, *family_registry.RELEASED[name].untrained))
        return replace(fetched, config=fetched.config.completed(SIZES[name]), absent=tuple(absent))
    if model in SIZES:
        raise InputError(
            f"{model}: has no trained weights; give the path of a trained model, or set init: random in the recipe"
        )
    nearest = ", ".join(get_close_matches(model, SIZES, n=5, cutoff=0.0))
    raise InputError(
        f"{model}: no such file or directory, and not the name of a model; give a path, OWNER/NAME on the Hugging Face "
        f"hub, or a name such as {nearest}"
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
        raise InputError(f"{path}: has no model yet; run `{command}`, and give {out}")
    published = path / "data" / "weights"
    if published.is_dir() and (not _has_config(path) or weight_reader.read_json(path / "config.json") == {}):
        # ESM3, or ESM-C in the layout of 2024-12.
        file = hub.authors_weights([f"data/weights/{file.name}" for file in published.iterdir()])
        if file is None:
            raise InputError(f"{published}: has no language model, or several; give the path of a .pth file")
        return _read_file(path / file)
    return _read_transformers(path)


def _weight_files(path: Path) -> list[Path]:
    """Return the weight files in a model directory. Pickle files are used only if there is no safetensors file."""
    for file in (path / name for name in hub.LAYOUTS):
        if file.is_file() and file.name.endswith(".index.json"):
            with reading(f"{file}", "copy or download the model again"):
                return sorted({path / Path(shard).name for shard in read_json(file)["weight_map"].values()})
        if file.is_file():
            return [file]
    raise InputError(
        f"{path}: not a complete model, because it has no model.safetensors and no pytorch_model.bin; copy or download "
        "the model again"
    )


def _read_transformers(path: Path, single: Path | None = None) -> Weights:
    """Open the weights in a directory in `transformers`' layout, or only the file `single` in this directory."""
    try:
        config = family_registry.transformers_config(weight_reader.read_json(path / "config.json"))
        config = family_registry.family_of(config).read_tokens(config, path)
    except ValueError as error:
        raise InputError(f"{path / 'config.json'}: not a model that can be read: {error}") from None
    files = _weight_files(path) if single is None else [single]
    source = str(single or path)
    readers = {key: reader for file in files for key, reader in weight_reader.read_tensors(file).items()}
    used = {key: reader for key, reader in readers.items() if not key.startswith("classifier.")}
    has_classifier = len(used) < len(readers)
    notices = (f"{source}: the classifier belongs to another task and is ignored",) if has_classifier else ()
    tensors = family_registry.family_of(config).tensors(used, config)
    return _complete(Opened(config, tensors, tuple(files)), source, notices)


def _read_file(path: Path) -> Weights:
    """Open one weight file, either for the code of a model's authors or from a directory in `transformers`' layout."""
    if path.suffix == ".safetensors" or (path.suffix == ".bin" and _has_config(path.parent)):
        return _read_transformers(path.parent, path)
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise InputError(
            f"{path}: not a model; give a fair-esm .pt file, a .safetensors file with config.json in the same "
            "directory, or a directory in transformers' layout"
        )
    try:
        opened = family_registry.read_pickle(weight_reader.read_pickle(path), path)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: not a model that can be read: {error}") from None
    if opened is None:
        raise InputError(
            f"{path}: not a model file of any authors' code; if this is a state dict, load it into its transformers "
            "class, and give the directory that save_pretrained writes"
        )
    return _complete(opened, str(path))


def _complete(opened: Opened, source: str, notices: tuple[str, ...] = ()) -> Weights:
    """Check the names and shapes of all tensors except `head.*`. Make random values for a missing LM head or contact
    regression.
    """
    config, readers, files = opened
    for name, first in tied(config).items():
        second, shared = readers.pop(name, None), readers.get(first)
        if second is None or shared is None or second.shape != shared.shape:
            continue
        if not torch.equal(second().nan_to_num(), shared().nan_to_num()):  # Logits would differ from the authors' code.
            raise InputError(f"{source}: {name} differs from {first}, but in this model family they are one tensor")
    wanted = stored_shapes(config)
    if unexpected := sorted(name for name in readers.keys() - wanted.keys() if not name.startswith("head.")):
        raise InputError(
            f"{source}: {some(unexpected)} do not belong to a model of this family with {config.n_layers} layers"
        )
    missing = sorted(wanted.keys() - readers.keys())
    parts = ("lm_head", "contact_head")
    absent = tuple(part for part in parts if not any(name.startswith(f"{part}.") for name in readers))
    if needed := [name for name in missing if not is_computed(name) and name.split(".")[0] not in absent]:
        raise InputError(f"{source}: {some(needed)} are missing; copy or download the complete model again")
    for name, size in wanted.items():
        if name in readers and readers[name].shape != size:
            raise InputError(
                f"{source}: {name} has shape {list(readers[name].shape)} and must have {list(size)}; check config.json"
            )
    tensors = readers | drawn(config, {name: wanted[name] for name in missing}, seed=0)
    return Weights(config, source, tensors, absent, notices, files)


def some(names: Sequence[str]) -> str:
    """List the first three tensor names, and count the others."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more tensor{'s' if more > 1 else ''}" if more > 0 else "")


def _read_adapter(path: Path) -> Weights:
    """Return the weights of an adapter's base model with the adapter's tensors.

    `adapter_config.json` names the base model. A path is relative to the working directory, as in PEFT, or to the
    directory `path`. If `esmshard.json` has the base model's sha256, the base model must have the same sha256.
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
        fix = f"write the path of the base model as base_model_name_or_path into {path / hub.ADAPTER_CONFIG}"
        places = (found_place(name, path), name, str(path / name))
        base_name = next((text for text in places if place(text).exists()), family_registry.released_name(name) or name)
        if not place(base_name).exists() and not hub.is_name(base_name):
            raise InputError(f"{path}: the base model {name} does not exist; {fix}")
        if directory(base_name).resolve() == path.resolve():
            raise InputError(f"{path}: the adapter is its own base model; {fix}")
        base = read(base_name)
        if recorded:
            check(identity(base, name), recorded, str(path), fix)
    return adapters.read(path, settings, base, base.unlearned if unlearned is None else unlearned)


def joining(weights: Weights, chains: Chains | None, where: str) -> Weights:
    """Return the same weights with `chains` as the settings for joining protein chains. If `chains` is None, nothing
    changes. Raises `UsageError` if the model does not support these settings. `where` begins the message.
    """
    if chains is None:
        return weights
    try:
        return replace(weights, config=replace(weights.config, chains=chains))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def build(weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> Trunk:
    """Build a model with these weights on one device. Unlike `load_model`, do not warn about missing parts."""
    with torch.device("meta"):
        trunk = family_registry.build(weights.config)
    trunk.to(dtype).to_empty(device=device)
    trunk.tie_weights()
    with torch.no_grad():
        for name, tensor in trunk.state_dict().items():
            tensor.copy_(weights[name])
    return trunk


def load_model(model: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Trunk:
    """Load a language model on one device, in evaluation mode. Warns if a part is missing and its output random, if a
    part of a file is ignored, and if a weight file's sha256 differs from `esmshard.json`.

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
    """Return the entries for `esmshard.json` about weight files. `digests` has the sha256 by name, in writing order."""
    joint_digest = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    return {"weights_sha256": joint_digest, "files": dict(digests)}


def altered(files: Sequence[Path]) -> str | None:
    """Return a sentence about the first weight file whose sha256 differs from `esmshard.json`; None if no file differs.
    Directories without `esmshard.json`, such as released models, are not checked.
    """
    for folder, about in _records(files):
        recorded = about.get("files", {})
        for file in files if recorded else ():
            if file.parent == folder and recorded.get(file.name) != remembered_sha256(file):
                return (
                    f"{file}: is not the file that {folder / ABOUT} records, because its sha256 differs; copy the "
                    "file again, or consolidate the run again"
                )
    return None


def report_altered(files: Sequence[Path]) -> None:
    """Print the sentence that `altered` returns, if any, to stderr."""
    if sentence := altered(files):
        say(sentence)


def record_of(files: Sequence[Path]) -> dict[str, Any]:
    """Return the content of a fine-tuned model's `esmshard.json`; empty for other weights."""
    return next((about for _, about in _records(files) if "recipe" in about), {})


def _records(files: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the directories of weight files that have a readable `esmshard.json`, each with the file's content."""
    for folder in dict.fromkeys(file.parent for file in files):
        try:
            about = read_json(folder / ABOUT)
        except (OSError, ValueError):
            continue
        if isinstance(about, dict):
            yield folder, about


def identity(weights: Weights, name: str) -> dict[str, Any]:
    """Return a model's identity: its name for `read`, the architecture, the seed of new random weights, and the size
    and sha256 of each weight file. Checkpoints with `adapt.method` lora or head store the identity of the base model.
    """
    files: dict[str, Any] = {}
    for file in weights.files:
        # If the base of an adapter is an adapter too, two files have the same name.
        key = file.name if file.name not in files else f"{len(files)}/{file.name}"
        files[key] = {"bytes": file.stat().st_size, "sha256": remembered_sha256(file)}
    made = {"made": weights.made} if weights.made else {}
    return {"name": name, "config": weights.config.recorded(), "seed": weights.seed, "files": files} | made


def model_hash(weights: Weights) -> str:
    """Return a sha256 of architecture and weights, in hexadecimal digits. File names do not change the result."""
    return hashlib.sha256(json.dumps(_model_of(identity(weights, "")), sort_keys=True).encode()).hexdigest()


def check(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str, fix: str = "give the model that it was trained on"
) -> None:
    """Raise `InputError` if the identities `now` and `before` are of different models. Names and paths may differ.
    `where` is the checkpoint that stores `before`. `fix` says in the message what the user can do.
    """
    present, expected = _model_of(now), _model_of(before)
    if wrong := sorted(key for key in present.keys() | expected.keys() if present.get(key) != expected.get(key)):
        hashes = ", ".join(f"sha256 of {name}: {entry['sha256']}" for name, entry in before["files"].items())
        raise InputError(
            f"{where}: was trained on top of {before['name']}, and {now['name']} is another model (other "
            f"{', '.join(wrong)}); {fix}{hashes and f' ({hashes})'}"
        )


def _model_of(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity `full` without file names, and without settings that do not change the tensors."""
    model = {key: full[key] for key in ("seed", "made") if key in full}
    model["files"] = sorted(str(entry["sha256"]) for entry in full["files"].values())
    config = {key: value for key, value in full["config"].items() if key not in ("window", "chains", "diffusion")}
    return model | {"config": config}
