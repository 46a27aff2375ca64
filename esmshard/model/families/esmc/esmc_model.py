"""ESM-C over packed sequences.

The reference for every number is `transformers` 5.23 (`models/esmc/modeling_esmc.py`); `tests/parity/` compares the
two. `esmshard.batch` explains the letters of tensor names.
"""

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.contacts import ContactRegression
from esmshard.model.families.esmc.esmc_config import EsmcConfig
from esmshard.model.gated_config import ROWS
from esmshard.model.gated_layer import GatedLayer, UntiedLMHead
from esmshard.model.trunk import Trunk


class ESMC(Trunk):
    """The ESM-C trunk with its LM head, and a contact regression, which no released file has."""

    config: EsmcConfig

    def __init__(self, config: EsmcConfig) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(ROWS, config.dim).uniform_(-1, 1)  # see ESM2 for why not nn.Embedding's own
        self.embed_tokens = nn.Embedding(ROWS, config.dim, _weight=table)
        self.layers = nn.ModuleList(
            GatedLayer(config.dim, config.n_heads, config.ffn_width, qk_norm=True, branch_scale=config.branch_scale)
            for _ in range(config.n_layers)
        )
        self.contact_head = ContactRegression(config.n_maps)
        self.layer_norm_after = nn.LayerNorm(config.dim, bias=False)
        self.lm_head = UntiedLMHead(config.dim, ROWS)

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Look up the token embeddings [T, D]. `<mask>` has a learned row, and nothing is scaled."""
        return self.embed_tokens(batch.tokens_T)  # type: ignore[no-any-return]

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the last LayerNorm."""
        return self.layer_norm_after(x_TD)  # type: ignore[no-any-return]
