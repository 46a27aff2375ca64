"""Which address and network interface of this machine others reach it by. No torch."""

import ipaddress
import socket
import struct
import sys
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR in <linux/sockios.h>


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Addresses of a host; none while nobody knows its name, as that of a container that is being started."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the machine itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def loopback() -> str:
    """The machine's own address for itself: IPv6 where there is one.

    torch asks for the name of each address it connects to, and writes 127.0.0.1 as ::ffff:127.0.0.1, which only a name
    server may know. A machine that reaches none would wait for it, and warn in each process.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return "127.0.0.1"
    return "::1"


def towards(host: str, port: int) -> str | None:
    """This machine's own address on the way to a host; None if there is no way. Nothing is sent."""
    for family, address in resolve(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def own(host: str, port: int) -> str | None:
    """This machine's address for those who meet at a host, which may be this machine under its own name.

    Debian's /etc/hosts gives a machine's name the address 127.0.1.1, by which nobody else reaches it. Then it is the
    one on the way to anywhere.
    """
    found = towards(host, port)
    by_name = host != "localhost" and not _is_address(host)
    if found is not None and is_loopback(found) and by_name:
        return towards("192.0.2.1", 9) or found  # an address that nobody has, RFC 5737
    return found


def interfaces() -> dict[str, str]:
    """IPv4 address of each network interface that has one; empty where the system does not tell."""
    if sys.platform != "linux":
        return {}
    import fcntl  # Windows has none

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface(address: str) -> str | None:
    """Name of the network interface that has an address, as `eth0`; None where the system does not tell."""
    if is_loopback(address):
        return {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if ":" in address and sys.platform == "linux":
        wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        return next((line.split()[5] for line in lines if line.startswith(wanted)), None)
    return next((name for name, own in interfaces().items() if own == address), None)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
