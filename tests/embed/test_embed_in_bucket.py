"""Embeddings in a bucket: the same drills as on a disk. The server is moto's, in `bucket_server`."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bucket_server
import pytest
from bucket_server import BUCKET, Buckets
from embed_runs import Run, content, write_fasta, write_model

from esmshard.embed import engines
from esmshard.embed.engines import EmbedReport
from esmshard.embed.parts import EmbeddingStore
from esmshard.embed.spec import request
from esmshard.errors import InputError, UsageError

PART = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def fasta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fasta(tmp_path_factory.mktemp("fasta") / "x.fasta", 120)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buckets]:
    with bucket_server.buckets() as server:
        monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
        yield server


def embed(model: Path, fasta: Path | str, out: Path | str, **how: Any) -> EmbedReport:
    return engines.embed(request(str(model), Path(out)), Path(fasta), part_tokens=PART, **how)


def same_as_on_a_disk(server: Buckets, model: Path, fasta: Path, directory: Path, name: str = "out") -> None:
    """Compare everything at `name` of the bucket with what an uninterrupted run writes to a disk."""
    on_disk, copied = directory / "disk" / name, directory / "copied" / name
    on_disk.parent.mkdir()
    embed(model, fasta, on_disk)
    copied.parent.mkdir()
    folder = name.rpartition(".")[0] or name
    for key in server.names(folder):
        copied.parent.joinpath(key).parent.mkdir(parents=True, exist_ok=True)
        copied.parent.joinpath(key).write_bytes(server.get(key))
    assert content(copied) == content(on_disk)


def parts(server: Buckets) -> list[str]:
    return sorted(name for name in server.names("out/parts/") if name.endswith(".safetensors"))


def uploads(server: Buckets) -> list[str]:
    """The numbers of the parts that were uploaded, in order."""
    paths = [path for method, path in server.seen if method == "PUT" and path.endswith(".safetensors")]
    return [path.rpartition("/")[2].partition("-")[0] for path in paths]


@pytest.mark.parametrize("name", ["out", "out.npy"])
def test_a_bucket_holds_what_a_disk_would(server: Buckets, model: Path, fasta: Path, tmp_path: Path, name: str) -> None:
    server.put("in/x.fasta", fasta.read_bytes())
    source = f"s3://{BUCKET}/in/x.fasta" if name == "out" else fasta
    report = embed(model, source, f"s3://{BUCKET}/{name}")
    assert str(report).startswith(f"s3://{BUCKET}/{name}: 120 records; 108 sequences computed")
    same_as_on_a_disk(server, model, fasta, tmp_path, name)
    assert not list((tmp_path / "cache" / "uploads").iterdir())
    server.seen.clear()
    embed(model, fasta, f"s3://{BUCKET}/{name}")
    assert not uploads(server), "it was finished"
    embed(model, fasta, f"s3://{BUCKET}/{name}", overwrite=True)
    assert uploads(server)


def test_killed_during_an_upload_and_continued_on_another_machine(
    server: Buckets, model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, killed = threading.Event(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(".safetensors") and len(uploads(server)) == 3:
            reached.set()
            killed.wait(60)

    server.before = before
    run = Run("embed", model, fasta, "-o", f"s3://{BUCKET}/out", folder=tmp_path / "said", part_tokens=PART)
    assert reached.wait(600), run.said
    assert run.kill("group")
    killed.set()
    server.before = lambda method, path: None
    assert len(parts(server)) == 2
    assert "out/manifest.json" not in server.names()
    with pytest.raises(InputError, match=r"s3://proteins/out: is no finished directory"):
        EmbeddingStore(f"s3://{BUCKET}/out")
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "another machine"))
    server.seen.clear()
    embed(model, fasta, f"s3://{BUCKET}/out")
    assert not set(uploads(server)) & {"000000", "000001"}, "what was finished is not computed again"
    same_as_on_a_disk(server, model, fasta, tmp_path)
    assert not [name for name in server.names("out/") if "/work/" in name]


def interrupt(server: Buckets, model: Path, fasta: Path, parts_done: int) -> None:
    """Leave an unfinished output with so many parts."""

    class Over(Exception):
        pass

    def before(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(".safetensors") and len(uploads(server)) > parts_done:
            server.refuses = "AccessDenied"

    server.before = before
    with pytest.raises(InputError, match="look at the credentials"):
        embed(model, fasta, f"s3://{BUCKET}/out")
    server.before, server.refuses = lambda method, path: None, ""
    server.seen.clear()


def test_parts_that_are_gone_or_of_another_plan_are_computed(
    server: Buckets, model: Path, fasta: Path, tmp_path: Path
) -> None:
    interrupt(server, model, fasta, 4)
    missing, kept, *_ = parts(server)
    server.delete(missing)
    server.put(f"out/parts/{kept.rpartition('/')[2].partition('-')[0]}-12345678.safetensors", b"of another plan")
    server.seen.clear()
    embed(model, fasta, f"s3://{BUCKET}/out")
    assert "000000" in uploads(server)
    assert "000001" not in uploads(server)
    same_as_on_a_disk(server, model, fasta, tmp_path)


def test_a_server_that_is_gone_and_comes_back(server: Buckets, model: Path, fasta: Path, tmp_path: Path) -> None:
    gone = threading.Event()

    def before(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(".safetensors") and len(uploads(server)) == 3 and not gone.is_set():
            gone.set()
            threading.Thread(target=server.stop).start()
            raise ConnectionAbortedError

    server.before = before
    with pytest.raises(InputError, match="look at the credentials"):
        embed(model, fasta, f"s3://{BUCKET}/out")
    assert gone.is_set()
    server.before = lambda method, path: None
    server.start()
    server.seen.clear()
    embed(model, fasta, f"s3://{BUCKET}/out")
    assert not set(uploads(server)) & {"000000", "000001"}
    same_as_on_a_disk(server, model, fasta, tmp_path)


def test_workers_of_an_array_write_one_output(server: Buckets, model: Path, fasta: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"folder": tmp_path / "said", "part_tokens": PART}
    for worker in ("1/3", "0/3"):  # The third worker never begins, and the first one computes its parts.
        arguments = "embed", model, fasta, "-o", f"s3://{BUCKET}/out", "--engine", "array", "--worker", worker
        run = Run(*arguments, **how)
        assert run.wait() == 0, run.said
    assert sorted(uploads(server)) == sorted(set(uploads(server))), "each part was computed once"
    same_as_on_a_disk(server, model, fasta, tmp_path)


def test_another_request_and_another_input_are_refused(
    server: Buckets, model: Path, fasta: Path, tmp_path: Path
) -> None:
    interrupt(server, model, fasta, 2)
    other = write_fasta(tmp_path / "other.fasta", 20, seed=1)
    with pytest.raises(UsageError, match=r"s3://proteins/out: was begun with another input"):
        embed(model, other, f"s3://{BUCKET}/out")
    asked = request(str(model), Path(f"s3://{BUCKET}/out"), pools=["max"])
    with pytest.raises(UsageError, match=r"s3://proteins/out: was begun with .*; --overwrite starts over"):
        engines.embed(asked, fasta)
    server.put("out/thesis.pdf", b"%PDF")
    embed(model, other, f"s3://{BUCKET}/out", overwrite=True)
    assert server.get("out/thesis.pdf") == b"%PDF"
    assert EmbeddingStore(f"s3://{BUCKET}/out").manifest["records"] == 20
