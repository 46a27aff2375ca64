"""Addresses in buckets: copies of inputs, errors in one sentence, and the commands that take an address."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bucket_server
import pytest
import typer
from bucket_server import BUCKET, Buckets
from model_files import TINY, fair_esm, write_transformers
from typer.testing import CliRunner

from esmshard.cli import app
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.paths import check_replaced
from esmshard.io.store import TokenStore
from esmshard.model import weights
from esmshard.recipe import recipe_file


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buckets]:
    with bucket_server.buckets() as server:
        monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield server


def again(url: str) -> Path:
    """Forget what this process has copied, as another process would."""
    remote._copied.cache_clear()
    return remote.local(url)


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app.app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def copied(server: Buckets) -> list[str]:
    """The objects that were read since the last call."""
    names = [path.removeprefix(f"/{BUCKET}/") for method, path in server.seen if method == "GET"]
    server.seen.clear()
    return [name for name in names if name and name != f"/{BUCKET}"]


def test_an_object_is_copied_once_and_again_when_it_changes(
    server: Buckets, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/in/x.fasta"
    server.put("in/x.fasta", b">a\nMKV\n")
    path = remote.local(Path(url))
    assert path.read_bytes() == b">a\nMKV\n"
    assert path.name == "x.fasta"
    assert f"{url}: is copied to {path}" in capsys.readouterr().err
    copied(server)
    written = path.stat().st_mtime_ns
    assert again(url).stat().st_mtime_ns == written
    assert copied(server) == []
    server.put("in/x.fasta", b">a\nMKL\n")
    assert again(url).read_bytes() == b">a\nMKL\n", "of the same length"
    path.write_bytes(b"cut")
    assert again(url).read_bytes() == b">a\nMKL\n"
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5))
    server.put("full", b"123456")
    with pytest.raises(InputError, match="ESMSHARD_CACHE"):
        remote.local(f"s3://{BUCKET}/full")


def test_a_directory_is_copied_and_follows_the_bucket(server: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("d/one", "d/sub/two", "d/three"):
        server.put(name, name.encode())
    path = remote.local(f"s3://{BUCKET}/d/")
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {"one", "sub/two", "three"}
    copied(server)
    server.put("d/one", b"other")
    server.delete("d/three")
    assert (again(f"s3://{BUCKET}/d") / "one").read_bytes() == b"other"
    assert [name for name in copied(server) if name.startswith("d/")] == ["d/one"]
    assert not (path / "three").exists()
    listing = {"../../evil": remote.Stored(4, "tag")}
    monkeypatch.setattr(remote.RemoteDirectory, "listing", lambda self, folder="": listing)
    with pytest.raises(InputError, match="would lie outside the cache"):
        again(f"s3://{BUCKET}/d")


def test_a_store_is_compared_with_its_manifest(server: Buckets, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">a\nMKVL\n>b\nMKVV\n")
    url = f"s3://{BUCKET}/store"
    assert "2 records" in command("ingest", "x.fasta", "-o", url)
    last = [path for method, path in server.seen if method == "PUT"][-1]
    assert last == f"/{BUCKET}/store/manifest.json"
    assert len(TokenStore(remote.local(url))) == 2
    name = next(name for name in server.names("store/") if "tokens" in name)
    data = bytearray(server.get(name))
    data[1] ^= 1
    server.put(name, bytes(data))
    with pytest.raises(InputError, match="has changed since it was written"):
        TokenStore(again(url)).verify()
    with pytest.raises(UsageError, match="--overwrite"):
        command("ingest", "x.fasta", "-o", url)
    command("ingest", "x.fasta", "-o", url, "--overwrite")
    assert len(TokenStore(again(url))) == 2


def test_models_and_recipes_at_addresses(server: Buckets, tmp_path: Path) -> None:
    model = write_transformers(tmp_path / "m", fair_esm(TINY, 0), TINY)
    for file in model.iterdir():
        server.put(f"run/model/{file.name}", file.read_bytes())
    server.put("run/checkpoints/step_000001/big", b"not needed")
    server.put("x.fasta", b">a\nMKV\n")
    server.put("x.npz", b"labels")
    assert weights.read(f"s3://{BUCKET}/run").config == weights.read(str(model)).config
    assert not list((tmp_path / "cache").rglob("big"))
    path = remote.data_file(f"s3://{BUCKET}/x.fasta")
    assert path.with_suffix(".npz").read_bytes() == b"labels"
    keys = [f"data.train=s3://{BUCKET}/x.fasta", f"model.name=s3://{BUCKET}/run"]
    recipe = recipe_file.load(recipe_file.resolve("contact"), keys)
    assert (recipe.data.train, recipe.model.name) == (f"s3://{BUCKET}/x.fasta", f"s3://{BUCKET}/run")


def test_what_is_refused_or_missing_is_one_sentence(server: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    place = remote.RemoteDirectory(f"s3://{BUCKET}/x")
    for refuses in ("AccessDenied", "InvalidAccessKeyId", "ExpiredToken"):
        server.refuses = refuses
        for do in (place.listing, lambda: place.read("y"), lambda: place.write("y", b"")):
            with pytest.raises(InputError, match=rf"^s3://{BUCKET}/x: .*AWS_ACCESS_KEY_ID") as caught:
                do()
            assert "secret-of-someone" not in str(caught.value)
    server.refuses = ""
    for url in (f"s3://{BUCKET}/nothing.fasta", "s3://nobody/x"):
        with pytest.raises(InputError, match=f"{url}: there is no such object"):
            remote.local(url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket_server.forget()
    with pytest.raises(InputError, match="look at the credentials"):
        place.write("y", b"")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "s3fs", None)
        without.delitem(sys.modules["fsspec.registry"]._registry, "s3")
        remote._library.cache_clear()
        with pytest.raises(InputError, match=r"pip install 'esmshard\[cloud\]'"):
            remote.local(f"s3://{BUCKET}/x")


def test_no_result_is_lost(server: Buckets, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("hours of work")
        server.refuses = "AccessDenied"

    with pytest.raises(InputError, match="the result is saved in"):
        remote.write_at(f"s3://{BUCKET}/x.csv", False, write)
    (kept,) = (tmp_path / "cache" / "not-uploaded").iterdir()
    assert (kept / "x.csv").read_text() == "hours of work"
    server.refuses = ""
    server.put("result/thesis.txt", b"years of work")
    url = f"s3://{BUCKET}/result"
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        remote.write_at(url, True, lambda out: check_replaced(out, ["*.safetensors"]))
    remote.write_at(url, True, lambda out: (out / "evaluation.json").write_text("{}") and None)
    assert server.get("result/thesis.txt") == b"years of work"
    assert server.get("result/evaluation.json") == b"{}"

    def predict(**values: Any) -> None:
        values["out"].write_text("one record failed")
        raise typer.Exit(1)

    with pytest.raises(typer.Exit):  # as --strict leaves
        app.with_addresses(predict, {"out": Path(f"s3://{BUCKET}/strict.csv")})
    assert server.get("strict.csv") == b"one record failed"


def test_lists_of_an_earlier_file_do_not_stay_beside_a_new_one(server: Buckets) -> None:
    names = ["x.h5", "x.h5.chains.tsv", "x.h5.failed.tsv"]
    remote.write_at(f"s3://{BUCKET}/new.h5", False, lambda out: out.write_text("") and None)
    assert "DELETE" not in {method for method, _ in server.seen}, "for which there may be no right"
    server.delete("new.h5")
    for name in names:
        server.put(name, b"old")
    remote.write_at(
        f"s3://{BUCKET}/x.h5", True, lambda out: [out.with_name(n).write_text("") for n in names[:2]] and None
    )
    assert sorted(server.names()) == names[:2]


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    for url in ("s3://KEY:hunter2@bucket/x", "s3://hunter2@bucket/x", "gs://bucket/x?token=hunter2", "s3:/a:hunter2@b"):
        with pytest.raises(UsageError, match="may hold no credentials") as caught:
            remote.address(url)
        assert "hunter2" not in str(caught.value)


def test_commands_that_take_no_address_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, token in (
        ("finetune s3://b/x.yaml", "`esmshard finetune` needs a path on a disk for recipe, not a bucket"),
        ("finetune contact out=s3://b/run", "out: a run needs a directory on a disk.*s3://b/run"),
        ("predict m x.fasta -o x.npz --png s3://b/x", "needs a path on a disk for png"),
        ("status gs://b/run", "needs a path on a disk for run"),
        ("embeddings status s3://b/out", "s3://b/out: status reads a directory on a disk"),
        ("embed starter x -o s3://b/x --engine ray", "--engine ray writes to a disk that all nodes see"),
    ):
        with pytest.raises(UsageError, match=token):
            command(*arguments.split())
    assert not list(tmp_path.iterdir()), "no directory s3: is made"


def test_a_run_that_was_copied_to_a_bucket_goes_on_from_there(server: Buckets, tiny_recipe: Path) -> None:
    run = tiny_recipe.parent / "run"
    arguments = ["finetune", str(tiny_recipe), "train.steps=2", "checkpoint.every=1", "--no-report"]
    command(*arguments)
    for file in (run / "checkpoints").rglob("*"):
        if file.is_file():
            server.put(f"run/{file.relative_to(run)}", file.read_bytes())
    name = next(name for name in server.names("run/checkpoints/step_000002/") if name.endswith(".safetensors"))
    data = bytearray(server.get(name))
    data[len(data) // 2] ^= 1
    server.put(name, bytes(data))
    output = command(*arguments, f"out={run}2", "--resume", f"s3://{BUCKET}/run")
    assert "going back to the checkpoint before it" in output
    assert "going on after step 1 of 2" in output
    files = [Path(place, "metrics.jsonl").read_text().splitlines() for place in (run, f"{run}2")]
    steps = [[line for line in map(json.loads, lines) if "lr" in line] for lines in files]
    once, resumed = ([(line["step"], line["loss"]) for line in lines] for lines in steps)
    assert len(resumed) == 1
    assert resumed == once[1:]
    command("consolidate", f"s3://{BUCKET}/run/checkpoints/step_000001", "-o", f"s3://{BUCKET}/model")
    assert "model/model.safetensors" in server.names()
