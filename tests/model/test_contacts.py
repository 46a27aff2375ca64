"""Contacts by the regression over attention maps: streamed over heads and layers, trainable, and without the maps."""

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch
from esm.modules import apc, symmetrize
from model_files import fair_esm, ours, tokenise
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from esmshard.model import attention, weights
from esmshard.model import contacts as contacts_module
from esmshard.model.attention import attention_map
from esmshard.model.config import EsmConfig
from esmshard.model.contacts import ContactAccumulator, predict_contacts
from esmshard.model.esm2 import ESM2
from esmshard.vocab import STANDARD

CONFIG = EsmConfig(n_layers=3, dim=64, n_heads=4)
LENGTHS = (1, 40, 7, 83, 2)
N_HEADS = CONFIG.n_heads


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    rng = np.random.default_rng(1)
    return ["".join(rng.choice(list(STANDARD), length)) for length in lengths]


@pytest.fixture(scope="module")
def model() -> ESM2:
    return ours(fair_esm(CONFIG), CONFIG)


def residue_maps(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
    """[H, L, L]: the softmax runs over all tokens, then `<cls>` and `<eos>` are cut off."""
    return attention_map(q_THK, k_THK)[:, 1:-1, 1:-1]


def stacked(maps_CLL: torch.Tensor, weight_C: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """fair-esm's head on all maps at once."""
    return torch.einsum("cij,c->ij", apc(symmetrize(maps_CLL)), weight_C) + bias


def test_streamed_contacts_equal_stacked_ones_in_numpy(model: ESM2) -> None:
    _, batch = tokenise(sequences())
    maps: list[list[np.ndarray]] = [[] for _ in range(len(batch))]
    with torch.no_grad():
        model(batch, on_attention=lambda layer, n, q, k: maps[n].append(residue_maps(q, k).double().numpy()))
        contacts = predict_contacts(model, batch)
    weight_C = model.contact_head.regression.weight[0].detach().double().numpy()
    for length, layers, mine_LL in zip(LENGTHS, maps, contacts, strict=True):
        p_CLL = np.concatenate(layers)
        assert p_CLL.shape == (CONFIG.n_layers * CONFIG.n_heads, length, length)
        logits_LL = np.full((length, length), model.contact_head.regression.bias.item())
        for p_LL, weight in zip(p_CLL, weight_C, strict=True):
            s_LL = p_LL + p_LL.T
            logits_LL += weight * (s_LL - np.outer(s_LL.sum(1), s_LL.sum(0)) / s_LL.sum())
        assert np.abs(mine_LL.numpy() - 1 / (1 + np.exp(-logits_LL))).max() <= 1e-6
        assert torch.allclose(mine_LL, mine_LL.T, atol=1e-7)
    assert contacts[3].std() > 0.005


def test_attention_maps_are_of_residues_and_not_normalised_again(model: ESM2) -> None:
    _, batch = tokenise(sequences())
    rows = {}
    with torch.no_grad():
        model(batch, on_attention=lambda layer, n, q, k: rows.__setitem__((layer, n), residue_maps(q, k).sum(-1)))
    assert rows.keys() == {(layer, n) for layer in range(3) for n in range(len(LENGTHS))}
    for (_, n), sums_HL in rows.items():
        assert sums_HL.shape == (N_HEADS, LENGTHS[n])
        assert (sums_HL < 1).all(), "a part of each row went to <cls> and <eos>"


@pytest.mark.parametrize("numbers", [1, 3 * 22**2, 1 << 20], ids=["one head", "three heads", "all heads"])
def test_the_accumulator_has_the_gradients_of_the_stacked_head(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contacts_module, "MAP_NUMBERS", numbers)

    def inputs() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = ((3, 22, 4, 8), (3, 22, 4, 8), (12,), (1,))
        return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]

    out_LL = torch.randn(20, 20, generator=torch.Generator().manual_seed(4))
    mine, theirs = inputs(), inputs()
    accumulator = ContactAccumulator(mine[2], mine[3])
    for layer in range(3):
        accumulator.add(layer, mine[0][layer], mine[1][layer])
    logits_LL = accumulator.logits()
    (logits_LL * out_LL).sum().backward()

    maps_CLL = torch.cat([residue_maps(q, k) for q, k in zip(theirs[0], theirs[1], strict=True)])
    reference_LL = stacked(maps_CLL, theirs[2], theirs[3])
    (reference_LL * out_LL).sum().backward()
    assert (logits_LL - reference_LL).abs().max() <= 1e-5
    for own, other in zip(mine, theirs, strict=True):
        assert other.grad.abs().max() > 1e-2
        assert (own.grad - other.grad).abs().max() <= 1e-5 * max(1, other.grad.abs().max())


def test_contacts_train_the_trunk_as_stacked_maps_do(model: ESM2) -> None:
    """Gradients of every parameter through `predict_contacts`, against fair-esm's head on stacked maps."""
    _, batch = tokenise(sequences())
    targets = [(torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.1).float() for n in LENGTHS]

    def gradients(contacts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        losses = [torch.nn.functional.binary_cross_entropy(c, t) for c, t in zip(contacts, targets, strict=True)]
        torch.stack(losses).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    streamed = gradients(predict_contacts(model, batch))
    maps: list[list[torch.Tensor]] = [[] for _ in range(len(batch))]
    model(batch, on_attention=lambda layer, n, q, k: maps[n].append(residue_maps(q, k)))
    regression = model.contact_head.regression
    reference = gradients([stacked(torch.cat(m), regression.weight[0], regression.bias).sigmoid() for m in maps])
    assert streamed.keys() == reference.keys()
    assert {"embed_tokens.weight", "layers.0.fc1.weight", "contact_head.regression.weight"} <= streamed.keys()
    for name, gradient in reference.items():
        assert (streamed[name] - gradient).abs().max() <= 1e-5 * max(1, float(gradient.abs().max())), name
    assert sum(float(g.abs().max()) > 1e-3 for g in reference.values()) > 10
    model.zero_grad()


@pytest.mark.parametrize("numbers", [1, 85 * 85 * 3, 1 << 30], ids=["one head", "three heads", "all heads"])
def test_contacts_do_not_depend_on_how_many_heads_go_together(
    model: ESM2, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batch = tokenise(sequences())
    with torch.no_grad():
        expected = predict_contacts(model, batch)
        monkeypatch.setattr(contacts_module, "MAP_NUMBERS", numbers)
        found = predict_contacts(model, batch)
    for mine_LL, other_LL in zip(found, expected, strict=True):
        assert (mine_LL - other_LL).abs().max() <= 1e-6


def test_the_trunk_runs_its_own_kernel_meanwhile(model: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contacts cost maps, and no slower attention: the same call of `attend` in each layer, with the same result."""
    _, batch = tokenise(sequences())
    outputs: list[torch.Tensor] = []
    attend = attention.attend

    def counted(*args: torch.Tensor, **keywords: bool) -> torch.Tensor:
        outputs.append(attend(*args, **keywords))
        assert not keywords
        return outputs[-1]

    monkeypatch.setattr(attention, "attend", counted)
    with torch.no_grad():
        model(batch)
        predict_contacts(model, batch)
    assert len(outputs) == 2 * CONFIG.n_layers
    for without, together in zip(outputs[: CONFIG.n_layers], outputs[CONFIG.n_layers :], strict=True):
        assert torch.equal(without, together)


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("train", [False, True])
def test_no_tensor_holds_more_maps_than_it_may(model: ESM2, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contacts_module, "MAP_NUMBERS", 2 * 302**2)
    _, batch = tokenise(sequences((300,)))
    with torch.set_grad_enabled(train), Largest() as largest:
        (contacts_LL,) = predict_contacts(model, batch)
        if train:
            contacts_LL.sum().backward()
    model.zero_grad()
    assert largest.numel == 2 * 302**2


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that torch has allocated at once while it runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("train", [False, True])
def test_memory_for_contacts_is_a_small_part_of_the_maps(train: bool) -> None:
    """Above what the trunk needs. Maps of 6 layers of 20 heads for 512 residues are 127 MB."""
    config = EsmConfig(n_layers=6, dim=320, n_heads=20)
    model = weights.build(weights.fresh(config, 0), torch.device("cpu"))
    _, batch = tokenise(["MKTAYIAK" * 64])

    def trunk() -> None:
        finish(model(batch).representations[6])

    def contacts() -> None:
        finish(predict_contacts(model, batch)[0])

    def finish(x: torch.Tensor) -> None:
        if train:
            x.sum().backward()
            model.zero_grad()

    maps = 4 * config.n_layers * config.n_heads * 514**2
    with torch.set_grad_enabled(train):
        alone, together = peak_bytes(trunk), peak_bytes(contacts)
    assert alone > 6e6
    assert together - alone < maps / 8
