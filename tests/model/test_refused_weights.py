"""Files that are not weights are refused, with one sentence that begins with their path. No code in a file is run."""

import argparse
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from model_files import TINY, edit_config, edit_pt, edit_tensors, fair_esm, write_fair_esm, write_transformers
from safetensors.torch import load

from esmshard.errors import InputError
from esmshard.model import hub, weights
from esmshard.model.families.esm2 import fair_esm_settings
from esmshard.model.families.family_registry import RELEASED
from esmshard.model.weights import load_model

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 3138\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


@pytest.fixture(scope="module")
def reference() -> FairEsm:
    return fair_esm(TINY)


@pytest.fixture
def directory(tmp_path: Path, reference: FairEsm) -> Path:
    return write_transformers(tmp_path / "model", reference, TINY)


@pytest.fixture
def file(tmp_path: Path, reference: FairEsm) -> Path:
    return write_fair_esm(tmp_path / "esm2_tiny.pt", reference)


def refusal(model: str | Path, named: Path | None = None) -> str:
    """The error of `load_model`. It begins with the path of the bad file, and does not advise to run the file's
    code."""
    with pytest.raises(InputError) as caught:
        load_model(str(model))
    message = str(caught.value)
    assert message.startswith(f"{named or model}: ")
    assert "\n" not in message
    assert "weights_only" not in message
    return message


def test_a_released_name_whose_file_is_of_another_model(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("esm2_t6_8M_UR50D", "esm1b_t33_650M_UR50S"):
        monkeypatch.setattr(hub, "fetch", lambda asked, name=name: {name: file}[asked])
        assert name in RELEASED
        with pytest.raises(InputError, match=f"{file}: .*{name}"):
            weights.read(name)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, **changes)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda directory: edit_tensors(directory, edit)


def last_of(key: str, value: float) -> Callable[[Path], None]:
    return tensors(lambda state: state[f"esm.{key}"].view(-1)[-1:].fill_(value))


def more(key: str, *shape: int) -> Callable[[Path], None]:
    return tensors(lambda state: state.update({key: torch.zeros(shape)}))


FC2 = "encoder.layer.1.output.dense"
FC1, REGRESSION = "encoder.layer.1.intermediate.dense.weight", "contact_head.regression.bias"
ALTERED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "an ESMFold": (config(is_folding_model=True), "config.json", "ESMFold"),
    "another vocabulary": (config(vocab_size=64), "config.json", "vocab_size is 64"),
    "a mask that is another token": (config(mask_token_id=4), "config.json", "mask_token_id is 4, not 32"),
    "layers as text": (config(num_hidden_layers="2"), "config.json", "n_layers must be"),
    "another epsilon": (config(layer_norm_eps=1e-12), "config.json", "layer_norm_eps"),
    "half a config": (lambda path: (path / "config.json").write_text("{"), "config.json", ""),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json", ""),
    "learned positions": (config(position_embedding_type="absolute"), "", "inv_freq"),
    "a LayerNorm before": (config(emb_layer_norm_before=True), "", "emb_layer_norm_before.bias"),
    "a missing key": (tensors(lambda state: state.pop(f"esm.{FC2}.weight")), "", "layers.1.fc2.weight are missing"),
    "a layer more": (more("esm.encoder.layer.2.output.dense.bias", 32), "", "layers.2.fc2.bias do not belong"),
    "a head of another model": (more("structure_head.weight", 32), "", "esm.structure_head.weight do not belong"),
    "`tie_word_embeddings: false`": (more("lm_head.decoder.weight", 33, TINY.dim), "", "lm_head.weight differs from"),
    "another shape": (more("lm_head.bias", 64), "", "lm_head.bias has shape [64] and must have [33]"),
    **{
        f"{value} in {name}": (last_of(key, value), "", f"{name} holds a value that is not finite")
        for value in (torch.nan, torch.inf)
        for key, name in ((FC1, "layers.1.fc1.weight"), (REGRESSION, REGRESSION))
    },
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "", "no model.safetensors"),
}


def test_a_directory_of_which_a_file_was_altered(tmp_path: Path, reference: FairEsm) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere.pt")
    for n, (edit, named, token) in enumerate(ALTERED.values()):
        directory = write_transformers(tmp_path / str(n), reference, TINY)
        edit(directory)
        assert token in refusal(directory, directory / named)
    head = {"out.weight": torch.tensor([1.0, torch.nan]), "out.bias": torch.zeros(2)}
    found = weights.read(str(write_transformers(tmp_path / "model", reference, TINY, head)))
    with pytest.raises(InputError, match=r"model: head\.out\.weight holds a value that is not finite"):
        found.head_state()


def test_an_index_that_is_not_true(directory: Path) -> None:
    """The index names no file, a missing file, or a file outside of the directory."""
    index = directory / "model.safetensors.index.json"
    index.write_text('{"metadata": {}}')
    refusal(directory, index)
    for name in ("model-2.safetensors", "../../model-2.safetensors"):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.bias": name}}))
        refusal(directory, directory / "model-2.safetensors")


def test_a_truncated_file_a_pointer_or_a_page_in_the_place_of_a_file(directory: Path, file: Path) -> None:
    tensors, regression = directory / "model.safetensors", file.with_name(f"{file.stem}-contact-regression.pt")
    pickle_only = directory.with_name("pickle")
    shutil.copytree(directory, pickle_only)
    torch.save(load((pickle_only / tensors.name).read_bytes()), pickle_only / "pytorch_model.bin")
    (pickle_only / tensors.name).unlink()
    config, bin_file = directory / "config.json", pickle_only / "pytorch_model.bin"
    for model, path in (
        *((file, file), (file, regression), (directory, tensors), (tensors, tensors), (directory, config)),
        (pickle_only, bin_file),
    ):
        whole = path.read_bytes()
        parts = [whole[: size if path.suffix != ".json" else size // 20] for size in (0, 400, -1000)]
        for content in (*parts, LFS_POINTER, PAGE):
            path.write_bytes(content)
            assert "git lfs pull" in refusal(model, path)
        path.write_bytes(whole)


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize(
    ("name", "form"),
    [("esm2_tiny.pt", "zip"), ("esm2_tiny-contact-regression.pt", "legacy"), ("pytorch_model.bin", "bare pickle")],
)
def test_code_in_a_pickle_is_not_run(name: str, form: str, directory: Path, reference: FairEsm) -> None:
    (directory / "model.safetensors").unlink()
    file = write_fair_esm(directory / "esm2_tiny.pt", reference)
    path, trace = directory / name, directory / "trace"
    content = {"cfg": Code(trace), "model": {"lm_head.bias": torch.zeros(33)}}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    message = refusal(file if name.endswith(".pt") else directory, path)
    assert "contains code (posix.mkdir)" in message
    assert not trace.exists()
    if form == "bare pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert trace.exists(), "the code was in the file"


def test_a_pt_file_of_something_else(tmp_path: Path, file: Path, reference: FairEsm) -> None:
    for content, token in (
        ({"model": reference}, "contains code (esm.model.esm2.ESM2)"),
        ({"model": {}}, "neither cfg.model nor args"),
        ({"args": argparse.Namespace(arch="protein_bert_base"), "model": {}}, "'protein_bert_base'"),
        (fair_esm_settings(TINY), "not a model file of any"),
        ([1, 2], "not a dictionary"),
    ):
        torch.save(content, tmp_path / "esm.pt")
        assert token in refusal(tmp_path / "esm.pt")
    regression = file.with_name(f"{file.stem}-contact-regression.pt")
    torch.save({"weight": torch.zeros(8)}, regression)
    assert "not a contact regression" in refusal(file, regression)


def test_a_pt_file_with_wrong_sizes(tmp_path: Path, reference: FairEsm) -> None:
    for name, value, token in (
        ("encoder_attention_heads", 5, "multiple of"),
        ("encoder_layers", 3, "layers.2."),
        ("encoder_embed_dim", 64, "must have"),
        ("encoder_ffn_embed_dim", 100, "ffn_embed_dim is 100"),
    ):
        file = write_fair_esm(tmp_path / f"{name}.pt", reference)
        edit_pt(file, lambda data, name=name, value=value: setattr(data["cfg"]["model"], name, value))
        assert token in refusal(file)
    edit_pt(file, lambda data: delattr(data["cfg"]["model"], "encoder_layers"))
    assert "'layers' is missing" in refusal(file)
