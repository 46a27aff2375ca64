"""Each engine writes the same output, whatever is killed, lost, full, damaged or there already."""

import ctypes
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from embed_runs import ORDER, Run, content, stage, until, write_fasta, write_model
from safetensors import SafetensorError

from esmshard.embed import engines, parts
from esmshard.embed.compute import Work, compute_part
from esmshard.embed.engines import Share, share
from esmshard.embed.parts import begin, partial
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import FORMATS

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")

PART = 4096
RECORDS = 300
NAMES = ("x.npy", "x.h5", "x")


class Given(NamedTuple):
    model: Path
    fasta: Path
    whole: dict[str, dict[str, object]]
    """What an uninterrupted run writes, by the name of the output."""

    def run(self, out: Path, *options: str) -> Run:
        """The command as a process, with a folder of its own for what it prints."""
        folder = out.parent.parent / f"printed-{len(list(out.parent.parent.glob('printed-*')))}"
        return Run("embed", self.model, self.fasta, "-o", out, *options, folder=folder, part_tokens=PART)

    def embed(self, out: Path, **options: Any) -> dict[str, Any]:
        """Options of the request are told from those of the run."""
        asked = ("pools", "layers", "dtype", "precision", "long")
        wanted = request(str(self.model), out, **{k: options.pop(k) for k in asked if k in options})
        manifest = engines.embed(wanted, self.fasta, part_tokens=PART, **options)
        assert manifest is not None
        return manifest

    def computed(self, out: Path, most: int | None = None) -> Path:
        """`OUT.partial` with all parts, or the first ones, as a run leaves it that is killed before it writes `out`."""
        directory = partial(out)
        plan = begin(directory, self.fasta, request(str(self.model), out, pools=["mean"]), part_tokens=PART)
        work = Work(directory, directory / "work" / "input", str(self.model), "cpu", None)
        for part in range(len(plan["bounds"]) - 1 if most is None else most):
            compute_part(work, part)
        return directory

    def check(self, out: Path) -> None:
        """The output is that of an uninterrupted run, and nothing else is in its directory."""
        assert content(out) == self.whole[out.name]
        assert names(out.parent) == ([out.name] if out.is_dir() else sorted(self.whole[out.name]))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    directory = tmp_path_factory.mktemp("given")
    found = Given(write_model(directory / "model"), write_fasta(directory / "x.fasta", RECORDS), {})
    for name in NAMES:
        out = directory / f"whole-{name}" / name
        found.embed(out)
        found.whole[name] = content(out)
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def inodes(directory: Path) -> dict[str, int]:
    """Of the files of finished parts, by name."""
    return {path.name: path.stat().st_ino for path in (directory / "parts").glob("[0-9]*.safetensors")}


def state(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and bytes of every file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# Kills

STAGES = ("planning", "planned", "computing", "computed", "writing", "sealed", "removing")
"""That kills wait for."""


def drill(given: Given, directory: Path, kills: int, seed: int) -> Counter[str]:
    """Kill runs until so many have been killed, and look at each output that gets finished; where the kills fell."""
    rng = np.random.default_rng(seed)
    fell: Counter[str] = Counter()
    outputs, attempts = 0, 0
    while fell.total() < kills or outputs < len(NAMES):
        out = directory / str(outputs) / NAMES[outputs % len(NAMES)]
        out.parent.mkdir(exist_ok=True)
        attempts += 1
        assert attempts < 4 * kills + 10, "it does not get anywhere"
        began = time.monotonic()
        several = rng.random() < 0.4
        run = given.run(out, *(("--nproc", "2") if several else ()))
        losses, ahead = 0, [one for one in STAGES if ORDER.index(one) > ORDER.index(stage(out))]
        while fell.total() < kills and not run.is_over and losses < 3:
            if not ahead or rng.random() < 0.5:
                end = began + rng.uniform(0, 6.0 if several else 2.0)
                while time.monotonic() < end and not run.is_over:
                    time.sleep(0.005)
            else:
                until(run, ahead[rng.integers(len(ahead))], out)
                time.sleep(rng.choice([0.0, rng.uniform(0, 0.01)]))
            whom = ("parent", "worker", "group")[rng.integers(3)]
            at = stage(out)
            if not run.kill(whom, int(rng.integers(2))):
                continue
            fell[f"{whom} {at}"] += 1
            losses += 1
            if whom != "worker":
                break
        if run.wait() == -9:
            continue
        assert run.process.exitcode == 0, run.stderr
        given.check(out)
        outputs += 1
    return fell


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_runs_that_are_killed_again_and_again_write_the_same(given: Given, tmp_path: Path, kills: int) -> None:
    assert drill(given, tmp_path, kills=kills, seed=1).total() == kills


def test_a_killed_process_is_replaced_and_all_end_with_the_command(given: Given, out: Path) -> None:
    run = given.run(out / "x.npy", "--nproc", "2")
    until(run, "computing", out / "x.npy")
    assert run.kill("worker")
    assert run.wait() == 0, run.stderr
    assert "all processes are started again" in run.stderr
    given.check(out / "x.npy")
    run = given.run(out / "x", "--nproc", "2")
    until(run, "computing", out / "x")
    workers = run.workers()
    run.kill("parent")
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end, "processes outlive the command"
        time.sleep(0.1)


def test_workers_of_an_array_share_the_parts_and_one_may_die(given: Given, out: Path) -> None:
    """Worker 1 waits for the plan of worker 0, worker 2 is killed, and worker 3 never begins."""
    runs = [given.run(out / "x.npy", "--engine", "array", "--worker", f"{number}/4") for number in (1, 2, 0)]
    until(runs[1], "computing", out / "x.npy")
    runs[1].kill("group")
    for run in (runs[0], runs[2], given.run(out / "x.npy", "--engine", "array", "--worker", "3/4")):
        assert run.wait() == 0, run.stderr
    given.check(out / "x.npy")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_kills_of_an_array(given: Given, tmp_path: Path) -> None:
    rng, kills, outputs = np.random.default_rng(3), 0, 0
    workers = [("--engine", "array", "--worker", f"{number}/2") for number in (0, 1)]
    while kills < 10:
        out = tmp_path / str(outputs) / "x.npy"
        out.parent.mkdir()
        runs = [given.run(out, *options) for options in workers]
        for _ in range(3):
            time.sleep(rng.uniform(0, 0.9))
            k = int(rng.integers(2))
            if runs[k].kill("group"):
                kills += 1
                runs[k] = given.run(out, *workers[k])
        for run in runs:
            assert run.wait() == 0, run.stderr
        given.check(out)
        outputs += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of two nodes with a core each, beside a node without cores for the command."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_nodes_of_a_ray_cluster_are_lost(given: Given, tmp_path: Path, cluster: Any, kills: int) -> None:
    """A node, or in longer drills the command itself, is killed at random moments; a new node joins."""
    rng, done, outputs = np.random.default_rng(4), 0, 0
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    while done < kills:
        out = tmp_path / str(outputs) / "x.npy"
        out.parent.mkdir()
        while True:
            run = given.run(out, "--engine", "ray", "--ray-address", cluster.address)
            until(run, "computing", out)
            if kills > 1:
                time.sleep(rng.uniform(0, 1.5))
            if kills > 1 and rng.random() < 0.5:
                done += run.kill("group")
            else:
                cluster.remove_node(nodes.pop(0), allow_graceful=False)
                nodes.append(cluster.add_node(num_cpus=1))
                done += 1
            if run.wait() == 0:
                break
            assert run.process.exitcode == -9, run.stderr
        given.check(out)
        outputs += 1


def test_a_ray_cluster_that_cannot_be_reached(given: Given, out: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=r"--ray-address 127\.0\.0\.1:1: "):
        given.embed(out / "x.npy", engine="ray", ray_address="127.0.0.1:1")


def test_the_number_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="--worker"):
        share(None)
    for variables, expected in (
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "8"}, Share(3, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Share(1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, Share(5, 6)),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert (share(None), share("0/1")) == (expected, Share(0, 1))
    for wrong in ("1/1", "x", "-1/2", "1"):
        with pytest.raises(UsageError, match=f"--worker {wrong}"):
            share(wrong)
    assert Share(0, 2).of([1, 2, 3, 4, 5]) == [2, 4, 5, 3, 1]
    assert Share(1, 2).of([1, 2, 3]) == [1, 3]


@pytest.mark.parametrize("where", ["check_fits", "compute_here", "conclude"])
def test_another_command_may_finish_at_any_moment(
    given: Given, out: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The directory of parts, in which this command works, is gone then."""
    name, step, others = "x" if where == "conclude" else "x.npy", getattr(engines, where), 0

    def after_another(*arguments: Any) -> Any:
        nonlocal others
        monkeypatch.setattr(engines, where, step)
        given.embed(out / name)
        others += 1
        return step(*arguments)

    monkeypatch.setattr(engines, where, after_another)
    assert given.embed(out / name)["records"] == RECORDS
    assert others == 1
    given.check(out / name)


def test_what_killed_processes_left_is_removed(given: Given, out: Path) -> None:
    for name in ("x.npy", "x"):
        place = out / f"of-{name}"
        directory = given.computed(place / name, most=0)
        (place / f".removed-{name}.partial" / "parts").mkdir(parents=True)
        (place / f".planning-{name}.partial-abc" / "index").mkdir(parents=True)
        if name == "x.npy":
            (place / f".tmp-{name}-{socket.gethostname()}-999999999").write_text("half of it")
        for stray in "parts/000001-12345678.safetensors", "parts/.000001.safetensors-12345678":
            (directory / stray).write_text("half of it")
        given.embed(place / name)
        given.check(place / name)


# Disks


def test_a_disk_that_is_full_in_the_middle(given: Given, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, save = 3, parts.save_file

    def until_full(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        save(*arguments)
        if left < 0:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(parts, "save_file", until_full)
    with pytest.raises(InputError, match="no space left on device"):
        given.embed(out / "x")
    monkeypatch.undo()
    before = inodes(out / "x.partial")
    assert len(before) == len(names(out / "x.partial" / "parts")) == 3, "no room is taken in vain"
    given.embed(out / "x")
    assert before.items() <= inodes(out / "x").items()
    given.check(out / "x")


Mount = Callable[..., None]
REMOUNT, READ_ONLY, DETACH = 32, 1, 2
"""Flags of mount(2) and umount2(2)."""


@pytest.fixture
def disk(out: Path) -> Iterator[Mount]:
    """Makes `out` a disk of its own, of so many KiB, or changes it."""
    libc, folder = ctypes.CDLL(None), os.fsencode(out)

    def mount(kib: int, flags: int = 0) -> None:
        flags |= REMOUNT if os.path.ismount(out) else 0
        if not hasattr(libc, "mount") or libc.mount(b"none", folder, b"tmpfs", flags, f"size={kib}k".encode()):
            pytest.skip("no disk can be mounted here")

    yield mount
    if os.path.ismount(out):
        libc.umount2(folder, DETACH)


def test_a_disk_of_any_size(given: Given, out: Path, disk: Mount) -> None:
    for kib in (4, 40, 80, 120, 160):
        disk(kib)
        with pytest.raises(InputError, match=r"cannot be written \(no space left on device\)| are free; make room"):
            given.embed(out / "x.npy")
    disk(8000)
    given.embed(out / "x.npy")
    given.check(out / "x.npy")


def test_a_disk_that_is_full_when_the_file_is_written(
    given: Given, out: Path, disk: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HDF5 library itself may crash when a write fails, so its formats are only refused beforehand."""
    disk(16_000)
    for name in [f"x.{fmt}" for fmt in FORMATS if not fmt.startswith(("h5", "biotrainer"))]:
        place = out / f"of-{name}"
        directory = given.computed(place / name)
        before = inodes(directory)
        (out / "ballast").write_bytes(bytes(shutil.disk_usage(out).free - 30_000))
        with pytest.raises(InputError, match="are free; make room"):
            given.embed(place / name, pools=["mean"])
        # Another process takes the room during the writing.
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
            with pytest.raises(InputError, match="no space left on device"):
                given.embed(place / name, pools=["mean"])
        assert names(place) == [directory.name]
        assert inodes(directory) == before
        (out / "ballast").unlink()
        given.embed(place / name, pools=["mean"])
        given.embed(out.parent / "fresh" / name / name, pools=["mean"])
        assert content(place / name) == content(out.parent / "fresh" / name / name)


def test_a_disk_that_cannot_be_written_to(given: Given, out: Path, disk: Mount) -> None:
    disk(8000)
    given.computed(out / "x.npy", most=2)
    disk(8000, READ_ONLY)
    before = state(out)
    for name, options in (("y.npy", {}), ("y", {}), ("x.npy", {}), ("x.npy", {"overwrite": True})):
        with pytest.raises(InputError, match="read-only file system"):
            given.embed(out / name, **options)
        assert state(out) == before
    disk(8000)
    given.embed(out / "x.npy")
    given.check(out / "x.npy")


# What is asked for, and what lies there


def test_an_input_that_changed_is_refused_and_a_touched_one_is_not(given: Given, tmp_path: Path, out: Path) -> None:
    fasta = Path(shutil.copy(given.fasta, tmp_path / "x.fasta"))
    mine = given._replace(fasta=fasta)
    before = inodes(mine.computed(out / "x", most=2))
    text = fasta.read_text()
    for changed in (text.replace(">r00007 ", ">s00007 "), text + ">new\nMKT\n", text[: text.rindex(">")]):
        fasta.write_text(changed)
        with pytest.raises(UsageError, match="begun with another input"):
            mine.embed(out / "x")
    fasta.write_text(text)
    os.utime(fasta, (1, 1))
    mine.embed(out / "x")
    assert before.items() <= inodes(out / "x").items()
    given.check(out / "x")


def test_another_request_is_refused(given: Given, tmp_path: Path, out: Path) -> None:
    other = given._replace(model=write_model(tmp_path / "other", seed=1))
    given.computed(out / "x", most=2)
    for verb in ("begun", "made"):
        before = state(out)
        for options, token in (
            ({"layers": [1, 2]}, "now mean_1, mean_2"),
            ({"dtype": "fp16"}, "--dtype"),
            ({"precision": "bf16"}, "--precision"),
            ({"long": Long("window", 50, 8)}, "now window --window 50 --overlap 8"),
        ):
            with pytest.raises(UsageError, match=f"{verb} with another .*{token}"):
                given.embed(out / "x", **options)
        with pytest.raises(UsageError, match="with another model"):
            other.embed(out / "x")
        assert state(out) == before
        given.embed(out / "x")
        given.check(out / "x")


def test_a_part_that_was_damaged_is_refused_and_one_that_is_gone_computed_again(given: Given, out: Path) -> None:
    directory = given.computed(out / "x")
    before = inodes(directory)
    file, other, *_ = (directory / "parts" / part for part in sorted(before))
    data = file.read_bytes()
    for damaged in (data[:-1], data + b"x", data[:20] + bytes([data[20] ^ 4]) + data[21:], other.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=f"{file.name}: is damaged"):
            given.embed(out / "x")
        assert inodes(directory) == before
    file.unlink()
    given.embed(out / "x")
    given.check(out / "x")
    del before[file.name]  # a new file may get the inode of the old one
    assert before.items() <= inodes(out / "x").items(), "the others are not computed again"


@pytest.mark.parametrize("name", ["x.npy", "x"])
def test_what_is_there_is_not_replaced_unless_told(given: Given, tmp_path: Path, out: Path, name: str) -> None:
    directory = partial(out / name)
    for thesis in (out / name, directory / "thesis.tex"):
        thesis.parent.mkdir(exist_ok=True)
        thesis.write_text("mine")
        for options in ({}, {"engine": "array", "worker": "0/2"}, {"engine": "array", "worker": "1/2"}):
            with pytest.raises(UsageError, match=r"exists already|holds thesis.tex"):
                given.embed(out / name, **options)
        assert thesis.read_text() == "mine"
        thesis.unlink()
    given.embed(out / name)
    before = state(out)
    assert given.embed(out / name)["records"] == RECORDS
    other = given._replace(fasta=write_fasta(tmp_path / "other.fasta", 40, seed=3))
    with pytest.raises(UsageError, match="made with another input"):
        other.embed(out / name)
    assert state(out) == before
    other.computed(out / name, most=1)
    given.embed(out / name)
    assert inodes(directory), "the interrupted run with another input stays"
    if name == "x.npy":
        (out / f"{name}.failed.tsv").write_text("of an earlier output")
    other.embed(out / name, overwrite=True)
    other.embed(tmp_path / "fresh" / name)
    assert not directory.exists()
    assert content(out / name) == content(tmp_path / "fresh" / name)
    assert names(out) == names(tmp_path / "fresh")
