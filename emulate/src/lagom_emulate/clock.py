"""The one event simulation of all GPUs of an emulated job, in virtual time: operations arrive while it runs.

`sim/core.py` runs one graph that is known from the start on one GPU; here several GPUs run side by side, their streams
are filled by hosts that read the results, and a collective binds the GPUs of its members. The rules are the same, and a
test holds both equal: between two events the same set runs on a GPU, so what each of its operations takes as a whole is
constant and asked for once per set of kinds; what ends together ends together, then what waited for it starts.

An operation starts when its host has issued it, its stream's last and what it waits for has ended, and, where its
stream shares a launch queue, what was put into that queue before it has started. A collective's kernel starts alone;
from then on it holds its SMs, as another kind of the set. It moves when all members have come, at the rate of the
slowest, and ends on all of them at once. Operations without a kind take fixed times and disturb nobody.

Times are nanoseconds, as floats. Everything here is pure: the same operations give the same times, however they arrive.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final

TOGETHER_NS: Final = 1e-6
"""Events closer than this fall together: sums of the same durations carry rounding."""

SetTimes = Callable[[tuple[int, ...]], Sequence[float]]
"""What each operation of a set takes as a whole (ns) while exactly these run on a GPU, by their kinds, sorted."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation is to the simulation.

    `kind` names it in the sets (collectives from 0 up, computations below 0); None: it takes `fixed_ns` whatever runs.
    `held_kind` is the kind of a collective's kernel that waits for the other members (None: it holds nothing).
    """

    kind: int | None = None
    fixed_ns: float = 0.0
    held_kind: int | None = None
    num_members: int = 1


INSTANT: Final = Work()
"""Event records, waits, marks: no time."""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation of one process. `scale` stretches its work: noise, a straggler, a slow link."""

    owner: int
    op_id: int
    gpu: int
    work: Work
    issue_ns: float
    scale: float = 1.0
    desc: int = 0
    stream: int = 0
    num_waits: int = 0
    followers: list["Operation"] = field(default_factory=list)
    behind: "Operation | None" = None
    run: "_Run | None" = None
    start_ns: float = -1.0
    end_ns: float = -1.0

    @property
    def has_ended(self) -> bool:
        """Whether its end is known."""
        return self.end_ns >= 0.0


@dataclass(slots=True, eq=False)
class _Run:
    """What runs: one kernel, or a collective with its members. `left` is the share of the work that remains."""

    members: list[Operation]
    left: float
    kind: int
    is_held: bool = False
    since_ns: float = 0.0
    whole_ns: float = inf
    parts: dict[int, float] = field(default_factory=dict)
    version: int = 0


class Clock:
    """The GPUs of a job. `submit` gives it operations; `next_ns` and `step` let time pass, one moment at a time."""

    def __init__(self, set_times: SetTimes) -> None:
        self.now_ns = 0.0
        self.num_events = 0
        self._set_times = set_times
        self._times: dict[tuple[int, ...], Sequence[float]] = {}
        self._running: dict[int, list[_Run]] = {}
        self._tails: dict[tuple[int, int, int], Operation] = {}
        self._queued: dict[tuple[int, int, int], Operation] = {}
        self._collectives: dict[tuple[str, int], _Run] = {}
        self._heap: list[tuple[float, int, int, _Run | Operation]] = []
        self._order = count()
        self._dirty: set[int] = set()
        self._gone: set[int] = set()

    def submit(
        self,
        operation: Operation,
        *,
        after: Operation | None = None,
        instance: tuple[str, int] | None = None,
        queue: int | None = None,
    ) -> None:
        """Puts an operation at the end of its process's stream; `after` is what else it waits for.

        `instance` names a collective's call: its communicator and its place there. `queue` is the launch queue of its
        process and GPU that it goes through (None: none, it starts whatever was launched before it).
        """
        if instance is not None:
            operation.run = self._join(operation, instance)
        key = operation.owner, operation.gpu, operation.stream
        tail = self._tails.get(key)
        self._tails[key] = operation
        for earlier in {tail, after} if tail is not after else {tail}:
            if earlier is not None and not earlier.has_ended:
                earlier.followers.append(operation)
                operation.num_waits += 1
        if queue is not None:
            place = operation.owner, operation.gpu, queue
            before = self._queued.get(place)
            self._queued[place] = operation
            if before is not None and before.start_ns < 0.0:
                before.behind = operation
                operation.num_waits += 1
        if not operation.num_waits:
            self._push(max(operation.issue_ns, self.now_ns), 0, operation)

    def missing(self, operation: Operation) -> int:
        """How many members a collective that has started still waits for; 0 for anything else."""
        run = operation.run
        if run is None or not run.is_held:
            return 0
        return operation.work.num_members - sum(1 for member in run.members if member.start_ns >= 0.0)

    def next_ns(self) -> float:
        """When something happens next; infinity if nothing does."""
        heap = self._heap
        while heap:
            at_ns, _, version, what = heap[0]
            if isinstance(what, Operation) or what.version == version:
                return at_ns
            heappop(heap)
        return inf

    def step(self) -> list[Operation]:
        """Lets the next moment pass; what has ended then, in order of process and number."""
        at_ns = self.next_ns()
        assert at_ns < inf, "nothing happens any more"
        self.now_ns = now = max(self.now_ns, at_ns)
        ended: list[Operation] = []
        ready: deque[Operation] = deque()
        while self.next_ns() <= now + TOGETHER_NS:
            self.num_events += 1
            _, _, _, what = heappop(self._heap)
            if isinstance(what, Operation):
                if what.start_ns < 0.0:
                    ready.append(what)
                else:
                    self._end(what, ended, ready)
                continue
            what.version += 1
            for member in what.members:
                self._running[member.gpu].remove(what)
                self._dirty.add(member.gpu)
                self._end(member, ended, ready)
        while ready:
            self._start(ready.popleft(), ended, ready)
        self._settle()
        ended.sort(key=lambda operation: (operation.owner, operation.op_id))
        return ended

    def leave(self, owner: int) -> None:
        """Forgets a process that has died: what it had not started never runs."""
        self._gone.add(owner)
        for places in (self._tails, self._queued):
            for key in [key for key in places if key[0] == owner]:
                del places[key]
        gone = [entry for entry in self._heap if not (isinstance(entry[3], Operation) and entry[3].owner == owner)]
        if len(gone) != len(self._heap):
            self._heap[:] = sorted(gone, key=lambda entry: entry[:3])

    def _join(self, operation: Operation, instance: tuple[str, int]) -> _Run:
        run = self._collectives.get(instance)
        if run is None:
            assert operation.work.kind is not None
            run = self._collectives[instance] = _Run([], 0.0, operation.work.kind, is_held=True)
        run.members.append(operation)
        run.left = max(run.left, operation.scale)
        if len(run.members) == operation.work.num_members:
            del self._collectives[instance]
        return run

    def _push(self, at_ns: float, version: int, what: "_Run | Operation") -> None:
        heappush(self._heap, (at_ns, next(self._order), version, what))

    def _end(self, operation: Operation, ended: list[Operation], ready: deque[Operation]) -> None:
        operation.end_ns = self.now_ns
        ended.append(operation)
        for follower in operation.followers:
            self._release(follower, ready)
        operation.followers.clear()

    def _release(self, operation: Operation, ready: deque[Operation]) -> None:
        """One thing less that an operation waits for."""
        operation.num_waits -= 1
        if operation.num_waits or operation.owner in self._gone:
            return
        if operation.issue_ns <= self.now_ns + TOGETHER_NS:
            ready.append(operation)
        else:
            self._push(operation.issue_ns, 0, operation)

    def _start(self, operation: Operation, ended: list[Operation], ready: deque[Operation]) -> None:
        operation.start_ns = self.now_ns
        if operation.behind is not None:
            self._release(operation.behind, ready)
            operation.behind = None
        work = operation.work
        if work.kind is None:
            if work.fixed_ns <= 0.0:
                self._end(operation, ended, ready)
            else:
                self._push(self.now_ns + work.fixed_ns * operation.scale, 0, operation)
            return
        run = operation.run
        if run is None:
            run = operation.run = _Run([operation], operation.scale, work.kind)
        if not run.is_held:
            run.since_ns = self.now_ns
        elif len(run.members) == work.num_members and all(member.start_ns >= 0.0 for member in run.members):
            run.is_held = False
            run.since_ns = self.now_ns
            self._dirty.update(member.gpu for member in run.members)
        self._running.setdefault(operation.gpu, []).append(run)
        self._dirty.add(operation.gpu)

    def _settle(self) -> None:
        """New rates on the GPUs whose set has changed, and the ends that follow from them."""
        moved: dict[int, _Run] = {}
        for gpu in self._dirty:
            pairs = []
            for run in self._running.get(gpu, ()):
                held = run.members[0].work.held_kind
                if not run.is_held:
                    pairs.append((run.kind, run))
                elif held is not None:
                    pairs.append((held, run))
            pairs.sort(key=_kind_of)
            kinds = tuple([kind for kind, _ in pairs])
            times = self._times.get(kinds)
            if times is None:
                times = self._times[kinds] = self._set_times(kinds) if kinds else ()
            for (_, run), whole_ns in zip(pairs, times, strict=True):
                if not run.is_held:
                    run.parts[gpu] = whole_ns
                    moved[id(run)] = run
        self._dirty.clear()
        for run in moved.values():
            self._rebase(run)

    def _rebase(self, run: _Run) -> None:
        parts = run.parts
        whole_ns = max(parts.values()) if len(parts) > 1 else next(iter(parts.values()))
        if whole_ns == run.whole_ns:
            return
        if run.whole_ns < inf:
            run.left = max(0.0, run.left - (self.now_ns - run.since_ns) / run.whole_ns)
        run.since_ns, run.whole_ns = self.now_ns, whole_ns
        run.version += 1
        self._push(self.now_ns + run.left * whole_ns, run.version, run)


def _kind_of(pair: tuple[int, _Run]) -> int:
    return pair[0]
