"""Embeddings in a bucket of moto's server, as on a disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bucket_server
import numpy as np
import pytest
from bucket_server import BUCKET, Buckets
from embed_runs import content, write_fasta, write_model

from esmshard.embed import engines
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


def embed(model: Path, fasta: Path | str, out: Path | str, **how: Any) -> dict[str, Any] | None:
    return engines.embed(request(str(model), Path(out)), Path(fasta), part_tokens=PART, **how)


def same_as_on_a_disk(server: Buckets, model: Path, fasta: Path, directory: Path) -> None:
    """Compare everything at `out` of the bucket with what an uninterrupted run writes to a disk."""
    embed(model, fasta, directory / "disk" / "out")
    for name in server.names("out"):
        copied = directory / "copied" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(server.get(name))
    assert content(directory / "copied" / "out") == content(directory / "disk" / "out")


def uploads(server: Buckets) -> list[str]:
    """The numbers of the parts that were uploaded, in order."""
    paths = [path for method, path in server.seen if method == "PUT" and path.endswith(".safetensors")]
    return [path.rpartition("/")[2].partition("-")[0] for path in paths]


def test_a_bucket_holds_what_a_disk_would(server: Buckets, model: Path, fasta: Path, tmp_path: Path) -> None:
    server.put("in/x.fasta", fasta.read_bytes())
    url = f"s3://{BUCKET}/out"
    manifest = embed(model, f"s3://{BUCKET}/in/x.fasta", url)
    assert manifest is not None
    assert (manifest["records"], manifest["computed"]) == (120, 108)
    same_as_on_a_disk(server, model, fasta, tmp_path)
    assert not list((tmp_path / "cache" / "uploads").iterdir())
    server.seen.clear()
    embed(model, fasta, url)
    assert not uploads(server), "it was finished"
    embed(model, fasta, url, overwrite=True)
    assert uploads(server)
    server.seen.clear()
    for worker in ("1/3", "0/3"):  # The third worker never begins, and the first worker computes its parts.
        assert (embed(model, fasta, f"{url}-2", engine="array", worker=worker) is None) == (worker == "1/3")
    assert sorted(uploads(server)) == sorted(set(uploads(server))), "each part was computed once"
    with pytest.raises(UsageError, match="embeddings merge"):
        embed(model, fasta, f"{url}.npy")
    for place, name in ((url, "x.npy"), (f"{url}-2", "y.npy")):
        engines.merge(Path(place), tmp_path / name, None, overwrite=False)
    assert len(np.load(tmp_path / "x.npy")) == 120
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.load(tmp_path / "y.npy"))


def interrupt(server: Buckets, model: Path, fasta: Path, parts_done: int) -> None:
    """Leave an unfinished output with this number of parts."""

    def before(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(".safetensors") and len(uploads(server)) > parts_done:
            server.refuses = "AccessDenied"

    server.before = before
    with pytest.raises(InputError, match="look at the credentials"):
        embed(model, fasta, f"s3://{BUCKET}/out")
    server.before, server.refuses = lambda method, path: None, ""


def test_interrupted_during_an_upload_and_continued_on_another_machine(
    server: Buckets, model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was lost, or that belongs to another plan, is computed, too."""
    interrupt(server, model, fasta, 3)
    missing, *kept = sorted(name for name in server.names("out/parts/") if name.endswith(".safetensors"))
    assert len(kept) == 2
    assert "out/manifest.json" not in server.names()
    with pytest.raises(InputError, match=r"s3://proteins/out: is no finished directory"):
        EmbeddingStore(f"s3://{BUCKET}/out")
    server.delete(missing)
    server.put("out/parts/000001-12345678.safetensors", b"of another plan")
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "another machine"))
    server.seen.clear()
    embed(model, fasta, f"s3://{BUCKET}/out")
    assert "000000" in uploads(server)
    assert not set(uploads(server)) & {"000001", "000002"}, "finished parts are not computed again"
    same_as_on_a_disk(server, model, fasta, tmp_path)
    assert not [name for name in server.names("out/") if "/work/" in name]


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
    others = ("out/thesis.pdf", "out/parts/a.csv", "mine/parts/a.csv", "mine/manifest.json", "mine/plan.json")
    for name in others:
        server.put(name, b'{"mine": 1}')
    embed(model, other, f"s3://{BUCKET}/out", overwrite=True)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"mine: .*\(it contains "):
            embed(model, other, f"s3://{BUCKET}/mine", overwrite=overwrite)
    assert [server.get(name) for name in others] == [b'{"mine": 1}'] * len(others)
    assert EmbeddingStore(f"s3://{BUCKET}/out").manifest["records"] == 20
