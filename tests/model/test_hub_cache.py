"""Released models in the local caches: what counts as one, and which of several is taken."""

from pathlib import Path

import pytest
import torch
from hub_server import NAME, own_caches, snapshot
from model_files import TINY, fair_esm, write_fair_esm

from esmshard.model import hub
from esmshard.model.weights import load_model

FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
CONFIG, VOCAB, INDEX = b"{}", b"L\nA\n", b"{}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_caches(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ({"config.json": CONFIG, "vocab.txt": VOCAB, "tokenizer_config.json": CONFIG}, False),
        ({"model.safetensors": b""}, False),
        ({"config.json": CONFIG, "tf_model.h5": b""}, False),
        ({"config.json": CONFIG, "model.safetensors": b""}, True),
        ({"config.json": CONFIG, "pytorch_model.bin": b""}, True),
        ({"config.json": CONFIG, "pytorch_model.bin.index.json": INDEX, FIRST: b""}, False),
        ({"config.json": CONFIG, "model.safetensors.index.json": INDEX, FIRST: b""}, False),
        ({"config.json": CONFIG, "model.safetensors.index.json": INDEX, FIRST: b"", SECOND: b""}, True),
    ],
)
def test_only_a_whole_snapshot_is_a_model(cache: Path, files: dict[str, bytes], whole: bool) -> None:
    directory = snapshot(cache, files)
    assert hub.find(NAME) == (directory if whole else None)


def test_a_file_of_fair_esm_in_torch_hubs_cache_goes_first(cache: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    snapshot(cache, {"config.json": CONFIG, "model.safetensors": b""})
    path = write_fair_esm(checkpoints / f"{NAME}.pt", fair_esm(TINY))
    assert hub.find(NAME) == hub.fetch(NAME) == path
    assert load_model(str(path), torch.device("cpu")).config == TINY
    assert hub.find("esm2_t12_35M_UR50D") is None
