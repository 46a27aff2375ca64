"""BERT with ProtBert's vocabulary gives the numbers, gradients and files of `BertForMaskedLM` of `transformers`.

Every parameter differs from its initial value.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_files import edit_config, edit_tensors, randomise, same_gradients, tokenise
from outputs import everything
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForMaskedLM, BertModel
from transformers import BertConfig as HfConfig

from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.attention import attention_map
from esmshard.model.families.bert import FAMILY, VOCABULARY, BertConfig
from esmshard.model.families.family_registry import SIZES, transformers_config
from esmshard.model.trunk import ABSENT, Trunk
from esmshard.vocab import RESIDUES, TOKENS, Chains, encode

CONFIG = BertConfig(n_layers=3, dim=64, n_heads=4, max_positions=100)
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "M", "MXBUZO<mask>KT", "ACDEFGHIKLMNPQRSTVWY" * 3]
LETTERS = "LAGVESIKRDTPNQFYMHCWXUBZO"  # vocab.txt of Rostlab/prot_bert, after five special tokens
KNOWN = [n for n, token in enumerate(TOKENS) if token not in (".", "-", "<null_1>")]
THEIRS = [{"<cls>": 2, "<pad>": 0, "<eos>": 3, "<unk>": 1, "<mask>": 4}.get(TOKENS[n]) for n in KNOWN]
THEIRS = [5 + LETTERS.index(TOKENS[n]) if row is None else row for n, row in zip(KNOWN, THEIRS, strict=True)]
TOLERANCE = 1e-5


class Saved(NamedTuple):
    theirs: BertForMaskedLM
    directory: Path
    batch: TokenBatch
    ids: torch.Tensor
    mask: torch.Tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model and a padded block as the authors' code makes it: spaces between residues, and X for rare letters."""
    torch.manual_seed(0)
    theirs = BertForMaskedLM(HfConfig(**FAMILY.write_config(CONFIG), attn_implementation="eager")).eval()
    randomise(theirs, 1.0)
    directory = tmp_path_factory.mktemp("bert") / "model"
    theirs.save_pretrained(directory)
    spaced = [" ".join(text.replace("<mask>", "?")).translate(str.maketrans("BUZO", "XXXX")) for text in SEQUENCES]
    FAMILY.write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    block = tokenizer([text.replace("?", "[MASK]") for text in spaced], return_tensors="pt", padding=True)
    return Saved(theirs, directory, tokenise(SEQUENCES)[1], block["input_ids"], block["attention_mask"])


@pytest.fixture(scope="module")
def model(saved: Saved) -> Trunk:
    found = weights.read(str(saved.directory))
    assert (found.config, found.absent) == (CONFIG, ("contact_head",))
    return weights.build(found, torch.device("cpu")).eval()


def test_every_layer_attention_and_the_logits_are_those_of_transformers(saved: Saved, model: Trunk) -> None:
    assert [*"".join(VOCABULARY[5:])] == [*LETTERS]
    rows_T = model.rows(saved.batch)  # type: ignore[operator]
    assert torch.equal(rows_T, saved.ids[saved.mask == 1])
    with torch.no_grad():
        out = saved.theirs(saved.ids, attention_mask=saved.mask, output_hidden_states=True, output_attentions=True)
    *layers, logits = everything(model, saved.batch)
    for mine, other in zip(layers, out.hidden_states, strict=True):
        assert (mine - other[saved.mask == 1]).abs().max() < TOLERANCE
    assert (logits[:, KNOWN] - out.logits[saved.mask == 1][:, THEIRS]).abs().max() < TOLERANCE
    assert (logits[:, [n for n in range(33) if n not in KNOWN]] == ABSENT).all()
    maps = {}
    with torch.no_grad():
        model(saved.batch, on_attention=lambda layer, n, q, k: maps.update({(layer, n): attention_map(q, k)}))
    for layer, attention in enumerate(out.attentions):
        assert (maps[layer, 0] - attention[0, :, :24, :24]).abs().max() < 1e-6


def test_gradients_are_those_of_transformers(saved: Saved) -> None:
    mine = weights.build(weights.read(str(saved.directory)), torch.device("cpu")).train()
    logits = mine(saved.batch, logits_at=torch.arange(saved.batch.bounds[-1])).logits_PV
    F.cross_entropy(logits[:, KNOWN], torch.tensor([KNOWN.index(t) for t in saved.batch.tokens_T.tolist()])).backward()
    other = saved.theirs(saved.ids, attention_mask=saved.mask).logits[saved.mask == 1]
    targets = torch.tensor([THEIRS[KNOWN.index(t)] for t in saved.batch.tokens_T.tolist()])
    F.cross_entropy(other, targets).backward()
    # The gradient of a bias of keys is only rounding, because the bias adds the same number to all scores of a query.
    compared = same_gradients(mine, saved.theirs, FAMILY, least=1e-2)
    saved.theirs.zero_grad()
    assert compared == 16 * CONFIG.n_layers + 3 + 2 + 2 + 2 + 1


def test_what_is_written_is_read_by_transformers(saved: Saved, tmp_path: Path) -> None:
    out = consolidate(saved.directory, tmp_path / "out")
    read, info = BertForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = saved.theirs.state_dict()
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in read.state_dict().items())
    assert json.loads((out / "config.json").read_text()).items() >= FAMILY.write_config(CONFIG).items()
    ids = AutoTokenizer.from_pretrained(out)(" ".join(RESIDUES) + " [MASK]")["input_ids"]
    assert ids == [2, *(5 + LETTERS.index(letter) for letter in RESIDUES), 4, 3]


def test_older_files_and_files_without_an_lm_head(saved: Saved, model: Trunk, tmp_path: Path) -> None:
    whole = BertModel(saved.theirs.config)  # with a pooler
    whole.load_state_dict(saved.theirs.bert.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    assert "pooler.dense.weight" in load_file(tmp_path / "model.safetensors")

    def older(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if key.endswith("LayerNorm.weight")]:
            state[key.replace("weight", "gamma")] = state.pop(key)
            state[key.replace("weight", "beta")] = state.pop(key.replace("weight", "bias"))
        state["embeddings.position_ids"] = torch.arange(100)[None]

    edit_tensors(tmp_path, older)
    found = weights.read(str(tmp_path))
    assert found.absent == ("lm_head", "contact_head")
    mine = everything(weights.build(found, torch.device("cpu")).eval(), saved.batch)
    assert all(torch.equal(a, b) for a, b in zip(mine[:-1], everything(model, saved.batch)[:-1], strict=True))


def test_igbert_reads_sep_between_two_chains(model: Trunk) -> None:
    assert SIZES["igbert"].chains == Chains("break")
    batch = pack([encode("MK:T", linker=1)])
    assert [VOCABULARY[row] for row in model.rows(batch)] == ["[CLS]", "M", "K", "[SEP]", "T", "[SEP]"]  # type: ignore[operator]


def test_other_models_and_long_sequences_are_refused(saved: Saved, model: Trunk, tmp_path: Path) -> None:
    raw = json.loads((saved.directory / "config.json").read_text())
    for key, value in {"hidden_act": "relu", "layer_norm_eps": 1e-5, "vocab_size": 70, "intermediate_size": 8}.items():
        with pytest.raises(ValueError, match=f"{key} is {value!r}"):
            transformers_config(raw | {key: value})
    consolidate(saved.directory, tmp_path / "out")
    edit_config(tmp_path / "out", vocab_size=30522)
    with pytest.raises(InputError, match="vocab_size is 30522, not 30"):
        weights.read(str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"record 1: 99 residues.* 98"):
        model(pack([encode("M"), encode("A" * 99)]))
