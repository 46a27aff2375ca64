"""ESM-C (ESM Cambrian) over packed sequences, and its files.

The reference for every number is `transformers` 5.23 (`models/esmc/modeling_esmc.py`); `tests/parity/` compares the
two.

Four layouts of files exist, and all hold the same tensors. `transformers` from 5.16 on writes one key for each of our
tensors. The files of 2026-05 and those of 2024-12 join the projections of queries, keys and values in one tensor, and
gate and up in another, under two sets of names. ESM++ has the names of 2024-12. Keys are unambiguous, so that one
function reads all of them; only the first layout is written, which the authors' code reads from 3.4 on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from esmshard.model.config import ModelConfig
from esmshard.model.families import gated_base
from esmshard.model.families.family import (
    SIZES_OF_TRANSFORMERS,
    Family,
    Names,
    Opened,
    Piece,
    Released,
    check_settings,
    renamed,
)
from esmshard.model.families.gated_base import (
    LM_HEAD,
    ROWS,
    GatedConfig,
    GatedTrunk,
    UntiedLMHead,
    authors_pieces,
    authors_sizes,
)
from esmshard.vocab import CLS, EOS, MASK, PAD, SEPARATOR, TOKENS, UNK


@dataclass(frozen=True, kw_only=True)
class EsmcConfig(GatedConfig):
    """The architecture of an ESM-C."""

    family: ClassVar[str] = "esmc"


class ESMC(GatedTrunk):
    """The ESM-C trunk with its LM head."""

    def __init__(self, config: EsmcConfig) -> None:
        super().__init__(config, ROWS, nn.LayerNorm(config.dim, bias=False), UntiedLMHead(config.dim, ROWS))


_CANDIDO = "Candido et al. 2026, https://biohub.ai/papers/esm_protein.pdf"
_HOLDER = "Chan Zuckerberg Biohub and the ESM-C authors"


class EsmcFamily(Family):
    """ESM-C."""

    title = "ESM-C"
    config = EsmcConfig
    trunk = ESMC
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # These are for tests and for training from scratch on a laptop; nothing is released under these names.
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
    reads_pickles = True
    model_types = ("esmc", "ESMplusplus")
    model_class = "EsmcForMaskedLM"
    model_module = "transformers.models.esmc.modeling_esmc"
    prefix = "esmc."
    names = Names(
        block="esmc.layers.",
        in_block={
            "self_attn.q_proj": "self_attn.q_proj",
            "self_attn.k_proj": "self_attn.k_proj",
            "self_attn.v_proj": "self_attn.v_proj",
            "self_attn.out_proj": "self_attn.o_proj",
            "self_attn.q_norm": "self_attn.q_norm",
            "self_attn.k_norm": "self_attn.k_norm",
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
        others={"embed_tokens.weight": "esmc.embed_tokens.weight", "layer_norm_after.weight": "esmc.norm.weight"},
    )

    def pieces(self, key: str, config: EsmcConfig) -> tuple[Piece, ...]:
        """Return our tensors in a key of any of the layouts. An unknown key is returned as it is."""
        bare = re.sub(r"^esmc\.", "", key)
        # An empty record of TransformerEngine, and a buffer of `transformers`, which no file holds.
        if bare.endswith("._extra_state") or bare == "rotary_emb.original_inv_freq":
            return ()
        if bare == "rotary_emb.inv_freq":  # All layers share one table.
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
        """Return the architecture of a `config.json`: that of `transformers`, of the authors of 2026-05, or of ESM++.

        ESM++ has the names of transformers, and the authors' files of 2026-05 their own.
        """
        false = ("attention_bias", "mlp_bias", "tie_word_embeddings")
        check_settings(raw, {"vocab_size": ROWS, "hidden_act": "silu", **dict.fromkeys(false, False)})
        if isinstance(rope := raw.get("rope_parameters"), dict):
            check_settings(rope, {"rope_type": "default", "rope_theta": 10000.0}, "rope_parameters.")
        own = {"n_layers": "n_layers", "dim": "d_model", "n_heads": "n_heads"}
        config = EsmcConfig(**renamed(raw, own if "d_model" in raw else SIZES_OF_TRANSFORMERS))
        width = raw.get("intermediate_size")
        return config if width in (None, config.ffn_width) else replace(config, ffn=width)

    def write_config(self, config: EsmcConfig) -> dict[str, Any]:
        """Return the content of `config.json` for `EsmcForMaskedLM`."""
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
        """Write the files from which `transformers.AutoTokenizer` makes its EsmcTokenizer."""
        names = [*TOKENS]
        names[SEPARATOR] = "|"
        roles = {"bos": CLS, "cls": CLS, "eos": EOS, "mask": MASK, "pad": PAD, "unk": UNK, "chain_break": SEPARATOR}
        settings = {f"{role}_token": names[n] for role, n in roles.items()} | {"tokenizer_class": "EsmcTokenizer"}
        special = [names[n] for n in (CLS, PAD, EOS, UNK, SEPARATOR, MASK)]
        gated_base.write_tokenizer(directory, names, special, "AB", settings)

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Read a `.pth` file in which ESM-C was published in 2024-12: tensors alone, without sizes."""
        table = data.get("embed.weight")
        if table is None or not any(str(key).startswith("transformer.blocks.") for key in data):
            return None
        config = EsmcConfig(**authors_sizes(map(str, data), "embed.weight", table.shape))
        return Opened(config, self.tensors(data, config), (path,))


FAMILY = EsmcFamily()
