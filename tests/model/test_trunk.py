"""A forward pass computes the requested layers and logits only."""

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise

from esmshard.model.families.esm2 import ESM2

TEXTS = ["MKTAYIAKQR", "<mask><mask>T<mask>YI<mask><mask><mask>R", "MKTAY<mask>AKQRQISFVKSHFSRQ", "W"]


@pytest.fixture(scope="module")
def model() -> ESM2:
    return ours(fair_esm(SMALL["ESM-2"]), SMALL["ESM-2"])


def test_the_lm_head_sees_the_asked_rows_only(model: ESM2) -> None:
    _, batch = tokenise(TEXTS)
    everything = torch.arange(batch.bounds[-1])
    places_P = torch.tensor([40, 3, 11, 3])
    rows: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda _, args, out: rows.append(len(args[0])))
    with hook, torch.no_grad():
        model(batch)
        logits_PV = model(batch, logits_at=places_P).logits_PV
        full_TV = model(batch, logits_at=everything).logits_PV
        assert model(batch, logits_at=everything[:0]).logits_PV.shape == (0, 33)
    assert rows == [4, len(everything), 0]
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
        with pytest.raises(ValueError, match="this model has layers 0 to 3"):
            model(batch, layers=layers)
