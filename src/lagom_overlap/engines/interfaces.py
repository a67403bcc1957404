"""The network interface on which ranks of several machines reach each other, where nobody names it.

Gloo takes GLOO_SOCKET_IFNAME, or else the address of the host's own name, which on many machines is a loopback one
("127.0.1.1 node0" in /etc/hosts) or none at all. But every rank has reached the launcher's store, so the interface on
the way there reaches the machine of rank 0; on that machine itself it is the one that has the address under which the
others see it.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Final, Protocol

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_SEEN_AT: Final = "store_seen_at"
_DISCARD_PORT: Final = 9
"""The discard port (RFC 863): any port will do to resolve an address, and nothing is sent to it."""


class WaitingStore(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def get(self, key: str) -> bytes:
        """Reads, waiting for the key to appear."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if the value is the expected one."""


def interface_to_bind(store: WaitingStore) -> str:
    """The interface for gloo to bind; empty where the user has named one, or where none is found: gloo then chooses.

    Raises:
        RuntimeError: if no rank of another machine says in time where it sees the store.
    """
    if os.environ.get(VARIABLE):
        return ""
    own, store_address = route_to(os.environ["MASTER_ADDR"])
    if not is_loopback(own):
        store.compare_set(_SEEN_AT, "", store_address)
    else:
        own = store.get(_SEEN_AT).decode()
    return next((name for name, address in interfaces() if address == own), "")


def route_to(host: str) -> tuple[str, str]:
    """This machine's address on the way to a host, and the host's; nothing is sent.

    Raises:
        RuntimeError: if there is no way.
    """
    reason: object = "it has no address"
    for family, kind, protocol, _, address in _addresses(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                reason = error
                continue
            return probe.getsockname()[0], probe.getpeername()[0]
    raise RuntimeError(f"no way to MASTER_ADDR {host!r}: {reason}")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return ip_address(address.partition("%")[0]).is_loopback


def interfaces() -> Iterator[tuple[str, str]]:
    """Name and address of every interface, both protocols, as often as it has addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        entry = first
        while entry:
            interface = entry.contents
            address = _text_of(interface.address) if interface.address else ""
            if address:
                yield interface.name.decode(), address
            entry = interface.next
    finally:
        libc.freeifaddrs(first)


def _addresses(host: str) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except OSError as error:
        raise RuntimeError(f"MASTER_ADDR {host!r} does not resolve: {error}") from error


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` up to the address."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _text_of(pointer: int) -> str:
    family = int.from_bytes(ctypes.string_at(pointer, 2), sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 8, 16))
    return ""
