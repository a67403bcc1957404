"""What the framework waits for beyond the data flow: streams, events, communicators.

CUDA's rules, applied to numbers of operators: an event holds what its stream was told to do so far; a stream that waits
for it holds back what it is told next. A communicator runs one collective at a time, whatever the stream.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockState:
    """What was issued last on streams and on communicators, and what streams wait for before their next operator."""

    last: Mapping[str, int]
    pending: Mapping[str, frozenset[int]]
    communicators: Mapping[str, int]

    def since(self, before: "ClockState") -> "ClockState":
        """What is no longer as before; of the same streams and communicators, or more."""

        def changed(now: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
            return {name: last for name, last in now.items() if earlier.get(name) != last}

        nothing: frozenset[int] = frozenset()
        streams = dict.fromkeys([*before.pending, *self.pending])
        waits = {name: self.pending.get(name, nothing) for name in streams}
        return ClockState(
            changed(self.last, before.last),
            {name: waited for name, waited in waits.items() if waited != before.pending.get(name, nothing)},
            changed(self.communicators, before.communicators),
        )


class StreamClock:
    """Program order of streams, and the waits that each operator inherits; `state` is where it begins."""

    def __init__(self, state: ClockState | None = None) -> None:
        begun = state or ClockState({}, {}, {})
        self._last: dict[str, int] = dict(begun.last)
        self._pending: defaultdict[str, set[int]] = defaultdict(set)
        self._pending |= {stream: set(waits) for stream, waits in begun.pending.items()}
        self._events: dict[int, frozenset[int]] = {}
        self._last_of_communicator: dict[str, int] = dict(begun.communicators)

    def state(self) -> ClockState:
        """What it knows but for events."""
        pending = {stream: frozenset(waits) for stream, waits in self._pending.items()}
        return ClockState(dict(self._last), pending, dict(self._last_of_communicator))

    def last(self, stream: str) -> int | None:
        """What `stream` was told last."""
        return self._last.get(stream)

    def last_of_communicator(self, communicator: str) -> int | None:
        """The collective that was issued last on a communicator."""
        return self._last_of_communicator.get(communicator)

    def pending(self, stream: str) -> frozenset[int]:
        """What `stream` waits for before its next operator."""
        return frozenset(self._pending.get(stream, ()))

    def go_on(self, changed: ClockState, places: Callable[[int], Sequence[int]]) -> None:
        """Operators were issued that left this state, in other numbers: those of each are its `places` here."""
        self._last |= {stream: places(last)[0] for stream, last in changed.last.items()}
        self._last_of_communicator |= {name: places(last)[0] for name, last in changed.communicators.items()}
        for stream, waits in changed.pending.items():
            self._pending[stream] = {place for wait in waits for place in places(wait)}

    def so_far(self, stream: str) -> frozenset[int]:
        """What must have ended when all that `stream` was told so far has ended."""
        last = self._last.get(stream)
        return frozenset(self._pending[stream] if last is None else {*self._pending[stream], last})

    def all_so_far(self) -> frozenset[int]:
        """The same of all streams together."""
        return frozenset().union(*(self.so_far(stream) for stream in {*self._last, *self._pending}))

    def of_event(self, event: int) -> frozenset[int]:
        """What must have ended when an event has come; nothing of one that was never recorded."""
        return self._events.get(event, frozenset())

    def hold_back(self, stream: str, operators: Iterable[int]) -> None:
        """What `stream` is told next waits for these operators."""
        self._pending[stream].update(operators)

    def record(self, stream: str, event: int) -> None:
        """`event` is recorded on `stream`."""
        self._events[event] = self.so_far(stream)

    def wait_event(self, stream: str, event: int) -> None:
        """`stream` waits for `event`; one that was never recorded holds nothing."""
        self.hold_back(stream, self.of_event(event))

    def wait_stream(self, stream: str, other: str) -> None:
        """`stream` waits for all that `other` was told so far."""
        self.hold_back(stream, self.so_far(other))

    def issue(self, operator: int, stream: str) -> set[int]:
        """`operator` is issued on `stream`: the operators that it waits for."""
        waits = self._pending.pop(stream, set())
        self._last[stream] = operator
        return waits

    def communicate(self, operator: int, communicator: str) -> set[int]:
        """A collective takes its communicator: the collective that it waits for, if any."""
        previous = self._last_of_communicator.get(communicator)
        self._last_of_communicator[communicator] = operator
        return set() if previous is None else {previous}
