"""Defines the model family ESM3 for packed sequences, its file formats, and its encoder of structure tokens.

Coordinates and structure tokens are tracks of a batch. ESM3's other inputs, such as secondary structure, are always
unknown here. All outputs must equal the outputs of `esm` 3.4.1 (`esm/models/esm3.py`), which computes one protein at a
time. `tests/parity/test_esm3.py` compares the outputs. `esmshard.batch` explains the letters of tensor names.

In geometric attention (`GeometricReasoningOriginalImpl` in `esm/layers/geom_attention.py`), residues attend to each
other by the positions and directions of their backbones. The atoms N, CA and C define a residue's frame (coordinate
system). Each head rotates query and key vectors by the frames of their residues. Attention increases with the dot
product of the rotated vectors. The head also places a query point and a key point in the two frames. Attention
decreases with the distance between the points. The weighted sum of value vectors is rotated back into the frame of the
query's residue.

`transformers` has no ESM3, so only esmshard can read the model directories that it writes. The files in them have
the authors' tensor names. `ESM3_FILE` writes a file for the authors' code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.model import weight_reader
from esmshard.model.attention import OnAttention
from esmshard.model.config import ModelConfig
from esmshard.model.families.esmc import (
    AUTHORS,
    ESMC,
    LM_HEAD,
    EsmcConfig,
    UntiedLMHead,
    authors_pieces,
    authors_sizes,
    gated,
)
from esmshard.model.families.family import AuthorsFile, Encoder, Family, Names, Opened, Piece, Released, renamed
from esmshard.model.trunk import embedding
from esmshard.vocab import CLS, EOS, PAD, SEPARATOR, Track

STRUCTURE_TOKENS = 4096
"""The number of structure tokens. A structure token is a code for the structure around a residue."""
STRUCTURE_MASK = STRUCTURE_TOKENS
"""The structure token of a residue whose structure is unknown."""
STRUCTURE_SPECIAL = {token: STRUCTURE_MASK + 1 + n for n, token in enumerate((EOS, CLS, PAD, SEPARATOR))}
"""The structure token for each special token of the sequence, such as `<cls>`."""
TABLES = {
    "structure_tokens_embed": STRUCTURE_TOKENS + 5,
    "ss8_embed": 8 + 3,
    "sasa_embed": 16 + 3,
    "residue_embed": 1478,
}
"""The number of rows in each embedding table, by the authors' names, without the tables for sequence and functions."""
FUNCTIONS, FUNCTION_ROWS = 8, 260
"""The number of embedding tables for function tokens (each has 1/8 of the model's width), and of rows in each table."""
PLDDT_BINS = 16
"""The number of radial basis functions that describe a pLDDT (the confidence of a predicted structure)."""
HEADS = {
    "structure_head": STRUCTURE_TOKENS,
    "ss8_head": TABLES["ss8_embed"],
    "sasa_head": TABLES["sasa_embed"],
    "function_head": FUNCTIONS * FUNCTION_ROWS,
    "residue_head": TABLES["residue_embed"],
}
"""The number of outputs per token of each head, by the authors' names, without the LM head of the sequence."""
COORDINATES, STRUCTURE = "coordinates", "structure_tokens"
"""The names of the two tracks that ESM3 models read."""
FARTHEST = 1e6
"""A residue with a coordinate of at least this many Ångström counts as unknown, as in the authors' code."""
AT_ONCE = 2**21
"""The maximum number of entries (residue pairs times heads) in a matrix of geometric attention: 8 MiB in fp32."""
_SOFTNESS = 3**-0.5
NEIGHBOURS = 16
FARTHEST_POSITION = 32
"""The largest distance along the sequence that the encoder sees, in residues. Larger distances count as this number."""
RESIDUES_AT_ONCE = 256
"""The number of residues that the encoder computes at once. The released encoder's widest matrix then has 128 MiB."""


@dataclass(frozen=True, kw_only=True)
class Esm3Config(EsmcConfig):
    """The architecture of an ESM3 model."""

    family: ClassVar[str] = "esm3"

    v_heads: int
    """The number of heads in geometric attention."""

    def kept_with(self, track: str) -> int:
        # Geometric attention saves its input before and after the norm, the vectors, and the input of the last matrix.
        return 2 * self.dim + 18 * self.v_heads if track == COORDINATES else 0


def frames(coordinates_T33: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the frames of residues: rotations [T, 3, 3], origins [T, 3] in Ångström, and a mask [T] of known frames.

    The coordinates are N, CA and C of each residue in Ångström. The first axis points from C to CA. The second axis
    lies in the plane of the three atoms on the side of N. CA is the origin. Unknown rotations and origins are 0. The
    authors' code uses a mean frame for unknown residues. The outputs are the same, because attention excludes these
    residues.
    """
    known_T = (coordinates_T33.abs() < FARTHEST).flatten(1).all(1)
    n_T3, ca_T3, c_T3 = coordinates_T33.float().masked_fill(~known_T[:, None, None], 0.0).unbind(1)
    first_T3 = _of_length_1(ca_T3 - c_T3)
    second_T3 = n_T3 - ca_T3
    second_T3 = _of_length_1(second_T3 - first_T3 * (first_T3 * second_T3).sum(1, keepdim=True))
    third_T3 = torch.linalg.cross(first_T3, second_T3)
    return torch.stack((first_T3, second_T3, third_T3), dim=-1), ca_T3, known_T


def _of_length_1(x_T3: torch.Tensor) -> torch.Tensor:
    return x_T3 / (x_T3.square().sum(1, keepdim=True) + 1e-10).sqrt()


class GeometricAttention(nn.Module):
    """Computes geometric attention between the residues of each sequence, with the authors' parameter names. With
    `bias=False`, the output for a residue without coordinates is exactly 0.
    """

    def __init__(self, dim: int, v_heads: int, *, bias: bool = False) -> None:
        super().__init__()
        self.s_norm = nn.LayerNorm(dim, bias=bias)
        self.proj = nn.Linear(dim, 15 * v_heads, bias=bias)
        self.out_proj = nn.Linear(3 * v_heads, dim, bias=bias)
        self.distance_scale_per_head = nn.Parameter(torch.zeros(v_heads))
        self.rotation_scale_per_head = nn.Parameter(torch.zeros(v_heads))

    def forward(self, x_TD: torch.Tensor, coordinates_T33: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Map x [T, D] to [T, D].

        Args:
            x_TD: the vectors of all tokens.
            coordinates_T33: N, CA and C in Ångström, fp32; NaN for unknown coordinates.
            counts: the number of tokens in each sequence. Tokens attend only to tokens in the same sequence.
        """
        vectors_T5H3 = self.proj(self.s_norm(x_TD)).view(len(x_TD), 5, -1, 3)
        rotation_T33, origin_T3, known_T = frames(coordinates_T33)
        # The backward pass computes each part again, because autograd would save several L x L matrices for each head:
        # 1 GiB each for 1,024 residues and 256 heads.
        gather: Callable[..., torch.Tensor] = _gathered
        if torch.is_grad_enabled():
            gather = partial(checkpoint, _gathered, use_reentrant=False, preserve_rng_state=False)
        gathered: list[torch.Tensor] = []
        with torch.autocast(x_TD.device.type, enabled=False):
            scales_2H = _SOFTNESS * F.softplus(
                torch.stack((self.rotation_scale_per_head, self.distance_scale_per_head)).float()
            )
            sequences = [x.split_with_sizes([*counts]) for x in (vectors_T5H3, rotation_T33, origin_T3, known_T)]
            for vectors_L5H3, *frames_L in zip(*sequences, strict=True):
                length = len(vectors_L5H3)
                heads, rows = max(1, AT_ONCE // length**2), max(1, AT_ONCE // length)
                outputs: list[torch.Tensor] = []
                parts = zip(torch.split(vectors_L5H3, heads, 2), torch.split(scales_2H, heads, 1), strict=True)
                for vectors_L5h3, scales_2h in parts:
                    queries = [slice(start, start + rows) for start in range(0, length, rows)]
                    outputs.append(torch.cat([gather(vectors_L5h3, scales_2h, *frames_L, part) for part in queries]))
                gathered.append(torch.cat(outputs, 1))
        gathered_TH3 = torch.cat(gathered).masked_fill(~known_T[:, None, None], 0.0)
        return self.out_proj(gathered_TH3.flatten(1).to(vectors_T5H3.dtype))  # type: ignore[no-any-return]


def _gathered(
    vectors_L5H3: torch.Tensor,
    scales_2H: torch.Tensor,
    rotation_L33: torch.Tensor,
    origin_L3: torch.Tensor,
    known_L: torch.Tensor,
    queries: slice,
) -> torch.Tensor:
    """Return the attention output [P, H, 3] of H heads for the P residues `queries` of one sequence of L residues.

    `vectors_L5H3` has query, key, value, query point and key point. `scales_2H` has the factors of dot products and of
    distances. All input and output vectors are in the frame of their residue.
    """
    turned_LN3 = vectors_L5H3.flatten(1, 2).float() @ rotation_L33.mT
    q_HL3, k_HL3, v_HL3, far_q_HL3, far_k_HL3 = turned_LN3.view(vectors_L5H3.shape).permute(1, 2, 0, 3).unbind(0)
    origin_L3 = origin_L3 - origin_L3.mean(0)  # Only distances count, and numbers around 0 have more digits.
    direction_H11, distance_H11 = scales_2H[..., None, None]
    far_q_HP3, far_k_HL3 = (far_q_HL3 + origin_L3)[:, queries] * distance_H11, (far_k_HL3 + origin_L3) * distance_H11
    distances_HPL = torch.cdist(far_q_HP3, far_k_HL3, compute_mode="donot_use_mm_for_euclid_dist")
    scores_HPL = (q_HL3[:, queries] * direction_H11 @ k_HL3.mT).sub_(distances_HPL)
    weights_HPL = scores_HPL.masked_fill_(~known_L, torch.finfo(scores_HPL.dtype).min).softmax(-1)
    gathered_PH3: torch.Tensor = (weights_HPL @ v_HL3).transpose(0, 1) @ rotation_L33[queries]
    return gathered_PH3


class OtherTracks(nn.Module):
    """Embeds structure tokens, pLDDT, secondary structure, accessibility, functions and annotations, with the authors'
    parameter names. All inputs except structure tokens are always unknown.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.plddt_projection = nn.Linear(PLDDT_BINS, dim)
        self.structure_per_res_plddt_projection = nn.Linear(PLDDT_BINS, dim)
        self.structure_tokens_embed = embedding(TABLES["structure_tokens_embed"], dim)
        self.ss8_embed = embedding(TABLES["ss8_embed"], dim)
        self.sasa_embed = embedding(TABLES["sasa_embed"], dim)
        self.function_embed = nn.ModuleList(embedding(FUNCTION_ROWS, dim // FUNCTIONS) for _ in range(FUNCTIONS))
        # `forward` does not use this table: the embedding of no annotations is 0.
        self.residue_embed = embedding(TABLES["residue_embed"], dim)

    def forward(self, tokens_T: torch.Tensor, structure_T: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of all embeddings, [T, D]. `tokens_T` has the tokens of the sequences. `structure_T` has the
        structure tokens, int64 [T]; None if all are unknown. As in the authors' code, the average pLDDT is 1, each
        residue's pLDDT is 0, and all other inputs are padding.
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
        # torch 2.11's `get_parameter` fails here if ranks divide the layers, because the weight is a plain tensor.
        functions_D = torch.cat([table.weight[0] for table in self.function_embed])  # type: ignore[index,misc]
        return x_TD + (constant_D + functions_D)


def _radial_basis(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return the values at `value` of B Gaussians with centres from 0 to 1 and width 1/B, [B] in the type of `like`."""
    centres_B = torch.linspace(0.0, 1.0, PLDDT_BINS, device=like.device)
    return torch.exp(-(((value - centres_B) * PLDDT_BINS) ** 2)).to(like.dtype)


class ESM3(ESMC):
    """The ESM3 model with the LM head of the sequence. The class has all parameters of the released file, used or
    not, so that esmshard can write a complete file.

    Geometric attention is trained if batches have coordinates, and the embedding of structure tokens if batches have
    structure tokens. The other parameters in `never_learns` are always frozen. Most of them do not affect outputs. In
    the table of an unknown input, only one row would get a gradient, and weight decay would shrink all other rows.
    """

    never_learns: ClassVar[tuple[str, ...]] = ("contact_head.", "geom_attn.", "other_tracks.", "other_heads.")
    learns_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        COORDINATES: ("geom_attn.",),
        STRUCTURE: ("other_tracks.structure_tokens_embed.",),
    }

    def __init__(self, config: Esm3Config) -> None:
        d = config.dim
        super().__init__(config)
        self.other_tracks = OtherTracks(d)
        # This module is not inside the first block, because sharding and offload need equal blocks.
        self.geom_attn = GeometricAttention(d, config.v_heads)
        self.other_heads = nn.ModuleDict({name: UntiedLMHead(d, rows) for name, rows in HEADS.items()})

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        return super().embed(batch) + self.other_tracks(batch.tokens_T, batch.tracks.get(STRUCTURE))  # type: ignore[no-any-return]

    def run_block(
        self, index: int, x_TD: torch.Tensor, batch: TokenBatch, on_attention: OnAttention | None
    ) -> torch.Tensor:
        """Apply block `index` to x [T, D]. In the first block, compute geometric attention if the batch has the track
        `coordinates`, even if all values are unknown. So all ranks have gradients for the same parameters.
        """
        if index or COORDINATES not in batch.tracks:
            return super().run_block(index, x_TD, batch, on_attention)
        return self.layers[0](x_TD, batch, index, on_attention, self._geometric)  # type: ignore[no-any-return]

    def _geometric(self, x_TD: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        whole_TD = self.geom_attn(self.pack.all(x_TD), batch.tracks[COORDINATES], batch.token_counts)
        return self.pack.own(whole_TD)


class _EncoderBlock(nn.Module):
    """A block of the encoder: geometric attention and a gated feed-forward part, with the authors' parameter names."""

    def __init__(self, dim: int, v_heads: int, ffn_width: int) -> None:
        super().__init__()
        self.geom_attn = GeometricAttention(dim, v_heads, bias=True)
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * ffn_width), _Gate(), nn.Linear(ffn_width, dim))


class _Gate(nn.Module):
    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = x_TF.chunk(2, dim=-1)
        return gated(gate_TF, up_TF)


class StructureEncoder(nn.Module):
    """The encoder of structure tokens, without the parts that only its training needs. The argument `codes` has two
    numbers: the number C of codes (structure tokens), and the width Z of a code's vector.
    """

    codes_CZ: torch.Tensor

    def __init__(self, dim: int, v_heads: int, ffn_width: int, n_layers: int, codes: tuple[int, int]) -> None:
        super().__init__()
        self.positions = nn.Embedding(2 * FARTHEST_POSITION + 2, dim)
        self.blocks = nn.ModuleList(_EncoderBlock(dim, v_heads, ffn_width) for _ in range(n_layers))
        self.pre_vq_proj = nn.Linear(dim, codes[1])
        self.register_buffer("codes_CZ", torch.zeros(codes))

    def forward(self, coordinates_L33: torch.Tensor) -> torch.Tensor:
        """Return the structure tokens of one protein, int64 [L], from N, CA and C of each residue in Ångström. As in
        the authors' code, all residues without coordinates (NaN) get the same token.
        """
        z_LZ = self.described(coordinates_L33)
        # The squared distance between z and each code, without |z|^2, which is the same for all codes.
        return (self.codes_CZ.square().sum(1) - 2 * z_LZ @ self.codes_CZ.t()).argmin(1)

    def described(self, coordinates_L33: torch.Tensor) -> torch.Tensor:
        """Return a vector for each residue, [L, Z]. The index of the nearest row of `codes_CZ` is the token."""
        place_N = frames(coordinates_L33)[2].nonzero().flatten()
        known_N33 = coordinates_L33[place_N].to(self.codes_CZ.dtype)
        x_LD = self.codes_CZ.new_zeros(len(coordinates_L33), self.positions.embedding_dim)
        for start in range(0, len(place_N), RESIDUES_AT_ONCE):
            part_P = torch.arange(start, min(start + RESIDUES_AT_ONCE, len(place_N)), device=place_N.device)
            x_LD[place_N[part_P]] = self._surroundings(part_P, known_N33, place_N)
        return self.pre_vq_proj(x_LD)  # type: ignore[no-any-return]

    def _surroundings(self, part_P: torch.Tensor, known_N33: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
        """Return vectors [P, D] that describe the neighbourhoods of P residues. `part_P` has their indices among the N
        residues with coordinates `known_N33`. `place_N` has the positions of the N residues in the sequence.
        """
        ca_N3 = known_N33[:, 1]
        apart_PN = torch.cdist(ca_N3[part_P], ca_N3, compute_mode="donot_use_mm_for_euclid_dist")
        # The distance -1 makes each residue its first neighbour.
        apart_PN[torch.arange(len(part_P), device=part_P.device), part_P] = -1
        neighbour_PE = apart_PN.topk(min(NEIGHBOURS, len(ca_N3)), largest=False).indices
        offset_PE = place_N[neighbour_PE] - place_N[part_P, None]
        x_TD: torch.Tensor = self.positions(
            offset_PE.clamp(-FARTHEST_POSITION, FARTHEST_POSITION) + FARTHEST_POSITION + 1
        ).flatten(0, 1)
        coordinates_T33, counts = known_N33[neighbour_PE].flatten(0, 1), [neighbour_PE.shape[1]] * len(part_P)
        for n, block in enumerate(self.blocks):
            assert isinstance(block, _EncoderBlock)
            x_TD = x_TD + block.geom_attn(x_TD, coordinates_T33, counts)
            if n + 1 == len(self.blocks):  # The output needs only the residues, no neighbours.
                x_TD = x_TD[:: counts[0]]
            x_TD = x_TD + block.ffn(x_TD)
        return x_TD


@lru_cache(maxsize=1)
def read_encoder(path: Path) -> StructureEncoder:
    """Read the file `esm3_structure_encoder_v0.pth`. Raises `InputError` if `path` is another or a damaged file."""
    tensors = {
        re.sub(r"^relative_positional_embedding\.embedding\.", "positions.", name)
        .replace("transformer.blocks.", "blocks.")
        .replace("codebook.embeddings", "codes_CZ"): reader()
        for name, reader in weight_reader.read_tensors(path).items()
        if name not in ("codebook.N", "codebook.z_avg")  # Only the training of the encoder needs these two.
    }
    try:
        encoder = StructureEncoder(
            tensors["positions.weight"].shape[1],
            v_heads=len(tensors["blocks.0.geom_attn.distance_scale_per_head"]),
            ffn_width=len(tensors["blocks.0.ffn.1.weight"]) // 2,
            n_layers=sum(name.endswith(".ffn.3.weight") for name in tensors),
            codes=(tensors["codes_CZ"].shape[0], tensors["codes_CZ"].shape[1]),
        )
        encoder.load_state_dict(tensors)
    except (KeyError, RuntimeError) as error:  # A tensor is missing or unknown, or has another shape.
        raise InputError(
            f"{path}: not an encoder of structure tokens ({' '.join(str(error).split())}); give "
            "esm3_structure_encoder_v0.pth from the repository biohub/esm3-sm-open-v1"
        ) from None
    return encoder.float().eval().requires_grad_(False)


def structure_tokens(
    path: Path, coordinates: npt.NDArray[np.floating], device: str | torch.device = "cpu"
) -> npt.NDArray[np.int64]:
    """Compute the structure tokens of one protein, int64 [L], each below 4,096. `path` is the authors' encoder file.
    `coordinates` [L, 3, 3] has N, CA and C of each residue in Ångström, and NaN for unknown coordinates. Residues
    without coordinates need rows, too, because the index of a row is the position in the sequence.
    """
    coordinates_L33 = torch.from_numpy(coordinates).float().to(device)
    with torch.no_grad():
        tokens_L: npt.NDArray[np.int64] = read_encoder(path).to(device)(coordinates_L33).cpu().numpy()
    return tokens_L


_HAYES = "Hayes et al. 2025, Science 387:850, doi:10.1126/science.ads0018"
_HOLDER = "Chan Zuckerberg Biohub and the ESM3 authors"
_TABLE = "encoder.sequence_embed.weight"
_GEOMETRIC = "transformer.blocks.0.geom_attn."
_SCALE = f"{_GEOMETRIC}distance_scale_per_head"


ESM3_FILE = AuthorsFile(
    use="""\
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
model.load_state_dict(state)""",
    code="[esm](https://github.com/Biohub/esm)",
    lacks=("head.", "contact_head."),
)
"""The format of the published `.pth` file of ESM3-open, which has tensors and no configuration."""


class Esm3Family(Family):
    """Describes all ESM3 models."""

    title = "ESM3"
    config = Esm3Config
    trunk = ESM3
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # For tests; no released model has these names. Heads have width 64, which the authors' files require.
        "esm3_nano": Esm3Config(n_layers=2, dim=128, n_heads=2, v_heads=8),
        "esm3_mini": Esm3Config(n_layers=6, dim=192, n_heads=3, v_heads=16),
        "esm3_sm_open_v1": Esm3Config(n_layers=48, dim=1536, n_heads=24, v_heads=256),
    }
    released: ClassVar[Mapping[str, Released]] = {
        "esm3_sm_open_v1": Released("biohub/esm3-sm-open-v1", "mit", _HOLDER, _HAYES)
    }
    paper = _HAYES
    window = 2046
    tracks = (
        Track(COORDINATES, "coordinates of N, CA and C", "coordinates", float("nan")),
        Track(STRUCTURE, "structure tokens", "codes", STRUCTURE_MASK, n_codes=STRUCTURE_TOKENS),
    )
    encoders: ClassVar[Mapping[str, Encoder]] = {STRUCTURE: structure_tokens}
    pickles: ClassVar[Mapping[str, AuthorsFile]] = {"esm3-pth": ESM3_FILE}
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
                f"{ours}.{part}.": f"output_heads.{theirs}.{index}."
                for ours, theirs in (("lm_head", "sequence_head"), *((f"other_heads.{head}", head) for head in HEADS))
                for index, part in LM_HEAD.items()
            },
        },
    )

    def initial(self, config: Esm3Config, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Return initial values of the tensor `name`: 0 for scales in geometric attention, otherwise as in `Family`."""
        if name.endswith("_scale_per_head"):
            return torch.zeros(shape)
        return super().initial(config, name, shape, generator)

    def pieces(self, key: str, config: Esm3Config) -> tuple[Piece, ...]:
        return authors_pieces(key, config, self.names)

    def read_config(self, raw: Mapping[str, Any]) -> Esm3Config:
        names = ("n_layers", "dim", "n_heads", "v_heads")
        return Esm3Config(**renamed(raw, dict(zip(names, names, strict=True))), ffn=raw.get("ffn"))

    def write_config(self, config: Esm3Config) -> dict[str, Any]:
        return {"model_type": "esm3", **config.sizes}

    def read_pickle(self, data: Mapping[str, Any], path: Path) -> Opened | None:
        if _TABLE not in data:
            return None
        if missing := [key for key in (_TABLE, _SCALE) if not isinstance(data.get(key), torch.Tensor)]:
            raise ValueError(f"{missing[0]} of ESM3 is missing")
        sizes = authors_sizes(data, _TABLE, data[_TABLE].shape)
        config = Esm3Config(**sizes, v_heads=data[_SCALE].numel())
        return Opened(config, self.tensors(weight_reader.tensors(data), config), (path,))


FAMILY = Esm3Family()
