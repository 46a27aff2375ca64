"""The site profile: a YAML file with the settings that all jobs of one cluster share.

The environment variable ESMSHARD_SITE holds the path of the file. By default, the file is `esmshard/site.yaml` in the
user's configuration directory ($XDG_CONFIG_HOME, or ~/.config). Without a file, all keys have their defaults. Options
of `esmshard launch` take precedence over the profile. docs/site.md has an example and lists the keys.
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
"""The name of the environment variable with the path of the site profile."""


def _form(pattern: str, what: str) -> AfterValidator:
    """Return a pydantic validator: a text that becomes part of a script must match `pattern`. Messages say `what`."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"{value!r} must be {what}")
        return value

    return AfterValidator(check)


Word = Annotated[str, _form(r"[^\s\x00-\x1f\x7f\"'`\\#$]+", "without blanks, quotes, backslashes, backquotes, # and $")]
"""A text without blanks for an #SBATCH line of a Slurm script. Slurm does not read quotes reliably in these lines."""
Option = Annotated[
    str, _form(r"--[a-z][a-z-]*(=[^\s\x00-\x1f\x7f\"'`\\#$]+)?", "an option such as --mail-type=END, without blanks")
]
Line = Annotated[str, _form(r"(?=.*\S)[^\n\r\0]+", "one line of bash; write an entry for each line")]
Mount = Annotated[
    str,
    _form(
        r"/[^\s:,]*(:/[^\s:,]*(:[a-z+]+)?)?",
        "a directory such as /data or /data:/data:ro, an absolute path without blanks",
    ),
]
AbsolutePath = Annotated[str, _form(r"/[^\n\0]+", "an absolute path of one line")]
Quantity = Annotated[str, _form(r"\d{1,9}[A-Za-z]{0,2}", "a size such as 60G or 96Gi")]


class ContainerSite(Settings):
    """The settings for the container in which jobs run."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """How Slurm starts the container: `pyxis` with the option --container-image of srun (enroot), `apptainer` with the
    command `apptainer exec --nv`. `none` uses no container. Kubernetes always uses a container."""
    image: str | None = None
    """The name of the container image in a registry, or the path of a .sqsh or .sif file with the image."""
    mounts: tuple[Mount, ...] = Field((), strict=False)
    """Directories of data, models and runs that a container on Slurm sees, such as /shared or /data:/data:ro. The
    container also sees the working directory."""


class SlurmSite(Settings):
    """The settings for jobs on Slurm, which the command sbatch submits."""

    partition: Word | None = None
    account: Word | None = None
    time: Word | None = None
    """The time limit of a job on Slurm, such as 24:00:00 (hours:minutes:seconds)."""
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory_per_gpu: Quantity | None = None
    """The CPU memory that a job gets for each of its GPUs, such as 60G."""
    gpus: Annotated[Option, _form(r".*\{n\}.*", "with {n} for the number of GPUs")] = "--gpus-per-node={n}"
    """The sbatch option for {n} GPUs on each node, such as --gpus-per-node=a100:{n} or --gres=gpu:a100:{n}."""
    setup: tuple[Line, ...] = Field((), strict=False)
    """Lines of bash that the job runs before esmshard, such as `module load cuda/12.8`, `conda activate esm`,
    `ulimit -l unlimited` or `export ESMSHARD_CACHE=/scratch/$SLURM_JOB_ID`. The job ends if a line fails."""
    options: tuple[Option, ...] = Field((), strict=False)
    """Further options of the command sbatch, each in a form such as --qos=long or --mail-type=END."""
    grace: int = Field(180, ge=10, le=65535)
    """How many seconds before its time limit a run gets the signal to save (sbatch's option --signal=B:USR1@N)."""


class KubernetesSite(Settings):
    """The settings for jobs on a Kubernetes cluster."""

    namespace: str = "default"
    claim: str | None = None
    """The name of the PersistentVolumeClaim (ReadWriteMany) for data and results. All pods mount its volume."""
    mount: AbsolutePath = "/work"
    """The directory where the pods mount the volume of `claim`. Commands run in this directory."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory_per_gpu: Quantity | None = None
    """The CPU memory that a pod gets for each of its GPUs, such as 96Gi."""
    shm: str = "16Gi"
    """The size of /dev/shm, through which the processes of a node exchange tensors. The default 64 MiB is too small."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Further resource limits of a pod, such as rdma/hca: "1", or cpu: "8" for pods without GPUs."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the specification of a pod, such as nodeSelector, tolerations and imagePullSecrets."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Kubernetes labels of the job and its pods, such as kueue.x-k8s.io/queue-name: team-a."""
    secret: str | None = None
    """The name of the Kubernetes Secret whose keys become environment variables of the job, such as WANDB_API_KEY."""
    user: int = Field(1000, ge=1, lt=2**31)
    """The numeric user id of the processes in the container. It cannot be 0 (root)."""
    port: int = Field(29400, ge=1024, le=65535)
    """The port on which torchrun listens in the first pod of a run, so that the other pods can connect."""


class Site(Settings):
    """All settings of a site profile, which all jobs of one cluster share."""

    gpus_per_node: int | None = Field(None, ge=0, le=1024)
    """The number of GPUs of each node; 0 for nodes without GPUs."""
    python: AbsolutePath | None = None
    """The path of the Python interpreter on the nodes of Slurm, in whose environment esmshard is installed. By default,
    this is the interpreter that runs `esmshard launch`."""
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
                raise Clash(name, "is Slurm's own; it would not be what the job runs with")
            if "\0" in value:
                raise Clash(name, "holds a NUL, which no environment variable can")
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
            did you mean 'partition'?`; or if $ESMSHARD_SITE holds the path of a file that does not exist.
    """
    file = path()
    if file.is_file():
        return read(file, "a site profile", Site).checked(Site)
    if os.environ.get(VARIABLE):
        raise UsageError(f"{file}: no such file; {VARIABLE} names it as the site profile")
    return Site()  # type: ignore[call-arg]
