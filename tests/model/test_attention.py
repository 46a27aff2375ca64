"""Each CPU kernel computes the definition of attention, with gradients. `tests/parity` compares rotary positions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from esmshard.batch import TokenBatch, pack
from esmshard.model.attention import attend_padded, attend_slices, kernel_name
from esmshard.vocab import STANDARD, encode


def explicit(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The definition, in double precision, with a softmax over the tokens of one sequence."""
    q, k, v = (x.double() for x in (q_THK, k_THK, v_THK))
    sequence_T = torch.repeat_interleave(torch.arange(len(batch), device=q.device), batch.cu_seqlens.diff().long())
    scores_HTT = torch.einsum("ihk,jhk->hij", q, k) / q.shape[-1] ** 0.5
    scores_HTT = scores_HTT.masked_fill(sequence_T[:, None] != sequence_T[None, :], -torch.inf)
    return torch.einsum("hij,jhk->ihk", scores_HTT.softmax(-1), v)


@pytest.mark.parametrize("attend", [attend_slices, attend_padded])
def test_both_cpu_kernels_are_the_definition_with_gradients(attend: Callable[..., torch.Tensor]) -> None:
    """A change in one sequence leaves all other sequences unchanged bit for bit."""
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(2)
    batch = pack([encode("".join(rng.choice(list(STANDARD), length))) for length in (1, 40, 7, 83, 2)])
    inputs = [torch.randn(batch.bounds[-1], 4, 16, generator=generator) for _ in range(4)]

    def with_gradients(kernel: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        *qkv, weight_THK = [x.clone() for x in inputs]
        out = kernel(*(x.requires_grad_() for x in qkv), batch)
        (out * weight_THK).sum().backward()
        return [out.detach(), *(x.grad for x in qkv)]

    for a, b in zip(with_gradients(attend), with_gradients(explicit), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 1e-5
    q, k, v, _ = inputs
    before, changed = attend(q, k, v, batch), slice(batch.bounds[1], batch.bounds[2])
    for x in (q, k, v):
        x[changed] *= -1.5
    same_T = (before == attend(q, k, v, batch)).flatten(1).all(1)
    assert not same_T[changed].any()
    same_T[changed] = True
    assert same_T.all()


def test_the_kernel_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, dtype, capability, name in (
        ("cpu", torch.bfloat16, None, "slices"),
        ("cuda", torch.float32, (9, 0), "padded"),
        ("cuda", torch.bfloat16, (8, 0), "varlen"),
        ("cuda", torch.float16, (9, 0), "varlen"),
        ("cuda", torch.float16, (7, 5), "padded"),
        ("mps", torch.float16, None, "padded"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert kernel_name(torch.device(device), dtype) == name
