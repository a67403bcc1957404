"""Overlap groups: M computations beside N collectives between two joins (Lagom, section 3.1), the unit of tuning.

Departure: the paper does not say how a group is delimited. Here a window ends where one stream waits for the other:

    window(op) = max( window(previous op of the same stream),
                      window(dep) + 1   for each dep on the other kind of stream,
                      window(dep)       for each dep of the same kind )

A window that holds both computations and collectives is a group; equal windows (same works, same collectives, same
starts) are one group that occurs `count` times.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp, CompOp, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapGroup:
    """Computations on one stream beside collectives on another, both in order, both started together.

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


def _windows(iteration: Iteration) -> dict[str, int]:
    kind = {op.name: isinstance(op, CompOp) for op in iteration.ops}
    window: dict[str, int] = {}
    last_of_stream: dict[str, int] = defaultdict(int)
    for op in iteration.ops:
        reached = last_of_stream[op.stream]
        for dep in op.deps:
            reached = max(reached, window[dep] + (kind[dep] != kind[op.name]))
        window[op.name] = last_of_stream[op.stream] = reached
    return window


def _call_sites(iteration: Iteration) -> dict[str, int]:
    """Each collective's occurrence: its place among the step's calls of the same communicator, kind and size."""
    seen: dict[tuple[str, str, int], int] = defaultdict(int)
    sites: dict[str, int] = {}
    for comm in iteration.comms:
        key = (comm.communicator, comm.collective.kind, comm.collective.num_bytes)
        sites[comm.name] = seen[key]
        seen[key] += 1
    return sites


def _starts_after(comms: list[CommOp], computations: list[CompOp]) -> tuple[int, ...]:
    place = {op.name: index + 1 for index, op in enumerate(computations)}
    return tuple(max((place.get(dep, 0) for dep in comm.deps), default=0) for comm in comms)


def find_overlap_groups(iteration: Iteration) -> tuple[OverlapGroup, ...]:
    """The groups of an iteration in order of first occurrence, equal ones merged.

    Operator names inside a group are those of its first occurrence.
    """
    window = _windows(iteration)
    members: dict[int, list[Op]] = defaultdict(list)
    for op in iteration.ops:
        members[window[op.name]].append(op)
    sites = _call_sites(iteration)
    merged: dict[object, OverlapGroup] = {}
    for index in sorted(members):
        computations = [op for op in members[index] if isinstance(op, CompOp)]
        comms = [op for op in members[index] if isinstance(op, CommOp)]
        if not computations or not comms:
            continue
        starts = _starts_after(comms, computations)
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
