"""A measured step's kernels by PyTorch's profiler, with the waits between streams.

The device is idle before and after, so that the step's length is that of all its work. Lengths and the times of calls
are the GPU's, from the step's first event on: the host's clock would add the first launch and the last look.
"""

import logging
from collections.abc import Collection
from time import perf_counter

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from lagom_overlap.errors import TraceError
from lagom_overlap.online.device import job_device
from lagom_overlap.online.job_profiler import OWN_PROFILER, exported
from lagom_overlap.online.routes.event_records import EventRecords
from lagom_overlap.online.routes.plugin_events import TimedCall, step_length_s, timed_calls
from lagom_overlap.trace.gpu_trace import GpuTrace, KnobReach
from lagom_overlap.trace.reader import ReadOptions, read_file

_log = logging.getLogger(__name__)


class KernelTimer:
    """Implements `StepTimer` on a CUDA device, for the calls that the given reaches name."""

    def __init__(self, reaches: Collection[KnobReach] = (KnobReach.TUNER,)) -> None:
        self._reaches = reaches
        self._began_s = 0.0
        self._events = EventRecords(torch.version.cuda)

    def begin(self) -> None:
        """Starts the profiler on an idle device."""
        torch.cuda.synchronize(job_device())
        OWN_PROFILER.start(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],  # NCCL's fields come from the CPU's events
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
        )
        self._events.begin()
        self._began_s = perf_counter()

    def end(self) -> tuple[float, tuple[TimedCall, ...] | None]:
        """The step's length and its collectives; None if the profiler was taken away or the trace says too little.

        The length is the GPU's, and the host's only where there is no trace.
        """
        duration_s, trace = self.end_trace()
        return duration_s, None if trace is None else timed_calls(trace, self._reaches)

    def end_trace(self) -> tuple[float, GpuTrace | None]:
        """The same with the trace of the step in place of its collectives."""
        torch.cuda.synchronize(job_device())
        duration_s = perf_counter() - self._began_s
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
        return step_length_s(traces[0]), traces[0]
