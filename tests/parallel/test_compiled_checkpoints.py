"""Layers that are checkpointed and compiled: in truth, once for all packs, with the gradients of plain ones."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from esmshard.batch import TokenBatch, pack
from esmshard.model import attention, weights
from esmshard.model.families.esm2 import ESM2, EsmConfig, TransformerLayer
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shard
from esmshard.vocab import encode

ALONE = World(0, 1, torch.device("cpu"), None)
PACKS = [["MKTAYIAK", "QR"], ["MKTAYIAKQRQISFVKSHFSRQ"], ["MK", "TAY", "I", "AKQRQ"]]


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is one operation, as on a GPU: slices would break each graph in two."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return q + 2 * k + 3 * v + 1e-3 * batch.max_seqlen

    in_place = TransformerLayer.compile
    monkeypatch.setattr(TransformerLayer, "compile", lambda self, **how: in_place(self, **how, backend="eager"))
    monkeypatch.setattr(attention, "attend", attend)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def gradients(model: ESM2, texts: list[str]) -> list[torch.Tensor]:
    batch = pack([encode(text) for text in texts], [f"{text} {len(texts)}" for text in texts])
    model.zero_grad()
    (model(batch).representations[3] ** 3).sum().backward()
    return [p.grad for p in model.layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_blocks_are_compiled_once_for_all_packs(checkpointing: str) -> None:
    config = EsmConfig(n_layers=3, dim=32, n_heads=4)
    model, plain = (weights.build(weights.fresh(config, 0), ALONE.device) for _ in range(2))
    shard(model, Layout(activation_checkpointing=checkpointing, compile=True), ALONE)  # type: ignore[arg-type]
    gradients(model, PACKS[0])
    assert counters["stats"]["unique_graphs"] == 1, "of all three blocks; 0 would mean that nothing is compiled"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for texts in PACKS:
            mine, expected = gradients(model, texts), gradients(plain, texts)
            assert len(mine) == len(expected) > 0
            for a, b in zip(mine, expected, strict=True):
                assert (a - b).abs().max() <= 1e-5 * max(1, float(b.abs().max()))
    assert counters["stats"]["unique_graphs"] == 1
