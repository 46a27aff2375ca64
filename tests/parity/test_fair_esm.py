"""Our ESM-2 and fair-esm's with the same random weights give the same numbers, packed or padded."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from model_files import fair_esm, ours, tokenise

from esmshard.batch import TokenBatch
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.trunk import TrunkOutput
from esmshard.vocab import MASK, STANDARD

CONFIG = SIZES["esm2_t6_8M_UR50D"]
LAYERS = range(CONFIG.n_layers + 1)
LENGTHS = (1, 2, 17, 120, 300)
TOLERANCE = 1e-5


def sequences() -> list[str]:
    """Of all LENGTHS; from 17 on with every rare residue, a gap, and 2, 4 or 6 masks."""
    rng = np.random.default_rng(0)
    found = []
    for n, length in enumerate(LENGTHS):
        letters = list(rng.choice(list(STANDARD), length))
        if length >= 17:
            special = [*"XBUZO-.", *["<mask>"] * 2 * (n - 1)]
            for at, letter in zip(rng.choice(length, len(special), replace=False), special, strict=True):
                letters[at] = letter
        found.append("".join(letters))
    return found


class Both(NamedTuple):
    model: ESM2
    batch: TokenBatch
    output: TrunkOutput
    contacts: list[torch.Tensor]
    reference: dict[str, list[dict]]
    """What fair-esm says of each sequence, `one by one` and in a `padded batch`, pads cut off."""


@pytest.fixture(scope="module")
def both() -> Both:
    reference = fair_esm(CONFIG)
    model = ours(reference, CONFIG)
    block, batch = tokenise(sequences())
    with torch.no_grad():
        everything = torch.arange(batch.bounds[-1])
        output = model(batch, layers=LAYERS, logits_at=everything)
        contacts = predict_contacts(model, batch)

        def ask(tokens: torch.Tensor) -> list[dict]:
            found = reference(tokens, repr_layers=list(LAYERS), return_contacts=True)
            rows = []
            for n, row in enumerate(tokens):
                length = int((row != 1).sum())
                rows.append({layer: x[n, :length] for layer, x in found["representations"].items()})
                rows[-1] |= {"logits": found["logits"][n, :length]}
                rows[-1] |= {"contacts": found["contacts"][n, : length - 2, : length - 2]}
            return rows

        one_by_one = [ask(row[row != 1][None])[0] for row in block]
        return Both(model, batch, output, contacts, {"one by one": one_by_one, "padded batch": ask(block)})


def sequences_of(batch: TokenBatch, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x_TD.split([n + 2 for n in batch.lengths])


@pytest.mark.parametrize("how", ["one by one", "padded batch"])
def test_every_layer_and_the_logits_equal_fair_esm(both: Both, how: str) -> None:
    assert both.batch.lengths == list(LENGTHS)
    assert both.output.logits_PV is not None
    for key in (*LAYERS, "logits"):
        mine = both.output.logits_PV if key == "logits" else both.output.representations[key]
        for x_TD, row in zip(sequences_of(both.batch, mine), both.reference[how], strict=True):
            assert x_TD.shape == row[key].shape
            assert (x_TD - row[key]).abs().max() <= TOLERANCE, key


@pytest.mark.parametrize("how", ["one by one", "padded batch"])
def test_contacts_equal_fair_esm(both: Both, how: str) -> None:
    for length, mine_LL, row in zip(LENGTHS, both.contacts, both.reference[how], strict=True):
        assert mine_LL.shape == row["contacts"].shape == (length, length)
        assert mine_LL.dtype == torch.float32
        assert (mine_LL - row["contacts"]).abs().max() <= 1e-6
    assert both.contacts[-1].std() > 0.005, "contacts that are all alike would compare nothing"


def test_without_masks_embeddings_are_scaled_by_exactly_088(both: Both) -> None:
    _, batch = tokenise(["MKTAYIAK", "X", "LLGGAVX"])
    with torch.no_grad():
        x_TD = both.model(batch, layers=(0,)).representations[0]
        assert torch.equal(x_TD, both.model.embed_tokens(batch.tokens_T) * 0.88)


def test_masks_are_counted_per_sequence(both: Both) -> None:
    masks = (0, 1, 3, 6)
    _, batch = tokenise(["<mask>" * k + "MKTAYIAKQR"[k:] for k in masks])
    with torch.no_grad():
        x_TD = both.model(batch, layers=(0,)).representations[0]
        embedded_TD = both.model.embed_tokens(batch.tokens_T)
    masked_T = batch.tokens_T == MASK
    assert masked_T.sum() == sum(masks)
    assert x_TD[masked_T].count_nonzero() == 0
    for k, x, raw, masked in zip(masks, *(sequences_of(batch, v) for v in (x_TD, embedded_TD, masked_T)), strict=True):
        expected = raw[~masked] * (0.88 / (1 - k / 12))  # 10 residues and the two ends
        torch.testing.assert_close(x[~masked], expected, rtol=1e-6, atol=1e-7)


def test_token_dropout_can_be_off_and_changes_the_logits(both: Both) -> None:
    config = CONFIG.__class__(n_layers=6, dim=320, n_heads=20, token_dropout=False)
    reference = fair_esm(config)
    model = ours(reference, config)
    block, batch = tokenise(sequences()[2:3])
    with torch.no_grad():
        everything = torch.arange(batch.bounds[-1])
        off = model(batch, layers=(0,), logits_at=everything)
        on = both.model(batch, logits_at=everything)
        assert torch.equal(off.representations[0], model.embed_tokens(batch.tokens_T)), "the row of <mask> included"
        assert (off.logits_PV - reference(block)["logits"][0]).abs().max() <= TOLERANCE
    assert torch.equal(model.embed_tokens.weight, both.model.embed_tokens.weight), "nothing else differs"
    assert (off.logits_PV - on.logits_PV).abs().max() > 1


def test_layers_come_as_asked_whatever_the_order(both: Both) -> None:
    with torch.no_grad():
        some = both.model(both.batch, layers=(6, 0, 3)).representations
        last = both.model(both.batch)
        none = both.model(both.batch, layers=())
    assert set(some) == {0, 3, 6}
    for layer, x_TD in some.items():
        assert torch.equal(x_TD, both.output.representations[layer])
    assert set(last.representations) == {6}
    assert torch.equal(last.representations[6], both.output.representations[6])
    assert (none.representations, none.logits_PV, last.logits_PV) == ({}, None, None)


def test_logits_come_for_the_asked_places_in_their_order(both: Both) -> None:
    assert both.output.logits_PV is not None
    at = torch.randperm(both.batch.bounds[-1], generator=torch.Generator().manual_seed(0))[:50]
    with torch.no_grad():
        logits_PV = both.model(both.batch, logits_at=at).logits_PV
    torch.testing.assert_close(logits_PV, both.output.logits_PV[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [(7,), (-1,), (0, 6, 99)])
def test_a_layer_that_is_not_there_is_refused(both: Both, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="this model has 0 to 6"):
        both.model(both.batch, layers=layers)
