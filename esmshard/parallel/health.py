"""Whether the processes of a run do train together, and as fast as each other."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from esmshard.errors import InputError
from esmshard.parallel.mesh import World

_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""In which srun, Open MPI and MPICH tell a process how many they started. `SLURM_NTASKS` would not do: a batch script
that starts a single process has it too."""


def check_first_batch(world: World, digests: Callable[[], Mapping[bytes, str]]) -> None:
    """Stop before two ranks learn from the same records: nothing else would tell, the loss falls all the same.

    Args:
        world: the ranks that take the step together.
        digests: reads this rank's share of the first step and names its records: id by digest.

    Raises:
        InputError: on all ranks alike, if a record is in the shares of two.
    """
    owners: dict[bytes, int] = {}
    for rank, share in enumerate(world.gather(world.agree(digests))):
        for digest, record_id in share.items():
            owner = owners.setdefault(digest, rank)
            if owner != rank:
                error = InputError(
                    f"ranks {owner} and {rank} would train on the same records (first: '{record_id}'); each rank must "
                    "take its own share: start through `esmshard finetune --nproc N` or torchrun, which set RANK and "
                    "WORLD_SIZE"
                )
                error.shared = True
                raise error


def started_apart(world: World, environment: Mapping[str, str]) -> str | None:
    """A sentence for a process that trains alone although a launcher started several; None for all others."""
    sizes = ((name, environment.get(name, "")) for name in _SIZES)
    started = next((f"{name} is {size}" for name, size in sizes if size.isdecimal() and int(size) > 1), None)
    if world.size > 1 or started is None:
        return None
    return (
        f"{started}, but RANK and WORLD_SIZE do not say so: each of these processes trains alone; start one process "
        "that runs `esmshard finetune --nproc N` or torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK in each"
    )


SLOW = 1.2
"""How many times the work of the others makes a rank slow."""
LEAST = 0.03
"""Seconds of a step below which no rank is called slow: of small models the noise of a machine is as much."""


def slow_ranks(busy: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Ranks that the others wait for.

    Args:
        busy: of each rank, the seconds of a step in which it was not in a collective: its own work.
        seconds: of each rank, the whole step.

    A rank is slow if it is busy for more than 1.2 times the median of the others, and if that costs a tenth of a step
    and 0.03 s: where communication takes most of the time, a ratio of what is left says little.

    >>> slow_ranks([1.0, 1.5, 1.1], [1.6, 1.6, 1.6])
    [1]
    """
    if len(busy) < 2:
        return []
    others = [median([*busy[:rank], *busy[rank + 1 :]]) for rank in range(len(busy))]
    least = max(LEAST, 0.1 * median(seconds))
    return [
        rank
        for rank, (own, other) in enumerate(zip(busy, others, strict=True))
        if own > SLOW * other and own - other > least
    ]


FULL = 0.95
"""The share of its device's memory that a rank may hold before it is said to be full."""
