"""Where the launchers of a run meet and what they tell each other: torch's c10d rendezvous, and a board beside it.

The store of the endpoint holds both, and is the one through which the processes meet, too. torchrun holds another one
for that on the first machine, and goes by its address for good: that machine may be the one that is lost.

A little longer than other files: the store and the board cannot be understood without each other.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from esmshard.errors import InputError
from esmshard.parallel import address
from esmshard.parallel.nodes import Nodes

SILENCE = 60.0
"""Seconds in which the store has to answer. Its machine, or the way to it, is gone after that."""

LINGER = 10.0
"""Seconds for which the launcher that holds the store waits until the others have read how the run ended."""

_LOOK = 0.3  # seconds between two looks at the board
_TRY = timedelta(seconds=60)


@dataclass(frozen=True)
class Final:
    """How the run ended, on all machines."""

    code: int
    words: str
    """Why, in one sentence, if there is something to say."""
    by: int
    """Machine that says so, by its rank."""


@dataclass(frozen=True)
class Again:
    """Why all processes are to be started again."""

    words: str
    save: bool
    """They are asked to save first: nothing is lost, but another machine has come."""


class Place:
    """The store of a run, here or on another machine, with a connection for each thread: they wait for each other.

    Args:
        host: of the endpoint.
        port: 0 for a free one, on this machine alone.
        run_id: keeps runs apart that meet at the same place.
        many: other machines have to reach it.
        stopped: whether to give up; it is asked again and again.
        timeout: seconds until somebody holds the store.

    Raises:
        InputError: if nobody does, or it is something else.
        InterruptedError: if `stopped` said so.
    """

    def __init__(
        self, host: str, port: int, run_id: str, *, many: bool, stopped: Callable[[], bool], timeout: float
    ) -> None:
        self.host, self.port, self._run_id = host, port, run_id
        self._server: TCPStore | None = None
        end = time.monotonic() + timeout
        while not (self._serve(many) or self._answers()):
            if stopped():
                raise InterruptedError
            if time.monotonic() > end:
                raise InputError(
                    f"{host}:{port} did not answer within {timeout:g} s; start the same command on that machine too, "
                    "and see that its name and port can be reached from here"
                )
            time.sleep(0.3)

    @property
    def is_here(self) -> bool:
        """Whether this process holds the store."""
        return self._server is not None

    def connect(self) -> Store:
        """A new connection.

        Raises:
            InputError: if it is no store that listens there.
            DistError: if nobody does any more.
        """
        try:
            store = TCPStore(self.host, self.port, is_master=False, timeout=_TRY)
        except RuntimeError:
            if not self._answers():  # it has just left
                raise
            raise InputError(
                f"{self.host}:{self.port}: something else listens there; choose another port for --rdzv-endpoint"
            ) from None
        return PrefixStore(f"esmshard/{self._run_id}", store)

    def _serve(self, many: bool) -> bool:
        """Hold the store if the endpoint is an address of this machine and nobody holds it yet.

        torch would listen on all addresses. Whoever reaches the port can run code here: torch pickles what it keeps.
        """
        for family, found in address.resolve(self.host, self.port):
            own_name = (
                many and address.is_loopback(found) and self.host.split(".")[0] == socket.gethostname().split(".")[0]
            )
            listener = socket.socket(family)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # Debian gives a machine's own name a loopback address, which would do for itself only.
                listener.bind(("" if own_name else found, self.port))
                listener.listen(1024)
            except OSError:  # another machine's address, or another launcher of this one was first
                listener.close()
                continue
            self.port = listener.getsockname()[1]
            self._server = TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=_TRY,
                master_listen_fd=listener.detach(),
            )
            return True
        return False

    def _answers(self) -> bool:
        """Tried with a socket of Python, for torch's would print a page for each failure."""
        try:
            socket.create_connection((self.host, self.port), 2).close()
        except OSError:
            return False
        return True


class _Handler(DynamicRendezvousHandler):
    """torch's rendezvous. The processes meet in the store of the launchers, whatever torch does by default."""

    @property
    def use_agent_store(self) -> bool:
        return True


def rendezvous(nodes: Nodes, store: Store) -> RendezvousHandler:
    """The c10d rendezvous of torch over a store. Machines whose clocks differ by more than `patience` never meet."""
    times = RendezvousTimeout(timedelta(seconds=nodes.join_timeout), timedelta(seconds=nodes.last_call_timeout))
    handler: RendezvousHandler = _Handler.from_backend(
        nodes.run_id,
        store,
        C10dRendezvousBackend(store, nodes.run_id),
        nodes.least,
        nodes.most,
        nodes.local_addr,
        times,
        nodes.keep_alive_interval,
        nodes.keep_alive_max_attempt,
    )
    return handler


class Board:
    """What the launchers tell each other, of a run with this machine only: whatever it says is how it is.

    A round is the time between two meetings. The launcher reads the attributes; only `SharedBoard` changes them by
    itself.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.restarts = 0
        """Starts after a loss so far, on all machines together."""
        self.number = -1
        """Of the round, from 0 on; the same on all machines."""
        self.rank, self.size = 0, 1
        self.launch = os.urandom(16).hex()
        """What is common to all rounds of these launchers, and to no others."""
        self.final: Final | None = None
        self.again: Again | None = None
        self.asked = False
        """A machine was asked to stop."""
        self.ended: dict[int, str] = {}
        """Machines whose processes have all ended: `done`, `left` (saved, or asked to stop), or `lost`."""
        self.gone: list[str] = []
        """Machines that give no sign of life."""
        self.waiting = False
        """Another machine has come."""
        self.cut_off = False
        """The store does not answer."""

    def meet(self, store: Store, rank: int, size: int) -> None:
        """A round begins. May wait for the first machine.

        Args:
            store: of this round alone, on a connection that may wait.
            rank: of this machine.
            size: machines.
        """
        self.rank, self.size = rank, size
        self.number += 1
        self._forget()

    def _forget(self) -> None:
        self.again, self.asked, self.ended, self.gone, self.waiting = None, False, {}, [], False

    def ask(self) -> None:
        """This machine was asked to stop: let all save, and leave."""
        self.asked = True

    def end(self, how: str) -> None:
        """The processes of this machine have ended."""
        self.ended[self.rank] = how

    def propose_again(self, words: str, *, save: bool = False, otherwise: Final | None = None) -> None:
        """Let all meet again, unless others have said how it goes on. After a loss, if that is still allowed.

        Args:
            words: why.
            save: not after a loss.
            otherwise: how the run ends if it was started again often enough.
        """
        if otherwise is not None and self.restarts >= self._max_restarts:
            self.propose_final(otherwise)
            return
        if otherwise is not None:
            self.restarts += 1
            words += f"; restart {self.restarts} of {self._max_restarts}"
        self.again = Again(words, save)

    def propose_final(self, final: Final) -> None:
        """Let the run end, unless another machine has said how."""
        self.final = self.final or final

    def began_elsewhere(self) -> bool:
        """Whether other machines have begun, and this one was not with them."""
        return False

    def close(self) -> None:
        """Nothing is told or read any more."""


class SharedBoard(Board):
    """The same for several machines. A thread reads and writes, for a store whose machine is gone may never answer.

    Args:
        place: of the store.
        nodes: the machines.
        max_restarts: of this machine; the count is that of all.
        waiting: how many machines wait to be taken in.
    """

    def __init__(self, place: Place, nodes: Nodes, max_restarts: int, waiting: Callable[[], int]) -> None:
        super().__init__(max_restarts)
        self._place, self._nodes, self._ask_waiting = place, nodes, waiting
        self._base = place.connect()
        self._lock = threading.Lock()
        self._to_do: list[Callable[[], None]] = []
        self._round: Store | None = None
        self._beats: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()
        self._answered = time.monotonic()
        self._broken, self._closing = False, threading.Event()
        self._elsewhere = False
        self.launch = str(self._base.compare_set("launch", "", self.launch).decode())
        self._read_final()
        self._thread = threading.Thread(target=self._keep_looking, name="board", daemon=True)
        self._thread.start()

    def meet(self, store: Store, rank: int, size: int) -> None:
        """See `Board`. Waits for the first machine."""
        if rank == 0:
            store.set("esmshard/number", str(_count(self._base, "rounds", 1) - 1))
        number = int(store.get("esmshard/number"))
        own = PrefixStore(f"round/{number}", self._base)
        own.set(f"name/{rank}", socket.gethostname())
        restarts = _count(self._base, "restarts", 0)
        with self._lock:
            self._forget()
            self._beats = {}
            self.number, self.rank, self.size, self.restarts = number, rank, size, restarts
            self._round = own

    def began_elsewhere(self) -> bool:
        """See `Board`."""
        return self._elsewhere and self.number < 0

    def ask(self) -> None:
        """See `Board`."""
        if not self.asked:
            self.asked = True
            self._do(lambda store: store.set("asked", "1"))

    def end(self, how: str) -> None:
        """See `Board`."""
        if self.ended.get(self.rank) != how:
            self.ended[self.rank] = how
            rank = self.rank
            self._do(lambda store: store.set(f"ended/{rank}", how))

    def propose_again(self, words: str, *, save: bool = False, otherwise: Final | None = None) -> None:
        """See `Board`; the first machine that proposes is followed."""

        def propose(store: Store) -> None:
            restarts = _count(self._base, "restarts", 0)
            said = words
            if otherwise is not None:
                if restarts >= self._max_restarts:
                    self._set_final(otherwise)
                    return
                said += f"; restart {restarts + 1} of {self._max_restarts}"
            mine = json.dumps([said, save, self.rank])
            if store.compare_set("again", "", mine).decode() == mine and otherwise is not None:
                _count(self._base, "restarts", 1)

        self._do(propose)

    def propose_final(self, final: Final) -> None:
        """See `Board`; likewise."""
        with self._lock:
            self._to_do.append(lambda: self._set_final(final))

    def close(self) -> None:
        """Whoever holds the store waits until the others know how the run ended."""
        if self.cut_off or self._broken:
            return
        self._closing.set()
        self._thread.join(LINGER + 2)

    def _do(self, what: Callable[[Store], None]) -> None:
        with self._lock:
            if (store := self._round) is not None:
                self._to_do.append(lambda: what(store))

    def _set_final(self, final: Final) -> None:
        self._base.compare_set("final", "", json.dumps([final.code, final.words, final.by]))
        self._read_final()

    def _read_final(self) -> None:
        if self.final is None and self._base.check(["final"]):
            self.final = Final(*json.loads(self._base.get("final")))

    def _keep_looking(self) -> None:
        watch = threading.Thread(target=self._watch_over, name="board-watch", daemon=True)
        watch.start()
        try:
            while not self._closing.is_set():
                self._look()
                self._answered = time.monotonic()
                self._closing.wait(_LOOK)
            self._part()
        except (RuntimeError, RendezvousError):  # the store is gone
            pass
        finally:
            self._broken = not self._closing.is_set()
            self.cut_off = self.cut_off or (self._broken and self.final is None)

    def _watch_over(self) -> None:
        """A connection to a machine that is gone may wait for an answer without end."""
        while not self._closing.wait(1) and not self.cut_off:
            self.cut_off = time.monotonic() - self._answered > SILENCE and self.final is None

    def _look(self) -> None:
        with self._lock:
            to_do, store, rank, size = self._to_do[:], self._round, self.rank, self.size
            self._to_do.clear()
        for do in to_do:
            do()
        self._read_final()
        self._elsewhere = self.number < 0 and _count(self._base, "rounds", 0) > 0
        if store is None or store is not self._round:
            return
        if self.again is None and store.check(["again"]):
            words, save, _ = json.loads(store.get("again"))
            self.restarts = _count(self._base, "restarts", 0)
            self.again = Again(words, save)
        self.asked = self.asked or store.check(["asked"])
        now = time.monotonic()
        if now - self._beats.get(rank, ("", 0.0))[1] > self._nodes.keep_alive_interval / 2:
            store.set(f"beat/{rank}", f"{now}")
            self._beats[rank] = ("", now)
        others = [other for other in range(size) if other != rank]
        for other in others:
            if other not in self.ended and store.check([f"ended/{other}"]):
                self.ended[other] = store.get(f"ended/{other}").decode()
            beat = store.get(f"beat/{other}").decode() if store.check([f"beat/{other}"]) else ""
            if other not in self._beats or self._beats[other][0] != beat:
                self._beats[other] = (beat, now)
        self._silent = {other for other in others if now - self._beats[other][1] > self._nodes.patience}
        missing = sorted(self._silent - set(self.ended))
        if missing and not self.gone:
            named = [f"name/{other}" for other in missing if store.check([f"name/{other}"])]
            self.gone = [store.get(name).decode() for name in named] or ["a machine"]
        if size < self._nodes.most and self.again is None:
            self.waiting = self._ask_waiting() > 0

    def _part(self) -> None:
        """Say goodbye. Last of all, if this is the store's."""
        store, end = self._round, time.monotonic() + LINGER
        if store is None:
            time.sleep(2 * _LOOK if self._place.is_here else 0)
            return
        store.set(f"left/{self.rank}", "1")
        if not self._place.is_here:
            return
        others = set(range(self.size)) - {self.rank} - self._silent
        while others and time.monotonic() < end:
            others -= {o for o in others if store.check([f"left/{o}"])}
            time.sleep(0.05)
        if self.waiting:
            time.sleep(4 * _LOOK)


def _count(store: Any, key: str, more: int) -> int:
    """A number that all machines count in, after it was raised by so much."""
    return int(store.add(key, more))
