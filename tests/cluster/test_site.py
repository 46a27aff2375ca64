"""The site profile: where it is found, what expands, and what is refused with its place."""

from pathlib import Path

import pytest

from esmshard.cluster import site
from esmshard.errors import UsageError

TEXT = """\
# the machines in the cellar
gpus_per_node: 4
python: /shared/venv/bin/python
exports: {NCCL_SOCKET_IFNAME: ib0}
container:
  runtime: pyxis
  image: /images/esmshard.sqsh
  mounts: [/data, "/shared:/shared:ro"]
slurm:
  partition: gpu
  time: 24:00:00
  setup: [module load cuda/12.8]
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "site.yaml"
    file.write_text(TEXT)
    monkeypatch.setenv("ESMSHARD_SITE", str(file))
    return file


def problems(path: Path) -> list[str]:
    with pytest.raises(UsageError) as error:
        site.load()
    return [problem.removeprefix(f"{path}:") for problem in error.value.problems]


def test_what_is_written_is_read(path: Path) -> None:
    found = site.load()
    assert (found.gpus_per_node, found.exports) == (4, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert found.container.mounts == ("/data", "/shared:/shared:ro")
    assert (found.slurm.time, found.slurm.setup, found.slurm.grace) == ("24:00:00", ("module load cuda/12.8",), 180)


def test_the_configuration_directory_comes_after_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESMSHARD_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert site.load() == site.Site.model_validate({})
    (tmp_path / "config" / "esmshard").mkdir(parents=True)
    (tmp_path / "config" / "esmshard" / "site.yaml").write_text("gpus_per_node: 8\n")
    assert site.load().gpus_per_node == 8
    (tmp_path / "config" / "esmshard" / "site.yaml").write_text("# nothing yet\n")
    assert site.load() == site.Site.model_validate({})
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert site.path() == tmp_path / ".config" / "esmshard" / "site.yaml"
    monkeypatch.setenv("ESMSHARD_SITE", str(tmp_path / "other.yaml"))
    with pytest.raises(UsageError, match=r"other\.yaml: no such file, but ESMSHARD_SITE names it"):
        site.load()


def test_all_problems_are_listed_at_once_with_their_places(path: Path) -> None:
    path.write_text("""\
gpus_per_nod: 4
python: venv/python
exports: {NCCL_DEBUG: 1, "a b": x}
container: {runtime: pixis, mounts: [data]}
slurm:
  partitoin: gpu
  grace: soon
kubernetes: {labels: [a]}
""")
    told = problems(path)
    for place in ("1:1: gpus_per_nod", "2:9: python", "3:23: exports.NCCL_DEBUG", "4:22: container.runtime"):
        assert any(problem.startswith(place) for problem in told)
    assert "6:3: slurm.partitoin: unknown key; did you mean 'partition'?" in told
    assert len(told) == 8


def test_what_could_break_out_is_refused_with_its_place(path: Path) -> None:
    for old, new, key in (
        ("NCCL_SOCKET_IFNAME", "'A; reboot'", "exports.A; reboot"),
        ("NCCL_SOCKET_IFNAME", "SLURM_X", "exports.SLURM_X"),
        ("partition: gpu", 'partition: "a\\n#SBATCH --wrap=x"', "slurm.partition"),
        ("partition: gpu", "account: a b", "slurm.account"),
        ("partition: gpu", "account: $(reboot)", "slurm.account"),
        ("partition: gpu", "memory_per_gpu: lots", "slurm.memory_per_gpu"),
        ("24:00:00", "1 hour", "slurm.time"),
        ("partition: gpu", "options: [-N3]", "slurm.options.0"),
        ("partition: gpu", "options: ['--comment=a b']", "slurm.options.0"),
        ("partition: gpu", "gpus: 'gpu:{n}'", "slurm.gpus"),
        ("partition: gpu", "gpus: --gpus-per-node=a100:4", "slurm.gpus"),
        ("[module load cuda/12.8]", '["a\\nb"]', "slurm.setup.0"),
        ("partition: gpu", "cpus_per_gpu: 99999999999", "slurm.cpus_per_gpu"),
        ("gpus_per_node: ", f"gpus_per_node: {10**27} #", "gpus_per_node"),
        ("/shared/venv", "venv", "python"),
        ("gpus_per_node: 4", "kubernetes: {mount: work}", "kubernetes.mount"),
        ("[/data,", "[/a:b,", "container.mounts.0"),
        ("[/data,", '["/a b",', "container.mounts.0"),
    ):
        assert TEXT.count(old) == 1
        path.write_text(TEXT.replace(old, new))
        (problem,) = problems(path)
        place, _, told = problem.partition(": ")
        assert told.startswith(f"{key}: ")
        assert 1 <= int(place.split(":")[0]) <= len(TEXT.splitlines())
