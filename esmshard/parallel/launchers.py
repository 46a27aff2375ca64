"""The conversion of the variables of srun to those of torch, and a check that none is missing.

torchrun and `accelerate launch` set torch's variables themselves. This module does not import torch.
"""

import os
import re
from collections.abc import Mapping

from esmshard.errors import InputError, UsageError

PORTS = range(20000, 28000)
"""The ports from which the port of rank 0 is chosen, by the numbers of the job and its step."""


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for a task of srun.

    The result is empty if another launcher has already set RANK, or if this process is alone. A batch script and the
    shell of salloc also have SLURM_NTASKS and SLURM_PROCID, but no SLURM_STEP_NUM_TASKS above 1.

    Raises:
        UsageError: if a variable of srun is missing, or mpirun started several processes.
    """
    if "RANK" in environ:
        return {}
    # mpirun is checked first: in a job of Slurm it starts its daemons by srun, so its processes inherit srun's
    # variables. srun sets PMI_SIZE, too, and not MPI_LOCALNRANKS.
    size = environ.get("OMPI_COMM_WORLD_SIZE") or (environ.get("PMI_SIZE") if "MPI_LOCALNRANKS" in environ else None)
    if size not in (None, "1"):
        raise UsageError(f"mpirun started {size} processes, and each would be alone; start them with torchrun or srun")
    return _of_srun(environ)


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
            f"srun started {tasks} processes, but their SLURM_ variables cannot be read ({error}); use the script "
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
    """Set torch's variables in this process if srun started it. They stay set.

    Raises:
        UsageError: if a variable of the launcher is missing.
    """
    os.environ.update(variables())


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` if only some of RANK, WORLD_SIZE and so on are set, `InputError` if a value is no rank.

    Rank 0 prints a `UsageError` for all ranks. A process without a valid rank must print its own error.
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
    """Return the first host of Slurm's node list.

    >>> first_host("gpu[007-009,12],login")
    'gpu007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _counts(text: str) -> list[int]:
    """Return the number of tasks of each machine: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
