"""Quantised matrices on the GPU against the CPU: their values, the gradients beside them, and their memory."""

from typing import Any

import pytest
import torch
from shared import apart, distance, size
from small_model import CONFIG, LORA, OF_GRADIENTS, OF_LOGITS, built, computed

from esmshard.model.lora import PackedMatrix, check_quantization
from esmshard.parallel.layout import Layout
from esmshard.planner import numbers_of

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
KINDS = ["nf4", "int8"]
ROWS, COLUMNS = size((1920, 480), (96, 48))
"""As in the 35M model: rows end within a block of 64 numbers."""


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_cpu(device: torch.device, kind: Any) -> None:
    """But for numbers between two values, which may fall to either side."""
    if device.type == "cuda":
        check_quantization(device)
    weight_OI = 0.05 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    unpacked = {}
    for place in (CPU, device):
        matrix = PackedMatrix(ROWS, COLUMNS, kind, place)
        for name, values in matrix.pack(weight_OI).items():
            assert values.device == CPU
            matrix.get_buffer(name).copy_(values)
        unpacked[place] = matrix.matrix(torch.float32).cpu()
        half = matrix.matrix(torch.bfloat16).cpu()
        assert torch.allclose(half.float(), unpacked[place], rtol=2**-8, atol=0)
    differing = ~torch.isclose(unpacked[device], unpacked[CPU], rtol=1e-5, atol=0)
    assert differing.float().mean() < 1e-3
    assert distance(unpacked[device], weight_OI) < {"nf4": 0.16, "int8": 0.005}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_logits_and_gradients_are_those_of_fp32(
    device: torch.device, varlen: None, kind: Any, precision: Any, checkpointing: Any
) -> None:
    on_cpu = built(CPU, LORA, Layout(), kind)
    reference_PV, reference = computed(on_cpu, CPU)
    laid = Layout(precision=precision, activation_checkpointing=checkpointing)
    model = built(device, LORA, laid, kind)
    for name, values in on_cpu.named_buffers():  # A single number that fell to the other side would be seen in fp32.
        model.get_buffer(name).copy_(values)
    logits_PV, gradients = computed(model, device)
    assert distance(logits_PV, reference_PV) <= OF_LOGITS[precision]
    assert apart(gradients, reference) <= OF_GRADIENTS[precision]


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_take_what_the_planner_counts(device: torch.device, kind: Any) -> None:
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = built(device, LORA, Layout(), kind)
    numbers = numbers_of(model, CONFIG, quantization=kind)
    n = CONFIG.n_layers
    planned = 4 * (numbers.parameters - n * numbers.layer_quantized) + n * numbers.layer_packed
    tensors = [*model.parameters(), *model.buffers()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert planned <= held <= planned + 4096, "and the frequencies of the rotation"
    if device.type == "cuda":
        assert torch.cuda.memory_allocated(device) - before < planned + 512 * len(tensors) + 2**20
