"""Overlap groups: M computations and N collectives between two joins (Lagom, section 3.1), the unit of tuning.

Departure: the paper does not say how a group is delimited. Here the computations are cut where one of them waits for a
collective that none waited for before: a join. What lies between two joins is a window. A collective belongs to the
window whose computations are issued next after it, because that is what it overlaps; if one of those waits for it,
it belongs to the window before. A collective that waits for the last computation of its window runs alone and
belongs to no group, and neither does one that is not NCCL's (DeepEP): nothing can be set of it. Computations on
streams of their own (FSDP2's copies into a gather's buffer) are in no group: who waits for one waits for what it waits
for.

Equal windows (same works, same collectives, same starts) are one group that occurs `count` times.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp, CompOp, Op
from lagom_overlap.workload.streams import COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapGroup:
    """Computations on one stream and collectives on another, both in order, both started together.

    `starts_after[j]` holds collective j back until that many computations have finished (0: starts at once).
    `count` is how often the group occurs in an iteration. `occurrences[j]` lists the call sites of collective j in the
    step: its place among the calls of the same communicator, kind and size, once per occurrence of the group.
    """

    name: str
    computations: tuple[CompOp, ...]
    comms: tuple[CommOp, ...]
    starts_after: tuple[int, ...] = ()
    count: int = 1
    occurrences: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.computations or not self.comms:
            raise JobError(f"group {self.name!r} needs at least one computation and one collective")
        if not self.starts_after:
            object.__setattr__(self, "starts_after", (0,) * len(self.comms))
        if not self.occurrences:
            object.__setattr__(self, "occurrences", ((0,),) * len(self.comms))
        if len(self.starts_after) != len(self.comms) or len(self.occurrences) != len(self.comms):
            raise JobError(f"group {self.name!r}: starts_after and occurrences need one entry per collective")
        if any(not 0 <= start <= len(self.computations) for start in self.starts_after):
            raise JobError(f"group {self.name!r}: starts_after {self.starts_after} outside 0..{len(self.computations)}")
        if self.count < 1:
            raise JobError(f"group {self.name!r}: count is {self.count}, must be at least 1")
        names = [*(op.name for op in self.computations), *self.comm_names]
        if len(set(names)) != len(names):
            raise JobError(f"group {self.name!r}: operator names repeat")

    @property
    def comm_names(self) -> tuple[str, ...]:
        """Names of the collectives in order."""
        return tuple(comm.name for comm in self.comms)


@dataclass(slots=True)
class _Window:
    """What lies between two joins; `joins` are the collectives that its computations wait for."""

    computations: list[CompOp]
    comms: list[CommOp]
    joins: set[str]


def _on_two_streams(iteration: Iteration) -> Iteration:
    """The iteration without computations on streams of their own; their waits go to who waits for them."""
    streams = {op.stream for op in iteration.computations}
    if COMPUTE not in streams or len(streams) == 1:
        return iteration
    waits: dict[str, tuple[str, ...]] = {}
    ops: list[Op] = []
    last: dict[str, str] = {}
    for op in iteration.ops:
        named = dict.fromkeys(waited for dep in op.deps for waited in waits.get(dep, (dep,)))
        if isinstance(op, CompOp) and op.stream != COMPUTE:
            before = last.get(op.stream)
            waits[op.name] = tuple(named) or (waits[before] if before is not None else ())
            last[op.stream] = op.name
        else:
            ops.append(replace(op, deps=tuple(named)))
    return Iteration(iteration.name, tuple(ops))


def _windows(iteration: Iteration) -> list[_Window]:
    comm_names = {op.name for op in iteration.comms}
    waited: set[str] = set()
    windows: list[_Window] = []
    for op in iteration.computations:
        joins = {dep for dep in op.deps if dep in comm_names} - waited
        if joins or not windows:
            windows.append(_Window([], [], set()))
        windows[-1].computations.append(op)
        windows[-1].joins |= joins
        waited |= joins
    return windows


def _place_comms(iteration: Iteration, windows: list[_Window]) -> None:
    """Adds each collective to its window."""
    place = {op.name: index for index, window in enumerate(windows) for op in window.computations}
    issued_next = len(windows) - 1
    for op in reversed(iteration.ops):
        if isinstance(op, CompOp):
            issued_next = place[op.name]
            continue
        home = issued_next - 1 if op.name in windows[issued_next].joins else issued_next
        if home >= 0:
            windows[home].comms.insert(0, op)


Call = tuple[str, CollectiveKind, int]


def call_of(comm: CommOp) -> Call:
    """What calls of one site have in common: communicator, kind and size."""
    return comm.communicator, comm.collective.kind, comm.collective.num_bytes


def call_sites(iteration: Iteration) -> dict[str, int]:
    """Each collective's occurrence: its place among the step's calls of the same communicator, kind and size."""
    seen: dict[Call, int] = defaultdict(int)
    sites: dict[str, int] = {}
    for comm in iteration.comms:
        key = call_of(comm)
        sites[comm.name] = seen[key]
        seen[key] += 1
    return sites


def _starts_after(comm: CommOp, computations: list[CompOp]) -> int:
    place = {op.name: index + 1 for index, op in enumerate(computations)}
    return max((place.get(dep, 0) for dep in comm.deps), default=0)


def find_overlap_groups(iteration: Iteration) -> tuple[OverlapGroup, ...]:
    """The groups of an iteration in order of first occurrence, equal ones merged.

    Operator names inside a group are those of its first occurrence.
    """
    iteration = _on_two_streams(iteration)
    windows = _windows(iteration)
    if not windows:
        return ()
    _place_comms(iteration, windows)
    sites = call_sites(iteration)
    merged: dict[object, OverlapGroup] = {}
    for window in windows:
        computations = window.computations
        comms = [
            comm
            for comm in window.comms
            if comm.collective.is_nccl and _starts_after(comm, computations) < len(computations)
        ]
        if not comms:
            continue
        starts = tuple(_starts_after(comm, computations) for comm in comms)
        works = tuple(op.work for op in computations)
        calls = tuple((op.collective, op.communicator) for op in comms)
        occurrences = tuple((sites[op.name],) for op in comms)
        key = (works, calls, starts)
        if key in merged:
            known = merged[key]
            joined = tuple(old + new for old, new in zip(known.occurrences, occurrences, strict=True))
            merged[key] = replace(known, count=known.count + 1, occurrences=joined)
        else:
            merged[key] = OverlapGroup(
                name=f"{iteration.name}/{len(merged)}",
                computations=tuple(computations),
                comms=tuple(comms),
                starts_after=starts,
                occurrences=occurrences,
            )
    return tuple(merged.values())
