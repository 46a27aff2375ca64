"""Writes a LoRA in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

`peft.PeftModel.from_pretrained(EsmForMaskedLM.from_pretrained(BASE), DIRECTORY)` loads the LoRA and uses every key; for
an `EsmModel`, add `key_mapping={"^esm.": ""}`. Names are those of `transformers` after PEFT's prefix. If all biases are
trained, PEFT keeps them in the same file; the bias of an adapted layer belongs to the layer that PEFT wrapped,
`base_layer`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from esmshard.errors import InputError
from esmshard.files import replace_json, sha256
from esmshard.model.config import LINEAR
from esmshard.model.weights.key_maps import to_transformers

PREFIX = "base_model.model."


def peft_name(name: str, targets: Collection[str]) -> str:
    """Return the key in `adapter_model.safetensors` of one of our tensors.

    >>> peft_name("layers.3.self_attn.q_proj.lora_A.weight", ["q"])
    'base_model.model.esm.encoder.layer.3.attention.self.query.lora_A.weight'
    >>> peft_name("layers.3.self_attn.q_proj.bias", ["q"])
    'base_model.model.esm.encoder.layer.3.attention.self.query.base_layer.bias'
    >>> peft_name("layers.3.fc1.bias", ["q"])
    'base_model.model.esm.encoder.layer.3.intermediate.dense.bias'
    """
    for part in (".lora_A.weight", ".lora_B.weight"):
        if name.endswith(part):
            return PREFIX + to_transformers(name.replace(part, ".weight")).removesuffix(".weight") + part
    theirs = PREFIX + to_transformers(name)
    if name.endswith(tuple(f".{LINEAR[target]}.bias" for target in targets)):
        return theirs.removesuffix("bias") + "base_layer.bias"
    return theirs


def adapter_config(
    base: str, n_layers: int, rank: int, alpha: float, targets: Collection[str], bias: str
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        base: name or path of the base model.
        n_layers: number of layers of the trunk. Each adapted layer has its full name, since `dense` alone would include
            the LM head.
        rank: rank of the matrices.
        alpha: the LoRA is scaled by alpha / rank.
        targets: keys of `LINEAR`.
        bias: `none` or `all`.
    """
    modules = [
        to_transformers(f"layers.{n}.{LINEAR[t]}.weight") for n in range(n_layers) for t in LINEAR if t in targets
    ]
    return {
        "auto_mapping": {
            "base_model_class": "EsmForMaskedLM",
            "parent_library": "transformers.models.esm.modeling_esm",
        },
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
        "target_modules": [module.removeprefix("esm.").removesuffix(".weight") for module in modules],
        "task_type": None,
    }


def write_adapter(
    directory: Path, config: Mapping[str, Any], targets: Collection[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Write an adapter, and beside it the task head as `head.safetensors`, which PEFT ignores.

    Args:
        directory: an existing directory.
        config: see `adapter_config`.
        targets: keys of `LINEAR`.
        tensors: everything that was trained, by our names: LoRA matrices, biases, `head.*`.

    Returns:
        sha256 of each file of weights, by file name.

    Raises:
        InputError: the written tensors do not read back equal.
    """
    replace_json(directory / "adapter_config.json", config)
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("head.")}
    rest = {peft_name(name, targets): tensor for name, tensor in tensors.items() if name not in head}
    for file, mine in (("adapter_model.safetensors", rest), ("head.safetensors", head)):
        save_file({name: tensor.contiguous() for name, tensor in mine.items()}, directory / file, {"format": "pt"})
        written = load_file(directory / file)
        for name, tensor in mine.items():
            if not torch.equal(written[name], tensor):
                raise InputError(f"{directory / file}: {name} was not written as it was read; check the disk")
    return {file: sha256(directory / file) for file in ("adapter_model.safetensors", "head.safetensors")}
