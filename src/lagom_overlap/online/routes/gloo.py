"""The route over gloo: calls handed to the engine's slices and channels, timed by waiting while the computation runs.

An adapter hands every collective of its framework to `call`, with the native call to make where nothing is set. The
engine runs fp32 sums, and gathers and exchanges of fp32, in equal parts; everything else is native and not counted.
Each process group has an engine of its own, whose channels open in `prepare`.

Whether a call is counted, and what it gets, depends on what all ranks of its group share: the kind, the size, the
numbers' type and how many such calls the group has had. What one rank's tensors have of their own (a subclass, a
layout with gaps, memory of inference mode) is made up for by copies.

Results are those of the native calls bit by bit, but for an all-reduce over more than two ranks, whose slices gloo sums
in another order (`is_exact`).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from threading import local
from time import perf_counter
from typing import Final, cast

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from lagom_overlap.collective import (
    Collective,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
)
from lagom_overlap.collective.size_class import is_small
from lagom_overlap.engines.base import Buffers, Handle
from lagom_overlap.engines.gloo_engine import GlooEngine
from lagom_overlap.engines.gloo_group import PrefixStore, Store, device_like
from lagom_overlap.engines.gloo_space import check_config, gloo_space
from lagom_overlap.errors import BackendError
from lagom_overlap.online.device import backend_of, issued_on
from lagom_overlap.online.routes.base import (
    GLOO,
    NOTHING,
    CallRecord,
    StepKeys,
    StepRecord,
    TableCursor,
)
from lagom_overlap.online.routes.gloo_clock import CallClock, ClockMark
from lagom_overlap.online.routes.gloo_work import RunWork
from lagom_overlap.online.routes.group_route import GroupRoute, JobGroup, is_plain

_log = logging.getLogger(__name__)
STEPS_UNTIL_CLOSED: Final = 2
"""Steps after a search before its channels are closed: the step in which it ends, and a whole one."""


@dataclass(slots=True, kw_only=True)
class _Group(JobGroup):
    """A process group as we run it."""

    engine: GlooEngine
    clock: CallClock | None = None


class GlooRoute(GroupRoute[_Group]):
    """Implements `Route` for the gloo process groups of this process.

    What is done to the framework, and how it is taken back, is the adapter's.
    """

    name = GLOO
    description = "slices and channels of torch's gloo, timed on the CPU"

    def __init__(self, store: Store, *, meeting_timeout_s: float = 60.0) -> None:
        super().__init__()
        self._store = store
        self._meeting_timeout = timedelta(seconds=meeting_timeout_s)
        self._steps_settled: int | None = None
        """Steps since `settle`; None while a search is on."""
        self._is_measuring = False
        self._began = self._ended = 0.0
        self._native = local()
        self._marks: list[tuple[ConfigKey, ClockMark]] = []

    @property
    def is_measuring(self) -> bool:
        """Whether calls are timed now."""
        return self._is_measuring

    @property
    def is_active(self) -> bool:
        """Whether a call may be other than native: something is set, or measured."""
        return self._is_measuring or len(self._table) > 0

    @property
    def is_in_native(self) -> bool:
        """Whether this thread makes a counted call natively: what that calls in its turn is counted already."""
        return getattr(self._native, "depth", 0) > 0

    def _is_settable(self, group: dist.ProcessGroup) -> bool:
        return backend_of(group, "cpu") == "gloo"

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """See `Route`."""
        if is_small(key.num_bytes):
            return None
        try:
            return gloo_space(Collective(key.kind, key.num_bytes, len(key.communicator.ranks)))
        except BackendError:
            return None

    def is_exact(self, key: ConfigKey) -> bool:
        """See `Route`."""
        return key.kind is not CollectiveKind.ALL_REDUCE or len(key.communicator.ranks) == 2

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """See `Route`: checks the rows and opens channels; every rank of a group opens the same ones."""
        if self._is_closed:  # nobody waits for it any more, and nothing would close what it opens
            raise BackendError("the route is closed")
        for _, config in table:
            check_config(config)
        self.communicators()
        if self._steps_settled is not None:  # as the others, whose steps may have been enough for it already
            self._close_what_is_unused()
        self._steps_settled = None
        for group in list(self._groups.values()):
            group.engine.open_channels(self._rows(table, group))
            if self._is_closed:  # meanwhile: whoever waited for it has given up
                self._close_what_is_unused()
                raise BackendError("the route was closed")
        self._prepared = (epoch, table)

    def settle(self) -> None:
        """See `Route`: channels are closed once a whole step has passed, so that no call of the search is under way."""
        self._steps_settled = 0

    def _close_what_is_unused(self) -> None:
        for group in list(self._groups.values()):
            group.engine.close_channels(self._rows(self._table, group))
            if group.clock is not None:  # another is made where a step is measured again
                group.clock.close()
                group.clock = None

    def begin_step(self, *, is_measured: bool) -> None:
        """See `Route`."""
        if self._steps_settled is not None and self._steps_settled < STEPS_UNTIL_CLOSED:
            self._steps_settled += 1
            if self._steps_settled == STEPS_UNTIL_CLOSED:
                self._close_what_is_unused()
        for group in list(self._groups.values()):
            group.step_keys.clear()
        self._marks = []
        self._is_measuring = is_measured
        self._goes_on = True
        self._began = perf_counter()

    def mark_end(self) -> None:
        """See `Route`."""
        self._ended, self._goes_on = perf_counter(), False

    def end_step(self) -> StepRecord:
        """See `Route`."""
        duration_s = (perf_counter() if self._goes_on else self._ended) - self._began
        self._is_measuring = False
        is_timed = all(group.clock.is_idle() for group in self._groups.values() if group.clock is not None)
        calls = tuple(self._record(key, mark) for key, mark in self._marks)
        self._marks = []
        return StepRecord(duration_s=duration_s, calls=calls, is_timed=is_timed)

    def close(self) -> None:
        """See `Route`."""
        self._is_measuring = False
        for group in self._groups.values():
            if group.clock is not None:
                group.clock.close()
                group.clock = None
        super().close()

    def _removed(self) -> None:
        self._close_what_is_unused()

    def call(
        self,
        kind: CollectiveKind,
        target: torch.Tensor,
        source: torch.Tensor,
        group: dist.ProcessGroup | None,
        native: Callable[[], dist.Work | None],
        *,
        is_mean: bool = False,
    ) -> dist.Work:
        """Runs a collective as it is set; `native` is the framework's own asynchronous call, `group` None the default.

        `is_mean` divides the sum by the number of ranks, as gloo's own mean does.
        """
        known = self._eligible(kind, target, source, group)
        if known is None:
            return cast("dist.Work", native())  # an asynchronous call of a member always returns its handle
        num_bytes = _num_bytes(kind, target, source)
        # The clock waits in a thread of its own, where torch refuses to finish what was begun in inference mode, and
        # where autograd does not see what a reduce-scatter does in the end.
        is_watched = self._is_measuring and not (target.is_inference() or source.is_inference())
        is_watched = is_watched and not _is_seen_by_autograd(kind, target, source)
        mark = ClockMark() if is_watched and self._has_clock(known) else None
        issued_s = perf_counter()
        with self._counted(known, kind, num_bytes) as row:
            if row is None or row[1].is_untouched:
                handle: Handle = cast("dist.Work", native())
                finish = None
            else:
                handle, finish = _run(known.engine, row, (target, source), is_mean=is_mean)
        if finish is None and isinstance(handle, dist.Work) and mark is None:
            return handle
        if mark is not None and known.clock is not None:
            handle = known.clock.watch(handle, mark, issued_s)
            self._marks.append((known.step_keys.next_key(kind, num_bytes), mark))
        # A handle that torch made ends by itself, and one that is watched has its thread.
        is_owed = not isinstance(handle, dist.Work) and (finish is not None or kind is CollectiveKind.ALL_TO_ALL)
        results = _results_of(kind, target, len(known.id.ranks))
        return RunWork(handle, mark, finish, is_owed=is_owed, results=results)

    def joins(self, group: dist.ProcessGroup) -> None:
        """The computation stands still from now on for the group's calls under way, where nobody sees it wait."""
        now_s, known = perf_counter(), self._known(group)
        for key, mark in self._marks:
            if known is not None and key.communicator == known.id and mark.joined_s is None:
                mark.joined_s = now_s

    @contextmanager
    def noted(
        self, kind: CollectiveKind, target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Iterator[None]:
        """Counts a call that the caller makes natively in this context, because nothing is set or measured now."""
        group_state = self._eligible(kind, target, source, group)
        with (
            nullcontext() if group_state is None else self._counted(group_state, kind, _num_bytes(kind, target, source))
        ):
            yield

    @staticmethod
    def _has_clock(known: _Group) -> bool:
        """Makes it before the call: what fails is ours, and no reason to lose the call's handle."""
        try:
            known.clock = known.clock or CallClock()
        except Exception as error:
            _log.warning("calls on %r are not timed: %s", known.id.description, error)
        return known.clock is not None

    def _eligible(
        self, kind: CollectiveKind, target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None
    ) -> _Group | None:
        """The group of a call that the engine could run, the same answer on all of its ranks; else None."""
        known = None if self.is_off else self._known(group or c10d._get_default_group())
        return known if known is not None and _can_run(kind, target, source, len(known.id.ranks)) else None

    @contextmanager
    def _counted(
        self, known: _Group, kind: CollectiveKind, num_bytes: int
    ) -> Iterator[tuple[ConfigKey, CommConfig] | None]:
        """What is set for a group's next call, which is made in this context.

        It is counted before it is issued, so that whoever waits elsewhere can be told of it; one that fails was never
        issued, and does not count. One that is interrupted was: it is waited for here, or about to be.
        """
        if is_small(num_bytes):
            yield None
            return
        cursor = known.cursor
        self._goes_on, before = True, cursor.standing
        row = cursor.next_row(kind, num_bytes) if len(self._table) else None
        known.issued_at_last = None  # until it is issued: another thread may compare meanwhile
        known.num_calls += 1
        self._native.depth = getattr(self._native, "depth", 0) + 1
        try:
            yield row
        except Exception:
            known.num_calls -= 1
            cursor.go_back(before)
            raise
        finally:
            self._native.depth -= 1
        known.issued_at_last = issued_on(known.group)
        if self._is_closed:
            self._end_if_over()

    def takes(
        self, kind: CollectiveKind, target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None
    ) -> bool:
        """Whether `call` may make these tensors' collective other than natively now."""
        return self.is_active and self._eligible(kind, target, source, group) is not None

    def _record(self, key: ConfigKey, mark: ClockMark) -> CallRecord:
        """Times since the step's begin."""
        # The clock's thread may wake up after the computation did.
        joined_s, resumed_s = mark.joined_s, mark.resumed_s
        if joined_s is not None and resumed_s is None:  # unseen: until the call ended, if it had not
            resumed_s = max(joined_s, mark.ended_s)
        ended_s = min(mark.ended_s, mark.ended_s if resumed_s is None else resumed_s) - self._began
        began_s = mark.began_s - self._began
        return CallRecord(
            key=key,
            issued_s=max(0.0, mark.issued_s - self._began),
            begun_s=min(max(0.0, began_s), max(0.0, ended_s)),
            ended_s=max(0.0, ended_s),
            joined_s=None if joined_s is None else max(0.0, joined_s - self._began),
            resumed_s=None if resumed_s is None else max(0.0, resumed_s - self._began),
        )

    def _open(self, group: dist.ProcessGroup, name: CommunicatorId) -> _Group:
        backend = group._get_backend(torch.device("cpu"))
        engine = GlooEngine(
            # Names start anew when all groups were destroyed; addresses of those before are still in the store.
            store=PrefixStore(f"gloo/{group.group_name}/{name.creation_order}", self._store),
            rank=dist.get_rank(group),
            num_ranks=group.size(),
            make_device=partial(device_like, group),
            meeting_timeout=self._meeting_timeout,
            call_timeout=backend.options._timeout,
            sums_as_native=True,
        )
        return _Group(group, name, StepKeys(name), TableCursor(NOTHING, name), engine=engine)

    @staticmethod
    def _rows(table: ConfigTable, group: _Group) -> ConfigTable:
        return replace(table, rows={key: config for key, config in table if key.communicator == group.id})


def _num_bytes(kind: CollectiveKind, target: torch.Tensor, source: torch.Tensor) -> int:
    whole = target if kind.traits.takes_part else source
    return whole.numel() * whole.element_size()


def _run(
    engine: GlooEngine,
    row: tuple[ConfigKey, CommConfig],
    tensors: tuple[torch.Tensor, torch.Tensor],
    *,
    is_mean: bool,
) -> tuple[Handle, Callable[[], object] | None]:
    """Starts a call under its row; (what to wait for, what to do then)."""
    kind = row[0].kind
    is_seen = _is_seen_by_autograd(kind, *tensors)
    summed = tensors[1].clone() if is_seen else None  # as torch's own, for autograd
    whole = _as_gloo_takes(kind, tensors[0], is_source=False)
    is_in_place = _is_flat(whole) and not is_seen
    target = _flat(whole) if is_in_place or not is_seen else _row_for(whole)
    if tensors[0] is tensors[1]:
        source = target
    else:
        source = _flat(_as_gloo_takes(kind, tensors[1], is_source=True))
        if _is_overwritten(kind, source, target, engine.rank):
            source = source.clone()
    handle = engine.run(*row, Buffers(source, target))
    is_copied_by_torch = kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    if not is_mean and is_in_place and not is_copied_by_torch:
        return handle, None

    def finish() -> None:
        if is_mean:
            target.div_(len(row[0].communicator.ranks))
        if summed is not None:
            _copy_for_autograd(tensors[0], summed, target, engine, is_mean=is_mean)
            return
        if not is_in_place:
            with torch.no_grad(), torch.inference_mode() if whole.is_inference() else nullcontext():
                whole.copy_(target.view(whole.shape))
        if is_copied_by_torch and not tensors[0].is_inference():
            torch.autograd.graph.increment_version(tensors[0])  # what was saved of it for a backward pass is void

    return handle, finish


def _is_overwritten(kind: CollectiveKind, source: torch.Tensor, target: torch.Tensor, rank: int) -> bool:
    """Whether one slice may write where another has yet to read: torch's gloo reads all of the input first.

    In place, where a rank's own part of the whole is its source or target, every slice keeps to itself.
    """
    begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
    if begin >= target.data_ptr() + target.nbytes or target.data_ptr() >= end:
        return False
    match kind:
        case CollectiveKind.ALL_GATHER:
            return begin != target.data_ptr() + rank * source.nbytes
        case CollectiveKind.REDUCE_SCATTER:
            return target.data_ptr() != begin + rank * target.nbytes
        case _:
            return True


def _is_seen_by_autograd(kind: CollectiveKind, target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether autograd follows what torch does with the result when a call is waited for: gloo's reduce-scatter copies.

    An all-gather is refused then, or copied where autograd does not see it; the others write into memory.
    """
    is_followed = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
    return kind is CollectiveKind.REDUCE_SCATTER and is_followed


def _copy_for_autograd(
    output: torch.Tensor, summed: torch.Tensor, result: torch.Tensor, engine: GlooEngine, *, is_mean: bool
) -> None:
    """As torch's gloo ends a reduce-scatter: a rank's part of the copy in which it summed becomes the output.

    Raises:
        RuntimeError: torch's own, where the output is a leaf that requires a gradient.
    """
    with torch.enable_grad():
        part = summed.reshape(-1).chunk(engine.num_ranks)[engine.rank]
        part = part / engine.num_ranks if is_mean else part
        part.data.copy_(result)
        output.copy_(part.view(output.shape))


def _as_gloo_takes(kind: CollectiveKind, tensor: torch.Tensor, *, is_source: bool) -> torch.Tensor:
    """The numbers in the order in which torch's gloo takes them, in the tensor's own memory, unseen by autograd.

    All-reduces and the output of all-to-alls go by what lies in memory, whatever the strides say, everything else by
    indices. (A reduce-scatter's input does where it lies alike on all ranks; where it does not, torch adds what lies at
    one place of memory on each rank and hands it out by each rank's own indices, which no reduce-scatter can. Beyond
    two ranks a transposed one is left to torch: `_is_summed_by_rows`.)
    """
    plain = tensor.data.as_subclass(torch.Tensor)
    if plain.is_contiguous():
        return plain
    by_memory = kind is CollectiveKind.ALL_REDUCE or (kind is CollectiveKind.ALL_TO_ALL and not is_source)
    return plain.as_strided((plain.numel(),), (1,)) if by_memory else plain


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in one row: the tensor's own memory where that can be, or a copy."""
    if _is_flat(tensor):
        return tensor.view(-1)
    with torch.no_grad():
        return _row_for(tensor).copy_(tensor.reshape(-1))


def _row_for(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for its numbers where it is itself, whatever the job's default device."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether the engine can work in the tensor's own memory: our view of an inference tensor could not be written."""
    return tensor.is_contiguous() and not tensor.is_inference()


def _can_run(kind: CollectiveKind, target: torch.Tensor, source: torch.Tensor, num_ranks: int) -> bool:
    """Whether the engine can take such a call: dense fp32 on the CPU, of sizes that belong together.

    What torch itself would refuse is refused here, too, so that torch says why.
    """
    if not (_is_dense_fp32(target) and _is_dense_fp32(source) and is_plain(target, source)):
        return False
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return target is source and target.numel() % num_ranks == 0
        case CollectiveKind.ALL_GATHER:
            return target.numel() == source.numel() * num_ranks
        case CollectiveKind.REDUCE_SCATTER:
            return source.numel() == target.numel() * num_ranks and (num_ranks == 2 or _is_summed_by_rows(source))
        case CollectiveKind.ALL_TO_ALL:
            is_even = all(tensor.dim() > 0 and tensor.size(0) % num_ranks == 0 for tensor in (target, source))
            return is_even and target.numel() == source.numel() and source.is_contiguous()
        case _:
            return False


def _is_summed_by_rows(source: torch.Tensor) -> bool:
    """Whether torch's gloo, too, adds the numbers in the order of their indices.

    It adds a copy, and a copy of a transposed tensor lies transposed; where a number lies says in which order the
    ranks' are added.
    """
    return source.is_contiguous() or torch.empty_like(source, device="meta").is_contiguous()


def _is_dense_fp32(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
    )


def _results_of(kind: CollectiveKind, target: torch.Tensor, num_ranks: int) -> Callable[[], list[torch.Tensor]] | None:
    """The outputs as gloo's handle gives them: a gather's by rank, none of a reduce-scatter."""
    match kind:
        case CollectiveKind.REDUCE_SCATTER:
            return None
        case CollectiveKind.ALL_GATHER:
            return lambda: list(target.chunk(num_ranks))
        case _:
            return lambda: [target]
