"""The site profile: the settings that all jobs of one cluster share.

The profile is a YAML file, named by $ESMSHARD_SITE, or else `esmshard/site.yaml` in the user's configuration directory
($XDG_CONFIG_HOME, by default ~/.config). Without a file all keys have their defaults. Options of `esmshard launch` take
precedence. docs/site.md has an example and lists the keys.
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
"""The environment variable with the path of the profile."""


def _form(pattern: str, what: str) -> AfterValidator:
    """Return the check that a text, which becomes part of a script, matches a pattern."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"{value!r} must be {what}")
        return value

    return AfterValidator(check)


Word = Annotated[str, _form(r"[^\s\x00-\x1f\x7f\"'`\\#$]+", "without blanks, quotes, backslashes, backquotes, # and $")]
"""A word of an #SBATCH line, where quotes are not reliable."""
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
    """The container in which jobs run."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """How Slurm starts the container. `none` uses no container, but the environment of `python`; `pyxis` uses srun's
    --container-image (enroot); `apptainer` uses `apptainer exec --nv`. Kubernetes always uses a container."""
    image: str | None = None
    """The name of the image in a registry, or the path of a .sqsh or .sif file."""
    mounts: tuple[Mount, ...] = Field((), strict=False)
    """Directories of data, models and runs that the container sees, such as /shared or /data:/data:ro. It also sees the
    working directory."""


class SlurmSite(Settings):
    """The settings for sbatch."""

    partition: Word | None = None
    account: Word | None = None
    time: Word | None = None
    """The time limit of a job, such as 24:00:00."""
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory_per_gpu: Quantity | None = None
    """The memory of a job for each of its GPUs, such as 60G."""
    gpus: Annotated[Option, _form(r".*\{n\}.*", "with {n} for the number of GPUs")] = "--gpus-per-node={n}"
    """The option that requests N GPUs of each node, such as --gpus-per-node=a100:{n} or --gres=gpu:a100:{n}."""
    setup: tuple[Line, ...] = Field((), strict=False)
    """Lines of bash that the job runs unchanged at its begin, such as `module load cuda/12.8`, `conda activate esm`,
    `ulimit -l unlimited` or `export ESMSHARD_CACHE=/scratch/$SLURM_JOB_ID`. The job ends if a line fails."""
    options: tuple[Option, ...] = Field((), strict=False)
    """Further options of sbatch, each in a form such as --qos=long or --mail-type=END."""
    grace: int = Field(180, ge=10, le=65535)
    """How many seconds before the time limit the run gets the signal to save (--signal=B:USR1@N)."""


class KubernetesSite(Settings):
    """The settings for the cluster."""

    namespace: str = "default"
    claim: str | None = None
    """The PersistentVolumeClaim (ReadWriteMany) with data and results, which all pods mount."""
    mount: AbsolutePath = "/work"
    """The directory where the pods see this volume. It is the working directory of the command."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory_per_gpu: Quantity | None = None
    """The memory of a pod for each of its GPUs, such as 96Gi."""
    shm: str = "16Gi"
    """Size of /dev/shm, through which the processes of a node exchange tensors. The usual 64 MiB are too small."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Further resources of a pod, such as rdma/hca: "1", or cpu: "8" for pods without GPUs."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the specification of a pod, such as nodeSelector, tolerations and imagePullSecrets."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the job and its pods, such as kueue.x-k8s.io/queue-name: team-a."""
    secret: str | None = None
    """The Secret whose keys become environment variables of the job, such as WANDB_API_KEY."""
    user: int = Field(1000, ge=1, lt=2**31)
    """The user id in the container. It is never 0."""
    port: int = Field(29400, ge=1024, le=65535)
    """The port of the rendezvous, on which torchrun listens in the first pod of a run."""


class Site(Settings):
    """The whole profile."""

    gpus_per_node: int | None = Field(None, ge=0, le=1024)
    """The number of GPUs of each node; 0 for nodes without GPUs."""
    python: AbsolutePath | None = None
    """The Python interpreter on the nodes, in whose environment esmshard is installed. By default it is the interpreter
    that runs `esmshard launch`."""
    exports: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the job, such as NCCL_SOCKET_IFNAME: ib0."""
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
    """Return the path of the profile, which need not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "esmshard" / "site.yaml"


def load() -> Site:
    """Load the site profile; without a file all values are defaults.

    Raises:
        UsageError: with one sentence for each problem, as `site.yaml:4:3: slurm.partitoin: unknown key; did you mean
            'partition'?`; or $ESMSHARD_SITE names a file that does not exist.
    """
    file = path()
    if file.is_file():
        return read(file, "a site profile", Site).checked(Site)
    if os.environ.get(VARIABLE):
        raise UsageError(f"{file}: no such file; {VARIABLE} names it as the site profile")
    return Site()  # type: ignore[call-arg]
