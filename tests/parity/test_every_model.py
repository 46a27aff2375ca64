"""ESM-2, ESM-1b and ESM-1v against fair-esm and `transformers`: one pack of all lengths, values and gradients."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from esm.model.esm2 import ESM2 as FairEsm
from model_files import RELEASED_PREFIXES, SMALL, fair_esm, ours, tokenise, write_fair_esm, write_transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import EsmForMaskedLM

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.trunk import TrunkOutput
from esmshard.model.weights import load_model
from esmshard.vocab import MASK, PAD, STANDARD

LENGTHS = {"ESM-2": (30, 1, 1030, 2, 271, 3), "ESM-1b": (30, 1, 1022, 2, 271, 3), "ESM-1v": (271, 1, 30)}
TOLERANCE = 1e-5


def sequences(lengths: tuple[int, ...], seed: int = 0) -> list[str]:
    """Random sequences. From 30 residues on, they have all rare letters and a mask for each 10 residues."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        letters = list(rng.choice(list(STANDARD), length))
        special = [*"XBUZO-.", *["<mask>"] * (length // 10)] if length >= 30 else ["<mask>"] * (length == 3)
        for at, letter in zip(rng.choice(length, len(special), replace=False), special, strict=True):
            letters[at] = letter
        found.append("".join(letters))
    return found


class Given(NamedTuple):
    config: EsmConfig
    reference: FairEsm
    model: ESM2
    texts: list[str]
    batch: TokenBatch
    output: TrunkOutput
    contacts: list[torch.Tensor]
    theirs: EsmForMaskedLM


@pytest.fixture(scope="module", params=SMALL)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Given:
    config, texts = SMALL[request.param], sequences(LENGTHS[request.param])
    reference = fair_esm(config)
    model = ours(reference, config)
    _, batch = tokenise(texts)
    with torch.no_grad():
        output = model(batch, layers=range(config.n_layers + 1), logits_at=torch.arange(batch.bounds[-1]))
        contacts = predict_contacts(model, batch)
    directory = write_transformers(tmp_path_factory.mktemp("given") / "model", reference, config)
    theirs, info = EsmForMaskedLM.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return Given(config, reference, model, texts, batch, output, contacts, theirs.eval())


def agree(given: Given, n: int, layers: list[torch.Tensor], logits: torch.Tensor, contacts: torch.Tensor) -> float:
    """Compare one sequence of the pack; the largest difference of contacts."""
    part = slice(given.batch.bounds[n], given.batch.bounds[n + 1])
    length = given.batch.lengths[n]
    assert len(layers) == given.config.n_layers + 1
    for layer, x_TD in enumerate(layers):
        assert x_TD.shape == (length + 2, given.config.dim)
        assert (given.output.representations[layer][part] - x_TD).abs().max() <= TOLERANCE, layer
    assert (given.output.logits_PV[part] - logits).abs().max() <= TOLERANCE
    assert contacts.shape == given.contacts[n].shape == (length, length)
    return float((given.contacts[n] - contacts).abs().max())


def test_a_pack_of_all_lengths_equals_fair_esm_and_transformers(given: Given) -> None:
    layers = range(given.config.n_layers + 1)
    assert {*"XBUZO"} <= {*given.texts[0]}
    for n, text in enumerate(given.texts):
        block, _ = tokenise([text])
        with torch.no_grad():
            found = given.reference(block, repr_layers=list(layers), return_contacts=True)
            rows = [found["representations"][layer][0] for layer in layers]
            assert agree(given, n, rows, found["logits"][0], found["contacts"][0]) <= 1e-6
            hf = given.theirs(block, attention_mask=torch.ones_like(block), output_hidden_states=True)
            contacts = given.theirs.predict_contacts(block, torch.ones_like(block))[0]
        assert agree(given, n, [x[0] for x in hf.hidden_states], hf.logits[0], contacts) <= TOLERANCE
    assert max(c.std() for c in given.contacts if len(c) > 20) > 0.005, "contacts that are all alike compare nothing"


def test_files_of_fair_esm_give_the_same_model(given: Given, tmp_path: Path) -> None:
    for prefixes in (("", ""), RELEASED_PREFIXES):
        file = write_fair_esm(tmp_path / "model.pt", given.reference, prefixes)
        model = load_model(str(file), torch.device("cpu"))
        assert (model.config, model.training) == (given.config, False)
        assert model.lm_head.weight is model.embed_tokens.weight
        for name, tensor in given.reference.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    if not given.config.rotary:
        state = torch.load(file, weights_only=False)["model"]
        assert (state["encoder.sentence_encoder.embed_tokens.weight"][MASK] != 0).all(), "made zero on reading"


def test_token_dropout_can_be_off_and_changes_the_logits(given: Given) -> None:
    config = replace(given.config, token_dropout=False)
    reference = fair_esm(config)
    model = ours(reference, config)
    assert torch.equal(model.embed_tokens.weight, given.model.embed_tokens.weight), "nothing else differs"
    block, batch = tokenise(given.texts[:1])
    with torch.no_grad():
        off = model(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
        assert (off - reference(block)["logits"][0]).abs().max() <= TOLERANCE
    assert (off - given.output.logits_PV[: batch.bounds[-1]]).abs().max() > 0.01


def test_learned_positions_end_at_1022_residues() -> None:
    reference = fair_esm(SMALL["ESM-1b"])
    block, batch = tokenise(["MKTAYIAK", "A" * 1023])
    with pytest.raises(InputError, match=r"record 1: 1023 residues.* 1022"):
        ours(reference, SMALL["ESM-1b"])(batch)
    with pytest.raises(ValueError, match="Sequence length 1025"):
        reference(block)


HOW = [*((family, "plain") for family in SMALL), ("ESM-2", "checkpointed"), ("ESM-1b", "frozen embedding")]


@pytest.mark.parametrize(("family", "how"), HOW)
def test_gradients_of_every_parameter_equal_fair_esm(family: str, how: str) -> None:
    """Masked cross-entropy, packed here and padded in fair-esm, to 1e-5 of each tensor's largest gradient."""
    config = SMALL[family]
    reference = fair_esm(config)
    model = ours(reference, config)
    block, batch = tokenise(sequences((40, 1, 120, 3, 75), seed=3))
    places_P = (batch.tokens_T == MASK).nonzero()[:, 0]
    targets_P = torch.randint(4, 24, places_P.shape, generator=torch.Generator().manual_seed(1))
    assert len(places_P) == 4 + 12 + 1 + 7
    logits = reference(block)["logits"][block != PAD][places_P]
    F.cross_entropy(logits, targets_P).backward()

    if how == "checkpointed":
        for n, layer in enumerate(model.layers):
            model.layers[n] = checkpoint_wrapper(layer)
    if how == "frozen embedding":  # the first layer's input has no gradient, its queries and keys have
        model.embed_tokens.weight.requires_grad_(False)
    F.cross_entropy(model(batch, logits_at=places_P).logits_PV, targets_P).backward()
    mine = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    compared = 0
    for name, parameter in reference.named_parameters():
        if name.startswith("contact_head") or (how == "frozen embedding" and name == "embed_tokens.weight"):
            assert mine[name] is None
            continue
        largest = float(parameter.grad.abs().max())
        if name.endswith("k_proj.bias") and not config.rotary:
            # The bias adds the same number to all scores of a query, so its gradient is only rounding.
            assert largest < 1e-6
            largest = 1.0
        assert (mine[name] - parameter.grad).abs().max() <= TOLERANCE * largest, name
        compared += 1
    assert compared > 16 * config.n_layers
