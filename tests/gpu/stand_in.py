"""Packed attention on the CPU, for rehearsals: `torch_attn::_varlen_attn` with the definition in place of a kernel."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from esmshard.model import attention

HALF = (torch.bfloat16, torch.float16)


def varlen_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `attend` take packed attention on the CPU in half precision, as it does on a GPU."""
    _register()
    before = attention.kernel_name

    def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
        return "varlen" if dtype in HALF else before(device, dtype)

    monkeypatch.setattr(attention, "kernel_name", kernel_name)


@cache
def _register() -> None:
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _rows(cu: torch.Tensor) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise(cu.tolist()))


def _forward(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, cu: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert int(cu.diff().max()) == rest[1] == rest[2]
    out = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    lse_HT = torch.empty(q_THK.shape[1], len(q_THK))
    for rows in _rows(cu):
        q, k, v = (x[rows].float().transpose(0, 1) for x in (q_THK, k_THK, v_THK))
        scores_HLL = q @ k.mT / q.shape[-1] ** 0.5
        lse_HT[:, rows] = scores_HLL.logsumexp(-1)
        out[rows] = (scores_HLL.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    return out, lse_HT, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: torch.Tensor,
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THK: torch.Tensor,
    out: torch.Tensor,
    lse_HT: torch.Tensor,
    cu: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THK, k_THK, v_THK)]
    for rows in _rows(cu):
        q, k, v, g, o = (x[rows].float().transpose(0, 1) for x in (q_THK, k_THK, v_THK, grad, out))
        scale = q.shape[-1] ** -0.5
        p_HLL = (q @ k.mT * scale - lse_HT[:, rows, None]).exp()
        ds_HLL = p_HLL * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        for x, whole in zip((ds_HLL @ k, ds_HLL.mT @ q, p_HLL.mT @ g), found, strict=True):
            whole[rows] = x.transpose(0, 1).to(whole.dtype)
    return found[0], found[1], found[2]
