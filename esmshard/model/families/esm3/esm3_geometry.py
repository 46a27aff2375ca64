"""Geometric attention: residues attend to each other by the places and directions of their backbones.

Each residue has a frame, which follows from N, CA and C. Each head turns two vectors of a residue by its frame, whose
product with those of another residue says how well directions agree, and moves two points with its frame, whose
distance counts against the other residue. What is gathered is turned back into the frame of the residue that gathers.
The reference is `GeometricReasoningOriginalImpl` in `esm/layers/geom_attention.py` of `esm` 3.4.1.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FARTHEST = 1e6
"""Ångström. Coordinates beyond count as unknown, as in the reference."""
AT_ONCE = 2**21
"""Most pairs of residues, times heads, that are computed at once: 8 MiB for each of a handful of matrices in fp32."""
_SOFTNESS = 3**-0.5


def frames(coordinates_T33: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rotations [T, 3, 3], origins [T, 3] in Ångström, and whether they are known [T], all but the last in fp32.

    The first axis goes from C to CA, the second lies in the plane of the three atoms on the side of N, and CA is the
    origin. Where a coordinate is unknown, rotation and origin are 0. The reference has a mean frame there; but nothing
    attends to such a residue, and it gathers nothing, so that no number depends on it.

    Args:
        coordinates_T33: N, CA and C of each residue in Ångström; NaN where unknown.
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
    """Attention over the frames of each sequence, [T, D] to [T, D]; parameter names are the authors'.

    A residue without coordinates gets exactly 0 if there are no biases, and does not count for the others.
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
            x_TD: the tokens of all sequences, end to end.
            coordinates_T33: N, CA and C in Ångström; NaN where unknown. In fp32, in which the attention is computed.
            counts: the tokens of each sequence. No sequence sees another.
        """
        vectors_T5H3 = self.proj(self.s_norm(x_TD)).view(len(x_TD), 5, -1, 3)
        with torch.autocast(x_TD.device.type, enabled=False):
            scales_2H = _SOFTNESS * F.softplus(
                torch.stack((self.rotation_scale_per_head, self.distance_scale_per_head)).float()
            )
            gathered_TH3: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
                vectors_T5H3, scales_2H, *frames(coordinates_T33), tuple(counts)
            )
        return self.out_proj(gathered_TH3.flatten(1).to(vectors_T5H3.dtype))  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """Geometric attention between its two projections, a part of the heads and queries at a time.

    Only its input is kept for the backward pass. Autograd alone would keep some matrices of L x L for each head: for
    1,024 residues and 256 heads, 1 GiB each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vectors_T5H3: torch.Tensor,
        scales_2H: torch.Tensor,
        rotation_T33: torch.Tensor,
        origin_T3: torch.Tensor,
        known_T: torch.Tensor,
        counts: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(vectors_T5H3, scales_2H, rotation_T33, origin_T3, known_T)
        ctx.counts = counts
        out_TH3 = vectors_T5H3.new_empty(len(vectors_T5H3), *vectors_T5H3.shape[2:], dtype=torch.float32)
        for own, heads, parts in _pieces(counts, vectors_T5H3.shape[2]):
            q, k, v, far_q, far_k = _turned(vectors_T5H3[own, :, heads], rotation_T33[own], origin_T3[own])
            a_H11, b_H11 = scales_2H[:, heads, None, None]
            q, far_q, far_k = q * a_H11, far_q * b_H11, far_k * b_H11
            weights = (_weights(q[:, part], k, far_q[:, part], far_k, known_T[own])[0] for part in parts)
            out_TH3[own, heads] = _back(torch.cat([weights_HPL @ v for weights_HPL in weights], 1), rotation_T33[own])
        return out_TH3.masked_fill_(~known_T[:, None, None], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        vectors_T5H3, scales_2H, rotation_T33, origin_T3, known_T = ctx.saved_tensors
        grad_T5H3, grad_2H = torch.empty_like(vectors_T5H3), torch.zeros_like(scales_2H)
        for own, heads, parts in _pieces(ctx.counts, vectors_T5H3.shape[2]):
            q, k, v, far_q, far_k = _turned(vectors_T5H3[own, :, heads], rotation_T33[own], origin_T3[own])
            a_H11, b_H11 = scales_2H[:, heads, None, None]
            scaled_q, scaled_far_q, scaled_far_k = q * a_H11, far_q * b_H11, far_k * b_H11
            grad_out = grads[0][own, heads].masked_fill(~known_T[own, None, None], 0.0)
            grad_out = (grad_out @ rotation_T33[own].transpose(1, 2)).transpose(0, 1)
            found = torch.zeros(5, *q.shape, device=q.device)
            for part in parts:
                weights, distances = _weights(scaled_q[:, part], k, scaled_far_q[:, part], scaled_far_k, known_T[own])
                found[2] += weights.transpose(1, 2) @ grad_out[:, part]
                grad = grad_out[:, part] @ v.transpose(1, 2)
                grad = grad.sub_((grad * weights).sum(-1, keepdim=True)).mul_(weights)  # of the scores
                del weights
                found[0][:, part] = grad @ k
                found[1] += grad.transpose(1, 2) @ scaled_q[:, part]
                products_H11 = grad.flatten(1)[:, None] @ distances.flatten(1)[..., None]  # without a third matrix
                grad_2H[1, heads] -= (products_H11 / b_H11).flatten()
                # A distance has the direction from key to query as its gradient; at distance 0 there is none.
                grad = grad.div_(distances.masked_fill_(distances == 0, torch.inf)).neg_()
                found[3][:, part] = scaled_far_q[:, part] * grad.sum(2)[..., None] - grad @ scaled_far_k
                found[4] += scaled_far_k * grad.sum(1)[..., None] - grad.transpose(1, 2) @ scaled_far_q[:, part]
            grad_2H[0, heads] += (found[0] * q).sum((1, 2))
            found[0] *= a_H11
            found[3:] *= b_H11
            grad_T5H3[own, :, heads] = _back(found.flatten(0, 1), rotation_T33[own]).view(q.shape[1], 5, -1, 3)
        return grad_T5H3, grad_2H, None, None, None, None


def _pieces(counts: Sequence[int], n_heads: int) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield the tokens of a sequence, some of the heads, and the parts of the queries, so that at most AT_ONCE pairs
    are computed at once.
    """
    start = 0
    for count in counts:
        heads, rows = max(1, AT_ONCE // count**2), max(1, AT_ONCE // count)
        parts = [slice(n, min(n + rows, count)) for n in range(0, count, rows)]
        for n in range(0, n_heads, heads):
            yield slice(start, start + count), slice(n, min(n + heads, n_heads)), parts
        start += count


def _turned(
    vectors_L5H3: torch.Tensor, rotation_L33: torch.Tensor, origin_L3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return directions of queries and keys, values, and points of queries and keys, [H, L, 3] each, outside frames."""
    turned = vectors_L5H3.flatten(1, 2).float() @ rotation_L33.transpose(1, 2)
    q, k, v, far_q, far_k = turned.view(vectors_L5H3.shape).permute(1, 2, 0, 3).unbind(0)
    origin_L3 = origin_L3 - origin_L3.mean(0)  # Only distances count, and around 0 they have more digits.
    return q, k, v, far_q + origin_L3, far_k + origin_L3


def _back(x_HL3: torch.Tensor, rotation_L33: torch.Tensor) -> torch.Tensor:
    """Return vectors [L, H, 3] as their residues' frames see them."""
    return x_HL3.transpose(0, 1) @ rotation_L33


def _weights(
    q_HP3: torch.Tensor, k_HL3: torch.Tensor, far_q_HP3: torch.Tensor, far_k_HL3: torch.Tensor, known_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention weights [H, P, L] and distances. Without any known residue all weights are alike."""
    distances_HPL = (far_q_HP3[:, :, None, 0] - far_k_HL3[:, None, :, 0]).square_()
    for axis in (1, 2):
        difference_HPL = far_q_HP3[:, :, None, axis] - far_k_HL3[:, None, :, axis]
        distances_HPL.addcmul_(difference_HPL, difference_HPL)
    distances_HPL.sqrt_()
    scores_HPL = (q_HP3 @ k_HL3.transpose(1, 2)).sub_(distances_HPL)
    scores_HPL.masked_fill_(~known_L, torch.finfo(scores_HPL.dtype).min)
    return scores_HPL.softmax(-1), distances_HPL
