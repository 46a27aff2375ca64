"""What is to run on a cluster, before it is put into the words of a scheduler."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a scheduler: a run on some nodes, or an array of independent workers."""

    name: str
    """As the scheduler shows it; any text."""
    kind: Literal["finetune", "embed", "doctor"]
    """`finetune` and `doctor` run on all nodes together (of an array of runs each on its own); `embed` is `array`
    workers of one node each that share an output directory."""
    arguments: tuple[str, ...]
    """Of `esmshard`, without what the scheduler knows (nodes, rendezvous): ("finetune", "/data/my.yaml", "optim.lr=1",
    "--resume", "auto"). For Kubernetes the recipe is its name, or the path at which the pods see it."""
    out: str
    """The run's directory, in which status.json tells how it ended; of `embed` the product."""
    directory: str = "/"
    """Working directory of the command, which paths in `arguments` are relative to. Kubernetes has its own."""
    reads: tuple[str, ...] = ()
    """Recipe, data and model: files or directories, for containers to see."""
    nodes: int = 1
    """Most nodes of a run."""
    min_nodes: int = 1
    """Fewest with which it goes on when nodes are lost; equal to `nodes` if it is not elastic."""
    gpus_per_node: int = 0
    nproc: int = 1
    """Processes of a node: one a GPU, or as many as are asked for on CPUs."""
    array: int = 1
    """Workers of `embed`; runs of `finetune`."""
    first_seed: int | None = None
    """Of an array of runs, which differ in their seeds: that of the first one. Each has a directory `seed-N` of its own
    in `out`. None for a single run."""
    max_restarts: int = 3
    """How often the processes are started again when one, or a node, was lost."""
    recipe_text: str | None = None
    """Text of a recipe of the user's own, for where it has to travel with the job (Kubernetes); None for a shipped
    one."""
