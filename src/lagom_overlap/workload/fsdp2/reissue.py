"""The step that FSDP2 would issue with other settings, from the step that it issues with its own.

FSDP2's hooks (`hooks`) are run again on the host's order of operators. A unit that keeps its parameters is not gathered
in backward, where its list is followed all the same. Everything else keeps its place and its waits. A gather is never
issued later than in the step that is given.
Collectives of one communicator wait for each other in the order of issue, which the simulation sees to.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lagom_overlap.workload import Buffer, CommOp, Iteration, Op, Phase
from lagom_overlap.workload.fsdp2.hooks import GATHER_STREAMS, GatherHooks, awaited_reduction, reduce_communicator
from lagom_overlap.workload.fsdp2.reduced import casts_behind, in_param_dtype
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import Visit, visits_of
from lagom_overlap.workload.ops import BACKWARD_PHASES, data_deps
from lagom_overlap.workload.streams import COMPUTE, REDUCE_SCATTER


def reissued(flow: Iteration, issued: Iteration, settings: Fsdp2Settings) -> Iteration:
    """The issued step with those settings; `flow` are the data dependences of the step that `issued` is."""
    needed = {op.name: set(op.deps) for op in flow.ops}
    waits = {op.name: tuple(dep for dep in op.deps if dep not in needed[op.name]) for op in issued.ops}
    visits = visits_of(flow)
    if settings.reduce_in_param_dtype:
        flow = in_param_dtype(flow)
        casts = casts_behind(flow)
        for op in flow.ops:
            if op.origin.phase is Phase.OPTIMIZER:  # waits for all that backward issued, not for the reduction alone
                waits[op.name] = tuple(casts.get(name, name) for name in waits.get(op.name, ()))
    kept = _with_kept(flow, visits, settings.kept)
    left = visits if kept is flow else visits_of(kept)
    reissue = _Reissue(
        kept,
        left,
        waits,
        settings,
        instead=_instead(flow, kept),
        behind_kept=_behind_kept(flow, kept, visits),
    )
    return replace(kept, ops=reissue.issue())


def _instead(flow: Iteration, kept: Iteration) -> dict[str, str]:
    """For operators that are gone, the one before on their stream: who waited for them waits for that."""
    left = {op.name for op in kept.ops}
    last: dict[str, str] = {}
    instead: dict[str, str] = {}
    for op in flow.ops:
        if op.name in left:
            last[op.stream] = op.name
        elif op.stream in last:
            instead[op.name] = last[op.stream]
    return instead


def _behind_kept(flow: Iteration, kept: Iteration, visits: Sequence[Visit]) -> dict[str, list[Visit]]:
    """Visits whose gathering is gone, by the operator that computations issue next: hooks still run before it."""
    left = {op.name for op in kept.ops}
    place = {op.name: number for number, op in enumerate(flow.ops)}
    behind: dict[str, list[Visit]] = {}
    for visit in visits:
        if visit.copied[0] not in left:
            last = max(place[name] for name in visit.copied)
            following = next(op.name for op in flow.ops[last + 1 :] if op.name in left and op.stream == COMPUTE)
            behind.setdefault(following, []).append(visit)
    return behind


def _with_kept(iteration: Iteration, visits: Sequence[Visit], kept: Collection[str]) -> Iteration:
    """The data flow without the backward gatherings of those units, where forward gathered the same.

    What read a second gathering's copy reads the first one's; its buffers live until then.
    """
    if not kept:
        return iteration
    gathers = {op.name: op for op in iteration.comms}
    first = {(v.unit, v.batch, _kind(gathers, v)): v for v in visits if v.is_forward}
    twins: dict[str, str] = {}
    gone: set[str] = set()
    for visit in visits:
        earlier = first.get((visit.unit, visit.batch, _kind(gathers, visit)))
        if visit.is_forward or visit.unit not in kept or earlier is None:
            continue
        if (len(earlier.chain), len(earlier.copied)) != (len(visit.chain), len(visit.copied)):
            continue
        twins |= dict(zip((*visit.chain, *visit.copied), (*earlier.chain, *earlier.copied), strict=True))
        gone |= {*visit.chain, *visit.copied}
    if not gone:
        return iteration
    ops = [
        replace(op, deps=tuple(dict.fromkeys(twins.get(dep, dep) for dep in op.deps)))
        for op in iteration.ops
        if op.name not in gone
    ]
    return replace(iteration, ops=tuple(ops), buffers=_buffers(iteration, twins, gone))


def _kind(gathers: Mapping[str, CommOp], visit: Visit) -> object:
    """What tells the gathers of one unit apart: several groups of parameters differ in bytes or ranks."""
    gather = gathers[visit.gather]
    return gather.collective, gather.communicator


def _buffers(iteration: Iteration, twins: dict[str, str], gone: set[str]) -> tuple[Buffer, ...]:
    """Buffers of the second gatherings are not made; the first ones' are held for those who used them."""
    more: dict[str, list[str]] = {}
    for buffer in iteration.buffers:
        if buffer.maker in twins:
            more.setdefault(twins[buffer.maker], []).extend(user for user in buffer.users if user not in gone)
    kept = []
    for buffer in iteration.buffers:
        if buffer.maker in gone:
            continue
        users = (user for user in (*buffer.users, *more.get(buffer.maker, ())) if user not in gone)
        kept.append(replace(buffer, users=tuple(dict.fromkeys(users))))
    return tuple(kept)


class _Reissue:
    """Issues a step's operators again, its gathers as FSDP2's hooks say."""

    def __init__(
        self,
        flow: Iteration,
        visits: Sequence[Visit],
        waits: Mapping[str, tuple[str, ...]],
        settings: Fsdp2Settings,
        *,
        instead: Mapping[str, str],
        behind_kept: Mapping[str, Sequence[Visit]],
    ) -> None:
        self._flow, self._waits, self._settings, self._instead = flow, waits, settings, instead
        self._behind_kept = behind_kept
        self._ops = {op.name: op for op in flow.ops}
        self._visits = visits
        self._of_chain = {name: visit for visit in self._visits for name in visit.chain}
        self._of_unit: dict[tuple[str, int, bool], list[Visit]] = {}
        for visit in self._visits:
            self._of_unit.setdefault((visit.unit, visit.batch, visit.is_forward), []).append(visit)
        self._reductions = [op.name for op in flow.comms if op.stream == REDUCE_SCATTER]
        self._place_of_reduction = {name: number for number, name in enumerate(self._reductions)}
        self._out: list[Op] = []
        self._pending: dict[str, dict[str, None]] = {stream: {} for stream in GATHER_STREAMS}
        self._hooks: GatherHooks[Visit] = GatherHooks(self)
        self._begun: dict[int, Visit] = {}

    def issue(self) -> tuple[Op, ...]:
        """All operators in the order of issue, each with what it waits for."""
        place = {op.name: number for number, op in enumerate(self._flow.ops)}
        first = {min(visit.copied, key=place.__getitem__): visit for visit in self._visits}
        last = {max(visit.copied, key=place.__getitem__): visit for visit in self._visits}
        for op in self._flow.ops:
            visit = self._of_chain.get(op.name)
            if visit is not None:
                if visit.is_forward and visit.batch not in self._begun:
                    self._begun[visit.batch] = visit
                    self._hooks.begin_forward(visit.batch)
                self._hooks.unshard(visit)
                continue
            for passed in self._behind_kept.get(op.name, ()):
                self._prefetch(passed)
            if op.name in first:
                self._hooks.unshard(first[op.name])
                self._hooks.before_copy_out(first[op.name])
            self._put(op, self._waits_of(op))
            if op.name in last:
                self._hooks.after_copy_out(last[op.name], op.name)
                self._prefetch(last[op.name])
        return tuple(self._out)

    def _prefetch(self, visit: Visit) -> None:
        if visit.unit not in self._settings.units:
            return
        listed = self._settings.forward_list if visit.is_forward else self._settings.backward_list
        for unit in listed(visit.unit):
            for other in self._of_unit.get((unit, visit.batch, visit.is_forward), ()):
                self._hooks.unshard(other)

    def gather(self, visit: Visit) -> None:
        """The visit's copies and its gather, behind what their streams wait for.

        They read parameters alone, so they wait for those reads of the host that they are issued behind, which may be
        others with other settings (`Iteration` adds them).
        """
        for name in visit.chain:
            op = self._ops[name]
            needed = data_deps(op, self._ops)
            op = op if needed == op.deps else replace(op, deps=needed)
            self._put(op, tuple(self._pending.pop(op.stream, {})))
            self._pending.setdefault(op.stream, {})

    def wait_for_computations(self, batch: int) -> None:
        """The gather streams wait for what the first gathering's had been told to wait for."""
        for name in self._begun[batch].chain:
            for wait in self._kept_waits(name):
                self.hold_back(wait)

    def hold_back(self, name: str) -> None:
        """The gather streams wait for an operator."""
        for stream in GATHER_STREAMS:
            self._pending[stream][name] = None

    def _waits_of(self, op: Op) -> tuple[str, ...]:
        """The waits that an operator keeps, for reductions as there are buffers."""
        kept = self._kept_waits(op.name)
        num_buffers = self._settings.reduce_buffers
        if num_buffers == 1 or op.stream != COMPUTE or op.origin.phase not in BACKWARD_PHASES:
            return tuple(kept)
        waits = []
        for name in kept:
            place = self._place_of_reduction.get(name)
            if place is None:
                waits.append(name)
            elif (earlier := awaited_reduction(self._reductions, place + 1, num_buffers)) is not None:
                waits.append(earlier)
        return tuple(waits)

    def _kept_waits(self, name: str) -> list[str]:
        """The waits of an operator without those for gathers, of its communicator, which may have moved."""
        waits = (wait if wait in self._ops else self._instead.get(wait, "") for wait in self._waits.get(name, ()))
        return [wait for wait in waits if wait in self._ops and wait not in self._of_chain]

    def _put(self, op: Op, waits: tuple[str, ...]) -> None:
        more = tuple(name for name in waits if name not in op.deps)
        reissued = replace(op, deps=(*op.deps, *more)) if more else op
        if self._settings.separate_reduce_group and isinstance(reissued, CommOp) and op.stream == REDUCE_SCATTER:
            reissued = replace(reissued, communicator=reduce_communicator(reissued.communicator))
        self._out.append(reissued)
