"""The variables by which srun and mpirun name their processes, in torch's words; and whether all of them are there.

torchrun and `accelerate launch` set torch's variables themselves. Starts without torch.
"""

import os
import re
from collections.abc import Mapping

from esmshard.errors import InputError, UsageError

PORTS = range(20000, 28000)
"""The first process listens at one of these ports, which follows from the numbers of the job and its step."""

_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Variables of each process: its rank, how many there are, and both on its own machine."""


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for a process of srun or mpirun.

    Empty where another launcher has set RANK already, and where this process was started alone: a batch script and the
    shell of salloc have SLURM_NTASKS and SLURM_PROCID too, but no SLURM_STEP_NUM_TASKS above 1.

    Raises:
        UsageError: the launcher left out what is needed.
    """
    if "RANK" in environ:
        return {}
    # mpirun comes first: within a job of Slurm it starts its daemons by srun, whose variables its processes inherit.
    return _of_mpirun(environ) or _of_srun(environ)


def _of_mpirun(environ: Mapping[str, str]) -> dict[str, str]:
    for names in _MPI.values():
        values = [environ.get(name, "") for name in names]
        if not all(value.isdecimal() for value in values) or int(values[1]) < 2:
            continue
        rank, size, local_rank, local_size = values
        host = environ.get("MASTER_ADDR") or ("127.0.0.1" if size == local_size else None)
        if host is None:
            raise UsageError(
                f"mpirun started {size} processes on several machines, and MASTER_ADDR does not say where the first "
                'one is; add `-x MASTER_ADDR="$(hostname)" -x MASTER_PORT=29500` (MPICH: -genv NAME VALUE) on the '
                "machine of rank 0"
            )
        # On one machine all have the same parent, of which no other call of mpirun has the number.
        port = environ.get("MASTER_PORT") or str(29500 if size != local_size else PORTS[os.getppid() % len(PORTS)])
        return _torch(rank, size, local_rank, local_size, host, port)
    return {}


def _of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2:
        return {}
    try:
        rank, local = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        counts = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"])
        here = counts[int(environ.get("SLURM_NODEID", "0"))]
        step = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"srun started {tasks} processes, but their SLURM_ variables cannot be read ({error}); take the script "
            "that `esmshard launch` writes, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each "
            "process"
        ) from None
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if len(counts) == 1 else first_host(nodes))
    port = environ.get("MASTER_PORT") or str(PORTS[step % len(PORTS)])
    return _torch(str(rank), tasks, str(local), str(here), host, port)


def _torch(rank: str, size: str, local_rank: str, local_size: str, host: str, port: str) -> dict[str, str]:
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def join() -> None:
    """Join the ranks that srun or mpirun started with this process, if one of them did: set torch's variables for good.

    Raises:
        UsageError: the launcher left out what is needed.
    """
    os.environ.update(variables())


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` where RANK and its companions are there in part, `InputError` for what is no rank.

    Of a usage error the first rank speaks for all; a process without a rank speaks for itself.
    """
    named = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if not named:
        return
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in named]
    if not missing:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if not environ.get(name, "0").isdecimal():
                raise InputError(f"{name}={environ[name]}: a number is expected; unset it, or let torchrun set it")
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        if rank >= size:
            raise InputError(
                f"RANK={rank}, and WORLD_SIZE={size}: ranks go from 0 to {size - 1}; set them in each process"
            )
        if size > 1:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UsageError(
            f"{' and '.join(named)} {'is' if len(named) == 1 else 'are'} set, but not {' and '.join(missing)}, so that "
            "the processes cannot meet; on one machine `unset RANK WORLD_SIZE LOCAL_RANK` and use `--nproc N`; on "
            "several set MASTER_ADDR to the host of rank 0 and MASTER_PORT=29500 in each process"
        )


def first_host(nodes: str) -> str:
    """The first machine of Slurm's list.

    >>> first_host("gpu[007-009,12],login")
    'gpu007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _counts(text: str) -> list[int]:
    """Tasks of each machine: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
