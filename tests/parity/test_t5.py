"""T5 encoders give the numbers and gradients of `transformers`, and every kernel gives the same numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from model_files import perturb, same_gradients, tokenise
from outputs import perturbed
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import T5Config as TheirConfig
from transformers import T5EncoderModel, T5ForConditionalGeneration

import esmshard
from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint.consolidate import consolidate
from esmshard.embed.spec import choose
from esmshard.errors import InputError, UsageError
from esmshard.model import attention, weights
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.family_registry import SIZES, recorded_config
from esmshard.model.families.t5 import FAMILY
from esmshard.model.trunk import Trunk
from esmshard.recipe import recipe_file
from esmshard.tasks.finetuned import tracks_of
from esmshard.vocab import Chains, encode

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "M", "MXBUZOKT", "ACDEFGHIKLMNPQRSTVWY" * 20]
SIZES_OF_ALL = {"d_model": 24, "d_kv": 16, "d_ff": 40, "num_layers": 3, "num_heads": 2}
KINDS = {
    "ProtT5": {"vocab_size": 128, "feed_forward_proj": "relu"},
    "Ankh": {"vocab_size": 144, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 64},
    "ProstT5": {"vocab_size": 150, "feed_forward_proj": "relu"},
    "Ankh 3": {"vocab_size": 256, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 64},
}
LETTERS = ["<pad>", "</s>", "<unk>", *"ALGVSREDTIPKFQNYMHWCXBOUZ"]
"""The pieces of ProtT5's and Ankh's vocabularies, by row."""
FOLD = {"<fold2AA>": 128, "<AA2fold>": 149} | {letter: 129 + n for n, letter in enumerate("acdefghiklmnpqrstvwy")}
PIECES = ["<pad>", "</s>", "<unk>", "[NLU]", "▁", "[S2S]", *(f"▁{letter}" for letter in "CLAGSVERTIDPKNFQYHMWXOZUB")]


class Given(NamedTuple):
    kind: str
    theirs: T5ForConditionalGeneration
    directory: Path
    batch: TokenBatch

    def rows(self, text: str) -> list[int]:
        """The authors' tokens: U, Z, O and B are X except in Ankh, and ProstT5 and Ankh 3 have a token before them."""
        letters = text if self.kind.startswith("Ankh") else "".join("X" if c in "UZOB" else c for c in text)
        before = {"ProstT5": [FOLD["<AA2fold>"]], "Ankh 3": [PIECES.index("[NLU]")]}.get(self.kind, [])
        if self.kind == "Ankh 3":
            return [*before, *(PIECES.index(f"▁{letter}") for letter in letters), 1]
        return [*before, *(LETTERS.index(letter) for letter in letters), 1]


@pytest.fixture(scope="module", params=KINDS)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Given:
    """A model with its decoder, as ProstT5 is published."""
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = TheirConfig(**SIZES_OF_ALL, **KINDS[request.param], dropout_rate=0.0, decoder_start_token_id=0)
    theirs = T5ForConditionalGeneration(config).eval()
    perturb(theirs, deviation=0.1)
    theirs.save_pretrained(directory)
    if request.param == "ProstT5":
        (directory / "added_tokens.json").write_text(json.dumps(FOLD))
    if request.param == "Ankh 3":
        added = [{"id": PIECES.index("[NLU]"), "content": "[NLU]"}]
        tokenizer = {"added_tokens": added, "model": {"type": "Unigram", "vocab": [[piece, 0.0] for piece in PIECES]}}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Given(request.param, theirs, directory, tokenise(SEQUENCES)[1])


def model_of(given: Given) -> Trunk:
    return weights.build(weights.read(str(given.directory)), torch.device("cpu"))


def test_every_layer_and_all_gradients_are_those_of_transformers(given: Given) -> None:
    model, encoder = model_of(given), given.theirs.get_encoder()
    given.theirs.zero_grad()
    mine = model(given.batch, layers=range(4)).representations
    first = 0 if given.kind in ("ProstT5", "Ankh 3") else 1
    generator = torch.Generator().manual_seed(2)
    for n, text in enumerate(SEQUENCES):
        theirs = encoder(torch.tensor([given.rows(text)]), output_hidden_states=True).hidden_states
        part = slice(given.batch.bounds[n] + first, given.batch.bounds[n + 1])
        for layer, (other,) in enumerate(theirs):
            scale = max(1.0, float(other.detach().abs().max()))
            assert other.std() > 0.1
            assert (mine[layer][part] - other).abs().max() < 1e-5 * scale, layer
        weight = torch.randn(theirs[3][0].shape, generator=generator)
        (theirs[3][0] * weight).sum().backward()
        (mine[3][part] * weight).sum().backward(retain_graph=True)
    assert same_gradients(model, given.theirs, FAMILY) == len(list(model.parameters()))


def test_what_is_written_is_read_by_transformers(given: Given, tmp_path: Path) -> None:
    found = T5EncoderModel.from_pretrained(consolidate(given.directory, tmp_path / "out")).eval()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.items() >= (KINDS[given.kind] | SIZES_OF_ALL).items()
    tokens = torch.tensor([given.rows(SEQUENCES[0])])
    with torch.no_grad():
        assert torch.equal(found(tokens)[0], given.theirs.get_encoder()(tokens)[0])
        first, second = (model_of(each)(given.batch) for each in (given, given._replace(directory=tmp_path / "out")))
        assert torch.equal(first.representations[3], second.representations[3])


@pytest.mark.parametrize("given", ["ProstT5"], indirect=True)
def test_prost_t5_reads_structure_letters(given: Given) -> None:
    """In place of the amino acids, unless no letter of the protein is known. `#` is read as X."""
    model, sequences = esmshard.load(str(given.directory), device="cpu"), ["MKTAYI", "MKT", "WYV"]
    found = model.embed(sequences, tracks={"3di": ["dvP#ac", None, "###"]}, pool="residue")
    with torch.no_grad():
        letters = [
            FOLD["<fold2AA>"],
            *(FOLD[letter] for letter in "dvp"),
            LETTERS.index("X"),
            FOLD["a"],
            FOLD["c"],
            1,
        ]
        for mine, rows in zip(found, (letters, *map(given.rows, sequences[1:])), strict=True):
            (theirs,) = given.theirs.get_encoder()(torch.tensor([rows]))[0]
            assert (torch.from_numpy(mine) - theirs[1:-1]).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max()))
    config = weights.read(str(given.directory)).config
    assert config.completed(SIZES["prost_t5"]).token_rows == config.token_rows  # opened by its name
    assert recorded_config(config.recorded()).token_rows == config.token_rows  # and from a checkpoint
    assert config.token_rows.items() >= FOLD.items()
    changes = [f"model.name={given.directory}", "init=pretrained", "data.tracks.3di=letters.fasta"]
    with pytest.raises(UsageError, match="in place of the amino acids"):
        tracks_of(recipe_file.load(Path("recipes/variants.yaml"), changes))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("size", ["t5_nano", "prost_nano"])
def test_every_kernel_has_the_same_numbers_and_gradients(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gap between chains. On a CPU, `flex_attention` is not compiled and has no backward pass."""
    config = replace(SIZES["t5_nano"], chains=Chains(3, 40), **({"rows": 150} if size == "prost_nano" else {}))
    model, results = perturbed(config), {}
    batch = pack([encode(text, 3) for text in (*SEQUENCES, "MKTAYIAK:QISFV:KK")])
    monkeypatch.setattr(attention, "_compiled_flex", lambda: (flex_attention, create_block_mask))
    weight = torch.randn(batch.bounds[-1], config.dim, generator=torch.Generator().manual_seed(0))
    weight[list(batch.bounds[:-1])] = 0  # `<cls>` has no meaning
    for kernel in ("slices", "padded", "varlen"):
        monkeypatch.setattr(attention, "kernel_name", lambda *_, kernel=kernel: kernel)
        model.zero_grad()
        x_TD = model.requires_grad_(kernel != "varlen")(batch).representations[config.n_layers]
        results[kernel] = [x_TD.detach() * (weight != 0)]
        if kernel != "varlen":
            (x_TD * weight).sum().backward()
            results[kernel] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert [len(found) for found in results.values()] == [1 + len(list(model.parameters()))] * 2 + [1]
    for kernel in ("padded", "varlen"):
        for mine, other in zip(results["slices"], results[kernel], strict=False):
            assert other.any()
            assert (mine - other).abs().max() < 1e-5 * max(1.0, float(mine.abs().max())), kernel


def test_what_these_models_lack_is_one_sentence() -> None:
    model, batch = perturbed(SIZES["t5_nano"]), pack([encode("MKT")])
    for call in (
        lambda: model(batch, logits_at=torch.arange(3)),
        lambda: model(batch, on_attention=print),
        lambda: predict_contacts(model, batch),
        lambda: choose(["cls"], None, model.config, "x"),
        lambda: choose(["attentions"], None, model.config, "x"),
    ):
        with pytest.raises(UsageError):
            call()
    assert choose(["cls"], None, replace(model.config, rows=150), "x")


def test_other_models_of_this_type_are_refused(given: Given, tmp_path: Path) -> None:
    raw = json.loads((given.directory / "config.json").read_text())
    wrong = {"vocab_size": 32128, "feed_forward_proj": "gated-relu", "layer_norm_epsilon": 1e-5, "d_kv": None}
    for key, value in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(InputError, match=str(value)):
            weights.read(str(tmp_path))
    if given.kind in ("ProstT5", "Ankh 3"):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(InputError, match=r"added_tokens\.json"):
            weights.read(str(tmp_path))
