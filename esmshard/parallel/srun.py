"""What the variables say by which a launcher names its processes: srun's in torch's words, and whether all are there.

Starts without torch.
"""

import os
import re
from collections.abc import Mapping

from esmshard.errors import InputError, UsageError

PORTS = range(20000, 28000)
"""Of these the first process of a step listens at one, which follows from the numbers of job and step."""


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for a process that srun started.

    Empty where another launcher has named the process already, and where srun started it alone or did not start it: a
    batch script and the shell of salloc have SLURM_NTASKS and SLURM_PROCID too, but no SLURM_STEP_NUM_TASKS above 1.

    Raises:
        UsageError: srun left out what is needed.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2 or "RANK" in environ:
        return {}
    try:
        rank, local = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        counts = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"])
        here = counts[int(environ.get("SLURM_NODEID", "0"))]
        port = PORTS[(int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))) % len(PORTS)]
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"srun started {tasks} processes, but their SLURM_ variables cannot be read ({error}); start one process a "
            "machine, as `esmshard launch` writes it, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT "
            "in each"
        ) from None
    return {
        "RANK": str(rank),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or ("127.0.0.1" if len(counts) == 1 else first_host(nodes)),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def join() -> None:
    """Take part in the step of srun that started this process, if it is one: from here on its variables say so.

    Raises:
        UsageError: srun left out what is needed.
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
