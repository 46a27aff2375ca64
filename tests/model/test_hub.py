"""Released models and other repositories, from a local server that answers as the hub does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import esmc_files
import pytest
import torch
from hub_server import COMMIT, NAME, Hub, own_caches, snapshot
from huggingface_hub import constants
from model_files import TINY, fair_esm, write_fair_esm, write_transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save
from transformers import EsmForMaskedLM

from esmshard.errors import InputError, UsageError
from esmshard.model import hub, weights
from esmshard.model.weights import load_model
from esmshard.planner import config_of
from esmshard.tasks.finetuned import load_finetuned


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_transformers(tmp_path_factory.mktemp("model") / "tiny", fair_esm(TINY), TINY)
    (directory / "vocab.txt").write_text("<cls>\n<pad>\n")
    return directory


@pytest.fixture
def server(model: Path) -> Iterator[Hub]:
    """The tiny model under a released name, among files of other frameworks."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    others = dict.fromkeys(("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"), b"another framework")
    with Hub(files | others | {"README.md": b"a card"}) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield running
        running.go.set()
        running.shutdown()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of this process; the cache of torch hub is empty."""
    return own_caches(tmp_path, monkeypatch)


@pytest.fixture
def here(cache: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server of this process."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Older releases of the library also have this name.
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    return server


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def assert_same_model(path: Path, reference: Path) -> None:
    found, wanted = (load_model(str(p), torch.device("cpu")).state_dict() for p in (path, reference))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_name_is_downloaded_and_from_then_on_needs_no_network(here: Hub, cache: Path, model: Path) -> None:
    path = hub.fetch(NAME)
    assert path == cache / f"models--facebook--{NAME}" / "snapshots" / COMMIT
    # The weights come last, because with them the directory is a model.
    assert here.asked == ["list", "config.json", "vocab.txt", "README.md", "model.safetensors"]
    # Where transformers looks for it offline.
    assert (path.parent.parent / "refs" / "main").read_text() == COMMIT
    here.asked.clear()
    assert hub.fetch(NAME) == path
    assert here.asked == []
    assert_same_model(path, model)


def test_to_makes_a_directory_of_plain_files_and_leaves_the_cache_alone(here: Hub, tmp_path: Path) -> None:
    out = tmp_path / "models"
    made = hub.fetch(NAME, out)
    expected = {name: here.files[name] for name in ("config.json", "model.safetensors", "vocab.txt", "README.md")}
    assert {p.name: p.read_bytes() for p in made.iterdir()} == expected
    assert not any(path.is_symlink() for path in made.iterdir())
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    here.asked.clear()
    with pytest.raises(UsageError, match="exists already"):
        hub.check(["esm2_t12_35M_UR50D", NAME], out)
    assert here.asked == []
    hub.fetch(NAME)
    here.asked.clear()
    (out / NAME / "config.json").write_text("damaged")
    assert hub.fetch(NAME, out, overwrite=True) == out / NAME
    assert here.asked == [], "the files come from the cache, where they are links"
    assert names(out) == {NAME}
    assert {p.name: p.read_bytes() for p in made.iterdir()} == expected
    assert not any(path.is_symlink() for path in made.iterdir())


def test_a_flipped_bit_or_a_file_that_ends_early_is_refused_and_nothing_of_it_stays(here: Hub, tmp_path: Path) -> None:
    right = here.files["model.safetensors"]
    flipped = right[:-1] + bytes([right[-1] ^ 1])  # The file can still be opened.
    for sent, token in ((flipped, "sha256"), (right[:5000], "model.safetensors")):
        here.sent["model.safetensors"] = sent
        for arguments in ({}, {"to": tmp_path / "out"}):
            with pytest.raises(InputError, match=token):
                hub.fetch(NAME, **arguments)
        files = [path for path in tmp_path.rglob("*") if not path.is_dir() and ".locks" not in path.parts]
        assert not [p for p in files if p.suffix == ".incomplete" or not p.exists() or p.stat().st_size > 1000]
        assert list((tmp_path / "out").iterdir()) == []
        assert hub.find(NAME) is None
    here.sent.clear()
    assert (hub.fetch(NAME) / "model.safetensors").read_bytes() == right


def test_without_a_repository_or_a_network_the_error_says_so(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"/facebook/esm2_t12_35M_UR50D .*HF_TOKEN"):
        hub.fetch("esm2_t12_35M_UR50D")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        hub.fetch(NAME)
    assert "list" not in here.asked


def test_ctrl_c_ends_a_download_at_once_and_leaves_nothing(server: Hub, tmp_path: Path) -> None:
    """The process reads the hub's address from the environment."""
    server.go.clear()
    prefixes = ("HF_", "HUGGINGFACE", "TRANSFORMERS_", "TORCH_HOME", "XDG_")  # the user's caches, tokens and proxies
    env = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and not k.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(tmp_path / "hf"), "TORCH_HOME": str(tmp_path / "torch"), "HF_ENDPOINT": server.url}
    command = [sys.executable, "-m", "esmshard", "download", NAME, "--to", str(tmp_path / "out")]
    # A background job of a shell ignores SIGINT, and so would its child process.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, env=env | {"NO_PROXY": "*"}, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, handler)
    end = time.monotonic() + 900
    while "model.safetensors" not in server.asked:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_comes_with_all_shards_or_as_torch_weights(here: Hub, cache: Path, model: Path) -> None:
    whole, state = here.files, load_file(model / "model.safetensors")
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(state))}
    index = json.dumps({"metadata": {}, "weight_map": files}).encode()
    shards = {"config.json": whole["config.json"], "model.safetensors.index.json": index}
    shards |= {file: save({name: state[name] for name in files if files[name] == file}) for file in set(files.values())}
    here.files = shards | {"pytorch_model.bin": b"another format"}
    path = hub.fetch(NAME)
    assert names(path) == shards.keys()
    assert_same_model(path, model)
    shutil.rmtree(cache)
    here.files = {name: body for name, body in whole.items() if name != "model.safetensors"}
    assert names(hub.fetch(NAME)) == {"config.json", "vocab.txt", "README.md", "pytorch_model.bin"}


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_only_a_whole_snapshot_is_a_model(cache: Path, weights_file: str) -> None:
    stem, suffix = weights_file.split(".")
    first, second = (f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2))
    config, index = {"config.json": b"{}"}, {f"{weights_file}.index.json": b"{}"}
    for n, files in enumerate(
        (
            config | {"vocab.txt": b"L", "tokenizer_config.json": b"{}"},
            {weights_file: b""},
            config | {"tf_model.h5": b""},
            config | index | {first: b""},
        )
    ):
        snapshot(cache, files, commit=f"{n:040}")
        assert hub.find(NAME) is None
    for commit, files in ((8 * "abcde", {weights_file: b""}), (8 * "edcba", index | {first: b"", second: b""})):
        directory = snapshot(cache, config | files, commit)
        assert hub.find(NAME) == directory


def test_a_file_of_fair_esm_in_torch_hubs_cache_goes_first(cache: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    snapshot(cache, {"config.json": b"{}", "model.safetensors": b""})
    path = write_fair_esm(checkpoints / f"{NAME}.pt", fair_esm(TINY))
    assert hub.find(NAME) == hub.fetch(NAME) == path
    assert load_model(str(path), torch.device("cpu")).config == TINY
    assert hub.find("esm2_t12_35M_UR50D") is None


MINE = "lab/esm2_mine"


@pytest.fixture
def mine(here: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The tiny model in a repository OWNER/NAME. The working directory is empty."""
    here.repository = MINE
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return here


def test_the_configuration_of_a_repository_decides_family_and_shape(mine: Hub, model: Path, cache: Path) -> None:
    with pytest.raises(InputError, match="esmshard download"):
        config_of(MINE)
    assert mine.asked == [], "a plan uses no network"
    found = weights.read(MINE)
    assert found.config == config_of(MINE) == TINY
    assert mine.asked == ["list", "config.json", "vocab.txt", "README.md", "model.safetensors"]
    assert Path(found.source) == cache / "models--lab--esm2_mine" / "snapshots" / COMMIT
    assert_same_model(Path(found.source), model)
    mine.asked.clear()
    assert weights.read(MINE).source == found.source
    shutil.copytree(model, MINE)
    assert weights.read(MINE).source == MINE, "a local path of that name comes first"
    assert mine.asked == []


def test_a_repository_of_another_model_is_refused_before_its_weights_come(mine: Hub) -> None:
    config = json.loads(mine.files["config.json"]) | {"model_type": "gpt2"}
    mine.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(InputError, match="model_type is 'gpt2'"):
        weights.read(MINE)
    assert mine.asked == ["list", "config.json"]


def test_what_is_no_name_of_a_repository_is_not_asked_for(mine: Hub) -> None:
    for name in ("lab/x/y", "lab/", "../lab", "./lab/x", "lab/x.pt", "lab/a--b", "la b/x", "-lab/x"):
        with pytest.raises(InputError, match="no such file or directory"):
            weights.read(name)
    assert mine.asked == []


def adapter_files(directory: Path, base: Path, **settings: Any) -> dict[str, bytes]:
    """The files of a LoRA from PEFT, with changed settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
        get_peft_model(EsmForMaskedLM.from_pretrained(base), lora).save_pretrained(directory)
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_adapter_is_read_as_its_directory_is(mine: Hub, model: Path, cache: Path, tmp_path: Path) -> None:
    mine.files = adapter_files(tmp_path / "adapter", model) | {"README.md": b"a card", "optimizer.bin": b"state"}
    mine.files["config.json"] = b"{}"
    found, local = weights.read(MINE), weights.read(str(tmp_path / "adapter"))
    assert mine.asked == ["list", "config.json", "adapter_config.json", "README.md", "adapter_model.safetensors"]
    assert all(torch.equal(found[name], local[name]) for name in found.read)
    changed = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(found[changed], weights.read(str(model))[changed])
    mine.asked.clear()
    copied = hub.fetch(MINE, tmp_path / "copied")
    assert names(copied) == {"adapter_model.safetensors", "README.md", "adapter_config.json", "config.json"}
    assert weights.read(MINE).config == TINY
    assert mine.asked == [], "the adapter is in the cache"
    shutil.rmtree(cache)
    mine.files = adapter_files(tmp_path / "itself", model, base_model_name_or_path=MINE)
    with pytest.raises(InputError, match="its own base model"):
        weights.read(MINE)


def test_a_fine_tuned_model_of_the_hub_has_its_head(mine: Hub) -> None:
    """The starter, as somebody's repository."""
    files = [path for path in weights.place("starter").iterdir() if path.suffix != ".npz"]
    mine.files = {path.name: path.read_bytes() for path in files}
    found, local = (load_finetuned(name, torch.device("cpu")) for name in (MINE, "starter"))
    assert found.about == local.about
    state = local.model.state_dict()
    assert any(name.startswith("head.") for name in state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.model.state_dict().items())


def test_the_older_files_of_the_authors_are_read(mine: Hub, tmp_path: Path) -> None:
    """The file `data/weights/NAME.pth` with an empty configuration and with files of other models."""
    directory = esmc_files.write(tmp_path / "esmc", "C", esmc_files.random_esmc())
    file, other = "data/weights/esmc_tiny_2024_12_v0.pth", "data/weights/esm3_structure_encoder_v0.pth"
    mine.files = {"config.json": b"{}", file: (directory / file).read_bytes(), other: b"", "README.md": b"a card"}
    found = weights.read(MINE)
    assert (found.config.family, found.config.dim) == ("esmc", esmc_files.WIDTH)
    assert mine.asked == ["list", "config.json", "README.md", file]
    made = hub.fetch(MINE, tmp_path / "copied")
    assert (made / file).read_bytes() == mine.files[file]
    assert weights.read(str(made)).config == found.config
