"""The address and the network interface of this machine that other machines can reach. No torch."""

import ipaddress
import socket
import struct
import sys
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR in <linux/sockios.h>


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host; none if its name is unknown, for example while a container starts."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def loopback() -> str:
    """Return the loopback address of this machine: that of IPv6 if there is one.

    torch looks up the name of each address that it connects to, and writes 127.0.0.1 as ::ffff:127.0.0.1. Often only a
    name server has a name for that. Without a name server each process would wait for an answer and print a warning.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return "127.0.0.1"
    return "::1"


def towards(host: str, port: int) -> str | None:
    """Return the address from which this machine would connect to a host; None without a route. Nothing is sent."""
    for family, address in resolve(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def own(host: str, port: int) -> str | None:
    """Return this machine's address for processes that connect at a host. The host may be this machine by its name.

    Debian's /etc/hosts gives a machine's name the address 127.0.1.1, which other machines cannot reach. The address of
    the default route is returned in that case.
    """
    found = towards(host, port)
    by_name = host != "localhost" and not _is_address(host)
    if found is not None and is_loopback(found) and by_name:
        return towards("192.0.2.1", 9) or found  # RFC 5737 reserves this address, so no machine has it
    return found


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one; empty if the system does not provide them."""
    if sys.platform != "linux":
        return {}
    import fcntl  # Windows does not have this module

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface(address: str) -> str | None:
    """Return the network interface that has an address, such as `eth0`; None if the system does not provide it."""
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
