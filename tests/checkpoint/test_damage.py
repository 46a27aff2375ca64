"""Every kind of damage to every file of a checkpoint: named, passed over, and gone after the next save."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError
from esmshard.files import sha256

sys.path.insert(0, str(Path(__file__).parent))
from drills import fork

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "state.json")


def value(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"rank{rank}.w": torch.full((60, 50), float(10 * step + rank))}


def write_two(directory: Path, meet: Path) -> int:
    """Checkpoints of steps 1 to 3 by two ranks; this one and a child of it."""
    rank = 0 if os.fork() else 1
    dist.init_process_group("gloo", store=dist.FileStore(str(meet), 2), rank=rank, world_size=2)
    for step in (1, 2, 3):
        sharded.write(directory, step, value(rank, step), {}, keep=3)
    if rank:
        os._exit(0)
    return os.wait()[1]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    assert fork(lambda: write_two(directory, directory.parent / "meet")) == 0
    assert sorted(path.name for path in (directory / "step_000003").iterdir()) == sorted([*FILES, "MANIFEST.json"])
    return directory


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def contents(path: Path) -> list[float]:
    found = {name: torch.empty(60, 50) for name in ("rank0.w", "rank1.w")}
    sharded.load(path, found)
    assert all(float(tensor.min()) == float(tensor.max()) for tensor in found.values())
    return [float(tensor.mean()) for tensor in found.values()]


def check(directory: Path, *bad: str) -> None:
    """Step 3 is damaged: each bad file is named, step 2 taken, and a run that goes on leaves no trace of it."""
    said: list[str] = []
    assert manifest.newest_good(directory, said.append) == directory / "step_000002"
    assert len(said) == 1
    for name in bad:
        assert f"{directory / 'step_000003' / name}: " in said[0]
    for name in {*FILES, "MANIFEST.json"} - set(bad):
        assert f"{directory / 'step_000003' / name}: " not in said[0]
    assert said[0].endswith("; going back to the checkpoint before it")
    with pytest.raises(InputError) as caught:
        manifest.locate(directory / "step_000003", said.append)
    assert all(name in str(caught.value) for name in bad)
    assert str(caught.value).endswith("; use another checkpoint of the run")
    assert contents(directory / "step_000002") == [20.0, 21.0]
    for later in manifest.named(directory):
        if later.name > "step_000002":
            manifest.set_aside(later, "damaged")
    sharded.write(directory, 3, value(0, 3) | value(1, 3), {}, keep=2)
    assert sorted(path.name for path in directory.iterdir()) == ["LATEST", "step_000002", "step_000003"]
    assert manifest.newest_good(directory, said.append) == directory / "step_000003"
    assert len(said) == 1
    assert contents(directory / "step_000003") == [30.0, 31.0]


def cut(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def change(path: Path, at: float, new: Callable[[bytes], bytes], size: int = 1) -> None:
    """Bytes of a file, from a part of its length on."""
    data = bytearray(path.read_bytes())
    begin = min(int(at * len(data)), len(data) - size)
    data[begin : begin + size] = new(bytes(data[begin : begin + size]))
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half of it": lambda path: cut(path, path.stat().st_size // 2),
    "without its last byte": lambda path: cut(path, -1),
    "empty": lambda path: cut(path, 0),
    "missing": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zeroed for 64 bytes": lambda path: change(path, 0.5, lambda old: bytes(len(old)), 64),
    "a bit at the begin": lambda path: change(path, 0, lambda old: bytes([old[0] ^ 128])),
    "a bit in the middle": lambda path: change(path, 0.5, lambda old: bytes([old[0] ^ 1])),
    "a bit at the end": lambda path: change(path, 1, lambda old: bytes([old[0] ^ 1])),
    "that of another step": lambda path: shutil.copy(path.parent.with_name("step_000001") / path.name, path),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file(directory: Path, file: str, how: str) -> None:
    DAMAGE[how](directory / "step_000003" / file)
    check(directory, file)


def test_files_of_two_ranks_changed_over(directory: Path) -> None:
    a, b = (directory / "step_000003" / name for name in FILES[:2])
    a.rename(a.with_name("x"))
    b.rename(a)
    a.with_name("x").rename(b)
    check(directory, *FILES[:2])


def test_a_link_or_a_directory_is_no_file(directory: Path) -> None:
    step = directory / "step_000003"
    (step / "__0_0.distcp").rename(directory.parent / "elsewhere")
    (step / "__0_0.distcp").symlink_to(directory.parent / "elsewhere")
    (step / "state.json").unlink()
    (step / "state.json").mkdir()
    check(directory, "__0_0.distcp", "state.json")


def test_all_bad_files_are_named(directory: Path) -> None:
    for file in FILES:
        cut(directory / "step_000003" / file, 0)
    check(directory, *FILES)


def test_a_file_that_nobody_asked_for_does_no_harm(directory: Path) -> None:
    (directory / "step_000003" / "__2_0.distcp").write_bytes(b"of a third rank")
    assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"
    assert contents(directory / "step_000003") == [30.0, 31.0]


@pytest.mark.parametrize("how", ["missing", "empty", "half of it", "zeroed", "without its last byte"])
def test_a_damaged_manifest(directory: Path, how: str) -> None:
    DAMAGE[how](directory / "step_000003" / "MANIFEST.json")
    check(directory, "MANIFEST.json")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"state.json": 3}}',
        '{"files": {"state.json": {"bytes": "x", "sha256": ""}}}',
        '{"files": {"state.json": {"bytes": 3}}}',
    ],
)
def test_a_manifest_of_another_kind(directory: Path, text: str) -> None:
    (directory / "step_000003" / "MANIFEST.json").write_text(text)
    check(directory, "MANIFEST.json")


@pytest.mark.parametrize("name", ["../step_000001/state.json", "/etc/hostname", "..", ".", "", "sub/state.json"])
def test_a_manifest_that_leads_out_of_its_directory(directory: Path, name: str) -> None:
    """Though what it leads to is as it says."""
    path = directory / "step_000003" / "MANIFEST.json"
    found = json.loads(path.read_text())
    (path.parent / "sub").mkdir()
    shutil.copy(path.with_name("state.json"), path.with_name("sub"))
    target = path.parent / name
    there = target.is_file()
    entry = {"bytes": target.stat().st_size, "sha256": sha256(target)} if there else {"bytes": 0, "sha256": ""}
    found["files"][name] = entry
    path.write_text(json.dumps(found))
    check(directory, "MANIFEST.json")
    with pytest.raises(AssertionError):  # the file itself is not read
        check(directory, name)


def test_nothing_good_is_left(directory: Path) -> None:
    cut(directory / "step_000001" / "state.json", 3)
    (directory / "step_000002" / "MANIFEST.json").unlink()
    cut(directory / "step_000003" / "__1_0.distcp", 3)
    said: list[str] = []
    with pytest.raises(InputError, match=r"every checkpoint is damaged; start again with --overwrite"):
        manifest.newest_good(directory, said.append)
    assert [file for text in said for file in (*FILES, "MANIFEST.json") if file in text] == [
        "__1_0.distcp",
        "MANIFEST.json",
        "state.json",
    ]


def test_two_steps_back(directory: Path) -> None:
    for step in ("step_000002", "step_000003"):
        cut(directory / step / "__0_0.distcp", 10)
    said: list[str] = []
    assert manifest.newest_good(directory, said.append) == directory / "step_000001"
    assert ["step_000003" in said[0], "step_000002" in said[1]] == [True, True]
    assert contents(directory / "step_000001") == [10.0, 11.0]


def test_pointers_that_lie_change_nothing(directory: Path) -> None:
    for text in ("step_000001\n", "step_000009\n", "", "../../etc", "\0", "LATEST"):
        (directory / "LATEST").write_text(text)
        assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"
    for text in ("step_000009\n", "", "../../etc", "\0", "LATEST"):
        (directory / "BEST").write_text(text)
        assert manifest.pointed(directory, "BEST") is None
    (directory / "LATEST").unlink()
    assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"


def test_what_has_not_the_name_of_a_checkpoint_is_none(directory: Path) -> None:
    for name in ("step_3", "step_000003.damaged", "step_000099x", ".tmp-step_000009", "step_00000a", "epoch_000004"):
        shutil.copytree(directory / "step_000001", directory / name)
    (directory / "step_000010").write_text("a file")
    assert manifest.newest_good(directory, pytest.fail) == directory / "step_000003"
    shutil.copytree(directory / "step_000001", directory / "step_1000000")  # sorted as numbers, not as text
    assert manifest.complete(directory)[-1] == directory / "step_1000000"


class Asked(BaseException):
    """A request to stop; no failure."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Asked])
def test_who_is_interrupted_while_loading_or_saving_is_not_told_of_damage(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(*rest: object) -> None:
        raise error

    monkeypatch.setattr(sharded.CheckpointReader, "read_data", interrupted)
    with pytest.raises(error):
        contents(directory / "step_000003")
    monkeypatch.setattr(sharded._Writer, "write_data", interrupted)
    with pytest.raises(error):
        sharded.write(directory, 4, value(0, 4), {}, keep=3)
    assert not [path for path in directory.iterdir() if path.name.startswith(".tmp")]
