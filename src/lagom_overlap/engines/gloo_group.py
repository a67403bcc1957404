"""torch's gloo binding as far as we use it: the parts that its type stubs leave out, said once."""

from datetime import timedelta
from typing import Final, Protocol, cast

import torch
from torch import distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public names, but not marked as re-exported
    PrefixStore,
    Store,
    TCPStore,
)

from lagom_overlap.engines.base import Handle

__all__ = ["NEVER", "GlooGroup", "PrefixStore", "Store", "TCPStore", "open_group"]

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

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Handle:
        """To one rank."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Handle:
        """From one rank, in the order of its sends."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """How long every later call may take."""


def open_group(
    store: Store,
    rank: int,
    num_ranks: int,
    host: str | None,
    *,
    meeting_timeout: timedelta = NEVER,
    call_timeout: timedelta = NEVER,
) -> GlooGroup:
    """A group with one thread and a device, so TCP connections, of its own.

    The store must be this group's alone (a `PrefixStore`); `host` is the address to bind, None for gloo's own choice.
    The ranks meet within `meeting_timeout`, each call is done within `call_timeout`, or it raises `RuntimeError`.
    """
    # The binding calls the class and its fields with an underscore; the stubs do not know them so.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = 1
    options._timeout = meeting_timeout
    if host is None:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    group = cast("GlooGroup", dist.ProcessGroupGloo(store, rank, num_ranks, options))
    if call_timeout != meeting_timeout:
        group._set_default_timeout(call_timeout)
    return group
