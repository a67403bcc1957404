"""The route of jobs whose knob no tuner plug-in reaches: calls on sibling communicators with limits of their own.

A sibling is a further communicator of the same ranks, made with `max_ctas` (NCCL 2.17 and later) and, where
`NCCL_NO_CACHE` lets NCCL read `NCCL_NTHREADS` anew (2.30.3 and later), with a number of threads. A call is issued on
the sibling of its setting. NCCL's maintainers recommend that for a number of channels per call (nccl#1572). It is also
the only way to all-to-all, whose channels are a communicator's own, rounded up to a power of two.

Each sibling has buffers of its own, and two communicators that run at once both need their blocks resident: hence few
(`MAX_SIBLINGS` per process group), made between two steps, on all ranks in one order, and used once before any
measured step, so that NCCL connects outside of it.

Frameworks hand over the choice: FSDP2 by its custom communication, DDP by a hook, plain all-to-alls by name
(`sibling_adapters`). Tested over gloo, where a sibling is just another process group; never tried on a GPU.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from lagom_overlap.collective import (
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    Subspace,
)
from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.online.device import backend_of, job_device
from lagom_overlap.online.guest import safely
from lagom_overlap.online.routes.base import NOTHING, CallCount, StepKeys, StepRecord, TableCursor
from lagom_overlap.online.routes.plugin_events import StepTimer, step_record

_log = logging.getLogger(__name__)

CHANNELS: Final = (2, 4, 8, 16)
CHANNELS_WITH_THREADS: Final = (4, 16)
THREADS: Final = (128, 512)
MAX_SIBLINGS: Final = 4
"""Per process group: as many as a search can ask for, with or without threads."""
_NO_CACHE: Final = "NCCL_NO_CACHE"

Limits: TypeAlias = tuple[int | None, int | None]
"""Channels and threads of a sibling; None: NCCL's own."""
OpenSibling: TypeAlias = Callable[[dist.ProcessGroup, Limits], dist.ProcessGroup]
"""Makes a sibling and uses it once: NCCL makes a communicator at its first use, which must not fall into a step."""


_SPLITTING: Final = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
"""PyTorch 2.15's engines: backends `nccl` and `nccl2`, and `nccl-lazy`."""


@dataclass(slots=True)
class _Base:
    """One of the job's process groups, its siblings by their limits, and its calls of this step."""

    group: dist.ProcessGroup
    id: CommunicatorId
    siblings: dict[Limits, dist.ProcessGroup]
    step_keys: StepKeys
    cursor: TableCursor
    num_calls: int = 0


class SiblingRoute:
    """Implements `Route` for process groups of one backend of torch (`"nccl"`)."""

    name = "sibling"
    description = "sibling communicators with their own channels (and threads, where NCCL reads them anew)"

    def __init__(self, backend: str, timer: StepTimer, open_sibling: OpenSibling) -> None:
        self._backend = backend
        # Settings are prepared in a thread of their own, and CUDA's current device is each thread's own.
        self._device = (job_device() if backend == "nccl" else None) or torch.device("cpu")
        self._timer = timer
        self._open_sibling = open_sibling
        self._bases: dict[str, _Base] = {}
        self._num_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._made: set[str] = set()
        self._table = NOTHING
        self._prepared: tuple[int, ConfigTable] | None = None
        self._before: tuple[int, ConfigTable, Mapping[str, TableCursor]] | None = None
        """The last epoch that was committed, and what was in force before, by group how far it had come."""
        self._calls: list[ConfigKey] = []
        self._is_measured = False
        self._goes_on = True
        self._is_closed = False
        self._on_close: list[Callable[[], None]] = []

    def on_close(self, undo: Callable[[], None]) -> None:
        """Calls `undo` when the route is taken off the job: an adapter's way back."""
        self._on_close.append(undo)

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """See `Route`: the job's own process groups of two or more ranks, not our siblings.

        A group that the job has destroyed is forgotten; another one like it is another communicator.
        """
        living: dict[str, dist.ProcessGroup] = {group.group_name: group for group in list(c10d._world.pg_map)}
        for name, base in list(self._bases.items()):
            if living.get(name) is not base.group:  # names start anew when all groups were destroyed
                del self._bases[name]
        for name, group in living.items():
            if group.size() < 2 or name in self._made or name in self._bases:
                continue
            if self._backend not in backend_of(group, self._device.type):
                continue
            ranks = tuple(dist.get_process_group_ranks(group))
            order = self._num_made[group.group_desc, ranks]
            self._num_made[group.group_desc, ranks] += 1
            known = CommunicatorId(description=group.group_desc, ranks=ranks, creation_order=order)
            self._bases[name] = _Base(group, known, {}, StepKeys(known), TableCursor(NOTHING, known))
        return tuple(base.id for base in self._bases.values())

    def counts(self) -> Mapping[CommunicatorId, CallCount]:
        """See `Route`; a group's own name is that on all of its ranks."""
        bases = list(self._bases.items())
        return {base.id: CallCount(name, base.num_calls, len(base.id.ranks)) for name, base in bases}

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """See `Route`."""
        if key.num_bytes < LEAST_BYTES:
            return None
        if "NCCL_NTHREADS" in os.environ.get(_NO_CACHE, "") and key.kind is not CollectiveKind.ALL_TO_ALL:
            return ConfigSpace((Subspace(num_channels=CHANNELS_WITH_THREADS, num_threads=THREADS),))
        return ConfigSpace((Subspace(num_channels=CHANNELS),))

    def is_exact(self, key: ConfigKey) -> bool:
        """See `Route`."""
        return not key.kind.traits.adds

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """See `Route`: makes the siblings that the table needs, in one order on all ranks, and uses each once.

        Raises:
            SpaceError: if a row asks for what a communicator cannot be limited to, or for too many siblings.
            BackendError: if a sibling cannot be made.
        """
        wanted: dict[CommunicatorId, set[Limits]] = {}
        for key, config in table:
            wanted.setdefault(key.communicator, set()).add(_limits(config))
        self.communicators()
        bases = {base.id: base for base in self._bases.values()}
        for name, limits_wanted in wanted.items():
            if name not in bases:
                raise SpaceError(f"there is no process group {name.description!r} of {len(name.ranks)} ranks")
            missing = limits_wanted - bases[name].siblings.keys()
            if len(bases[name].siblings) + len(missing) > MAX_SIBLINGS:
                raise SpaceError(
                    f"{name.description!r}: a process group has at most {MAX_SIBLINGS} siblings, it has "
                    f"{len(bases[name].siblings)} and would need {len(missing)} more"
                )
        for name in sorted(wanted, key=lambda name: (name.ranks, name.description, name.creation_order)):
            base = bases[name]
            for limits in sorted(wanted[name] - base.siblings.keys(), key=lambda pair: (pair[0] or 0, pair[1] or 0)):
                with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                    base.siblings[limits] = self._opened(base.group, limits)
        self._prepared = (epoch, table)

    def commit(self, epoch: int) -> None:
        """See `Route`."""
        if self._prepared is None or self._prepared[0] != epoch:
            raise BackendError(f"epoch {epoch} was not prepared")
        self._before = (epoch, self._table, {name: base.cursor for name, base in self._bases.items()})
        self._table, self._prepared = self._prepared[1], None
        for base in self._bases.values():
            base.cursor = TableCursor(self._table, base.id)

    def take_back(self, epoch: int) -> None:
        """See `Route`."""
        if self._before is not None and self._before[0] == epoch:
            _, self._table, cursors = self._before
            for name, base in self._bases.items():
                base.cursor = cursors.get(name) or TableCursor(NOTHING, base.id)

    def settle(self) -> None:
        """See `Route`: siblings stay until the job destroys its process groups."""

    def begin_step(self, *, is_measured: bool) -> None:
        """See `Route`."""
        for base in list(self._bases.values()):
            base.step_keys.clear()
        self._calls.clear()
        self._goes_on = True
        self._is_measured = is_measured
        if is_measured:
            self._timer.begin()

    def mark_end(self) -> None:
        """See `Route`."""
        self._goes_on = False
        if self._is_measured:
            self._timer.mark_end()

    def goes_on(self) -> bool:
        """See `Route`."""
        return self._goes_on

    def end_step(self) -> StepRecord:
        """See `Route`."""
        duration_s, timed = self._timer.end() if self._is_measured else (0.0, None)
        self._is_measured = False
        keys = tuple(self._calls)
        self._calls.clear()
        return step_record(keys, duration_s, timed)

    def close(self) -> None:
        """See `Route`; siblings stay until the job destroys its process groups, because calls may be in flight."""
        self._is_closed = True
        if self._table.lease_steps is None:  # all ranks have agreed to take it away, or nothing was set
            self._table = NOTHING
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Once closed, and the last call is made that a lease held for: as if we had never been there."""
        if not self._is_closed:
            return
        living = list(c10d._world.pg_map)
        if all(base.cursor.is_over for base in list(self._bases.values()) if base.group in living):
            self._table = NOTHING
        if len(self._table) == 0:
            undone, self._on_close = self._on_close, []
            for undo in reversed(undone):
                safely(undo)  # this may be within a call of the job

    def group_for(self, kind: CollectiveKind, num_bytes: int, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The process group to issue the next call of this kind and size on: the job's own, or its sibling."""
        own = group or c10d._get_default_group()
        # torch has a number for groups that this rank is not in; calls that it coalesces stay together.
        is_off = self._is_closed and len(self._table) == 0
        if is_off or not isinstance(own, dist.ProcessGroup) or own in c10d._world.pg_coalesce_state:
            return own
        base = self._base(own)
        if base is None:
            return own
        if self._is_measured:
            self._calls.append(base.step_keys.next_key(kind, num_bytes))
        if num_bytes < LEAST_BYTES:
            return own
        self._goes_on = True
        base.num_calls += 1
        row = base.cursor.next_row(kind, num_bytes) if len(self._table) else None
        if self._is_closed:
            self._end_if_over()
        # A CUDA graph keeps its communicators for good: what is only tried must not get into one (`graph_captures`).
        if row is None or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return own
        return base.siblings[_limits(row[1])]

    def _base(self, group: dist.ProcessGroup) -> _Base | None:
        """The group as we know it; None if it is gone, or no one of ours."""
        if group.group_name in self._made:
            return None
        base = self._bases.get(group.group_name)
        if base is None or base.group is not group:
            try:
                self.communicators()
            except Exception as error:
                _log.warning("calls on %r are left alone: %s", group.group_desc, error)
            base = self._bases.get(group.group_name)
        return base if base is not None and base.group is group and group in c10d._world.pg_map else None

    def _opened(self, group: dist.ProcessGroup, limits: Limits) -> dist.ProcessGroup:
        try:
            sibling = self._open_sibling(group, limits)
            self._made.add(sibling.group_name)
            # NCCL makes a communicator at its first use: now, not within a measured step.
            dist.all_reduce(torch.zeros(1, device=self._device), group=sibling)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"no sibling of {group.group_desc!r} could be made: {str(error).splitlines()[0]}"
            ) from error
        return sibling


def open_nccl_sibling(group: dist.ProcessGroup, limits: Limits) -> dist.ProcessGroup:
    """A further NCCL communicator of the group's ranks, limited. Never run on a GPU so far.

    Raises:
        BackendError: for a part of the world's ranks where PyTorch would split the world's communicator: NCCL's split
            is a collective of the whole world, so it would wait for ranks that are not in the group.
    """
    world = c10d._get_default_group()
    if group.size() < world.size() and splits_the_world(world):
        raise BackendError(
            f"a sibling of {group.group_desc!r} would split the communicator of all ranks, and wait for those that are "
            "not in it: start without device_id in init_process_group, and on PyTorch 2.15 with TORCH_DIST_USE_NCCL2=0"
        )
    channels, threads = limits
    options = dist.ProcessGroupNCCL.Options()
    if channels is not None:
        options.config.min_ctas, options.config.max_ctas = 1, channels
    with _threads(threads):
        sibling_group = dist.new_group(
            dist.get_process_group_ranks(group),
            pg_options=options,
            use_local_synchronization=True,
            group_desc=f"{group.group_desc}_lagom_{channels}_{threads}",
        )
        sibling = cast("dist.ProcessGroup", sibling_group)  # this rank is in it
        device = job_device()
        dist.all_reduce(torch.zeros(1, device=device), group=sibling)  # while the number of threads stands
        torch.cuda.synchronize(device)
    return sibling


def splits_the_world(world: dist.ProcessGroup) -> bool:
    """Whether PyTorch makes a group's communicator from the world's: bound to a device, or on 2.15's own engine."""
    if getattr(world, "bound_device_id", None) is not None:
        return True
    try:
        backend = world._get_backend(torch.device("cuda"))
    except RuntimeError:  # the world has none for GPUs
        return False
    return type(backend).__name__ in _SPLITTING


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    if number is None:
        yield
        return
    before = os.environ.get("NCCL_NTHREADS")
    os.environ["NCCL_NTHREADS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("NCCL_NTHREADS")
        else:
            os.environ["NCCL_NTHREADS"] = before


def _limits(config: CommConfig) -> Limits:
    for knob in ("algorithm", "protocol", "transport", "chunk_bytes"):
        if getattr(config, knob) is not None:
            raise SpaceError(f"{knob} is {getattr(config, knob)}, but a sibling communicator cannot set it")
    return config.num_channels, config.num_threads
