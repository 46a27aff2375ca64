"""Attention over packed sequences: every kernel, every packing and every gradient says the same."""

import dataclasses

import numpy as np
import pytest
import torch
from esm.modules import apc, symmetrize
from model_files import fair_esm, ours, tokenise

from esmshard.batch import TokenBatch, pack
from esmshard.model.attention import attend
from esmshard.model.config import EsmConfig
from esmshard.model.contacts import ContactAccumulator, predict_contacts
from esmshard.model.esm2 import ESM2
from esmshard.vocab import STANDARD, encode

CONFIG = EsmConfig(n_layers=3, dim=64, n_heads=4)
LENGTHS = (1, 40, 7, 83, 2)
N_HEADS, HEAD_DIM = 4, 16


def sequences() -> list[str]:
    rng = np.random.default_rng(1)
    return ["".join(rng.choice(list(STANDARD), length)) for length in LENGTHS]


def heads(n_tokens: int) -> list[torch.Tensor]:
    """q, k, v and the weights of a scalar output, [T, H, K]."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n_tokens, N_HEADS, HEAD_DIM, generator=generator) for _ in range(4)]


def explicit(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The definition, in double precision: one softmax over all tokens, those of other sequences at minus infinity."""
    q, k, v = (x.double() for x in (q_THK, k_THK, v_THK))
    sequence_T = torch.repeat_interleave(torch.arange(len(batch), device=q.device), batch.cu_seqlens.diff().long())
    scores_HTT = torch.einsum("ihk,jhk->hij", q, k) / HEAD_DIM**0.5
    scores_HTT = scores_HTT.masked_fill(sequence_T[:, None] != sequence_T[None, :], -torch.inf)
    return torch.einsum("hij,jhk->ihk", scores_HTT.softmax(-1), v)


def with_gradients(function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output of `function(q, k, v)`, and the gradients of its weighted sum."""
    *qkv, weight = [x.clone() for x in inputs]
    for x in qkv:
        x.requires_grad_()
    out = function(*qkv)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in qkv)]


@pytest.fixture(scope="module")
def model() -> ESM2:
    return ours(fair_esm(CONFIG), CONFIG)


@pytest.mark.parametrize("padded", [False, True])
def test_both_cpu_kernels_are_the_definition_with_gradients(padded: bool) -> None:
    batch = pack([encode(s) for s in sequences()])
    inputs = heads(batch.bounds[-1])
    mine = with_gradients(lambda q, k, v: attend(q, k, v, batch, padded=padded), inputs)
    reference = with_gradients(lambda q, k, v: explicit(q, k, v, batch), inputs)
    assert len(mine) == 4
    for a, b in zip(mine, reference, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 1e-5


def test_a_caller_may_shift_positions(model: ESM2) -> None:
    """Rotary attention sees differences only; the padded kernel must not take `position_T` for a column."""
    _, batch = tokenise(sequences())
    shifted = dataclasses.replace(batch, position_T=batch.position_T + 500)
    q, k, v, _ = heads(batch.bounds[-1])
    assert torch.equal(attend(q, k, v, shifted, padded=True), attend(q, k, v, batch, padded=True))
    with torch.no_grad():
        a, b = (model(x).representations[3] for x in (batch, shifted))
    assert (a - b).abs().max() <= 1e-4  # angles of 500 radians carry rounding of 3e-5


def test_packed_equals_one_by_one(model: ESM2) -> None:
    _, batch = tokenise(sequences())
    with torch.no_grad():
        together = model(batch, layers=range(4), logits_at=torch.arange(batch.bounds[-1]))
        for n, sequence in enumerate(sequences()):
            _, single = tokenise([sequence])
            alone = model(single, layers=range(4), logits_at=torch.arange(single.bounds[-1]))
            part = slice(batch.bounds[n], batch.bounds[n + 1])
            for layer in range(4):
                assert (together.representations[layer][part] - alone.representations[layer]).abs().max() <= 1e-5
            assert (together.logits_PV[part] - alone.logits_PV).abs().max() <= 1e-5


@pytest.mark.parametrize("padded", [False, True])
def test_neighbours_of_a_changed_sequence_stay_as_they_are_in_attend(padded: bool) -> None:
    batch = pack([encode(s) for s in sequences()])
    q, k, v, _ = heads(batch.bounds[-1])
    before = attend(q, k, v, batch, padded=padded)
    changed = slice(batch.bounds[1], batch.bounds[2])
    for x in (q, k, v):
        x[changed] *= -1.5
    after = attend(q, k, v, batch, padded=padded)
    same_T = (before == after).flatten(1).all(1)
    assert not same_T[changed].any()
    same_T[changed] = True
    assert same_T.all()


def test_neighbours_of_a_changed_sequence_stay_as_they_are_in_the_model(model: ESM2) -> None:
    texts = sequences()
    texts_changed = [*texts[:3], "<mask>" + texts[3][:0:-1], texts[4]]
    with torch.no_grad():
        before, after = (model(tokenise(t)[1]).representations[3] for t in (texts, texts_changed))
    _, batch = tokenise(texts)
    changed = slice(batch.bounds[3], batch.bounds[4])
    same_T = (before == after).all(1)
    assert not same_T[changed].any()
    same_T[changed] = True
    assert same_T.all()


def stacked(maps_CLL: torch.Tensor, weight_C: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """fair-esm's head on all maps at once."""
    return torch.einsum("cij,c->ij", apc(symmetrize(maps_CLL)), weight_C) + bias


def test_streamed_contacts_equal_stacked_ones_in_numpy(model: ESM2) -> None:
    _, batch = tokenise(sequences())
    maps: list[list[np.ndarray]] = [[] for _ in range(len(batch))]
    with torch.no_grad():
        model(batch, on_attention=lambda layer, n, p_HLL: maps[n].append(p_HLL.double().numpy()))
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
        model(batch, on_attention=lambda layer, n, p_HLL: rows.__setitem__((layer, n), p_HLL.sum(-1)))
    assert rows.keys() == {(layer, n) for layer in range(3) for n in range(len(LENGTHS))}
    for (_, n), sums_HL in rows.items():
        assert sums_HL.shape == (N_HEADS, LENGTHS[n])
        assert (sums_HL < 1).all(), "a part of each row went to <cls> and <eos>"


def test_the_accumulator_has_the_gradients_of_the_stacked_head() -> None:
    generator = torch.Generator().manual_seed(3)

    def inputs() -> list[torch.Tensor]:
        generator.manual_seed(3)
        shapes = ((12, 20, 20), (12,), (1,))
        return [torch.randn(s, generator=generator).double().requires_grad_() for s in shapes]

    out_LL = torch.randn(20, 20, generator=generator)
    maps, weight, bias = inputs()
    # The accumulator computes in fp32 what it is given in fp32; maps are probabilities.
    accumulator = ContactAccumulator(weight, bias, n_heads=4)
    p_CLL = maps.softmax(-1).float()
    for layer in range(3):
        accumulator.add(layer, p_CLL[4 * layer : 4 * layer + 4])
    logits_LL = accumulator.logits()
    (logits_LL * out_LL).sum().backward()

    maps_, weight_, bias_ = inputs()
    reference_LL = stacked(maps_.softmax(-1), weight_, bias_)
    (reference_LL * out_LL).sum().backward()
    assert (logits_LL - reference_LL).abs().max() <= 1e-5
    for mine, theirs in ((maps.grad, maps_.grad), (weight.grad, weight_.grad), (bias.grad, bias_.grad)):
        assert theirs.abs().max() > 1e-2
        assert (mine - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())


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
    model(batch, on_attention=lambda layer, n, p_HLL: maps[n].append(p_HLL))
    regression = model.contact_head.regression
    reference = gradients([stacked(torch.cat(m), regression.weight[0], regression.bias).sigmoid() for m in maps])
    assert streamed.keys() == reference.keys()
    assert {"embed_tokens.weight", "layers.0.fc1.weight", "contact_head.regression.weight"} <= streamed.keys()
    for name, gradient in reference.items():
        assert (streamed[name] - gradient).abs().max() <= 1e-5 * max(1, float(gradient.abs().max())), name
    assert sum(float(g.abs().max()) > 1e-3 for g in reference.values()) > 10
    model.zero_grad()


@pytest.mark.gpu
def test_varlen_attention_in_bf16_is_near_the_definition() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("varlen attention needs compute capability 8.0")
    batch = pack([encode(s) for s in sequences()]).to(torch.device("cuda"))
    rounded = [x.to("cuda", torch.bfloat16) for x in heads(batch.bounds[-1])]
    reference = with_gradients(lambda q, k, v: explicit(q, k, v, batch), [x.float() for x in rounded])
    mine = with_gradients(lambda q, k, v: attend(q, k, v, batch), rounded)
    assert len(mine) == 4
    for a, b in zip(mine, reference, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0) > 0.9995
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


@pytest.mark.gpu
def test_the_padded_kernel_on_a_gpu_equals_the_cpu() -> None:
    batch = pack([encode(s) for s in sequences()])
    inputs = heads(batch.bounds[-1])
    on_cpu = with_gradients(lambda q, k, v: attend(q, k, v, batch), inputs)
    moved = batch.to(torch.device("cuda"))
    on_gpu = with_gradients(lambda q, k, v: attend(q, k, v, moved), [x.cuda() for x in inputs])
    assert len(on_gpu) == 4
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert (a.cpu() - b).abs().max() <= 1e-4
