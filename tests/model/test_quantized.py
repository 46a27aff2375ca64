"""Packed matrices have the values of the definition, and a model with them has the gradients of the unpacked
matrices."""

import math
from typing import Any

import pytest
import torch
from outputs import head_of, learned, smallest
from packed_weights import packed, unpacked

from esmshard.errors import UsageError
from esmshard.model import lora
from esmshard.model.families.family_registry import FAMILIES, SIZES, build
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.model.lora import frozen_product, packed_of
from esmshard.model.weights import Weights, fresh
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shard
from esmshard.planner import numbers_of
from esmshard.recipe.sections import AdaptSettings

CPU = torch.device("cpu")
ALONE, PLAIN = World(0, 1, CPU, None), Layout()
TEXTS = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHM", "ACDEFGHIKLMNPQRSTVWY"]
# The 16 values of NF4 (Dettmers et al. 2023, arXiv:2305.14314, appendix E).
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
KINDS = ["nf4", "int8"]


# With 480 columns, as in the 35M model, a block of 64 numbers continues in the next row.
@pytest.mark.parametrize("shape", [(64, 320), (48, 480), (6, 10)])
def test_packed_values_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    """NF4 rounds each number to one of its values times the largest of 64 numbers; int8 to 1/127 of a row's largest."""
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = []
    for block in weight_OI.flatten().split(64):
        largest = block.abs().max()
        expected.append(NF4[(block[:, None] / largest - NF4).abs().argmin(1)] * largest)
    matrix = packed(weight_OI, "nf4")
    assert torch.allclose(matrix.matrix(torch.float32), torch.cat(expected).view(shape), rtol=1e-6, atol=0)
    assert torch.equal(matrix.matrix(torch.bfloat16), matrix.matrix(torch.float32).bfloat16())

    weight_OI = weight_OI.half().float()
    part_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    found = packed(weight_OI, "int8").matrix(torch.float32)
    assert ((found - weight_OI).abs() <= 0.5001 * part_O1).all()
    parts = found / part_O1
    assert torch.allclose(parts, parts.round(), atol=1e-4)
    assert parts.abs().amax(1).tolist() == pytest.approx([127] * len(parts))


def test_the_backward_pass_of_a_product_saves_nothing() -> None:
    x_TI, bias_O = torch.randn(5, 8, requires_grad=True), torch.randn(12, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        frozen_product(x_TI, bias_O, packed(torch.randn(12, 8), "nf4"))
    assert saved == []


def built(weights: Weights, adapt: AdaptSettings, kind: Any, laid: Layout = PLAIN) -> FineTuner:
    """Build a model as training does, with random values of B."""
    with torch.device("meta"):
        model = FineTuner(build(weights.config), head_of(weights.config))
    model.adapt(adapt, 0, (), kind)
    shard(model, laid, ALONE)
    read = model.rows_of(weights, head_of(weights.config))

    def rows_of(name: str, rows: slice) -> torch.Tensor:
        tensor = read(name, slice(None))
        if name.endswith("lora_B.weight"):
            tensor = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        return tensor[rows]

    materialise(model, rows_of, laid, ALONE)
    return model.train()


ADAPT = {
    "all": AdaptSettings(method="lora", rank=2),  # type: ignore[call-arg]
    "some": AdaptSettings(method="lora", rank=2, targets=("k", "fc2"), bias="none"),  # type: ignore[call-arg]
    "head": AdaptSettings(method="head"),  # type: ignore[call-arg]
}


CASES = [(family, KINDS[n % 2], "all") for n, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "kind", "adapt"), [*CASES, ("esm2", "int8", "some"), ("esm2", "nf4", "head")])
def test_a_model_learns_as_one_of_the_unpacked_matrices(family: str, kind: Any, adapt: str) -> None:
    weights = fresh(smallest(FAMILIES[family]), 1)
    logits_PV, gradients = learned(built(weights, ADAPT[adapt], kind), TEXTS)
    plain_PV, expected = learned(built(unpacked(weights, kind), ADAPT[adapt], None), TEXTS)
    assert torch.allclose(logits_PV, plain_PV, atol=1e-5)
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(largest)), name
    others_PV, _ = learned(built(weights, ADAPT[adapt], None), TEXTS)
    assert (logits_PV - others_PV).abs().max() > 1e-4, "packing changes something"


def test_checkpointing_changes_no_gradient() -> None:
    weights = fresh(SIZES["nano"], 1)
    logits_PV, gradients = learned(built(weights, ADAPT["all"], "nf4"), TEXTS)
    for checkpointing in ("selective", "full"):
        laid = Layout(activation_checkpointing=checkpointing)  # type: ignore[arg-type]
        again_PV, again = learned(built(weights, ADAPT["all"], "nf4", laid), TEXTS)
        assert torch.allclose(again_PV, logits_PV, atol=1e-6)
        assert all(torch.allclose(again[name], gradient, atol=1e-6) for name, gradient in gradients.items())


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_in_bf16_are_near_fp32(kind: Any) -> None:
    weights = fresh(SIZES["nano"], 1)
    logits_PV, gradients = learned(built(weights, ADAPT["all"], kind, Layout(precision="bf16")), TEXTS)
    plain_PV, expected = learned(built(weights, ADAPT["all"], kind), TEXTS)
    assert torch.allclose(logits_PV, plain_PV, atol=0.05)
    for name, gradient in expected.items():
        assert gradients[name].dtype == torch.float32
        assert (gradients[name] - gradient).norm() <= 0.1 * gradient.norm() + 1e-4, name


@pytest.mark.parametrize(("family", "kind"), [("esm2", "nf4"), ("esmc", "int8")])
def test_the_big_linear_layers_of_the_blocks_are_packed_and_nothing_else(family: str, kind: Any) -> None:
    config = smallest(FAMILIES[family])
    with torch.device("meta"):
        plain, model = (FineTuner(build(config), LanguageModelHead()) for _ in range(2))
    plain.adapt(ADAPT["some"], 0)
    model.adapt(ADAPT["some"], 0, (), kind)
    packed = {name for name, module in model.trunk.named_modules() if packed_of(module) is not None}
    assert packed == {f"layers.{n}.{matrix.path}" for n in range(config.n_layers) for matrix in config.matrices}
    full, all_shapes = ({name: p.shape for name, p in each.named_parameters()} for each in (model, plain))
    assert all_shapes.keys() - full.keys() == {f"trunk.{name}.weight" for name in packed}
    assert full.items() <= all_shapes.items()
    numbers = numbers_of(model, config, quantization=kind)
    in_full = numbers.parameters - config.n_layers * numbers.layer_quantized
    assert in_full == sum(map(math.prod, full.values()))
    sizes = [(matrix.rows, matrix.rows * matrix.columns) for matrix in config.matrices]
    expected = [n // 2 + 4 * -(-n // 64) if kind == "nf4" else n + 4 * rows for rows, n in sizes]
    assert numbers.layer_packed == sum(expected), "with an fp32 scale for each block, or each row"


def test_other_devices_than_nvidia_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.quantize: .*NVIDIA"):
        lora.check_quantization(torch.device("mps"))
