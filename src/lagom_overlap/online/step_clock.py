"""The times of the job's own steps, without anything of ours: every verdict of a running job rests on them.

On the CPU the host's clock is enough, because gloo's calls end before their step does. On a GPU the host runs ahead, so
events are recorded on the current stream where a step begins and ends, and read when the ranks report: by then the host
has issued the next step, so waiting for the last event does not leave the device idle. The time between steps (data
loading, checkpoints) does not count, unless large collectives follow the last update: then a step ends where the next
one begins (`Route.goes_on`).
"""

from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter, sleep
from typing import Any, Final, Protocol

MS_PER_S = 1e3
"""torch's `elapsed_time` tells milliseconds."""
END_WAIT_S: Final = 10.0
"""The longest that the end of a job waits for its last steps on the device, which may never end. Chosen."""
_LOOK_AGAIN_S: Final = 0.01
"""The GPU is behind the host by milliseconds; a look costs microseconds."""


class StepClock(Protocol):
    """Times steps one after the other; `end` may be called again within a step, and then the later call counts."""

    def begin(self) -> None:
        """A step begins."""

    def end(self) -> None:
        """It is over."""

    def wait(self) -> None:
        """Returns when the device has reached the last recorded event; this waits for the job's own work only."""

    def times_s(self) -> list[float]:
        """The steps since the last `forget`, in order; waits for the last of them."""

    def forget(self) -> None:
        """Starts over with the next step; never waits."""


class HostClock:
    """Implements `StepClock` by the host."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._times_s: list[float] = []
        self._is_new = False

    def begin(self) -> None:
        """See `StepClock`."""
        self._began_s, self._is_new = self._clock(), True

    def end(self) -> None:
        """See `StepClock`."""
        if not self._is_new and self._times_s:
            self._times_s.pop()
        self._times_s.append(self._clock() - self._began_s)
        self._is_new = False

    def wait(self) -> None:
        """See `StepClock`: nothing runs ahead of the host."""

    def times_s(self) -> list[float]:
        """See `StepClock`."""
        return list(self._times_s)

    def forget(self) -> None:
        """See `StepClock`."""
        self._times_s.clear()


class EventClock:
    """Implements `StepClock` by events of the device; `make` makes one that can be timed (`torch.cuda.Event`)."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._spare: list[Any] = []
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """See `StepClock`."""
        self._begun = self._recorded()

    def end(self) -> None:
        """See `StepClock`."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._recorded()))
            self._begun = None
        elif self._pairs:
            self._pairs[-1][1].record()

    def wait(self) -> None:
        """See `StepClock`."""
        if self._pairs:
            self._pairs[-1][1].synchronize()

    def times_s(self) -> list[float]:
        """See `StepClock`."""
        self.wait()
        return [float(first.elapsed_time(last)) / MS_PER_S for first, last in self._pairs]

    def forget(self) -> None:
        """See `StepClock`."""
        self._spare += [event for pair in self._pairs for event in pair]
        self._pairs.clear()

    def _recorded(self) -> Any:
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        return event


class HostEvent:
    """A moment of the host's, with the methods of an event of the device."""

    def record(self) -> None:
        """It is now."""
        self._at_s = perf_counter()

    def query(self) -> bool:
        """It has come."""
        return True

    def elapsed_time(self, later: "HostEvent") -> float:
        """Milliseconds to a later one."""
        return (later._at_s - self._at_s) * MS_PER_S


class IntervalClock:
    """The times from the beginning of each step to that of the next one: the latest `most`.

    `make` makes an event that can be timed (`torch.cuda.Event`), or `HostEvent`s. A host runs ahead of its GPU: the
    host's intervals are the times of launches, and the one with the next synchronisation holds all the work. Events are
    read at the end alone, so the job never waits for them.
    """

    def __init__(self, make: Callable[[], Any], most: int) -> None:
        self._make = make
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=most)
        self._begun: Any = None

    def begin(self, *, counts: bool) -> None:
        """A step begins; `counts`: the one before counts."""
        event = self._make()
        event.record()
        if counts and self._begun is not None:
            self._pairs.append((self._begun, event))
        self._begun = event

    def skip(self) -> None:
        """A step begins where no event can be recorded; neither it nor the one before counts."""
        self._begun = None

    def forget(self) -> None:
        """What was timed so far does not count."""
        self._pairs.clear()

    def times_s(self, wait_s: float = END_WAIT_S) -> tuple[float, ...]:
        """The steps that the device has come to the end of; it is waited for that long."""
        deadline = monotonic() + wait_s
        while self._pairs and not self._pairs[-1][1].query() and monotonic() < deadline:
            sleep(_LOOK_AGAIN_S)
        ended = [pair for pair in self._pairs if pair[1].query()]
        return tuple(float(begun.elapsed_time(end)) / MS_PER_S for begun, end in ended)
