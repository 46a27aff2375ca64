"""`esmshard push` uploads the files of a model, and refuses what is not a model for others."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from model_files import TINY, fair_esm, write_transformers

from esmshard.errors import InputError, UsageError
from esmshard.model.export import push

NAME, URL = "me/contacts", "https://hub.test"


class Repositories:
    """Replaces `huggingface_hub.HfApi`. Repositories are directories."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: dict[str, bool | None] = {}
        self.refuses: int | None = None  # an HTTP status

    def create_repo(self, name: str, *, private: bool | None, exist_ok: bool) -> str:
        status = self.refuses or (409 if name in self.made and not exist_ok else None)
        if status is not None:
            raise HfHubHTTPError("no", response=httpx.Response(status, request=httpx.Request("POST", URL)))
        self.made[name] = private
        return f"{URL}/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **_: Any) -> None:
        (self.directory / repo_id).mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            shutil.copyfile(folder_path / name, self.directory / repo_id / name)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repositories:
    found = Repositories(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    monkeypatch.setattr(constants, "ENDPOINT", URL)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_transformers(tmp_path / "tiny", fair_esm(TINY), TINY)
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    (directory / ".secret").write_text("not part of the model")
    return directory


def test_a_model_is_pushed_and_again_only_if_asked(server: Repositories, model: Path) -> None:
    assert (push(str(model), NAME, private=True), server.made) == (f"{URL}/{NAME}", {NAME: True})
    there = server.directory / NAME
    files = {file.name: file.read_bytes() for file in model.iterdir() if file.name != ".secret"}
    assert {file.name: file.read_bytes() for file in there.iterdir()} == files
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Better\n")
    with pytest.raises(UsageError, match="--overwrite"):
        push(str(model), NAME)
    assert (there / "README.md").read_bytes() == files["README.md"]
    push(str(model), NAME, overwrite=True)
    assert (there / "README.md").read_bytes().endswith(b"# Better\n")


def test_what_is_no_model_for_others_is_refused_before_anything_is_sent(
    server: Repositories, model: Path, tmp_path: Path
) -> None:
    for server.refuses in (401, 500):
        with pytest.raises(InputError, match="HF_TOKEN"):
            push(str(model), NAME)
    server.refuses = None
    with pytest.raises(UsageError, match="mine: give OWNER/NAME"):
        push(str(model), "mine")
    with pytest.raises(InputError, match="not a model directory"):
        push(str(model / "model.safetensors"), NAME)
    (model / "esmshard.json").write_text(json.dumps({"files": {"model.safetensors": "0" * 64}}))
    with pytest.raises(InputError, match=r"model.safetensors: is not the file that .*esmshard.json records"):
        push(str(model), NAME)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/home/me/base"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="an adapter for /home/me/base, "):
        push(str(adapter), NAME)
    assert server.made == {}
