"""SaProt gives the numbers, gradients and files of the authors' class `EsmForMaskedLM` with their 446 tokens.

Every parameter differs from its initial value.
"""

from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_files import randomise, same_gradients
from outputs import everything
from transformers import AutoTokenizer, EsmConfig, EsmForMaskedLM, EsmTokenizer

from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint.consolidate import consolidate
from esmshard.model import weights
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.family_registry import transformers_config
from esmshard.model.families.saprot import FAMILY, SaprotConfig
from esmshard.model.trunk import ABSENT, Trunk
from esmshard.vocab import CLS, EOS, MASK, STANDARD, TOKENS, UNK

# The authors' `utils/esm_loader.py` and `utils/constants.py`, commit e91e485.
AMINO_ACIDS, STRUCTURES = "ACDEFGHIKLMNPQRSTVWY#", "pynwrqhgdlvtmfsaeikc#"
VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *map("".join, product(AMINO_ACIDS, STRUCTURES))]
PAIRS = {
    "a chain": ("MKTAYIAKQRQISFVKSHFSRQ", "#vpqlydavvvnnrwdd##sae"),
    "one residue": ("M", "#"),
    "rare letters and masks": ("MXBUZO?KT?W", "dvpl#qd#vyc"),
    "every structure letter": (STANDARD + "A", STRUCTURES),
    "no structure": ("ACDEFGHIKLMNPQRSTVWY" * 3, "#" * 60),
}
"""Residues, of which `?` is a mask, and structure letters."""
TOLERANCE = 1e-5


def text(residues: str, structure: str) -> str:
    """The authors' text: the amino acid is `#` for masks and for letters that they lack."""
    return "".join((aa if aa in STANDARD else "#") + letter for aa, letter in zip(residues, structure, strict=True))


def packed(*pairs: tuple[str, str]) -> TokenBatch:
    tokens = [[CLS, *(MASK if aa == "?" else TOKENS.index(aa) for aa in residues), EOS] for residues, _ in pairs]
    tracks = [[20, *map(STRUCTURES.index, structure), 20] for _, structure in pairs]
    return pack(
        [np.array(row, np.uint8) for row in tokens], tracks=[{"3di": np.array(row, np.uint8)} for row in tracks]
    )


def summed(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities [P, 21] of amino acids and of `#`, as the authors sum them in `predict_mut`."""
    return logits.double().softmax(1)[:, 5:].reshape(-1, 21, 21).sum(2)


class Saved(NamedTuple):
    theirs: EsmForMaskedLM
    tokenizer: EsmTokenizer
    directory: Path
    block: torch.Tensor
    mask: torch.Tensor
    batch: TokenBatch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.manual_seed(0)
    tokens = {"vocab_size": 446, "mask_token_id": 4, "pad_token_id": 1, "token_dropout": True}
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 384}
    places = {"max_position_embeddings": 1026, "position_embedding_type": "rotary", "emb_layer_norm_before": False}
    settings = EsmConfig(**tokens, **sizes, **places, layer_norm_eps=1e-5, attn_implementation="eager")
    theirs = EsmForMaskedLM(settings).eval()
    randomise(theirs, 1.0)
    directory = tmp_path_factory.mktemp("saprot") / "model"
    theirs.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    tokenizer = EsmTokenizer(str(directory / "vocab.txt"))
    tokenizer.save_pretrained(directory)
    block = tokenizer([text(*pair) for pair in PAIRS.values()], padding=True, return_tensors="pt")
    return Saved(theirs, tokenizer, directory, block["input_ids"], block["attention_mask"], packed(*PAIRS.values()))


@pytest.fixture(scope="module")
def model(saved: Saved) -> Trunk:
    found = weights.read(str(saved.directory))
    assert (found.config.family, found.absent) == ("saprot", ())
    return weights.build(found, torch.device("cpu")).eval()


def test_every_layer_and_the_summed_probabilities_are_those_of_transformers(saved: Saved, model: Trunk) -> None:
    *layers, logits = everything(model, saved.batch)
    kept = saved.mask.bool()
    with torch.no_grad():
        theirs = saved.theirs(saved.block, attention_mask=saved.mask, output_hidden_states=True)
    for mine, other in zip(layers, theirs.hidden_states, strict=True):
        assert other.abs().max() > 0.1
        assert (mine - other[kept]).abs().max() < TOLERANCE
    other = theirs.logits[kept]
    assert other.abs().max() > 3
    columns = [TOKENS.index(letter) for letter in STANDARD + "X"]
    found = logits.double().softmax(1)
    assert (found[:, columns] - summed(other)).abs().max() < TOLERANCE
    assert (logits[:, columns] - other[:, 5:].reshape(-1, 21, 21).logsumexp(2)).abs().max() < TOLERANCE
    special = [TOKENS.index(token) for token in VOCABULARY[:5]]
    assert (logits[:, special] - other[:, :5]).abs().max() < TOLERANCE
    rest = [n for n in range(33) if n not in columns + special]
    assert sorted(TOKENS[n] for n in rest) == ["-", ".", "<null_1>", "B", "O", "U", "Z"]
    assert (logits[:, rest] == ABSENT).all()


def test_contacts_are_those_of_transformers(saved: Saved, model: Trunk) -> None:
    contacts = predict_contacts(model, saved.batch)
    with torch.no_grad():
        theirs = saved.theirs.predict_contacts(saved.block, saved.mask)
    for mine, other, n in zip(contacts, theirs, saved.batch.lengths, strict=True):
        assert (mine - other[:n, :n]).abs().max() < TOLERANCE
    assert contacts[0].std() > 0.005


def test_gradients_are_those_of_transformers(saved: Saved) -> None:
    """Of the sum of the probabilities of the pairs of an amino acid."""
    mine = weights.build(weights.read(str(saved.directory)), torch.device("cpu")).train()
    logits = mine(saved.batch, logits_at=torch.arange(saved.batch.bounds[-1])).logits_PV
    columns = [TOKENS.index(letter) for letter in STANDARD + "X"]
    target_P = torch.arange(len(logits)) % 21
    F.cross_entropy(logits, torch.tensor(columns)[target_P]).backward()
    saved.theirs.zero_grad()
    other = saved.theirs(saved.block, attention_mask=saved.mask).logits[saved.mask.bool()]
    chosen = other.softmax(1)[:, 5:].reshape(-1, 21, 21).sum(2)[torch.arange(len(logits)), target_P]
    (-chosen.log().mean()).backward()
    assert same_gradients(mine, saved.theirs, FAMILY) == sum(1 for _ in saved.theirs.parameters()) - 2


def test_files_are_written_as_they_were_read_with_the_authors_tokens(
    saved: Saved, model: Trunk, tmp_path: Path
) -> None:
    out = consolidate(saved.directory, tmp_path / "written", max_file_bytes=200_000)
    assert (out / "vocab.txt").read_text() == "\n".join(VOCABULARY)
    written = AutoTokenizer.from_pretrained(out)
    assert isinstance(written, EsmTokenizer)
    assert written("M#EvVp")["input_ids"] == [0, 5 + 21 * 10 + 20, 5 + 21 * 3 + 10, 5 + 21 * 17, 2]
    assert written("M#<mask>Vp")["input_ids"][2] == written.mask_token_id == 4
    for n, pair in enumerate(PAIRS.values()):
        ids = written(text(*pair))["input_ids"]
        assert ids == saved.block[n][saved.mask[n].bool()].tolist()
        assert ids == model.rows(packed(pair)).tolist()  # type: ignore[operator]
    again, info = EsmForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in saved.theirs.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    for key in ("vocab_size", "mask_token_id", "pad_token_id", "token_dropout", "position_embedding_type"):
        assert getattr(again.config, key) == getattr(saved.theirs.config, key)
    special = pack([np.array([CLS, UNK, TOKENS.index("-"), EOS], dtype=np.uint8)])
    assert model.rows(special).tolist() == [0, 3, 3, 2]  # type: ignore[operator]


def test_token_dropout_is_as_the_configuration_says(saved: Saved) -> None:
    raw = saved.theirs.config.to_dict()
    for token_dropout in (True, False):
        config = transformers_config(raw | {"token_dropout": token_dropout})
        assert config == SaprotConfig(n_layers=3, dim=96, n_heads=6, token_dropout=token_dropout)
    with pytest.raises(ValueError, match="mask_token_id is 32, not 4"):
        transformers_config(raw | {"mask_token_id": 32})
