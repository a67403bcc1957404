"""Calls that may never return, made where nobody has to wait for them: in a thread of their own.

A connection whose other end has vanished without a word answers nothing and breaks nothing, and gloo waits without a
limit for a rank that was refused. Python cannot take such a call back. Whoever asks here stops waiting in time; the
call keeps its thread, a daemon, until it returns or the process ends. Needs no torch.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Final, TypeAlias, TypeVar

from lagom_overlap.signal_handlers import waiting

Result = TypeVar("Result")
_Task: TypeAlias = Callable[[], None] | None


class Overdue(Exception):  # noqa: N818 - a state, as StopIteration is
    """Raised when a call did not return in time; whether it takes effect later, nobody knows."""


class BoundedCalls:
    """One thread that makes calls one after another; after one that never returned, another thread."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._tasks: SimpleQueue[_Task] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        """Has it called; the future holds what comes of it."""
        future: Future[Result] = Future()

        def task() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # the asker's
                future.set_exception(error)

        if self._tasks is None:
            tasks: SimpleQueue[_Task] = SimpleQueue()
            Thread(target=_serve, args=(tasks,), name=self._name, daemon=True).start()  # may fail: then there is none
            end = weakref.finalize(self, tasks.put, None)  # the thread holds the queue, not us
            end.atexit = False  # others may still ask while the process ends
            self._tasks, self._end = tasks, end
        self._tasks.put(task)
        return future

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """What it returns or raises.

        Raises:
            Overdue: if it takes longer.
        """
        future = self.start(work)
        if not waiting(lambda: wait([future], max(timeout_s, 0.0))).done:
            self.close()  # later calls need not wait behind this one
            raise Overdue(f"no answer within {timeout_s:g} s")
        return future.result()

    def close(self) -> None:
        """Lets the thread end; the next call has another one."""
        self._end()
        self._tasks = None


def _serve(tasks: SimpleQueue[_Task]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds its asker, whose end may be what ends this thread
