"""A measured step's kernels by PyTorch's profiler, with the waits between streams.

The device is idle before and after, so that the step's length is that of all its work. Lengths and the times of calls
are the GPU's, from the step's first event on: the host's clock would add the first launch and the last look. What the
host launched after the last mark (`mark_end`), copies of data and checkpoints, is cut off (`plugin_events.ended`): the
mark is an annotation in the trace, by the trace's own clock.
"""

import logging
from collections.abc import Collection
from time import perf_counter

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import TraceError
from lagom_overlap.online.device import job_device
from lagom_overlap.online.job_profiler import OWN_PROFILER, exported
from lagom_overlap.online.routes.event_records import EventRecords
from lagom_overlap.online.routes.plugin_events import TimedCall, ended, step_length_s, timed_calls
from lagom_overlap.trace.gpu_trace import GpuTrace, KnobReach
from lagom_overlap.trace.reader import ReadOptions, read_file

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
            seen = OWN_PROFILER.stop()
        self._events.end()
        if seen is None:
            return duration_s, None
        try:
            with exported(seen) as path:
                traces = list(read_file(path, ReadOptions()))
        except (RuntimeError, OSError, TraceError) as error:
            _log.warning("a step could not be timed: %s", error)
            return duration_s, None
        if len(traces) != 1:  # one rank drives one GPU; of kernels on several it cannot be told which are the step's
            return duration_s, None
        trace = ended(traces[0], LEAST_BYTES)
        return step_length_s(trace), trace
