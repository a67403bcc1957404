"""The seam between the online tuner and a job's collectives: how a setting reaches them, and how long they took.

A route lives in every rank's process. The tuner drives all routes of a job in lock-step:

    begin_step(is_measured=False)  the job's step                              every step
    begin_step(is_measured=True)   the job's step   end_step() -> StepRecord   a step that is measured
    mark_end()                     within either, after each update: what follows until the step ends is not its work
    counts()  compared on all ranks, then  prepare(table, epoch)  agreement of all ranks  commit(epoch) or nothing
                                                                               between two steps, to switch

Everything that can fail (opening channels, writing a table, a full disk) belongs into `prepare`: if it raises on one
rank, no rank commits. `commit` only flips to what was prepared; where it raises all the same, all ranks take it back.

Times are seconds since the step's begin on this rank. A collective on a device is timed by a profiler, on the CPU by
the engine's timers; either way the record has the same meaning. Needs no torch.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final, Protocol

from lagom_overlap.collective import (
    CallCycle,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    class_bytes,
)
from lagom_overlap.export.saved import GLOO_ROUTE

NOTHING: Final = ConfigTable({})
GLOO: Final = GLOO_ROUTE
"""The name of gloo's route, which a job on NCCL does not load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One collective of a step.

    `issued_s`: the computation had come this far when it handed the call over. `begun_s` to `ended_s`: the call's share
    of its in-order stream, so shares on one communicator do not overlap. `joined_s` to `resumed_s`: the computation
    stood still for this call; both None where nothing ever waited for it within the step. `num_channels` is what was
    seen to run (a kernel's grid), the proof that a setting took effect; 0 where the route cannot see it. `issue_place`
    and `join_place` order a step's issues and joins as the host made them; where they are None, the times do.
    """

    key: ConfigKey
    issued_s: float
    begun_s: float
    ended_s: float
    joined_s: float | None = None
    resumed_s: float | None = None
    num_channels: int = 0
    issue_place: int | None = None
    join_place: int | None = None

    def __post_init__(self) -> None:
        times = [self.issued_s, self.begun_s, self.ended_s, self.joined_s or 0.0, self.resumed_s or 0.0]
        if not all(isfinite(time) and time >= 0 for time in times):
            raise ValueError(f"times must be finite and not negative, got {self}")
        if self.begun_s > self.ended_s or (self.joined_s is None) != (self.resumed_s is None):
            raise ValueError(f"a call cannot end before it begins, nor half be waited for, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank: its calls in the order in which they were issued.

    `is_timed` False: the sequence was recorded, the times mean nothing (the route could not measure this step, or was
    not asked to). `wires` tells communicators apart whose names do not, because the route does not know their ranks:
    what one is called on all of its ranks, and on no others, in this run.
    """

    duration_s: float
    calls: tuple[CallRecord, ...]
    is_timed: bool = True
    wires: Mapping[CommunicatorId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isfinite(self.duration_s) and self.duration_s >= 0):
            raise ValueError(f"duration_s is {self.duration_s}, must be finite and not negative")


@dataclass(frozen=True, slots=True)
class CallCount:
    """How many calls of `LEAST_BYTES` and more a rank has issued on a communicator.

    All ranks of the communicator call it `wire`. `num_ranks` is how many they are, of which this process has
    `num_here`; 0 where the name may stand for several communicators, so that its ranks cannot be counted.
    `issued_at_last` are the collectives of any kind and size issued on it with the last of those calls, as torch counts
    them; None where that is not noted.
    """

    wire: str
    num_calls: int
    num_ranks: int = 0
    num_here: int = 1
    issued_at_last: int | None = None


class TableCursor:
    """How far the calls of one communicator have come in a table: nothing else tells which row a call has.

    Every rank of the communicator issues the same calls on it in the same order, so all find the same rows, and the end
    of a lease at the same call, however each counts its steps.
    """

    def __init__(self, table: ConfigTable, communicator: CommunicatorId) -> None:
        keys = table.cycles.get(communicator, ())
        self._table: Final = table
        self._cycle: Final = CallCycle(keys, table.size_octaves)
        self._num_left = None if table.lease_steps is None else table.lease_steps * len(keys)

    @property
    def is_over(self) -> bool:
        """Whether no call to come can have a row."""
        return self._num_left == 0 or len(self._table) == 0

    @property
    def standing(self) -> tuple[int | None, int]:
        """For `go_back`."""
        return self._num_left, self._cycle.place

    def go_back(self, standing: tuple[int | None, int]) -> None:
        """The calls since it stood there were never issued."""
        self._num_left, self._cycle.place = standing

    def next_row(self, kind: CollectiveKind, num_bytes: int) -> tuple[ConfigKey, CommConfig] | None:
        """The row of the communicator's next call of `LEAST_BYTES` and more; None: it is left alone."""
        if self._num_left is not None:
            if self._num_left == 0:
                return None
            self._num_left -= 1
        key = self._cycle.next_key(kind, num_bytes)
        config = None if key is None else self._table.get(key)
        return None if key is None or config is None else (key, config)


class StepKeys:
    """Names the calls of a measured step on one communicator; nothing is decided by it."""

    def __init__(self, communicator: CommunicatorId) -> None:
        self._communicator: Final = communicator
        self._counts: Counter[tuple[CollectiveKind, int]] = Counter()

    def next_key(self, kind: CollectiveKind, num_bytes: int) -> ConfigKey:
        """The key of the next call of this size."""
        occurrence = self._counts[kind, num_bytes]
        self._counts[kind, num_bytes] += 1
        return ConfigKey(communicator=self._communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence)

    def clear(self) -> None:
        """A step begins."""
        self._counts.clear()


def by_class(record: StepRecord, octaves: int) -> StepRecord:
    """The step with classes in place of its calls' sizes."""
    if octaves == 0:
        return record
    keys: dict[CommunicatorId, StepKeys] = {}
    calls = []
    for call in record.calls:
        name = call.key.communicator
        size = class_bytes(call.key.num_bytes, octaves)
        calls.append(replace(call, key=keys.setdefault(name, StepKeys(name)).next_key(call.key.kind, size)))
    return replace(record, calls=tuple(calls))


class Route(Protocol):
    """One rank's way to set its collectives and to time them; what a setting is, is a `ConfigTable`.

    `name` is what the user chooses it by (`"gloo"`, `"plugin"`), `description` says in one line what it reaches and how
    it measures.
    """

    name: str
    description: str

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """All communicators of this process, in the order of their creation; asked whenever a table is made."""

    def counts(self) -> Mapping[CommunicatorId, CallCount]:
        """What this rank has issued so far, on each communicator of this process; may be asked by another thread."""

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """What may be tried for this call; None if no setting reaches it: it is left alone."""

    def is_exact(self, key: ConfigKey) -> bool:
        """Whether every setting in the space gives bit-equal results: no reduction changes its order."""

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """Makes ready to switch to the table; nothing changes yet. A call without a row is left untouched.

        A call's row is found by the table's cycles (`TableCursor`), which begin with the switch, and only within its
        lease. Where the table's sizes are classes (`ConfigTable.size_octaves`), calls are looked up by class; what
        `end_step` records has the calls' own sizes all the same.
        `epoch` grows with every switch; a prepared table that is not committed is dropped by the next `prepare`.

        Raises:
            LagomError: if it cannot be made ready; the table in force stays.
        """

    def commit(self, epoch: int) -> None:
        """Switches to what was prepared under this epoch, where all ranks have issued the same calls.

        Raises:
            LagomError: if that is impossible after all; all ranks then take it back.
        """

    def take_back(self, epoch: int) -> None:
        """Undoes the commit of this epoch, before any step: what was in force before it is so again, to the last row.

        Nothing to do where it did not begin; it may have failed half-way.
        """

    def settle(self) -> None:
        """What is in force is no trial's any more: what a search has opened beside it may be closed."""

    def begin_step(self, *, is_measured: bool) -> None:
        """The job's next step begins, by this rank's own count. Cheap where nothing is measured."""

    def mark_end(self) -> None:
        """The step's work is issued, unless it is said again or `goes_on`: data and checkpoints follow. Never waits."""

    def goes_on(self) -> bool:
        """Whether calls of `LEAST_BYTES` and more were made since `mark_end`: the step's work has not ended there."""

    def end_step(self) -> StepRecord:
        """The measured step is over: what was called, and how long it took, up to its last mark."""

    def close(self) -> None:
        """Takes the route's hands off the job: every later call runs as if we had never been there; safe twice.

        Calls that a lease in force still holds for are made under it: the other ranks may make theirs so.
        """
