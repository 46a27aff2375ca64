"""A disk that is full names the path and what to do, and nothing half made stays behind."""

import resource
import signal
import subprocess
from pathlib import Path

import pytest
from command import in_process
from embed_runs import write_fasta

RECIPE = """\
task: {name: sequence, kind: number}
model: {name: nano}
init: random
data: {train: t.fasta, valid: t.fasta, test: u.fasta, labels: y.csv, target: [y]}
train: {steps: 1}
out: run
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("full")
    for name, count in (("x.fasta", 400), ("t.fasta", 20), ("u.fasta", 20)):
        write_fasta(root / name, count, longest=60)
    ids = [line[1:].split()[0] for line in (root / "t.fasta").read_text().splitlines() if line.startswith(">")]
    (root / "y.csv").write_text("id,y\n" + "".join(f"{one},{n}\n" for n, one in enumerate(ids)))
    (root / "r.yaml").write_text(RECIPE)
    done = in_process("finetune", "r.yaml", "--nproc", "1", cwd=root)
    assert done.returncode == 0, done.stderr
    return root


def cramped(*arguments: str | Path, cwd: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """A command for which no file can grow beyond some bytes: the kernel's own error, in the middle of a file."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN, "Python ignores it"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return in_process(*arguments, cwd=cwd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(project: Path) -> None:
    assert in_process("ingest", "x.fasta", "-o", "whole.store", cwd=project).returncode == 0
    before = sorted(project.iterdir())
    for arguments, named in (
        (("predict", "run/model", "whole.store", "-o", "o.csv"), "o.csv"),
        (("consolidate", "run", "-o", "again"), "again"),
        (("ingest", "x.fasta", "-o", "s.store"), "s.store"),
    ):
        result = cramped(*arguments, cwd=project, limit=4000)
        assert result.returncode == 1, result.stderr
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert named in last
        assert "cannot be written (" in last
        assert sorted(project.iterdir()) == before
    assert in_process("ingest", "x.fasta", "-o", "s.store", cwd=project).returncode == 0
    assert not (project / "s.store.partial").exists()
