"""Packed matrices, and weights after packing and unpacking."""

from dataclasses import replace
from typing import Any

import torch

from esmshard.model.lora import PackedMatrix
from esmshard.model.weight_reader import WeightReader
from esmshard.model.weights import Weights


def packed(weight_OI: torch.Tensor, kind: Any) -> PackedMatrix:
    matrix = PackedMatrix(*weight_OI.shape, kind, torch.device("cpu"))
    for name, values in matrix.pack(weight_OI).items():
        matrix.get_buffer(name).copy_(values)
    return matrix


def unpacked(weights: Weights, kind: Any) -> Weights:
    """The weights after packing and unpacking the linear layers of all blocks."""
    paths = [f".{matrix.path}.weight" for matrix in weights.config.matrices]

    def changed(reader: WeightReader) -> WeightReader:
        matrix = packed(reader(), kind).matrix(torch.float32)
        return WeightReader(matrix.shape, lambda rows: matrix[rows])

    read = {
        name: changed(reader) if name.startswith("layers.") and name.endswith(tuple(paths)) else reader
        for name, reader in weights.read.items()
    }
    return replace(weights, read=read)
