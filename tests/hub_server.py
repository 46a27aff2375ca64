"""A server on this machine that simulates the Hugging Face hub with its faults, and caches with models."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

NAME = "esm2_t6_8M_UR50D"
COMMIT = "c0ffee" + 34 * "0"
WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".pth")
"""Endings of the files that the hub keeps in its large-file store and whose sha256 it announces."""


class Hub(ThreadingHTTPServer):
    """One repository. `files` is what is announced; the other fields are what goes wrong."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.repository = f"facebook/{NAME}"
        self.sent: dict[str, bytes] = {}  # bodies that differ from the announced bodies
        self.go = threading.Event()  # weights are sent when this is set
        self.go.set()
        self.asked: list[str] = []  # files and lists that were requested, without HEAD

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def siblings(self) -> list[dict[str, Any]]:
        listed = []
        for name, body in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(body)}
            if name.endswith(WEIGHTS):
                entry["lfs"] = {"sha256": sha256(body), "size": len(body), "pointerSize": 133}
            listed.append(entry)
        return listed


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        name = self._file()
        if name is None:
            return
        body = self.server.files[name]
        if name.endswith(WEIGHTS):  # the hub sends on to its store, and says what will be found there
            linked = {"X-Linked-Etag": f'"{sha256(body)}"', "X-Linked-Size": str(len(body)), "Location": self._store()}
            self._answer(302, b"", linked)
        else:
            self._answer(200, self.server.sent.get(name, body), {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/{self.server.repository}"):
            self.server.asked.append("list")
            listed = {"id": self.server.repository, "sha": COMMIT, "siblings": self.server.siblings()}
            self._answer(200, json.dumps(listed).encode())
        else:
            name = self._file()
            if name is not None:
                self.server.asked.append(name)
                if name.endswith(WEIGHTS):
                    self.server.go.wait(600)
                self._answer(200, self.server.sent.get(name, self.server.files[name]))

    def _store(self) -> str:
        """The client would follow a redirect to the same host."""
        return f"http://localhost:{self.server.server_port}{self.path}"

    def _file(self) -> str | None:
        name = self.path.removeprefix(f"/{self.server.repository}/resolve/main/")
        if name in self.server.files:
            return name
        self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        return None

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except OSError:
                pass  # the other side was killed


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both caches of this process, empty: torch hub's is `torch`, that of the hub is returned."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "hf" / "hub"


def snapshot(cache: Path, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """A snapshot in the hub's cache, as the library makes it where there are no links."""
    directory = cache / f"models--facebook--{NAME}" / "snapshots" / commit
    directory.mkdir(parents=True)
    for name, body in files.items():
        (directory / name).write_bytes(body)
    refs = directory.parent.parent / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(commit)
    return directory
