"""The contact regression equals fair-esm's regression on stacked maps, with gradients and in little memory."""

import copy
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch
from esm.modules import apc, symmetrize
from model_files import fair_esm, ours, tokenise
from torch.profiler import ProfilerActivity, profile

from esmshard.model import contacts as contacts_module
from esmshard.model import weights
from esmshard.model.attention import attention_map
from esmshard.model.contacts import ContactAccumulators, corrected_maps, predict_contacts
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import shard
from esmshard.vocab import STANDARD

CONFIG = EsmConfig(n_layers=3, dim=64, n_heads=4)
LENGTHS = (1, 40, 7, 83, 2)


def residue_maps(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
    """The maps of residues, [H, L, L], from a softmax over all tokens."""
    return attention_map(q_THK, k_THK)[:, 1:-1, 1:-1]


def stacked(maps_CLL: torch.Tensor, weight_C: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """fair-esm's head on all maps at once."""
    return torch.einsum("cij,c->ij", apc(symmetrize(maps_CLL)), weight_C) + bias


@pytest.mark.parametrize(("numbers", "n_outputs"), [(1, 1), (3 * 22**2, 2), (1 << 20, 2)])
def test_the_accumulator_has_the_gradients_of_the_stacked_head(
    numbers: int, n_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contacts_module, "MAP_NUMBERS", numbers)

    def inputs() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = ((3, 22, 4, 8), (3, 22, 4, 8), (n_outputs, 12), (n_outputs,))
        return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]

    out_ALL = torch.randn(n_outputs, 20, 20, generator=torch.Generator().manual_seed(4))
    mine, theirs = inputs(), inputs()
    accumulator = ContactAccumulators(1, mine[2], mine[3])
    for layer in range(3):
        accumulator.add(layer, 0, mine[0][layer], mine[1][layer])
    (logits_ALL,) = accumulator.logits()
    (logits_ALL * out_ALL).sum().backward()

    maps_CLL = torch.cat([residue_maps(q, k) for q, k in zip(theirs[0], theirs[1], strict=True)])
    reference_ALL = torch.stack([stacked(maps_CLL, w, b) for w, b in zip(theirs[2], theirs[3], strict=True)])
    (reference_ALL * out_ALL).sum().backward()
    assert (logits_ALL - reference_ALL).abs().max() <= 1e-5
    for a, b in zip(mine, theirs, strict=True):
        assert b.grad.abs().max() > 1e-2
        assert (a.grad - b.grad).abs().max() <= 1e-5 * max(1, b.grad.abs().max())


def checkpointed(model: ESM2, mode: str) -> ESM2:
    model = copy.deepcopy(model)
    shard(model, Layout(activation_checkpointing=mode), World(0, 1, torch.device("cpu"), None))  # type: ignore[arg-type]
    return model


def test_contacts_train_the_trunk_as_stacked_maps_do() -> None:
    """Gradients of every parameter, also with activation checkpointing, which saves the products of small maps."""
    model, rng = ours(fair_esm(CONFIG), CONFIG), np.random.default_rng(1)
    _, batch = tokenise(["".join(rng.choice(list(STANDARD), length)) for length in LENGTHS])
    targets = [(torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.1).float() for n in LENGTHS]

    def gradients(trunk: ESM2, contacts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        losses = [torch.nn.functional.binary_cross_entropy(c, t) for c, t in zip(contacts, targets, strict=True)]
        torch.stack(losses).sum().backward()
        return {name: p.grad for name, p in trunk.named_parameters() if p.grad is not None}

    stack = copy.deepcopy(model)
    maps: list[list[torch.Tensor]] = [[] for _ in range(len(batch))]
    stack(batch, on_attention=lambda layer, n, q, k: maps[n].append(residue_maps(q, k)))
    regression = stack.contact_head.regression
    expected = [stacked(torch.cat(m), regression.weight[0], regression.bias).sigmoid() for m in maps]
    reference = gradients(stack, expected)
    assert {"embed_tokens.weight", "layers.0.fc1.weight", "contact_head.regression.weight"} <= reference.keys()
    assert sum(float(g.abs().max()) > 1e-3 for g in reference.values()) > 10
    for trunk in (copy.deepcopy(model), checkpointed(model, "full"), checkpointed(model, "selective")):
        contacts = predict_contacts(trunk, batch)
        assert all((a - b).abs().max() <= 1e-6 for a, b in zip(contacts, expected, strict=True))
        streamed = gradients(trunk, contacts)
        assert streamed.keys() == reference.keys()
        for name, gradient in reference.items():
            assert (streamed[name] - gradient).abs().max() <= 1e-5 * max(1, float(gradient.abs().max())), name


def test_contacts_are_summed_in_fp32_under_autocast() -> None:
    """In bf16, a sum of maps would have three correct digits, and the correction would remove two of them."""
    generator = torch.Generator().manual_seed(0)
    q_THK, k_THK = (torch.randn(40, 8, 16, generator=generator).bfloat16() for _ in range(2))
    weight, bias = torch.randn(1, 8, generator=generator).bfloat16().float(), torch.zeros(1)
    maps = residue_maps(q_THK, k_THK)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            accumulator = ContactAccumulators(1, weight.clone().requires_grad_(grad), bias)
            accumulator.add(0, 0, q_THK, k_THK)
            logits = accumulator.logits()[0][0]
        assert logits.dtype == torch.float32
        assert (logits - stacked(maps, weight[0], bias)).abs().max() <= 1e-5
    assert (corrected_maps(q_THK, k_THK) - apc(symmetrize(maps))).abs().max() <= 1e-6


def peak_bytes(function: Callable[[], object]) -> int:
    """The peak of torch's memory while the function runs, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("train", [False, True])
def test_memory_for_contacts_is_a_small_part_of_the_maps(train: bool) -> None:
    """The maps of 6 layers with 20 heads for 384 residues are 72 MB."""
    config = EsmConfig(n_layers=6, dim=160, n_heads=20)
    model = weights.build(weights.fresh(config, 0), torch.device("cpu"))
    _, batch = tokenise(["MKTAYIAK" * 48])

    def finish(x: torch.Tensor) -> None:
        if train:
            x.sum().backward()
            model.zero_grad()

    with torch.set_grad_enabled(train):
        trunk_bytes = peak_bytes(lambda: finish(model(batch).representations[6]))
        contact_bytes = peak_bytes(lambda: finish(predict_contacts(model, batch)[0]))
    assert trunk_bytes > 5e5
    assert contact_bytes - trunk_bytes < 4 * config.n_layers * config.n_heads * 386**2 / 4
