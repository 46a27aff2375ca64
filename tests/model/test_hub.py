"""Released models by name, and any repository, from a server on this machine that speaks as the hub does."""

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
import numpy as np
import pytest
import torch
from hub_server import COMMIT, NAME, Hub, own_caches, snapshot
from huggingface_hub import constants
from model_files import TINY, fair_esm, write_transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import EsmForMaskedLM

from esmshard.api.model import load
from esmshard.checkpoint.consolidate import FORMAT, consolidate
from esmshard.errors import InputError
from esmshard.model import hub, weights
from esmshard.model.weights import load_model
from esmshard.planner import config_of
from esmshard.tasks.finetuned import load_finetuned


def flip(body: bytes) -> bytes:
    """One bit of the last byte, so that the file still opens."""
    return body[:-1] + bytes([body[-1] ^ 1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in transformers' layout, with a vocabulary."""
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
    """The hub's cache of this process; torch hub's is empty beside it."""
    return own_caches(tmp_path, monkeypatch)


@pytest.fixture
def here(cache: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server, for fetches in this process."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Older releases of the library hold it under this name too.
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    return server


def environment(tmp_path: Path, endpoint: str, **more: str) -> dict[str, str]:
    """Nothing of the user's caches, tokens and proxies."""
    prefixes = ("HF_", "HUGGINGFACE", "TRANSFORMERS_", "TORCH_HOME", "XDG_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and not k.lower().endswith("_proxy")}
    homes = {"HF_HOME": str(tmp_path / "hf"), "TORCH_HOME": str(tmp_path / "torch")}
    return kept | homes | {"HF_ENDPOINT": endpoint, "NO_PROXY": "*", "OMP_NUM_THREADS": "1"} | more


def download(tmp_path: Path, endpoint: str, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`esmshard download` in a process of its own, since huggingface_hub reads its variables when imported."""
    command = [sys.executable, "-m", "esmshard", "download", *map(str, arguments)]
    env = environment(tmp_path, endpoint, **more)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def left_in(directory: Path) -> list[Path]:
    """Files of weights, and partial downloads."""
    found = [path for path in directory.rglob("*") if not path.is_dir() and ".locks" not in path.parts]
    return [path for path in found if path.suffix == ".incomplete" or not path.exists() or path.stat().st_size > 1000]


def assert_same_model(path: Path, reference: Path) -> None:
    found, wanted = (load_model(str(p), torch.device("cpu")).state_dict() for p in (path, reference))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def refused(**arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        hub.fetch(NAME, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_is_downloaded_and_from_then_on_needs_no_network(server: Hub, model: Path, tmp_path: Path) -> None:
    first = download(tmp_path, server.url, NAME)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    assert path == tmp_path / "hf" / "hub" / f"models--facebook--{NAME}" / "snapshots" / COMMIT
    # One format, and nothing that is not needed; the weights last, since with them the directory is a model.
    assert server.asked == ["list", "config.json", "vocab.txt", "README.md", "model.safetensors"]
    assert names(path) == {"model.safetensors", "vocab.txt", "config.json", "README.md"}
    said = first.stderr.splitlines()
    size = sum(map(len, (server.files[name] for name in names(path)))) / 1e6
    assert f"{NAME}: downloading {size:.2f} MB from {server.url}/facebook/{NAME}" in said
    # Where transformers looks for it offline.
    assert (path.parent.parent / "refs" / "main").read_text() == COMMIT

    server.asked.clear()
    for more in ({"HF_HUB_OFFLINE": "1"}, {}):
        again = download(tmp_path, server.url, NAME, **more)
        assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert server.asked == []
    assert_same_model(path, model)


def test_to_makes_a_directory_of_plain_files_and_leaves_the_cache_alone(server: Hub, tmp_path: Path) -> None:
    out = tmp_path / "models"
    done = download(tmp_path, server.url, NAME, "--to", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / NAME)
    assert names(out) == {NAME}
    assert {p.name: p.read_bytes() for p in (out / NAME).iterdir()} == {
        name: server.files[name] for name in ("config.json", "model.safetensors", "vocab.txt", "README.md")
    }
    assert not any(path.is_symlink() for path in (out / NAME).iterdir())
    assert (out / NAME).stat().st_mode & 0o777 == 0o777 & ~_umask()
    assert not list((tmp_path / "hf").rglob("*.safetensors"))

    server.asked.clear()
    again = download(tmp_path, server.url, "esm2_t12_35M_UR50D", NAME, "--to", out)
    assert again.returncode == 2
    assert again.stderr == f"error: {out / NAME}: exists already; choose another directory or pass --overwrite\n"
    assert server.asked == []
    assert names(out) == {NAME}
    third = download(tmp_path, server.url, NAME, "--to", out, "--overwrite")
    assert third.returncode == 0, third.stderr
    assert names(out / NAME) == {"config.json", "model.safetensors", "vocab.txt", "README.md"}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_to_copies_from_the_cache_without_a_network(cache: Path, tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    blobs = tmp_path / "blobs"
    found = snapshot(cache, {path.name: path.read_bytes() for path in model.iterdir()} | {"tf_model.h5": b"other"})
    blobs.mkdir()
    (found / "model.safetensors").rename(blobs / "abc")
    (found / "model.safetensors").symlink_to(blobs / "abc")
    made = hub.fetch(NAME, tmp_path / "out")
    assert names(made) == {"config.json", "model.safetensors", "vocab.txt"}
    assert not (made / "model.safetensors").is_symlink()
    assert (made / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_flipped_bit_is_refused_and_nothing_of_it_stays(here: Hub, cache: Path, tmp_path: Path) -> None:
    right = here.files["model.safetensors"]
    here.sent["model.safetensors"] = flip(right)
    for arguments in ({}, {"to": tmp_path / "out"}):
        message = refused(**arguments)
        assert f"model.safetensors from {here.url} has not the sha256 that was announced" in message
    assert left_in(tmp_path) == []
    assert list((tmp_path / "out").iterdir()) == []
    assert hub.find(NAME) is None
    here.sent.clear()
    assert (hub.fetch(NAME) / "model.safetensors").read_bytes() == right


def test_a_file_that_ends_early_is_refused(here: Hub, cache: Path, tmp_path: Path) -> None:
    here.sent["model.safetensors"] = here.files["model.safetensors"][:5000]
    message = refused()
    assert "model.safetensors" in message
    assert left_in(tmp_path) == []
    assert hub.find(NAME) is None


def test_a_repository_that_is_not_there(here: Hub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"/facebook/esm2_t12_35M_UR50D .*HF_TOKEN"):
        hub.fetch("esm2_t12_35M_UR50D")
    assert "list" not in here.asked


def test_offline_mode_asks_nobody_and_says_where_to_put_the_file(server: Hub, tmp_path: Path) -> None:
    done = download(tmp_path, server.url, NAME, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {NAME}: no such file")
    assert "HF_HUB_OFFLINE" in line
    assert server.asked == []


def test_ctrl_c_ends_a_download_at_once_and_leaves_nothing(server: Hub, tmp_path: Path) -> None:
    server.go.clear()
    env = environment(tmp_path, server.url)
    command = [sys.executable, "-m", "esmshard", "download", NAME, "--to", str(tmp_path / "out")]
    # A job in the background of a shell is born deaf to SIGINT, and so would be the process that it starts.
    hearing = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, hearing)
    _until(lambda: "model.safetensors" in server.asked)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert list((tmp_path / "out").iterdir()) == []


def _until(happens: Any, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.05)


def shards(model: Path) -> dict[str, bytes]:
    """The tiny model in two files and an index."""
    state = load_file(model / "model.safetensors")
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(state))}
    parts = {}
    for file in set(files.values()):
        save_file({name: state[name] for name in files if files[name] == file}, model.parent / file)
        parts[file] = (model.parent / file).read_bytes()
    index = json.dumps({"metadata": {}, "weight_map": files}).encode()
    return {"config.json": (model / "config.json").read_bytes(), "model.safetensors.index.json": index, **parts}


def test_a_sharded_model_comes_with_all_its_shards(here: Hub, cache: Path, model: Path) -> None:
    here.files = shards(model) | {"pytorch_model.bin": b"another format"}
    path = hub.fetch(NAME)
    assert names(path) == shards(model).keys()
    assert_same_model(path, model)


def test_torch_weights_are_taken_where_there_are_no_safetensors(here: Hub, cache: Path) -> None:
    del here.files["model.safetensors"]
    assert names(hub.fetch(NAME)) == {"config.json", "vocab.txt", "README.md", "pytorch_model.bin"}


# Any repository, as OWNER/NAME

MINE = "lab/esm2_mine"


@pytest.fixture
def mine(here: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The tiny model in a repository that is not known here. The working directory is empty."""
    here.repository = MINE
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return here


def refused_model(name: str) -> str:
    with pytest.raises(InputError) as caught:
        weights.read(name)
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert "\n" not in message
    return message


def test_the_configuration_of_a_repository_decides_family_and_shape(mine: Hub, model: Path, cache: Path) -> None:
    found = weights.read(MINE)
    assert found.config == TINY
    # The configuration is looked at before gigabytes are downloaded.
    assert mine.asked == ["list", "config.json", "vocab.txt", "README.md", "model.safetensors"]
    assert Path(found.source) == cache / "models--lab--esm2_mine" / "snapshots" / COMMIT
    assert_same_model(Path(found.source), model)
    mine.asked.clear()
    assert weights.read(MINE).source == found.source
    assert mine.asked == []


def test_a_local_path_of_that_name_comes_first(mine: Hub, model: Path) -> None:
    shutil.copytree(model, MINE)
    assert weights.read(MINE).source == MINE
    assert mine.asked == []


def test_a_repository_of_another_model_is_refused_before_its_weights_come(mine: Hub, tmp_path: Path) -> None:
    config = json.loads(mine.files["config.json"]) | {"model_type": "bert"}
    mine.files["config.json"] = json.dumps(config).encode()
    reason = "model_type is 'bert' and not one of 'esm'"
    assert f"config.json is not that of a model that can be read: {reason}" in refused_model(MINE)
    assert mine.asked == ["list", "config.json"]


@pytest.mark.parametrize("name", ["lab/x/y", "lab/", "../lab", "./lab/x", "lab/x.pt", "lab/a--b", "la b/x", "-lab/x"])
def test_what_is_no_name_of_a_repository_is_not_asked_for(name: str, mine: Hub) -> None:
    assert "no such file or directory" in refused_model(name)
    assert mine.asked == []


def test_a_plan_asks_the_hub_for_nothing(mine: Hub) -> None:
    with pytest.raises(InputError, match="esmshard download"):
        config_of(MINE)
    assert mine.asked == []
    hub.fetch(MINE)
    assert config_of(MINE).dim == TINY.dim


def adapter_files(directory: Path, base: Path, **settings: Any) -> dict[str, bytes]:
    """What PEFT writes of a LoRA on a model, with `settings` changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
        get_peft_model(EsmForMaskedLM.from_pretrained(base), lora).save_pretrained(directory)
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_adapter_is_read_as_its_directory_is(mine: Hub, model: Path, cache: Path, tmp_path: Path) -> None:
    mine.files = adapter_files(tmp_path / "adapter", model) | {"README.md": b"a card", "optimizer.bin": b"state"}
    mine.files["config.json"] = b"{}"  # says nothing of an adapter
    found, local = weights.read(MINE), weights.read(str(tmp_path / "adapter"))
    assert mine.asked == ["list", "config.json", "adapter_config.json", "README.md", "adapter_model.safetensors"]
    assert Path(found.source) == cache / "models--lab--esm2_mine" / "snapshots" / COMMIT
    for name in found.read:
        assert torch.equal(found[name], local[name])
    changed = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(found[changed], weights.read(str(model))[changed])
    mine.asked.clear()
    copied = hub.fetch(MINE, tmp_path / "copied")
    assert names(copied) == {"adapter_model.safetensors", "README.md", "adapter_config.json", "config.json"}
    assert weights.read(MINE).config == TINY
    assert mine.asked == [], "the adapter is in the cache"


def test_an_adapter_with_a_flipped_bit_or_of_itself_is_refused(mine: Hub, model: Path, tmp_path: Path) -> None:
    mine.files = adapter_files(tmp_path / "adapter", model, base_model_name_or_path=MINE)
    mine.sent["adapter_model.safetensors"] = flip(mine.files["adapter_model.safetensors"])
    assert "adapter_model.safetensors from" in (said := refused_model(MINE))
    assert "was announced" in said
    mine.sent.clear()
    with pytest.raises(InputError, match="is named as its own base model; put it there"):
        weights.read(MINE)


def test_what_esmshard_wrote_beside_the_weights_comes_too(mine: Hub, model: Path, cache: Path, tmp_path: Path) -> None:
    """The record of the weights is compared, as in a local directory."""
    out = consolidate(model, tmp_path / "own")
    mine.files = {path.name: path.read_bytes() for path in out.iterdir()}
    record = {"format": FORMAT, "weights_sha256": "0", "files": {"model.safetensors": 64 * "0"}}
    mine.files["esmshard.json"] = json.dumps(record).encode()
    found = weights.read(MINE)
    assert json.loads((Path(found.source) / "esmshard.json").read_text()) == record
    assert "is not the file that" in str(weights.altered(found.files))
    assert "esmshard.json" in names(hub.fetch(MINE, tmp_path / "copied"))


def test_a_fine_tuned_model_of_the_hub_has_its_head(mine: Hub) -> None:
    """The starter, as somebody's repository."""
    files = [path for path in weights.place("starter").iterdir() if path.suffix != ".npz"]
    mine.files = {path.name: path.read_bytes() for path in files}
    found, local = (load_finetuned(name, torch.device("cpu")) for name in (MINE, "starter"))
    assert found.about == local.about
    state = local.model.head.state_dict()
    assert state
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.model.head.state_dict().items())
    (mine_LL,), (theirs_LL,) = (load(name, "cpu").predict(["MKTAYIAKQR"]) for name in (MINE, "starter"))
    assert np.array_equal(mine_LL, theirs_LL)


def test_the_older_files_of_the_authors_are_read(mine: Hub, tmp_path: Path) -> None:
    """`data/weights/NAME.pth` without a configuration that says anything, beside files of other models."""
    directory = esmc_files.write(tmp_path / "esmc", "C", esmc_files.random_esmc())
    file = "data/weights/esmc_tiny_2024_12_v0.pth"
    other = "data/weights/esm3_structure_encoder_v0.pth"
    mine.files = {"config.json": b"{}", file: (directory / file).read_bytes(), other: b"", "README.md": b"a card"}
    found = weights.read(MINE)
    assert (found.config.family, found.config.dim) == ("esmc", esmc_files.WIDTH)
    assert mine.asked == ["list", "config.json", "README.md", file]
    made = hub.fetch(MINE, tmp_path / "copied")
    assert (made / file).read_bytes() == mine.files[file]
    assert not (made / file).is_symlink()
    assert weights.read(str(made)).config == found.config
    mine.sent[file] = flip(mine.files[file])
    shutil.rmtree(tmp_path / "hf")
    assert "was announced" in refused_model(MINE)
