"""What a forward pass computes and what it leaves alone: LM logits, token dropout, embeddings."""

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise
from torch import nn

from esmshard.model.families.esm2 import ESM2

TEXTS = ["MKTAYIAKQR", "<mask><mask>T<mask>YI<mask><mask><mask>R", "MKTAY<mask>AKQRQISFVKSHFSRQ", "W"]


@pytest.fixture(scope="module")
def model() -> ESM2:
    return ours(fair_esm(SMALL["ESM-2"]), SMALL["ESM-2"])


def test_the_lm_head_sees_the_asked_rows_only(model: ESM2) -> None:
    _, batch = tokenise(TEXTS)
    everything = torch.arange(batch.bounds[-1])
    places_P = torch.tensor([40, 3, 11, 3])
    seen: list[tuple[str, torch.Size]] = []
    hooks = [
        module.register_forward_hook(lambda _, args, out, name=name: seen.append((name, args[0].shape, out.shape)))
        for name, module in (("head", model.lm_head), ("dense", model.lm_head.dense))
    ]
    try:
        with torch.no_grad():
            model(batch)
            assert not seen
            logits_PV = model(batch, logits_at=places_P).logits_PV
            assert seen == [("dense", (4, 64), (4, 64)), ("head", (4, 64), (4, 33))]
            full_TV = model(batch, logits_at=everything).logits_PV
            assert model(batch, logits_at=everything[:0]).logits_PV.shape == (0, 33)
    finally:
        for hook in hooks:
            hook.remove()
    assert (logits_PV - full_TV[places_P]).abs().max() <= 1e-6
    assert torch.equal(logits_PV[1], logits_PV[3])


def test_layers_come_as_asked_whatever_the_order(model: ESM2) -> None:
    _, batch = tokenise(TEXTS)
    with torch.no_grad():
        every = model(batch, layers=range(4)).representations
        some = model(batch, layers=(3, 0, 2)).representations
        last, none = model(batch), model(batch, layers=())
    assert set(some) == {0, 2, 3}
    assert all(torch.equal(x_TD, every[layer]) for layer, x_TD in (*some.items(), *last.representations.items()))
    assert set(last.representations) == {3}
    assert (none.representations, none.logits_PV, last.logits_PV) == ({}, None, None)
    for layers in ((4,), (-1,), (0, 3, 99)):
        with pytest.raises(ValueError, match="this model has 0 to 3"):
            model(batch, layers=layers)


def test_a_row_of_mask_that_is_not_zero_is_not_seen(model: ESM2) -> None:
    """Fine-tuning moves it, through the LM head that shares the table."""
    _, batch = tokenise(TEXTS)
    with torch.no_grad():
        before = model(batch).representations[3]
        kept = model.embed_tokens.weight[32].clone()
        try:
            model.embed_tokens.weight[32] = 5.0
            assert torch.equal(model(batch).representations[3], before)
        finally:
            model.embed_tokens.weight[32] = kept


@pytest.mark.parametrize("family", SMALL)
def test_embeddings_of_the_three_families(family: str) -> None:
    """0.88 of the table, plus positions counted from row 2 on, then the LayerNorm of ESM-1b."""
    model = ours(fair_esm(SMALL[family]), SMALL[family])
    _, batch = tokenise(["MKT", "AYIAK"])
    with torch.no_grad():
        expected_TD = model.embed_tokens(batch.tokens_T) * 0.88
        if not model.config.rotary:
            rows_T = torch.tensor([2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 7, 8])
            expected_TD = expected_TD + model.embed_positions.weight[rows_T]
        if model.config.emb_layer_norm_before:
            norm = model.emb_layer_norm_before
            expected_TD = nn.functional.layer_norm(expected_TD, (64,), norm.weight, norm.bias, 1e-5)
        assert torch.equal(model(batch, layers=(0,)).representations[0], expected_TD)
