"""ESM3 over packed sequences, with coordinates and structure tokens where a batch has these tracks, and its files. All
other tracks have the values that stand for nothing known.

The reference for every number is `esm` 3.4.1 (`esm/models/esm3.py`), called with one protein at a time;
`tests/parity/test_esm3.py` compares the two. `esmshard.batch` explains the letters of tensor names.

`transformers` has no ESM3. A fine-tuned one is therefore written under the authors' names, with a `config.json` whose
`model_type` is `esm3`: esmshard reads such a directory, and nothing else does. `Esm3File` writes the file that the
authors' code reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.attention import OnAttention
from esmshard.model.config import ModelConfig
from esmshard.model.families.esm3_structure import GeometricAttention, structure_tokens
from esmshard.model.families.esmc import (
    AUTHORS,
    LM_HEAD,
    ROWS,
    EsmcConfig,
    GatedTrunk,
    UntiedLMHead,
    authors_pieces,
    authors_sizes,
)
from esmshard.model.families.family import AuthorsFile, Encoder, Family, Names, Opened, Piece, Released, renamed
from esmshard.model.trunk import embedding
from esmshard.vocab import CLS, EOS, PAD, SEPARATOR, Track

STRUCTURE_TOKENS = 4096
"""Number of the codes that describe the structure around a residue."""
STRUCTURE_MASK = STRUCTURE_TOKENS
"""Row of the structure token of a residue whose structure is unknown."""
STRUCTURE_SPECIAL = {
    EOS: STRUCTURE_MASK + 1,
    CLS: STRUCTURE_MASK + 2,
    PAD: STRUCTURE_MASK + 3,
    SEPARATOR: STRUCTURE_MASK + 4,
}
"""Rows of the structure tokens that stand at tokens of the sequence that are not residues."""
TABLES = {
    "structure_tokens_embed": STRUCTURE_TOKENS + 5,
    "ss8_embed": 8 + 3,
    "sasa_embed": 16 + 3,
    "residue_embed": 1478,
}
"""Rows of the embedding tables of the other tracks, by the authors' names, without those of functions."""
FUNCTIONS, FUNCTION_ROWS = 8, 260
"""Number of tables of function tokens, each of 1/8 of the width of the model, and the rows of each."""
PLDDT_BINS = 16
"""Radial basis functions that describe a pLDDT."""
HEADS = {
    "structure_head": STRUCTURE_TOKENS,
    "ss8_head": TABLES["ss8_embed"],
    "sasa_head": TABLES["sasa_embed"],
    "function_head": FUNCTIONS * FUNCTION_ROWS,
    "residue_head": TABLES["residue_embed"],
}
"""Columns of the heads of the other tracks, by the authors' names."""
COORDINATES, STRUCTURE = "coordinates", "structure_tokens"
"""Names of the tracks that the models read besides the sequence."""


@dataclass(frozen=True, kw_only=True)
class Esm3Config(EsmcConfig):
    """The architecture of an ESM3."""

    family: ClassVar[str] = "esm3"

    v_heads: int
    """Heads of the geometric attention in the first block."""

    def kept_with(self, track: str) -> int:
        """Geometric attention keeps its input, the same normalised, its vectors, and the input of the last matrix."""
        return 2 * self.dim + 18 * self.v_heads if track == COORDINATES else 0


class OtherTracks(nn.Module):
    """The encoders of structure tokens, pLDDT, secondary structure, accessibility, functions and annotations.

    Parameter names are the authors'. The vectors for unknown values are computed from the parameters in each forward
    pass, so that no second copy of them lies in files and shards.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.plddt_projection = nn.Linear(PLDDT_BINS, dim)
        self.structure_per_res_plddt_projection = nn.Linear(PLDDT_BINS, dim)
        self.structure_tokens_embed = embedding(TABLES["structure_tokens_embed"], dim)
        self.ss8_embed = embedding(TABLES["ss8_embed"], dim)
        self.sasa_embed = embedding(TABLES["sasa_embed"], dim)
        self.function_embed = nn.ModuleList(embedding(FUNCTION_ROWS, dim // FUNCTIONS) for _ in range(FUNCTIONS))
        # Without annotations a residue gets the sum over none of these rows, which is 0.
        self.residue_embed = embedding(TABLES["residue_embed"], dim)

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


def _radial_basis(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return the description [B] of a value from 0 to 1 by Gaussians of 1/B width, in the type of `like`."""
    centres_B = torch.linspace(0.0, 1.0, PLDDT_BINS, device=like.device)
    return torch.exp(-(((value - centres_B) * PLDDT_BINS) ** 2)).to(like.dtype)


class ESM3(GatedTrunk):
    """The ESM3 trunk with the LM head of the sequence.

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

    def __init__(self, config: Esm3Config) -> None:
        d = config.dim
        super().__init__(config, ROWS, nn.LayerNorm(d, bias=False), UntiedLMHead(d, ROWS))
        self.other_tracks = OtherTracks(d)
        # It belongs to the first block, but lies beside the blocks, since sharding, planner and streaming rely on
        # equal blocks.
        self.geom_attn = GeometricAttention(d, config.v_heads)
        self.other_heads = nn.ModuleDict({name: UntiedLMHead(d, rows) for name, rows in HEADS.items()})

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Add the embeddings [T, D] of all tracks. `<mask>` has a learned row, and nothing is scaled."""
        return super().embed(batch) + self.other_tracks(batch.tokens_T, batch.tracks.get(STRUCTURE))  # type: ignore[no-any-return]

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
        whole_TD = self.geom_attn(self.pack.all(x_TD), batch.tracks[COORDINATES], batch.token_counts)
        return self.pack.own(whole_TD)


_HAYES = "Hayes et al. 2025, Science 387:850, doi:10.1126/science.ads0018"

_TABLE = "encoder.sequence_embed.weight"
_GEOMETRIC = "transformer.blocks.0.geom_attn."
_SCALE = f"{_GEOMETRIC}distance_scale_per_head"


class Esm3File(AuthorsFile):
    """The `.pth` file in which ESM3-open was published: tensors alone, without sizes."""

    use = """\
import torch
from esm.models.esm3 import ESM3
from esm.pretrained import ESM3_function_decoder_v0, ESM3_structure_decoder_v0, ESM3_structure_encoder_v0
from esm.tokenization import get_esm3_model_tokenizers

state = torch.load(FILE)
model = ESM3(
    d_model=len(state["transformer.norm.weight"]),
    n_heads=len(state["transformer.norm.weight"]) // 64,
    v_heads=len(state["transformer.blocks.0.geom_attn.distance_scale_per_head"]),
    n_layers=sum(key.endswith(".attn.out_proj.weight") for key in state),
    structure_encoder_fn=ESM3_structure_encoder_v0,
    structure_decoder_fn=ESM3_structure_decoder_v0,
    function_decoder_fn=ESM3_function_decoder_v0,
    tokenizers=get_esm3_model_tokenizers(),
)
model.load_state_dict(state)"""
    code = "[esm](https://github.com/Biohub/esm)"
    lacks = ("head.", "contact_head.")

    def path(self, directory: Path, stem: str, config: Esm3Config) -> Path:
        """Return the path of the file."""
        return directory / f"{stem}.pth"


class Esm3Family(Family):
    """ESM3."""

    title = "ESM3"
    config = Esm3Config
    trunk = ESM3
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # These are for tests; nothing is released under these names. The authors' files do not tell the width of a
        # head, which is 64 here as in the released model, so that these can be written as such files too.
        "esm3_nano": Esm3Config(n_layers=2, dim=128, n_heads=2, v_heads=8),
        "esm3_mini": Esm3Config(n_layers=6, dim=192, n_heads=3, v_heads=16),
        "esm3_sm_open_v1": Esm3Config(n_layers=48, dim=1536, n_heads=24, v_heads=256),
    }
    released: ClassVar[Mapping[str, Released]] = {
        "esm3_sm_open_v1": Released(
            "biohub/esm3-sm-open-v1", "mit", "Chan Zuckerberg Biohub and the ESM3 authors", _HAYES
        )
    }
    paper = _HAYES
    window = 2046
    tracks = (
        Track(COORDINATES, "coordinates of N, CA and C", "coordinates", float("nan")),
        Track(STRUCTURE, "structure tokens", "codes", STRUCTURE_MASK, n_codes=STRUCTURE_TOKENS),
    )
    encoders: ClassVar[Mapping[str, Encoder]] = {STRUCTURE: structure_tokens}
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {"esm3-pth": Esm3File()}
    model_types = ("esm3",)
    names = Names(
        block=AUTHORS.block,
        in_block=AUTHORS.in_block,
        others={
            **AUTHORS.others,
            "embed_tokens.": "encoder.sequence_embed.",
            "geom_attn.": _GEOMETRIC,
            "other_tracks.": "encoder.",
            **{
                f"{ours}.{part}.": f"output_heads.{theirs}.{place}."
                for ours, theirs in {
                    "lm_head": "sequence_head",
                    **{f"other_heads.{head}": head for head in HEADS},
                }.items()
                for place, part in LM_HEAD.items()
            },
        },
    )

    def initial(self, config: Esm3Config, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Draw a tensor of a new model as in ESM-C; scales of geometric attention are 0."""
        if name.endswith("_scale_per_head"):
            return torch.zeros(shape)
        return super().initial(config, name, shape, generator)

    def pieces(self, key: str, config: Esm3Config) -> tuple[Piece, ...]:
        """Return our tensors in a key of the authors' file, whose names our own directory has, too."""
        return authors_pieces(key, config, self.names)

    def read_config(self, raw: Mapping[str, Any]) -> Esm3Config:
        """Return the architecture that `write_config` wrote."""
        names = ("n_layers", "dim", "n_heads", "v_heads")
        return Esm3Config(**renamed(raw, dict(zip(names, names, strict=True))), ffn=raw.get("ffn"))

    def write_config(self, config: Esm3Config) -> dict[str, Any]:
        """Return the content of the `config.json` in our own directory."""
        return {"model_type": "esm3", **config.sizes}

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        """Read the file of a published ESM3."""
        if _TABLE not in data:
            return None
        if missing := [key for key in (_TABLE, _SCALE) if not isinstance(data.get(key), torch.Tensor)]:
            raise ValueError(f"it has no {missing[0]}, which an ESM3 has")
        sizes = authors_sizes(data, _TABLE, data[_TABLE].shape)
        config = Esm3Config(**sizes, v_heads=data[_SCALE].numel())
        return Opened(config, self.tensors(data, config), (path,))


FAMILY = Esm3Family()
