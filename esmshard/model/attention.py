"""Self-attention over packed sequences. `esmshard.batch` explains the letters of tensor names; E is S x H x K, for S
parts: queries, keys and, if they are in the same tensor, values.

Only `attend` chooses kernels, and only `rotate` uses positions. The projections of query and key are read with their
rows reordered, so that the two numbers which rotary rotates together are adjacent; in some families they are adjacent
already. Such a pair is a complex number, and one multiplication rotates all of them in place. Attention scores are sums
over K, so the order does not change them.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from esmshard.batch import TokenBatch
from esmshard.model.lora import LoraLinear
from esmshard.model.quantized import frozen_product, packed_of

_EAGER = ("_attend_slices", "_attend_padded", "_hand_out")


def keep_eager() -> None:
    """Exclude functions that loop over sequences from compilation, which would compile a block again for every new
    tuple of lengths. `TrunkBlock.compile` calls this function, since a call on import would import the compiler
    and cost two seconds of every start.
    """
    for name in _EAGER:
        function = globals()[name]
        if not hasattr(function, "_torchdynamo_disable"):
            globals()[name] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]


OnAttention = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""The type of `on_attention(layer, sequence, q_THK, k_THK)`, with rotated q and k, `<cls>` and `<eos>` included.

The function gets queries and keys instead of attention maps, because H maps of L x L would fill the memory.
`attention_map` makes maps, for as many heads at a time as the caller wants.
"""


Kernel = Literal["varlen", "slices", "padded"]


def kernel_name(device: torch.device, dtype: torch.dtype, *, padded: bool = False) -> Kernel:
    """Return the kernel that `attend` uses for queries of this precision on this device.

    - `varlen`: `varlen_attn` (FlashAttention over packed sequences), on CUDA in half precision from capability 8.0 on.
    - `slices`: one unmasked SDPA call per sequence, on the CPU. It was measured to be the fastest there, and no other
      sequence can leak in.
    - `padded`: a block padded to the longest sequence, SDPA under a key mask, on other devices or with `padded=True`.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if half and device.type == "cuda" and not padded and torch.cuda.get_device_capability(device) >= (8, 0):
        return "varlen"
    return "slices" if device.type == "cpu" and not padded else "padded"


def attend(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch, *, padded: bool = False
) -> torch.Tensor:
    """Compute softmax attention [T, H, K] in which every token sees its own sequence only.

    The three kernels (`kernel_name`) give the same result.
    """
    kernel = kernel_name(q_THK.device, q_THK.dtype, padded=padded)
    if kernel == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = batch.cu_seqlens, batch.max_seqlen
        # Only seven positional arguments are used, since the keywords changed between torch releases.
        out_THK = varlen_attn(q_THK, k_THK, v_THK, cu, cu, longest, longest)
        assert isinstance(out_THK, torch.Tensor)
        return out_THK
    if kernel == "slices":
        return _attend_slices(q_THK, k_THK, v_THK, batch)  # type: ignore[no-any-return]
    return _attend_padded(q_THK, k_THK, v_THK, batch)  # type: ignore[no-any-return]


def _attend_slices(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    out = []
    # split is used instead of slices: the backward pass of N slices fills N gradients of the whole pack with zeros.
    for q, k, v in zip(*(torch.split(x_THK, batch.token_counts) for x_THK in (q_THK, k_THK, v_THK)), strict=True):
        q_1HTK, k_1HTK, v_1HTK = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(q_1HTK, k_1HTK, v_1HTK).squeeze(0).transpose(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def _attend_padded(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    n, longest = len(batch), batch.max_seqlen
    lengths_N = batch.cu_seqlens.diff().long()
    sequence_T = torch.repeat_interleave(torch.arange(n, device=q_THK.device), lengths_N, output_size=batch.bounds[-1])
    # The place of each token in the padded block. position_T is not used, since a caller may shift it.
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
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), base 10000, with an angle for each pair.

    `inv_freq` is a buffer that checkpoints hold: in released ESM-2 its values are rounded to fp16, and computing them
    anew changes representations by up to 1e-3. The buffer stays fp32 when the model is cast: in bf16, half of 1,024
    positions would be equal.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(head_dim))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "RotaryEmbedding":
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Return the angle of each token for each pair, in radians, fp32 [T, K / 2]."""
        # Angles stay fp32, whatever the precision of the arithmetic.
        return batch.position_T[:, None].to(torch.float32) * self.inv_freq


def inverse_frequencies(head_dim: int) -> torch.Tensor:
    """Return the radians per token of each rotated pair, fp32 [head_dim / 2]."""
    with torch.device("cpu"):
        return 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


def rotate(qkv_TE: torch.Tensor, angle_TK: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rotate the queries and keys, the first two parts of [T, S x H x K], by the angles of their tokens.

    Pairs are adjacent. The width of a head is twice that of `angle_TK`.

    Computed in fp32. On the CPU in fp32 the rotation is in place, except under selective activation checkpointing.
    """
    plain = qkv_TE.device.type == "cpu" and qkv_TE.dtype == torch.float32 and not torch.compiler.is_compiling()
    # A dispatch mode, such as selective activation checkpointing, may keep the unrotated matrix product.
    if plain and not is_in_torch_dispatch_mode():
        turn_T11K = torch.polar(torch.ones_like(angle_TK), angle_TK)[:, None, None, :]
        rotated: torch.Tensor = _RotateInPlace.apply(qkv_TE, turn_T11K, n_heads)  # type: ignore[no-untyped-call]
        return rotated
    cos_T11K, sin_T11K = (f(angle_TK)[:, None, None, :] for f in (torch.cos, torch.sin))
    qkv_TSHK = qkv_TE.view(len(qkv_TE), -1, n_heads, 2 * angle_TK.shape[1])
    a, b = qkv_TSHK[:, :2].float().view(len(qkv_TE), 2, n_heads, -1, 2).unbind(-1)
    turned = torch.stack((a * cos_T11K - b * sin_T11K, b * cos_T11K + a * sin_T11K), dim=-1).flatten(-2)
    return torch.cat((turned.to(qkv_TE.dtype), qkv_TSHK[:, 2:]), dim=1).flatten(1)


class _RotateInPlace(torch.autograd.Function):
    """A rotation in place. The linear layer before it does not need its output for the gradient, so no copy has to be
    kept.
    """

    @staticmethod
    def forward(ctx: Any, qkv_TE: torch.Tensor, turn_T11K: torch.Tensor, n_heads: int) -> torch.Tensor:
        ctx.n_heads = n_heads
        ctx.save_for_backward(turn_T11K)  # On ctx itself, activation checkpointing could not free it.
        ctx.mark_dirty(qkv_TE)
        _complex(qkv_TE, n_heads, turn_T11K.shape[-1]).mul_(turn_T11K)
        return qkv_TE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad_TE = grads[0].clone(memory_format=torch.contiguous_format)
        turn_T11K = ctx.saved_tensors[0]
        _complex(grad_TE, ctx.n_heads, turn_T11K.shape[-1]).mul_(turn_T11K.conj())
        return grad_TE, None, None


def _complex(qkv_TE: torch.Tensor, n_heads: int, n_pairs: int) -> torch.Tensor:
    """Return a view of the queries and keys as complex numbers [T, 2, H, K / 2]."""
    return torch.view_as_complex(qkv_TE.view(len(qkv_TE), -1, n_heads, n_pairs, 2)[:, :2])


class SelfAttention(nn.Module):
    """Multi-head self-attention; parameter names are those of fair-esm.

    With `qk_norm`, queries and keys have a LayerNorm without bias over the width of the model, before the heads are cut
    and the rotation is applied, as in ESM-C. The weights of this norm are read in the order of the reordered rows.

    Rotary pairs each number of a head's first half with one of its second half, as GPT-NeoX does; with `interleaved`,
    it pairs neighbours, as the paper and Llama do.

    The three projections are separate parameters, as in every checkpoint, but one matrix product: they are joined in
    each forward pass. For a pack of 1,000 tokens, joining costs about 1% of the time and saves 5%, and sharding,
    checkpoints and adapters need no second layout.
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
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.reordered = n_heads if rotary and not interleaved else None
        """The number of heads whose rows are reordered; None if pairs are adjacent already, or nothing is rotated."""
        self.padded = False
        """Whether to attend in a padded block on every device, to compare the kernels with each other."""
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        # Where ranks share the heads or the tokens of a layer, `esmshard.parallel` sets other functions.
        self.attend: Callable[..., torch.Tensor] | None = None
        """Computes the attention of queries to keys and values in the place of `attend`."""
        self.norm_of_width: Callable[..., torch.Tensor] = _norm_of_width
        """The norm of queries and keys."""
        self.handed_out: Callable[[torch.Tensor], torch.Tensor] = _as_they_are
        """Takes queries or keys, and returns those of all heads and tokens, for `on_qk`."""
        self.q_norm = nn.LayerNorm(dim, bias=False) if qk_norm else None
        self.k_norm = nn.LayerNorm(dim, bias=False) if qk_norm else None
        self.rot_emb = RotaryEmbedding(dim // n_heads) if rotary else None

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: TokenBatch,
        on_qk: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Map x [T, D] to [T, D]. If `on_qk` is passed, `on_qk(sequence, q_THK, k_THK)` is called for each sequence."""
        q_THK, k_THK, v_THK = self._queries_keys_values(x_TD, batch)
        if on_qk is not None:
            _hand_out(on_qk, self.handed_out, q_THK, k_THK, batch)
        options = {"padded": True} if self.padded else {}
        return self.out_proj((self.attend or attend)(q_THK, k_THK, v_THK, batch, **options).flatten(1))  # type: ignore[no-any-return]

    def _queries_keys_values(
        self, x_TD: torch.Tensor, batch: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [T, H, K] each, as attention takes them."""
        t = len(x_TD)
        qkv_TE = self._project(x_TD)
        if self.q_norm is None or self.k_norm is None:
            if self.rot_emb is not None:
                qkv_TE = rotate(qkv_TE, self.rot_emb(batch), self.n_heads)
            q_THK, k_THK, v_THK = qkv_TE.view(t, 3, self.n_heads, -1).unbind(1)
            return q_THK, k_THK, v_THK
        # The norms need their inputs for the gradient. Their joined outputs are new memory, which is rotated in place.
        q_TD, k_TD, v_TD = torch.chunk(qkv_TE, 3, 1)
        normed = []
        for y_TD, norm in ((q_TD, self.q_norm), (k_TD, self.k_norm)):
            weight_D = norm.weight if self.reordered is None else _paired(norm.weight, self.reordered)
            normed.append(self.norm_of_width(y_TD, weight_D, None, norm.eps))
        qk_TE = torch.cat(normed, 1).to(v_TD.dtype)  # Autocast computes norms in fp32, and attention needs one type.
        if self.rot_emb is not None:
            qk_TE = rotate(qk_TE, self.rot_emb(batch), self.n_heads)
        q_THK, k_THK = qk_TE.view(t, 2, self.n_heads, -1).unbind(1)
        return q_THK, k_THK, v_TD.view(t, self.n_heads, -1)

    def _project(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Compute queries, keys and values [T, E]: one matrix product, and one more if projections have a LoRA."""
        qkv_TE = self._project_base(x_TD)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        low_rank = [p for p in projections if isinstance(p, LoraLinear)]
        if not low_rank:
            return qkv_TE
        # The B matrices are blocks along the diagonal. This adds many zeros, but R is small, and there is one sum over
        # [T, E].
        none = low_rank[0].lora_B.weight[:, :0]
        b = [p.lora_B.weight if isinstance(p, LoraLinear) else none for p in projections]
        b_ER = _join(self.reordered, *torch.block_diag(*b).chunk(3))  # type: ignore[no-untyped-call]
        h_TR = F.linear(x_TD, torch.cat([p.lora_A.weight for p in low_rank]))
        return torch.addmm(qkv_TE, h_TR, b_ER.t(), alpha=low_rank[0].scale)

    def _project_base(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.q_proj.weight is None:  # All three matrices are packed, or none.
            packed = [matrix for p in (self.q_proj, self.k_proj, self.v_proj) if (matrix := packed_of(p)) is not None]
            return frozen_product(
                x_TD, self._joined("bias"), lambda dtype: _join(self.reordered, *(p.matrix(dtype) for p in packed))
            )
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # The compiler chooses what to keep
            return F.linear(x_TD, self._joined("weight"), self._joined("bias"))  # type: ignore[arg-type]
        q, k, v = self.q_proj, self.k_proj, self.v_proj
        qkv_TE: torch.Tensor = _Project.apply(  # type: ignore[no-untyped-call]
            x_TD, q.weight, k.weight, v.weight, q.bias, k.bias, v.bias, self.reordered
        )
        return qkv_TE

    def _joined(self, name: str) -> torch.Tensor | None:
        q, k, v = (getattr(projection, name) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if q is None:
            return None
        return _join(self.reordered, q, k, v)


def _as_they_are(q_THK: torch.Tensor) -> torch.Tensor:
    return q_THK


def _norm_of_width(y_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.layer_norm(y_TD, y_TD.shape[1:], weight_D, bias_D, eps)


def _join(n_heads: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Join the weights or biases of the three projections along the rows. With `n_heads`, q and k are reordered by
    `_paired`.
    """
    return torch.cat((q, k, v) if n_heads is None else (_paired(q, n_heads), _paired(k, n_heads), v))


def _paired(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorder the rows of each head from first and second half to pairs: 0, K/2, 1, K/2 + 1, ..."""
    return rows.view(n_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _unpaired(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo `_paired`."""
    return rows.view(n_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class _Project(torch.autograd.Function):
    """The joint matrix product, which saves the three matrices for the backward pass instead of the joint matrix.

    The joint matrix would be 3 D^2 numbers a layer that no sharding divides: 7.5 GB on every GPU for the 15B model in
    bf16.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, *weights: Any) -> torch.Tensor:
        *six, ctx.n_heads = weights
        ctx.x_dtype, ctx.w_dtype = x_TD.dtype, six[0].dtype
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        ctx.save_for_backward(x_TD if any(ctx.needs_input_grad[1:4]) else None, *six[:3])
        weight_ED = _join(ctx.n_heads, *six[:3]).to(x_TD.dtype)
        bias_E = None if six[3] is None else _join(ctx.n_heads, *six[3:]).to(x_TD.dtype)
        return F.linear(x_TD, weight_ED, bias_E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_TE, (x_TD, *three), needed = grads[0], ctx.saved_tensors, ctx.needs_input_grad
        found: list[torch.Tensor | None] = [None] * 8
        if needed[0]:
            found[0] = (grad_TE @ _join(ctx.n_heads, *three).to(grad_TE.dtype)).to(ctx.x_dtype)
        if any(needed[1:4]):
            found[1:4] = (grad_TE.t() @ x_TD).chunk(3)
        if any(needed[4:7]):
            found[4:7] = grad_TE.sum(0).chunk(3)
        for n, part in enumerate(found[1:7], 1):
            if part is not None:
                rows = part if ctx.n_heads is None or n in (3, 6) else _unpaired(part, ctx.n_heads)
                found[n] = rows.to(ctx.w_dtype) if needed[n] else None
        return tuple(found)


def _hand_out(
    on_qk: Callable[[int, torch.Tensor, torch.Tensor], None],
    every: Callable[[torch.Tensor], torch.Tensor],
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    batch: TokenBatch,
) -> None:
    counts = batch.token_counts
    split_qk = (torch.split(every(x_THK), counts) for x_THK in (q_THK, k_THK))
    for n, (q, k) in enumerate(zip(*split_qk, strict=True)):
        on_qk(n, q, k)


def attention_map(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
    """Compute the attention probabilities of one sequence, `<cls>` and `<eos>` included, fp32 [H, T, T] for every type
    of q and k.
    """
    q_HTK, k_HKT = q_THK.float().transpose(0, 1), k_THK.float().permute(1, 2, 0)
    probabilities_HTT: torch.Tensor = ((q_HTK * q_THK.shape[-1] ** -0.5) @ k_HKT).softmax(dim=-1)
    return probabilities_HTT


Between = Callable[[torch.Tensor, TokenBatch], torch.Tensor]
"""The type of `between(x_TD, batch)`, which returns what a family adds between attention and feed-forward part."""


class TrunkBlock(nn.Module):
    """A layer of a trunk, with attention. Families have subclasses."""

    def add_between(self, between: Between, x_TD: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return `between(x_TD, batch)`, which is never compiled."""
        return between(x_TD, batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile `forward` in place, with the arguments of `torch.compile`.

        Attention over sequences of many lengths is not compiled. Hooks of the module are not, either, so that FSDP
        gathers outside of compiled code.
        """
        keep_eager()
        for module in self.modules():
            if isinstance(module, SelfAttention) and module.attend is not None:
                module.attend = torch.compiler.disable(module.attend)  # type: ignore[no-untyped-call]
        self.add_between = torch.compiler.disable(self.add_between)  # type: ignore[no-untyped-call,method-assign]
        self.forward = torch.compile(self.forward, *args, **kwargs)
