"""Defines the model family BERT (Devlin et al. 2019, arXiv:1810.04805) with the vocabulary of ProtBert, for packed
sequences, and its files for `transformers`.

All outputs must equal the outputs of `BertForMaskedLM` of `transformers`. `tests/parity/test_bert.py` compares the
outputs. `esmshard.batch` explains the letters of tensor names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.io.paths import replace_json
from esmshard.model.attention import OnAttention, SelfAttention, TrunkBlock
from esmshard.model.config import ModelConfig
from esmshard.model.families import family
from esmshard.model.families.esm2 import TIED, EsmFamily, LMHead
from esmshard.model.families.family import Corruption, Family, Names, Piece, Released
from esmshard.model.trunk import ABSENT, ContactRegression, Trunk, embedding
from esmshard.vocab import SEPARATOR, TOKENS, VOCAB_SIZE, Chains

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
VOCABULARY = (*SPECIAL.values(), *"LAGVESIKRDTPNQFYMHCWXUBZO")
"""ProtBert's tokens, in the order of the embedding's rows (`vocab.txt` of IgBert, which is the same)."""

_RENAMED = {"<eos>": "[SEP]", **{f"<{role}>": token for role, token in SPECIAL.items()}}
"""The tokens of `esmshard.vocab` that have another name in ProtBert, mapped to ProtBert's name."""
_READ = {**_RENAMED, TOKENS[SEPARATOR]: "[SEP]", **dict.fromkeys("BUZO", "X"), **dict.fromkeys(".-", "[UNK]")}
"""`_RENAMED`, and the tokens that the model reads as another token. In pre-training, X replaced B, U, Z and O, and
IgBert read [SEP] between two chains."""

EPS = 1e-12


@cache
def _rows(device: torch.device, *, read: bool) -> torch.Tensor:
    """Return the row of ProtBert's embedding for each token of `esmshard.vocab`, int64 [33]: the row that the model
    reads or, with `read=False`, the row that it predicts, which is 30 for absent tokens. The cache avoids copies.
    """
    names = [(_READ if read else _RENAMED).get(token, token) for token in TOKENS]
    rows = [VOCABULARY.index(name) if name in VOCABULARY else len(VOCABULARY) for name in names]
    return torch.tensor(rows, device=device)


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """The architecture of a BERT model with learned positions."""

    family: ClassVar[str] = "bert"
    chain_break: ClassVar[bool] = True

    max_positions: int = 40000
    """The number of position embeddings, including the positions of [CLS] and [SEP]."""

    @property
    def most_tokens(self) -> int:
        return self.max_positions

    @property
    def n_logits(self) -> int:
        return VOCAB_SIZE


class BertLayer(TrunkBlock):
    """A block with a LayerNorm of the sum of input and output, after attention and after the feed-forward part."""

    reads = ("attention_input", "ffn_input")

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention_input = nn.Identity()
        self.self_attn = SelfAttention(dim, n_heads, rotary=False)
        self.self_attn_layer_norm = nn.LayerNorm(dim, eps=EPS)
        self.ffn_input = nn.Identity()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim, eps=EPS)

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, layer: int = 0, on_attention: OnAttention | None = None
    ) -> torch.Tensor:
        on_qk = partial(on_attention, layer) if on_attention is not None else None
        x_TD = self.self_attn_layer_norm(x_TD + self.self_attn(self.attention_input(x_TD), batch, on_qk))
        h_TF = F.gelu(self.fc1(self.ffn_input(x_TD)))
        return self.final_layer_norm(x_TD + self.fc2(h_TF))  # type: ignore[no-any-return]


class BertHead(LMHead):
    """The LM head of BERT. The logits have the order of `esmshard.vocab`. Gaps and chain breaks, which ProtBert lacks,
    have the logit `ABSENT`.
    """

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, 33]."""
        logits = super().forward(x_PD)
        logits = torch.cat([logits, torch.full_like(logits[:, :1], ABSENT)], dim=1)
        return logits.index_select(1, _rows(logits.device, read=False))


class Bert(Trunk):
    """The BERT language model with its LM head. Every token has the token type 0, as in the authors' pre-training."""

    tied: ClassVar[Mapping[str, str]] = {TIED: "embed_tokens.weight"}
    lm_head: BertHead

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(len(VOCABULARY), config.dim, padding_idx=VOCABULARY.index("[PAD]"))
        self.embed_types = embedding(_FIXED["type_vocab_size"], config.dim)
        self.embed_positions = embedding(config.max_positions, config.dim)
        self.emb_layer_norm_before = nn.LayerNorm(config.dim, eps=EPS)
        self.layers = nn.ModuleList(BertLayer(config.dim, config.n_heads) for _ in range(config.n_layers))
        self.contact_head = ContactRegression(config.n_maps)
        self.lm_head = BertHead(config.dim, self.embed_tokens.weight, EPS)

    def tie_weights(self) -> None:
        self.lm_head.weight = self.embed_tokens.weight

    def rows(self, batch: TokenBatch) -> torch.Tensor:
        """Return the index of the embedding's row for each token, int64 [T]."""
        return _rows(batch.tokens_T.device, read=True)[batch.tokens_T]

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        x_TD = self.embed_tokens(self.rows(batch)) + self.embed_types.weight[0]
        return self.emb_layer_norm_before(x_TD + self.embed_positions(batch.position_T))  # type: ignore[no-any-return]

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD  # The last block ends with a norm.


_PROTBERT = BertConfig(n_layers=30, dim=1024, n_heads=16)
_ELNAGGAR = "Elnaggar et al. 2022, IEEE TPAMI 44:7112, doi:10.1109/TPAMI.2021.3095381"
_KENLAY = "Kenlay et al. 2024, PLOS Comput Biol 20:e1012646, doi:10.1371/journal.pcbi.1012646"
_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": EPS,
    "pad_token_id": VOCABULARY.index("[PAD]"),
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": len(VOCABULARY),
}
"""The settings that all models of this family share; except for `vocab_size`, the defaults in `transformers`."""


class BertFamily(Family):
    """Describes ProtBert and IgBert.

    Pre-training followed BERT: of the residues to predict, 10% became a random token of the vocabulary, special tokens
    included, so each of 30 tokens had the same probability, also the true token.
    """

    title = "BERT"
    config = BertConfig
    trunk = Bert
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # For tests and for training from scratch on a laptop; no released model has these names.
        "bert_nano": BertConfig(n_layers=2, dim=32, n_heads=4, max_positions=2048),
        "bert_mini": BertConfig(n_layers=6, dim=128, n_heads=8, max_positions=2048),
        "prot_bert": _PROTBERT,
        "prot_bert_bfd": _PROTBERT,
        # IgBert read the heavy chain, [SEP] and the light chain.
        "igbert": replace(_PROTBERT, chains=Chains("break")),
        "igbert_unpaired": _PROTBERT,
    }
    released: ClassVar[Mapping[str, Released]] = {
        "prot_bert": Released("Rostlab/prot_bert", "afl-3.0", "Rostlab", _ELNAGGAR),
        "prot_bert_bfd": Released("Rostlab/prot_bert_bfd", "afl-3.0", "Rostlab", _ELNAGGAR),
        "igbert": Released("Exscientia/IgBert", "mit", "Exscientia", _KENLAY),
        "igbert_unpaired": Released("Exscientia/IgBert_unpaired", "mit", "Exscientia", _KENLAY),
    }
    paper = _ELNAGGAR
    window = 2046
    corruption = Corruption(random=0.1, unchanged=0.1, letters=len(VOCABULARY))
    model_types = ("bert",)
    model_class = "BertForMaskedLM"
    vocab_size = len(VOCABULARY)
    prefix = "bert."
    names = Names(
        block="bert.encoder.layer.",
        in_block={  # The linear layers have the same names as in files of ESM-2.
            **EsmFamily.names.in_block,
            "self_attn_layer_norm": "attention.output.LayerNorm",
            "final_layer_norm": "output.LayerNorm",
        },
        others={
            "embed_tokens.": "bert.embeddings.word_embeddings.",
            "embed_types.": "bert.embeddings.token_type_embeddings.",
            "embed_positions.": "bert.embeddings.position_embeddings.",
            "emb_layer_norm_before.": "bert.embeddings.LayerNorm.",
            TIED: "cls.predictions.decoder.weight",
            "lm_head.bias": "cls.predictions.bias",
            "lm_head.dense.": "cls.predictions.transform.dense.",
            "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
        },
    )

    def pieces(self, key: str, config: BertConfig) -> tuple[Piece, ...]:
        if not re.match(r"(bert|cls|contact_head|head)\.", key):
            key = "bert." + key  # `BertModel`, which has no LM head, wrote the file.
        # The parts for pairs of sentences were never trained, and the second bias is the first one under another name.
        if re.match(r"bert\.(embeddings\.position_ids$|pooler\.)|cls\.(seq_relationship|predictions\.decoder\.b)", key):
            return ()
        key = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", key)  # as in files from TensorFlow
        return (Piece(self.names.ours(re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", key))),)

    def read_config(self, raw: Mapping[str, Any]) -> BertConfig:
        config = BertConfig(**family.renamed(raw, family.SIZE_KEYS | {"max_positions": "max_position_embeddings"}))
        fixed = {"is_decoder": False, "tie_word_embeddings": True, "intermediate_size": config.ffn_width}
        family.check_settings(raw, _FIXED | fixed)
        return config

    def write_config(self, config: BertConfig) -> dict[str, Any]:
        return _FIXED | {
            "architectures": [self.model_class],
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
            "hidden_size": config.dim,
            "intermediate_size": config.ffn_width,
            "max_position_embeddings": config.max_positions,
            "model_type": "bert",
            "num_attention_heads": config.n_heads,
            "num_hidden_layers": config.n_layers,
        }

    def write_tokenizer(self, directory: Path) -> None:
        special: dict[str, Any] = {f"{role}_token": token for role, token in SPECIAL.items()}
        (directory / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
        replace_json(directory / "special_tokens_map.json", special)
        special |= {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}
        replace_json(directory / "tokenizer_config.json", special)


FAMILY = BertFamily()
