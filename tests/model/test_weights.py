"""Files of weights: what is read, what is refused and with which sentence, and fresh weights."""

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from esm.pretrained import load_model_and_alphabet_local
from model_files import TINY, fair_esm, tokenise, write_fair_esm, write_transformers
from safetensors.torch import load, save_file

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.config import SIZES, EsmConfig
from esmshard.model.contacts import predict_contacts
from esmshard.model.esm2 import ESM2
from esmshard.model.weights import TIED, from_transformers, load_model, to_transformers

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 31384421\n"
RELEASED = [name for name in SIZES if name.startswith("esm2_")]


@pytest.fixture(scope="module")
def reference() -> FairEsm:
    return fair_esm(TINY)


@pytest.fixture
def directory(tmp_path: Path, reference: FairEsm) -> Path:
    return write_transformers(tmp_path / "model", reference, TINY)


@pytest.fixture
def file(tmp_path: Path, reference: FairEsm) -> Path:
    return write_fair_esm(tmp_path / "esm2_tiny.pt", reference)


def refusal(path: str | Path, within: bool = False) -> str:
    """The one sentence with which `load_model` refuses. It begins with the path, or with that of a file within."""
    with pytest.raises(InputError) as caught:
        load_model(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}/" if within else f"{path}: ")
    assert "\n" not in message
    return message


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load((directory / "model.safetensors").read_bytes())
    edit(state)
    save_file(state, directory / "model.safetensors")


def edit_pt(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        data = torch.load(file)
    edit(data)
    torch.save(data, file)


def test_the_untouched_files_are_read(directory: Path, file: Path, reference: FairEsm) -> None:
    """Without this, each refusal below could have another reason."""
    for path in (directory, file):
        found = weights.read(str(path))
        assert (found.config, found.absent, dict(found.head)) == (TINY, (), {})
        for name, tensor in reference.state_dict().items():
            assert torch.equal(found[name], tensor), name


# What is refused


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere")
    assert "no such file" in refusal(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_name_without_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "weights are not here" in refusal(name)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("1 2 3")
    assert "not a model" in refusal(tmp_path / "weights.txt")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another model type": ({"model_type": "bert"}, "model_type is not 'esm'"),
    "absolute positions": ({"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
    "no word on positions": ({"position_embedding_type": ...}, "position_embedding_type is 'absolute'"),
    "a LayerNorm before": ({"emb_layer_norm_before": True}, "emb_layer_norm_before is True"),
    "another vocabulary": ({"vocab_size": 64}, "vocab_size is 64"),
    "another feed-forward": ({"intermediate_size": 100}, "intermediate_size is 100"),
    "no number of layers": ({"num_hidden_layers": ...}, "num_hidden_layers"),
    "heads that do not divide": ({"num_attention_heads": 5}, "multiple of"),
    "odd head width": ({"num_attention_heads": 32}, "multiple of"),
    "no head at all": ({"num_attention_heads": 0}, "config.json"),
    "layers as text": ({"num_hidden_layers": "2"}, "config.json"),
    "another epsilon": ({"layer_norm_eps": 1e-12}, "layer_norm_eps"),
    "another activation": ({"hidden_act": "relu"}, "hidden_act"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_of_an_esm2(case: str, directory: Path) -> None:
    changes, reason = CONFIGS[case]
    edit_config(directory, **changes)
    message = refusal(directory, within=True)
    assert "config.json: " in message
    assert reason in message


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_a_config_that_is_no_object(text: str | None, directory: Path) -> None:
    (directory / "config.json").unlink()
    if text is not None:
        (directory / "config.json").write_text(text)
    assert "config.json: " in refusal(directory, within=True)


def test_a_missing_key(directory: Path) -> None:
    edit_tensors(directory, lambda state: state.pop("esm.encoder.layer.1.output.dense.weight"))
    assert "layers.1.fc2.weight are missing" in refusal(directory)


def test_half_an_lm_head(directory: Path) -> None:
    edit_tensors(directory, lambda state: state.pop("lm_head.dense.bias"))
    assert "lm_head.dense.bias are missing" in refusal(directory)


def test_an_unexpected_key(directory: Path) -> None:
    edit_tensors(directory, lambda state: state.update({"esm.encoder.layer.2.output.dense.bias": torch.zeros(32)}))
    assert "layers.2.fc2.bias do not belong" in refusal(directory)


def test_a_tensor_of_another_shape(directory: Path) -> None:
    edit_tensors(directory, lambda state: state.update({"lm_head.bias": torch.zeros(64)}))
    assert "lm_head.bias is [64], [33] was expected" in refusal(directory)


def test_a_directory_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(directory)


@pytest.mark.parametrize("weight_map", [{"lm_head.bias": "model-2.safetensors"}, None])
def test_an_index_that_is_not_true(weight_map: dict[str, str] | None, directory: Path) -> None:
    """It names a file that is not there, or none at all."""
    index = {"metadata": {}} | ({} if weight_map is None else {"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refusal(directory, within=True)


@pytest.mark.parametrize("size", [0, 5, 400, -1000])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "bin"])
def test_a_truncated_file(size: int, kind: str, directory: Path, file: Path) -> None:
    path = {"safetensors": directory / "model.safetensors", "pt": file, "bin": directory / "pytorch_model.bin"}[kind]
    if kind == "bin":
        torch.save(load((directory / "model.safetensors").read_bytes()), path)
        (directory / "model.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(path) if kind == "pt" else refusal(directory, within=True)
    assert message.startswith(f"{path}: ")
    assert "copy or download it again" in message


@pytest.mark.parametrize("kind", ["safetensors", "pt", "regression"])
def test_a_pointer_of_git_lfs(kind: str, directory: Path, file: Path) -> None:
    regression = file.with_name(f"{file.stem}-contact-regression.pt")
    path = {"safetensors": directory / "model.safetensors", "pt": file, "regression": regression}[kind]
    path.write_text(LFS_POINTER)
    with pytest.raises(InputError) as caught:
        load_model(str(directory if kind == "safetensors" else file))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


class Code:
    """Whoever unpickles it makes a directory."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare pickle"])
@pytest.mark.parametrize("name", ["esm2_tiny.pt", "pytorch_model.bin"])
def test_code_in_a_pickle_is_not_run(name: str, form: str, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    path, trace = directory / name, directory / "trace"
    content = {"cfg": Code(trace), "model": {"lm_head.bias": torch.zeros(33)}}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    message = refusal(path) if name.endswith(".pt") else refusal(directory, within=True)
    assert message.startswith(f"{path}: cannot be read as torch weights")
    assert not trace.exists()
    if form == "bare pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert trace.exists(), "the code was in the file"


NOT_ESM2: dict[str, Any] = {
    "no cfg": {"model": {}},
    "ESM-1b": {"args": argparse.Namespace(arch="roberta_large"), "model": {}},
    "no sizes": {"cfg": {"model": argparse.Namespace(layers=2)}, "model": {}},
    "no model": {"cfg": {"model": argparse.Namespace(**vars(TINY))}},
    "a list": [1, 2],
    "a tensor": torch.zeros(3),
}


@pytest.mark.parametrize("case", NOT_ESM2)
def test_a_pt_file_that_is_not_esm2(case: str, tmp_path: Path) -> None:
    torch.save(NOT_ESM2[case], tmp_path / "esm.pt")
    message = refusal(tmp_path / "esm.pt")
    assert "not an ESM-2 file" in message or "not a dictionary" in message


def test_a_pt_file_with_sizes_that_cannot_be(file: Path) -> None:
    edit_pt(file, lambda data: setattr(data["cfg"]["model"], "encoder_attention_heads", 5))
    refusal(file)


def test_a_pt_file_of_other_sizes_than_it_says(file: Path) -> None:
    edit_pt(file, lambda data: setattr(data["cfg"]["model"], "encoder_layers", 3))
    assert "layers.2." in refusal(file)


def test_a_contact_regression_that_is_something_else(file: Path) -> None:
    regression = file.with_name(f"{file.stem}-contact-regression.pt")
    torch.save({"weight": torch.zeros(8)}, regression)
    with pytest.raises(InputError) as caught:
        load_model(str(file))
    assert str(caught.value).startswith(f"{regression}: ")


# fair-esm


@pytest.mark.parametrize(
    "prefixes", [("encoder.sentence_encoder.", "encoder."), ("encoder.", "encoder."), ("", "")], ids=str
)
def test_a_fair_esm_file_is_read_under_each_prefix(
    prefixes: tuple[str, str], tmp_path: Path, reference: FairEsm
) -> None:
    path = write_fair_esm(tmp_path / "esm2_tiny.pt", reference, prefixes)
    assert weights.read(str(path)).absent == ()
    model = load_model(str(path))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not model.training
    state = model.state_dict()
    assert len(state) > 40
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], tensor), name
    # The file is what fair-esm reads, too.
    with torch.serialization.safe_globals([argparse.Namespace]):
        theirs, _ = load_model_and_alphabet_local(path)
    block, batch = tokenise(["MKTAYIAKQRQISFVKSHFSRQ"])
    with torch.no_grad():
        assert (predict_contacts(model, batch)[0] - theirs.predict_contacts(block)[0]).abs().max() <= 1e-6


def test_a_file_from_before_the_zip_format_is_read(file: Path, reference: FairEsm) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        data = torch.load(file)
    torch.save(data, file, _use_new_zipfile_serialization=False)
    assert torch.equal(load_model(str(file)).layers[1].fc2.weight, reference.layers[1].fc2.weight)


@pytest.mark.parametrize("form", ["fair-esm", "transformers"])
@pytest.mark.parametrize("parts", [("contact_head",), ("lm_head",), ("lm_head", "contact_head")], ids="+".join)
def test_a_missing_head_is_recorded_and_drawn_anew(
    parts: tuple[str, ...], form: str, directory: Path, file: Path, reference: FairEsm
) -> None:
    def lose(state: dict[str, torch.Tensor]) -> None:
        for key in [k for k in state if any(f"{part}." in k for part in parts)]:
            del state[key]

    if form == "fair-esm":
        edit_pt(file, lambda data: lose(data["model"]))
        if "contact_head" in parts:
            file.with_name(f"{file.stem}-contact-regression.pt").unlink()
    else:
        edit_tensors(directory, lose)
    path = str(file if form == "fair-esm" else directory)
    assert weights.read(path).absent == parts
    state, again = load_model(path).state_dict(), load_model(path).state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], again[name])
        drawn = name.startswith(tuple(f"{part}." for part in parts)) and name != TIED
        assert torch.equal(state[name], tensor) is not drawn, name


def test_half_precision_files_become_fp32(directory: Path, reference: FairEsm) -> None:
    edit_tensors(directory, lambda state: state.update({k: t.half() for k, t in state.items()}))
    state = load_model(str(directory)).state_dict()
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert torch.equal(state["layers.0.fc1.weight"], reference.layers[0].fc1.weight.half().float())


def test_the_task_head_is_kept_apart(tmp_path: Path, reference: FairEsm) -> None:
    head = {"out.weight": torch.arange(3.0), "norm.LayerNorm.bias": torch.ones(2)}
    found = weights.read(str(write_transformers(tmp_path / "model", reference, TINY, head)))
    assert found.head.keys() == head.keys()
    for name, tensor in head.items():
        assert torch.equal(found.head[name](), tensor)
    assert not any(name.startswith("head.") for name in found.read)


# Fresh weights


def test_fresh_weights_depend_on_seed_and_name_only() -> None:
    small, big = weights.fresh(TINY, 1), weights.fresh(EsmConfig(n_layers=3, dim=32, n_heads=4), 1)
    other = weights.fresh(TINY, 2)
    torch.manual_seed(7)
    names = [n for n in weights.shapes(TINY) if n.endswith(".weight") and "norm" not in n and n != TIED]
    assert len(names) == 2 * 6 + 3
    for name in names:
        assert torch.equal(small[name], small[name])
        if name != "contact_head.regression.weight":  # one weight per attention head: longer in the bigger model
            assert torch.equal(small[name], big[name])
        assert not torch.equal(small[name], other[name])
    assert not torch.equal(small["layers.0.fc1.weight"], small["layers.1.fc1.weight"])
    assert not torch.equal(small["layers.0.self_attn.q_proj.weight"], small["layers.0.self_attn.k_proj.weight"])


def test_fresh_weights_are_complete_and_of_the_right_size() -> None:
    config = EsmConfig(n_layers=2, dim=128, n_heads=4)
    found = weights.fresh(config, 0)
    assert found.read.keys() == weights.shapes(config).keys()
    with torch.device("meta"):
        model = ESM2(config)
    weights.materialise(model, found, torch.device("cpu"))
    torch.manual_seed(0)
    like = FairEsm(2, 128, 4).state_dict()
    compared = 0
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
        if name.endswith("bias"):
            assert tensor.count_nonzero() == 0
        elif "norm" in name:
            assert (tensor == 1).all()
        elif "inv_freq" in name:
            torch.testing.assert_close(tensor, like[name])
        elif name == "embed_tokens.weight":
            compared += 1
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.1)
        elif "self_attn" in name:
            compared += 1
            assert float(tensor.std()) == pytest.approx(float(like[name].std()), rel=0.1), name
        elif name != TIED:
            compared += 1
            assert float(tensor.std()) == pytest.approx((2 / sum(tensor.shape)) ** 0.5, rel=0.3), name
    assert compared == 2 * 6 + 3
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight[1].count_nonzero() == 0


# Names, sizes, configuration


def test_names_of_transformers_and_back() -> None:
    names = list(weights.shapes(TINY))
    assert len(names) == len(FairEsm(2, 32, 4).state_dict())
    assert names == [from_transformers(to_transformers(name)) for name in names]
    assert len({to_transformers(name) for name in names}) == len(names)
    assert to_transformers("layers.11.fc1.weight") == "esm.encoder.layer.11.intermediate.dense.weight"
    assert from_transformers("esm.pooler.dense.weight") is None
    assert from_transformers("pooler.dense.weight") is None


PUBLISHED = {
    "esm2_t6_8M_UR50D": 7.5e6,
    "esm2_t12_35M_UR50D": 33.5e6,
    "esm2_t30_150M_UR50D": 148e6,
    "esm2_t33_650M_UR50D": 651e6,
    "esm2_t36_3B_UR50D": 2.84e9,
    "esm2_t48_15B_UR50D": 15.1e9,
}


def test_released_sizes_have_the_published_numbers_of_parameters() -> None:
    assert PUBLISHED.keys() == set(RELEASED)
    for name, published in PUBLISHED.items():
        assert SIZES[name].n_parameters == pytest.approx(published, rel=0.004)


@pytest.mark.parametrize("name", SIZES)
def test_every_size_counts_its_parameters_as_fair_esm_does(name: str) -> None:
    config = SIZES[name]
    with torch.device("meta"):
        mine, theirs = ESM2(config), FairEsm(config.n_layers, config.dim, config.n_heads)
    shapes = {n: p.shape for n, p in mine.named_parameters()}
    assert shapes == {n: p.shape for n, p in theirs.named_parameters()}
    assert config.n_parameters == sum(p.numel() for p in mine.parameters())
    if name in RELEASED:
        layers, size = name.split("_")[1:3]
        assert layers == f"t{config.n_layers}"
        assert size.endswith(("M", "B"))


@pytest.mark.parametrize("heads", [3, 5, 32])
def test_a_head_must_be_of_even_width(heads: int) -> None:
    with pytest.raises(ValueError, match="multiple of 2 x n_heads"):
        EsmConfig(n_layers=2, dim=32, n_heads=heads)


@pytest.mark.parametrize(("size", "value"), [("n_layers", 0), ("dim", 0), ("n_heads", 0), ("n_heads", -4)])
def test_sizes_must_be_positive(size: str, value: int) -> None:
    with pytest.raises(ValueError, match=size):
        EsmConfig(**({"n_layers": 2, "dim": 32, "n_heads": 4} | {size: value}))


def test_a_model_without_its_contact_regression_warns_that_contacts_are_random(tmp_path: Path) -> None:
    file = write_fair_esm(tmp_path / "esm2_tiny.pt", fair_esm(TINY))
    (tmp_path / "esm2_tiny-contact-regression.pt").unlink()
    with pytest.warns(UserWarning, match=r"esm2_tiny\.pt: has no contact_head; what it says is random"):
        load_model(str(file))


def test_a_size_of_ours_has_no_weights_to_download() -> None:
    with pytest.raises(InputError, match="mini: a size without trained weights"):
        weights.read("mini")


def test_a_classifier_of_transformers_is_left_out_with_a_word(tmp_path: Path) -> None:
    directory = write_transformers(tmp_path / "model", fair_esm(TINY), TINY)
    tensors = load((directory / "model.safetensors").read_bytes())
    save_file(tensors | {"classifier.dense.weight": torch.zeros(2, 2)}, directory / "model.safetensors")
    assert weights.read(str(directory)).left_out == ("classifier",)
    with pytest.warns(UserWarning, match="its classifier is of another task and left out"):
        load_model(str(directory))
