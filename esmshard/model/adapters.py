"""Reads and writes LoRA adapters in PEFT's layout: the files `adapter_config.json` and `adapter_model.safetensors`.

`peft.PeftModel.from_pretrained(EsmForMaskedLM.from_pretrained(BASE), DIRECTORY)` loads these files. With an `EsmModel`,
this call also needs the argument `key_mapping={"^esm.": ""}`. Plain LoRA adapters from other programs can be read, too.
The tensors in the file decide which layers are adapted; the setting `target_modules` does not. If an unknown setting
has a value, reading raises `InputError`, because the setting could change the outputs.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from esmshard.errors import InputError, reading
from esmshard.io.paths import replace_json, sha256
from esmshard.model import weight_reader
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import family_of
from esmshard.model.hub import ADAPTER_CONFIG, ADAPTERS, LAYOUTS
from esmshard.model.lora import lora_names, merged
from esmshard.model.weight_reader import WeightReader

if TYPE_CHECKING:
    from esmshard.model.weights import Weights

PREFIX = "base_model.model."
HEAD = "head.safetensors"
"""The file with the task head in an adapter directory. PEFT ignores this file."""
_FIX = "let PEFT merge the adapter into its base model (merge_and_unload), and save the merged model"

# Keys of PEFT's class `LoraConfig` that this module reads, or that do not change the outputs of a trained adapter.
_KNOWN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "task_type", "use_rslora"),
}
# Values of `init_lora_weights` that do not change the base model. Other values (pissa, olora, corda, loftq, ...) change
# it in memory, so the adapter does not fit the base model on disk.
_INIT = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def is_adapter(path: Path) -> bool:
    """Return whether a directory contains a LoRA adapter and no complete model."""
    return (path / ADAPTER_CONFIG).is_file() and not any((path / name).is_file() for name in LAYOUTS)


def read_settings(directory: Path) -> dict[str, Any]:
    """Read `adapter_config.json` of an adapter. Raises `InputError` if the file is damaged, names no base model, or has
    settings that a plain LoRA lacks.
    """
    path = directory / ADAPTER_CONFIG
    settings = weight_reader.read_json(path)
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is not LORA, so the adapter cannot be read; {_FIX}")
    if unknown := [key for key, value in settings.items() if key not in _KNOWN and value]:
        raise InputError(f"{path}: {unknown[0]} is set, so the adapter is not a plain LoRA; {_FIX}")
    if settings.get("init_lora_weights") not in _INIT:
        raise InputError(
            f"{path}: init_lora_weights is {settings['init_lora_weights']!r}, which also changes the base model, so "
            f"the adapter cannot be read; {_FIX}, or save it with PEFT's path_initial_model_for_weight_conversion"
        )
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{path}: names no base model; add its path or hub name as base_model_name_or_path")
    return settings


def read(directory: Path, settings: Mapping[str, Any], base: "Weights", unlearned: Sequence[str]) -> "Weights":
    """Return the weights of the model `base` with the adapter in `directory` and the adapter's task head. When a weight
    is read, its LoRA is added in fp32. `settings` is the result of `read_settings`. `unlearned` names the model parts
    with random values (`lm_head`, `contact_head`). Raises `InputError` if the adapter is not complete, does not fit the
    base model, or cannot be read.
    """
    file = next((directory / name for name in ADAPTERS if (directory / name).is_file()), None)
    if file is None:
        raise InputError(f"{directory}: the adapter is not complete: {ADAPTERS[0]} is missing; copy it again")
    family, tied = family_of(base.config), family_of(base.config).trunk.tied
    lora_a: dict[str, WeightReader] = {}
    lora_b: dict[str, WeightReader] = {}
    modules: dict[str, str] = {}
    replaced: dict[str, WeightReader] = {}
    left_out: set[str] = set()
    for key, reader in weight_reader.read_tensors(file).items():
        name = key.removeprefix(PREFIX)
        if name.startswith(("classifier.", "score.")):
            left_out.add(name.split(".")[0])
        elif lora := re.fullmatch(r"(.+)\.lora_([AB])\.weight", name):
            for piece in family.pieces(f"{lora[1]}.weight", base.config):
                modules[piece.name] = lora[1]
                if lora[2] == "A":
                    lora_a[piece.name] = reader
                else:
                    lora_b[piece.name] = reader.part(piece.rows)
        elif ".lora_" in name:
            raise InputError(f"{file}: {key} does not belong to a plain LoRA of linear layers; {_FIX}")
        else:
            pieces = family.pieces(name.replace(".base_layer.", "."), base.config)
            replaced |= {piece.name: reader.part(piece.rows) for piece in pieces}
    if not lora_a or lora_a.keys() != lora_b.keys():
        raise InputError(f"{file}: has no LoRA, or a LoRA with only one of its two matrices; copy the adapter again")
    if changed := [name for name in (*lora_a, *replaced) if name in (*tied.keys(), *tied.values())]:
        raise InputError(
            f"{file}: changes {changed[0]}, which the token embedding and the LM head share in this model; train the "
            "adapter without word_embeddings, decoder and lm_head in target_modules and modules_to_save"
        )
    shapes = {name: reader.shape for name, reader in base.read.items()}
    fits = {name: shapes.get(name) == reader.shape for name, reader in replaced.items()}
    for name, a in lora_a.items():
        b = lora_b[name]
        fits[name] = shapes.get(name) == (b.shape[0], a.shape[1]) and 0 < a.shape[0] == b.shape[1]
    if wrong := [name for name, fit in fits.items() if not fit]:
        raise InputError(
            f"{file}: {wrong[0]} does not fit the base model; change base_model_name_or_path in "
            f"{directory / ADAPTER_CONFIG} to the path or hub name of the model that the adapter was trained on"
        )

    with reading(str(directory / ADAPTER_CONFIG), "save the adapter again"):
        scales = {name: _scale(directory, settings, modules[name], a.shape[0]) for name, a in lora_a.items()}
    # Errors of `base.rows` about values that are not finite name the base model, not the adapter.
    trunk = {n: replace(r, rows=partial(base.rows, n)) for n, r in base.read.items() if not n.startswith("head.")}
    adapted = {name: _with_lora(name, trunk[name], a, lora_b[name], scales[name]) for name, a in lora_a.items()}
    head_file = directory / HEAD
    head = weight_reader.read_safetensors(head_file) if head_file.is_file() else {}
    notices = (f"{file}: its {part} belongs to another task and is ignored" for part in sorted(left_out))
    origin = json.dumps([base.made, base.seed, scales], sort_keys=True)
    return replace(
        base,
        source=str(directory),
        read={**trunk, **replaced, **adapted, **head},
        absent=tuple(unlearned),
        notices=(*base.notices, *notices),
        files=(*base.files, file, *([head_file] if head else [])),
        seed=None,
        made=hashlib.sha256(origin.encode()).hexdigest(),
    )


def _scale(directory: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of the LoRA product B A in the layer `module`: alpha / rank, or alpha / sqrt(rank) for rsLoRA.

    PEFT's `alpha_pattern` maps regular expressions to alphas. The first expression that matches `module` sets its
    alpha. Here each expression must be a plain name, in which a dot may have a backslash. All other expressions raise
    `InputError`, because matching them could take forever.
    """
    alpha: Any = settings.get("lora_alpha")
    path = directory / ADAPTER_CONFIG
    for key, alpha_of_key in reversed((settings.get("alpha_pattern") or {}).items()):
        name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise InputError(f"{path}: alpha_pattern: {key!r} is not a layer's name; {_FIX}")
        if module == name or (module.endswith(f".{name}") and not key.startswith("^")):
            alpha = alpha_of_key
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise InputError(f"{path}: lora_alpha or alpha_pattern is {alpha!r}; save the adapter with a positive number")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _with_lora(name: str, base: WeightReader, a: WeightReader, b: WeightReader, scale: float) -> WeightReader:
    a_name, b_name = lora_names(name)

    def rows(rows: slice) -> torch.Tensor:
        return merged(name, {name: base(rows), a_name: a(), b_name: b(rows)}, scale)

    return WeightReader(base.shape, rows)


def peft_name(name: str, config: ModelConfig, targets: Collection[str]) -> str:
    """Return the key in `adapter_model.safetensors` for the LoRA matrix or trained bias that esmshard calls `name`.
    `targets` is the value of the recipe key `adapt.targets`.

    >>> from esmshard.model.families.family_registry import SIZES
    >>> size = SIZES["esm2_t6_8M_UR50D"]
    >>> peft_name("layers.3.self_attn.q_proj.lora_A.weight", size, ["q"])
    'base_model.model.esm.encoder.layer.3.attention.self.query.lora_A.weight'
    >>> peft_name("layers.3.self_attn.q_proj.bias", size, ["q"])
    'base_model.model.esm.encoder.layer.3.attention.self.query.base_layer.bias'
    """
    family = family_of(config)
    for part in (".lora_A.weight", ".lora_B.weight"):
        if name.endswith(part):
            return PREFIX + str(family.key(name.replace(part, ".weight"))).removesuffix(".weight") + part
    key = PREFIX + str(family.key(name))
    if name.endswith(tuple(f".{matrix.path}.bias" for matrix in config.matrices if matrix.target in targets)):
        return key.removesuffix("bias") + "base_layer.bias"
    return key


def adapter_config(
    base: str, config: ModelConfig, rank: int, alpha: float, targets: Collection[str], bias: str
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`. `base` is the name or path of the base model. `rank`, `alpha`,
    `targets` and `bias` are the values of these keys in the recipe section `adapt`.
    """
    family = family_of(config)
    # PEFT's `AutoPeftModel` needs this entry.
    classes = {"base_model_class": family.model_class, "parent_library": "transformers"}
    paths = [matrix.path for matrix in config.matrices if matrix.target in targets]
    keys = [str(family.key(f"layers.{n}.{path}.weight")) for n in range(config.n_layers) for path in paths]
    counts = Counter(key.removeprefix(family.prefix).removesuffix(".weight") for key in keys)
    joined = {module: count for module, count in counts.items() if count > 1}
    return {
        "auto_mapping": classes if family.model_class else None,
        "base_model_name_or_path": base,
        "bias": bias,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {module: rank * count for module, count in joined.items()},
        "alpha_pattern": {module: alpha * count for module, count in joined.items()},
        "target_modules": list(counts),  # full names, because the short name `dense` would include the LM head
        "task_type": None,
    }


def write_adapter(
    directory: Path,
    settings: Mapping[str, Any],
    config: ModelConfig,
    targets: Collection[str],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Write an adapter and its task head to an existing directory. Return the sha256 of both weight files, by name.

    The files of some model families join several matrices in one matrix. For a joined matrix, the LoRA matrices A are
    stacked, and the LoRA matrices B become blocks on a diagonal. Then the product B A is the stack of the products of
    the single matrices.

    `settings` is the result of `adapter_config`. `targets` is the value of the recipe key `adapt.targets`. `tensors`
    has all trained tensors by esmshard's names: LoRA matrices, biases, `head.*`.
    """
    head = {name: tensor.contiguous() for name, tensor in tensors.items() if name.startswith("head.")}
    groups: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name not in head:
            groups[peft_name(name, config, targets)][name] = tensor
    joined: dict[str, torch.Tensor] = {}
    for key, group in groups.items():
        module, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        pieces = family_of(config).pieces(f"{module}.weight", config) if module else ()
        rows = {piece.name.removesuffix("weight") + f"lora_{part}": piece.rows for piece in pieces}
        if len(pieces) < 2:
            joined[key] = next(iter(group.values())).contiguous()
        elif part == "A.weight":
            joined[key] = torch.cat([group[name] for name in rows if name in group])
        else:  # A matrix without a LoRA gets zero rows in B.
            parts = [group.get(name, torch.empty(part.stop - part.start, 0)) for name, part in rows.items()]
            joined[key] = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    replace_json(directory / ADAPTER_CONFIG, settings)
    for file, state in ((ADAPTERS[0], joined), (HEAD, head)):
        save_file(state, directory / file, {"format": "pt"})
    return {file: sha256(directory / file) for file in (ADAPTERS[0], HEAD)}
