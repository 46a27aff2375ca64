"""Defines ESM-2, ESM-1b and ESM-1v for packed sequences, and their files for `transformers` and fair-esm.

The parameters have the names that fair-esm gives them. All outputs must equal the outputs of fair-esm 2.0.0
(`esm/model/esm2.py`, `esm1.py`). `tests/parity/` compares the outputs. `esmshard.batch` explains the capital letters at
the end of variable names.
"""

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.io.paths import replace_json
from esmshard.model import weight_reader
from esmshard.model.attention import OnAttention, SelfAttention, TrunkBlock
from esmshard.model.config import ModelConfig
from esmshard.model.families.family import (
    SIZE_KEYS,
    AuthorsFile,
    Corruption,
    Family,
    Names,
    Opened,
    Piece,
    Released,
    check_settings,
    renamed,
)
from esmshard.model.trunk import ContactRegression, Trunk, embedding
from esmshard.vocab import EOS, MASK, PAD, TOKENS, VOCAB_SIZE

MASK_RATIO_TRAINED = 0.15 * 0.8
"""The share of `<mask>` tokens in pre-training, for `_token_dropout`."""

DPLM = "EsmForDPLM"
"""The class of the authors' code in `config.json` of DPLM (https://github.com/bytedance/dplm)."""

TIED = "lm_head.weight"
"""The LM head's matrix, which is the same tensor as `embed_tokens.weight`."""


@dataclass(frozen=True, kw_only=True)
class EsmConfig(ModelConfig):
    """The architecture of an ESM-2 model or, with `max_positions`, of an ESM-1b or ESM-1v model."""

    family: ClassVar[str] = "esm2"
    vocabulary: ClassVar[tuple[str, ...]] = TOKENS
    """The tokens, in the order of the embedding's rows. `<pad>` has the row `PAD` in every subclass."""

    token_dropout: bool = True
    """Whether embeddings of `<mask>` are set to zero and all other embeddings rescaled, as in all released models."""
    max_positions: int | None = None
    """The number of position embeddings (ESM-1b, ESM-1v: 1024); None for rotary positions (ESM-2, SaProt)."""
    emb_layer_norm_before: bool = False
    """Whether a LayerNorm is applied to the embeddings before the first layer."""
    diffusion: bool = field(default=False, compare=False)
    """Whether the model was trained by diffusion, as DPLM: every residue to predict became `<mask>`."""

    @property
    def mask_row(self) -> int:
        """The index of the embedding's row for `<mask>`."""
        return self.vocabulary.index("<mask>")

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary, not learned."""
        return self.max_positions is None

    @property
    def position_rows(self) -> int:
        """The number of rows in the table of position embeddings. The first position has row PAD + 1, as in fairseq."""
        return (self.max_positions or 0) + PAD + 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_positions

    @property
    def n_logits(self) -> int:
        return VOCAB_SIZE


class TransformerLayer(TrunkBlock):
    """A block with a LayerNorm before attention, and a LayerNorm before the feed-forward part."""

    def __init__(self, dim: int, n_heads: int, *, rotary: bool = True) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, n_heads, rotary=rotary)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, layer: int = 0, on_attention: OnAttention | None = None
    ) -> torch.Tensor:
        on_qk = partial(on_attention, layer) if on_attention is not None else None
        x_TD = x_TD + self.self_attn(self.self_attn_layer_norm(x_TD), batch, on_qk)
        h_TF = F.gelu(self.fc1(self.final_layer_norm(x_TD)))  # Exact gelu. The tanh form differs by 5e-4.
        return x_TD + self.fc2(h_TF)  # type: ignore[no-any-return]


class LMHead(nn.Module):
    """The LM head of ESM-2. Its matrix `weight` is the token embedding's matrix."""

    def __init__(self, dim: int, weight: torch.Tensor, eps: float = 1e-5) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.layer_norm = nn.LayerNorm(dim, eps)
        self.weight: torch.Tensor = weight
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, V]."""
        return F.linear(self.layer_norm(F.gelu(self.dense(x_PD))), self.weight, self.bias)


class ESM2(Trunk):
    """The language model ESM-2, ESM-1b or ESM-1v, with LM head and contact regression."""

    tied: ClassVar[Mapping[str, str]] = {TIED: "embed_tokens.weight"}
    make_lm_head: ClassVar[type[LMHead]] = LMHead
    config: EsmConfig
    lm_head: LMHead

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(len(config.vocabulary), config.dim, padding_idx=PAD)
        if not config.rotary:
            self.embed_positions = embedding(config.position_rows, config.dim)
        if config.emb_layer_norm_before:
            self.emb_layer_norm_before = nn.LayerNorm(config.dim)
        self.layers = nn.ModuleList(
            TransformerLayer(config.dim, config.n_heads, rotary=config.rotary) for _ in range(config.n_layers)
        )
        self.contact_head = ContactRegression(config.n_maps)
        self.emb_layer_norm_after = nn.LayerNorm(config.dim)
        self.lm_head = self.make_lm_head(config.dim, self.embed_tokens.weight)

    def tie_weights(self) -> None:
        self.lm_head.weight = self.embed_tokens.weight

    def rows(self, batch: TokenBatch) -> torch.Tensor:
        """Return the index of the embedding's row for each token, int64 [T]."""
        return batch.tokens_T

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        rows_T = self.rows(batch)
        x_TD: torch.Tensor = self.embed_tokens(rows_T)
        if self.config.token_dropout:
            x_TD = _token_dropout(x_TD, rows_T == self.config.mask_row, batch)
        if self.config.max_positions is not None:
            x_TD = x_TD + self.embed_positions(batch.position_T + PAD + 1)
        if self.config.emb_layer_norm_before:
            x_TD = self.emb_layer_norm_before(x_TD)
        return x_TD

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.emb_layer_norm_after(x_TD)  # type: ignore[no-any-return]


def _token_dropout(x_TD: torch.Tensor, masked_T: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Set embeddings of `<mask>` (where `masked_T` is True) to zero, and multiply all other embeddings by
    0.88 / (1 - share of `<mask>`), in training and evaluation. Each sequence has its own share: the number of `<mask>`
    divided by the number of tokens, including `<cls>` and `<eos>`.
    """
    lengths_N = batch.cu_seqlens.diff().long()
    running = F.pad(masked_T.long().cumsum(0), (1, 0))
    ratio_N = running[batch.cu_seqlens.long()].diff().float() / lengths_N
    scale_N = (1 - MASK_RATIO_TRAINED) / (1 - ratio_N)
    scale_T = torch.repeat_interleave(scale_N, lengths_N, output_size=batch.bounds[-1]).masked_fill(masked_T, 0.0)
    return x_TD * scale_T[:, None].to(x_TD.dtype)


class EsmFamily(Family):
    """The base class of the model families whose files `EsmForMaskedLM` of `transformers` 4 and 5 can read."""

    config: ClassVar[type[EsmConfig]]
    model_types = ("esm",)
    model_class = "EsmForMaskedLM"
    prefix = "esm."
    names = Names(
        block="esm.encoder.layer.",
        in_block={
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.out_proj": "attention.output.dense",
            "self_attn.rot_emb": "attention.self.rotary_embeddings",
            "self_attn_layer_norm": "attention.LayerNorm",
            "fc1": "intermediate.dense",
            "fc2": "output.dense",
            "final_layer_norm": "LayerNorm",
        },
        others={
            "embed_tokens.": "esm.embeddings.word_embeddings.",
            "embed_positions.": "esm.embeddings.position_embeddings.",
            "emb_layer_norm_before.": "esm.embeddings.layer_norm.",
            "emb_layer_norm_after.": "esm.encoder.emb_layer_norm_after.",
            "contact_head.": "esm.contact_head.",
            TIED: "lm_head.decoder.weight",
        },
    )

    def initial(self, config: EsmConfig, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Return initial values of the tensor `name`. As in fair-esm, linear layers are Xavier-uniform, with gain
        1/sqrt 2 for q, k and v. Embeddings are normal with standard deviation 0.02, so initial logits are small.
        """
        if len(shape) == 1:
            return super().initial(config, name, shape, generator)
        if name.startswith("embed_"):
            table = 0.02 * torch.randn(shape, generator=generator)
            table[PAD] = 0.0
            return table
        gain = 1 / math.sqrt(2) if re.search(r"\.[qkv]_proj\.", name) else 1.0
        bound = gain * math.sqrt(6 / (shape[0] + shape[1]))
        return torch.rand(shape, generator=generator) * 2 * bound - bound

    def pieces(self, key: str, config: EsmConfig) -> tuple[Piece, ...]:
        if not re.match(r"(esm|lm_head|head)\.", key):
            key = "esm." + key  # `EsmModel`, which has no LM head, wrote the file.
        if re.match(r"esm\.embeddings\.position_ids$|esm\.pooler\.", key):
            return ()  # The pooler was never trained.
        if config.rotary and key == self.names.theirs("embed_positions.weight"):
            return ()
        # transformers 5 writes LayerNorms under names from old TensorFlow files.
        key = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", key)
        key = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", key)
        # All layers share one table of frequencies, with a key at the top level or with `layer.*` (transformers 5.23).
        if re.search(r"(^esm\.|layer\.\*.*)rotary_embeddings\.inv_freq$", key):
            return tuple(Piece(f"layers.{n}.self_attn.rot_emb.inv_freq") for n in range(config.n_layers))
        return (Piece(self.names.ours(key)),)

    def write_config(self, config: EsmConfig) -> dict[str, Any]:
        return {
            "architectures": [DPLM if config.diffusion else "EsmForMaskedLM"],
            "attention_probs_dropout_prob": 0.0,
            "emb_layer_norm_before": config.emb_layer_norm_before,
            "eos_token_id": EOS,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": config.dim,
            "intermediate_size": 4 * config.dim,
            "layer_norm_eps": 1e-5,
            "mask_token_id": config.mask_row,
            "max_position_embeddings": 1026 if config.rotary else config.position_rows,
            "model_type": "esm",
            "num_attention_heads": config.n_heads,
            "num_hidden_layers": config.n_layers,
            "pad_token_id": PAD,
            "position_embedding_type": "rotary" if config.rotary else "absolute",
            "token_dropout": config.token_dropout,
            "vocab_size": len(config.vocabulary),
        }

    def read_config(self, raw: Mapping[str, Any]) -> EsmConfig:
        if raw.get("is_folding_model"):
            raise ValueError("ESMFold is not a language model")
        positions = raw.get("position_embedding_type", "absolute")
        if positions not in ("rotary", "absolute"):
            raise ValueError(f"position_embedding_type is {positions!r}, and must be rotary or absolute")
        config = self.config(
            **renamed(raw, SIZE_KEYS),
            token_dropout=bool(raw.get("token_dropout", False)),
            max_positions=raw.get("max_position_embeddings", 1026) - PAD - 1 if positions == "absolute" else None,
            emb_layer_norm_before=bool(raw.get("emb_layer_norm_before")),
            diffusion=raw.get("architectures") == [DPLM],
        )
        fixed = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "intermediate_size": config.ffn_width}
        if config.token_dropout and raw.get("mask_token_id") is not None:
            fixed["mask_token_id"] = config.mask_row
        check_settings({"layer_norm_eps": 1e-12, "intermediate_size": None, **raw}, fixed)
        return config

    def write_tokenizer(self, directory: Path) -> None:
        special: dict[str, Any] = {f"{role}_token": f"<{role}>" for role in ("cls", "eos", "mask", "pad", "unk")}
        (directory / "vocab.txt").write_text("\n".join(self.config.vocabulary), encoding="utf-8")
        replace_json(directory / "special_tokens_map.json", special)
        replace_json(directory / "tokenizer_config.json", special | {"tokenizer_class": "EsmTokenizer"})


_ESM1V = EsmConfig(n_layers=33, dim=1280, n_heads=20, max_positions=1024)
SIZES: dict[str, EsmConfig] = {
    # For tests and for training from scratch on a laptop; no released model has these names.
    "nano": EsmConfig(n_layers=2, dim=32, n_heads=4),
    "mini": EsmConfig(n_layers=6, dim=128, n_heads=8),
    # Trained weights are in data/starter and data/demo (`esmshard.model.config.SHIPPED`).
    "starter": EsmConfig(n_layers=6, dim=192, n_heads=12),
    "demo": EsmConfig(n_layers=6, dim=192, n_heads=6),
    # Lin et al. 2023 (doi:10.1126/science.ade2574), as released in fair-esm.
    "esm2_t6_8M_UR50D": EsmConfig(n_layers=6, dim=320, n_heads=20),
    "esm2_t12_35M_UR50D": EsmConfig(n_layers=12, dim=480, n_heads=20),
    "esm2_t30_150M_UR50D": EsmConfig(n_layers=30, dim=640, n_heads=20),
    "esm2_t33_650M_UR50D": EsmConfig(n_layers=33, dim=1280, n_heads=20),
    "esm2_t36_3B_UR50D": EsmConfig(n_layers=36, dim=2560, n_heads=40),
    "esm2_t48_15B_UR50D": EsmConfig(n_layers=48, dim=5120, n_heads=40),
    # Wang et al. 2024 (arXiv:2402.18567): ESM-2's architecture, token dropout included, trained by diffusion.
    "dplm_150m": EsmConfig(n_layers=30, dim=640, n_heads=20, diffusion=True),
    "dplm_650m": EsmConfig(n_layers=33, dim=1280, n_heads=20, diffusion=True),
    "dplm_3b": EsmConfig(n_layers=36, dim=2560, n_heads=40, diffusion=True),
    # Rives et al. 2021 (doi:10.1073/pnas.2016239118) and Meier et al. 2021 (five models, for variant effects).
    "esm1b_t33_650M_UR50S": replace(_ESM1V, emb_layer_norm_before=True),
    **{f"esm1v_t33_650M_UR90S_{n}": _ESM1V for n in range(1, 6)},
}

_LIN = "Lin et al. 2023, Science 379:1123, doi:10.1126/science.ade2574"
_RIVES = "Rives et al. 2021, PNAS 118:e2016239118, doi:10.1073/pnas.2016239118"
_MEIER = "Meier et al. 2021, NeurIPS 34, doi:10.1101/2021.07.09.450648"
_WANG = "Wang et al. 2024, ICML, PMLR 235:52309, arXiv:2402.18567"
_PAPERS = {"esm2": _LIN, "esm1b": _RIVES, "esm1v": _MEIER}


class FairEsmFile(AuthorsFile):
    """fair-esm's format: a `.pt` file, and a second file with the contact regression."""

    def path(self, directory: Path, stem: str, config: EsmConfig) -> Path:
        """Return the path `STEM.pt` in `directory`. If STEM does not begin with the architecture (esm2, esm1b or
        esm1v), the path is `ARCHITECTURE_STEM.pt`, because fair-esm reads the architecture from the file name.
        """
        architecture = "esm2" if config.rotary else "esm1b" if config.emb_layer_norm_before else "esm1v"
        has_prefix = stem.startswith("esm2" if config.rotary else ("esm1b", "esm1v"))
        return directory / (f"{stem}.pt" if has_prefix else f"{architecture}_{stem}.pt")

    def write(self, file: Path, config: EsmConfig, tensors: dict[str, torch.Tensor]) -> list[Path]:
        """Write `NAME.pt` (`file`) and `NAME-contact-regression.pt` for fair-esm's `load_model_and_alphabet_local`."""
        tensors[TIED] = tensors["embed_tokens.weight"]
        contacts = {name: tensors.pop(name) for name in list(tensors) if name.startswith("contact_head.")}
        torch.save(fair_esm_settings(config) | {"model": tensors}, file)
        regression = file.with_name(f"{file.stem}-contact-regression.pt")
        torch.save({"model": contacts}, regression)
        return [file, regression]


FAIR_ESM = FairEsmFile(
    use="""\
import argparse

import esm
import torch

torch.serialization.add_safe_globals([argparse.Namespace])  # else torch.load refuses the settings in the file
model, alphabet = esm.pretrained.load_model_and_alphabet_local(FILE)""",
    code="[fair-esm](https://github.com/facebookresearch/esm)",
    our_names=True,
)


class Esm2Family(EsmFamily):
    """Describes all ESM-2, ESM-1b, ESM-1v and DPLM models."""

    title = "ESM-2"
    config = EsmConfig
    trunk = ESM2
    sizes = SIZES
    released: ClassVar[Mapping[str, Released]] = {
        name: Released(f"facebook/{name}", "mit", "Meta Platforms, Inc. and affiliates", _PAPERS[name.split("_")[0]])
        for name in SIZES
        if re.match(r"esm\d", name)
    } | {
        name: Released(f"airkingbd/{name}", "apache-2.0", "ByteDance", _WANG, ("contact_head",))
        for name in SIZES
        if "dplm" in name
    }
    paper = _LIN
    window = 1022
    corruption = Corruption(random=0.1, unchanged=0.1, letters=20)
    vocab_size = VOCAB_SIZE
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {"fair-esm": FAIR_ESM}

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        state = data.get("model")
        if not isinstance(state, dict):
            return None
        config = config_of_fair_esm(data)
        regression = path.with_name(f"{path.stem}-contact-regression.pt")
        if regression.is_file():
            contacts = weight_reader.read_pickle(regression).get("model")
            if not isinstance(contacts, dict):
                raise InputError(f"{regression}: not a contact regression of fair-esm; download it again")
            state = state | contacts
        # Released files have fairseq's prefixes.
        state = {re.sub(r"^(encoder\.sentence_encoder\.|encoder\.)", "", str(key)): state[key] for key in state}
        # With learned positions, the row of <mask> is random in files. fair-esm also sets this row to zero.
        for name in () if config.rotary else ("embed_tokens.weight", TIED):
            if isinstance(state.get(name), torch.Tensor):
                state[name] = state[name].detach().clone()
                state[name][MASK:] = 0.0
        files = tuple(file for file in (path, regression) if file.is_file())
        return Opened(config, weight_reader.tensors(state), files)


FAMILY = Esm2Family()


def config_of_fair_esm(data: Mapping[str, Any]) -> EsmConfig:
    """Return the architecture from `data`, the content of a fair-esm `.pt` file. Raises `ValueError` for other data."""
    cfg = data.get("cfg")
    settings = data["args"] if "args" in data else cfg.get("model") if isinstance(cfg, dict) else None
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    if not isinstance(settings, dict):
        raise ValueError("neither cfg.model nor args in the file has the sizes of the model")
    args = {key.removeprefix("encoder_"): value for key, value in settings.items()}
    if "args" in data:
        if args.get("arch") != "roberta_large":
            raise ValueError(f"the architecture {args.get('arch')!r} is not ESM-2, ESM-1b or ESM-1v")
        before = any("emb_layer_norm_before" in str(key) for key in data.get("model", ()))
    else:
        args["max_positions"], before = None, False
    names = {"n_layers": "layers", "dim": "embed_dim", "n_heads": "attention_heads", "max_positions": "max_positions"}
    dropout = bool(args.get("token_dropout", False))
    config = EsmConfig(**renamed(args, names), token_dropout=dropout, emb_layer_norm_before=before)
    check_settings(args, {"ffn_embed_dim": config.ffn_width})
    return config


def fair_esm_settings(config: EsmConfig) -> dict[str, Any]:
    """Return the settings of this architecture for a fair-esm `.pt` file."""
    sizes = argparse.Namespace(
        encoder_layers=config.n_layers,
        encoder_embed_dim=config.dim,
        encoder_attention_heads=config.n_heads,
        token_dropout=config.token_dropout,
    )
    if config.rotary:
        return {"cfg": {"model": sizes}}
    sizes.arch = "roberta_large"
    sizes.encoder_ffn_embed_dim = 4 * config.dim
    sizes.max_positions = config.max_positions
    return {"args": sizes}
