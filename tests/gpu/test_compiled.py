"""Compiled layers against layers that are not, and how often they are compiled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared import distance, masked_pack, size
from small_model import FULL, LORA, OF_LOGITS, built, check, computed
from torch._dynamo.utils import counters

from esmshard.model.families.esm2 import TransformerLayer
from esmshard.parallel.layout import Layout
from esmshard.recipe.sections import AdaptSettings

pytestmark = pytest.mark.gpu

PACKS = [[40], [3, 3, 9], [64, 64], [17, 1, 1, 1, 30], size([1000, 2], [50, 2])]
"""Residues of each sequence: other numbers of sequences, other lengths, one sequence alone."""


@pytest.fixture
def compiler(device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A fresh compiler. In a rehearsal its last stage is left out, which takes a minute on a CPU, and the stage before
    it, too, but for one test.
    """
    torch._dynamo.reset()
    counters.clear()
    if device.type == "cpu":
        compile_in_place = TransformerLayer.compile

        def compile_quickly(self: TransformerLayer, **options: Any) -> None:
            compile_in_place(self, **options, backend="aot_eager" if "selective" in request.node.name else "eager")

        monkeypatch.setattr(TransformerLayer, "compile", compile_quickly)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("adapt", "checkpointing"),
    [(FULL, "none"), (FULL, "full"), (LORA, "selective")],
    ids=["none", "full", "lora, selective"],
)
def test_compiled_layers_say_the_same_and_are_compiled_once_for_all_packs(
    device: torch.device, varlen: None, compiler: None, adapt: AdaptSettings, checkpointing: Any
) -> None:
    model = built(device, adapt, Layout(precision="bf16", activation_checkpointing=checkpointing, compile=True))
    check(model, device, adapt, "bf16")
    graphs = counters["stats"]["unique_graphs"]
    # The blocks share a graph, of which attention is a part. Where the embedding is frozen the first block has its own.
    assert graphs == (2 if adapt is LORA else 1)
    assert not counters["graph_break"]
    plain = built(device, adapt, Layout(precision="bf16"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in PACKS:
            mine, theirs = computed(model, device, lengths)[0], computed(plain, device, lengths)[0]
            assert distance(mine, theirs) <= OF_LOGITS["bf16"]
    assert counters["stats"]["unique_graphs"] == graphs


@torch.no_grad()
def test_without_gradients_they_are_compiled_once_more(device: torch.device, varlen: None, compiler: None) -> None:
    """As a validation does, whose packs are others than those of training."""
    model = built(device, FULL, Layout(precision="bf16", compile=True))
    plain = built(device, FULL, Layout(precision="bf16"))
    model(masked_pack([30, 2])[0].to(device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in PACKS:
            batch = masked_pack(lengths)[0].to(device)
            assert distance(torch.cat(model(batch)), torch.cat(plain(batch))) <= OF_LOGITS["bf16"]
    assert counters["stats"]["unique_graphs"] == 1
