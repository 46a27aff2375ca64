"""The launcher brings real process groups back after a loss, and nobody else can connect to them.

As a script, this is the launcher, or the process of a rank. The last rank is killed once. Each rank writes its last
sum, gloo's interface, and where it and its launcher listen.
"""

import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command import python

from esmshard.parallel.launch import attempt, run_local
from esmshard.parallel.process_group import world


@pytest.mark.skipif(sys.platform != "linux", reason="reads the tables of Linux")
def test_processes_meet_again(tmp_path: Path) -> None:
    done = python(__file__, tmp_path, "launch", timeout=900)
    assert done.returncode == 0, done.stderr
    restarts = re.findall(r"^the process of rank (\d) was ended by SIGKILL .*; restart (\d) of 2$", done.stderr, re.M)
    assert restarts == [("1", "1")], done.stderr
    for rank in (0, 1):
        total, device, *addresses = (tmp_path / f"done-{rank}").read_text().split()
        assert total == "39", "19 and 20"
        assert device == "lo", "or gloo would take the address of the machine's name, whatever that is"
        assert len(addresses) >= 2, "the launcher's store, and gloo of this process"
        assert set(addresses) <= {"127.0.0.1", "::1"}


def listening(pid: int) -> list[str]:
    """Addresses on which a process accepts connections, from the kernel's tables."""
    sockets, addresses = set(), []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(link.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(address.partition(":")[0])
                raw = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))  # 32-bit words of this machine
                addresses.append(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw))
    return addresses


def rank_main(directory: Path) -> None:
    if attempt() and os.environ["RANK"] == "0":
        time.sleep(1)  # the others find the store as the processes before them have left it
    with world(600) as ranks:
        for step in range(20):
            (total,) = ranks.sum([ranks.rank + step])
            if attempt() == 0 and step == 10 and ranks.rank == ranks.size - 1:
                os.kill(os.getpid(), 9)
        words = [f"{total:g}", os.environ.get("GLOO_SOCKET_IFNAME", "any")]
        words += [*listening(os.getppid()), *listening(os.getpid())]
        (directory / f"done-{ranks.rank}").write_text(" ".join(words))
        ranks.sum([1])


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(run_local([__file__, sys.argv[1]], 2, max_restarts=2))
    rank_main(Path(sys.argv[1]))
