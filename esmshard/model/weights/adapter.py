"""Writes a LoRA in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

`peft.PeftModel.from_pretrained(EsmForMaskedLM.from_pretrained(BASE), DIRECTORY)` loads the LoRA and uses every key; for
an `EsmModel`, add `key_mapping={"^esm.": ""}`. Names are those of `transformers` after PEFT's prefix. If all biases are
trained, PEFT keeps them in the same file; the bias of an adapted layer belongs to the layer that PEFT wrapped,
`base_layer`.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from esmshard.errors import InputError
from esmshard.files import replace_json, sha256
from esmshard.model.config import ModelConfig
from esmshard.model.families.family_registry import family_of

PREFIX = "base_model.model."


def peft_name(name: str, config: ModelConfig, targets: Collection[str]) -> str:
    """Return the key in `adapter_model.safetensors` of one of our tensors.

    >>> from esmshard.model.families.family_registry import SIZES
    >>> size = SIZES["esm2_t6_8M_UR50D"]
    >>> peft_name("layers.3.self_attn.q_proj.lora_A.weight", size, ["q"])
    'base_model.model.esm.encoder.layer.3.attention.self.query.lora_A.weight'
    >>> peft_name("layers.3.self_attn.q_proj.bias", size, ["q"])
    'base_model.model.esm.encoder.layer.3.attention.self.query.base_layer.bias'
    >>> peft_name("layers.3.fc1.bias", size, ["q"])
    'base_model.model.esm.encoder.layer.3.intermediate.dense.bias'
    """
    files = family_of(config).files
    for part in (".lora_A.weight", ".lora_B.weight"):
        if name.endswith(part):
            return PREFIX + str(files.key(name.replace(part, ".weight"))).removesuffix(".weight") + part
    theirs = PREFIX + str(files.key(name))
    if name.endswith(tuple(f".{matrix.path}.bias" for matrix in config.matrices if matrix.target in targets)):
        return theirs.removesuffix("bias") + "base_layer.bias"
    return theirs


def adapter_config(
    base: str, config: ModelConfig, rank: int, alpha: float, targets: Collection[str], bias: str
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        base: name or path of the base model.
        config: its architecture. Each adapted layer has its full name, since `dense` alone would include the LM head.
        rank: rank of the matrices.
        alpha: the LoRA is scaled by alpha / rank.
        targets: as in a recipe's `adapt.targets`.
        bias: `none` or `all`.
    """
    files = family_of(config).files
    # AutoPeftModel asks for the class of the base. A family that `transformers` does not have is read by esmshard only.
    classes = {"base_model_class": files.model_class, "parent_library": files.model_module}
    paths = [matrix.path for matrix in config.matrices if matrix.target in targets]
    weights = [str(files.key(f"layers.{n}.{path}.weight")) for n in range(config.n_layers) for path in paths]
    counts = Counter(weight.removeprefix(files.prefix).removesuffix(".weight") for weight in weights)
    joined = {module: count for module, count in counts.items() if count > 1}
    return {
        "auto_mapping": classes if files.model_class else None,
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
        "target_modules": list(counts),
        "task_type": None,
    }


def write_adapter(
    directory: Path,
    settings: Mapping[str, Any],
    config: ModelConfig,
    targets: Collection[str],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Write an adapter, and beside it the task head as `head.safetensors`, which PEFT ignores.

    Args:
        directory: an existing directory.
        settings: see `adapter_config`.
        config: architecture of the base model.
        targets: as in a recipe's `adapt.targets`.
        tensors: everything that was trained, by our names: LoRA matrices, biases, `head.*`.

    Returns:
        sha256 of each file of weights, by file name.

    Raises:
        InputError: the written tensors do not read back equal.
    """
    replace_json(directory / "adapter_config.json", settings)
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("head.")}
    rest = _joined({name: tensor for name, tensor in tensors.items() if name not in head}, config, targets)
    for file, mine in (("adapter_model.safetensors", rest), ("head.safetensors", head)):
        save_file({name: tensor.contiguous() for name, tensor in mine.items()}, directory / file, {"format": "pt"})
        written = load_file(directory / file)
        for name, tensor in mine.items():
            if not torch.equal(written[name], tensor):
                raise InputError(f"{directory / file}: {name} was not written as it was read; check the disk")
    return {file: sha256(directory / file) for file in ("adapter_model.safetensors", "head.safetensors")}


def _joined(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, targets: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of `adapter_model.safetensors`, by its keys.

    Of the matrices that the file joins in one, A lies one below the other and B along the diagonal of zeros, so that
    B A holds the product of each in its rows.
    """
    groups: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        groups[peft_name(name, config, targets)][name] = tensor
    found: dict[str, torch.Tensor] = {}
    for key, group in groups.items():
        module, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        pieces = family_of(config).files.pieces(f"{module}.weight", config) if module else ()
        if len(pieces) < 2:
            (found[key],) = group.values()
            continue
        rows = {piece.name.removesuffix("weight") + f"lora_{part}": piece.rows for piece in pieces}
        if part == "A.weight":
            found[key] = torch.cat([group[name] for name in rows if name in group])
        else:  # A matrix without a LoRA has rows of zeros.
            parts = [group.get(name, torch.empty(own.stop - own.start, 0)) for name, own in rows.items()]
            found[key] = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    return found
