"""What the routes that set calls by torch's process groups share: the groups, and what is in force on each.

Routes differ in how a call is made and timed; which groups there are, how far each has come in the table, and how a
route leaves the job is the same.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from lagom_overlap.collective import CommunicatorId, ConfigTable
from lagom_overlap.errors import BackendError
from lagom_overlap.online.guest import safely
from lagom_overlap.online.routes.base import NOTHING, CallCount, StepKeys, TableCursor

_log = logging.getLogger(__name__)


_DISPATCHES_NOTHING: Final[Any] = torch._C._disabled_torch_dispatch_impl
_is_wrapped: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor
_num_modes: Final[Callable[[], int]] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether a call with these is one collective of their own numbers, issued now.

    Of fake tensors torch issues none, one that is traced has to stay visible to the tracer, and a class of tensors with
    a dispatch of its own, or one of torch.func's, does with a call what it likes.
    """
    for tensor in tensors:
        has_own_dispatch = type(tensor).__torch_dispatch__ is not _DISPATCHES_NOTHING
        if has_own_dispatch or _is_wrapped(tensor) or tensor.is_neg():
            return False
    modes = [torch._C._get_dispatch_stack_at(place) for place in range(_num_modes())]
    return not any(getattr(mode, "is_infra_mode", bool)() for mode in modes)


@dataclass(slots=True)
class JobGroup:
    """A process group of the job: its name on all ranks, its calls of this step, and how far it is in the table."""

    group: dist.ProcessGroup
    id: CommunicatorId
    step_keys: StepKeys
    cursor: TableCursor
    num_calls: int = 0
    """Of those that could be set, since this process met the group."""
    issued_at_last: int | None = None
    """See `CallCount`."""


G = TypeVar("G", bound=JobGroup)


class GroupRoute(ABC, Generic[G]):
    """The part of a `Route` that is by process groups; `_is_settable` and `_open` say which groups, and as what."""

    def __init__(self) -> None:
        self._groups: dict[str, G] = {}
        self._num_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._left_alone: set[str] = set()
        """Names of groups that this process failed to open, and of those that the route has made."""
        self._table = NOTHING
        self._prepared: tuple[int, ConfigTable] | None = None
        self._before: tuple[int, ConfigTable, Mapping[str, TableCursor]] | None = None
        """The last epoch that was committed, and what was in force before, by group how far it had come."""
        self._goes_on = True
        self._is_closed = False
        self._on_close: list[Callable[[], None]] = []

    @abstractmethod
    def _is_settable(self, group: dist.ProcessGroup) -> bool:
        """Whether the route can set calls of a living group of two or more ranks."""

    @abstractmethod
    def _open(self, group: dist.ProcessGroup, communicator: CommunicatorId) -> G:
        """A group that is met for the first time, with nothing in force."""

    def _removed(self) -> None:
        """Called once the route is off the job."""

    @property
    def is_off(self) -> bool:
        """Whether it is closed, and no lease holds any more: nothing is counted from then on."""
        return self._is_closed and len(self._table) == 0

    def on_close(self, undo: Callable[[], None]) -> None:
        """Registers an adapter's `undo`, which is called when the route is removed from the job."""
        self._on_close.append(undo)

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """See `Route`: the job's own process groups of two or more ranks that this rank is in.

        A group that the job has destroyed is forgotten; another one like it is another communicator.
        """
        living = {name: group for group in list(c10d._world.pg_map) if (name := _name_of(group))}
        for name, known in list(self._groups.items()):
            if living.get(name) is not known.group:  # names start anew when all groups were destroyed
                del self._groups[name]
        for name, group in living.items():
            if name in self._groups or name in self._left_alone or group.size() < 2 or not self._is_settable(group):
                continue
            ranks = tuple(dist.get_process_group_ranks(group))
            role = (group.group_desc, ranks)
            self._left_alone.add(name)
            order = self._num_made[role]
            communicator = CommunicatorId(description=group.group_desc, ranks=ranks, creation_order=order)
            self._groups[name] = self._open(group, communicator)
            self._left_alone.remove(name)
            self._num_made[role] += 1
        return tuple(known.id for known in self._groups.values())

    def counts(self) -> Mapping[CommunicatorId, CallCount]:
        """See `Route`; a group's own name is that on all of its ranks."""
        groups = list(self._groups.items())
        return {
            group.id: CallCount(name, group.num_calls, len(group.id.ranks), issued_at_last=group.issued_at_last)
            for name, group in groups
        }

    def commit(self, epoch: int) -> None:
        """See `Route`."""
        if self._prepared is None or self._prepared[0] != epoch:
            raise BackendError(f"epoch {epoch} was not prepared")
        self._before = (epoch, self._table, {name: group.cursor for name, group in self._groups.items()})
        self._table, self._prepared = self._prepared[1], None
        for group in self._groups.values():
            group.cursor = TableCursor(self._table, group.id)

    def take_back(self, epoch: int) -> None:
        """See `Route`."""
        if self._before is not None and self._before[0] == epoch:
            _, self._table, cursors = self._before
            for name, group in self._groups.items():
                group.cursor = cursors.get(name) or TableCursor(NOTHING, group.id)

    def goes_on(self) -> bool:
        """See `Route`."""
        return self._goes_on

    def close(self) -> None:
        """See `Route`."""
        self._is_closed = True
        if self._table.lease_steps is None:  # all ranks have agreed to take it away, or nothing was set
            self._table = NOTHING
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Once closed, and the last call is made that a lease held for: as if we had never been there."""
        if not self._is_closed:
            return
        living = list(c10d._world.pg_map)
        if all(group.cursor.is_over for group in list(self._groups.values()) if group.group in living):
            self._table = NOTHING
        if self.is_off:
            undone, self._on_close = self._on_close, []
            for undo in reversed(undone):
                safely(undo)  # this may be within a call of the job
            safely(self._removed)

    def _known(self, group: dist.ProcessGroup) -> G | None:
        """The group as we know it; None if it is not ours to set, gone, or its calls are being coalesced."""
        if not isinstance(group, dist.ProcessGroup) or group in c10d._world.pg_coalesce_state:
            return None  # torch has a number for groups that a rank is not in
        if not (name := _name_of(group)):
            return None
        known = self._groups.get(name)
        if (known is None and name not in self._left_alone) or (known is not None and known.group is not group):
            try:
                self.communicators()
            except Exception as error:
                _log.warning("calls on %r are left alone: %s", group.group_desc, error)
            known = self._groups.get(name)
        return known if known is not None and known.group is group and group in c10d._world.pg_map else None


def _name_of(group: dist.ProcessGroup) -> str:
    """A group's own name; empty of a class of groups that somebody wrote in Python, which torch gives none."""
    try:
        return group.group_name
    except RuntimeError:
        return ""
