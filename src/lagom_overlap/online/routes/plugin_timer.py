"""A measured step's kernels by PyTorch's profiler, with the waits between streams.

The device is idle before and after, so that the step's length is that of all its work. Lengths and the times of calls
are the GPU's, from the step's first event on: the host's clock would add the first launch and the last look. What the
host launched after the last mark (`mark_end`), copies of data and checkpoints, is cut off (`plugin_events.ended`): the
mark is an annotation in the trace, by the trace's own clock.
"""

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Collection, Iterator
from time import perf_counter
from typing import Any, Final

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import TraceError
from lagom_overlap.online.device import job_device
from lagom_overlap.online.job_profiler import OWN_PROFILER, exported
from lagom_overlap.online.routes.plugin_events import TimedCall, ended, step_length_s, timed_calls
from lagom_overlap.trace.gpu_trace import GpuTrace, KnobReach
from lagom_overlap.trace.reader import ReadOptions, read_file

_log = logging.getLogger(__name__)

CUDA_EVENT: Final = 36
"""CUPTI_ACTIVITY_KIND_CUDA_EVENT of cupti_activity.h."""
_FIRST_APART: Final = (12, 9)
"""The first CUDA release whose CUPTI sends no event records with the synchronization records (see `EventRecords`)."""
_LOG_LEVEL: Final = "FLAGS_caffe2_log_level"
"""The least severe message that PyTorch's C++ writes: a variable of libc10, set by TORCH_CPP_LOG_LEVEL at start."""
_ERROR: Final = 2
"""ERROR among caffe2's log levels: INFO is 0, WARNING 1."""


def _loaded(name: str) -> Any:
    """The library that PyTorch has loaded, not another copy."""
    return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


class EventRecords:
    """Switches CUPTI's event records on and off: without them a profiled wait does not say what it waited for.

    PyTorch's profiler asks for CUPTI's synchronization records only. Up to CUDA 12.8 event records come with them;
    since 12.9 they are a kind of their own, and each "Stream Wait Event" in the trace has `wait_on_stream` -1
    (pytorch/kineto#1552, seen with PyTorch 2.15 and CUDA 13 on emulated GPUs). So we ask CUPTI for that kind while our
    own profiler runs; PyTorch reads such records when they come. `cuda` is PyTorch's CUDA release, None without CUDA.
    """

    def __init__(self, cuda: str | None, load: Callable[[str], Any] = _loaded) -> None:
        self._cupti: Any = None
        self._load = load
        release = tuple(int(word) for word in (cuda or "").split(".")[:2] if word.isdecimal())
        if release < _FIRST_APART:
            return
        try:
            self._cupti = load(f"libcupti.so.{release[0]}")
        except OSError as error:
            _log.debug("waits between streams may not be told: %s", error)

    def begin(self) -> None:
        """From here on; PyTorch's profiler must run, which brings the buffers."""
        if self._cupti is not None:
            self._cupti.cuptiActivityEnable(CUDA_EVENT)

    def end(self) -> None:
        """No longer."""
        if self._cupti is not None:
            self._cupti.cuptiActivityDisable(CUDA_EVENT)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While the profiler stops: PyTorch 2.15 warns of each such record, though it reads it, in the job's stderr."""
        try:
            level = None if self._cupti is None else ctypes.c_int.in_dll(self._load("libc10.so"), _LOG_LEVEL)
        except (OSError, ValueError):
            level = None
        if level is None:
            yield
            return
        before = level.value
        level.value = max(before, _ERROR)
        try:
            yield
        finally:
            level.value = before


_log = logging.getLogger(__name__)

STEP_MARK = "ProfilerStep"
"""How PyTorch's profiler marks the steps of who calls its `step`, which we do not: readers of traces know the word."""


class KernelTimer:
    """Implements `StepTimer` on a CUDA device, for the calls that the given reaches name."""

    def __init__(self, reaches: Collection[KnobReach] = (KnobReach.TUNER,)) -> None:
        self._reaches = reaches
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._num_marks = 0
        self._events = EventRecords(torch.version.cuda)

    def begin(self) -> None:
        """Starts the profiler on an idle device."""
        torch.cuda.synchronize(job_device())
        OWN_PROFILER.start(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],  # NCCL's fields come from the CPU's events
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
        )
        self._events.begin()
        self._began_s, self._ended_s, self._num_marks = perf_counter(), None, 0

    def mark_end(self) -> None:
        """What is launched later is no part of the step, unless it is a large collective."""
        with torch.profiler.record_function(f"{STEP_MARK}#{self._num_marks}"):
            self._num_marks += 1
        self._ended_s = perf_counter()

    def end(self) -> tuple[float, tuple[TimedCall, ...] | None]:
        """The step's length and its collectives; None if the profiler was taken away or the trace says too little.

        The length is the GPU's, and the host's only where there is no trace.
        """
        duration_s, trace = self.end_trace()
        return duration_s, None if trace is None else timed_calls(trace, self._reaches)

    def end_trace(self) -> tuple[float, GpuTrace | None]:
        """The same with the trace of the step in place of its collectives."""
        torch.cuda.synchronize(job_device())
        duration_s = (self._ended_s or perf_counter()) - self._began_s
        with self._events.quiet():
            profiler = OWN_PROFILER.stop()
        self._events.end()
        if profiler is None:
            return duration_s, None
        try:
            with exported(profiler) as path:
                traces = list(read_file(path, ReadOptions()))
        except (RuntimeError, OSError, TraceError) as error:
            _log.warning("a step could not be timed: %s", error)
            return duration_s, None
        if len(traces) != 1:  # one rank drives one GPU; of kernels on several it cannot be told which are the step's
            return duration_s, None
        trace = ended(traces[0], LEAST_BYTES)
        return step_length_s(trace), trace
