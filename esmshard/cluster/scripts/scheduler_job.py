"""A job for a cluster, independent of the scheduler."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """One job of a scheduler: a run on some nodes, or an array of independent workers."""

    name: str
    """The name that the scheduler shows; any text."""
    kind: Literal["finetune", "embed", "doctor"]
    """The kind of job. `finetune` and `doctor` run on all nodes together (in an array of runs, each run on its own).
    `embed` is `array` workers on one node each, which share an output directory.
    """
    arguments: tuple[str, ...]
    """Arguments of `esmshard`, without those that the scheduler sets (nodes, rendezvous): ("finetune", "/data/my.yaml",
    "optim.lr=1", "--resume", "auto"). For Kubernetes the recipe is its name, or its path in the pods.
    """
    out: str
    """The run's directory, in which status.json records the result; for `embed` the output."""
    directory: str = "/"
    """The working directory of the command, to which paths in `arguments` are relative. Kubernetes has its own."""
    reads: tuple[str, ...] = ()
    """Recipe, data and model: files or directories that a container must see."""
    nodes: int = 1
    """The largest number of nodes of a run."""
    min_nodes: int = 1
    """The smallest number of nodes with which the run continues after a loss; equal to `nodes` if it is not elastic."""
    gpus_per_node: int = 0
    nproc: int = 1
    """Processes of a node: one for each GPU, or the requested number on CPUs."""
    starts_processes: bool = False
    """Whether a single command on each node starts its `nproc` processes itself, as `embed` and a cross-validation do.
    Otherwise the scheduler starts each process.
    """
    array: int = 1
    """The number of workers of `embed` or of a sweep, or of runs of `finetune`."""
    first_seed: int | None = None
    """For an array of runs, which differ in their seeds, the first seed. Each run has its own directory `seed-N` in
    `out`. None for a single run.
    """
    max_restarts: int = 3
    """How often the processes are started again after the loss of a process or a node."""
    recipe_text: str | None = None
    """The text of a user's own recipe where it must travel with the job (Kubernetes); None for a shipped recipe."""
