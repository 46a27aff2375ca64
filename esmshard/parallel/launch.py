"""Start local processes through torch's own elastic agent."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_local(arguments: Sequence[str], nproc: int) -> int:
    """Run `python -m esmshard ARGUMENTS` in `nproc` processes of this machine; the first failure's exit code, else 0.

    The cores are shared out: each process computes with cores / nproc threads unless OMP_NUM_THREADS says otherwise.
    """
    # The agent logs each failure as a page; the worker has said what is wrong already, and the rest is said below.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    config = LaunchConfig(
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port: two runs on one machine never meet
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "esmshard", *arguments)
    except ChildFailedError as error:
        # The first to fail is the cause; the others were stopped because of it.
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        print(f"error: the process of rank {rank} was ended by {name}; out of memory, perhaps", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
