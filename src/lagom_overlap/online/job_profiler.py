"""PyTorch runs one profiler per process, and the job's own comes first.

A second profiler does not start, or takes the process down. One of the job's that waits or warms up by its schedule
cannot be seen (`_profiler_enabled()` is False then), so from `watch` on the constructors tell: once the job has made a
profiler, ours is stopped if it runs, and none of ours is ever started again.

Steps that are profiled must not be adjacent either: Kineto writes the end of a `record_function` scope that was opened
under one profiler into that one's freed events if the next already runs.

Once Kineto has run, a forked child that ends by `exit` hangs for ever: Kineto's destructor waits for its thread, which
the child does not have (seen in torch 2.13). A child forked after a profiler of ours ends without destructors instead.
"""

import contextlib
import ctypes
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import profile

_log = logging.getLogger(__name__)

_CONSTRUCTED: Final[tuple[type[Any], ...]] = (profile, autograd_profile)
"""The first when the user makes it, the second when any profiler of torch is made ready to record."""


def why_not_now() -> str:
    """Why a step cannot be measured now: a profiler that runs, or a CUDA graph being captured; empty otherwise."""
    if torch._C._autograd._profiler_enabled():
        return "another profiler runs"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def _end_children_without_destructors() -> None:
    """In a forked child `exit` flushes C's streams and ends there; Python has ended before, in its usual way.

    glibc calls what `on_exit` was given last first, with the exit status. What the child calls is looked up here: the
    loader's lock may be held by another thread when the job forks.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library, which has no on_exit
        libc = ctypes.CDLL(None)
        on_exit, flush, end = libc.on_exit, libc.fcloseall, libc._exit

        def in_child() -> None:
            on_exit(end, None)
            on_exit(flush, None)

        os.register_at_fork(after_in_child=in_child)


class OwnProfiler:
    """The one profiler of ours in this process; `watch` before the job makes its own."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._is_starting = False
        self._has_run = False
        self._is_unwanted = False
        self._watched: list[tuple[type[Any], Callable[..., None], Callable[..., None]]] = []

    def watch(self) -> None:
        """Notices every profiler that the job makes from now on; safe to call twice."""
        if self._watched:
            return
        for constructed in _CONSTRUCTED:
            original: Callable[..., None] = constructed.__init__
            telling = self._telling(original)
            constructed.__init__ = telling
            self._watched.append((constructed, original, telling))

    def unwatch(self) -> None:
        """Puts the constructors back, unless somebody has wrapped them once more; safe to call twice."""
        for constructed, original, telling in self._watched:
            if constructed.__init__ is telling:
                constructed.__init__ = original
        self._watched.clear()

    def why_not(self) -> str:
        """Why a step cannot be profiled; empty if it can."""
        return "the job has a profiler of its own" if self._is_unwanted else why_not_now()

    def start(self, **how: Any) -> None:
        """Starts it; `how` as for `torch.profiler.profile`."""
        if not self._has_run:
            self._has_run = True
            _end_children_without_destructors()
        self._is_starting = True
        try:
            running = profile(**how, acc_events=True)  # it has one cycle; without, PyTorch warns that others are lost
            running.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        finally:
            self._is_starting = False
        self._running = running

    def stop(self) -> profile | None:
        """The profiler with the events since `start`; None if the job took it over meanwhile."""
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            running.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except Exception as error:  # somebody else stopped it; whatever it says, it is no error of the job
            _log.debug("the sample is void: %s", error)
            return None
        return running

    def _telling(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def constructed(profiler: Any, *args: Any, **kwargs: Any) -> None:  # whatever the job passes
            original(profiler, *args, **kwargs)
            if not self._is_starting and getattr(profiler, "enabled", True):
                self._is_unwanted = True
                self.stop()

        return constructed


@contextmanager
def exported(profiler: profile) -> Iterator[Path]:
    """The profiler's events as a Kineto file, which exists inside the context only."""
    with tempfile.TemporaryDirectory(prefix="lagom-step-") as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        yield path


OWN_PROFILER: Final = OwnProfiler()
