"""The site profile: where it is found, what expands, and what is refused with its place."""

from pathlib import Path

import pytest

from esmshard.cluster import site
from esmshard.errors import UsageError

TEXT = """\
# the machines in the cellar
gpus_per_node: 4
python: ${SHARED}/venv/bin/python
scratch: /local/${SLURM_JOB_ID}/x
exports: {NCCL_SOCKET_IFNAME: ib0, HF_HOME: "${SHARED}/hf"}
container:
  runtime: pyxis
  image: ~/esmshard.sqsh
  mounts: [/data, "${SHARED}:/shared:ro"]
slurm:
  partition: gpu
  time: 24:00:00
  modules: [cuda/12.8]
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "site.yaml"
    file.write_text(TEXT)
    monkeypatch.setenv("ESMSHARD_SITE", str(file))
    monkeypatch.setenv("SHARED", "/shared")
    monkeypatch.setenv("HOME", "/home/someone")
    return file


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def problems(path: Path) -> list[str]:
    with pytest.raises(UsageError) as error:
        site.load()
    return [problem.removeprefix(f"{path}:") for problem in error.value.problems]


def test_what_is_written_is_read(path: Path) -> None:
    found = site.load()
    assert (found.gpus_per_node, found.python) == (4, "/shared/venv/bin/python")
    assert found.exports == {"NCCL_SOCKET_IFNAME": "ib0", "HF_HOME": "/shared/hf"}
    assert found.container.image == "/home/someone/esmshard.sqsh"
    assert found.container.mounts == ("/data", "/shared:/shared:ro")
    assert (found.slurm.partition, found.slurm.time, found.slurm.modules) == ("gpu", "24:00:00", ("cuda/12.8",))
    assert (found.slurm.grace, found.kubernetes.port, found.kubernetes.namespace) == (180, 29400, "default")


def test_variables_of_slurm_are_left_for_the_job(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")  # launched from within another job
    assert site.load().scratch == "/local/${SLURM_JOB_ID}/x"


def test_the_configuration_directory_comes_after_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESMSHARD_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert site.found() is None
    assert site.load() == site.Site.model_validate({})
    (tmp_path / "config" / "esmshard").mkdir(parents=True)
    (tmp_path / "config" / "esmshard" / "site.yaml").write_text("gpus_per_node: 8\n")
    assert site.load().gpus_per_node == 8
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert site.path() == tmp_path / ".config" / "esmshard" / "site.yaml"
    monkeypatch.setenv("ESMSHARD_SITE", str(tmp_path / "other.yaml"))
    with pytest.raises(UsageError, match=r"other\.yaml: no such file; ESMSHARD_SITE names it"):
        site.load()


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_a_profile_may_be_empty(path: Path, text: str) -> None:
    path.write_text(text)
    assert site.load() == site.Site.model_validate({})


def test_all_problems_are_listed_at_once_with_their_places(path: Path) -> None:
    path.write_text("""\
gpus_per_nod: 4
python: ${NOWHERE}/python
exports: {NCCL_DEBUG: 1, "a b": x}
container: {runtime: pixis, mounts: [data]}
slurm:
  partitoin: gpu
  grace: soon
kubernetes: {labels: [a]}
""")
    assert problems(path) == [
        "2:9: python: the environment variable NOWHERE is not set",
        "3:23: exports.NCCL_DEBUG: Input should be a valid string",
        "4:22: container.runtime: Input should be 'none', 'pyxis' or 'apptainer'",
        "4:38: container.mounts.0: 'data' must be a directory such as /data or /data:/data:ro, with an absolute path",
        "7:10: slurm.grace: Input should be a valid integer",
        "6:3: slurm.partitoin: unknown key; did you mean 'partition'?",
        "8:22: kubernetes.labels: Input should be a valid dictionary",
        "1:1: gpus_per_nod: unknown key; did you mean 'gpus_per_node'?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("NCCL_SOCKET_IFNAME", "'A; reboot'", "exports.A; reboot: 'A; reboot' is no name of an environment variable"),
        ("NCCL_SOCKET_IFNAME", "SLURM_X", "exports.SLURM_X: is Slurm's own; it would not be what the job runs with"),
        (
            "partition: gpu",
            'partition: "a\\n#SBATCH --wrap=x"',
            "slurm.partition: 'a\\n#SBATCH --wrap=x' must be without",
        ),
        ("partition: gpu", "account: a b", "slurm.account: 'a b' must be without blanks"),
        ("partition: gpu", "qos: $(reboot)", "slurm.qos: '$(reboot)' must be without"),
        ("partition: gpu", "port: 29400", "slurm.port: unknown key"),
        ("partition: gpu", "memory: lots", "slurm.memory: 'lots' must be a size such as 480G"),
        ("24:00:00", "tomorrow", "slurm.time: 'tomorrow' must be a time such as 24:00:00, 2-12:00:00 or 90 (minutes)"),
        ("cuda/12.8", "a;b", "slurm.modules.0: 'a;b' must be the name of a module"),
        ("partition: gpu", "options: [-N3]", "slurm.options.0: '-N3' must be an option such as"),
        (
            "partition: gpu",
            "gpu_type: 'a100:4'",
            "slurm.gpu_type: 'a100:4' must be the name of a type of GPU, such as a100",
        ),
        ("partition: gpu", 'setup: ["a\\nb"]', "slurm.setup.0: 'a\\nb' must be one line of bash"),
        (
            "partition: gpu",
            "cpus_per_gpu: 99999999999",
            "slurm.cpus_per_gpu: Input should be less than or equal to 4096",
        ),
        ("partition: gpu", f"memory: {'9' * 30}G", "slurm.memory: '999"),
        ("gpus_per_node: ", f"gpus_per_node: {10**27} #", "gpus_per_node: Input should be less than or equal to 1024"),
        ("partition: gpu", "options: ['--comment=a b']", "slurm.options.0: '--comment=a b' must be an option"),
        ("${SHARED}/venv", "venv", "python: 'venv/bin/python' must be an absolute path"),
        ("gpus_per_node: 4", "kubernetes: {mount: work}", "kubernetes.mount: 'work' must be an absolute path"),
        ("gpus_per_node: 4", "kubernetes: {namespace: Team A}", "kubernetes.namespace: 'Team A' must be at most"),
        ("[/data,", "[/a:b,", "container.mounts.0: '/a:b' must be a directory"),
    ],
)
def test_what_could_break_out_is_refused(path: Path, old: str, new: str, problem: str) -> None:
    edit(path, old, new)
    (found,) = problems(path)
    assert found.partition(": ")[2].startswith(problem)
    line, column = map(int, found.split(": ")[0].split(":"))
    assert 1 <= line <= len(TEXT.splitlines())
    assert column > 1 or old == "NCCL_SOCKET_IFNAME" or "python" in problem
