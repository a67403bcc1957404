"""torch's gloo binding as far as we use it: the parts that its type stubs leave out, said once."""

import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Final, Protocol, TypeAlias, cast

import torch
from torch import distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public names, but not marked as re-exported
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from lagom_overlap.engines.base import Handle

__all__ = ["NEVER", "Device", "GlooGroup", "PrefixStore", "Store", "TCPStore", "device_like", "open_group"]

Device: TypeAlias = object
"""A `ProcessGroupGloo.Device`: a listening socket, and the thread that serves its connections."""

NEVER: Final = timedelta(days=1)
"""Timeout inside gloo: whoever started the ranks watches them and is the only judge of time."""


class GlooGroup(Protocol):
    """A `ProcessGroupGloo`; every call returns at once."""

    def barrier(self) -> Handle:
        """Complete when every rank has come."""

    def broadcast(self, tensors: list[torch.Tensor]) -> Handle:
        """From rank 0, in place."""

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions = ...) -> Handle:
        """In place; sums unless the options say otherwise."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Handle:
        """One output per rank."""

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]]) -> Handle:
        """One input per rank; sums."""

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, options: dist.ReduceScatterOptions
    ) -> Handle:
        """The same from one tensor, in the order of summation of the public `reduce_scatter_single`."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "dist.Work":
        """To one rank."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "dist.Work":
        """From one rank, in the order of its sends."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """How long every later call may take."""


def open_group(
    store: Store,
    rank: int,
    num_ranks: int,
    device: Device,
    *,
    meeting_timeout: timedelta = NEVER,
    call_timeout: timedelta = NEVER,
) -> GlooGroup:
    """A group with one thread of its own on a device.

    The store must be this group's alone (a `PrefixStore`). The ranks meet within `meeting_timeout`, each call is done
    within `call_timeout`, or it raises `RuntimeError`; a send or receive has to be told its time when it is waited for.
    """
    options = _options(device, meeting_timeout)
    group = cast("GlooGroup", dist.ProcessGroupGloo(store, rank, num_ranks, options))
    if call_timeout != meeting_timeout:
        group._set_default_timeout(call_timeout)
    return group


def device_like(group: dist.ProcessGroup, number: int = 0) -> Device:
    """A new device where a gloo group of the job has its own, which are numbered round and round.

    What that group binds reaches its ranks, whatever it was chosen by: GLOO_SOCKET_IFNAME, or the name of the host.
    """
    devices = group._get_backend(torch.device("cpu")).options._devices  # type: ignore[attr-defined]  # as below
    device = devices[number % len(devices)]
    address = _address_of(device)
    if address is None:  # another form than we know: the group's own device does as well, with one thread for both
        return cast("Device", device)
    return cast("Device", dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False))


def _options(device: Device, timeout: timedelta) -> "dist.ProcessGroupGloo._Options":  # type: ignore[name-defined]
    # The binding calls the class and its fields with an underscore; the stubs do not know them so.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = 1
    options._timeout = timeout
    options._devices = [device]
    return options


def _address_of(device: Device) -> str | None:
    """The address that a device listens on: a group of one rank publishes it; None if that cannot be read."""
    store = HashStore()
    try:
        dist.ProcessGroupGloo(store, 0, 1, _options(device, timedelta(seconds=10)))
        published = store.get(store.list_keys()[0])
    except (RuntimeError, IndexError):
        return None
    return _address_in(published)


def _address_in(published: bytes) -> str | None:
    """The address in what gloo publishes: length and name of the host, length and bytes of a `sockaddr_storage`."""
    with suppress(struct.error, ValueError, OSError):
        (length,) = struct.unpack_from("N", published)
        start = struct.calcsize("N") + length
        (size,) = struct.unpack_from("N", published, start)
        raw = published[start + struct.calcsize("N") :][:size]
        (family,) = struct.unpack_from("H", raw)
        if family == socket.AF_INET:
            return socket.inet_ntop(family, raw[4:8])
        if family == socket.AF_INET6:
            (scope,) = struct.unpack_from("I", raw, 24)
            return socket.inet_ntop(family, raw[8:24]) + (f"%{scope}" if scope else "")
    return None
