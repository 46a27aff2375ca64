"""`esmshard push`: the library of the hub uploads to a server on this machine, from which the model is read again."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import WEIGHTS, Hub, own_caches
from huggingface_hub import constants
from model_files import TINY, fair_esm, write_transformers

from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.export import push

NAME = "me/contacts"


class Repositories(ThreadingHTTPServer):
    """The part of the hub that takes uploads: small files in the commit, large files in a store that checks sha256."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Upload)
        self.made: dict[str, str] = {}
        """Visibility of each repository."""
        self.store: dict[str, bytes] = {}
        self.commits: list[dict[str, bytes]] = []
        self.answers = 200
        """Status of the answers to `create`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Upload(BaseHTTPRequestHandler):
    server: Repositories

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == f"/api/models/{NAME}/preupload/main":
            self._answer({"files": [_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif self.path == f"/{NAME}.git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            there = {"transfer": "basic", "objects": [self._action(one) for one in wanted]}
            self._answer(there)
        elif self.path == f"/api/models/{NAME}/commit/main":
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer({}, 404)

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        right = hashlib.sha256(body).hexdigest() == oid
        if right:
            self.server.store[oid] = body
        self._answer({}, 200 if right else 400)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        status = self.server.answers if self.server.answers != 200 else 409 if name in self.server.made else 200
        if status == 200:
            self.server.made[name] = asked.get("visibility", "public")
        self._answer({"url": f"{self.server.url}/{name}", "error": "no"}, status)

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.server.url}/store/{wanted['oid']}"}
        return {**wanted, **({} if wanted["oid"] in self.server.store else {"actions": {"upload": upload}})}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.store[value["oid"]]
        self.server.commits.append(files)
        self._answer({"success": True, "commitOid": "c0ffee", "commitUrl": f"{self.server.url}/{NAME}/commit/c0ffee"})

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _mode(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "lfs" if path.endswith(WEIGHTS) else "regular", "shouldIgnore": False}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repositories]:
    own_caches(tmp_path, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Its store cannot stand on another machine.
    with Repositories() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running
        running.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_transformers(tmp_path / "tiny", fair_esm(TINY), TINY)
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    (directory / ".secret").write_text("not part of the model")
    return directory


def test_what_was_pushed_is_read_by_name(
    server: Repositories, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(str(model), NAME, private=True) == f"{server.url}/{NAME}"
    assert server.made == {NAME: "private"}
    said = capsys.readouterr().err
    assert re.match(rf"{NAME}: uploading [\d.]+ \S+ to {server.url}: README.md, config.json, model.safetensors", said)
    (files,) = server.commits
    assert files == {file.name: file.read_bytes() for file in model.iterdir() if file.name != ".secret"}
    # The other half of the hub serves what this half took.
    with Hub(files) as hub:
        hub.repository = NAME
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        again, before = weights.read(NAME), weights.read(str(model))
        assert all(torch.equal(again[name], before[name]) for name in before.read)
        hub.shutdown()


def test_a_repository_that_exists_gets_a_commit_only_if_asked(server: Repositories, model: Path) -> None:
    push(str(model), NAME)
    with pytest.raises(
        UsageError, match=f"^{NAME}: exists already on {server.url}; choose another name or pass --over"
    ):
        push(str(model), NAME)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Better\n")
    push(str(model), NAME, overwrite=True)
    assert [commit["README.md"].endswith(b"# Better\n") for commit in server.commits] == [False, True]


@pytest.mark.parametrize(
    ("status", "says"), [(401, "HF_TOKEN set to a token"), (403, "HF_TOKEN set to a token"), (500, "failed")]
)
def test_what_the_hub_refuses_is_one_sentence(server: Repositories, model: Path, status: int, says: str) -> None:
    server.answers = status
    with pytest.raises(InputError, match=says) as raised:
        push(str(model), NAME)
    assert "\n" not in str(raised.value)
    assert server.commits == []


def test_what_is_no_model_for_others_is_refused_before_anything_is_sent(
    server: Repositories, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="mine: OWNER/NAME is expected"):
        push(str(model), "mine")
    with pytest.raises(InputError, match="is not the directory of a model"):
        push(str(model / "model.safetensors"), NAME)
    (model / "esmshard.json").write_text(json.dumps({"files": {"model.safetensors": "0" * 64}}))
    with pytest.raises(InputError, match=r"model.safetensors: is not the file that .*esmshard.json records"):
        push(str(model), NAME)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 1, "base_model_name_or_path": "/home/me/base"})
    )
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="is an adapter of /home/me/base, which others do not have; push the whole"):
        push(str(adapter), NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (model / "esmshard.json").unlink()
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        push(str(model), NAME)
    assert server.made == {}
