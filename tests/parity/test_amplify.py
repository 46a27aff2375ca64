"""AMPLIFY gives the numbers and gradients of the authors' code, which `amplify_reference.py` saved."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_files import tokenise
from outputs import everything
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.adapters import adapter_config, write_adapter
from esmshard.model.attention import attention_map
from esmshard.model.families.amplify import FAMILY, ROWS, VOCABULARY
from esmshard.model.lora import add_lora, merged
from esmshard.model.trunk import ABSENT, Trunk
from esmshard.vocab import RESIDUES, TOKENS, encode

GOLDEN = Path(__file__).parents[1] / "golden" / "amplify.safetensors"
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "M", "MXBUZO<mask>KT", "ACDEFGHIKLMNPQRSTVWY" * 3]
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
SETTINGS = {"model_type": "AMPLIFY", **SIZES}
TOLERANCE = 1e-5
KNOWN = [n for n, row in enumerate(ROWS) if row is not None]
THEIRS = [row for row in ROWS if row is not None]


class Saved(NamedTuple):
    golden: dict[str, torch.Tensor]
    directory: Path
    batch: TokenBatch

    def part(self, name: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(f"{name}."): t for key, t in self.golden.items() if key.startswith(f"{name}.")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The authors' weights as a directory as on the hub."""
    saved = Saved(load_file(GOLDEN), tmp_path_factory.mktemp("amplify"), tokenise(SEQUENCES)[1])
    save_file(saved.part("weights"), saved.directory / "model.safetensors", {"format": "pt"})
    (saved.directory / "config.json").write_text(json.dumps(SETTINGS))
    return saved


@pytest.fixture(scope="module")
def model(saved: Saved) -> Trunk:
    found = weights.read(str(saved.directory))
    assert found.absent == ("contact_head",), "no published AMPLIFY has one"
    return weights.build(found, torch.device("cpu")).eval()


def test_the_tokens_are_those_of_the_authors(saved: Saved) -> None:
    block = saved.golden["tokens"]
    mine = [VOCABULARY.index("<unk>") if ROWS[t] is None else ROWS[t] for t in saved.batch.tokens_T.tolist()]
    assert mine == block[block != 0].tolist()
    assert {TOKENS[n] for n, row in enumerate(ROWS) if row is None} == {*"XUZO.-"}
    assert sorted(THEIRS) == list(range(27))


def test_every_layer_attention_and_the_logits_are_those_of_the_authors(saved: Saved, model: Trunk) -> None:
    *layers, logits = everything(model, saved.batch)
    theirs = [saved.golden[f"layers.{n}"] for n in range(3)] + [saved.golden["normed"]]
    for mine, other in zip(layers, theirs, strict=True):
        assert other.abs().max() > 0.1
        assert (mine - other).abs().max() < TOLERANCE
    assert (logits[:, KNOWN] - saved.golden["logits"][:, THEIRS]).abs().max() < TOLERANCE
    maps = {}
    with torch.no_grad():
        model(saved.batch, on_attention=lambda layer, n, q, k: maps.update({(layer, n): attention_map(q, k)}))
    assert (maps[0, 0] - saved.golden["attention.0"]).abs().max() < 1e-6
    for n, (start, end) in enumerate(zip(saved.batch.bounds, saved.batch.bounds[1:], strict=False)):
        alone = saved.golden[f"alone.{n}"]
        assert (logits[start:end, KNOWN] - alone[:, THEIRS]).abs().max() < TOLERANCE


def test_gradients_are_those_of_the_authors(saved: Saved) -> None:
    mine = weights.build(weights.read(str(saved.directory)), torch.device("cpu")).train()
    logits = mine(saved.batch, logits_at=torch.arange(saved.batch.bounds[-1])).logits_PV
    # A letter that AMPLIFY lacks is `<unk>` in the targets of its authors, too.
    target_T = torch.tensor([t if ROWS[t] is not None else TOKENS.index("<unk>") for t in range(33)])[
        saved.batch.tokens_T
    ]
    F.cross_entropy(logits, target_T).backward()
    theirs = saved.part("gradients")
    compared = set()
    gradients = {name: parameter.grad for name, parameter in mine.named_parameters()}
    for key, other in theirs.items():
        for name, rows in FAMILY.pieces(key, mine.config):
            grad = gradients[name]
            assert grad is not None
            assert (grad - other[rows]).abs().max() < TOLERANCE * other.abs().max(), name
            compared.add(name)
    assert compared == {name for name in gradients if not name.startswith("contact_head.")}


def test_a_token_that_is_absent_has_no_probability_and_the_embedding_of_unk(model: Trunk) -> None:
    *layers, logits = everything(model, pack([encode("MXK")]))
    assert torch.equal(layers[0][2], model.embed_tokens.weight[VOCABULARY.index("<unk>")])
    others = [n for n in range(33) if n not in KNOWN]
    assert (logits[:, others] == ABSENT).all()
    assert (logits.half().log_softmax(-1).exp()[:, others] == 0).all()


def test_what_is_written_has_the_tensors_of_the_authors(saved: Saved, tmp_path: Path) -> None:
    """Gate and up are joined, in one file and in several files."""
    weights = saved.part("weights")
    for n, most in enumerate((10**9, 20_000)):
        out = consolidate(saved.directory, tmp_path / str(n), max_file_bytes=most)
        files = sorted(out.glob("*.safetensors"))
        assert len(files) == 1 if n == 0 else len(files) > 1
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        raw = json.loads((out / "config.json").read_text())
        assert raw.items() >= SETTINGS.items()
        assert raw["auto_map"]["AutoModel"] == "chandar-lab/AMPLIFY_350M--amplify.AMPLIFY"
        tokens = AutoTokenizer.from_pretrained(out)(RESIDUES + "<mask>|")["input_ids"]
        unknown = VOCABULARY.index("<unk>")
        letters = [unknown if ROWS[t] is None else ROWS[t] for t in encode(RESIDUES)[1:-1].tolist()]
        assert tokens == [3, *letters, 2, 5, 4]


def test_another_architecture_of_the_authors_is_refused(saved: Saved, tmp_path: Path) -> None:
    """The authors' code has options that no released model uses."""
    wrong = {"rms_norm": False, "hidden_act": "gelu", "layer_norm_after_embedding": True, "vocab_size": 33}
    for key, value in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {key: value}))
        with pytest.raises(InputError, match=f"{key} is {value!r}"):
            weights.read(str(tmp_path))


def test_an_adapter_of_joined_matrices_is_the_merged_model(saved: Saved, tmp_path: Path) -> None:
    base = weights.read(str(saved.directory))
    targets, generator = ("q", "fc1", "fc2"), torch.Generator().manual_seed(1)
    model = weights.build(base, torch.device("cpu"))
    added = add_lora(model.layers, base.config.matrices, 2, 8.0, targets)
    state = model.state_dict()
    trained = {name: state[name].normal_(0, 0.2, generator=generator) for name in added}
    settings = adapter_config(str(saved.directory), base.config, 2, 8.0, targets, "none")
    write_adapter(tmp_path, settings, base.config, targets, trained)
    found = weights.read(str(tmp_path))
    for name in weights.stored_shapes(found.config):
        assert (found[name] - merged(name, state, 4.0)).abs().max() < 1e-6, name
    for name in ("layers.0.gate.weight", "layers.1.up.weight", "layers.2.self_attn.q_proj.weight"):
        assert (found[name] - base[name]).abs().max() > 1e-2
    joined = [f"transformer_encoder.{n}.ffn.w12" for n in range(3)]
    assert settings["rank_pattern"] == dict.fromkeys(joined, 4)
    assert settings["alpha_pattern"] == dict.fromkeys(joined, 16.0)
