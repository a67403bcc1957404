"""Collectives on torch's gloo with two knobs that PyTorch does not give: slices, and channels to carry them.

A message is cut into slices that go round-robin over channels. A channel is a `ProcessGroupGloo` of its own with one
worker thread, one device and so its own TCP connections; it carries its slices one after another. All-to-all has no
list form on gloo: a slice is one send and one receive per peer, posted on its channel.

A call site without a row in the table, or with an untouched one, is the public PyTorch call on the default group.
More than two ranks: a sliced all-reduce may sum in another order than the native call; all-gather and all-to-all move
bytes only, and a reduce-scatter sums in gloo's order within each slice, unless `sums_as_native` asks for the native
call's (the list form that slices use differs from the single form, and with the slice: `sums_by_part`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import ceil
from typing import Protocol, cast

import torch
from torch import distributed as dist

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigKey, ConfigSpace, ConfigTable
from lagom_overlap.engines.base import Buffers, Handle
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.engines.gloo_group import NEVER, Device, GlooGroup, PrefixStore, Store, open_group
from lagom_overlap.engines.gloo_space import check_config, gloo_space
from lagom_overlap.units import MIB

# torch 2.13 renamed these two and deprecates the old names; 2.11 and 2.12 have only those.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Post = Callable[[], Handle | None]
"""Starts one piece of a collective; None if it is done when the call returns."""


@dataclass(frozen=True, slots=True)
class SlicesInFlight:
    """A handle over every piece of a sliced call; `channels` are kept for as long as it may be waited for."""

    handles: tuple[Handle, ...]
    channels: tuple[GlooGroup, ...] = ()

    def wait(self) -> None:
        """Returns when the last piece is complete."""
        for handle in self.handles:
            handle.wait()


class _Timed(Protocol):
    def wait(self, timeout: timedelta) -> object:
        """Returns when it is done, raises when the time is over."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A send or receive under way.

    Without a timeout of its own gloo gives it the time in which the group's ranks had to meet, not that of its calls: a
    rank that is late for a while, because it saves a checkpoint, would end the job.
    """

    work: _Timed
    timeout: timedelta

    def wait(self) -> None:
        """Returns when it is done."""
        self.work.wait(self.timeout)


@dataclass(slots=True)
class _Plan:
    """The pieces of one call site on its buffers, made once so that a timed call allocates nothing of its own."""

    buffers: Buffers
    posts: tuple[Post, ...]


@dataclass(slots=True)
class GlooEngine:
    """Implements `Engine`; the default process group must be open (it runs the untouched calls).

    `store` and `make_device`, which gets the channel's number, serve to open channels, which happens in `apply`, when a
    table first needs them. The timeouts are those of `open_group`. `sums_as_native`: a sliced reduce-scatter gives the
    very bits of the native call, for the price of one copy.
    """

    store: Store
    rank: int
    num_ranks: int
    make_device: Callable[[int], Device]
    meeting_timeout: timedelta = NEVER
    call_timeout: timedelta = NEVER
    sums_as_native: bool = False
    _channels: list[GlooGroup] = field(default_factory=list)
    _num_opened: int = 0
    _table: ConfigTable = field(default_factory=lambda: ConfigTable({}))
    _epoch: int = -1
    _plans: dict[ConfigKey, _Plan] = field(default_factory=dict)

    def space(self, collective: Collective) -> ConfigSpace:
        """See `Engine`."""
        return gloo_space(collective)

    def apply(self, table: ConfigTable, epoch: int) -> None:
        """See `Engine`."""
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} is not after {self._epoch}, the one in force")
        for _, config in table:
            check_config(config)
        self.open_channels(table)
        for key in list(self._plans):
            if table.get(key) != self._table.get(key):
                del self._plans[key]
        self._table, self._epoch = table, epoch

    def open_channels(self, table: ConfigTable) -> None:
        """Opens the channels that a table needs, so that `apply` has nothing left that can fail; every rank calls it.

        Raises:
            RuntimeError: if the ranks do not meet.
        """
        while len(self._channels) < _num_channels(table):
            # In the store a channel's number is never given again: a closed one's addresses stay there.
            number, self._num_opened = self._num_opened, self._num_opened + 1
            channel = open_group(
                PrefixStore(f"channel{number}", self.store),
                self.rank,
                self.num_ranks,
                self.make_device(len(self._channels)),
                meeting_timeout=self.meeting_timeout,
                call_timeout=self.call_timeout,
            )
            self._channels.append(channel)

    def close_channels(self, table: ConfigTable) -> None:
        """Closes the channels that the table does not need, and with them their threads and connections.

        No call may be in flight. Every rank calls it with the same table, and before it opens others: ranks that have
        different channels open would wait for each other in vain.
        """
        if len(self._channels) > (needed := _num_channels(table)):
            self._plans.clear()  # they hold channels
            del self._channels[needed:]

    def execute(self, key: ConfigKey, buffers: Buffers) -> Handle:
        """See `Engine`."""
        config = self._table.get(key)
        if config is None or config.is_untouched:
            return native_call(key.kind, buffers)
        plan = self._plans.get(key)
        if plan is None or plan.buffers is not buffers:
            plan = self._plans[key] = _Plan(buffers, self._plan(key, config, buffers))
        return self._posted(plan.posts)

    def run(self, key: ConfigKey, config: CommConfig, buffers: Buffers) -> Handle:
        """Starts a call under this setting, whatever table is in force; its channels are open (`open_channels`).

        For buffers that are new in every call: nothing of it is kept.
        """
        return self._posted(self._plan(key, config, buffers))

    def _posted(self, posts: tuple[Post, ...]) -> SlicesInFlight:
        handles = (post() for post in posts)
        return SlicesInFlight(tuple(handle for handle in handles if handle is not None), tuple(self._channels))

    def _plan(self, key: ConfigKey, config: CommConfig, buffers: Buffers) -> tuple[Post, ...]:
        channels = self._channels[: config.num_channels or 1]
        # The buffers', not the key's: that may stand for a class of sizes.
        num_elements = (buffers.target if key.kind.traits.takes_part else buffers.source).numel()
        slice_bytes = config.chunk_bytes or num_elements * ELEMENT_BYTES
        if key.kind is CollectiveKind.ALL_REDUCE:
            bounds = slice_bounds(buffers.source.numel(), slice_bytes // ELEMENT_BYTES)
        else:
            part = num_elements // self.num_ranks
            bounds = slice_bounds(part, slice_bytes // ELEMENT_BYTES // self.num_ranks)
            if key.kind is CollectiveKind.REDUCE_SCATTER and self.sums_as_native:
                bounds = _bounds_that_sum_alike(bounds, self.num_ranks)
        posts: list[Post] = []
        if key.kind is CollectiveKind.ALL_TO_ALL:
            posts.append(partial(_copy_own_part, self.rank, self.num_ranks, buffers))
        for index, (start, end) in enumerate(bounds):
            channel = channels[index % len(channels)]
            posts.extend(self._posts_of_slice(key.kind, channel, buffers, slice(start, end)))
        return tuple(posts)

    def _posts_of_slice(self, kind: CollectiveKind, channel: GlooGroup, buffers: Buffers, piece: slice) -> list[Post]:
        source, target = buffers.source, buffers.target
        match kind:
            case CollectiveKind.ALL_REDUCE:
                return [partial(channel.allreduce, [target[piece]])]
            case CollectiveKind.ALL_GATHER:
                return [partial(channel.allgather, [self._of_each_part(target, piece)], [source[piece]])]
            case CollectiveKind.REDUCE_SCATTER if self.sums_as_native and self.num_ranks > 2:
                return [partial(_reduce_scatter_as_native, channel, target[piece], self._of_each_part(source, piece))]
            case CollectiveKind.REDUCE_SCATTER:
                return [partial(channel.reduce_scatter, [target[piece]], [self._of_each_part(source, piece)])]
            case CollectiveKind.ALL_TO_ALL:
                leaving, arriving = self._of_each_part(source, piece), self._of_each_part(target, piece)
                peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
                receives: list[Post] = [partial(self._message, channel.recv, arriving[peer], peer) for peer in peers]
                return receives + [partial(self._message, channel.send, leaving[peer], peer) for peer in peers]
            case _:
                raise ValueError(f"{kind} is not offered")

    def _message(self, post: Callable[[list[torch.Tensor], int, int], _Timed], part: torch.Tensor, peer: int) -> Handle:
        return _Message(post([part], peer, 0), self.call_timeout)

    def _of_each_part(self, tensor: torch.Tensor, piece: slice) -> list[torch.Tensor]:
        """The same slice of each rank's part of a whole tensor."""
        return [part[piece] for part in tensor.chunk(self.num_ranks)]


def _reduce_scatter_as_native(channel: GlooGroup, target: torch.Tensor, parts: list[torch.Tensor]) -> Handle:
    """A slice from one tensor: beyond two ranks gloo's list form sums in another order than its single form."""
    return channel._reduce_scatter_base(target, torch.cat(parts), dist.ReduceScatterOptions())


def _num_channels(table: ConfigTable) -> int:
    """The channels that a table needs."""
    return max((config.num_channels or 1 for _, config in table if not config.is_untouched), default=0)


def slice_bounds(num_elements: int, step: int) -> list[tuple[int, int]]:
    """Start and end of each slice; the last one may be shorter."""
    step = max(1, step)
    return [(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]


def _bounds_that_sum_alike(bounds: list[tuple[int, int]], num_ranks: int) -> list[tuple[int, int]]:
    """The slices of a part if they sum it in the order of the whole, else the whole as one slice."""
    part = bounds[-1][1]
    sizes = {part, *(end - start for start, end in bounds)}
    return bounds if num_ranks == 2 or all(sums_by_part(size, num_ranks) for size in sizes) else [(0, part)]


def sums_by_part(num_elements: int, num_ranks: int) -> bool:
    """Whether gloo's ring sums all of a rank's part of that many elements in one order, that of the rank.

    The ring cuts the whole tensor into equal segments of at most 1 MiB, as many for each rank and at least two, and an
    element's order goes by its segment. Parts of another length begin within a neighbour's segment (gloo, allreduce.cc;
    measured with torch 2.13 on 3, 4 and 6 ranks).
    """
    num_segments = ceil(num_elements * num_ranks * ELEMENT_BYTES / MIB)
    return num_elements % max(2, ceil(num_segments / num_ranks)) == 0


def native_call(kind: CollectiveKind, buffers: Buffers) -> Handle:
    """What users write: the asynchronous PyTorch call on the default group."""
    match kind:
        case CollectiveKind.ALL_GATHER:
            work = _ALL_GATHER(buffers.target, buffers.source, async_op=True)
        case CollectiveKind.REDUCE_SCATTER:
            work = _REDUCE_SCATTER(buffers.target, buffers.source, async_op=True)
        case CollectiveKind.ALL_REDUCE:
            work = dist.all_reduce(buffers.target, async_op=True)
        case CollectiveKind.ALL_TO_ALL:
            work = dist.all_to_all_single(buffers.target, buffers.source, async_op=True)
        case _:
            raise ValueError(f"{kind} is not offered")
    return cast("Handle", work)  # an asynchronous call on the default group always returns its handle


def _copy_own_part(rank: int, num_ranks: int, buffers: Buffers) -> None:
    part = buffers.source.numel() // num_ranks
    own = slice(rank * part, (rank + 1) * part)
    buffers.target[own].copy_(buffers.source[own])
