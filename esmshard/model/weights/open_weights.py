"""Weights of models from files, directories, the Hugging Face hub or random draws, and models made of them.

All functions use `Weights`: tensors by our names, read one at a time, so that no second copy of the model is needed.
Every key of a file must be known. What a file of a family looks like is in `esmshard.model.families`.
This file is longer than others, because every kind of file goes through the same checks.
"""

import hashlib
import math
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

from esmshard import remote
from esmshard.devices import chosen_device
from esmshard.errors import InputError, UsageError
from esmshard.files import is_hub_name
from esmshard.joined_chains import Chains
from esmshard.model import weight_reader
from esmshard.model.config import SHIPPED, ModelConfig
from esmshard.model.families import family_registry
from esmshard.model.families.family_registry import RELEASED, SIZES
from esmshard.model.trunk import Trunk
from esmshard.model.weight_reader import ALL, WeightReader
from esmshard.model.weights import hub, recorded, state_dicts
from esmshard.shipped import shipped


@dataclass(frozen=True)
class Weights:
    """Tensors of one model by our names. Each tensor is read from disk when it is used."""

    config: ModelConfig
    source: str
    """Source of the weights, for messages."""
    read: Mapping[str, WeightReader]
    head: Mapping[str, WeightReader] = field(default_factory=dict)
    """Tensors of a fine-tuned task head, without the prefix `head.`."""
    absent: tuple[str, ...] = ()
    """Parts that the file does not have and that were drawn at random: `lm_head`, `contact_head`."""
    left_out: tuple[str, ...] = ()
    """Heads of another task in the file, which nothing here reads, such as `classifier` of `transformers`."""
    files: tuple[Path, ...] = ()
    """The weight files, for `esmshard.model.weights.origin`; none for fresh weights."""
    seed: int | None = None
    """Seed of fresh weights; None for weights from files."""
    made: str = ""
    """For an adapter, a digest of the inputs of its values other than files: scales, and the seed of a random base."""

    @property
    def unlearned(self) -> tuple[str, ...]:
        """Parts that no training has changed: parts drawn at random or, for fresh weights, parts that most tasks do not
        train.
        """
        return self.absent if self.seed is None else ("lm_head", "contact_head")

    @property
    def notices(self) -> list[str]:
        """Sentences that the user should read about this file, whatever is computed."""
        return [f"{self.source}: its {part} is of another task and left out" for part in self.left_out]

    def lacking(self, *parts: str) -> list[str]:
        """Return sentences about those of these parts that the file does not have, for a caller that uses them."""
        return [f"{self.source}: has no {part}; what it says is random" for part in self.absent if part in parts]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, ALL)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Read some rows of a tensor. From a safetensors file only these rows are read."""
        return self.read[tied(self.config).get(name, name)](rows)


@lru_cache(maxsize=8)
def _sized(config: ModelConfig) -> tuple[dict[str, torch.Size], Mapping[str, str]]:
    with torch.device("meta"):
        trunk = family_registry.build(config)
    return {name: tensor.shape for name, tensor in trunk.state_dict().items()}, trunk.tied


def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shape of every tensor of a model by name, buffers included. No memory is used."""
    return dict(_sized(config)[0])


def tied(config: ModelConfig) -> Mapping[str, str]:
    """Return the names that mean the tensor of another name, with this other name."""
    return _sized(config)[1]


def stored_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shape of every tensor that files and checkpoints hold: a tied tensor once, under its first name."""
    return {name: shape for name, shape in shapes(config).items() if name not in tied(config)}


def fresh(config: ModelConfig, seed: int) -> Weights:
    """Make new random weights. Each tensor depends on the seed and its name only, so that every rank can draw its own
    part. The distributions are those of the family (`esmshard.model.families.family.Family.initial`).
    """
    return Weights(config, f"fresh weights, seed {seed}", drawn(config, shapes(config), seed), seed=seed)


def drawn(config: ModelConfig, wanted: Mapping[str, torch.Size], seed: int) -> dict[str, WeightReader]:
    """Return readers of random values, as in `fresh`. In a LoRA, A is Kaiming-uniform as in PEFT and B is 0."""

    # Rows are taken from the whole tensor, which is drawn once for successive calls.
    @lru_cache(maxsize=1)
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
    """Return the file or directory that a model's name means: a shipped model's, the model of a run, the copy of one in
    a bucket, else the path itself.
    """
    path = _copy_of(url) if (url := remote.address(model)) is not None else Path(model).expanduser()
    if str(model) in SHIPPED and not path.exists():
        return shipped("data") / str(model) / "model"
    of_run = path / "model"
    return of_run if not (path / "config.json").exists() and (of_run / "config.json").is_file() else path


@cache
def _copy_of(url: str) -> Path:
    """Return the copy of a model in a bucket. Of a run only its model is copied."""
    of_run = f"{url}/model"
    is_run = not remote.exists(f"{url}/config.json") and remote.exists(f"{of_run}/config.json")
    return remote.local(of_run if is_run else url)


def directory(model: str | Path) -> Path:
    """Return what `place` returns; for a repository of the hub its copy in the cache, which is downloaded if need be.

    Raises:
        InputError: the repository cannot be downloaded.
    """
    path = place(model)
    return hub.fetch(str(model)) if not path.exists() and is_hub_name(str(model)) else path


def _how_to_make(path: Path) -> str | None:
    """Advise what to do with a fine-tuning directory that holds no model; None for other directories."""
    source, out = path, path / "model"
    if re.fullmatch(r"step_\d+", path.name):
        what, out = "a checkpoint, whose weights lie in shards", path.parent.parent / f"model_{path.name}"
    elif path.name == "checkpoints":
        what, source, out = "a directory of checkpoints", path.parent, path.parent / "model"
    elif (path / "checkpoints").is_dir():
        what = "a run whose model has not been written"
    elif (path / "summary.json").is_file() and (parts := sorted(path.glob("*/model"))):
        return f"{path}: holds several runs; give the model of one of them, as {parts[0]}"
    else:
        return None
    command = shlex.join(["esmshard", "consolidate", str(source), "-o", str(out)])
    return f"{path}: is {what}; make a model of it with `{command}`, and give {out}"


def read(model: str) -> Weights:
    """Open the weights of a model.

    Args:
        model: a file of the authors' own code, such as fair-esm's `.pt`; a directory in `transformers`' layout (ours
            are such directories); a copy of a repository with `data/weights/*.pth`, or one of these files (ESM3, ESM-C
            of 2024-12); a run that has a model; the `.safetensors` in a directory; an adapter's directory, ours or
            PEFT's (`esmshard.model.weights.adapted_weights`); `FILE@SIZE` for a file of tensors alone
            (`esmshard.model.weights.state_dicts`); a released name such as `esm2_t33_650M_UR50D`, or OWNER/NAME for any
            repository of the Hugging Face hub, which are searched in the local caches and else downloaded
            (`esmshard.model.weights.hub`); the address of such a file or directory in a bucket (`esmshard.remote`); or
            `starter` or `demo`, which come with the package.

    Raises:
        InputError: the model cannot be read; the message names the file and what is wrong.
    """
    path = place(model)
    if path.is_dir():
        from esmshard.model.weights import adapted_weights  # adapted_weights imports this module to read the base.

        if adapted_weights.is_adapter(path):
            return adapted_weights.read(path)
        if not (path / "config.json").exists() and (said := _how_to_make(path)):
            raise InputError(said)
        folder = path / "data" / "weights"
        return _read_directory(path) if _has_config(path) or not folder.is_dir() else _read_published(folder)
    if path.is_file() and (path.suffix == ".safetensors" or (path.suffix == ".bin" and _has_config(path.parent))):
        return _read_directory(path.parent, path)
    if path.is_file() and path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _read_pickle(path)
    if path.is_file():
        raise InputError(
            f"{path}: not a model; expected a fair-esm .pt file, a .safetensors file with its config.json beside it, "
            "or a directory in transformers' layout"
        )
    if split := state_dicts.file_and_size(model):
        return _read_sized(*split)
    if model in RELEASED or is_hub_name(model):
        found = read(str(hub.fetch(model)))
        name = family_registry.released_name(model)
        if name is not None and found.config != SIZES[name]:
            raise InputError(f"{found.source}: not {name}, whose shape is another; download it again")
        return found if name is None else replace(found, config=SIZES[name])  # The name says the window, too.
    if model in SIZES:
        raise InputError(f"{model}: a size without trained weights; give a trained model's path, or init: random")
    if "/" in model:
        raise InputError(
            f"{model}: no such file or directory, and no OWNER/NAME on the Hugging Face hub; give the path of a model, "
            "which `esmshard finetune` writes to OUT/model when its run is done"
        )
    raise InputError(
        f"{model}: no such file or directory, and not a name of a model, of which {_nearest(model)} are the nearest, "
        "or OWNER/NAME on the Hugging Face hub"
    )


def _nearest(size: str) -> str:
    return ", ".join(get_close_matches(size, SIZES, n=5, cutoff=0.0))


def joining(found: Weights, chains: Chains | None, where: str) -> Weights:
    """Let a model read several chains as is asked for; if it is not, as the model's file or its default says.

    Args:
        found: the weights.
        chains: how chains are joined.
        where: what asks for it, for messages.

    Raises:
        UsageError: the model cannot read chains so.
    """
    if chains is None:
        return found
    try:
        return replace(found, config=replace(found.config, chains=chains))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def is_here(model: str) -> bool:
    """Return whether a model is a file or directory of this machine, which FILE@SIZE may name."""
    return place(model).exists() or state_dicts.file_and_size(model) is not None


def is_far(model: str) -> bool:
    """Return whether a model would be read from a bucket or downloaded from the hub. Nothing is asked for."""
    if remote.address(model) is not None:
        return True
    is_named = family_registry.released_name(model) is not None or is_hub_name(model)
    return is_named and not is_here(model) and hub.find(family_registry.released_name(model) or model) is None


def is_model(name: str) -> bool:
    """Return whether a name means a model although no file or directory has it: a size, FILE@SIZE, or OWNER/NAME."""
    return name in SIZES or is_hub_name(name) or state_dicts.file_and_size(name) is not None


def materialise(model: Trunk, weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Fill a model that was built on the meta device with weights, on one device. Every tensor must
    be in the weights.
    """
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])


def load_model(model: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Trunk:
    """Load a language model on one device, in evaluation mode.

    Args:
        model: see `read`.
        device: by default the first GPU, else the CPU.
        dtype: type of weights and arithmetic. Rotary angles and contact maps are always fp32.

    Warns if the file has no LM head or no contact regression, so that logits or contacts are random, and if a file is
    not the one that the `esmshard.json` beside it records.
    """
    found = read(model)
    for notice in [*found.lacking("lm_head", "contact_head"), *found.notices]:
        warnings.warn(notice, stacklevel=2)
    altered: list[str] = []
    with recorded.compared(found.files, altered.append):
        trunk = build(found, chosen_device(device), dtype).eval()
    for notice in altered:
        warnings.warn(notice, stacklevel=2)
    return trunk


def build(found: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> Trunk:
    """Build a model with these weights on one device. No warning is given about parts that the file does not have."""
    with torch.device("meta"):
        trunk = family_registry.build(found.config)
    materialise(trunk, found, device, dtype)
    return trunk


def _read_directory(path: Path, single: Path | None = None) -> Weights:
    raw = weight_reader.read_json(path / "config.json")
    if raw == {}:
        return _read_published(path / "data" / "weights")
    try:
        config = family_registry.transformers_config(raw)
    except ValueError as error:
        raise InputError(f"{path / 'config.json'}: not a model that can be read: {error}") from None
    found: dict[str, WeightReader] = {}
    weight_files = [single] if single is not None else _weight_files(path)
    for file in weight_files:
        read_file = weight_reader.read_safetensors if file.suffix == ".safetensors" else weight_reader.read_state_dict
        found.update(read_file(file))

    head = {k.removeprefix("head."): r for k, r in found.items() if k.startswith("head.")}
    left_out = tuple(sorted({k.split(".")[0] for k in found if k.startswith("classifier.")}))
    pieces = family_registry.family_of(config).files.pieces
    trunk = {
        piece.name: reader.part(piece.rows)
        for key, reader in found.items()
        if not key.startswith(("head.", "classifier."))
        for piece in pieces(key, config)
    }
    complete = _complete(config, str(single or path), trunk, head)
    return replace(complete, left_out=left_out, files=tuple(weight_files))


def _has_config(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _check_tied(config: ModelConfig, source: str, found: Mapping[str, WeightReader]) -> None:
    """Refuse a file whose LM head has a matrix of its own where the model has that of the embedding.

    Other libraries that trained it so would compute other logits.
    """
    for name, first in tied(config).items():
        if name in found and first in found and found[name].shape == found[first].shape:
            own, shared = found[name]().nan_to_num(), found[first]().nan_to_num()
            if not torch.equal(own, shared):
                raise InputError(f"{source}: {name} is not {first}, and the two are one tensor in such a model")


def _weight_files(path: Path) -> list[Path]:
    """Find the files of one model, safetensors before pickles. The 3B and 15B models were released
    as several pickles.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.is_file():
            try:
                return sorted({path / Path(str(f)).name for f in weight_reader.read_json(index)["weight_map"].values()})
            except (KeyError, TypeError, AttributeError):
                raise InputError(f"{index}: has no weight_map; copy or download the model again") from None
        if (path / name).is_file():
            return [path / name]
    raise InputError(f"{path}: holds no model.safetensors and no pytorch_model.bin; it is not a complete model")


def _read_published(folder: Path) -> Weights:
    """Open the one language model among `.pth` files. Beside an empty `config.json` lie ESM3 and the models that decode
    its structures, or an ESM-C of 2024-12.
    """
    found = {file.name: _opened_pickle(file) for file in sorted(folder.glob("*.pth"))}
    models = {name: one for name, one in found.items() if one is not None}
    if len(models) != 1:
        what = f"{len(models)} models ({', '.join(models)})" if models else "no .pth file of a language model"
        raise InputError(
            f"{folder.parents[1] / 'config.json'}: says nothing, and {folder} holds {what}; give the path of the .pth "
            "file of the model"
        )
    return next(iter(models.values()))


def _read_pickle(path: Path) -> Weights:
    found = _opened_pickle(path)
    if found is None:
        if state := state_dicts.bare(weight_reader.read_pickle(path)):
            raise InputError(state_dicts.without_size(path, state))
        titles = ", ".join(family.title for family in family_registry.FAMILIES.values() if family.reads_pickles)
        raise InputError(f"{path}: not a model file of the authors' code of {titles} (a 'model' holds no weights)")
    return found


def _opened_pickle(path: Path) -> Weights | None:
    """Open a file of any authors' own code; None for a torch file of something else."""
    data = weight_reader.read_pickle(path)
    state = state_dicts.bare(data)
    try:
        # Files of the authors name their sizes beside the weights, or have names from which sizes follow.
        opened = None if state is not None and state is not data else family_registry.read_pickle(data, path)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: not a model that can be read: {error}") from None
    if opened is None:
        return None
    config, found, files = opened
    return replace(_complete(config, str(path), found, {}), files=files)


def _read_sized(path: Path, size: str) -> Weights:
    """Read `FILE@SIZE`: a file of tensors alone; or one that says its size, which must be this one."""
    if size not in SIZES:
        raise InputError(f"{path}@{size}: {size} is no model size, of which {_nearest(size)} are the nearest")
    config = SIZES[size]
    data = weight_reader.read_safetensors(path) if path.suffix == ".safetensors" else weight_reader.read_pickle(path)
    state = state_dicts.bare(data)
    if state is None:
        found = _read_pickle(path)
        if found.config != config:
            raise InputError(f"{path}: says its sizes itself, and they are not those of {size}; leave @{size} out")
        return found
    tensors, left_out = state_dicts.by_our_names(path, state, size)
    return replace(_complete(config, str(path), tensors, {}), left_out=left_out, files=(path,))


def _complete(
    config: ModelConfig, source: str, found: dict[str, WeightReader], head: dict[str, WeightReader]
) -> Weights:
    """Check every key. An LM head or contact regression may be missing; it is listed and drawn at random."""
    _compare_sizes(config, source, found)  # This comes before a model of the claimed size is built on the meta device.
    _check_tied(config, source, found)
    wanted = stored_shapes(config)
    for name in tied(config):
        found.pop(name, None)
    unexpected = sorted(found.keys() - wanted.keys())
    if unexpected:
        raise InputError(f"{source}: {some(unexpected)} do not belong to a model of {config.n_layers} such layers")
    missing = sorted(wanted.keys() - found.keys())
    buffers = set(filter(family_registry.family_of(config).computed, missing))
    parts = [p for p in ("lm_head", "contact_head") if any(n.startswith(p + ".") for n in missing)]
    lost = [n for n in missing if n not in buffers and not n.startswith(tuple(p + "." for p in parts))]
    partial_parts = [p for p in parts if any(n.startswith(p + ".") for n in found)]
    if lost or partial_parts:
        raise InputError(f"{source}: {some(lost or missing)} are missing; the file is not a complete model")
    added = drawn(config, {n: wanted[n] for n in missing}, seed=0)

    for name, reader in found.items():
        if reader.shape != wanted[name]:
            raise InputError(f"{source}: {name} is {list(reader.shape)}, {list(wanted[name])} was expected")

    tensors = {name: reader.finite(f"{source}: {name}") for name, reader in found.items()} | added
    head = {name: reader.finite(f"{source}: head.{name}") for name, reader in head.items()}
    return Weights(config, source, tensors, head, tuple(parts))


_LAYER = re.compile(r"layers\.(\d{1,9})\.")


def _compare_sizes(config: ModelConfig, source: str, found: Mapping[str, WeightReader]) -> None:
    """Check that the sizes in a configuration are not larger than those of the tensors beside it."""
    layers = 1 + max((int(match[1]) for name in found if (match := _LAYER.match(name))), default=-1)
    if layers < config.n_layers:
        raise InputError(
            f"{source}: its configuration says {config.n_layers:,} layers and its weights have {layers:,}, so "
            f"layers.{layers}.* are missing; the file is not a complete model, or the configuration is another model's"
        )
    table = found.get("embed_tokens.weight")
    if table is not None and table.shape[1:] != (config.dim,):
        raise InputError(
            f"{source}: embed_tokens.weight is {list(table.shape)}, and a width of {config.dim} was expected"
        )


def some(names: Sequence[str], most: int = 3) -> str:
    """Name the first few tensors, and count the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more tensor{'s' if more > 1 else ''}" if more > 0 else "")
