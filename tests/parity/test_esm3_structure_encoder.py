"""Structure tokens equal the tokens of the authors' encoder, and its file is read or refused.

`esm3_encoder_golden.py` made `tests/golden/esm3_structure_encoder.safetensors` with the authors' code.
"""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from esm3_encoder_golden import LENGTHS, proteins
from esm3_golden import weights as golden_weights
from model_files import write_fresh
from safetensors import safe_open
from safetensors.torch import load_file
from structure_texts import chain, cif, pdb
from typer.testing import CliRunner

from esmshard.cli import app
from esmshard.data.structures.chains import read_chains
from esmshard.errors import InputError, UsageError
from esmshard.model.families import esm3
from esmshard.model.families.esm3 import structure_tokens
from esmshard.model.families.family_registry import SIZES
from esmshard.predict.track_codes import write_codes

GOLDEN = Path(__file__).parents[1] / "golden" / "esm3_structure_encoder.safetensors"


def authors_state() -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN, framework="pt") as file:
        drawn = golden_weights(json.loads(file.metadata()["shapes"]))
        return drawn | {"codebook.embeddings": file.get_tensor("codes")}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    torch.save(authors_state(), tmp_path / "encoder.pth")
    return tmp_path / "encoder.pth"


def test_tokens_are_those_of_the_authors(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(esm3, "RESIDUES_AT_ONCE", 7)
    golden, encoder = load_file(GOLDEN), esm3.read_encoder(published)
    codes = encoder.codes_CZ
    for name, coordinates in proteins().items():
        described = golden[f"{name}.described"]
        nearest = torch.cdist(described, codes).topk(2, largest=False).values
        assert (nearest[:, 1] - nearest[:, 0]).min() > 1e-4, "no code is chosen by rounding"
        with torch.no_grad():
            assert (encoder.described(torch.from_numpy(coordinates)) - described).abs().max() < 1e-6
        tokens = structure_tokens(published, coordinates)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == golden[f"{name}.tokens"].tolist()
        assert len(tokens) == LENGTHS[name]
    assert len(set(golden["long.tokens"].tolist())) > 20


def test_other_files_are_refused_with_the_fix(tmp_path: Path) -> None:
    def without(name: str) -> dict[str, torch.Tensor]:
        return {key: tensor for key, tensor in authors_state().items() if key != name}

    path = tmp_path / "encoder.pth"
    for state, token in (
        ({"decoder.weight": torch.ones(2)}, r"positions.*; give esm3_structure_encoder_v0\.pth"),
        (without("transformer.blocks.1.geom_attn.proj.bias"), r"blocks\.1.*; give"),
        (without("transformer.blocks.0.ffn.1.weight"), r"blocks\.0.*; give"),
        (authors_state() | {"strange.weight": torch.ones(2)}, r"strange\.weight.*; give"),
    ):
        torch.save(state, path)
        with pytest.raises(InputError, match=token):
            structure_tokens(path, np.zeros((2, 3, 3), dtype=np.float32))


SEQUENCES = {"1abc": "MKTAYIAKQRQISFVKSHFSRQ", "2abc": "GSHMKVLAWEFT"}


@pytest.fixture
def structures(tmp_path: Path) -> Path:
    folder = tmp_path / "structures"
    folder.mkdir()
    for name, sequence in SEQUENCES.items():
        (folder / f"{name}.pdb").write_text(pdb(chain(sequence, missing=[3] if name == "1abc" else [])))
    return folder


def test_structure_files_become_a_track_that_embed_reads(published: Path, structures: Path, tmp_path: Path) -> None:
    def command(*arguments: str | Path) -> str:
        done = CliRunner().invoke(app.app, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.stdout

    out = tmp_path / "tokens.npz"
    assert "33 residues" in command("track", "structure_tokens", structures, "--weights", published, "-o", out)
    with np.load(out) as codes:
        codes_by_id = {name: codes[name].tolist() for name in codes}
    assert {name: len(codes) for name, codes in codes_by_id.items()} == {"1abc_A": 21, "2abc_A": 12}
    fasta = ""
    for name, codes in codes_by_id.items():
        (protein,) = read_chains(structures / f"{name[:4]}.pdb")
        assert codes == structure_tokens(published, protein.backbone_L33).tolist()
        fasta += f">{name}\n{protein.sequence}\n"
    (tmp_path / "chains.fasta").write_text(fasta)
    model = write_fresh(tmp_path / "esm3", SIZES["esm3_nano"])
    vectors = {}
    for word, options in (("alone", []), ("tokens", ["--track", f"structure_tokens={out}"])):
        command("embed", model, tmp_path / "chains.fasta", "-o", tmp_path / f"{word}.h5", *options)
        with h5py.File(tmp_path / f"{word}.h5") as arrays:
            vectors[word] = {name: arrays[name][:] for name in codes_by_id}
    assert all(np.abs(vectors["tokens"][name] - vectors["alone"][name]).max() > 1e-3 for name in codes_by_id)


def test_what_cannot_be_made_a_track_is_one_sentence(published: Path, structures: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens.npz"
    with pytest.raises(UsageError, match="colours"):
        write_codes("colours", structures, published, out)
    with pytest.raises(UsageError, match=r"tokens.csv: .*\.npz"):
        write_codes("structure_tokens", structures, published, tmp_path / "tokens.csv")
    (structures / "1abc.cif").write_text(cif(chain("GSHMKVLAWEFT")))
    with pytest.raises(InputError, match="1abc_A"):
        write_codes("structure_tokens", structures, published, out)
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"):
        write_codes("structure_tokens", structures, published, out)
    assert out.read_bytes() == b"mine"
