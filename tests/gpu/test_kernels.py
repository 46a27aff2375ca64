"""Attention kernels against the definition: forward and backward, every head width, short and long sequences."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from shared import bare_pack, distance, size

from esmshard.batch import TokenBatch
from esmshard.model.attention import RotaryEmbedding, attend, attend_padded, kernel_name

pytestmark = pytest.mark.gpu

HEADS = 4
WIDTHS = (8, 16, 24, 32, 64, 128)
"""Of one head: nano, 8M and the starter, 35M, 150M, 650M and 3B, 15B."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of the largest value. Numbers have 8 and 11 bits, and each is rounded some times on its way."""


def lengths() -> list[int]:
    """Tokens of each sequence: many short ones, the edges of the kernel's blocks of 64 and 128, and a long one."""
    rng = np.random.default_rng(0)
    edges = size([1, 2, 3, 63, 64, 65, 127, 128, 129, 511, 1024, 2000], [1, 2, 3, 17])
    return [*edges, *rng.integers(1, 40, size(200, 5)).tolist(), size(4000, 60), 1, 2]


def weights_and_rows(batch: TokenBatch, width: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Rows [T, 3 x H x K] of queries, keys and values, rounded to `dtype`, and the weights of a scalar output."""
    generator = torch.Generator().manual_seed(width)
    tokens = batch.bounds[-1]
    rows_TE = torch.randn(tokens, 3 * HEADS * width, generator=generator)
    weight_THK = torch.randn(tokens, HEADS, width, generator=generator)
    return [rows_TE.to(device, dtype), weight_THK.to(device, dtype)]


def definition(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Softmax of q k^T / sqrt K times v, sequence by sequence."""
    out = []
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        q_HLK, k_HLK, v_HLK = (x[start:end].transpose(0, 1) for x in (q_THK, k_THK, v_THK))
        out.append(((q_HLK @ k_HLK.mT / q_HLK.shape[-1] ** 0.5).softmax(-1) @ v_HLK).transpose(0, 1))
    return torch.cat(out)


def both_ways(
    function: Callable[..., torch.Tensor], rows_TE: torch.Tensor, weight_THK: torch.Tensor, width: int
) -> list[torch.Tensor]:
    """Output, and the gradients of queries, keys and values: views into the same rows, as a layer makes them."""
    leaf = rows_TE.clone().requires_grad_()
    out_THK = function(*leaf.view(len(leaf), 3, HEADS, width).unbind(1))
    out_THK.backward(weight_THK)
    assert leaf.grad is not None
    return [out_THK.detach(), *leaf.grad.view(len(leaf), 3, HEADS, width).unbind(1)]


def check(mine: list[torch.Tensor], exact: list[torch.Tensor], batch: TokenBatch, tolerance: float) -> None:
    """Each sequence on its own: gradients of a long one are far smaller than those of its neighbours."""
    for name, a, b in zip(("output", "q", "k", "v"), mine, exact, strict=True):
        most = float(b.abs().max())
        assert a.isfinite().all(), name
        for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
            # What is nearly zero, as the gradient of the only key of a sequence, is compared with the others.
            scale = max(float(b[start:end].abs().max()), 0.02 * most)
            wrong = float((a[start:end].double() - b[start:end]).abs().max())
            assert wrong <= tolerance * scale, f"{name} of {end - start} tokens: {wrong / scale:.2e}"


@pytest.mark.parametrize(
    ("padded", "dtype", "width"),
    [
        *((False, dtype, width) for dtype in (torch.bfloat16, torch.float16) for width in WIDTHS),
        *((True, dtype, width) for dtype in (torch.bfloat16, torch.float16) for width in (8, 16, 24, 64)),
        *((True, torch.float32, width) for width in (16, 64)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_attention_is_the_definition_with_gradients(
    device: torch.device, varlen: None, padded: bool, dtype: torch.dtype, width: int
) -> None:
    """The definition in double precision, on the same rounded numbers. GPUs before Ampere have the padded kernel."""
    if device.type == "cuda":
        expected = "padded" if dtype == torch.float32 else "varlen"
        assert kernel_name(device, dtype) == expected, "packs go through FlashAttention from Ampere on"
    batch = bare_pack([1, 40, 7, size(700, 83), 2] if padded else lengths()).to(device)
    rows_TE, weight_THK = weights_and_rows(batch, width, dtype, device)
    exact = both_ways(lambda q, k, v: definition(q, k, v, batch), rows_TE.double(), weight_THK.double(), width)
    mine = both_ways(lambda q, k, v: (attend_padded if padded else attend)(q, k, v, batch), rows_TE, weight_THK, width)
    assert {x.dtype for x in mine} == {dtype}
    if dtype == torch.float32:
        assert all((a - b).abs().max() <= 1e-4 for a, b in zip(mine, exact, strict=True))
    else:
        check(mine, exact, batch, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_neighbours_of_a_changed_sequence_stay_as_they_are(
    device: torch.device, varlen: None, dtype: torch.dtype
) -> None:
    """To the bit: no key of another sequence is seen, and nothing depends on what else is in the pack."""
    batch = bare_pack(lengths()).to(device)
    rows_TE, _ = weights_and_rows(batch, 64, dtype, device)
    views = rows_TE.view(len(rows_TE), 3, HEADS, 64)
    before = attend(*views.unbind(1), batch)
    changed = slice(batch.bounds[2], batch.bounds[3])
    views[changed] *= -1.5
    after = attend(*views.unbind(1), batch)
    same_T = (before == after).flatten(1).all(1)
    assert not same_T[changed].all()
    same_T[changed] = True
    assert same_T.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotation_is_that_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """Angles go up to 4,000 radians."""
    width, batch = 64, bare_pack([5, 2])
    batch.position_T[:] = torch.tensor([0, 1, 2, 700, 3999, 0, 3])
    rows_THK, weight_THK = torch.randn(2, 7, HEADS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotary = RotaryEmbedding(width)

    def turned(where: torch.device, kind: torch.dtype) -> list[torch.Tensor]:
        leaf = rows_THK.to(where, kind).clone().requires_grad_()
        out = rotary.to(where).rotate(leaf, *rotary(batch.to(where)))
        out.backward(weight_THK.to(where, kind))
        assert leaf.grad is not None
        return [out.detach().cpu().float(), leaf.grad.cpu().float()]

    for a, b in zip(turned(device, dtype), turned(torch.device("cpu"), torch.float32), strict=True):
        assert distance(a, b) <= (1e-5 if dtype == torch.float32 else 1e-2)  # the angles are the same on both
