"""Directories of `transformers` in every layout give the numbers of `transformers`.

The model's `inv_freq` differs from computed frequencies, so a reader that loses it gives other numbers.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from model_files import perturb, tokenise
from safetensors.torch import load_file, save_file
from transformers import EsmConfig as HfConfig
from transformers import EsmForMaskedLM, EsmModel

import esmshard
from esmshard.batch import TokenBatch
from esmshard.model import weights
from esmshard.model.attention import inverse_frequencies
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import ESM2, FAMILY, EsmConfig
from esmshard.model.weights import load_model

CONFIG = EsmConfig(n_layers=3, dim=64, n_heads=4)
TOLERANCE = 1e-5
INV_FREQ = (inverse_frequencies(CONFIG.head_dim) * 0.9).half().float()
LITERAL = "esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq"
SEQUENCES = ["M", "MKTAYIAKQRQISFVKSHFSRQ", "XBUZO<mask>LLGG<mask>AVW" * 7, "ACDEFGHIKLMNPQRSTVWY" * 2]

State = dict[str, torch.Tensor]


class Saved(NamedTuple):
    model: EsmForMaskedLM
    directory: Path
    state: State
    block: torch.Tensor
    batch: TokenBatch
    hidden: tuple[torch.Tensor, ...]
    logits: torch.Tensor
    contacts: torch.Tensor
    attentions: tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.manual_seed(0)
    settings = HfConfig(**FAMILY.write_config(CONFIG), initializer_range=0.15, attn_implementation="eager")
    model = EsmForMaskedLM(settings).eval()
    perturb(model)
    with torch.no_grad():
        model.esm.rotary_embeddings.inv_freq.copy_(INV_FREQ)
        model.esm.contact_head.regression.weight *= 30
        block, batch = tokenise(SEQUENCES)
        mask = (block != 1).long()
        out = model(block, attention_mask=mask, output_hidden_states=True, output_attentions=True)
        contacts = model.predict_contacts(block, mask)
    directory = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(directory)
    state = load_file(directory / "model.safetensors")
    return Saved(model, directory, state, block, batch, out.hidden_states, out.logits, contacts, out.attentions)


def differences(saved: Saved, model: ESM2) -> dict[str, float]:
    """Largest absolute differences from `transformers`, over all sequences and layers."""
    batch = saved.batch
    with torch.no_grad():
        out = model(batch, layers=range(CONFIG.n_layers + 1), logits_at=torch.arange(batch.bounds[-1]))
        contacts = predict_contacts(model, batch)
    kept = saved.block != 1
    layers = [(x_TD - x[kept]).abs().max() for x_TD, x in zip(out.representations.values(), saved.hidden, strict=True)]
    pairs = zip(contacts, saved.contacts, batch.lengths, strict=True)
    return {
        "hidden": float(max(layers)),
        "logits": float((out.logits_PV - saved.logits[kept]).abs().max()),
        "contacts": float(max((mine - theirs[:n, :n]).abs().max() for mine, theirs, n in pairs)),
    }


def rewrite(saved: Saved, directory: Path, state: State) -> str:
    directory.mkdir()
    (directory / "config.json").write_bytes((saved.directory / "config.json").read_bytes())
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def without_inv_freq(state: State) -> State:
    return {key: tensor for key, tensor in state.items() if not key.endswith("inv_freq")}


def per_layer(state: State) -> State:
    """The file of transformers 4: a table in each layer, norms with `weight`, and tensors that no model needs."""
    renamed = {re.sub("gamma$", "weight", re.sub("beta$", "bias", key)): tensor for key, tensor in state.items()}
    return without_inv_freq(renamed) | {
        **{LITERAL.replace("*", str(n)): INV_FREQ.clone() for n in range(CONFIG.n_layers)},
        "esm.embeddings.position_ids": torch.arange(1026)[None],
        "esm.embeddings.position_embeddings.weight": torch.randn(1026, CONFIG.dim),
        "lm_head.decoder.weight": state["esm.embeddings.word_embeddings.weight"].clone(),
    }


LAYOUTS: dict[str, tuple[Callable[[State], State], set[str]]] = {
    "as transformers 5.23 writes it": (dict, {LITERAL, "esm.encoder.layer.0.attention.LayerNorm.gamma"}),
    "one table at model level": (
        lambda state: without_inv_freq(state) | {"esm.rotary_embeddings.inv_freq": INV_FREQ.clone()},
        {"esm.rotary_embeddings.inv_freq", "esm.encoder.layer.2.LayerNorm.beta"},
    ),
    "a table in each layer": (
        per_layer,
        {LITERAL.replace("*", "2"), "esm.encoder.layer.0.attention.LayerNorm.weight", "lm_head.decoder.weight"},
    ),
}


def test_every_layout_gives_the_numbers_of_transformers(saved: Saved, tmp_path: Path) -> None:
    for layout, (make, keys) in LAYOUTS.items():
        state = make(saved.state)
        assert keys <= state.keys()
        path = rewrite(saved, tmp_path / layout, state)
        assert weights.read(path).absent == ()
        model = load_model(path)
        for layer in model.layers:
            assert torch.equal(layer.self_attn.rot_emb.inv_freq, INV_FREQ)
        assert max(differences(saved, model).values()) <= TOLERANCE, layout
    assert saved.contacts[2, :98, :98].std() > 0.005


def test_without_its_table_the_model_is_another_one(saved: Saved, tmp_path: Path) -> None:
    """The control of the test above: such a file is read with computed frequencies."""
    model = load_model(rewrite(saved, tmp_path / "model", without_inv_freq(saved.state)))
    assert torch.equal(model.layers[0].self_attn.rot_emb.inv_freq, inverse_frequencies(CONFIG.head_dim))
    assert all(difference > 1e-3 for difference in differences(saved, model).values())
    tables = {LITERAL.replace("*", str(n)): INV_FREQ + n for n in range(CONFIG.n_layers)}
    model = load_model(rewrite(saved, tmp_path / "tables", per_layer(saved.state) | tables))
    assert [float(layer.self_attn.rot_emb.inv_freq[0] - INV_FREQ[0]) for layer in model.layers] == [0, 1, 2]


def test_attention_maps_equal_those_of_transformers(saved: Saved) -> None:
    """`attentions_n` is `attentions[n - 1]` of `transformers`, without the rows and columns of `<cls>` and `<eos>`."""
    found = esmshard.load(saved.directory).embed(SEQUENCES[1:2], "attentions", layers=[1, 2, 3])
    for maps, theirs in zip(found.values(), saved.attentions, strict=True):
        assert maps[0].shape == (CONFIG.n_heads, 22, 22)
        assert abs(maps[0] - theirs[1, :, 1:23, 1:23].numpy()).max() <= TOLERANCE
    assert (saved.attentions[0][1] - saved.attentions[1][1]).abs().max() > 1e-2


def test_pickles_and_several_files_with_an_index_are_read(saved: Saved, tmp_path: Path) -> None:
    path = rewrite(saved, tmp_path / "model", saved.state)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(per_layer(saved.state), tmp_path / "model" / "pytorch_model.bin")
    assert max(differences(saved, load_model(path)).values()) <= TOLERANCE
    shards = tmp_path / "shards"
    saved.model.save_pretrained(shards, max_shard_size="200KB")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    assert not (shards / "model.safetensors").exists()
    assert max(differences(saved, load_model(str(shards))).values()) <= TOLERANCE


def test_a_bare_model_has_no_lm_head_and_says_so(saved: Saved, tmp_path: Path) -> None:
    bare = EsmModel(saved.model.config, add_pooling_layer=True)
    bare.load_state_dict(saved.model.esm.state_dict(), strict=False)
    bare.save_pretrained(tmp_path)
    assert "pooler.dense.weight" in load_file(tmp_path / "model.safetensors")
    assert weights.read(str(tmp_path)).absent == ("lm_head",)
    found = differences(saved, load_model(str(tmp_path)))
    assert max(found["hidden"], found["contacts"]) <= TOLERANCE
    assert found["logits"] > 1e-2, "its LM head is a new one"
