"""What goes wrong around `esmshard embed`: one sentence each, and the same command goes on from what is finished."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from embed_runs import Run, content, write_fasta, write_model
from safetensors import SafetensorError

from esmshard.embed import parts
from esmshard.embed.compute import Work, compute_part
from esmshard.embed.engines import EmbedReport, embed
from esmshard.embed.parts import begin, partial
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import FORMATS

PART = 2000
RECORDS = 300


class Given(NamedTuple):
    model: Path
    fasta: Path
    whole: dict[str, dict[str, object]]
    """What a run without faults writes, by the name of the output."""

    def embed(self, out: Path, fasta: Path | None = None, *, model: Path | None = None, **options: Any) -> EmbedReport:
        """Options of the request are told from those of the run."""
        asked = ("fmt", "pools", "layers", "dtype", "precision", "long")
        wanted = request(str(model or self.model), out, **{k: options.pop(k) for k in asked if k in options})
        return embed(wanted, fasta or self.fasta, part_tokens=PART, **options)

    def computed(self, out: Path, most: int | None = None, pool: str = "") -> Path:
        """`OUT.partial` with all parts, or the first ones, as a run leaves it that is killed before it writes `out`."""
        asked = request(str(self.model), out, pools=[pool] if pool else [])
        directory = partial(out)
        plan = begin(directory, self.fasta, asked, part_tokens=PART)
        work = Work(directory, directory / "work" / "input", str(self.model), "cpu", None)
        for part in range(len(plan["bounds"]) - 1 if most is None else most):
            compute_part(work, part)
        return directory


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    directory = tmp_path_factory.mktemp("given")
    found = Given(write_model(directory / "model"), write_fasta(directory / "x.fasta", RECORDS, longest=120), {})
    for name in ("x.npy", "x"):
        out = directory / f"whole-{name}" / name
        found.embed(out)
        found.whole[name] = content(out)
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def state(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and bytes of every file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def inodes(directory: Path) -> dict[str, int]:
    """Of the files of finished parts, by name."""
    return {path.name: path.stat().st_ino for path in (directory / "parts").glob("[0-9]*.safetensors")}


def kept(before: dict[str, int], out: Path) -> bool:
    """Whether the files of parts that were finished then are those of the product."""
    return all((out / "parts" / name).stat().st_ino == inode for name, inode in before.items())


# --- Disks


def test_a_disk_that_is_full_in_the_middle(given: Given, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, save = 3, parts.save_file

    def until_full(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        save(*arguments)
        if left < 0:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(parts, "save_file", until_full)
    with pytest.raises(
        InputError, match=r"x\.partial: cannot be written \(no space left on device\); what is finished"
    ):
        given.embed(out / "x")
    monkeypatch.undo()
    before = inodes(out / "x.partial")
    assert len(before) == 3
    assert len(list((out / "x.partial" / "parts").iterdir())) == 3, "no room is taken in vain"
    given.embed(out / "x")
    assert kept(before, out / "x")
    assert content(out / "x") == given.whole["x"]


Mount = Callable[..., None]


@pytest.fixture
def disk(out: Path) -> Iterator[Mount]:
    """Makes `out` a disk of its own, of so many KiB, or changes it."""

    def mount(kib: int, *options: str) -> None:
        again = ["remount"] if os.path.ismount(out) else []
        options = (f"size={kib}k", *again, *options)
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(out)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no disk can be mounted here")

    if shutil.which("mount") is None or shutil.which("umount") is None:
        pytest.skip("no disk can be mounted here")
    yield mount
    if os.path.ismount(out):
        subprocess.run(["umount", "-l", out], check=True)


def sentence(run: Run) -> str:
    """What a command that failed said."""
    assert run.wait() in (1, 2), run.said
    assert "Traceback" not in run.said
    (one,) = [line for line in run.said.splitlines() if line.startswith("error: ")]
    return one


@pytest.mark.parametrize("kib", [4, 40, 80, 120])
def test_a_disk_of_any_size(given: Given, tmp_path: Path, out: Path, disk: Mount, kib: int) -> None:
    disk(kib)
    arguments = "embed", given.model, given.fasta, "-o", out / "x.npy"
    said = sentence(Run(*arguments, folder=tmp_path / "said", part_tokens=PART))
    assert "cannot be written (no space left on device)" in said or " are free; make room" in said
    disk(4000)
    run = Run(*arguments, folder=tmp_path / "said", part_tokens=PART)
    assert run.wait() == 0, run.said
    assert content(out / "x.npy") == given.whole["x.npy"]


# The HDF5 library itself may crash when a write fails, so its formats are only refused beforehand.
@pytest.mark.parametrize("name", [f"x.{fmt}" for fmt in FORMATS if not fmt.startswith(("h5", "biotrainer"))])
def test_a_disk_that_is_full_when_the_file_is_written(
    given: Given, out: Path, disk: Mount, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    disk(4000)
    directory = given.computed(out / name, pool="mean")
    before = inodes(directory)
    usage = shutil.disk_usage(out)
    (out / "ballast").write_bytes(bytes(usage.free - 30_000))
    with pytest.raises(InputError, match=r"MB will be written and 0.0\d MB are free; make room"):
        given.embed(out / name, pools=["mean"])
    # Somebody else takes the room while it is written.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    with pytest.raises(
        InputError, match=r"cannot be written \(no space left on device\); what is finished stays there"
    ):
        given.embed(out / name, pools=["mean"])
    assert sorted(path.name for path in out.iterdir()) == sorted(["ballast", directory.name])
    assert inodes(directory) == before
    (out / "ballast").unlink()
    given.embed(out / name, pools=["mean"])
    given.embed(out.parent / "fresh" / name, pools=["mean"])
    assert content(out / name) == content(out.parent / "fresh" / name)


def test_a_disk_that_cannot_be_written_to(given: Given, tmp_path: Path, out: Path, disk: Mount) -> None:
    disk(4000)
    directory = given.computed(out / "x.npy", most=2)
    disk(4000, "ro")
    before = state(out)
    for name, options in (("y.npy", ()), ("y", ()), ("x.npy", ()), ("x.npy", ("--overwrite",))):
        arguments = "embed", given.model, given.fasta, "-o", out / name, *options
        said = sentence(Run(*arguments, folder=tmp_path / "said", part_tokens=PART))
        assert "read-only file system" in said
        assert state(out) == before
    disk(4000, "rw")
    finished = inodes(directory)
    assert len(finished) == 2
    given.embed(out / "x.npy")
    assert content(out / "x.npy") == given.whole["x.npy"]


# --- What is asked for, and of what


def test_an_input_that_changed_is_refused_and_a_touched_one_is_not(given: Given, tmp_path: Path, out: Path) -> None:
    fasta = Path(shutil.copy(given.fasta, tmp_path / "x.fasta"))
    mine = given._replace(fasta=fasta)
    before = inodes(mine.computed(out / "x", most=2))
    text = fasta.read_text()
    for changed in (text.replace(">r00007 ", ">s00007 "), text + ">new\nMKT\n", text[: text.rindex(">")]):
        fasta.write_text(changed)
        with pytest.raises(UsageError, match=r"x\.partial: was begun with another input "):
            mine.embed(out / "x")
    fasta.write_text(text)
    os.utime(fasta, (1, 1))
    mine.embed(out / "x")
    assert kept(before, out / "x")
    assert content(out / "x") == given.whole["x"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layers": [1]}, "--layers .mean_2, and now mean_1"),
        ({"layers": [1, 2]}, "--layers .mean_2, and now mean_1, mean_2"),
        ({"pools": ["max"]}, "--layers .mean_2, and now max_2"),
        ({"dtype": "fp16"}, "--dtype"),
        ({"precision": "bf16"}, "--precision"),
        ({"long": Long("truncate", 50)}, "--long .full, and now truncate --window 50"),
        ({"long": Long("window", 50, 8)}, "--long .full, and now window --window 50 --overlap 8"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_another_request_is_refused(
    given: Given, out: Path, options: dict[str, Any], reason: str, finished: bool
) -> None:
    if finished:
        given.embed(out / "x")
    else:
        given.computed(out / "x", most=2)
    before = state(out)
    with pytest.raises(
        UsageError, match=f"x(.partial)?: was {'made' if finished else 'begun'} with another .*{reason}"
    ):
        given.embed(out / "x", **options)
    if not finished:
        assert state(out) == before
    given.embed(out / "x")
    assert content(out / "x") == given.whole["x"]


def test_another_model_is_refused(given: Given, tmp_path: Path, out: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    given.computed(out / "x.npy", most=2)
    with pytest.raises(UsageError, match=r"x\.npy\.partial: was begun with another model "):
        given.embed(out / "x.npy", model=other)
    mine = Path(shutil.copytree(given.model, tmp_path / "mine"))
    given._replace(model=mine).computed(out / "y.npy", most=2)
    shutil.copy(other / "model.safetensors", mine)
    with pytest.raises(UsageError, match=r"y\.npy\.partial: was begun with another model "):
        given.embed(out / "y.npy", model=mine)


# --- What lies there


@pytest.mark.parametrize("name", ["x.npy", "x"])
@pytest.mark.parametrize("how", ["truncated", "gone"])
def test_a_part_that_was_damaged_is_refused_and_one_that_is_gone_computed_again(
    given: Given, out: Path, name: str, how: str
) -> None:
    directory = given.computed(out / name)
    before = inodes(directory)
    file = directory / "parts" / min(before)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(InputError, match=rf"{file.name}: is damaged .*; remove it"):
            given.embed(out / name)
    file.unlink()
    given.embed(out / name)
    assert content(out / name) == given.whole[name]
    assert sorted(path.name for path in out.iterdir()) == (["x"] if name == "x" else sorted(given.whole[name]))
    if name == "x":
        assert kept({one: inode for one, inode in before.items() if one != file.name}, out / "x")


@pytest.mark.parametrize("name", ["x.npy", "x"])
def test_what_is_there_is_not_replaced_unless_told(given: Given, tmp_path: Path, out: Path, name: str) -> None:
    given.embed(out / name)
    before = state(out)
    report = given.embed(out / name)
    assert (report.records, report.failed) == (RECORDS, 0)
    other = write_fasta(tmp_path / "other.fasta", 40, seed=3, longest=120)
    with pytest.raises(UsageError, match="was made with another input"):
        given.embed(out / name, other)
    assert state(out) == before
    directory = given._replace(fasta=other).computed(out / name, most=1)
    given.embed(out / name, other, overwrite=True)
    given.embed(tmp_path / "fresh" / name, other)
    assert not directory.exists()
    assert content(out / name) == content(tmp_path / "fresh" / name)
    assert sorted(path.name for path in out.iterdir()) == sorted(p.name for p in (tmp_path / "fresh").iterdir())
