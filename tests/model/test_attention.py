"""Attention over packed sequences: every kernel, every packing and every gradient says the same."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from esm.rotary_embedding import apply_rotary_pos_emb

from esmshard.batch import TokenBatch, pack
from esmshard.model.attention import RotaryEmbedding, attend_padded, attend_slices, inverse_frequencies, kernel_name
from esmshard.model.families.esm2 import EsmConfig
from esmshard.vocab import STANDARD, encode

CONFIG = EsmConfig(n_layers=3, dim=64, n_heads=4)
LENGTHS = (1, 40, 7, 83, 2)
N_HEADS, HEAD_DIM = 4, 16
Kernel = Callable[..., torch.Tensor]


def sequences() -> list[str]:
    rng = np.random.default_rng(1)
    return ["".join(rng.choice(list(STANDARD), length)) for length in LENGTHS]


def heads(n_tokens: int) -> list[torch.Tensor]:
    """q, k, v and the weights of a scalar output, [T, H, K]."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n_tokens, N_HEADS, HEAD_DIM, generator=generator) for _ in range(4)]


def explicit(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The definition, in double precision: one softmax over all tokens, those of other sequences at minus infinity."""
    q, k, v = (x.double() for x in (q_THK, k_THK, v_THK))
    sequence_T = torch.repeat_interleave(torch.arange(len(batch), device=q.device), batch.cu_seqlens.diff().long())
    scores_HTT = torch.einsum("ihk,jhk->hij", q, k) / HEAD_DIM**0.5
    scores_HTT = scores_HTT.masked_fill(sequence_T[:, None] != sequence_T[None, :], -torch.inf)
    return torch.einsum("hij,jhk->ihk", scores_HTT.softmax(-1), v)


def with_gradients(function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output of `function(q, k, v)`, and the gradients of its weighted sum."""
    *qkv, weight = [x.clone() for x in inputs]
    for x in qkv:
        x.requires_grad_()
    out = function(*qkv)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in qkv)]


KERNELS = [attend_slices, attend_padded]


@pytest.mark.parametrize("attend", KERNELS)
def test_both_cpu_kernels_are_the_definition_with_gradients(attend: Kernel) -> None:
    """And sequences beside a changed one stay bit for bit as they are."""
    batch = pack([encode(s) for s in sequences()])
    inputs = heads(batch.bounds[-1])
    mine = with_gradients(lambda q, k, v: attend(q, k, v, batch), inputs)
    reference = with_gradients(lambda q, k, v: explicit(q, k, v, batch), inputs)
    assert len(mine) == 4
    for a, b in zip(mine, reference, strict=True):
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


# Rotary


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_fair_esm_with_gradients(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    batch = pack([encode("MK"), encode("M")])
    batch.position_T[:] = torch.tensor([0, 1, 2, 700, 1499, 0, 3])
    angle_TK = batch.position_T[:, None] * inverse_frequencies(HEAD_DIM)
    rotary = RotaryEmbedding(HEAD_DIM, interleaved=interleaved)
    q_THK, weight_THK = torch.randn(2, 7, N_HEADS, HEAD_DIM, generator=generator)

    def fair_esm(q_THK: torch.Tensor) -> torch.Tensor:
        cos, sin = (torch.cat((f(angle_TK), f(angle_TK)), dim=-1).double()[None] for f in (torch.cos, torch.sin))
        halves = q_THK.unflatten(-1, (-1, 2)).mT.flatten(-2) if interleaved else q_THK
        turned = apply_rotary_pos_emb(halves.double().transpose(0, 1), cos, sin).transpose(0, 1)
        return turned.unflatten(-1, (2, -1)).mT.flatten(-2) if interleaved else turned

    found = []
    for each in (lambda q: rotary.rotate(q, *rotary(batch)), fair_esm):
        leaf = q_THK.clone().requires_grad_()
        out = each(leaf)
        (out * weight_THK).sum().backward()
        found.append((out.detach(), leaf.grad))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6
    assert (found[0][0] - q_THK)[1:5].abs().max() > 1, "something was turned"


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
