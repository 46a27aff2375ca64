"""Each engine writes the same output after kills, full disks and damage, and replaces nothing without being told."""

import ctypes
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from embed_runs import ORDER, Run, content, embed, stage, until, write_fasta, write_model
from safetensors import SafetensorError

from esmshard.embed import engines, parts
from esmshard.embed.compute import Work, compute_part
from esmshard.embed.engines import Share, share
from esmshard.embed.parts import begin, partial
from esmshard.embed.spec import Long, request
from esmshard.errors import InputError, UsageError
from esmshard.io.array_formats import FORMATS

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")

PART = 2048
RECORDS = 150
NAMES = ("x.npy", "x.h5", "x")


class Given(NamedTuple):
    model: Path
    fasta: Path
    whole: dict[str, dict[str, object]]
    """The content of uninterrupted outputs, by name."""

    def run(self, out: Path, *options: str) -> Run:
        folder = out.parent.parent / f"printed-{len(list(out.parent.parent.glob('printed-*')))}"
        return Run("embed", self.model, self.fasta, "-o", out, *options, folder=folder, part_tokens=PART)

    def embed(self, out: Path, **options: Any) -> dict[str, Any]:
        return embed(self.model, out, self.fasta, part_tokens=PART, **options)

    def computed(self, out: Path, most: int | None = None) -> Path:
        """Make `OUT.partial` with all parts, or the first `most`."""
        directory = partial(out)
        plan = begin(directory, self.fasta, request(str(self.model), out, pools=["mean"]), part_tokens=PART)
        work = Work(directory, directory / "work" / "input", str(self.model), "cpu", None)
        for part in range(len(plan["bounds"]) - 1 if most is None else most):
            compute_part(work, part)
        return directory

    def check(self, out: Path) -> None:
        """The output equals an uninterrupted one, and its directory contains nothing else."""
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
    return {path.name: path.stat().st_ino for path in (directory / "parts").glob("[0-9]*.safetensors")}


def state(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


STAGES = ("planning", "planned", "computing", "computed", "writing", "sealed", "removing")
"""The stages at which runs are killed."""


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_runs_that_are_killed_again_and_again_write_the_same(given: Given, tmp_path: Path, kills: int) -> None:
    """Kill processes at random stages and times, and compare each output that is finished nevertheless."""
    rng, killed, outputs = np.random.default_rng(1), 0, 0
    for _ in range(4 * kills + 10):
        out = tmp_path / str(outputs) / NAMES[outputs % len(NAMES)]
        out.parent.mkdir(exist_ok=True)
        began, several = time.monotonic(), kills > 2 and rng.random() < 0.4
        run = given.run(out, *(("--nproc", "2") if several else ()))
        losses, ahead = 0, [name for name in STAGES if ORDER.index(name) > ORDER.index(stage(out))]
        while killed < kills and not run.is_over and losses < 3:
            if not ahead or rng.random() < 0.5:
                end = began + rng.uniform(0, 6.0 if several else 2.0)
                while time.monotonic() < end and not run.is_over:
                    time.sleep(0.005)
            else:
                until(run, ahead[rng.integers(len(ahead))], out)
                time.sleep(rng.choice([0.0, rng.uniform(0, 0.01)]))
            target = ("parent", "worker", "group")[rng.integers(3)]
            if run.kill(target, int(rng.integers(2))):
                killed, losses = killed + 1, losses + 1
                if target != "worker":
                    break
        if run.wait() == -9:
            continue
        assert run.process.exitcode == 0, run.stderr
        given.check(out)
        outputs += 1
        if killed == kills:
            return
    raise AssertionError("no progress")


def test_a_killed_process_is_replaced_and_all_end_with_the_command(given: Given, out: Path) -> None:
    pickle.dumps((engines._begin_process, engines._compute_in_process))  # as spawned processes need it
    run = given.run(out / "x.npy", "--nproc", "2")
    until(run, "computing", out / "x.npy")
    assert run.kill("worker")
    while not run.is_over and "all processes are started again" not in run.stderr:
        time.sleep(0.01)
    finished = inodes(partial(out / "x.npy"))
    while not run.is_over and inodes(partial(out / "x.npy")) == finished:
        time.sleep(0.002)
    workers, end = run.workers(), time.monotonic() + 30
    assert run.kill("parent") or run.wait() == 0, run.stderr
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end, "processes outlive the command"
        time.sleep(0.05)
    given.embed(out / "x.npy")
    given.check(out / "x.npy")


def test_workers_of_an_array_share_the_parts_and_one_may_die(given: Given, out: Path) -> None:
    """Worker 1 waits for the plan of worker 0, worker 2 is killed, and worker 3 never begins."""
    runs = [given.run(out / "x.npy", "--engine", "array", "--worker", f"{number}/4") for number in (1, 2, 0)]
    until(runs[1], "computing", out / "x.npy")
    runs[1].kill("group")
    for run in (runs[0], runs[2], given.run(out / "x.npy", "--engine", "array", "--worker", "3/4")):
        assert run.wait() == 0, run.stderr
    given.check(out / "x.npy")


@pytest.mark.slow
def test_ray_computes_the_same(given: Given, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out" / "x.npy"
    out.parent.mkdir()
    with pytest.raises(UsageError, match=r"--ray-address 127\.0\.0\.1:1: "):
        given.embed(out, engine="ray", ray_address="127.0.0.1:1")
    given.embed(out, engine="ray", ray_address="local")
    given.check(out)


@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.parametrize("losses", [1, 10])
def test_nodes_of_a_ray_cluster_are_lost(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """One of two nodes is lost, and the other node computes its parts."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    rng, head = np.random.default_rng(4), {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for n in range(losses):
            out = tmp_path / str(n) / "x.npy"
            out.parent.mkdir()
            node = cluster.add_node(num_cpus=1)
            run = given.run(out, "--engine", "ray", "--ray-address", cluster.address)
            until(run, "computing", out)
            time.sleep(rng.uniform(0, 1.5) if n else 0)
            cluster.remove_node(node, allow_graceful=False)
            assert run.wait() == 0, run.stderr
            given.check(out)
    finally:
        cluster.shutdown()


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
    """Then the directory of parts, in which this command works, does not exist any more."""
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
        strays = [
            directory / "parts" / stray for stray in ("000001-12345678.safetensors", ".000001.safetensors-12345678")
        ]
        strays += [place / f".tmp-{name}-{socket.gethostname()}-999999999"] if name == "x.npy" else []
        for stray in strays:
            stray.write_text("half of it")
        given.embed(place / name)
        given.check(place / name)


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
REMOUNT, READ_ONLY, DETACH = 32, 1, 2  # flags of mount(2) and umount2(2)


@pytest.fixture
def disk(out: Path) -> Iterator[Mount]:
    """Mount a disk with so many KiB at `out`, or change this disk."""
    libc, folder = ctypes.CDLL(None), os.fsencode(out)

    def mount(kib: int, flags: int = 0) -> None:
        flags |= REMOUNT if os.path.ismount(out) else 0
        if not hasattr(libc, "mount") or libc.mount(b"none", folder, b"tmpfs", flags, f"size={kib}k".encode()):
            pytest.skip("no disk can be mounted here")

    yield mount
    if os.path.ismount(out):
        libc.umount2(folder, DETACH)


def test_a_disk_that_is_full_when_the_file_is_written(
    given: Given, out: Path, disk: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HDF5 library may crash when a write fails, so its formats are not part of this test."""
    disk(16_000)
    for name in [f"x.{fmt}" for fmt in FORMATS if not fmt.startswith(("h5", "biotrainer"))]:
        place = out / f"of-{name}"
        directory = given.computed(place / name)
        before = inodes(directory)
        (out / "ballast").write_bytes(bytes(shutil.disk_usage(out).free - 16_000))
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
        if name not in given.whole:
            given.embed(out.parent / "fresh" / name / name, pools=["mean"])
            given.whole[name] = content(out.parent / "fresh" / name / name)
        assert content(place / name) == given.whole[name]


def test_disks_that_are_small_or_cannot_be_written_to(given: Given, out: Path, disk: Mount) -> None:
    for kib in (4, 40, 80):
        disk(kib)
        with pytest.raises(InputError, match=r"cannot be written \(no space left on device\)| are free; make room"):
            given.embed(out / "x.npy")
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


def test_another_request_or_input_is_refused(given: Given, tmp_path: Path, out: Path) -> None:
    fasta = Path(shutil.copy(given.fasta, tmp_path / "x.fasta"))
    copied, other = given._replace(fasta=fasta), given._replace(model=write_model(tmp_path / "other", seed=1))
    finished, text = inodes(copied.computed(out / "x", most=2)), fasta.read_text()
    for verb in ("begun", "made"):
        before = state(out)
        for options, token in (
            ({"layers": [1, 2]}, "now mean_1, mean_2"),
            ({"dtype": "fp16"}, "--dtype"),
            ({"precision": "bf16"}, "--precision"),
            ({"long": Long("window", 50, 8)}, "now window --window 50 --overlap 8"),
        ):
            with pytest.raises(UsageError, match=f"{verb} with another .*{token}"):
                copied.embed(out / "x", **options)
        with pytest.raises(UsageError, match="with another model"):
            other.embed(out / "x")
        for changed in (text.replace(">r00007 ", ">s00007 "), text + ">new\nMKT\n", text[: text.rindex(">")]):
            fasta.write_text(changed)
            with pytest.raises(UsageError, match=f"{verb} with another input"):
                copied.embed(out / "x")
        fasta.write_text(text)
        os.utime(fasta, (1, 1))
        assert state(out) == before
        copied.embed(out / "x")
        given.check(out / "x")
    assert finished.items() <= inodes(out / "x").items()


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
            with pytest.raises(UsageError, match=r"exists already|contains thesis.tex"):
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
