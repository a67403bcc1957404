"""What the processes of an emulated job say, and how far the clock may run: pure, without sockets or real time.

Every process has one host with a clock of its own, which moves by what its calls cost and jumps when it waits. The
simulation may pass a moment only when no host can issue anything before it: a host that runs, or asks about the
present, holds it at its own clock; one that waits, has finished, or sleeps outside of CUDA does not. So the same
messages give the same times in whatever order they come; only a host that slept, or that issues from one thread while
another waits, can be late: its operations then start at the present, and `num_late` counts them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple, Protocol

from lagom_emulate.clock import INSTANT, Clock, Operation, SetTimes, Work
from lagom_emulate.description import read_description
from lagom_emulate.protocol import Ended, Host, Op, ProtocolError, Query, Wait

_MAX_NAMED: Final = 8
"""Calls of a deadlock that are named: a refusal is one line."""
MAX_OPEN_OPERATIONS: Final = 200_000
"""Operations that wait for nobody to ask: beyond, time passes all the same, so that they can be let go."""


class Prices(Protocol):
    """What descriptions cost; `prices.py` has the one that the verb uses."""

    def work(self, text: bytes) -> Work:
        """The work that a description stands for."""

    def communicator(self, text: bytes) -> str:
        """The communicator of a collective's description."""

    @property
    def set_times(self) -> SetTimes:
        """As the clock asks for them, in ns."""


class Disturbance(Protocol):
    """What makes operations and hosts slower than their price."""

    def factor(self, process: int, op_id: int, instance: int, work: Work) -> float:
        """On the time of an operation; `instance` counts a collective's calls and is the same on all members."""

    def skew_ns(self, process: int) -> float:
        """How much later a process begins."""


@dataclass(slots=True)
class _Process:
    """One process of the job, known by its rank."""

    number: int
    gpu_base: int
    num_queues: int = 0
    queues: dict[tuple[int, int], int] = field(default_factory=dict)
    host_ns: float = 0.0
    offset_ns: float = 0.0
    last_op_id: int = 0
    is_idle: bool = False
    is_finished: bool = False
    is_gone: bool = False
    descriptions: dict[int, tuple[Work, str, bytes]] = field(default_factory=dict)
    open: dict[int, Operation] = field(default_factory=dict)
    unsaid: list[Ended] = field(default_factory=list)
    waits: dict[int, list[Wait]] = field(default_factory=dict)
    background: dict[int, list[Wait]] = field(default_factory=dict)
    queries: list[Query] = field(default_factory=list)
    watching: list[Query] = field(default_factory=list)
    watched: int = 0

    @property
    def holds_the_clock(self) -> bool:
        return not (self.waits or self.is_finished or self.is_gone or self.is_idle)


@dataclass(frozen=True, slots=True)
class Reply:
    """A COMPLETED for one process."""

    process: int
    op_id: int
    is_done: bool
    now_ns: int
    ended: tuple[Ended, ...]


class Coordinator:
    """Takes records of processes; `advance` lets time pass as far as it may and gives the replies.

    Args:
        prices: what operations cost.
        on_end: called with every operation that has ended, in order of time.
        disturbance: factors on single operations; None: all 1.
    """

    def __init__(
        self,
        prices: Prices,
        on_end: Callable[[Operation], None],
        disturbance: Disturbance | None = None,
        gpus_per_host: int = 64,
    ) -> None:
        self.num_late = self.num_idle = 0
        self._prices, self._on_end, self._disturbance = prices, on_end, disturbance
        self._gpus_per_host = gpus_per_host
        self._processes: dict[int, _Process] = {}
        self.clock = Clock(prices.set_times)

    def hello(self, number: int, host: int, num_queues: int = 0) -> None:
        """A process begins at virtual time 0, or at the present where others have gone on without it.

        Its streams share `num_queues` launch queues a GPU, in the order of their first use (0: one for each stream).
        """
        skew_ns = self._disturbance.skew_ns(number) if self._disturbance is not None else 0.0
        self._processes[number] = _Process(
            number, host * self._gpus_per_host, num_queues, offset_ns=self.clock.now_ns + skew_ns
        )

    def describe(self, number: int, desc_id: int, text: bytes) -> None:
        """A kind of operation of one process.

        Raises:
            ProtocolError: if the text is no description, or the number is taken.
        """
        process = self._processes[number]
        if desc_id in process.descriptions or not desc_id:
            raise ProtocolError(f"description {desc_id} is there already")
        process.descriptions[desc_id] = self._prices.work(text), self._prices.communicator(text), text

    def submit(self, number: int, op: Op) -> None:
        """An operation.

        Raises:
            ProtocolError: if it is out of order or names what is not there.
        """
        process = self._processes[number]
        if op.op_id != process.last_op_id + 1:
            raise ProtocolError(f"operation {op.op_id} follows operation {process.last_op_id}")
        if op.after_op >= op.op_id:
            raise ProtocolError(f"operation {op.op_id} waits for operation {op.after_op}, which is not before it")
        if op.device >= self._gpus_per_host:
            raise ProtocolError(f"operation {op.op_id} is on device {op.device}")
        work, communicator = INSTANT, ""
        if op.desc_id:
            if op.desc_id not in process.descriptions:
                raise ProtocolError(f"operation {op.op_id} has description {op.desc_id}, which is not there")
            work, communicator, _ = process.descriptions[op.desc_id]
        issue_ns = self._heard(process, op.issue_ns)
        if issue_ns < self.clock.now_ns - 1.0:
            self.num_late += 1
        scale = 1.0
        if self._disturbance is not None and work is not INSTANT:
            scale = self._disturbance.factor(number, op.op_id, op.instance, work)
        gpu = process.gpu_base + op.device
        operation = Operation(number, op.op_id, gpu, work, issue_ns, scale, op.desc_id, op.stream)
        process.last_op_id = op.op_id
        process.open[op.op_id] = operation
        after = process.open.get(op.after_op)
        instance = (communicator, op.instance) if communicator else None
        self.clock.submit(operation, after=after, instance=instance, queue=self._queue(process, op, work))

    @staticmethod
    def _queue(process: _Process, op: Op, work: Work) -> int | None:
        """Kernels, collectives and waits for events go through launch queues.

        Records of events do not: at one connection, too, a kernel overlaps another stream's collective that was
        launched before it, though an event was recorded behind that collective. Copies have engines of their own.
        """
        if not process.num_queues or (work.kind is None and not op.after_op):
            return None
        return process.queues.setdefault((op.device, op.stream), len(process.queues) % process.num_queues)

    def wait(self, number: int, wait: Wait) -> None:
        """The host of a process waits; it is answered by `advance`."""
        process = self._processes[number]
        self._check_known(process, wait.op_id)
        if wait.thread:
            self._heard(process, wait.host_ns)
            process.waits.setdefault(wait.op_id, []).append(wait)
        else:
            process.background.setdefault(wait.op_id, []).append(wait)

    def query(self, number: int, query: Query) -> None:
        """The host of a process asks whether an operation has ended; it is answered by `advance`."""
        process = self._processes[number]
        self._check_known(process, query.op_id)
        if query.advances:
            self._heard(process, query.host_ns)
            process.queries.append(query)
        else:
            process.watching.append(query)

    def host(self, number: int, record: Host) -> None:
        """Where the host of a process is; it may say that it has finished."""
        process = self._processes[number]
        self._heard(process, record.host_ns)
        process.is_finished = process.is_finished or record.state == 1

    def leave(self, number: int) -> bool:
        """The connection of a process has ended; whether that was too early."""
        process = self._processes[number]
        process.is_gone = True
        process.waits.clear()
        process.background.clear()
        process.queries.clear()
        process.watching.clear()
        process.watched = 0
        if not process.is_finished:
            self.clock.leave(number)
        return not process.is_finished

    def sleep(self, number: int) -> None:
        """A host is silent though it does not wait for its GPU: it holds nobody until it speaks again."""
        process = self._processes[number]
        if process.holds_the_clock:
            process.is_idle = True
            self.num_idle += 1

    def silent(self) -> list[int]:
        """The processes that hold the clock while somebody waits for it to move, or watches for an end."""
        if not self.is_asked and not self.is_watched:
            return []
        limit_ns = self._limit_ns()
        holders = [p for p in self._processes.values() if p.holds_the_clock and not p.queries]
        return [p.number for p in holders if self._clock_of(p) <= limit_ns]

    @property
    def is_asked(self) -> bool:
        """Whether anybody waits for time to pass."""
        return any(p.waits or p.background or p.queries or p.watching for p in self._processes.values())

    @property
    def is_watched(self) -> bool:
        """Whether a watchdog has asked for an end that has not come: at a job's end nobody else may ask."""
        return any(process.watched in process.open for process in self._processes.values())

    @property
    def num_open(self) -> int:
        """Operations that have not ended."""
        return sum(len(process.open) for process in self._processes.values())

    def advance(self) -> list[Reply]:
        """Lets time pass as far as the hosts allow, if anybody waits for it or watches; whom to answer what."""
        replies: list[Reply] = []
        is_wanted = self.is_asked or self.is_watched or self._all_are_done
        if not is_wanted and self.num_open < MAX_OPEN_OPERATIONS:
            return replies
        replies += self._answers(-inf)
        limit_ns = self._limit_ns()
        while (next_ns := self.clock.next_ns()) <= limit_ns and next_ns < inf:
            woken = False
            for operation in self.clock.step():
                woken |= self._note(operation)
            if woken:
                replies += self._answers(-inf)
                limit_ns = self._limit_ns()
        replies += self._answers(limit_ns)
        return replies

    def describe_waits(self) -> str:
        """Who waits for what, for a line of progress or a refusal; empty where nobody waits."""
        return "; ".join(
            f"rank {process.number} waits for operation {op_id}{self._why(process.open.get(op_id))}"
            for process in self._processes.values()
            for op_id in list(process.waits)[:1]
        )

    def open_collectives(self) -> Iterator[tuple[Operation, int]]:
        """The collectives that have started on some members, and how many are missing."""
        for process in self._processes.values():
            for operation in process.open.values():
                missing = self.clock.missing(operation) if operation.start_ns >= 0.0 else 0
                if missing:
                    yield operation, missing

    def describe_circle(self) -> str:
        """Kernels that wait for each other, in one line; empty where there are none that can never go on."""
        circle = circle_of(operation for operation, _ in self.open_collectives())
        calls = [f"{self._call_of(blocked.kernel)} rank {blocked.awaits}" for blocked in circle[:_MAX_NAMED]]
        if len(circle) > _MAX_NAMED:
            calls.append(f"and {len(circle) - _MAX_NAMED} more up to rank {circle[0].kernel.owner}")
        return f"deadlock, none comes to its next call: {', '.join(calls)}" if circle else ""

    def _call_of(self, kernel: Operation) -> str:
        _, communicator, text = self._processes[kernel.owner].descriptions[kernel.desc]
        return f"rank {kernel.owner} {read_description(text).call or f'waits in communicator {communicator} for'}"

    @property
    def _all_are_done(self) -> bool:
        return all(process.is_finished or process.is_gone for process in self._processes.values())

    def _why(self, operation: Operation | None) -> str:
        held = [pair for pair in self.open_collectives() if operation is None or pair[0].gpu == operation.gpu]
        if not held:
            return ""
        first, missing = held[0]
        text = self._processes[first.owner].descriptions[first.desc][1]
        return f", behind a collective of communicator {text} that lacks {missing} of {first.work.num_members} members"

    def _check_known(self, process: _Process, op_id: int) -> None:
        if op_id > process.last_op_id:
            raise ProtocolError(f"asked for operation {op_id}, the last one is {process.last_op_id}")

    def _heard(self, process: _Process, host_ns: float) -> float:
        """The clock of a host that has spoken, in everybody's time."""
        if process.is_idle:
            process.is_idle = False
            process.offset_ns = max(process.offset_ns, self.clock.now_ns - host_ns)
        process.host_ns = max(process.host_ns, host_ns)
        return host_ns + process.offset_ns

    def _clock_of(self, process: _Process) -> float:
        return process.host_ns + process.offset_ns

    def _limit_ns(self) -> float:
        return min((self._clock_of(p) for p in self._processes.values() if p.holds_the_clock), default=inf)

    def _note(self, operation: Operation) -> bool:
        """Keeps an end; whether somebody waits for it."""
        process = self._processes[operation.owner]
        del process.open[operation.op_id]
        process.unsaid.append(Ended(operation.op_id, round(operation.start_ns), round(operation.end_ns)))
        self._on_end(operation)
        return operation.op_id in process.waits or operation.op_id in process.background

    def _answers(self, reached_ns: float) -> list[Reply]:
        """Replies to all whose operation has ended, and to questions about a moment that has been reached."""
        replies = []
        for process in self._processes.values():
            for op_id in [op_id for op_id in process.waits if op_id not in process.open]:
                for _ in process.waits.pop(op_id):
                    end_ns = next((e.end_ns for e in reversed(process.unsaid) if e.op_id == op_id), 0)
                    self._move_host(process, end_ns)
                    replies.append(self._reply(process, op_id, is_done=True))
            for op_id in [op_id for op_id in process.background if op_id not in process.open]:
                replies += [self._reply(process, op_id, is_done=True) for _ in process.background.pop(op_id)]
            has_come = reached_ns >= self._clock_of(process)
            for query in [query for query in process.queries if has_come or query.op_id not in process.open]:
                process.queries.remove(query)
                self._move_host(process, 0)
                replies.append(self._reply(process, query.op_id, is_done=query.op_id not in process.open))
            for watched in process.watching:
                process.watched = watched.op_id
                replies.append(self._reply(process, watched.op_id, is_done=watched.op_id not in process.open))
            process.watching.clear()
        return replies

    def _move_host(self, process: _Process, end_ns: float) -> None:
        """A host that is told the time goes on from there."""
        process.host_ns = max(self._clock_of(process), end_ns)
        process.offset_ns = 0.0

    def _reply(self, process: _Process, op_id: int, *, is_done: bool) -> Reply:
        ended, process.unsaid = tuple(process.unsaid), []
        return Reply(process.number, op_id, is_done, round(self._clock_of(process)), ended)


class Blocked(NamedTuple):
    """A kernel that has started, and the process of a member of it that lies behind the next one of the circle."""

    kernel: Operation
    awaits: int


def circle_of(started: Iterable[Operation]) -> list[Blocked]:
    """The first circle of kernels that have started and wait for each other, from its lowest process on; empty: none.

    NCCL hangs there, whatever the hosts still do. A kernel that has started waits for its other members. Where a member
    has been issued, but lies behind another kernel that waits in the same way (on its stream, or by an event), one
    waits for the other; a circle of them never ends.
    """
    waiting = [operation for operation in started if operation.run is not None]
    behind = [_behind(operation) for operation in waiting]
    edges: list[list[int]] = []
    for operation in waiting:
        assert operation.run is not None
        lacking = [id(member) for member in operation.run.members if member.start_ns < 0.0]
        edges.append([at for at, those in enumerate(behind) if any(member in those for member in lacking)])
    found = _first_circle(edges)
    if not found:
        return []
    first = min(range(len(found)), key=lambda place: waiting[found[place]].owner)
    order = [*found[first:], *found[:first]]
    owners = [waiting[at].owner for at in order]
    return [Blocked(waiting[at], owners[(place + 1) % len(order)]) for place, at in enumerate(order)]


def _behind(operation: Operation) -> set[int]:
    """What cannot start before an operation has ended, by identity."""
    found: set[int] = set()
    left = [operation]
    while left:
        one = left.pop()
        for later in (*one.followers, *([one.behind] if one.behind is not None else [])):
            if id(later) not in found:
                found.add(id(later))
                left.append(later)
    return found


def _first_circle(edges: Sequence[Sequence[int]]) -> list[int]:
    """The places of a circle in a graph, in its order; a walk in depth that leaves what it has seen to its end."""
    done: set[int] = set()
    for start in range(len(edges)):
        path, choices = [start], [iter(edges[start])]
        while path:
            following = next(choices[-1], None)
            if following is None:
                done.add(path.pop())
                choices.pop()
            elif following in path:
                return path[path.index(following) :]
            elif following not in done:
                path.append(following)
                choices.append(iter(edges[following]))
    return []
