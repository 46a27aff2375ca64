"""The encoder that makes ESM3's structure tokens from coordinates.

It describes the surroundings of each residue: the 16 residues with the nearest CA, itself included, attend to each
other, and the description of the residue becomes the number of the most similar vector of a codebook. The reference is
`StructureTokenEncoder` in `esm/models/vqvae.py` of `esm` 3.4.1.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.errors import InputError
from esmshard.model import weight_reader
from esmshard.model.families.esm3.esm3_geometry import GeometricAttention, frames
from esmshard.model.gated_layer import gated

NEIGHBOURS = 16
FARTHEST_POSITION = 32
"""Residues further apart in the sequence count as this far apart."""
AT_ONCE = 256
"""Residues whose surroundings are computed at once: 128 MiB for the widest matrix of the released encoder."""

_NAMES = {
    "relative_positional_embedding.embedding.": "positions.",
    "transformer.blocks.": "blocks.",
    "codebook.embeddings": "codes_CZ",
}
"""Beginnings of the names in the authors' file, and ours."""
_OF_TRAINING = ("codebook.N", "codebook.z_avg")
_FIRST = ("relative_positional_embedding.embedding.weight", "codebook.embeddings", "pre_vq_proj.weight")


class _Block(nn.Module):
    """Geometric attention and a gated feed-forward part, under the authors' names."""

    def __init__(self, dim: int, v_heads: int, ffn_width: int) -> None:
        super().__init__()
        self.geom_attn = GeometricAttention(dim, v_heads, bias=True)
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * ffn_width), _Gate(), nn.Linear(ffn_width, dim))


class _Gate(nn.Module):
    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = x_TF.chunk(2, dim=-1)
        return gated(gate_TF, up_TF)


class StructureEncoder(nn.Module):
    """The encoder, without what its training needs. C codes are vectors of length Z.

    Args:
        dim: width.
        v_heads: heads of geometric attention.
        ffn_width: width of the feed-forward parts.
        n_layers: blocks.
        codes: number of codes, and their length.
    """

    codes_CZ: torch.Tensor

    def __init__(self, dim: int, v_heads: int, ffn_width: int, n_layers: int, codes: tuple[int, int]) -> None:
        super().__init__()
        self.positions = nn.Embedding(2 * FARTHEST_POSITION + 2, dim)
        self.blocks = nn.ModuleList(_Block(dim, v_heads, ffn_width) for _ in range(n_layers))
        self.pre_vq_proj = nn.Linear(dim, codes[1])
        self.register_buffer("codes_CZ", torch.zeros(codes))

    def forward(self, coordinates_L33: torch.Tensor) -> torch.Tensor:
        """Return the structure tokens of one protein, int64 [L].

        As in the reference, residues without coordinates get a code, too, which is the same for all of them.

        Args:
            coordinates_L33: N, CA and C of each residue in Ångström; NaN where unknown.
        """
        z_LZ = self.described(coordinates_L33)
        distances_LC = self.codes_CZ.square().sum(1) - 2 * z_LZ @ self.codes_CZ.t()  # and the square of z, alike in all
        return distances_LC.argmin(1)

    def described(self, coordinates_L33: torch.Tensor) -> torch.Tensor:
        """Return the description of each residue before it becomes a code, [L, Z]."""
        # Residues without coordinates have no part in the description of any other.
        place_N = frames(coordinates_L33)[2].nonzero().flatten()
        known_N33 = coordinates_L33[place_N].to(self.codes_CZ.dtype)
        x_LD = self.codes_CZ.new_zeros(len(coordinates_L33), self.positions.embedding_dim)
        for start in range(0, len(place_N), AT_ONCE):
            part_P = torch.arange(start, min(start + AT_ONCE, len(place_N)), device=place_N.device)
            x_LD[place_N[part_P]] = self._surroundings(part_P, known_N33, place_N)
        return self.pre_vq_proj(x_LD)  # type: ignore[no-any-return]

    def _surroundings(self, part_P: torch.Tensor, known_N33: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
        """Describe some of the residues with coordinates, [P, D]."""
        ca_N3 = known_N33[:, 1]
        apart_PN = torch.cdist(ca_N3[part_P], ca_N3, compute_mode="donot_use_mm_for_euclid_dist")
        apart_PN[
            torch.arange(len(part_P), device=part_P.device), part_P
        ] = -1  # Each residue comes first among its neighbours.
        neighbour_PE = apart_PN.topk(min(NEIGHBOURS, len(ca_N3)), largest=False).indices
        offset_PE = place_N[neighbour_PE] - place_N[part_P, None]
        x_TD: torch.Tensor = self.positions(
            offset_PE.clamp(-FARTHEST_POSITION, FARTHEST_POSITION) + FARTHEST_POSITION + 1
        ).flatten(0, 1)
        coordinates_T33, counts = known_N33[neighbour_PE].flatten(0, 1), [neighbour_PE.shape[1]] * len(part_P)
        for n, block in enumerate(self.blocks):
            assert isinstance(block, _Block)
            x_TD = x_TD + block.geom_attn(x_TD, coordinates_T33, counts)
            if n + 1 == len(self.blocks):  # From here on only the residue itself counts.
                x_TD = x_TD[:: counts[0]]
            x_TD = x_TD + block.ffn(x_TD)
        return x_TD


@lru_cache(maxsize=1)
def read(path: Path) -> StructureEncoder:
    """Read the authors' file `esm3_structure_encoder_v0.pth`. The file that was read last stays in memory.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    found = {name: reader() for name, reader in weight_reader.read_state_dict(path).items() if name not in _OF_TRAINING}
    fix = "give esm3_structure_encoder_v0.pth of the repository biohub/esm3-sm-open-v1"
    blocks = [f"transformer.blocks.{n}" for n in range(sum(name.endswith(".ffn.3.weight") for name in found))]
    needed = [
        *_FIRST,
        "transformer.blocks.0.geom_attn.distance_scale_per_head",
        *(f"{one}.ffn.1.weight" for one in blocks),
    ]
    if missing := [name for name in needed if name not in found]:
        raise InputError(f"{path}: not an encoder of structure tokens, since it has no {missing[0]}; {fix}")
    positions, codes = found[_FIRST[0]], found[_FIRST[1]]
    encoder = StructureEncoder(
        positions.shape[1],
        v_heads=len(found["transformer.blocks.0.geom_attn.distance_scale_per_head"]),
        ffn_width=len(found["transformer.blocks.0.ffn.1.weight"]) // 2,
        n_layers=len(blocks),
        codes=(codes.shape[0], codes.shape[1]),
    )
    try:
        encoder.load_state_dict({_our_name(name): tensor for name, tensor in found.items()})
    except RuntimeError as error:
        raise InputError(
            f"{path}: not an encoder of structure tokens ({str(error).splitlines()[1].strip()}); {fix}"
        ) from None
    return encoder.float().eval().requires_grad_(False)


def structure_tokens(
    path: Path, coordinates: npt.NDArray[np.floating], device: str | torch.device = "cpu"
) -> npt.NDArray[np.int64]:
    """Return the structure tokens of one protein, int64 [L], each below 4,096.

    Args:
        path: the authors' file of the encoder.
        coordinates: N, CA and C of each residue in Ångström [L, 3, 3]; NaN where unknown. Neighbouring rows are
            neighbours in the sequence, so residues without coordinates must have rows, too.
        device: the computing device.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    coordinates_L33 = torch.from_numpy(coordinates).float().to(device)
    with torch.no_grad():
        tokens_L: npt.NDArray[np.int64] = read(path).to(device)(coordinates_L33).cpu().numpy()
    return tokens_L


def _our_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
