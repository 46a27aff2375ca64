"""Damaged checkpoints are named, passed over, and gone after the next save. No file runs code."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError

sys.path.insert(0, str(Path(__file__).parent))
from drills import contents, fork, write

SHARDS = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
FILES = (*SHARDS, "state.json")


def write_two(directory: Path) -> int:
    """Write checkpoints of steps 1 to 3 on two ranks: this process and its child."""
    rank = 0 if os.fork() else 1
    store = dist.FileStore(str(directory.parent / "meet"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for step in (1, 2, 3):
        write(directory, step, keep=3)
    if rank:
        os._exit(0)
    return os.wait()[1]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    assert fork(lambda: write_two(directory)) == 0
    assert sorted(path.name for path in (directory / "step_000003").iterdir()) == sorted([*FILES, "MANIFEST.json"])
    return directory


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def check(directory: Path, *bad: str) -> None:
    """Step 3 is damaged: each bad file is named, step 2 is used, and the next save removes step 3."""
    said: list[str] = []
    assert manifest.newest_good(directory, said.append) == directory / "step_000002"
    assert len(said) == 1
    for name in {*FILES, "MANIFEST.json", *bad}:
        assert (name in said[0]) is (name in bad)
    with pytest.raises(InputError) as caught:
        manifest.locate(directory / "step_000003", said.append)
    assert all(name in str(caught.value) for name in bad)
    assert contents(directory / "step_000002") == 2
    manifest.set_aside(directory / "step_000003", "damaged")
    assert contents(write(directory, 3)) == 3
    assert sorted(path.name for path in directory.iterdir()) == ["LATEST", "step_000002", "step_000003"]


def change(path: Path, at: float) -> None:
    """Change a bit at a share of the file's length."""
    data = bytearray(path.read_bytes())
    data[min(int(at * len(data)), len(data) - 1)] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a bit at the begin": lambda path: change(path, 0),
    "a bit in the middle": lambda path: change(path, 0.5),
    "a bit at the end": lambda path: change(path, 1),
    "that of another step": lambda path: shutil.copy(path.parent.with_name("step_000001") / path.name, path),
}


def test_a_damaged_file(written: Path, directory: Path, tmp_path: Path) -> None:
    for file in (SHARDS[1], "state.json"):
        for how, damaged in DAMAGE.items():
            copy = shutil.copytree(written, tmp_path / file / how)
            damaged(copy / "step_000003" / file)
            check(copy, file)
    step = directory / "step_000003"  # a link or a directory is no file, and all bad files are named
    (step / SHARDS[0]).rename(directory.parent / "elsewhere")
    (step / SHARDS[0]).symlink_to(directory.parent / "elsewhere")
    (step / SHARDS[1]).write_bytes(b"")
    (step / "state.json").unlink()
    (step / "state.json").mkdir()
    check(directory, *FILES)


def test_tensors_that_the_manifest_does_not_name_are_damage(directory: Path) -> None:
    """torch's reader would take them for pieces of the checkpoint."""
    (directory / "step_000003" / "notes.txt").write_text("mine")
    assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"
    save_file({"w0": torch.zeros(40, 50)}, directory / "step_000003" / "more.safetensors")
    check(directory, "more.safetensors")


def test_a_damaged_manifest(directory: Path) -> None:
    path = directory / "step_000003" / "MANIFEST.json"
    texts = json.loads(path.read_text())
    for text in ("", "[]", '{"files": {}}', '{"files": {"state.json": {"bytes": 3}}}', None):
        path.write_text(text) if text is not None else path.unlink()
        said: list[str] = []
        assert manifest.newest_good(directory, said.append) == directory / "step_000002"
        assert "step_000003" in said[0]
    (path.parent / "sub").mkdir()
    shutil.copy(path.with_name("state.json"), path.with_name("sub"))
    for name in ("../step_000001/state.json", "/etc/hostname", "..", "", "sub/state.json"):
        target = path.parent / name
        entry = manifest.entry(target) if target.is_file() else {"bytes": 0, "sha256": ""}
        path.write_text(json.dumps({"files": texts["files"] | {name: entry}}))
        assert "missing from the checkpoint" in manifest.damage(path.parent), f"{name} leads out of the directory"


def test_wrong_pointers_and_other_names_change_nothing_until_all_are_damaged(directory: Path) -> None:
    for text in ("step_000009\n", "", "../../etc", "\0", "LATEST"):
        (directory / "LATEST").write_text(text)
        (directory / "BEST").write_text(text)
        assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"
        assert manifest.pointed(directory, "BEST") is None
    for name in ("step_3", "step_000003.damaged", "step_000099x", ".tmp-step_000009"):
        shutil.copytree(directory / "step_000001", directory / name)
    (directory / "step_000010").write_text("a file")
    assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"
    shutil.copytree(directory / "step_000001", directory / "step_1000000")  # sorted as numbers, not as text
    assert manifest.complete(directory)[-1] == directory / "step_1000000"
    shutil.rmtree(directory / "step_1000000")
    messages: list[str] = []
    for step in ("step_000003", "step_000002"):
        change(directory / step / SHARDS[0], 0.5)
    assert manifest.newest_good(directory, messages.append) == directory / "step_000001"
    assert ["step_000003" in messages[0], "step_000002" in messages[1]] == [True, True]
    (directory / "step_000001" / "MANIFEST.json").unlink()
    with pytest.raises(InputError, match="every checkpoint is damaged"):
        manifest.newest_good(directory, messages.append)


class Trap:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.path,)


def test_a_pickle_in_a_checkpoint_is_not_run(written: Path, tmp_path: Path) -> None:
    """The attacker may write a manifest that fits."""
    for name in (".metadata", "__0_0.distcp", "state.json", "MANIFEST.json", *SHARDS):
        step, called = shutil.copytree(written, tmp_path / name) / "step_000003", tmp_path / f"called {name}"
        (step / name).write_bytes(pickle.dumps(Trap(called)))
        if name != "MANIFEST.json":
            known = {path.name: manifest.entry(path) for path in step.iterdir() if path.name != "MANIFEST.json"}
            (step / "MANIFEST.json").write_text(json.dumps({"files": known}))
        if name in (".metadata", "__0_0.distcp"):
            assert contents(manifest.locate(step, pytest.fail)) == 3, "torch's other format is not read"
        else:
            with pytest.raises((ValueError, SafetensorError)):
                contents(manifest.locate(step, pytest.fail))
        assert not called.exists()
        pickle.loads((step / name).read_bytes())
        assert called.exists(), "the trap works"


def test_another_shape_or_type_is_refused(directory: Path) -> None:
    half, zeros = torch.zeros(40, 50, dtype=torch.float16), torch.zeros(40, 50)
    for name, tensor in (("w0", half), ("w0", torch.zeros(40, 51)), ("w0", torch.zeros(40)), ("w9", zeros)):
        with pytest.raises(InputError, match=f"does not fit this model: {name}"):
            sharded.load(directory / "step_000003", {name: tensor})


@pytest.mark.parametrize("row", [3, 1])
def test_pieces_that_leave_a_row_out_or_overlap_are_refused(tmp_path: Path, row: int) -> None:
    for n, first in enumerate((0, row)):
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [first, 0]}})}
        save_file({"w": torch.ones(2, 3)}, tmp_path / f"{n}.safetensors", metadata=info)
    size = HuggingFaceStorageReader(str(tmp_path)).read_metadata().state_dict_metadata["w"].size  # type: ignore[union-attr]
    with pytest.raises(InputError, match="missing or stored twice"):
        sharded.load(tmp_path, {"w": torch.zeros(size)})
