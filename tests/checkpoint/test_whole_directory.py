"""A directory appears complete or not at all, whenever the process dies or the machine loses its power."""

import os
import socket
import sys
from pathlib import Path

import pytest

from esmshard.io.paths import settle, whole_directory

sys.path.insert(0, str(Path(__file__).parent))
from drills import killed_at

FILES = ("config.json", "model.safetensors", "vocab.txt")


def make(directory: Path, text: str = "new", target: str = "model") -> None:
    with whole_directory(directory / target) as work:
        for name in FILES:
            (work / name).write_text(text * 100)


def contents(path: Path) -> str | None:
    """Return the text in all files of a complete directory; None if there is no directory."""
    if not os.path.lexists(path):
        return None
    assert sorted(file.name for file in path.iterdir()) == list(FILES)
    (text,) = {file.read_text() for file in path.iterdir()}
    assert text == text[:3] * 100
    return text[:3]


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("before", [None, "old"])
def test_killed_at_any_change(before: str | None, power_cut: bool, tmp_path: Path) -> None:
    found, seen = [], []
    for n in range(1, 100):
        directory = tmp_path / str(n)
        directory.mkdir()
        if before:
            make(directory, before)
        if not killed_at(n, directory, make, power_cut=power_cut):
            break
        model = directory / "model"
        seen.append(contents(model))
        if seen[-1] is None and before:
            assert contents(directory / ".old-model") == before
        settle(model)
        found.append(contents(model))
        assert sorted(p.name for p in directory.iterdir()) == (["model"] if found[-1] else [])
        make(directory, "abc")
        assert contents(model) == "abc"
    assert found[0] == before
    assert found == sorted(found, key=lambda text: text == "new")
    if before:
        assert set(found) == {"old", "new"}
        assert seen.count(None) == 1, "between the two renames"
    assert len(found) >= 8


def test_an_error_inside_or_a_rename_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse_work(self: Path, target: Path) -> None:
        if ".tmp-" in self.name and target.name == "model":
            raise OSError(5, "Input/output error", str(self))
        rename(self, target)

    make(tmp_path, "old")
    with pytest.raises(TypeError, match="must be str"):
        make(tmp_path, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(Path, "rename", refuse_work)
    with pytest.raises(OSError, match="Input/output"):
        make(tmp_path)
    assert contents(tmp_path / "model") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_only_what_dead_processes_of_this_machine_left_is_removed(tmp_path: Path) -> None:
    here = socket.gethostname()
    alive, own, dead = os.getppid(), os.getpid(), 2**22
    kept = [f".tmp-model-{here}-{alive}", ".tmp-model-elsewhere-1", f".tmp-model2-{here}-{dead}", ".tmp-model-x"]
    for name in (*kept, f".tmp-model-{here}-{dead}", f".tmp-model-{here}-{own}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    make(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "model"])
    settle(tmp_path / "nowhere" / "model")


def test_relative_names_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("sub/.."), "abc", "here/model")
    assert contents(tmp_path / "here" / "model") == "abc"
    make(tmp_path, "old")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "model")
    make(Path("here"), "new", "link")
    assert contents(tmp_path / "here" / "link") == "new"
    assert not (tmp_path / "here" / "link").is_symlink()
    assert contents(tmp_path / "model") == "old", "the target of the link stays"
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["link", "model"]
