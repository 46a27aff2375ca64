"""Frozen matrices in 4 or 8 bits, for the training of a LoRA beside them (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314).

A packed matrix is stored as buffers, which no sharding divides. It is unpacked to the precision of the arithmetic for
each product, forward and backward, and the unpacked matrix is not kept. All values are packed and unpacked by
bitsandbytes: `nf4` in blocks of 64 numbers with one fp32 scale, `int8` with one fp32 scale for each row.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.errors import UsageError
from esmshard.model.config import NF4_BLOCK, Matrix, Quantization


class PackedMatrix(nn.Module):
    """A frozen matrix W [out, in] in 4 or 8 bits: `values` [out, in / 2] or [out, in], and their fp32 `scales`."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, rows: int, columns: int, kind: Quantization, device: torch.device) -> None:
        super().__init__()
        self.rows, self.columns, self.kind = rows, columns, kind
        assert columns % 2 == 0, "two numbers share a byte"
        if kind == "nf4":
            values = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
            scales = torch.empty(-(-rows * columns // NF4_BLOCK), device=device)
        else:
            values = torch.empty(rows, columns, dtype=torch.int8, device=device)
            scales = torch.empty(rows, device=device)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)

    def pack(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the values of both buffers for a matrix. They are computed on the device of the buffers, and returned
        on that of the matrix.
        """
        from bitsandbytes import functional

        there, here = self.values.device, weight_OI.device
        if self.kind == "nf4":
            values, state = functional.quantize_4bit(weight_OI.float().to(there), None, None, NF4_BLOCK, False, "nf4")
            scales = state.absmax
        else:  # The kernel takes fp16 only, which has more digits than the result.
            values, scales, _ = functional.int8_vectorwise_quant(weight_OI.half().to(there))
        return {"values": values.view(self.values.shape).to(here), "scales": scales.to(here)}

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in] in this dtype, as new memory."""
        from bitsandbytes import functional

        if self.kind == "int8":
            return functional.int8_vectorwise_dequant(self.values, self.scales).to(dtype)  # type: ignore[no-any-return]
        # The shape is flat, as blocks are: the kernel for CPUs begins a new block with each row.
        flat = torch.Size([self.rows * self.columns])
        state = functional.QuantState(  # type: ignore[no-untyped-call]
            self.scales, flat, blocksize=NF4_BLOCK, quant_type="nf4", dtype=dtype
        )
        unpacked: torch.Tensor = functional.dequantize_4bit(self.values.view(-1, 1), state)
        return unpacked.view(self.rows, self.columns)


class QuantizedLinear(nn.Linear):
    """A linear layer with a packed matrix in place of `weight`, which is None. `bias` stays its parameter."""

    def __init__(self, base: nn.Linear, kind: Quantization) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = None, base.bias  # type: ignore[assignment]
        self.packed = PackedMatrix(base.out_features, base.in_features, kind, base.weight.device)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out]."""
        return frozen_product(x_TD, self.bias, self.packed)


def quantize(layers: nn.ModuleList, matrices: Sequence[Matrix], kind: Quantization) -> None:
    """Replace the linear layers of each block, in place, on any device. The values of the packed matrices are not
    defined yet.
    """
    for layer in layers:
        for matrix in matrices:
            base = layer.get_submodule(matrix.path)
            assert isinstance(base, nn.Linear)
            layer.set_submodule(matrix.path, QuantizedLinear(base, kind))


def packed_of(linear: nn.Module) -> PackedMatrix | None:
    """Return the packed matrix of a linear layer, with or without a LoRA; None if its matrix is not packed."""
    return getattr(linear, "packed", None)


def frozen_product(x_TI: torch.Tensor, bias_O: torch.Tensor | None, packed: PackedMatrix) -> torch.Tensor:
    """Return x W' + bias, [T, O], for a packed W [O, I]. The bias may learn."""
    y_TO: torch.Tensor = _FrozenProduct.apply(x_TI, bias_O, packed)  # type: ignore[no-untyped-call]
    return y_TO


class _FrozenProduct(torch.autograd.Function):
    """The product with a packed matrix. Neither the unpacked matrix nor the input is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, bias_O: torch.Tensor | None, packed: PackedMatrix) -> torch.Tensor:
        ctx.packed, ctx.x_dtype = packed, x_TI.dtype
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        if torch.is_autocast_enabled(x_TI.device.type):
            x_TI = x_TI.to(torch.get_autocast_dtype(x_TI.device.type))
        return F.linear(x_TI, packed.matrix(x_TI.dtype), None if bias_O is None else bias_O.to(x_TI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_TO,) = grads
        grad_TI = (grad_TO @ ctx.packed.matrix(grad_TO.dtype)).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        grad_O = grad_TO.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return grad_TI, grad_O, None


def check_quantization(device: torch.device) -> None:
    """Raise `UsageError` on devices on which quantised matrices are not offered, and without bitsandbytes."""
    if device.type != "cuda":
        raise UsageError(
            f"model.quantize: is for NVIDIA GPUs, and this run is on {device.type}; pass model.quantize=null, or run "
            "it on a machine with a GPU"
        )
    if find_spec("bitsandbytes") is None:
        raise UsageError("model.quantize: needs bitsandbytes; pip install 'esmshard[quantize]'")
