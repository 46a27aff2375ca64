"""Launchers of two machines, both on this one: whatever happens at one of them, the other does likewise."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import UsageError
from esmshard.parallel import address, nodes
from esmshard.parallel.nodes import Nodes

sys.path.insert(0, str(Path(__file__).parent))
from test_launch import Launched
from test_preemption import alive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., list[Launched]]]:
    """Start a launcher for each machine, all with the same actions; at the end no process is left."""
    started: list[Launched] = []

    def start(*actions: str, least: int = 2, most: int = 2, here: int = 2, **options: Any) -> list[Launched]:
        where = f"127.0.0.1:{free_port()}"
        times = {"last_call_timeout": 1, "keep_alive_interval": 1, "join_timeout": options.pop("join_timeout", 30)}
        together = Nodes(least, most, where, "a-run", **times)
        (tmp_path / "shared").mkdir()
        for n in range(here):
            one = replace(together, local_addr=f"127.0.0.{n + 1}")
            started.append(Machine(tmp_path, n, *actions, nodes=one, **options))
            wait_for_listener(where)  # the first one's
        return started

    yield start
    for one in started:
        if one.pid:
            one.send(signal.SIGKILL)
            one.end()
    left = [pid for pid in started[0].pids() if alive(pid)] if started else []
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "orphans"


class Machine(Launched):
    """A launcher whose processes leave what they do in a directory that both machines see."""

    def __init__(self, parent: Path, number: int, *actions: str, nproc: int = 1, **options: Any) -> None:
        self.shared = parent / "shared"
        super().__init__(parent / str(number), *actions, nproc=nproc, where=self.shared, **options)

    def pids(self) -> set[int]:
        return {int(path.read_text()) for path in self.shared.glob("begun-*")}

    def ready(self, *ranks: int, attempt: int = 0) -> list[int]:
        found = wait(lambda: [self.shared / f"ready-{attempt}-{rank}" for rank in ranks])
        return [int(path.read_text()) for path in found]


def wait_for_listener(where: str) -> None:
    host, port = where.split(":")
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port))).close()
            return
        time.sleep(0.02)
    raise AssertionError(f"nobody listens at {where}")


def wait(paths: Callable[[], list[Path]]) -> list[Path]:
    end = time.monotonic() + 120
    while not all(path.is_file() for path in paths()):
        assert time.monotonic() < end, f"in vain for {paths()}"
        time.sleep(0.01)
    return paths()


def ends(both: list[Launched]) -> list[tuple[int, str]]:
    return [one.end() for one in both]


def test_both_are_done_when_the_last_process_is(machines: Callable[..., list[Launched]]) -> None:
    begin = time.monotonic()
    assert ends(machines("exit 0", "exit 0 4")) == [(0, ""), (0, "")]
    assert time.monotonic() - begin > 4


@pytest.mark.parametrize("at", [0, 1])
def test_one_is_asked_and_all_save(machines: Callable[..., list[Launched]], at: int) -> None:
    both = machines("train 0.5", "train 1")
    both[0].ready(0, 1)
    both[at].send(signal.SIGUSR1)
    time.sleep(0.3)
    both[at].send(signal.SIGTERM, signal.SIGUSR1)
    expected = ["SIGTERM", "SIGTERM"]
    expected[at] = "SIGUSR1"
    assert ends(both) == [(75, f"stopped by {name}\n") for name in expected]
    assert [(both[0].shared / f"saved-0-{rank}").read_text() for rank in (0, 1)] == expected


def test_a_mistake_ends_all_without_a_restart(machines: Callable[..., list[Launched]]) -> None:
    both = machines("stubborn", "mistake", "exit 0", max_restarts=3)
    (code, output), (other, _) = ends(both)
    assert (code, other) == (1, 1)
    assert output == "error: mistake\n"
    assert not list(both[0].shared.glob("begun-1-*"))


def test_a_usage_error(machines: Callable[..., list[Launched]]) -> None:
    assert [code for code, _ in ends(machines("exit 2", "stubborn", max_restarts=3))] == [2, 2]


def test_interrupted_at_one(machines: Callable[..., list[Launched]]) -> None:
    both = machines("wait", "wait")
    both[0].ready(0, 1)
    both[1].send(signal.SIGINT)
    assert [code for code, _ in ends(both)] == [130, 130]


def test_a_lost_process_starts_all_again_and_counts_for_all(machines: Callable[..., list[Launched]]) -> None:
    both = machines("wait", "die 9", "die 9", "wait", "wait", "die 9", max_restarts=2)
    lines = [
        rf"the process of rank {rank} on \S+ was ended by SIGKILL \(out of memory, perhaps\)" for rank in (1, 0, 1)
    ]
    expected = f"{lines[0]}; restart 1 of 2\n{lines[1]}; restart 2 of 2\nerror: {lines[2]}\n"
    for code, output in ends(both):
        assert code == 1
        assert re.fullmatch(expected, output), output


def test_who_lost_another_waits_for_the_cause(machines: Callable[..., list[Launched]]) -> None:
    both = machines("lost", "exit 75 1.5")
    assert [code for code, _ in ends(both)] == [75, 75]


def test_a_machine_comes_and_all_save_and_go_on(machines: Callable[..., list[Launched]]) -> None:
    started = machines("train 0.2", "exit 0", "exit 0", least=1, most=2, here=1)
    started[0].ready(0)
    one = Machine(started[0].shared.parent, 1, "train 0.2", "exit 0", nodes=started[0].options["nodes"])
    started.append(one)
    assert ends(started) == [
        (0, "another machine has come: all save, and go on with it\nstopped by SIGTERM\n"),
        (0, ""),
    ]
    assert (one.shared / "saved-0-0").read_text() == "SIGTERM"
    assert sorted(path.name for path in one.shared.glob("begun-1-*")) == ["begun-1-0", "begun-1-1"]


def test_a_machine_is_lost_and_not_replaced(machines: Callable[..., list[Launched]]) -> None:
    both = machines("wait", "wait", max_restarts=1, join_timeout=8)
    pids = both[0].ready(0, 1)
    os.kill(both[1].pid, signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    both[1].end()
    code, output = both[0].end()
    assert code == 1
    place = re.escape(both[0].options["nodes"].endpoint)
    assert re.fullmatch(
        r"\S+ gave no sign of life for 3 s; restart 1 of 1\n"
        rf"error: fewer than 2 machines met at {place} within 8 s, or they would not take this one in; .*\n",
        output,
    ), output


def test_the_machine_of_the_meeting_place_is_lost(machines: Callable[..., list[Launched]]) -> None:
    both = machines("train 0", "train 0", max_restarts=1)
    both[0].ready(0, 1)
    both[0].send(signal.SIGKILL)
    both[0].end()
    code, output = both[1].end()
    # Its process hears SIGTERM, as those of the lost launcher do: what they save together is not lost.
    assert code == 75, output
    assert f"{both[0].options['nodes'].endpoint} gives no answer" in output


def test_asked_to_stop_before_the_others_come(machines: Callable[..., list[Launched]]) -> None:
    (one,) = machines("train 0", here=1)
    time.sleep(1.5)
    one.send(signal.SIGTERM)
    assert one.end() == (75, "")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("2:1", "n:1", "id"), r"^--nnodes 2:1: a number of machines"),
        (("0", "n:1", "id"), r"^--nnodes 0: "),
        (("two", "n:1", "id"), r"^--nnodes two: "),
        (("2", None, "id"), r"^--nnodes: say where the machines meet: --rdzv-endpoint HOST:PORT"),
        (("2", "n:0", "id"), r"^--rdzv-endpoint n:0: HOST:PORT is expected"),
        (("2", "n:65536", "id"), r"^--rdzv-endpoint n:65536: "),
        (("2", "http://n:1", "id"), r"^--rdzv-endpoint http://n:1: "),
        (("2", "n:1", None), r"^--nnodes: no scheduler names this job; name it by --rdzv-id ID"),
        (("2", "n:1", "id", None, "join_timeout=1.5"), r"^--rdzv-conf join_timeout=1.5: KEY=SECONDS"),
        (("2", "n:1", "id", None, "is_host=1"), r"^--rdzv-conf is_host=1: .*join_timeout"),
    ],
)
def test_options_that_are_none(options: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        nodes.parse(*options)


def test_options() -> None:
    assert nodes.parse("2", "node1", "7") == Nodes(2, 2, "node1", "7")
    found = nodes.parse("1:4", "[fe80::1]:29500", "7", "me", "join_timeout=60,keep_alive_interval=2")
    assert (found.least, found.most, found.meeting_place) == (1, 4, ("fe80::1", 29500))
    assert (found.local_addr, found.join_timeout, found.patience) == ("me", 60, 6)
    assert nodes.parse("2", "node1", "7").meeting_place == ("node1", 29400)


def test_the_own_address() -> None:
    assert address.own("127.0.0.1", 1) == "127.0.0.1"
    assert address.own("localhost", 1) in ("127.0.0.1", "::1")
    assert address.own("nowhere.invalid", 1) is None
    if sys.platform == "linux":
        assert address.interface("127.0.0.1") == address.interface("::1") == "lo"
        assert address.interface("203.0.113.9") is None, "nobody has it"
