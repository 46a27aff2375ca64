"""Blocks are compiled once for all packs, with the same numbers. The backend `eager` compiles fast."""

from collections.abc import Iterator

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise
from torch._dynamo.utils import counters

from esmshard.batch import TokenBatch
from esmshard.model import attention
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2
from esmshard.model.lora import add_lora


def packs() -> list[TokenBatch]:
    lengths = [(30, 40), (5, 6, 7, 100), (1,), (64, 64)]
    return [tokenise([("MKTAYIAKQRQISFVKSHFSRQ"[n % 5 :] * 14)[:n] for n in pack])[1] for pack in lengths]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def values(model: ESM2, batch: TokenBatch) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model(batch, layers=range(4)).representations.values())


def gradients(model: ESM2, batch: TokenBatch) -> list[torch.Tensor]:
    """Contacts and their gradients. The LM head has no gradient."""
    model.zero_grad()
    contacts = predict_contacts(model, batch)
    torch.stack([c.square().mean() for c in contacts]).sum().backward()
    return [*(c.detach() for c in contacts), *(p.grad for p in model.parameters() if p.grad is not None)]


def compiled_and_plain(backend: str = "eager", *, lora: bool = False) -> tuple[ESM2, ESM2]:
    reference = fair_esm(SMALL["ESM-2"])
    model, plain = (ours(reference, SMALL["ESM-2"]) for _ in range(2))
    for each in (model, plain) if lora else ():
        generator = torch.Generator().manual_seed(1)
        for name in add_lora(each.layers, each.config.matrices, 3, 6.0, ["q", "v", "fc1"]):
            torch.nn.init.normal_(each.get_parameter(name), std=0.2, generator=generator)
    model.compile_layers(backend)
    assert model.state_dict().keys() == plain.state_dict().keys()
    return model, plain


def test_blocks_are_compiled_once_for_all_packs() -> None:
    model, plain = compiled_and_plain(lora=True)
    first, *others = packs()
    gradients(model, first)
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs < 6, "the four parts of one block, and not of each of three"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (first, *others):
            mine, expected = gradients(model, batch), gradients(plain, batch)
            assert len(mine) == len(expected) > 0
            for a, b in zip(mine, expected, strict=True):
                assert (a - b).abs().max() <= 1e-5 * max(1, float(b.abs().max()))
    assert counters["stats"]["unique_graphs"] == graphs


@torch.library.custom_op("esmshard_tests::kernel", mutates_args=())
def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    assert int(cu_seqlens.diff().max()) == longest
    return q + 2 * k + 3 * v


@kernel.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.empty_like(q)


def test_with_a_kernel_for_packs_a_block_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, attention is one operation. Lengths must not become constants of the graph."""
    monkeypatch.setattr(attention, "attend", lambda q, k, v, batch: kernel(q, k, v, batch.cu_seqlens, batch.max_seqlen))
    model, plain = compiled_and_plain()
    for batch in packs():
        for a, b in zip(values(model, batch), values(plain, batch), strict=True):
            assert (a - b).abs().max() <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_the_compiler_that_is_used_gives_the_same_numbers() -> None:
    model, plain = compiled_and_plain("inductor")
    for run in (values, gradients):
        run(model, packs()[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for batch in packs():
                for a, b in zip(run(model, batch), run(plain, batch), strict=True):
                    assert (a - b).abs().max() <= 1e-5 * max(1, float(b.abs().max()))
