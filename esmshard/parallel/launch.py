"""Start the processes of this machine through torch's own elastic agent, beside those of other machines or alone."""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler

from esmshard.errors import InputError, UsageError
from esmshard.parallel import address, allowed, meeting
from esmshard.parallel.agent import TO_END, TO_SAVE, Agent
from esmshard.parallel.meeting import Board, Place, SharedBoard
from esmshard.parallel.nodes import Nodes
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.worker import LAUNCHER, SHARED_CORES, environment

STOP_TIMEOUT = 600.0
"""Seconds that processes have to save and leave after SIGTERM or SIGUSR1. A scheduler's own bound is mostly shorter."""


def run_local(
    arguments: Sequence[str],
    nproc: int,
    *,
    nodes: Nodes | None = None,
    max_restarts: int = 0,
    stop_timeout: float = STOP_TIMEOUT,
) -> int:
    """Run `python ARGUMENTS` in `nproc` processes of this machine, with RANK and so on in their environment.

    Signals that come here go on to the processes. The cores are shared out: each process computes with cores / nproc
    threads unless OMP_NUM_THREADS says otherwise.

    Args:
        arguments: of the interpreter, such as `-m esmshard finetune recipe.yaml`.
        nproc: processes to start.
        nodes: the machines of the run, this one among them; on each of them this function is called alike
            (`nodes.parse`). None: this machine alone.
        max_restarts: how often all are started again when one was lost: killed, crashed, or without another one
            (`InputError.transient`). Never after a user's mistake, nor when the run was asked to stop.
        stop_timeout: seconds that they have for leaving after SIGTERM or SIGUSR1; then they are killed.

    Returns:
        0 if all went well; 75 if processes left with it, or had not begun when SIGTERM came; else the exit code of the
        process whose failure was the cause, 1 if it was killed, 128 + N if that was by signal N from here.
    """
    variables = {
        LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # torch's handlers leave the processes behind at a second signal
        # The store of the launchers serves the processes, too; torch's second one listens on all addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables |= {"OMP_NUM_THREADS": str(max(1, allowed.cores() // nproc)), SHARED_CORES: "1"}
    with (
        environment(variables),
        _quiet(),
        tempfile.TemporaryDirectory(prefix="esmshard_") as notes,
        _listening() as signals,
    ):
        several = nodes is not None and nodes.most > 1
        if nodes is None or not several:
            nodes = Nodes(1, 1, "", uuid.uuid4().hex, address.loopback())
        try:
            place, handler, board, nodes = _join(nodes, several, max_restarts, lambda: bool(signals))
        except InterruptedError:
            ended = next((number for number in signals if number in TO_END), None)
            return Preempted.exit_code if ended is None else 128 + ended
        spec = WorkerSpec(
            role="default",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=handler,
            max_restarts=max_restarts,
            monitor_interval=0.1,
            master_addr=place.host,
            master_port=place.port,
        )
        if board.final is not None:  # there is nothing left to do for a machine that comes when the run is done
            return board.final.code
        agent = Agent(spec, DefaultLogsSpecs(log_dir=notes), nodes, board, signals, stop_timeout)
        with environment(_own_interface(nodes.local_addr)):
            agent.run()
        if board.cut_off or agent.is_meeting:
            _left_behind.append(handler)
        else:
            handler.shutdown()
        board.close()  # last of all: the store goes with the launcher that holds it
    return agent.exit_code


_left_behind: list[RendezvousHandler] = []
"""Those whose end would be waited for: at the garbage collection, too."""


def _known_here(nodes: Nodes) -> Nodes:
    """With the address of this machine: its name may be known to nobody, or be the same on all."""
    host, port = nodes.meeting_place
    if nodes.local_addr is None:  # now that somebody answers there, its name is known, too
        return replace(nodes, local_addr=address.own(host, port))
    found = address.resolve(nodes.local_addr, port)
    if not found:
        raise UsageError(f"--local-addr {nodes.local_addr}: nobody knows such a name; give this machine's address")
    return replace(nodes, local_addr=found[0][1])


def _join(
    nodes: Nodes, several: bool, max_restarts: int, stopped: Callable[[], bool]
) -> tuple[Place, RendezvousHandler, Board, Nodes]:
    """Find the store of a run, or hold it. One that ended a moment ago, and asked to be started again, is no longer it.

    Raises:
        InputError: if nobody holds it within the time to join.
        InterruptedError: if `stopped` says so in the meantime.
    """
    host, port = nodes.meeting_place if several else (nodes.local_addr or address.loopback(), 0)
    end = time.monotonic() + nodes.join_timeout
    while True:
        left = max(1.0, end - time.monotonic())
        place = Place(host, port, nodes.run_id, many=several, stopped=stopped, timeout=left)
        here = _known_here(nodes) if several else nodes
        try:
            handler = meeting.rendezvous(here, place.connect())
            waiting = handler.num_nodes_waiting
            board = SharedBoard(place, here, max_restarts, waiting) if several else Board(max_restarts)
        except (RendezvousConnectionError, DistError):  # it went away between two words
            time.sleep(0.5)
            continue
        if board.final is None or board.final.code == 0:
            return place, handler, board, here
        board.close()
        if stopped():
            raise InterruptedError
        if time.monotonic() > end:
            raise InputError(f"{host}:{port}: an earlier start of this run does not leave; end it")
        time.sleep(0.5)


def _own_interface(local_addr: str | None) -> dict[str, str]:
    """For gloo, which takes the address of the machine's name by itself: open to everybody, or leading nowhere."""
    name = address.interface(local_addr) if local_addr and "GLOO_SOCKET_IFNAME" not in os.environ else None
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs each failure as a page; the worker has said what is wrong already, and the rest is said here."""
    logger = logging.getLogger("torch.distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """The signals that have come so far. One that is ignored stays so: `nohup` would be in vain otherwise.

    Outside the main thread, where Python allows no handlers, none is heard.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    heard = [number for number in (*TO_SAVE, *TO_END) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
