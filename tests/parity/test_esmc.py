"""ESM-C gives the numbers and gradients of `transformers`, and `transformers` reads the written files.

Every parameter differs from its initial value, because norms of 1 and biases of 0 would hide swapped names.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_files import randomise, same_gradients, tokenise
from outputs import everything
from tokenizers import Tokenizer
from transformers import AutoTokenizer, EsmcConfig, EsmcForMaskedLM

from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint.consolidate import consolidate
from esmshard.model import weights
from esmshard.model.families.esmc import FAMILY
from esmshard.model.trunk import Trunk
from esmshard.vocab import RESIDUES, Chains, encode

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "M", "MXBUZO<mask>KT", "ACDEFGHIKLMNPQRSTVWY" * 3]
TOLERANCE = 1e-5


class Saved(NamedTuple):
    theirs: EsmcForMaskedLM
    directory: Path
    block: torch.Tensor
    batch: TokenBatch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.manual_seed(0)
    settings = EsmcConfig(hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6)
    theirs = EsmcForMaskedLM(settings).eval()
    randomise(theirs, 0.3)
    directory = tmp_path_factory.mktemp("esmc") / "model"
    theirs.save_pretrained(directory)
    return Saved(theirs, directory, *tokenise(SEQUENCES))


@pytest.fixture(scope="module")
def model(saved: Saved) -> Trunk:
    found = weights.read(str(saved.directory))
    assert found.absent == ("contact_head",), "no published ESM-C has one"
    return weights.build(found, torch.device("cpu")).eval()


def test_every_layer_and_the_logits_are_those_of_transformers(saved: Saved, model: Trunk) -> None:
    *layers, logits = everything(model, saved.batch)
    kept = saved.block != 1
    with torch.no_grad():
        theirs = saved.theirs(saved.block, attention_mask=kept.long(), output_hidden_states=True)
    for mine, other in zip(layers, theirs.hidden_states, strict=True):
        assert other.abs().max() > 0.1
        assert (mine - other[kept]).abs().max() < TOLERANCE
    assert logits.shape == (saved.batch.bounds[-1], 64)
    assert (logits - theirs.logits[kept]).abs().max() < TOLERANCE


def test_gradients_are_those_of_transformers(saved: Saved) -> None:
    mine = weights.build(weights.read(str(saved.directory)), torch.device("cpu")).train()
    kept = saved.block != 1
    logits = mine(saved.batch, logits_at=torch.arange(saved.batch.bounds[-1])).logits_PV
    F.cross_entropy(logits, saved.batch.tokens_T).backward()
    # Double precision, because the rounding of small gradients differs between processors.
    exact = copy.deepcopy(saved.theirs).double()
    F.cross_entropy(exact(saved.block, attention_mask=kept.long()).logits[kept], saved.block[kept]).backward()
    assert same_gradients(mine, exact, FAMILY) == sum(1 for _ in exact.parameters())


def test_transformers_reads_what_consolidate_writes(saved: Saved, tmp_path: Path) -> None:
    out = consolidate(saved.directory, tmp_path / "written", max_file_bytes=200_000)
    again, info = EsmcForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in saved.theirs.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    expected = [0, *encode(RESIDUES)[1:-1].tolist(), 32, 31, 2]
    assert AutoTokenizer.from_pretrained(out)(RESIDUES + "<mask>|")["input_ids"] == expected
    # The class has its own vocabulary; other programs use the vocabulary of the file.
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(RESIDUES + "<mask>|").ids == expected


def test_a_chain_break_is_their_token_between_chains(saved: Saved) -> None:
    read = weights.read(str(saved.directory))
    config = replace(read.config, chains=Chains("break"))
    ours = weights.build(replace(read, config=config), torch.device("cpu")).eval()
    batch = pack([encode("MKTAYIAKQR:QISFVKSH", linker=1)])
    assert 31 in batch.tokens_T
    with torch.no_grad():
        found = ours(batch, logits_at=torch.arange(len(batch.tokens_T))).logits_PV
        assert found is not None
        expected = saved.theirs(batch.tokens_T[None], attention_mask=torch.ones(1, len(batch.tokens_T))).logits[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
