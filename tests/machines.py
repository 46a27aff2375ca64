"""Two machines for tests: network namespaces with a cable between them; where these are not allowed, two addresses."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 600.0  # seconds for whatever a test waits for


@dataclass
class Machine:
    """Starts commands as if it were a machine of its own."""

    address: str
    namespace: str | None
    directory: Path
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, *command: str, log: str, **environment: str) -> "subprocess.Popen[bytes]":
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        # Names of addresses are asked for where nobody answers.
        quick = {"RES_OPTIONS": "attempts:1 timeout:1", "PYTHONUNBUFFERED": "1"}
        with open(self.directory / log, "wb") as file:
            process = subprocess.Popen(
                [*inside, *command],
                env={**os.environ, **quick, **environment},
                stdout=file,
                stderr=file,
                cwd=self.directory,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def lose(self) -> None:
        """All its processes are killed at once, launchers first."""
        for process in self.started:
            tree = [process.pid, *descendants(process.pid)]
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(120)
        self.started.clear()


@dataclass
class Pair:
    """Two machines. The first one has the lower address, and so the first rank."""

    first: Machine
    second: Machine
    is_cabled: bool
    """There is a cable, which can be cut."""

    def cut(self) -> None:
        assert self.first.namespace
        subprocess.run(["ip", "-n", self.first.namespace, "link", "set", "cable", "down"], check=True)


@contextmanager
def two_machines(directory: Path) -> Iterator[Pair]:
    """They are gone at the end, with all that runs there."""
    names = [f"esmshard{os.getpid()}{letter}" for letter in "ab"]
    cabled = sys.platform == "linux" and _cable(names)
    addresses = ["10.213.7.1", "10.213.7.2"] if cabled else ["127.0.0.1", "127.0.0.2"]
    pair = Pair(
        *(Machine(a, n if cabled else None, directory) for a, n in zip(addresses, names, strict=True)), is_cabled=cabled
    )
    try:
        yield pair
    finally:
        for machine in (pair.first, pair.second):
            machine.lose()
        if cabled:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _cable(names: list[str]) -> bool:
    a, b = names
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add cable netns {a} type veth peer name cable netns {b}",
        f"ip -n {a} addr add 10.213.7.1/24 dev cable",
        f"ip -n {b} addr add 10.213.7.2/24 dev cable",
        *(f"ip -n {name} link set {device} up" for name in names for device in ("lo", "cable")),
        f"ip netns exec {a} true",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Process ids of children, theirs, and so on."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def wait_until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, f"in vain for {what}"
        time.sleep(0.1)
