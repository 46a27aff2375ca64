"""The site profile: what all jobs of one cluster have in common, written once by whoever knows it.

A YAML file, named by $ESMSHARD_SITE, else `esmshard/site.yaml` in the user's configuration directory
($XDG_CONFIG_HOME, by default ~/.config). Without a file all keys have their defaults. Options of `esmshard launch` come
before it. docs/cluster.md explains each key with an example.
"""

from typing import Literal

from pydantic import Field

from esmshard.task_settings import Settings

VARIABLE = "ESMSHARD_SITE"
"""Environment variable: path of the profile."""


class ContainerSite(Settings):
    """In which image jobs run."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """How Slurm starts it: `none` runs the environment of `python`; `pyxis` through srun's --container-image (enroot);
    `apptainer` through `apptainer exec --nv`. Kubernetes always has one."""
    image: str | None = None
    """Name in a registry, or the path of a .sqsh or .sif file."""
    mounts: tuple[str, ...] = Field((), strict=False)
    """Directories of the machine that the container sees, as /data or /data:/data:ro. The run's own directories are
    added by themselves."""


class SlurmSite(Settings):
    """What sbatch is told."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    """Time limit of a job, as 24:00:00."""
    cpus_per_gpu: int | None = Field(None, ge=1)
    memory: str | None = None
    """Of a node, as 480G."""
    modules: tuple[str, ...] = Field((), strict=False)
    """Loaded by `module load` before anything else."""
    options: tuple[str, ...] = Field((), strict=False)
    """Further options of sbatch, each as --mail-type=END."""
    grace: int = Field(180, ge=10, le=65535)
    """Seconds before the time limit at which the run is asked to save (--signal=USR1@N)."""
    port: int = Field(29400, ge=1024, le=65535)
    """Where the nodes meet; jobs that share a node take this plus a number drawn from their job id."""


class KubernetesSite(Settings):
    """What the cluster is told."""

    namespace: str = "default"
    claim: str | None = None
    """PersistentVolumeClaim that all pods mount (ReadWriteMany), with data and results."""
    mount: str = "/work"
    """Where the pods see it; the working directory of the command."""
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    """CPU cores of a pod, as 16."""
    memory: str | None = None
    """Of a pod, as 128Gi."""
    shm: str = "16Gi"
    """Size of /dev/shm, through which processes of one node exchange tensors; the runtime's own 64 MiB is too small."""
    resources: dict[str, str] = {}
    """Further resources of a pod, such as rdma/hca: "1"."""
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, str], ...] = Field((), strict=False)
    labels: dict[str, str] = {}
    """Of job and pods, such as kueue.x-k8s.io/queue-name: team-a."""
    pull_secret: str | None = None
    user: int = Field(1000, ge=1)
    """User id in the container; never 0."""
    port: int = Field(29400, ge=1024, le=65535)


class Site(Settings):
    """The whole profile."""

    gpus_per_node: int | None = Field(None, ge=0)
    """0 for machines without GPUs."""
    python: str | None = None
    """Interpreter of the environment in which esmshard is installed, on the nodes; by default the one that renders."""
    exports: dict[str, str] = {}
    """Environment variables of the job, such as NCCL_SOCKET_IFNAME: ib0."""
    scratch: str | None = None
    """Fast directory of each node, for caches and temporary files."""
    container: ContainerSite = ContainerSite()  # type: ignore[call-arg]
    slurm: SlurmSite = SlurmSite()  # type: ignore[call-arg]
    kubernetes: KubernetesSite = KubernetesSite()  # type: ignore[call-arg]
