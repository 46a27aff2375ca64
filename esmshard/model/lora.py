"""Implements LoRA (Hu et al. 2021, arXiv:2106.09685): adds trained low-rank matrices to the trunk's frozen matrices.

    y = x W' + bias + alpha / rank * (x A') B'        A [rank, in], B [out, rank], ' means transposed

B starts at zero, so the initial outputs equal the outputs of the base model. A and B are parameters inside the linear
layer, such as `layers.N.self_attn.q_proj.lora_A.weight`, so sharding, checkpoints and compilation include them.

The frozen matrix W may be quantised ("packed") to 4 or 8 bits for each number (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314). Packed matrices are buffers, which FSDP does not divide. bitsandbytes unpacks the matrix for each
product, forward and backward, so the unpacked matrix does not stay in memory.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.errors import UsageError
from esmshard.model.config import Matrix, Quantization

NF4_BLOCK = 64
"""How many neighbouring numbers of an nf4 matrix share a scale."""


class LoraLinear(nn.Linear):
    """A linear layer with a LoRA. It has the weight and the bias of `base`. A quantised `base` has a packed matrix in
    place of the weight. `scale` is alpha / rank.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        packed = packed_of(base)
        device = base.weight.device if packed is None else packed.values.device
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias, self.packed = base.weight, base.bias, packed
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device)
        self.scale = scale

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out]."""
        if self.packed is None:
            y_TD = F.linear(x_TD, self.weight, self.bias)
        else:
            y_TD = frozen_product(x_TD, self.bias, self.packed)
        return torch.addmm(y_TD, F.linear(x_TD, self.lora_A.weight), self.lora_B.weight.t(), alpha=self.scale)


def add_lora(
    layers: nn.ModuleList, matrices: Sequence[Matrix], rank: int, alpha: float, targets: Collection[str]
) -> dict[str, torch.Size]:
    """Add a LoRA, in place, to each linear layer whose `Matrix.target` is in `targets`. Return the shapes of the new
    matrices by their names in the trunk. `esmshard.model.weights.drawn` makes their initial values.
    """
    added: dict[str, torch.Size] = {}
    for n, layer in enumerate(layers):
        for path in (matrix.path for matrix in matrices if matrix.target in targets):
            base = layer.get_submodule(path)
            assert isinstance(base, nn.Linear)
            linear = LoraLinear(base, rank, alpha / rank)
            layer.set_submodule(path, linear)
            names = lora_names(f"layers.{n}.{path}.weight")
            added |= zip(names, (linear.lora_A.weight.shape, linear.lora_B.weight.shape), strict=True)
    return added


def merged(name: str, tensors: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Return W + scale * B A, in fp32, for the weight matrix W named `name`; W if `tensors` has no LoRA for W."""
    a, b = lora_names(name)
    if a not in tensors:
        return tensors[name]
    return torch.addmm(tensors[name].float(), tensors[b].float(), tensors[a].float(), alpha=scale)


def lora_names(name: str) -> tuple[str, str]:
    """Return the names of the LoRA matrices A and B for the weight matrix `name`.

    >>> lora_names("layers.0.fc1.weight")
    ('layers.0.fc1.lora_A.weight', 'layers.0.fc1.lora_B.weight')
    """
    stem = name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


class PackedMatrix(nn.Module):
    """A quantised matrix W [out, in]: `values`, [out, in / 2] for 4 bits or [out, in] for 8 bits, and fp32 `scales`."""

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
        """Quantise a matrix on this module's device. Return `values` and `scales` on the matrix's device."""
        from bitsandbytes import functional

        device = self.values.device
        if self.kind == "nf4":
            values, state = functional.quantize_4bit(weight_OI.float().to(device), None, None, NF4_BLOCK, False, "nf4")
            scales = state.absmax
        else:  # The kernel accepts only fp16, which is more precise than the result.
            values, scales, _ = functional.int8_vectorwise_quant(weight_OI.half().to(device))
        return {"values": values.view(self.values.shape).to(weight_OI.device), "scales": scales.to(weight_OI.device)}

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Unpack the matrix [out, in] into new memory."""
        from bitsandbytes import functional

        if self.kind == "int8":
            return functional.int8_vectorwise_dequant(self.values, self.scales).to(dtype)  # type: ignore[no-any-return]
        # With a flat shape, a block may continue in the next row. Otherwise the CPU kernel begins a block in each row.
        flat = torch.Size([self.rows * self.columns])
        state = functional.QuantState(  # type: ignore[no-untyped-call]
            self.scales, flat, blocksize=NF4_BLOCK, quant_type="nf4", dtype=dtype
        )
        unpacked: torch.Tensor = functional.dequantize_4bit(self.values.view(-1, 1), state)
        return unpacked.view(self.rows, self.columns)


class QuantizedLinear(nn.Linear):
    """A linear layer with a packed matrix. Its `weight` is None, and its `bias` is the bias of `base`."""

    def __init__(self, base: nn.Linear, kind: Quantization) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = None, base.bias  # type: ignore[assignment]
        self.packed = PackedMatrix(base.out_features, base.in_features, kind, base.weight.device)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out]."""
        return frozen_product(x_TD, self.bias, self.packed)


def quantize(layers: nn.ModuleList, matrices: Sequence[Matrix], kind: Quantization) -> None:
    """Replace the linear layers of each block, in place, by `QuantizedLinear` layers. Their values are loaded later."""
    for layer in layers:
        for matrix in matrices:
            base = layer.get_submodule(matrix.path)
            assert isinstance(base, nn.Linear)
            layer.set_submodule(matrix.path, QuantizedLinear(base, kind))


def packed_of(linear: nn.Module) -> PackedMatrix | None:
    """Return the packed matrix of a linear layer; None if the matrix is not packed."""
    return getattr(linear, "packed", None)


def frozen_product(x_TI: torch.Tensor, bias_O: torch.Tensor | None, packed: PackedMatrix) -> torch.Tensor:
    """Return x W' + bias, [T, O], for a packed matrix W [O, I]. The bias may be trained."""
    y_TO: torch.Tensor = _FrozenProduct.apply(x_TI, bias_O, packed)  # type: ignore[no-untyped-call]
    return y_TO


class _FrozenProduct(torch.autograd.Function):
    """Multiplies by a packed matrix. For the backward pass, saves neither the unpacked matrix nor the input."""

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
    """Raise `UsageError` if the device is no CUDA GPU or bitsandbytes is missing."""
    if device.type != "cuda":
        raise UsageError(
            f"model.quantize: is for NVIDIA GPUs, and this run is on {device.type}; pass model.quantize=null, or run "
            "it on a machine with a GPU"
        )
    if find_spec("bitsandbytes") is None:
        raise UsageError("model.quantize: needs bitsandbytes; pip install 'esmshard[quantize]'")
