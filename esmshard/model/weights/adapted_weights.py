"""Weights of an adapter directory: the weights of its base, with the LoRA added when each weight is read. Merged
weights are not written.

Adapters come from `esmshard consolidate --adapter`, or from PEFT for an `EsmForMaskedLM` or `EsmModel`. The tensors in
the file decide which layers are adapted, however `target_modules` names them. A setting that would change numbers in a
way that is not known here is refused, and so are settings of newer versions of PEFT.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError, reading
from esmshard.files import found_place, is_hub_name
from esmshard.model import weight_reader
from esmshard.model.config import ModelConfig
from esmshard.model.families import family_registry
from esmshard.model.families.family import Piece
from esmshard.model.lora import lora_names, merged
from esmshard.model.weight_reader import WeightReader
from esmshard.model.weights import hub, open_weights, origin
from esmshard.model.weights.adapter import PREFIX
from esmshard.model.weights.open_weights import Weights

CONFIG, HEAD = hub.ADAPTER_CONFIG, "head.safetensors"
_FIX = "let PEFT merge it (merge_and_unload) and save the model"

# Keys of `LoraConfig` that are read here, or that change nothing once the matrices exist. `fan_in_fan_out` is one of
# these, since PEFT ignores it for linear layers. `dropout` is for training.
_KNOWN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "task_type", "use_rslora"),
}
# Initialisations that do not change the base's own weights. The others (pissa, olora, corda, loftq, ...) subtract from
# the base what the matrices hold at first, so that the file fits no base on disk.
_INIT = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def is_adapter(path: Path) -> bool:
    """Return whether a directory holds an adapter and no model."""
    return (path / CONFIG).is_file() and not any((path / name).is_file() for name in hub.LAYOUTS)


def read(directory: Path, above: tuple[Path, ...] = ()) -> Weights:
    """Open the base of an adapter with the trained tensors put in. Each LoRA is added in fp32 when its weight is read.

    `adapter_config.json` names the base: a path (relative to the working directory or to the adapter), a released name,
    a repository of the hub, or `starter` or `demo`. A base that was recorded in `esmshard.json` is compared by hash.

    Args:
        directory: directory of the adapter.
        above: adapters that were trained on top of this one, since an adapter may have another adapter as its base.

    Raises:
        InputError: the base is missing or is another one, or the adapter cannot be read.
    """
    settings = _settings(directory)
    file = next((directory / name for name in hub.ADAPTERS if (directory / name).is_file()), None)
    if file is None:
        raise InputError(f"{directory}: holds no {hub.ADAPTERS[0]}; it is not a complete adapter, copy it again")
    about = _about(directory)
    base = _base(directory, settings, about, (*above, directory.resolve()))
    found = (
        weight_reader.read_safetensors(file) if file.suffix == ".safetensors" else weight_reader.read_state_dict(file)
    )
    loras, whole, left_out = _sorted(file, found, base.config)
    _account(file, settings, loras, whole, base)

    readers, scales = dict(base.read), dict[str, float]()
    for name, reader in whole.items():
        readers[name] = reader.finite(f"{file}: {name}")
    for name, (module, a, b) in loras.items():
        scales[name] = _scale(directory, settings, module, a.shape[0])
        finite_a, finite_b = a.finite(f"{file}: {name}"), b.finite(f"{file}: {name}")
        readers[name] = _with_lora(name, readers[name], finite_a, finite_b, scales[name])

    head_file = directory / HEAD
    head = weight_reader.read_safetensors(head_file) if head_file.is_file() else {}
    if strange := [name for name in head if not name.startswith("head.")]:
        raise InputError(f"{head_file}: {strange[0]} is no tensor of a task head; consolidate the run again")
    return replace(
        base,
        source=str(directory),
        read=readers,
        head={name.removeprefix("head."): reader.finite(f"{head_file}: {name}") for name, reader in head.items()},
        absent=tuple(about["unlearned"]) if "unlearned" in about else base.unlearned,
        left_out=tuple(sorted({*base.left_out, *left_out})),
        files=(*base.files, file, *([head_file] if head else [])),
        seed=None,
        made=hashlib.sha256(json.dumps([base.made, base.seed, scales], sort_keys=True).encode()).hexdigest(),
    )


def _settings(directory: Path) -> dict[str, Any]:
    """Read `adapter_config.json`, and refuse adapters other than plain LoRA."""
    path = directory / CONFIG
    settings = weight_reader.read_json(path)
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise InputError(f"{path}: peft_type is {kind!r}, and only LORA can be read; {_FIX}")
    for key, value in settings.items():
        if key not in _KNOWN and value:
            raise InputError(f"{path}: {key} is set, which is not a plain LoRA and cannot be read; {_FIX}")
    if settings.get("init_lora_weights") not in _INIT:
        raise InputError(
            f"{path}: init_lora_weights is {settings['init_lora_weights']!r}, which changes the base model too and "
            f"cannot be read; {_FIX}, or have PEFT convert it on saving (path_initial_model_for_weight_conversion)"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(key) or {}, dict):
            raise InputError(f"{path}: {key} is no mapping; save the adapter again")
    if not isinstance(settings.get("base_model_name_or_path"), str) or not settings["base_model_name_or_path"]:
        raise InputError(f"{path}: names no base model; write its place as base_model_name_or_path there")
    return settings


def _about(directory: Path) -> dict[str, Any]:
    """Read `esmshard.json`: the recorded base, and the parts that never learned. PEFT's adapters do
    not have this file.
    """
    path = directory / "esmshard.json"
    about = weight_reader.read_json(path) if path.is_file() else {}
    if not isinstance(about, dict) or (about and not _says_its_base(about)):
        raise InputError(f"{path}: damaged (it does not say which base was adapted); consolidate the run again")
    return about


def _says_its_base(about: Mapping[str, Any]) -> bool:
    base, unlearned = about.get("base"), about.get("unlearned", [])
    if not isinstance(base, dict) or not base.keys() >= {"name", "config", "seed", "files"}:
        return False
    entries = list(base["files"].values()) if isinstance(base["files"], dict) else [None]
    kinds = isinstance(base["name"], str) and isinstance(base["config"], dict) and isinstance(base["seed"], int | None)
    return (
        kinds
        and all(isinstance(entry, dict) and isinstance(entry.get("sha256"), str) for entry in entries)
        and isinstance(unlearned, list)
        and all(isinstance(part, str) for part in unlearned)
    )


def _base(directory: Path, settings: Mapping[str, Any], about: Mapping[str, Any], above: tuple[Path, ...]) -> Weights:
    """Open the model that was adapted, and compare it with the recorded base, if there is one."""
    known = about.get("base")
    if known and known["seed"] is not None:
        with reading(f"{directory / 'esmshard.json'}", "consolidate the run again"):
            return open_weights.fresh(family_registry.recorded_config(known["config"]), known["seed"])
    name = str(settings["base_model_name_or_path"])
    places = (found_place(name, directory), name, str(directory / name))  # PEFT reads it from the working directory.
    here = next((one for one in places if open_weights.is_here(one)), None)
    path = open_weights.place(here or name)
    fix = f"put it there, or write where it lies as base_model_name_or_path into {directory / CONFIG}"
    released = family_registry.released_name(name)
    try:
        if here is None and released is None and is_hub_name(name):
            path = hub.fetch(name)
        itself = path.resolve() in above
        if is_adapter(path) and not itself:
            found = read(path, above)
        elif not itself:
            found = open_weights.read(here or released or name)
    except InputError as error:
        raise InputError(f"{directory}: adapts {name}, which cannot be read ({error}); {fix}") from None
    if itself:
        raise InputError(f"{directory}: is named as its own base model; {fix}")
    if known:
        origin.check(origin.identity(found, name), known, str(directory), fix)
    return found


def _sorted(
    file: Path, found: Mapping[str, WeightReader], config: ModelConfig
) -> tuple[dict[str, tuple[str, WeightReader, WeightReader]], dict[str, WeightReader], set[str]]:
    """Sort the tensors of an adapter, by our names: (module, A, B) of each weight that has a LoRA, the tensors that
    were trained whole, and the names of heads of another task.
    """
    halves: dict[str, dict[str, tuple[str, WeightReader]]] = {"lora_A": {}, "lora_B": {}}
    whole: dict[str, WeightReader] = {}
    left_out: set[str] = set()
    for key, reader in found.items():
        name = key.removeprefix(PREFIX)
        if name.startswith(("classifier.", "score.")):
            left_out.add(name.split(".")[0])
        elif half := re.fullmatch(r"(.+)\.(lora_A|lora_B)\.weight", name):
            # This loop is empty for the pooler, which nothing reads.
            for weight, rows in _pieces(f"{half[1]}.weight", config):
                halves[half[2]][weight] = (half[1], reader if half[2] == "lora_A" else reader.part(rows))
        elif ".lora_" in name:
            raise InputError(f"{file}: {key} is no part of a plain LoRA of linear layers and cannot be read; {_FIX}")
        else:
            whole |= {n: reader.part(rows) for n, rows in _pieces(name.replace(".base_layer.", "."), config)}
    if not any(halves.values()):
        raise InputError(f"{file}: holds no LoRA of the language model; it is not a complete adapter, copy it again")
    if alone := sorted(halves["lora_A"].keys() ^ halves["lora_B"].keys()):
        raise InputError(f"{file}: {alone[0]} has one of its two LoRA matrices only; copy or save the adapter again")
    loras = {name: (module, a, halves["lora_B"][name][1]) for name, (module, a) in halves["lora_A"].items()}
    return loras, whole, left_out


def _pieces(key: str, config: ModelConfig) -> Sequence[Piece]:
    """Return our tensors in a key; none for keys that the model does not use."""
    return family_registry.family_of(config).files.pieces(key, config)


def _account(
    file: Path,
    settings: Mapping[str, Any],
    loras: Mapping[str, tuple[str, WeightReader, WeightReader]],
    whole: Mapping[str, WeightReader],
    base: Weights,
) -> None:
    """Check that every tensor fits the base, and that each layer with a full name in `target_modules` has its LoRA."""
    shapes = open_weights.shapes(base.config)
    tied = open_weights.tied(base.config)
    for name in (*loras, *whole):
        if name in (*tied.keys(), *tied.values()):
            raise InputError(
                f"{file}: changes the token embedding or the LM head's matrix, which are one tensor here and two in "
                f"this adapter; leave word_embeddings, decoder and lm_head out of target_modules and modules_to_save"
            )
    fits = {name: shapes.get(name) == reader.shape for name, reader in whole.items()}
    fits |= {
        name: shapes.get(name) == (b.shape[0], a.shape[1]) and a.shape[0] == b.shape[1] and len(shapes[name]) == 2
        for name, (_, a, b) in loras.items()
    }
    if wrong := [name for name, fit in fits.items() if not fit]:
        raise InputError(
            f"{file}: {wrong[0]} does not fit the base model {base.source}; write the base that was adapted as "
            f"base_model_name_or_path into {file.parent / CONFIG}"
        )
    targets = settings.get("target_modules")
    for target in targets if isinstance(targets, list) else []:
        for name, _ in _pieces(f"{target}.weight", base.config):
            if name in shapes and name not in loras:
                raise InputError(f"{file}: has no LoRA for {target}; it is not complete, copy the adapter again")


def _scale(directory: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A: alpha / rank, with rsLoRA alpha / sqrt(rank).

    PEFT matches the keys of `alpha_pattern` as regular expressions, and the first one counts. Here they are names, with
    or without a backslash before each dot, since an expression of somebody else may take for ever.
    """
    where, found = directory / CONFIG, settings.get("lora_alpha")
    for key, alpha in reversed((settings.get("alpha_pattern") or {}).items()):
        name = str(key).removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise InputError(f"{where}: alpha_pattern: {key!r} is no name of layers, and nothing else is read; {_FIX}")
        if module == name or (module.endswith(f".{name}") and not str(key).startswith("^")):
            found = alpha
    given_rank = settings.get("r", rank)
    if rank < 1 or not isinstance(given_rank, int) or given_rank < 1:
        raise InputError(f"{where}: the rank of a LoRA must be a whole number from 1 on; save the adapter again")
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise InputError(f"{where}: lora_alpha or alpha_pattern is {found!r}, no positive number; save it again")
    return found / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _with_lora(name: str, base: WeightReader, a: WeightReader, b: WeightReader, scale: float) -> WeightReader:
    a_name, b_name = lora_names(name)

    def rows(rows: slice) -> torch.Tensor:
        return merged(name, {name: base(rows), a_name: a(), b_name: b(rows)}, scale)

    return WeightReader(base.shape, rows)
