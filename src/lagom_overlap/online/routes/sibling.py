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
from collections.abc import Callable, Iterator
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
from lagom_overlap.collective.size_class import is_small
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.online.device import backend_of, job_device
from lagom_overlap.online.routes.base import NOTHING, StepKeys, StepRecord, TableCursor
from lagom_overlap.online.routes.group_route import GroupRoute, JobGroup
from lagom_overlap.online.routes.plugin_events import StepTimer, step_record

_log = logging.getLogger(__name__)

CHANNELS: Final = (2, 4, 8, 16)
"""What a sibling may be asked for: few settings, as each is a communicator that stays. Chosen, not measured."""
CHANNELS_WITH_THREADS: Final = (4, 16)
"""Fewer where threads are asked for, too, so that there are no more siblings."""
THREADS: Final = (128, 512)
"""Few and many. Chosen, not measured."""
MAX_SIBLINGS: Final = 4
"""Per process group: as many as a search can ask for, with or without threads."""
_NO_CACHE: Final = "NCCL_NO_CACHE"

Limits: TypeAlias = tuple[int | None, int | None]
"""Channels and threads of a sibling; None: NCCL's own."""
OpenSibling: TypeAlias = Callable[[dist.ProcessGroup, Limits], dist.ProcessGroup]
"""Makes a sibling and uses it once: NCCL makes a communicator at its first use, which must not fall into a step."""


_SPLITTING: Final = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
"""PyTorch 2.15's engines: backends `nccl` and `nccl2`, and `nccl-lazy`."""


@dataclass(slots=True, kw_only=True)
class _Base(JobGroup):
    """One of the job's process groups, and its siblings by their limits."""

    siblings: dict[Limits, dist.ProcessGroup]


class SiblingRoute(GroupRoute[_Base]):
    """Implements `Route` for process groups of one backend of torch (`"nccl"`)."""

    name = "sibling"
    description = "sibling communicators with their own channels (and threads, where NCCL reads them anew)"

    def __init__(self, backend: str, timer: StepTimer, open_sibling: OpenSibling) -> None:
        super().__init__()
        self._backend = backend
        # Settings are prepared in a thread of their own, and CUDA's current device is each thread's own.
        self._device = (job_device() if backend == "nccl" else None) or torch.device("cpu")
        self._timer = timer
        self._open_sibling = open_sibling
        self._calls: list[ConfigKey] = []
        self._is_measured = False

    def _is_settable(self, group: dist.ProcessGroup) -> bool:
        return self._backend in backend_of(group, self._device.type)

    def _open(self, group: dist.ProcessGroup, communicator: CommunicatorId) -> _Base:
        return _Base(group, communicator, StepKeys(communicator), TableCursor(NOTHING, communicator), siblings={})

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """See `Route`."""
        if is_small(key.num_bytes):
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
        bases = {base.id: base for base in self._groups.values()}
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

    def settle(self) -> None:
        """See `Route`: siblings stay until the job destroys its process groups, because calls may be in flight."""

    def begin_step(self, *, is_measured: bool) -> None:
        """See `Route`."""
        for base in list(self._groups.values()):
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

    def end_step(self) -> StepRecord:
        """See `Route`."""
        duration_s, timed = self._timer.end() if self._is_measured else (0.0, None)
        self._is_measured = False
        keys = tuple(self._calls)
        self._calls.clear()
        return step_record(keys, duration_s, timed)

    def group_for(self, kind: CollectiveKind, num_bytes: int, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The process group to issue the next call of this kind and size on: the job's own, or its sibling."""
        own = group or c10d._get_default_group()
        base = None if self.is_off else self._known(own)
        if base is None:
            return own
        if self._is_measured:
            self._calls.append(base.step_keys.next_key(kind, num_bytes))
        if is_small(num_bytes):
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

    def _opened(self, group: dist.ProcessGroup, limits: Limits) -> dist.ProcessGroup:
        try:
            sibling = self._open_sibling(group, limits)
            self._left_alone.add(sibling.group_name)
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
