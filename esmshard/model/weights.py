"""Weights of ESM-2: fair-esm `.pt` files, `transformers` directories, fresh ones, and the names of both worlds.

Everything here speaks of a `Weights`: tensors by fair-esm name, read one at a time, so that nobody needs a second
copy of the model. Key maps follow `transformers`' converter; every key of a file is accounted for.
"""

import argparse
import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from esmshard.errors import InputError
from esmshard.model.attention import inverse_frequencies
from esmshard.model.config import SIZES, EsmConfig
from esmshard.model.esm2 import ESM2
from esmshard.vocab import EOS, MASK, PAD, VOCAB_SIZE

TIED = "lm_head.weight"
"""The same tensor as `embed_tokens.weight`; stored once."""

# fair-esm name to transformers name, below the layer prefix `layers.N.` / `esm.encoder.layer.N.`
_LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn.rot_emb": "attention.self.rotary_embeddings",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}
_TOP = {
    "embed_tokens.weight": "esm.embeddings.word_embeddings.weight",
    "emb_layer_norm_after.weight": "esm.encoder.emb_layer_norm_after.weight",
    "emb_layer_norm_after.bias": "esm.encoder.emb_layer_norm_after.bias",
    "contact_head.regression.weight": "esm.contact_head.regression.weight",
    "contact_head.regression.bias": "esm.contact_head.regression.bias",
    TIED: "lm_head.decoder.weight",
}
_TOP_BACK = {hf: ours for ours, hf in _TOP.items()}
_LAYER_BACK = {hf: ours for ours, hf in _LAYER.items()}

# Held by released files, used by nothing: rotary models have no position table, and `pooler` was never trained.
_UNUSED = re.compile(r"(esm\.embeddings\.(position_ids|position_embeddings\.weight)|esm\.pooler\..*)$")


@dataclass(frozen=True)
class Weights:
    """Tensors of one model by fair-esm name, each read when it is asked for."""

    config: EsmConfig
    source: str
    """Where they come from, for messages."""
    read: Mapping[str, Callable[[], torch.Tensor]]
    head: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Tensors of a fine-tuned task head, without the prefix `head.`."""
    absent: tuple[str, ...] = ()
    """Parts that the file does not have and that were drawn anew: `lm_head`, `contact_head`."""
    left_out: tuple[str, ...] = ()
    """Heads of another task in the file, which nothing here reads: `classifier` of `transformers`."""

    @property
    def notices(self) -> list[str]:
        """What a user should know of this file, one sentence each."""
        found = [f"{self.source}: has no {part}; what it says is random" for part in self.absent]
        return found + [f"{self.source}: its {part} is of another task and left out" for part in self.left_out]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read["embed_tokens.weight" if name == TIED else name]()


def shapes(config: EsmConfig) -> dict[str, torch.Size]:
    """Every name of an ESM-2 and its shape, buffers included; no memory is taken."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in ESM2(config).state_dict().items()}


def fresh(config: EsmConfig, seed: int) -> Weights:
    """New random weights. Each tensor depends on the seed and its name only, so that every rank can draw its own.

    Linear layers are Xavier-uniform (q, k and v with gain 1/sqrt 2, as in fair-esm's attention); the embedding, which
    is the LM head's matrix too, is normal with deviation 0.02, so that first logits are small; biases are 0 and
    LayerNorms 1.
    """
    return Weights(config, f"fresh weights, seed {seed}", _fresh(config, shapes(config), seed))


def _fresh(config: EsmConfig, wanted: Mapping[str, torch.Size], seed: int) -> dict[str, Callable[[], torch.Tensor]]:
    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("inv_freq"):
            return inverse_frequencies(config.head_dim)
        if name.endswith("layer_norm.weight") or name == "emb_layer_norm_after.weight":
            return torch.ones(shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name == "embed_tokens.weight":
            table = 0.02 * torch.randn(shape, generator=generator)
            table[PAD] = 0.0
            return table
        gain = 1 / math.sqrt(2) if re.search(r"\.[qkv]_proj\.", name) else 1.0
        bound = gain * math.sqrt(6 / (shape[0] + shape[1]))
        return torch.rand(shape, generator=generator) * 2 * bound - bound

    return {name: partial(draw, name, shape) for name, shape in wanted.items()}


def read(model: str) -> Weights:
    """Weights from a fair-esm `.pt`, or from a directory in `transformers`' layout (ours are such directories).

    Raises `InputError` naming the file and what is wrong with it; a name of `SIZES` without a file is one.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _read_directory(path)
    if path.is_file() and path.suffix == ".pt":
        return _read_fair_esm(path)
    if path.is_file():
        raise InputError(f"{path}: not a model; expected a fair-esm .pt file or a directory in transformers' layout")
    if model in SIZES and not model.startswith("esm2_"):
        raise InputError(f"{model}: a size without trained weights; give a trained model's path, or init: random")
    if model in SIZES:
        raise InputError(
            f"{model}: the weights are not here; download {model}.pt of fair-esm or the directory facebook/{model} "
            "of the Hugging Face hub and give its path as the model"
        )
    raise InputError(f"{model}: no such file or directory, and not a model size ({', '.join(SIZES)})")


def materialise(model: ESM2, weights: Weights, device: torch.device) -> None:
    """Fill an ESM-2 built on the meta device with weights, on one device. Strict: every tensor is set."""
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])


def default_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(model: str, device: torch.device | None = None) -> ESM2:
    """An ESM-2 on one device, in evaluation mode, fp32.

    Args:
        model: a directory of ours or in `transformers` layout, or a fair-esm `.pt`.
        device: the first GPU, else the CPU, by default.

    Warns if the file has no LM head or no contact regression: logits or contacts are then random.
    """
    found = read(model)
    for notice in found.notices:
        warnings.warn(notice, stacklevel=2)
    return build(found, device or default_device()).eval()


def build(found: Weights, device: torch.device) -> ESM2:
    """An ESM-2 with these weights on one device. Says nothing of parts that the file does not have."""
    with torch.device("meta"):
        trunk = ESM2(found.config)
    materialise(trunk, found, device)
    return trunk


def to_transformers(name: str) -> str:
    """The name in `EsmForMaskedLM` of one of our tensors (the layout that transformers 4 and 5 both read)."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias|inv_freq)", name)
    if match:
        return f"esm.encoder.layer.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def from_transformers(key: str) -> str | None:
    """Our name for a `transformers` key; None for keys that mean nothing here."""
    if not re.match(r"(esm|lm_head|head)\.", key):
        key = "esm." + key  # a bare EsmModel
    if _UNUSED.match(key):
        return None
    # transformers 5 writes LayerNorms under the names of old TensorFlow files.
    key = re.sub(r"(LayerNorm)\.gamma$", r"\1.weight", re.sub(r"(LayerNorm)\.beta$", r"\1.bias", key))
    match = re.fullmatch(r"esm\.encoder\.layer\.(\d+)\.(.+)\.(weight|bias|inv_freq)", key)
    if match:
        return f"layers.{match[1]}.{_LAYER_BACK.get(match[2], match[2])}.{match[3]}"
    return _TOP_BACK.get(key, key)


def transformers_config(config: EsmConfig) -> dict[str, Any]:
    """`config.json` for `EsmForMaskedLM`."""
    return {
        "architectures": ["EsmForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "emb_layer_norm_before": False,
        "eos_token_id": EOS,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": config.dim,
        "intermediate_size": 4 * config.dim,
        "layer_norm_eps": 1e-5,
        "mask_token_id": MASK,
        "max_position_embeddings": 1026,
        "model_type": "esm",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "pad_token_id": PAD,
        "position_embedding_type": "rotary",
        "token_dropout": config.token_dropout,
        "vocab_size": VOCAB_SIZE,
    }


def _read_directory(path: Path) -> Weights:
    config = _read_config(path / "config.json")
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    found: dict[str, Callable[[], torch.Tensor]] = {}
    if index.is_file():
        try:
            files = {k: path / Path(str(f)).name for k, f in _read_json(index)["weight_map"].items()}
        except (KeyError, TypeError, AttributeError):
            raise InputError(f"{index}: has no weight_map; copy or download the model again") from None
        for file in sorted(set(files.values())):
            found.update(_safetensors(file))
    elif single.is_file():
        found = _safetensors(single)
    elif (path / "pytorch_model.bin").is_file():
        found = _tensors(_torch_load(path / "pytorch_model.bin"))
    else:
        raise InputError(f"{path}: holds no model.safetensors and no pytorch_model.bin; it is not a complete model")

    head = {k.removeprefix("head."): r for k, r in found.items() if k.startswith("head.")}
    left_out = tuple(sorted({k.split(".")[0] for k in found if k.startswith("classifier.")}))
    found = {k: r for k, r in found.items() if not k.startswith("classifier.")}
    trunk: dict[str, Callable[[], torch.Tensor]] = {}
    for key, reader in found.items():
        name = None if key.startswith("head.") else from_transformers(key)
        # One shared table for all layers: at model level, or (transformers 5.23) under a literal `layer.*`.
        if name is not None and re.search(r"(^esm\.|layer\.\*.*)rotary_embeddings\.inv_freq$", name):
            trunk |= {f"layers.{n}.self_attn.rot_emb.inv_freq": reader for n in range(config.n_layers)}
        elif name is not None:
            trunk[name] = reader
    return replace(_complete(config, str(path), trunk, head), left_out=left_out)


def _read_fair_esm(path: Path) -> Weights:
    data = _torch_load(path)
    try:
        model = data["cfg"]["model"]
        config = EsmConfig(
            n_layers=model.encoder_layers,
            dim=model.encoder_embed_dim,
            n_heads=model.encoder_attention_heads,
            token_dropout=model.token_dropout,
        )
        state = data["model"]
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: not an ESM-2 file of fair-esm (it has no cfg.model with encoder sizes)") from None
    except ValueError as error:
        raise InputError(f"{path}: not an ESM-2: {error}") from None
    if not isinstance(state, dict):
        raise InputError(f"{path}: not an ESM-2 file of fair-esm (its 'model' holds no weights)")
    regression = path.with_name(f"{path.stem}-contact-regression.pt")
    if regression.is_file():
        extra = _torch_load(regression).get("model")
        if not isinstance(extra, dict):
            raise InputError(
                f"{regression}: not a contact regression of fair-esm (it has no 'model'); download it again"
            )
        state = state | extra
    # Released files keep the prefixes of the fairseq trainer.
    names = {re.sub(r"^(encoder\.sentence_encoder\.|encoder\.)", "", k): v for k, v in state.items()}
    return _complete(config, str(path), _tensors(names), {})


def _complete(
    config: EsmConfig,
    source: str,
    found: dict[str, Callable[[], torch.Tensor]],
    head: dict[str, Callable[[], torch.Tensor]],
) -> Weights:
    """Account for every key. An LM head or contact regression may be missing: it is named and drawn anew."""
    wanted = shapes(config)
    found.pop(TIED, None)
    unexpected = sorted(found.keys() - wanted.keys())
    if unexpected:
        raise InputError(f"{source}: {_some(unexpected)} do not belong to an ESM-2 of {config.n_layers} layers")
    missing = sorted(wanted.keys() - found.keys() - {TIED})
    buffers = {name for name in missing if name.endswith("inv_freq")}
    parts = [p for p in ("lm_head", "contact_head") if any(n.startswith(p + ".") for n in missing)]
    lost = [n for n in missing if n not in buffers and not n.startswith(tuple(p + "." for p in parts))]
    partial = [p for p in parts if any(n.startswith(p + ".") for n in found)]
    if lost or partial:
        raise InputError(f"{source}: {_some(lost or missing)} are missing; the file is not a complete ESM-2")
    added = _fresh(config, {n: wanted[n] for n in missing}, seed=0)

    def checked(name: str, reader: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            tensor = reader()
            if tensor.shape != wanted[name]:
                raise InputError(f"{source}: {name} is {list(tensor.shape)}, {list(wanted[name])} was expected")
            return tensor

        return call

    tensors = {name: checked(name, reader) for name, reader in found.items()} | added
    return Weights(config, source, tensors, head, tuple(parts))


def _some(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more keys" if len(names) > most else "")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: missing; the directory is not a complete model") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None


def _read_config(path: Path) -> EsmConfig:
    raw = _read_json(path)
    if not isinstance(raw, dict) or raw.get("model_type") != "esm":
        raise InputError(f"{path}: model_type is not 'esm'; only ESM-2 models can be read")
    wrong = [
        f"{key} is {raw.get(key, default)!r}, not {value!r}"
        for key, value, default in (
            ("position_embedding_type", "rotary", "absolute"),
            ("emb_layer_norm_before", False, None),
            ("vocab_size", VOCAB_SIZE, None),
            ("layer_norm_eps", 1e-5, 1e-12),
            ("hidden_act", "gelu", "gelu"),
        )
        if (raw.get(key, default) or False) != value
    ]
    try:
        config = EsmConfig(
            n_layers=raw["num_hidden_layers"],
            dim=raw["hidden_size"],
            n_heads=raw["num_attention_heads"],
            token_dropout=raw.get("token_dropout", False),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not the configuration of an ESM-2: {error}") from None
    if raw.get("intermediate_size") != 4 * config.dim:
        wrong.append(f"intermediate_size is {raw.get('intermediate_size')}, not {4 * config.dim}")
    if wrong:
        raise InputError(f"{path}: not an ESM-2: {'; '.join(wrong)}")
    return config


def _safetensors(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    def reader(key: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(key)
                return tensor

        return call

    try:
        with safe_open(path, framework="pt") as file:
            return {key: reader(key) for key in file.keys()}  # noqa: SIM118  # not a dictionary
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}); copy or download it again") from None


def _torch_load(path: Path) -> dict[str, Any]:
    """Read a pickle without running code in it: only tensors, containers and `Namespace` may occur."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of the format before torch 1.6 cannot be mapped
                data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises whatever it likes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: cannot be read as torch weights ({reason}); copy or download it again") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds a {type(data).__name__}, not a dictionary of weights")
    return data


def _tensors(state: Mapping[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    return {str(k): partial(torch.Tensor.detach, v) for k, v in state.items() if isinstance(v, torch.Tensor)}
