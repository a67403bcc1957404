"""What the framework waits for beyond the data flow: streams, events, communicators.

CUDA's rules, applied to numbers of operators: an event holds what its stream was told to do so far; a stream that waits
for it holds back what it is told next. A communicator runs one collective at a time, whatever the stream.
"""

from collections import defaultdict
from collections.abc import Iterable


class StreamClock:
    """Program order of streams, and the waits that each operator inherits."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._pending: defaultdict[str, set[int]] = defaultdict(set)
        self._events: dict[int, frozenset[int]] = {}
        self._last_of_communicator: dict[str, int] = {}

    def so_far(self, stream: str) -> frozenset[int]:
        """What must have ended when all that `stream` was told so far has ended."""
        last = self._last.get(stream)
        return frozenset(self._pending[stream] if last is None else {*self._pending[stream], last})

    def hold_back(self, stream: str, operators: Iterable[int]) -> None:
        """What `stream` is told next waits for these operators."""
        self._pending[stream].update(operators)

    def record(self, stream: str, event: int) -> None:
        """`event` is recorded on `stream`."""
        self._events[event] = self.so_far(stream)

    def wait_event(self, stream: str, event: int) -> None:
        """`stream` waits for `event`; one that was never recorded holds nothing."""
        self.hold_back(stream, self._events.get(event, frozenset()))

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
