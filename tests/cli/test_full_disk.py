"""A disk that is full names the path and what to do, and nothing half made stays behind."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import esmshard
from embed_runs import write_fasta, write_model

from esmshard.io import paths as files

RECIPE = """\
task: {name: sequence, kind: number}
model: {name: nano}
init: random
data: {train: x.fasta, valid: x.fasta, test: t.fasta, labels: y.csv, target: [y]}
train: {steps: 1}
out: run
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("full")
    for name in ("x.fasta", "t.fasta"):
        write_fasta(root / name, 400, longest=60)
    ids = [line[1:].split()[0] for line in (root / "x.fasta").read_text().splitlines() if line.startswith(">")]
    (root / "y.csv").write_text("id,y\n" + "".join(f"{one},{n}\n" for n, one in enumerate(ids)))
    (root / "r.yaml").write_text(RECIPE)
    done = esmshard("finetune", "r.yaml", "--nproc", "1", cwd=root)
    assert done.returncode == 0, done.stderr
    return root


def cramped(*arguments: str | Path, cwd: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """A command for which no file can grow beyond some bytes: the kernel's own error, in the middle of a file."""

    def be_cramped() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "esmshard", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, preexec_fn=be_cramped, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "limit", "named"),
    [
        (("predict", "run/model", "x.fasta", "-o", "o.csv"), 4000, "o.csv"),
        (("consolidate", "run", "-o", "again"), 4000, "again"),
        (("ingest", "x.fasta", "-o", "s.store"), 4000, "s.store"),
    ],
)
def test_a_full_disk(arguments: tuple[str, ...], limit: int, named: str, project: Path, tmp_path: Path) -> None:
    before = sorted(project.iterdir())
    if arguments[0] == "predict":  # its store goes where there is room
        arguments = (*arguments[:2], str(whole_store(project)), *arguments[3:])
        before = sorted(project.iterdir())
    result = cramped(*arguments, cwd=project, limit=limit)
    assert result.returncode == 1, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert named in last
    assert "cannot be written (" in last
    assert "make room" in last
    assert "Traceback" not in result.stderr
    left = sorted(set(project.iterdir()) - set(before))
    assert not left


def whole_store(project: Path) -> Path:
    store = project / "whole.store"
    if not store.exists():
        assert esmshard("ingest", "x.fasta", "-o", store, cwd=project).returncode == 0
    return store


def test_an_ingest_goes_on_when_there_is_room(project: Path) -> None:
    assert cramped("ingest", "x.fasta", "-o", "t.store", cwd=project, limit=4000).returncode == 1
    assert esmshard("ingest", "x.fasta", "-o", "t.store", cwd=project).returncode == 0
    assert not (project / "t.store.partial").exists()


def of_dead_process(name: Callable[[int], str], folder: Path) -> Path:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    path = folder / name(pid)
    path.mkdir() if "csv" not in path.name else path.write_text("half")
    return path


def test_the_next_consolidation_removes_what_a_killed_one_left_and_tells_of_others(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    dead = of_dead_process(lambda pid: f".tmp-out-{os.uname().nodename}-{pid}", tmp_path)
    other = tmp_path / ".tmp-out-another.machine-17"
    other.mkdir()
    result = esmshard("consolidate", model, "-o", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not dead.exists()
    assert other.exists()
    assert (
        f"{other}: is being made, or was left half made, by process 17 of another.machine; remove it" in result.stderr
    )
    assert files.settle(tmp_path / "model") == []
