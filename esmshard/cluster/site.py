"""The site profile, a YAML file with settings for all jobs on a cluster.

The environment variable ESMSHARD_SITE may name the file. By default, the file is `esmshard/site.yaml` in the user's
configuration directory ($XDG_CONFIG_HOME, or ~/.config). Without a file, all keys have their defaults. Options of
`esmshard launch` replace values of the profile. docs/site.md has an example.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from esmshard.errors import UsageError
from esmshard.recipe.sections import Clash, Settings
from esmshard.recipe.yaml_keys import read

VARIABLE = "ESMSHARD_SITE"
"""The environment variable with the path of the site profile."""


def _form(pattern: str, what: str) -> AfterValidator:
    """Return a pydantic validator. If a text does not match `pattern`, the error says that the text must be `what`."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"{value!r} must be {what}")
        return value

    return AfterValidator(check)


Word = Annotated[str, _form(r"[^\s\x00-\x1f\x7f\"'`\\#$]+", "without blanks, quotes, backslashes, backquotes, # and $")]
"""A text for an #SBATCH line of a Slurm script. Quotes are not allowed, because Slurm may misread them."""
Option = Annotated[
    str, _form(r"--[a-z][a-z-]*(=[^\s\x00-\x1f\x7f\"'`\\#$]+)?", "an option such as --mail-type=END, without blanks")
]
Line = Annotated[str, _form(r"(?=.*\S)[^\n\r\0]+", "one line of bash; write one entry per line")]
Mount = Annotated[
    str, _form(r"/[^\s:,]*(:/[^\s:,]*(:[a-z+]+)?)?", "an absolute path without blanks, such as /data or /data:/data:ro")
]
AbsolutePath = Annotated[str, _form(r"/[^\n\0]+", "an absolute path of one line")]
Quantity = Annotated[str, _form(r"\d{1,9}[A-Za-z]{0,2}", "a size such as 60G or 96Gi")]


class ContainerSite(Settings):
    """The settings of the container in which jobs run."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """How Slurm starts the container: `pyxis` uses the option --container-image of srun, and `apptainer` the command
    `apptainer exec --nv`. With `none` there is no container. Kubernetes always uses a container."""
    image: str | None = None
    """The name of the image in a registry, or the path of a .sqsh or .sif file."""
    mounts: tuple[Mount, ...] = Field((), strict=False)
    """Directories of data, models and runs for containers on Slurm, such as /shared or /data:/data:ro. The working
    directory is added."""


class SlurmSite(Settings):
    """The settings for jobs on Slurm."""

    partition: Word | None = None
    account: Word | None = None
    time: Word | None = None
    """The time limit of a job, such as 24:00:00 (hours:minutes:seconds)."""
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory_per_gpu: Quantity | None = None
    """The CPU memory for each GPU of a job, such as 60G."""
    gpus: Annotated[Option, _form(r".*\{n\}.*", "with {n} for the number of GPUs")] = "--gpus-per-node={n}"
    """The sbatch option for {n} GPUs on each node, such as --gpus-per-node=a100:{n} or --gres=gpu:a100:{n}."""
    setup: tuple[Line, ...] = Field((), strict=False)
    """Lines of bash that the job runs before esmshard, such as `module load cuda/12.8`, `conda activate esm` or `ulimit
    -l unlimited`. The job ends if a line fails."""
    options: tuple[Option, ...] = Field((), strict=False)
    """Options of sbatch that each job gets, such as --qos=long or --mail-type=END."""
    grace: int = Field(180, ge=10, le=65535)
    """How many seconds before the time limit Slurm tells a run to save (option --signal=B:USR1@N of sbatch)."""


class KubernetesSite(Settings):
    """The settings for jobs on Kubernetes."""

    namespace: str = "default"
    claim: str | None = None
    """The name of the PersistentVolumeClaim (ReadWriteMany) for data and results, which all pods mount."""
    mount: AbsolutePath = "/work"
    """The directory in the pods where the volume of `claim` is mounted. Commands run in this directory."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory_per_gpu: Quantity | None = None
    """The CPU memory for each GPU of a pod, such as 96Gi."""
    shm: str = "16Gi"
    """The size of /dev/shm, with which processes exchange tensors. The usual 64 MiB of Kubernetes are too small."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Resource limits that are added to a pod, such as rdma/hca: "1", or cpu: "8" for pods without GPUs."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Keys that are added to the pod specification, such as nodeSelector, tolerations and imagePullSecrets."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the job and its pods, such as kueue.x-k8s.io/queue-name: team-a."""
    secret: str | None = None
    """The name of a Kubernetes Secret, whose keys (such as WANDB_API_KEY) become environment variables of the job."""
    user: int = Field(1000, ge=1, lt=2**31)
    """The user id of the processes in the container. 0 (root) is not allowed."""
    port: int = Field(29400, ge=1024, le=65535)
    """The port on which torchrun in the first pod of a run waits for the other pods."""


class Site(Settings):
    """The settings of a site profile."""

    gpus_per_node: int | None = Field(None, ge=0, le=1024)
    """The number of GPUs of each node; 0 for nodes without GPUs."""
    python: AbsolutePath | None = None
    """The path of the Python interpreter with esmshard on the nodes of Slurm. By default, the interpreter that runs
    `esmshard launch`."""
    exports: dict[str, str] = Field(default_factory=dict)
    """Environment variables that every job gets, such as NCCL_SOCKET_IFNAME: ib0."""
    container: ContainerSite = ContainerSite()  # type: ignore[call-arg]
    slurm: SlurmSite = SlurmSite()  # type: ignore[call-arg]
    kubernetes: KubernetesSite = KubernetesSite()  # type: ignore[call-arg]

    @field_validator("exports")
    @classmethod
    def _names(cls, exports: dict[str, str]) -> dict[str, str]:
        for name, value in exports.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise Clash(name, f"{name!r} is no name of an environment variable")
            if name.startswith("SLURM_"):
                raise Clash(name, "is a variable that Slurm sets; remove it")
            if "\0" in value:
                raise Clash(name, "contains a NUL character, which is not allowed; remove it")
        return exports


def path() -> Path:
    """Return the path of the site profile. The file need not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "esmshard" / "site.yaml"


def load() -> Site:
    """Load the site profile. Without a file, return the default values.

    Raises:
        UsageError: with a sentence for each problem of the file, such as `site.yaml:4:3: slurm.partitoin: unknown key;
            did you mean 'partition'?`; or if $ESMSHARD_SITE names a file that does not exist.
    """
    file = path()
    if file.is_file():
        return read(file, "a site profile", Site).checked(Site)
    if os.environ.get(VARIABLE):
        raise UsageError(f"{file}: no such file, but {VARIABLE} names it; correct or unset {VARIABLE}")
    return Site()  # type: ignore[call-arg]
