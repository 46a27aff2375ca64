"""Defines the model family ESM-C (ESM Cambrian) for packed sequences, its file formats, and the base classes of ESM3
and AMPLIFY.

All outputs must equal the outputs of `transformers` 5.23 (`models/esmc/modeling_esmc.py`). `tests/parity/` compares
the outputs. `esmshard.batch` explains the letters of tensor names.

`EsmcFamily.pieces` reads four file layouts: `transformers` from 5.16 on, the authors' files of 2024-12 and of 2026-05,
and ESM++, which uses the names of 2024-12. The authors' files join queries, keys and values in one tensor, and gate and
up in another tensor. esmshard writes the layout of `transformers`, which the authors' code reads from version 3.4 on.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.io.paths import replace_json
from esmshard.model import weight_reader
from esmshard.model.attention import Between, OnAttention, SelfAttention, TrunkBlock
from esmshard.model.config import ModelConfig
from esmshard.model.families.family import SIZE_KEYS, Family, Names, Opened, Piece, Released, check_settings, renamed
from esmshard.model.trunk import ContactRegression, Trunk, embedding
from esmshard.vocab import CLS, EOS, MASK, PAD, SEPARATOR, TOKENS, UNK

ROWS = 64
"""The number of embedding rows and of logits in ESM-C and ESM3. Only the first 33 rows are tokens."""

HEAD = 64
"""The width of an attention head in every published ESM-C and ESM3. Tensor shapes do not reveal this number."""


@dataclass(frozen=True, kw_only=True)
class EsmcConfig(ModelConfig):
    """The architecture of an ESM-C model."""

    family: ClassVar[str] = "esmc"
    gated: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    chain_break: ClassVar[bool] = True
    """ESM-C has a chain-break token `|`, but was never trained on it (Biohub/esm#166)."""

    ffn: int | None = None
    """The width of the feed-forward part; None for the formula of released models (`ffn_width`)."""

    @property
    def n_logits(self) -> int:
        return ROWS

    @property
    def ffn_width(self) -> int:
        """The width F of the feed-forward part; in released models 8/3 D, rounded up to a multiple of 256."""
        return (8 * self.dim // 3 + 255) // 256 * 256 if self.ffn is None else self.ffn

    @property
    def branch_scale(self) -> float:
        """The factor sqrt(36 / n_layers) for the outputs of attention and feed-forward part in each block."""
        return float((36 / self.n_layers) ** 0.5)


def gated(gate_TF: torch.Tensor, up_TF: torch.Tensor, activation: Literal["silu", "gelu"] = "silu") -> torch.Tensor:
    """Return silu(gate) * up or gelu(gate) * up, [T, F], and save only gate and up for the backward pass. This gelu has
    tanh in place of the error function, as `gelu_new` in `transformers`.
    """
    function, _ = _ACTIVATIONS[activation]
    if torch.compiler.is_compiling():  # The compiler chooses what to save for the backward pass.
        return function(gate_TF) * up_TF
    if not torch.is_grad_enabled() and activation == "silu":
        return F.silu(gate_TF, inplace=True).mul_(up_TF)
    product_TF: torch.Tensor = _Gated.apply(gate_TF, up_TF, activation)  # type: ignore[no-untyped-call]
    return product_TF


_ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": (partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")),
}
"""The functions of gates, each with its backward pass: from the gradient of the output and the input to the gradient of
the input."""


class _Gated(torch.autograd.Function):
    """Computes silu(gate) * up. Plain autograd would also save silu(gate), a third tensor of this size."""

    @staticmethod
    def forward(ctx: Any, gate_TF: torch.Tensor, up_TF: torch.Tensor, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        ctx.activation = activation
        return _ACTIVATIONS[activation][0](gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate_TF, up_TF = ctx.saved_tensors
        function, backward = _ACTIVATIONS[ctx.activation]
        grad_up_TF = function(gate_TF).mul_(grads[0])
        return backward(grads[0] * up_TF, gate_TF), grad_up_TF, None


class RMSNorm(nn.RMSNorm):
    """Computes weight * x / sqrt(mean(x^2) + eps), with the mean in fp32. On a GPU, torch does this in one kernel.
    Elsewhere `_RMSNorm` is used, because it saves two tensors fewer than torch for the backward pass.
    """

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        if x_TD.is_cuda or torch.compiler.is_compiling():
            return super().forward(x_TD)  # type: ignore[no-any-return]
        y_TD: torch.Tensor = _RMSNorm.apply(x_TD, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y_TD


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        scale_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=dtype).square_() / x_TD.shape[-1]
        scale_T1 = scale_T1.add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return (x_TD * scale_T1).to(x_TD.dtype) * weight_D  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        y_TD, grad_TD = x_TD * scale_T1, grads[0].to(scale_T1.dtype)
        grad_D = (grad_TD * y_TD).sum(0).to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_D, None
        grad_TD = grad_TD * weight_D
        mean_T1 = torch.linalg.vecdot(grad_TD, y_TD).unsqueeze(1) / x_TD.shape[-1]
        return y_TD.mul_(mean_T1).neg_().add_(grad_TD).mul_(scale_T1).to(x_TD.dtype), grad_D, None


class GatedLayer(TrunkBlock):
    """A block of rotary attention and a gated feed-forward part (SwiGLU), with a norm before each part.
    `norm(width)` makes a norm module. `RotaryEmbedding` explains `interleaved`.
    """

    def __init__(self, config: EsmcConfig, norm: Callable[[int], nn.Module], interleaved: bool) -> None:
        super().__init__()
        d, f = config.dim, config.ffn_width
        self.branch_scale = config.branch_scale
        self.self_attn_layer_norm = norm(d)
        self.self_attn = SelfAttention(d, config.n_heads, interleaved=interleaved, bias=False, qk_norm=config.qk_norm)
        self.final_layer_norm = norm(d)
        self.gate = nn.Linear(d, f, bias=False)
        self.up = nn.Linear(d, f, bias=False)
        self.fc2 = nn.Linear(f, d, bias=False)

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: TokenBatch,
        layer: int = 0,
        on_attention: OnAttention | None = None,
        between: Between | None = None,
    ) -> torch.Tensor:
        """Map x [T, D] to [T, D]. If `between` is given, add `branch_scale` times its result after attention."""
        on_qk = partial(on_attention, layer) if on_attention is not None else None
        y_TD = self.self_attn(self.self_attn_layer_norm(x_TD), batch, on_qk)
        x_TD = torch.add(x_TD, y_TD, alpha=self.branch_scale)
        if between is not None:
            x_TD = torch.add(x_TD, self.add_between(between, x_TD, batch), alpha=self.branch_scale)
        y_TD = self.final_layer_norm(x_TD)
        y_TD = self.fc2(gated(self.gate(y_TD), self.up(y_TD)))
        return torch.add(x_TD, y_TD, alpha=self.branch_scale)


class UntiedLMHead(nn.Module):
    """An LM head that does not share its matrix with the embedding."""

    def __init__(self, dim: int, n_logits: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.layer_norm = nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, n_logits)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, V]."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(x_PD))))  # type: ignore[no-any-return]


class ESMC(Trunk):
    """The ESM-C language model. `GatedLayer` explains the arguments. No released file has a contact regression."""

    config: EsmcConfig

    def __init__(
        self, config: EsmcConfig, norm: Callable[[int], nn.Module] = nn.LayerNorm, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(ROWS, config.dim)
        self.layers = nn.ModuleList(GatedLayer(config, norm, interleaved) for _ in range(config.n_layers))
        self.contact_head = ContactRegression(config.n_maps)
        self.layer_norm_after: nn.Module = nn.LayerNorm(config.dim, bias=False)
        self.lm_head: nn.Module = UntiedLMHead(config.dim, ROWS)

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        return self.embed_tokens(batch.tokens_T)  # type: ignore[no-any-return]

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.layer_norm_after(x_TD)  # type: ignore[no-any-return]


AUTHORS = Names(
    block="transformer.blocks.",
    in_block={
        "self_attn_layer_norm": "attn.layernorm_qkv.0",
        **{f"self_attn.{name}_proj": "attn.layernorm_qkv.1" for name in "qkv"},
        "self_attn.q_norm": "attn.q_ln",
        "self_attn.k_norm": "attn.k_ln",
        "self_attn.out_proj": "attn.out_proj",
        "final_layer_norm": "ffn.0",
        "gate": "ffn.1",
        "up": "ffn.1",
        "fc2": "ffn.3",
    },
    others={"layer_norm_after.": "transformer.norm."},
)
"""The tensor names in the authors' files of ESM3, and of ESM-C from 2024-12."""

LM_HEAD = {"0": "dense", "2": "layer_norm", "3": "decoder"}
"""The index of each LM-head layer in the authors' `nn.Sequential`, mapped to esmshard's name of the layer."""

JOINED = {
    "attn.layernorm_qkv.1.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "ffn.1.weight": ("gate.weight", "up.weight"),
}
"""The names of joined tensors in files, mapped to esmshard's names of the parts. All parts have equally many rows."""

_OF_2026 = {
    "layernorm_qkv.layer_norm_": "layernorm_qkv.0.",
    "layernorm_qkv.weight": "layernorm_qkv.1.weight",
    "ffn.layer_norm_": "ffn.0.",
    "ffn.fc1_weight": "ffn.1.weight",
    "ffn.fc2_weight": "ffn.3.weight",
}
"""Parts of tensor names in files of 2026-05, mapped to the same parts in files of 2024-12."""


def authors_pieces(key: str, config: EsmcConfig, names: Names = AUTHORS) -> tuple[Piece, ...]:
    """Return the result of `Family.pieces` for a tensor name in files of ESM C's authors. `names` translates these
    names to esmshard's.
    """
    for new, old in _OF_2026.items():
        key = key.replace(new, old)
    match = re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", key)
    if match and match[2] in JOINED:
        rows = config.dim if "qkv" in key else config.ffn_width
        return tuple(
            Piece(f"layers.{match[1]}.{name}", slice(n * rows, (n + 1) * rows))
            for n, name in enumerate(JOINED[match[2]])
        )
    return (Piece(names.ours(key)),)


def authors_sizes(keys: Iterable[str], table: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return a published model's number of layers, width and number of heads from the keys of its file. `table` and
    `shape` are the key and shape of the token embedding. Raises `ValueError` for an unexpected shape.
    """
    if len(shape) != 2 or shape[0] != ROWS or shape[1] % HEAD:
        raise ValueError(f"{table} has shape {list(shape)} and must have {ROWS} rows and a multiple of {HEAD} columns")
    layers = {int(match[1]) for key in keys if (match := re.match(r"transformer\.blocks\.(\d{1,6})\.", key))}
    return {"n_layers": max(layers, default=0) + 1, "dim": shape[1], "n_heads": shape[1] // HEAD}


def write_tokenizer(directory: Path, vocabulary: Sequence[str], roles: Mapping[str, str], name: str) -> None:
    """Write a tokenizer of single letters for `transformers.AutoTokenizer` to an existing directory. `vocabulary`
    has the tokens in the order of their indices. `roles` has the special tokens by their roles in `transformers`, such
    as `mask`. The tokenizer adds `bos` and `eos` to each sequence. `name` is the tokenizer's class.
    """
    rows = {token: n for n, token in enumerate(vocabulary)}
    special = sorted(set(roles.values()), key=rows.__getitem__)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first, last = ({"SpecialToken": {"id": roles[role], "type_id": 0}} for role in ("bos", "eos"))
    a, b = ({"Sequence": {"id": sequence, "type_id": n}} for n, sequence in enumerate("AB"))
    ends = {token: {"id": token, "ids": [rows[token]], "tokens": [token]} for token in (roles["bos"], roles["eos"])}
    template = {"single": [first, a, last], "pair": [first, a, b, last], "special_tokens": ends}
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder")),
        "added_tokens": [{"id": rows[token], "content": token, **flags, "special": True} for token in special],
        "post_processor": {"type": "TemplateProcessing", **template},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": rows, "merges": []},
    }
    replace_json(directory / "tokenizer.json", tokenizer)
    settings = {f"{role}_token": token for role, token in roles.items()} | {"tokenizer_class": name}
    replace_json(directory / "tokenizer_config.json", settings)


_CANDIDO = "Candido et al. 2026, https://biohub.ai/papers/esm_protein.pdf"
_HOLDER = "Chan Zuckerberg Biohub and the ESM-C authors"


class EsmcFamily(Family):
    """Describes all ESM-C models."""

    title = "ESM-C"
    config = EsmcConfig
    trunk = ESMC
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # For tests and for training from scratch on a laptop; no released model has these names.
        "esmc_nano": EsmcConfig(n_layers=2, dim=32, n_heads=4),
        "esmc_mini": EsmcConfig(n_layers=6, dim=128, n_heads=8),
        "esmc_300m": EsmcConfig(n_layers=30, dim=960, n_heads=15),
        "esmc_600m": EsmcConfig(n_layers=36, dim=1152, n_heads=18),
        "esmc_6b": EsmcConfig(n_layers=80, dim=2560, n_heads=40),
    }
    released: ClassVar[Mapping[str, Released]] = {
        f"esmc_{size.lower()}": Released(f"biohub/ESMC-{size}", "mit", _HOLDER, _CANDIDO)
        for size in ("300M", "600M", "6B")
    }
    paper = _CANDIDO
    window = 2046
    model_types = ("esmc", "ESMplusplus")
    model_class = "EsmcForMaskedLM"
    prefix = "esmc."
    names = Names(
        block="esmc.layers.",
        in_block={
            **{f"self_attn.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")},
            "self_attn.out_proj": "self_attn.o_proj",
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
        others={"embed_tokens.": "esmc.embed_tokens.", "layer_norm_after.": "esmc.norm."},
    )

    def pieces(self, key: str, config: EsmcConfig) -> tuple[Piece, ...]:
        bare = re.sub(r"^esmc\.", "", key)
        # TransformerEngine writes empty `_extra_state` entries, and `transformers` a buffer that is not needed.
        if bare.endswith("._extra_state") or bare == "rotary_emb.original_inv_freq":
            return ()
        if bare == "rotary_emb.inv_freq":  # All layers share one table of rotary frequencies.
            return tuple(Piece(f"layers.{n}.self_attn.rot_emb.inv_freq") for n in range(config.n_layers))
        if bare.startswith("transformer."):
            return authors_pieces(bare, config)
        if match := re.fullmatch(r"(?:lm_head|sequence_head)\.([023])\.(weight|bias)", bare):
            return (Piece(f"lm_head.{LM_HEAD[match[1]]}.{match[2]}"),)
        if bare == "embed.weight":
            return (Piece("embed_tokens.weight"),)
        name = self.names.ours(f"esmc.{bare}")
        return (Piece(key if name.startswith("esmc.") else name),)

    def read_config(self, raw: Mapping[str, Any]) -> EsmcConfig:
        """Read a `config.json` from `transformers`, from ESM++, or from the authors in 2026-05."""
        false = ("attention_bias", "mlp_bias", "tie_word_embeddings")
        check_settings(raw, {"vocab_size": ROWS, "hidden_act": "silu", **dict.fromkeys(false, False)})
        if isinstance(rope := raw.get("rope_parameters"), dict):
            check_settings(rope, {"rope_type": "default", "rope_theta": 10000.0}, "rope_parameters.")
        authors_names = {"n_layers": "n_layers", "dim": "d_model", "n_heads": "n_heads"}
        config = EsmcConfig(**renamed(raw, authors_names if "d_model" in raw else SIZE_KEYS))
        width = raw.get("intermediate_size")
        return config if width in (None, config.ffn_width) else replace(config, ffn=width)

    def write_config(self, config: EsmcConfig) -> dict[str, Any]:
        return {
            "architectures": ["EsmcForMaskedLM"],
            "attention_bias": False,
            "bos_token_id": CLS,
            "eos_token_id": EOS,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.dim,
            "intermediate_size": config.ffn_width,
            "mask_token_id": MASK,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "model_type": "esmc",
            "num_attention_heads": config.n_heads,
            "num_hidden_layers": config.n_layers,
            "num_key_value_heads": config.n_heads,
            "pad_token_id": PAD,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": ROWS,
        }

    def write_tokenizer(self, directory: Path) -> None:
        names = [*TOKENS]
        names[SEPARATOR] = "|"
        roles = {"bos": CLS, "cls": CLS, "eos": EOS, "mask": MASK, "pad": PAD, "unk": UNK, "chain_break": SEPARATOR}
        write_tokenizer(directory, names, {role: names[n] for role, n in roles.items()}, "EsmcTokenizer")

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Read a `.pth` file of 2024-12. The architecture follows from the shapes of the tensors."""
        table = data.get("embed.weight")
        if table is None or not any(str(key).startswith("transformer.blocks.") for key in data):
            return None
        config = EsmcConfig(**authors_sizes(map(str, data), "embed.weight", table.shape))
        return Opened(config, self.tensors(weight_reader.tensors(data), config), (path,))


FAMILY = EsmcFamily()
