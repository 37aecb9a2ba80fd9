"""Network interfaces of this machine and their addresses, by the standard library alone."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912  # the kernel fills a buffer with (interface, IPv4 address) pairs, secondary addresses included
_ENTRY = 40  # bytes of such a pair on 64-bit Linux: 16 of the name, then a sockaddr
_MAX_ENTRIES = 1024
_IPV6 = Path("/proc/net/if_inet6")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses() -> dict[IPAddress, str]:
    """The interface of every address of this machine that is up."""
    buffer = array.array("B", bytes(_ENTRY * _MAX_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        size: int = struct.unpack("iL", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, request))[0]
    found: dict[IPAddress, str] = {}
    for first in range(0, size, _ENTRY):
        entry = buffer[first : first + _ENTRY].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode().partition(":")[0]  # "eth0:1" is the label of a secondary address
        found[ipaddress.IPv4Address(entry[20:24])] = name
    if _IPV6.exists():
        for address, *_, name in map(str.split, _IPV6.read_text().splitlines()):
            found[ipaddress.IPv6Address(bytes.fromhex(address))] = name
    return found


def address_of(interface: str) -> str | None:
    """The first address of an interface, IPv4 if it has one; None if it has none that others can reach."""
    found = (address for address, name in addresses().items() if name == interface and not address.is_link_local)
    return next(map(str, sorted(found, key=lambda address: address.version)), None)


def address_towards(peer: str) -> str | None:
    """The address from which this machine would send to another; None if there is no way."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
                sock.connect(address)  # sends nothing
                return str(sock.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address; None if none has it."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"  # all of 127.0.0.0/8 is there, only 127.0.0.1 is listed
    return addresses().get(wanted)
