"""A server on this machine that simulates S3 (moto keeps the objects in memory), with its faults."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from esmshard.io import remote

BUCKET = "proteins"
DENIED = {"AccessDenied": "403 Forbidden", "ExpiredToken": "400 Bad Request", "InvalidAccessKeyId": "403 Forbidden"}


class Buckets:
    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self.port = 0
        self.refuses = ""  # a key of DENIED, the answer to each request
        self.seen: list[tuple[str, str]] = []  # method and path of each request
        self.before: Callable[[str, str], None] = lambda method, path: None  # called before each answer

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        known = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret-of-someone"}
        return {**known, "AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1"}

    def _answer(self, environ: dict[str, Any], respond: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append((method, path))
        self.before(method, path)
        if self.refuses:
            text = f"<Error><Code>{self.refuses}</Code><Message>The request was refused</Message></Error>".encode()
            respond(DENIED[self.refuses], [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [b"" if method == "HEAD" else text]
        return self._moto(environ, respond)  # type: ignore[no-any-return]

    def names(self, below: str = "") -> set[str]:
        return {key for key in s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET].keys if key.startswith(below)}

    def get(self, name: str) -> bytes:
        value = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET].keys[name].value
        assert isinstance(value, bytes)
        return value

    def put(self, name: str, data: bytes) -> None:
        files().pipe_file(f"{BUCKET}/{name}", data)

    def delete(self, name: str) -> None:
        files().rm_file(f"{BUCKET}/{name}")


def files() -> Any:
    return fsspec.filesystem("s3", use_listings_cache=False)


def forget() -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    for cache in (remote._library, remote._copied):
        cache.cache_clear()


@contextmanager
def buckets() -> Iterator[Buckets]:
    """A server with one empty bucket, whose address is in the environment."""
    server, before = Buckets(), {**os.environ}
    server.start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(server.environment(), AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    forget()
    try:
        files().mkdir(BUCKET)
        yield server
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
        forget()
