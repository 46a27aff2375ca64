"""A process that writes gloo's interface, and where it and its launcher listen. `python listening.py FILE`"""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from esmshard.parallel.process_group import world


def listening(pid: int) -> list[str]:
    """Addresses on which a process accepts connections, from the kernel's tables."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                raw = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))  # 32-bit words of this machine
                found.append(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw))
    return sorted(found)


def main() -> None:
    with world(30) as ranks:
        ranks.sum([1])
        found = [os.environ.get("GLOO_SOCKET_IFNAME", "any"), *listening(os.getppid()), *listening(os.getpid())]
        Path(f"{sys.argv[1]}-{ranks.rank}").write_text(" ".join(found))
        ranks.sum([1])


if __name__ == "__main__":
    main()
