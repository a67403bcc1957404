"""When a collective on the CPU began and ended, noted by a thread that waits while the computation runs.

One clock per process group: calls of a group count as one in-order stream, a call's share begins at the later of its
issue and its predecessor's end. The thread only runs in steps that are measured.

A call of gloo must be waited for exactly once: receives count their completions, and a reduce-scatter from one tensor
copies its result into the target in `wait`, each time. So the clock waits, and the computation waits for the clock,
which costs it a switch of threads in measured steps, under every setting alike.
"""

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Event, Thread
from time import perf_counter
from typing import Final
from weakref import finalize

import torch

from lagom_overlap.engines.base import Handle
from lagom_overlap.signal_handlers import waiting

DRAIN_S: Final = 1.0
"""A call that still runs this long after its step has ended leaves the step untimed."""


@dataclass(slots=True)
class ClockMark:
    """The times of one call by `perf_counter`; those of the wait are None until somebody waited."""

    issued_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    joined_s: float | None = None
    resumed_s: float | None = None

    def waited(self, joined_s: float, resumed_s: float) -> None:
        """The computation stood still for this call."""
        self.joined_s, self.resumed_s = joined_s, resumed_s


class WatchedCall:
    """A call that the clock waits for, as a handle for the computation."""

    def __init__(self) -> None:
        self._event = Event()
        self._error: Exception | None = None

    def set(self, error: Exception | None) -> None:
        """The call is complete, or failed."""
        self._error = error
        self._event.set()

    def wait(self) -> None:
        """Returns when the call is complete, raises what it failed with."""
        waiting(self._event.wait)
        if self._error is not None:
            raise self._error


class CallClock:
    """The thread of one process group; it ends with the clock, also with one that nobody closed."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Handle, ClockMark, WatchedCall] | None] = SimpleQueue()
        self._open = _Open()
        # The thread does not hold the clock: a job that closes its tuner in its last step closes no route.
        Thread(target=_serve, args=(self._todo, self._open), name="lagom-clock", daemon=True).start()
        finalize(self, self._todo.put, None).atexit = False

    def watch(self, handle: Handle, mark: ClockMark, issued_s: float) -> WatchedCall:
        """Notes the end of a call that was just started; returns what to wait for in its place."""
        mark.issued_s = mark.began_s = mark.ended_s = issued_s
        self._open.add(1)
        ended = WatchedCall()
        self._todo.put((handle, mark, ended))
        return ended

    def is_idle(self) -> bool:
        """Whether every call so far has ended; waits a moment for the last ones."""
        return self._open.drain(DRAIN_S)

    def close(self) -> None:
        """Ends the thread after what it was given."""
        self._todo.put(None)


class _Open:
    """How many calls have not ended."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._number = 0

    def add(self, number: int) -> None:
        with self._changed:
            self._number += number
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Waits for the last to end; whether it did in time."""
        with self._changed:
            return waiting(lambda: self._changed.wait_for(lambda: self._number == 0, timeout=timeout_s))


def _serve(todo: "SimpleQueue[tuple[Handle, ClockMark, WatchedCall] | None]", still_open: _Open) -> None:
    previous_s = 0.0
    while (item := todo.get()) is not None:
        handle, mark, ended = item
        error: Exception | None = None
        try:
            with torch.no_grad():  # a reduce-scatter writes its target, maybe a parameter, in wait
                handle.wait()
        except Exception as failed:  # whoever waits for the call itself is told
            error = failed
        mark.began_s = max(mark.issued_s, previous_s)
        mark.ended_s = previous_s = max(perf_counter(), mark.began_s)
        ended.set(error)
        still_open.add(-1)
        del item, handle, mark, ended  # tensors must not live until the next call
