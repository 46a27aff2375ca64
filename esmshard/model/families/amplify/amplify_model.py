"""AMPLIFY over packed sequences.

The reference for every number is the authors' code (https://github.com/chandar-lab/AMPLIFY, commit 2fd2c08);
`tests/parity/` compares the two. `esmshard.batch` explains the letters of tensor names.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.contacts import ContactRegression
from esmshard.model.families.amplify.amplify_config import ROWS, UNKNOWN, VOCABULARY, AmplifyConfig
from esmshard.model.gated_layer import GatedLayer, RMSNorm
from esmshard.model.trunk import ABSENT, Trunk

_norm = partial(RMSNorm, eps=1e-5)


class AmplifyHead(nn.Module):
    """The LM head: one linear layer, whose columns are put into the order of `esmshard.vocab`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(dim, len(VOCABULARY))

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, 33], with `ABSENT` for the tokens that AMPLIFY lacks."""
        logits = self.decoder(x_PD)
        columns, absent = logits.split(1, dim=1), torch.full_like(logits[:, :1], ABSENT)
        return torch.cat([absent if row is None else columns[row] for row in ROWS], dim=1)


class Amplify(Trunk):
    """The AMPLIFY trunk with its LM head, and a contact regression, which no released file has."""

    config: AmplifyConfig

    def __init__(self, config: AmplifyConfig) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(len(VOCABULARY), config.dim).uniform_(-1, 1)  # see ESM2 for why not nn.Embedding's own
        self.embed_tokens = nn.Embedding(len(VOCABULARY), config.dim, _weight=table)
        self.layers = nn.ModuleList(
            GatedLayer(config.dim, config.n_heads, config.ffn_width, norm=_norm, interleaved=True)
            for _ in range(config.n_layers)
        )
        self.contact_head = ContactRegression(config.n_maps)
        self.layer_norm_after = _norm(config.dim)
        self.lm_head = AmplifyHead(config.dim)

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Look up the token embeddings [T, D]. Letters that AMPLIFY lacks have the row of `<unk>`."""
        # Rows are joined instead of looked up by a second table, which would be a buffer beside the weights.
        rows = self.embed_tokens.weight.split(1)  # type: ignore[no-untyped-call]
        table = torch.cat([rows[UNKNOWN if row is None else row] for row in ROWS])
        return F.embedding(batch.tokens_T, table)

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the last norm."""
        return self.layer_norm_after(x_TD)  # type: ignore[no-any-return]
