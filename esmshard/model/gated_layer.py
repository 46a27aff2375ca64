"""A block with a gated feed-forward part, and an LM head. Several families share them.

No matrix of the block has a bias. `esmshard.batch` explains the letters of tensor names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.attention import Between, OnAttention, SelfAttention, TrunkBlock


def gated(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, F] each. Of what lies between, the backward pass keeps nothing."""
    if torch.compiler.is_compiling():  # The compiler chooses what to keep.
        return F.silu(gate_TF) * up_TF
    if not torch.is_grad_enabled():
        return F.silu(gate_TF, inplace=True).mul_(up_TF)
    product_TF: torch.Tensor = _Gated.apply(gate_TF, up_TF)  # type: ignore[no-untyped-call]
    return product_TF


class _Gated(torch.autograd.Function):
    """The product of a gate. Autograd alone would keep silu(gate), a third of what the feed-forward part keeps."""

    @staticmethod
    def forward(ctx: Any, gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        return F.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_TF, up_TF = ctx.saved_tensors
        grad_up_TF = F.silu(gate_TF).mul_(grads[0])
        grad_gate_TF: torch.Tensor = torch.ops.aten.silu_backward(grads[0] * up_TF, gate_TF)
        return grad_gate_TF, grad_up_TF


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) x weight. The mean is computed in fp32.

    On a GPU this is one kernel. Elsewhere torch has several operations, of which autograd keeps two more vectors.
    """

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map x [T, D] to [T, D]."""
        assert self.eps is not None
        if x_TD.is_cuda or torch.compiler.is_compiling():
            return super().forward(x_TD)  # type: ignore[no-any-return]
        y_TD: torch.Tensor = _RMSNorm.apply(x_TD, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y_TD


class _RMSNorm(torch.autograd.Function):
    """The norm, of which only input and scale are kept."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        scale_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=dtype).square_() / x_TD.shape[-1]
        scale_T1 = scale_T1.add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return (x_TD * scale_T1).to(x_TD.dtype) * weight_D  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        y_TD, grad_TD = x_TD * scale_T1, grads[0].to(scale_T1.dtype)
        grad_D = (grad_TD * y_TD).sum(0).to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_D, None
        grad_TD = grad_TD * weight_D
        mean_T1 = torch.linalg.vecdot(grad_TD, y_TD).unsqueeze(1) / x_TD.shape[-1]
        return y_TD.mul_(mean_T1).neg_().add_(grad_TD).mul_(scale_T1).to(x_TD.dtype), grad_D, None


class GatedLayer(TrunkBlock):
    """A block with a norm before each part, rotary attention and a gated feed-forward part (SwiGLU).

    Args:
        dim: width of the model.
        n_heads: attention heads.
        ffn_width: width of gate and up.
        norm: makes the norms before attention and before the feed-forward part from their width.
        qk_norm: queries and keys have a LayerNorm; see `SelfAttention`.
        interleaved: rotary rotates neighbours; see `SelfAttention`.
        branch_scale: factor of what attention and feed-forward part add.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        ffn_width: int,
        *,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        qk_norm: bool = False,
        interleaved: bool = False,
        branch_scale: float = 1.0,
    ) -> None:
        super().__init__()
        d, f = dim, ffn_width
        self.branch_scale = branch_scale
        self.self_attn_layer_norm = norm(d)
        self.self_attn = SelfAttention(d, n_heads, interleaved=interleaved, bias=False, qk_norm=qk_norm)
        self.final_layer_norm = norm(d)
        # Two products are as fast as a joined one, since each is wide enough to fill the cores.
        self.gate = nn.Linear(d, f, bias=False)
        self.up = nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: TokenBatch,
        layer: int = 0,
        on_attention: OnAttention | None = None,
        between: Between | None = None,
    ) -> torch.Tensor:
        """Map x [T, D] to [T, D]. What `between` returns is added after attention, times the scale of the branches."""
        on_qk = partial(on_attention, layer) if on_attention is not None else None
        y_TD = self.self_attn(self.self_attn_layer_norm(x_TD), batch, on_qk)
        x_TD = torch.add(x_TD, y_TD, alpha=self.branch_scale)
        if between is not None:
            x_TD = torch.add(x_TD, self.add_between(between, x_TD, batch), alpha=self.branch_scale)
        y_TD = self.final_layer_norm(x_TD)
        y_TD = self.down(gated(self.gate(y_TD), self.up(y_TD)))
        return torch.add(x_TD, y_TD, alpha=self.branch_scale)


class UntiedLMHead(nn.Module):
    """A masked-language-model head whose last matrix is its own."""

    def __init__(self, dim: int, n_logits: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.layer_norm = nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, n_logits)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, V]."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(x_PD))))  # type: ignore[no-any-return]
