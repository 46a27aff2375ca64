"""Models whose weights are finite, and whose outputs are not."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from esmshard.errors import InputError
from esmshard.io.paths import shipped
from esmshard.predict.heads import predict
from esmshard.predict.zero_shot import score_sequences, score_table


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The starter with a last LayerNorm that overflows."""
    directory = Path(shutil.copytree(shipped("data") / "starter" / "model", tmp_path / "model"))
    weights = load_file(directory / "model.safetensors")
    name = "esm.encoder.emb_layer_norm_after.weight"
    weights[name] = torch.full(weights[name].shape, 3e38)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (tmp_path / "x.fasta").write_text(">a\nMKTAYIAKQR\n>b\nMKV\n")
    (tmp_path / "wt.fasta").write_text(">a\nMKTAYIAKQR\n")
    return directory


def test_outputs_that_are_no_numbers_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finite numbers"):
        predict(str(model), tmp_path / "x.fasta", tmp_path / "x.npz", device="cpu")
    assert len((tmp_path / "x.npz.failed.tsv").read_text().splitlines()) == 3
    with pytest.raises(InputError, match="2 of 2 scores"):
        score_sequences(str(model), tmp_path / "x.fasta", tmp_path / "x.csv", device="cpu")
    with pytest.raises(InputError, match="190 of 190 scores"):
        score_table(str(model), tmp_path / "wt.fasta", None, tmp_path / "y.csv", device="cpu")
    assert not any((tmp_path / name).exists() for name in ("x.npz", "x.csv", "y.csv"))
