"""Whether the processes of a run do train together: looked at once, before the first step."""

from collections.abc import Callable, Mapping

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
