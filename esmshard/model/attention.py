"""Rotary self-attention over packed sequences. Letters of tensor names: see `esmshard.batch`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch

OnAttention = Callable[[int, int, torch.Tensor], None]
"""`on_attention(layer, sequence, probabilities_HLL)`: one map per head, rows and columns of residues only."""


def attend(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch, *, padded: bool = False
) -> torch.Tensor:
    """Softmax attention [T, H, K] in which every token sees its own sequence only.

    Three kernels, one result:

    - CUDA in half precision from compute capability 8.0 on: `varlen_attn` (FlashAttention over packed sequences).
    - CPU: one unmasked SDPA call per sequence; measured fastest there, and no other sequence can leak in.
    - elsewhere, or with `padded=True`: a block padded to the longest sequence, SDPA under a key mask.
    """
    half = q_THK.dtype in (torch.bfloat16, torch.float16)
    if half and q_THK.is_cuda and not padded and torch.cuda.get_device_capability(q_THK.device) >= (8, 0):
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = batch.cu_seqlens, batch.max_seqlen
        # Seven positional arguments only: the keywords changed between torch releases.
        out_THK = varlen_attn(q_THK, k_THK, v_THK, cu, cu, longest, longest)
        assert isinstance(out_THK, torch.Tensor)
        return out_THK
    if q_THK.device.type == "cpu" and not padded:
        return _attend_slices(q_THK, k_THK, v_THK, batch)
    return _attend_padded(q_THK, k_THK, v_THK, batch)


def _attend_slices(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    out = []
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        q_1HTK, k_1HTK, v_1HTK = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q_THK, k_THK, v_THK))
        out.append(F.scaled_dot_product_attention(q_1HTK, k_1HTK, v_1HTK).squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _attend_padded(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    n, longest = len(batch), batch.max_seqlen
    lengths_N = batch.cu_seqlens.diff().long()
    sequence_T = torch.repeat_interleave(torch.arange(n, device=q_THK.device), lengths_N, output_size=batch.bounds[-1])
    # Each token's place in the padded block; not position_T, which a caller may shift.
    column_T = torch.arange(batch.bounds[-1], device=q_THK.device) - batch.cu_seqlens[:-1].long()[sequence_T]

    def to_block(x_THK: torch.Tensor) -> torch.Tensor:
        block = x_THK.new_zeros(n, longest, *x_THK.shape[1:])
        return block.index_put((sequence_T, column_T), x_THK).transpose(1, 2)

    key_mask_N11L = (torch.arange(longest, device=q_THK.device) < lengths_N[:, None])[:, None, None, :]
    out_NHLK = F.scaled_dot_product_attention(
        to_block(q_THK), to_block(k_THK), to_block(v_THK), attn_mask=key_mask_N11L
    )
    return out_NHLK.transpose(1, 2)[sequence_T, column_T]


class RotaryEmbedding(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), base 10000, half-split as in GPT-NeoX and fair-esm.

    `inv_freq` is a buffer that checkpoints carry: released ESM-2 holds values rounded to fp16 there, and computing them
    anew moves representations by up to 1e-3. It must stay fp32: in bf16 half of 1,024 positions coincide.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(head_dim))

    def forward(self, q_THK: torch.Tensor, k_THK: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn q and k [T, H, K] by their places in the sequence."""
        # Made here and not passed in: mixed precision casts the inputs of a sharded layer, and angles must stay fp32.
        angle_TK = batch.position_T[:, None].to(self.inv_freq.dtype) * self.inv_freq
        cos_T1K, sin_T1K = angle_TK.cos()[:, None, :], angle_TK.sin()[:, None, :]
        return _rotate(q_THK, cos_T1K, sin_T1K), _rotate(k_THK, cos_T1K, sin_T1K)


def inverse_frequencies(head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2]: radians a token for each rotated pair."""
    with torch.device("cpu"):
        return 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


def _rotate(x_THK: torch.Tensor, cos_T1K: torch.Tensor, sin_T1K: torch.Tensor) -> torch.Tensor:
    a, b = x_THK.float().chunk(2, dim=-1)
    return torch.cat((a * cos_T1K - b * sin_T1K, b * cos_T1K + a * sin_T1K), dim=-1).to(x_THK.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases and rotary positions; parameter names of fair-esm."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.q_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.rot_emb = RotaryEmbedding(self.head_dim)

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, on_map: Callable[[int, torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """[T, D] to [T, D]. `on_map(sequence, probabilities_HLL)` is called for each sequence where given."""
        shape = (-1, self.n_heads, self.head_dim)
        q_THK, k_THK, v_THK = (proj(x_TD).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q_THK, k_THK = self.rot_emb(q_THK, k_THK, batch)
        if on_map is not None:
            for n, (start, end) in enumerate(zip(batch.bounds, batch.bounds[1:], strict=False)):
                on_map(n, attention_map(q_THK[start:end], k_THK[start:end]))
        return self.out_proj(attend(q_THK, k_THK, v_THK, batch).flatten(1))  # type: ignore[no-any-return]


def attention_map(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
    """Attention probabilities of one sequence, fp32 [H, L, L].

    The softmax runs over all tokens; `<cls>` and `<eos>` are cut off afterwards, without a new normalisation.
    """
    q_HTK, k_HKT = q_THK.transpose(0, 1), k_THK.permute(1, 2, 0)
    scores_HTT = (q_HTK * q_THK.shape[-1] ** -0.5) @ k_HKT
    probabilities_HTT: torch.Tensor = scores_HTT.float().softmax(dim=-1)
    return probabilities_HTT[:, 1:-1, 1:-1]
