"""ESM3 over packed sequences, with coordinates and structure tokens where a batch has these tracks. All other tracks
have the values that stand for nothing known.

The reference for every number is `esm` 3.4.1 (`esm/models/esm3.py`), called with one protein at a time;
`tests/parity/test_esm3.py` compares the two. `esmshard.batch` explains the letters of tensor names.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.attention import OnAttention
from esmshard.model.contacts import ContactRegression
from esmshard.model.families.esm3.esm3_config import (
    COORDINATES,
    FUNCTION_ROWS,
    FUNCTIONS,
    HEADS,
    PLDDT_BINS,
    STRUCTURE,
    STRUCTURE_MASK,
    TABLES,
    Esm3Config,
)
from esmshard.model.families.esm3.esm3_geometry import GeometricAttention
from esmshard.model.gated_config import CHAIN_BREAK, ROWS
from esmshard.model.gated_layer import GatedLayer, UntiedLMHead
from esmshard.model.trunk import Trunk
from esmshard.vocab import CLS, EOS, PAD

STRUCTURE_SPECIAL = {EOS: STRUCTURE_MASK + 1, CLS: STRUCTURE_MASK + 2, PAD: STRUCTURE_MASK + 3}
STRUCTURE_SPECIAL[CHAIN_BREAK] = STRUCTURE_MASK + 4
"""Rows of the structure tokens that stand at tokens of the sequence that are not residues."""


class OtherTracks(nn.Module):
    """The encoders of structure tokens, pLDDT, secondary structure, accessibility, functions and annotations.

    Parameter names are the authors'. The vectors for unknown values are computed from the parameters in each forward
    pass, so that no second copy of them lies in files and shards.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.plddt_projection = nn.Linear(PLDDT_BINS, dim)
        self.structure_per_res_plddt_projection = nn.Linear(PLDDT_BINS, dim)
        self.structure_tokens_embed = _table(TABLES["structure_tokens_embed"], dim)
        self.ss8_embed = _table(TABLES["ss8_embed"], dim)
        self.sasa_embed = _table(TABLES["sasa_embed"], dim)
        self.function_embed = nn.ModuleList(_table(FUNCTION_ROWS, dim // FUNCTIONS) for _ in range(FUNCTIONS))
        # Without annotations a residue gets the sum over none of these rows, which is 0.
        self.residue_embed = _table(TABLES["residue_embed"], dim)

    def forward(self, tokens_T: torch.Tensor, structure_T: torch.Tensor | None) -> torch.Tensor:
        """Return what the tracks add [T, D].

        The average pLDDT is 1 and that of each residue 0, as in the reference, and all others but structure are pads.

        Args:
            tokens_T: the sequence, whose tokens that are no residues have structure tokens of their own.
            structure_T: int64 [T], the structure tokens; None if none is known.
        """
        if structure_T is None:
            structure_T = torch.full_like(tokens_T, STRUCTURE_MASK)
        for token, row in STRUCTURE_SPECIAL.items():
            structure_T = structure_T.masked_fill(tokens_T == token, row)
        x_TD: torch.Tensor = self.structure_tokens_embed(structure_T)
        plddt_B = _radial_basis(1.0, self.plddt_projection.weight)
        residue_plddt_B = _radial_basis(0.0, self.plddt_projection.weight)
        constant_D: torch.Tensor = self.plddt_projection(plddt_B) + self.structure_per_res_plddt_projection(
            residue_plddt_B
        )
        constant_D = constant_D + self.ss8_embed.weight[0] + self.sasa_embed.weight[0]
        # Where ranks divide the layers, the weight is a plain tensor, which `get_parameter` of torch 2.11 refuses.
        functions_D = torch.cat([table.weight[0] for table in self.function_embed])  # type: ignore[index,misc]
        return x_TD + (constant_D + functions_D)


class ESM3(Trunk):
    """The ESM3 trunk with the LM head of the sequence, and a contact regression, which no released file has.

    Everything else in the released file is there too, so that the file can be written again.

    Geometric attention learns with coordinates, and the table of structure tokens with structure tokens. Without these
    tracks they are frozen, and what never learns is frozen always. Geometric attention without coordinates, and the
    other heads, have no part in any output. The vectors of unknown tracks have; but they are the same at all residues,
    which the learned rows of tokens can express as well, and of each table one row would get a gradient while weight
    decay would wear away all others.
    """

    never_learns: ClassVar[tuple[str, ...]] = ("contact_head.", "geom_attn.", "other_tracks.", "other_heads.")
    learns_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        COORDINATES: ("geom_attn.",),
        STRUCTURE: ("other_tracks.structure_tokens_embed.",),
    }
    config: Esm3Config

    def __init__(self, config: Esm3Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _table(ROWS, config.dim)
        self.other_tracks = OtherTracks(config.dim)
        self.layers = nn.ModuleList(
            GatedLayer(config.dim, config.n_heads, config.ffn_width, qk_norm=True, branch_scale=config.branch_scale)
            for _ in range(config.n_layers)
        )
        # It belongs to the first block, but lies beside the blocks, since sharding, planner and streaming rely on
        # equal blocks.
        self.geom_attn = GeometricAttention(config.dim, config.v_heads)
        self.contact_head = ContactRegression(config.n_maps)
        self.layer_norm_after = nn.LayerNorm(config.dim, bias=False)
        self.lm_head = UntiedLMHead(config.dim, ROWS)
        self.other_heads = nn.ModuleDict({name: UntiedLMHead(config.dim, rows) for name, rows in HEADS.items()})

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Add the embeddings [T, D] of all tracks. `<mask>` has a learned row, and nothing is scaled."""
        others_TD = self.other_tracks(batch.tokens_T, batch.tracks.get(STRUCTURE))
        return self.embed_tokens(batch.tokens_T) + others_TD  # type: ignore[no-any-return]

    def run_block(
        self, index: int, x_TD: torch.Tensor, batch: TokenBatch, on_attention: OnAttention | None
    ) -> torch.Tensor:
        """Apply block `index` to x [T, D]. With coordinates the first one has geometric attention, too.

        It is computed wherever batches have the track, even if all coordinates are unknown, so that all ranks have
        gradients of the same parameters.
        """
        if index or COORDINATES not in batch.tracks:
            return super().run_block(index, x_TD, batch, on_attention)
        return self.layers[0](x_TD, batch, index, on_attention, self._geometric)  # type: ignore[no-any-return]

    def _geometric(self, x_TD: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return self.geom_attn(x_TD, batch.tracks[COORDINATES], batch.token_counts)  # type: ignore[no-any-return]

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the last LayerNorm."""
        return self.layer_norm_after(x_TD)  # type: ignore[no-any-return]


def _table(rows: int, dim: int) -> nn.Embedding:
    # nn.Embedding's own normal draw is avoided: on the meta device it imports the compiler, two seconds of every start.
    return nn.Embedding(rows, dim, _weight=torch.empty(rows, dim).uniform_(-1, 1))


def _radial_basis(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return the description [B] of a value from 0 to 1 by Gaussians of 1/B width, in the type of `like`."""
    centres_B = torch.linspace(0.0, 1.0, PLDDT_BINS, device=like.device)
    return torch.exp(-(((value - centres_B) * PLDDT_BINS) ** 2)).to(like.dtype)
