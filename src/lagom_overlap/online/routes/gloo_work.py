"""The handle of a collective that the gloo route runs or times, with all that gloo's own handle offers."""

import contextlib
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Event, Lock, Thread
from time import perf_counter
from typing import cast

import torch
from torch import distributed as dist
from torch.futures import Future

from lagom_overlap.engines.base import Handle
from lagom_overlap.online.routes.gloo_clock import ClockMark
from lagom_overlap.signal_handlers import handing_over


class _Run:
    """A collective of ours, which somebody has to wait for; what is done after it, is done once."""

    def __init__(self, handle: Handle, finish: Callable[[], object] | None) -> None:
        self._handle = handle
        self._finish = finish
        self._waiting = Lock()
        self.done = Event()
        self.error: Exception | None = None

    def complete(self) -> None:
        """Returns when it is over, or raises what it failed with."""
        with self._waiting:  # whoever comes later waits for the first, not for the call
            if not self.done.is_set():
                try:
                    with torch.no_grad():  # another thread does not have the caller's grad mode
                        self._handle.wait()
                        if self._finish is not None:
                            self._finish()
                except Exception as error:
                    self.error = error
                self.done.set()
        if self.error is not None:
            raise self.error

    def complete_quietly(self) -> None:
        """For a thread that nobody hears."""
        with contextlib.suppress(Exception):  # `wait` raises it
            self.complete()


class RunWork(dist.Work):
    """A collective of ours in flight, as a framework expects it.

    A handle that the job drops ends all the same, as torch's own does: a thread waits for it where `is_owed` says that
    it would not end by itself. (gloo gives up sends and receives whose handles are gone.)
    `results` is what gloo's own handle gives as `result()` and as the value of its future; None where it has neither.
    """

    def __init__(
        self,
        handle: Handle,
        mark: ClockMark | None = None,
        finish: Callable[[], object] | None = None,
        *,
        is_owed: bool = False,
        results: Callable[[], list[torch.Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self._run = _Run(handle, finish)
        self._is_owed = is_owed
        self._mark = mark
        self._results = results
        self._is_joined = False
        self._asking = Lock()
        self._is_asked = False
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when this rank's target is complete.

        Raises:
            RuntimeError: if that takes longer than the timeout, or the call failed.
        """
        joined_s = perf_counter()
        if timeout:  # torch passes 0 for none
            self._ask()
            if not self._run.done.wait(timeout.total_seconds()):
                raise RuntimeError(f"a collective timed out after {timeout.total_seconds()} s")
        self.complete()
        if self._mark is not None and not self._is_joined:
            self._mark.waited(joined_s, perf_counter())
        self._is_joined = True
        return True

    def complete(self) -> None:
        """The same for another thread, while the computation goes on."""
        handing_over(self._run.complete)

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None and self._is_owed and not run.done.is_set():
            _aside(run.complete_quietly, "lagom-dropped")

    def is_completed(self) -> bool:
        """Whether it is over; gloo cannot be asked that of a call, so from the first question on a thread waits."""
        if not self._run.done.is_set():
            self._ask()
        return self._run.done.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well; errors are raised by `wait`."""
        return self._run.done.is_set() and self._run.error is None

    def result(self) -> list[torch.Tensor]:
        """The outputs, once it is complete."""
        if self._results is None:
            return super().result()  # which says that there are none
        self.complete()
        return self._results()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Holds the outputs when the call is complete: from now on a thread waits for it."""
        if self._results is None:
            return cast("Future[list[torch.Tensor]]", super().get_future())  # which says that there is none
        with self._asking:
            if self._future is None:
                self._future = Future()
                # A thread that was asked before knew of no future.
                _aside(partial(self._fulfil, self._future), "lagom-future")
            return self._future

    def _fulfil(self, future: Future[list[torch.Tensor]]) -> None:
        assert self._results is not None, "a future is promised only where there are outputs"
        try:
            self.complete()
        except Exception as error:  # whoever waits for the future is told, or would wait for ever
            future.set_exception(error)  # type: ignore[arg-type]  # the stub wants a result
        else:
            future.set_result(self._results())

    def _ask(self) -> None:
        with self._asking:
            if not self._is_asked:
                self._is_asked = True
                _aside(self._run.complete_quietly, "lagom-asked")


def _aside(work: Callable[[], None], name: str) -> None:
    """In a thread, or here where none can be had: what the job or another rank waits for would else never end."""
    try:
        Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        if not sys.is_finalizing():
            work()
