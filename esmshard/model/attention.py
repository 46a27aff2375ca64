"""Computes self-attention over packed sequences. `esmshard.batch` explains the letters of tensor names."""

import itertools
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import DistanceBias, TokenBatch

OnAttention = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""The type of a function `on_attention(layer, sequence, q_THK, k_THK)`. It gets the index of a layer, the index of
a sequence in the batch, and the sequence's queries and keys after the rotary embedding, including `<cls>` and `<eos>`.
The function can call `attention_map` for a few heads at a time, because the maps [T, T] of all heads together could
need too much memory."""


def kernel_name(device: torch.device, dtype: torch.dtype) -> Literal["varlen", "slices", "padded"]:
    """Return the attention kernel for a device and precision. SDPA is torch's `scaled_dot_product_attention`.

    - `varlen`: FlashAttention over packed sequences, in half precision on CUDA GPUs from Ampere on.
    - `slices`: one SDPA call per sequence, on the CPU, where it was the fastest in measurements.
    - `padded`: one SDPA call with a key mask, after padding to the longest sequence, in all other cases.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if half and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return "varlen"
    return "slices" if device.type == "cpu" else "padded"


def attend(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Compute softmax attention [T, H, K] within each sequence, with the kernel that `kernel_name` chooses."""
    if batch.distance_bias is not None:
        return attend_biased(q_THK, k_THK, v_THK, batch, batch.distance_bias)  # type: ignore[no-any-return]
    kernel = kernel_name(q_THK.device, q_THK.dtype)
    if kernel == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = batch.cu_seqlens, batch.max_seqlen
        # The keyword arguments changed between torch releases; the seven positional arguments did not.
        out_THK = varlen_attn(q_THK, k_THK, v_THK, cu, cu, longest, longest)
        assert isinstance(out_THK, torch.Tensor)
        return out_THK
    if kernel == "slices":
        return attend_slices(q_THK, k_THK, v_THK, batch)  # type: ignore[no-any-return]
    return attend_padded(q_THK, k_THK, v_THK, batch)  # type: ignore[no-any-return]


def attend_slices(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Compute the result of `attend` with one SDPA call for each sequence."""
    out = []
    # `split` is faster than slices, because each slice would get a gradient as large as the pack.
    for q, k, v in zip(*(torch.split(x_THK, batch.token_counts) for x_THK in (q_THK, k_THK, v_THK)), strict=True):
        q_1HTK, k_1HTK, v_1HTK = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(q_1HTK, k_1HTK, v_1HTK).squeeze(0).transpose(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def attend_padded(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Compute the result of `attend` with one SDPA call, after padding all sequences to the length of the longest."""
    sequence_T, column_T = _places(batch)
    q_NHLK, k_NHLK, v_NHLK = (
        _to_block(x_THK, batch, sequence_T, column_T).transpose(1, 2) for x_THK in (q_THK, k_THK, v_THK)
    )
    lengths_N = batch.cu_seqlens.diff().long()
    key_mask_N11L = (torch.arange(batch.max_seqlen, device=q_THK.device) < lengths_N[:, None])[:, None, None, :]
    out_NHLK = F.scaled_dot_product_attention(q_NHLK, k_NHLK, v_NHLK, attn_mask=key_mask_N11L)
    return out_NHLK.transpose(1, 2)[sequence_T, column_T]


def _places(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row (the sequence) and the column of each token in a padded block, int64 [T] each."""
    device, lengths_N = batch.cu_seqlens.device, batch.cu_seqlens.diff().long()
    sequence_T = torch.repeat_interleave(
        torch.arange(len(batch), device=device), lengths_N, output_size=batch.bounds[-1]
    )
    # `position_T` cannot serve as the column in the padded block, because a gap between chains shifts positions.
    return sequence_T, torch.arange(batch.bounds[-1], device=device) - batch.cu_seqlens[:-1].long()[sequence_T]


def _to_block(x_T: torch.Tensor, batch: TokenBatch, sequence_T: torch.Tensor, column_T: torch.Tensor) -> torch.Tensor:
    """Copy a tensor [T, ...] of the pack to a padded block [N, L, ...] of zeros."""
    block_NL = x_T.new_zeros(len(batch), batch.max_seqlen, *x_T.shape[1:])
    return block_NL.index_put((sequence_T, column_T), x_T)


def attend_biased(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch, bias: DistanceBias
) -> torch.Tensor:
    """Compute softmax(q k' + bias) v, [T, H, K], within each sequence. The kernels are those of `kernel_name`, but
    torch's `flex_attention` replaces `varlen`, which has no bias.
    """
    if bias.block_mask is not None:
        return _attend_flex(q_THK, k_THK, v_THK, bias)
    if kernel_name(q_THK.device, q_THK.dtype) == "slices":
        parts = [(start, end, start, end) for start, end in itertools.pairwise(batch.bounds)]
        return attend_biased_parts(q_THK, k_THK, v_THK, batch.position_T, bias, parts)
    sequence_T, column_T = _places(batch)
    q_NHLK, k_NHLK, v_NHLK = (
        _to_block(x_THK, batch, sequence_T, column_T).transpose(1, 2) for x_THK in (q_THK, k_THK, v_THK)
    )
    position_NL = _to_block(bias.position_T, batch, sequence_T, column_T)
    column_L, lengths_N1 = torch.arange(batch.max_seqlen, device=q_THK.device), batch.cu_seqlens.diff().long()[:, None]
    visible_NL = (column_L < lengths_N1) & (column_L >= int(bias.hides_first))
    places = position_NL, position_NL, visible_NL
    out_NHLK: torch.Tensor = _Biased.apply(  # type: ignore[no-untyped-call]
        q_NHLK, k_NHLK, v_NHLK, bias.bias_EH, *places
    )
    return out_NHLK.transpose(1, 2)[sequence_T, column_T]


Parts = list[tuple[int, int, int, int]]
"""Four indices for each sequence: where its queries begin and end among the queries of this process, and where its keys
begin and end in the pack."""


def attend_biased_parts(
    q_RHK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THK: torch.Tensor,
    position_R: torch.Tensor,
    bias: DistanceBias,
    parts: Parts,
) -> torch.Tensor:
    """Compute the result of `attend_biased` for R queries, one sequence after the other."""
    out, keys = [], slice(parts[0][2], parts[-1][3])
    # `split` is faster than slices, because each slice would get a gradient as large as the pack.
    q_parts = torch.split(q_RHK, [end - start for start, end, _, _ in parts])
    kv_parts = (torch.split(x_THK[keys], [end - start for _, _, start, end in parts]) for x_THK in (k_THK, v_THK))
    for q, k, v, (q_start, q_end, start, end) in zip(q_parts, *kv_parts, parts, strict=True):
        q_1HRK, k_1HTK, v_1HTK = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        visible_1T = torch.arange(end - start, device=q.device)[None] >= int(bias.hides_first)
        places = position_R[None, q_start:q_end], bias.position_T[None, start:end], visible_1T
        out_1HRK: torch.Tensor = _Biased.apply(  # type: ignore[no-untyped-call]
            q_1HRK, k_1HTK, v_1HTK, bias.bias_EH, *places
        )
        out.append(out_1HRK.squeeze(0).transpose(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


class _Biased(torch.autograd.Function):
    """Computes attention with a `DistanceBias`, for queries [N, H, R, K] and keys and values [N, H, T, K].

    Plain autograd would keep a map [N, H, R, T] in every layer. Here the backward pass computes the map again.
    """

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        q, k, v, bias_EH, *places = given
        mask = _scores_bias(bias_EH, *places)[0].to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        ctx.save_for_backward(*given, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *given, out = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        q, k, v, grad, out = (x.to(wide) for x in (*given[:3], grads[0], out))
        bias_NHRT, index_NRT = _scores_bias(*given[3:])
        map_NHRT = torch.matmul(q, k.mT).add_(bias_NHRT).softmax(-1)
        grad_v = map_NHRT.mT @ grad
        grad_scores = torch.matmul(grad, v.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(map_NHRT)
        grad_bias = None
        if ctx.needs_input_grad[3]:
            of_pairs = grad_scores.permute(0, 2, 3, 1).flatten(0, 2)
            grad_bias = (
                of_pairs.new_zeros(given[3].shape).index_add_(0, index_NRT.flatten(), of_pairs).to(given[3].dtype)
            )
        of_qkv = (grad_scores @ k, grad_scores.mT @ q, grad_v)
        return *(x.to(given[0].dtype) for x in of_qkv), grad_bias, None, None, None


def _scores_bias(
    bias_EH: torch.Tensor, of_query_NR: torch.Tensor, of_key_NT: torch.Tensor, visible_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias of each score, [N, H, R, T], which is -inf for keys that are not visible, and the index in
    `bias_EH` of each pair, int64 [N, R, T].
    """
    farthest = len(bias_EH) // 2
    distance_NRT = of_key_NT[:, None, :] - of_query_NR[:, :, None]
    index_NRT = distance_NRT.clamp_(-farthest, farthest).add_(farthest)
    bias_HE = bias_EH.T.contiguous()  # `index_select` takes a third of the time of plain indexing
    bias_NHRT = bias_HE.index_select(1, index_NRT.flatten()).view(-1, *index_NRT.shape).transpose(0, 1)
    return bias_NHRT.masked_fill_(~visible_NT[:, None, None, :], -torch.inf), index_NRT


LEAST_FLEX = 16
"""The minimum width of a head in `flex_attention` on a GPU."""


@lru_cache(maxsize=1)
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return compiled versions of `flex_attention` and `create_block_mask`. With `dynamic=True`, torch 2.13 fails."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # The import takes a second.

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def distance_bias(bias_EH: torch.Tensor, batch: TokenBatch, head_dim: int, *, hides_first: bool) -> DistanceBias:
    """Return the bias for all blocks of a trunk, with a mask if the kernel is `flex_attention`."""
    bias = DistanceBias(bias_EH, batch.position_T, hides_first)
    if kernel_name(bias_EH.device, bias_EH.dtype) != "varlen" or head_dim < LEAST_FLEX:
        return bias
    (sequence_T, column_T), tokens = _places(batch), batch.bounds[-1]

    def is_visible(_n: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (sequence_T[q] == sequence_T[k]) & (column_T[k] >= int(hides_first))

    _, create_block_mask = _compiled_flex()
    mask = create_block_mask(is_visible, None, None, tokens, tokens, device=bias_EH.device)
    return bias._replace(block_mask=mask)


def _attend_flex(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, bias: DistanceBias) -> torch.Tensor:
    """Compute the result of `attend_biased` with `flex_attention`, which skips blocks of pairs in different sequences,
    and keeps no map.
    """
    bias_EH, position_T, farthest = bias.bias_EH.float(), bias.position_T, len(bias.bias_EH) // 2

    def biased(
        score: torch.Tensor, _n: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score + bias_EH[(position_T[k] - position_T[q]).clamp(-farthest, farthest) + farthest, h]

    flex_attention, _ = _compiled_flex()
    q_1HTK, k_1HTK, v_1HTK = (x_THK.transpose(0, 1).unsqueeze(0) for x_THK in (q_THK, k_THK, v_THK))
    out_1HTK: torch.Tensor = flex_attention(
        q_1HTK, k_1HTK, v_1HTK, score_mod=biased, block_mask=bias.block_mask, scale=1.0
    )
    return out_1HTK.squeeze(0).transpose(0, 1)


class RotaryEmbedding(nn.Module):
    """Rotates pairs of numbers in each head by the token's position (Su et al. 2021, arXiv:2104.09864; base 10000).

    A pair has one number from each half of the head, as in GPT-NeoX. With `interleaved=True`, a pair is two
    neighbouring numbers, as in the paper and in Llama.

    Checkpoints contain the buffer `inv_freq`, because its values in released ESM-2 models were rounded to fp16.
    Exact values would change representations by up to 1e-3. The buffer stays fp32 when the model is cast to another
    type, so the angles are fp32, too. bf16 would round the first 1,024 positions to about 512 different numbers.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.register_buffer("inv_freq", inverse_frequencies(head_dim))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "RotaryEmbedding":
        fp32_inv_freq = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = fp32_inv_freq.to(self.inv_freq.device)
        return self

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosine and the sine of each token's rotation angles, fp32 [T, 1, K] each. The sine for the first
        number of each pair has a minus sign.
        """
        angle_TK = batch.position_T[:, None].to(torch.float32) * self.inv_freq
        cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
        join = partial(torch.stack, dim=-1) if self.interleaved else partial(torch.cat, dim=-1)
        cos_TK, sin_TK = (join(pair).flatten(1) for pair in ((cos_TK, cos_TK), (-sin_TK, sin_TK)))
        return cos_TK[:, None], sin_TK[:, None]

    def rotate(self, x_THK: torch.Tensor, cos_T1K: torch.Tensor, sin_T1K: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys with the result of `forward`."""
        if self.interleaved:
            partner_THK = x_THK.view(*x_THK.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner_THK = x_THK.roll(x_THK.shape[-1] // 2, -1)
        return torch.addcmul(x_THK * cos_T1K, partner_THK, sin_T1K).to(x_THK.dtype)


def inverse_frequencies(head_dim: int) -> torch.Tensor:
    """Return each pair's rotation angle per position, in radians, fp32 [head_dim / 2]."""
    with torch.device("cpu"):
        return 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


OnQk = Callable[[int, torch.Tensor, torch.Tensor], None]
"""The type of a function `on_qk(sequence, q_THK, k_THK)`, like `OnAttention` but without the argument `layer`."""


class PackedAttention(nn.Module):
    """Computes attention between the tokens of each sequence. This module has no parameters. If several processes
    divide the heads or the tokens, `esmshard.parallel` replaces this module by a subclass.
    """

    compiles = True
    """Whether `torch.compile` may compile `forward`."""

    def forward(
        self,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_THK: torch.Tensor,
        batch: TokenBatch,
        on_qk: OnQk | None = None,
    ) -> torch.Tensor:
        """Return the attention output [T, H, K]. If the function `on_qk` is given, call it for each sequence."""
        if on_qk is not None:
            _call_per_sequence(on_qk, self.whole(q_THK), self.whole(k_THK), batch)
        return self.attend(q_THK, k_THK, v_THK, batch)

    def attend(self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Call the function `attend`. Subclasses also communicate between processes."""
        return attend(q_THK, k_THK, v_THK, batch)

    def whole(self, q_THK: torch.Tensor) -> torch.Tensor:
        """Return the queries or keys of all tokens and heads. Subclasses collect them from all processes."""
        return q_THK


class SelfAttention(nn.Module):
    """Computes multi-head self-attention, with fair-esm's parameter names.

    With `qk_norm=True`, queries and keys get a LayerNorm over the model's width, as in ESM-C. `RotaryEmbedding`
    explains `interleaved`. `head_dim` is the width of a head, by default `dim / n_heads`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        rotary: bool = True,
        interleaved: bool = False,
        bias: bool = True,
        qk_norm: bool = False,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim or dim // n_heads
        inner = n_heads * self.head_dim
        self.k_proj = nn.Linear(dim, inner, bias=bias)
        self.v_proj = nn.Linear(dim, inner, bias=bias)
        self.q_proj = nn.Linear(dim, inner, bias=bias)
        self.out_proj = nn.Linear(inner, dim, bias=bias)
        self.q_norm = nn.LayerNorm(dim, bias=False) if qk_norm else None
        self.k_norm = nn.LayerNorm(dim, bias=False) if qk_norm else None
        self.rot_emb = RotaryEmbedding(self.head_dim, interleaved=interleaved) if rotary else None
        self.core = PackedAttention()

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch, on_qk: OnQk | None = None) -> torch.Tensor:
        """Map x [T, D] to [T, D]. If the function `on_qk` is given, call it for each sequence."""
        q_TD, k_TD, v_TD = self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)
        if self.q_norm is not None and self.k_norm is not None:
            # Autocast computes norms in fp32, and attention needs the same type for q, k and v.
            q_TD, k_TD = self.q_norm(q_TD).to(v_TD.dtype), self.k_norm(k_TD).to(v_TD.dtype)
        q_THK, k_THK, v_THK = (y_TD.unflatten(1, (-1, self.head_dim)) for y_TD in (q_TD, k_TD, v_TD))
        if self.rot_emb is not None:
            cos_T1K, sin_T1K = self.rot_emb(batch)
            q_THK, k_THK = (self.rot_emb.rotate(y_THK, cos_T1K, sin_T1K) for y_THK in (q_THK, k_THK))
        return self.out_proj(self.core(q_THK, k_THK, v_THK, batch, on_qk).flatten(1))  # type: ignore[no-any-return]


def _call_per_sequence(on_qk: OnQk, q_THK: torch.Tensor, k_THK: torch.Tensor, batch: TokenBatch) -> None:
    split_qk = (torch.split(x_THK, batch.token_counts) for x_THK in (q_THK, k_THK))
    for n, (q, k) in enumerate(zip(*split_qk, strict=True)):
        on_qk(n, q, k)


def attention_map(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
    """Compute the attention probabilities of one sequence, including `<cls>` and `<eos>`, fp32 [H, T, T]."""
    q_HTK, k_HKT = q_THK.float().transpose(0, 1), k_THK.float().permute(1, 2, 0)
    probabilities_HTT: torch.Tensor = ((q_HTK * q_THK.shape[-1] ** -0.5) @ k_HKT).softmax(dim=-1)
    return probabilities_HTT


Between = Callable[[torch.Tensor, TokenBatch], torch.Tensor]
"""The type of a function `between(x_TD, batch)`. A block adds the result [T, D] to x between attention and feed-forward
part."""


class TrunkBlock(nn.Module):
    """The base class of all transformer blocks."""

    reads: ClassVar[tuple[str, ...]] = ("self_attn_layer_norm", "final_layer_norm")
    """The modules whose outputs attention and feed-forward part read. With tensor parallelism each rank computes these
    modules for its own tokens, and gathers the outputs for all tokens."""

    def add_between(self, between: Between, x_TD: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return `between(x_TD, batch)`. `compile` excludes this call from compilation."""
        return between(x_TD, batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile `forward` in place, with the arguments of `torch.compile`. Module hooks are not compiled, so FSDP can
        gather parameters in them.
        """
        # With these functions, each new combination of sequence lengths would compile a block again. They are excluded
        # here and not at import, because `torch.compiler.disable` imports the compiler, which takes 2 s.
        for name in ("attend_slices", "attend_padded", "attend_biased", "_call_per_sequence"):
            function = globals()[name]
            if not hasattr(function, "_torchdynamo_disable"):
                globals()[name] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        for module in self.modules():
            if isinstance(module, PackedAttention) and not module.compiles:
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call,method-assign]
        self.add_between = torch.compiler.disable(self.add_between)  # type: ignore[no-untyped-call,method-assign]
        self.forward = torch.compile(self.forward, *args, **kwargs)
