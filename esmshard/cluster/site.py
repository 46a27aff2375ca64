"""The site profile: the settings that all jobs of one cluster share.

The profile is a YAML file, named by $ESMSHARD_SITE, or else `esmshard/site.yaml` in the user's configuration directory
($XDG_CONFIG_HOME, by default ~/.config). Without a file all keys have their defaults. Options of `esmshard launch` take
precedence. docs/site.md has an example and lists the keys.

`${VAR}` is expanded where the profile is read, in python, scratch, container.image, container.mounts and exports; `~`
in all of these but exports. In scratch, `${SLURM_...}` is left for the job: `/scratch/${SLURM_JOB_ID}`.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from esmshard.errors import UsageError
from esmshard.recipe.section_base import Clash, Settings
from esmshard.recipe.yaml_keys import Tree, read

VARIABLE = "ESMSHARD_SITE"
"""The environment variable with the path of the profile."""

OF_THE_JOB = r"SLURM_\w+"
"""The variables of `scratch` that have a value only in the job."""

_WORD = re.compile(r"[^\s\x00-\x1f\x7f\"'`\\#$]+", re.ASCII)
_TIME = re.compile(r"\d{1,6}(:\d\d){0,2}|\d{1,5}-\d{1,2}(:\d\d){0,2}", re.ASCII)


def directive(value: str) -> str:
    """Check a value for an #SBATCH line, which has neither reliable quoting nor a second line.

    Raises:
        ValueError: if the value cannot stand in such a line.
    """
    if not _WORD.fullmatch(value):
        raise ValueError(
            f"{value!r} cannot stand in an #SBATCH line; use no blanks, quotes, backslashes, backquotes, # or $"
        )
    return value


def time_limit(value: str) -> str:
    """Check a time for sbatch, such as 24:00:00, 2-12:00:00 or 90 (minutes).

    Raises:
        ValueError: if it is no such time.
    """
    if not _TIME.fullmatch(value):
        raise ValueError(f"must be a time such as 24:00:00, 2-12:00:00 or 90 (minutes), not {value!r}")
    return value


class ContainerSite(Settings):
    """The container in which jobs run."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """How Slurm starts the container. `none` uses no container, but the environment of `python`; `pyxis` uses srun's
    --container-image (enroot); `apptainer` uses `apptainer exec --nv`. Kubernetes always uses a container."""
    image: str | None = None
    """The name of the image in a registry, or the path of a .sqsh or .sif file."""
    mounts: tuple[str, ...] = Field((), strict=False)
    """Directories of the node that the container sees, such as /data or /data:/data:ro. The directories of the run
    need not be listed."""

    @field_validator("mounts")
    @classmethod
    def _places(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            if not re.fullmatch(r"/[^:,\n]*(:/[^:,\n]*(:[a-z+]+)?)?", mount):
                raise ValueError(
                    f"{mount!r} must be a directory such as /data, /data:/data or /data:/data:ro, with an absolute path"
                )
        return mounts


class SlurmSite(Settings):
    """The settings for sbatch."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    """The time limit of a job, such as 24:00:00."""
    cpus_per_gpu: int | None = Field(None, ge=1, le=4096)
    memory: str | None = None
    """The memory of a job on each node, such as 480G."""
    gpu_type: str | None = None
    """The type of the GPUs, if the site has several types: with a100, the job requests a100:4 and not 4."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """The option that requests GPUs: `gpus-per-node` writes --gpus-per-node=a100:4, `gres` writes --gres=gpu:a100:4."""
    setup: tuple[str, ...] = Field((), strict=False)
    """Lines of bash that the job runs unchanged before it loads `modules`, such as `module use /apps/modules`,
    `source /opt/conda/etc/profile.d/conda.sh`, `conda activate esm` and `ulimit -l unlimited`. The job ends if a line
    fails."""
    modules: tuple[str, ...] = Field((), strict=False)
    """Modules that `module load` loads after `setup`."""
    options: tuple[str, ...] = Field((), strict=False)
    """Further options of sbatch, each in a form such as --mail-type=END."""
    grace: int = Field(180, ge=10, le=65535)
    """How many seconds before the time limit the run gets the signal to save (--signal=B:USR1@N)."""

    @field_validator("gpu_type")
    @classmethod
    def _type(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value, re.ASCII):
            raise ValueError(f"must be the name of a type of GPU, such as a100, not {value!r}")
        return value

    @field_validator("setup")
    @classmethod
    def _lines(cls, setup: tuple[str, ...]) -> tuple[str, ...]:
        for line in setup:
            if re.search(r"[\n\r\0]", line) or not line.strip():
                raise ValueError(f"{line!r} must be one line of bash; write an entry for each line")
        return setup

    @field_validator("partition", "account", "qos", "constraint")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        return None if value is None else directive(value)

    @field_validator("time")
    @classmethod
    def _limit(cls, value: str | None) -> str | None:
        return None if value is None else time_limit(value)

    @field_validator("memory")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d{1,9}[KMGT]?", value, re.ASCII):
            raise ValueError(f"must be a size such as 480G, not {value!r}")
        return value

    @field_validator("modules")
    @classmethod
    def _modules(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        for module in modules:
            if not re.fullmatch(r"[A-Za-z0-9][\w./+:@-]*", module, re.ASCII):
                raise ValueError(f"{module!r} is no name of a module, such as cuda/12.8")
        return modules

    @field_validator("options")
    @classmethod
    def _options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.match(r"--[a-z][a-z-]*(=.|$)", option):
                raise ValueError(f"{option!r} must be an option of sbatch in its long form, as --mail-type=END")
            directive(option)
        return options


class KubernetesSite(Settings):
    """The settings for the cluster."""

    namespace: str = "default"
    claim: str | None = None
    """The PersistentVolumeClaim (ReadWriteMany) with data and results, which all pods mount."""
    mount: str = "/work"
    """The directory where the pods see this volume. It is the working directory of the command."""
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    """CPU cores of a pod with all GPUs of a node, such as 16. A pod with fewer GPUs gets a proportional share."""
    memory: str | None = None
    """Memory of a pod with all GPUs of a node, such as 128Gi. A pod with fewer GPUs gets a proportional share."""
    shm: str = "16Gi"
    """Size of /dev/shm, through which the processes of a node exchange tensors. The usual 64 MiB are too small."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Further resources of a pod, such as rdma/hca: "1"."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, str], ...] = Field((), strict=False)
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the job and its pods, such as kueue.x-k8s.io/queue-name: team-a."""
    pull_secret: str | None = None
    """The Secret with the credentials for pulling images."""
    secret: str | None = None
    """The Secret whose keys become environment variables of the job, such as WANDB_API_KEY."""
    user: int = Field(1000, ge=1, lt=2**31)
    """The user id in the container. It is never 0."""
    port: int = Field(29400, ge=1024, le=65535)
    """The port of the rendezvous, on which torchrun listens in the first pod of a run."""

    @field_validator("namespace")
    @classmethod
    def _label(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
            raise ValueError(f"{value!r} must have at most 63 lower-case letters, digits and '-'")
        return value

    @field_validator("mount")
    @classmethod
    def _place(cls, value: str) -> str:
        if not re.fullmatch(r"/[^:]*[^:/]", value) or value in ("/tmp", "/dev/shm"):  # noqa: S108
            raise ValueError(f"{value!r} must be an absolute path of its own, such as /work")
        return value


class Site(Settings):
    """The whole profile."""

    gpus_per_node: int | None = Field(None, ge=0, le=1024)
    """The number of GPUs of each node; 0 for nodes without GPUs."""
    python: str | None = None
    """The Python interpreter on the nodes, in whose environment esmshard is installed. By default it is the interpreter
    that runs `esmshard launch`."""
    exports: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the job, such as NCCL_SOCKET_IFNAME: ib0."""
    scratch: str | None = None
    """A fast directory of each node for caches and temporary files."""
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

    @field_validator("python", "scratch")
    @classmethod
    def _path(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("/", "${SLURM_")):
            raise ValueError(f"must be an absolute path, not {value!r}")
        if value is not None and ("\0" in value or "\n" in value):
            raise ValueError("must be a path of one line")
        return value


def path() -> Path:
    """Return the path of the profile, which need not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "esmshard" / "site.yaml"


def found() -> Path | None:
    """Return the profile that `load` reads; None if there is none.

    Raises:
        UsageError: if $ESMSHARD_SITE names a file that does not exist.
    """
    place = path()
    if place.is_file():
        return place
    if os.environ.get(VARIABLE):
        raise UsageError(f"{place}: no such file; {VARIABLE} names it as the site profile")
    return None


def load() -> Site:
    """Load the site profile; without a file all values are defaults.

    Raises:
        UsageError: with one sentence for each problem, as `site.yaml:4:3: slurm.partitoin: unknown key; did you mean
            'partition'?`.
    """
    place = found()
    if place is None:
        return Site()  # type: ignore[call-arg]
    tree = read(place, "a site profile", Site, may_be_empty=True)
    _expand(tree, ("python",))
    _expand(tree, ("scratch",), keep=OF_THE_JOB)
    _expand(tree, ("exports",), home=False)
    for key in ("image", "mounts"):
        _expand(tree, ("container", key))
    return tree.checked(Site)


def _expand(tree: Tree, keys: Sequence[str], *, home: bool = True, keep: str = "") -> None:
    for node, last in tree.texts(*keys):
        exact = (*keys, last) if isinstance(last, str) and last != keys[-1] else tuple(keys)
        text = tree.variables(str(node[last]), exact, keep)
        if text is None and isinstance(last, str):
            del node[last]  # one message for a key is enough
        elif text is not None:
            node[last] = str(Path(text).expanduser()) if home and text.startswith("~") else text
