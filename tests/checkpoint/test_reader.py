"""The index of a checkpoint is a pickle, and is read as if an enemy had written it."""

import io
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Touch, plant
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError, UsageError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return sharded.write(tmp_path / "checkpoints", 1, {"w": torch.arange(6.0).view(2, 3)}, {}, keep=1)


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_what_a_pickle_would_call_is_not_called(checkpoint: Path, tmp_path: Path, where: str) -> None:
    trap = Touch(str(tmp_path / "called"))
    index = FileSystemReader(checkpoint).read_metadata()
    index.planner_data = trap
    (checkpoint / ".metadata").write_bytes(pickle.dumps(trap if where == "alone" else index))
    for read in (lambda: sharded.index(checkpoint), lambda: sharded.load(checkpoint, {"w": torch.zeros(2, 3)})):
        with pytest.raises(InputError, match=r"mkdir"):
            read()
    assert not (tmp_path / "called").exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert (tmp_path / "called").exists(), "the trap works"


def test_a_tensor_that_is_a_pickle_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    """torch's planner reads such an entry by `torch.load(weights_only=False)`."""
    plant(checkpoint, "w", Touch(str(tmp_path / "called")))
    manifest.verify(checkpoint)
    for read in (lambda: sharded.index(checkpoint), lambda: sharded.load(checkpoint, {"w": torch.zeros(2, 3)})):
        with pytest.raises(InputError, match=r"not the index of a checkpoint \(.*BytesStorageMetadata"):
            read()
    assert not (tmp_path / "called").exists()
    state_dict_loader.load({"w": torch.zeros(2, 3)}, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    assert (tmp_path / "called").exists(), "the trap works"


def test_torch_never_unpickles_even_if_the_index_lets_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(checkpoint, "w", Touch(str(tmp_path / "called")))
    monkeypatch.setattr(
        sharded.CheckpointReader, "read_metadata", lambda self: FileSystemReader(checkpoint).read_metadata()
    )
    with pytest.raises(InputError, match="w is stored as a pickle"):
        sharded.load(checkpoint, {"w": torch.zeros(2, 3)})
    assert not (tmp_path / "called").exists()


class Attribute:
    """Pickled as `getattr(holder, name)`."""

    def __init__(self, holder: Any, name: str) -> None:
        self.reduced = getattr, (holder, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


class EarlyPickler(pickle.Pickler):
    """As early releases of Python 3.11 pickle members of an Enum."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_an_index_of_an_early_python_is_read(checkpoint: Path) -> None:
    index = FileSystemReader(checkpoint).read_metadata()
    file = io.BytesIO()
    EarlyPickler(file).dump(index)
    assert b"getattr" in file.getvalue()
    (checkpoint / ".metadata").write_bytes(file.getvalue())
    (read,) = sharded.index(checkpoint).values()
    (known,) = index.state_dict_metadata.values()
    assert read == known
    tensors = {"w": torch.zeros(2, 3)}
    sharded.load(checkpoint, tensors)
    assert tensors["w"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("holder", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "__reduce__")]
)
def test_no_other_attribute_is_taken(checkpoint: Path, holder: Any, name: str) -> None:
    index = FileSystemReader(checkpoint).read_metadata()
    index.planner_data = Attribute(holder, name)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(InputError, match=rf"asks for .*{name}"):
        sharded.index(checkpoint)


def test_an_index_that_leads_out_of_its_directory_is_refused(checkpoint: Path) -> None:
    index = FileSystemReader(checkpoint).read_metadata()
    (info,) = index.storage_data.values()
    info.relative_path = "../elsewhere.distcp"
    index.storage_data = {MetadataIndex("w", torch.Size([0, 0])): info}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(InputError, match=r"names a file outside it \('../elsewhere.distcp'\)"):
        sharded.index(checkpoint)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [([0, 0], [1, 3])],
        [([0, 0], [2, 3]), ([1, 0], [1, 3])],
        [([0, 0], [1, 3]), ([0, 0], [1, 3])],
        [([0, 0], [2, 4])],
        [([0], [6])],
    ],
)
def test_an_index_that_leaves_numbers_out_is_refused(checkpoint: Path, chunks: list[Any]) -> None:
    found = FileSystemReader(checkpoint).read_metadata()
    found.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in chunks]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(InputError, match="numbers of w twice or not at all"):
        sharded.load(checkpoint, {"w": torch.zeros(2, 3)})


def test_chunks_in_two_dimensions_cover_a_tensor() -> None:
    chunks = [([a, b], [2, 3]) for a in (0, 2) for b in (0, 3)]
    assert sharded.covers([4, 6], [*chunks, ([4, 0], [0, 6])])
    assert not sharded.covers([4, 6], chunks[1:])
    assert sharded.covers([], [([], [])])


def test_a_tensor_of_another_type_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"w is \[2, 3\] in torch.float32"):
        sharded.load(checkpoint, {"w": torch.zeros(2, 3, dtype=torch.float16)})


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_what_is_no_index_is_one_sentence(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match=r"\.metadata: not the index of a checkpoint"):
        sharded.index(checkpoint)


def test_the_index_holds_no_path(checkpoint: Path) -> None:
    assert str(checkpoint.parent).encode() not in (checkpoint / ".metadata").read_bytes()
    assert b"pathlib" not in (checkpoint / ".metadata").read_bytes()


def test_another_users_checkpoint_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    said: list[str] = []
    for call in (
        lambda trust: manifest.newest_good(checkpoint.parent, said.append, trust=trust),
        lambda trust: manifest.locate(checkpoint, said.append, trust=trust),
    ):
        with pytest.raises(UsageError, match=rf"written by another user \(uid {me}, you are {me + 1}\).* pass --trust"):
            call(False)
        assert call(True) == checkpoint
    assert said == []
