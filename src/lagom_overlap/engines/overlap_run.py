"""Run a group once on this rank: computations on the calling thread, collectives at the same time on one "comm stream".

Two ways, by what the assignment says:

- every collective untouched: what users write. The calling thread starts each PyTorch call as soon as its computations
  are done, goes on computing, and waits at the end; the other thread only notes when each call is complete.
- else: the stream's thread starts each collective when the one before it is complete and its computations are done.

x_j is the collective's share of an in-order stream: from the later of its start and its predecessor's end to its own
end. Shares do not overlap, so their sum is the time in which the stream was busy, also where native calls run at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

from lagom_overlap.collective import ConfigKey
from lagom_overlap.engines.base import Buffers, Engine, Handle
from lagom_overlap.engines.compute import Computation
from lagom_overlap.timeline import Span, SpanKind
from lagom_overlap.workload import OverlapGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """A group made ready on this rank; `starts_after` as in `OverlapGroup`."""

    computations: tuple[Computation, ...]
    calls: tuple[tuple[ConfigKey, Buffers], ...]
    starts_after: tuple[int, ...]

    def released_by(self) -> list[list[int]]:
        """Which collectives become free before computation 0, before 1, ..., after the last; in order of the stream."""
        freed: list[list[int]] = [[] for _ in range(len(self.computations) + 1)]
        reached = 0
        for index, start in enumerate(self.starts_after):
            reached = max(reached, start)
            freed[reached].append(index)
        return freed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRunTimes:
    """One run on one rank: start and end of each computation and collective, in seconds since the run's start."""

    computations: tuple[tuple[float, float], ...]
    calls: tuple[tuple[float, float], ...]
    makespan_s: float

    def as_vector(self) -> list[float]:
        """Makespan, the computation's time, then each collective: what is compared between ranks.

        The computations never wait for a collective of their group, so their time runs from the run's start to their
        last end: a core that the collectives hold before or between them is contention like any other.
        """
        return [
            self.makespan_s,
            self.computations[-1][1],
            *(end - start for start, end in self.calls),
        ]

    def spans(self, group: OverlapGroup) -> tuple[Span, ...]:
        """Who ran when, of the group that was run."""
        computed = [
            Span(name=op.name, kind=SpanKind.COMP, stream="compute", start_s=start, end_s=end)
            for op, (start, end) in zip(group.computations, self.computations, strict=True)
        ]
        communicated = [
            Span(name=op.name, kind=SpanKind.COMM, stream="comm", start_s=start, end_s=end)
            for op, (start, end) in zip(group.comms, self.calls, strict=True)
        ]
        return (*computed, *communicated)


@dataclass(frozen=True, slots=True)
class _Issued:
    """A collective handed to the stream: already started (`handle`), or to be started there."""

    index: int
    issued_at: float
    handle: Handle | None


class CommStream:
    """The thread on which collectives run in order; one per rank, it sleeps while there is nothing to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._program: RankProgram | None = None
        self._todo: SimpleQueue[_Issued | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[float, float] | Exception] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="comm-stream", daemon=True)
        self._thread.start()

    def run(self, program: RankProgram, *, native: bool, barrier: Callable[[], None]) -> RankRunTimes:
        """One run, started on all ranks together by `barrier`; `native` if every collective is untouched.

        After an error of a collective the stream must not be used again.
        """
        released = program.released_by()
        self._program = program
        barrier()
        origin = perf_counter()
        self._release(program, released[0], native=native)
        marks = [perf_counter()]
        for index, computation in enumerate(program.computations, start=1):
            computation()
            marks.append(perf_counter())
            self._release(program, released[index], native=native)
        calls = [self._finished() for _ in program.calls]
        finish = perf_counter()
        return RankRunTimes(
            computations=tuple((start - origin, end - origin) for start, end in pairwise(marks)),
            calls=tuple((start - origin, end - origin) for start, end in calls),
            makespan_s=finish - origin,
        )

    def close(self) -> None:
        """Ends the thread once it has finished what it was given."""
        self._todo.put(None)
        self._thread.join()

    def _finished(self) -> tuple[float, float]:
        """Start and end of the next collective of the stream."""
        outcome = self._done.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _release(self, program: RankProgram, indices: list[int], *, native: bool) -> None:
        for index in indices:
            handle = self._engine.execute(*program.calls[index]) if native else None
            self._todo.put(_Issued(index, perf_counter(), handle))

    def _serve(self) -> None:
        previous_end = 0.0
        while (item := self._todo.get()) is not None:
            try:
                assert self._program is not None, "work arrives only during a run"
                start = perf_counter() if item.handle is None else max(item.issued_at, previous_end)
                handle = item.handle or self._engine.execute(*self._program.calls[item.index])
                handle.wait()
                previous_end = perf_counter()
                self._done.put((start, previous_end))
            except Exception as error:  # shown by the main thread, which waits for this entry
                self._done.put(error)
