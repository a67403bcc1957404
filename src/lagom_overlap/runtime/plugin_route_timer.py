"""A measured step's kernels by PyTorch's profiler, with the waits between streams.

The device is idle before and after, so that the step's length is that of all its work. Never tried on a GPU.
"""

import logging
import tempfile
from collections.abc import Collection
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from lagom_overlap.runtime.job_profiler import OWN_PROFILER
from lagom_overlap.runtime.plugin_route_events import TimedCall, timed_calls
from lagom_overlap.trace.gpu_trace import Reach

_log = logging.getLogger(__name__)


class _Trace(msgspec.Struct):
    traceEvents: list[Any]  # noqa: N815 - Chrome's name


class KernelTimer:
    """Implements `StepTimer` on a CUDA device, for the calls that the given reaches name."""

    def __init__(self, reaches: Collection[Reach] = (Reach.TUNER,)) -> None:
        self._reaches = reaches
        self._began_s = 0.0

    def begin(self) -> None:
        """Starts the profiler on an idle device."""
        torch.cuda.synchronize()
        OWN_PROFILER.start(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],  # NCCL's fields come from the CPU's events
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
        )
        self._began_s = perf_counter()

    def end(self) -> tuple[float, tuple[TimedCall, ...] | None]:
        """The step's length and its collectives; None if the profiler was taken away or the trace says too little."""
        torch.cuda.synchronize()
        duration_s = perf_counter() - self._began_s
        seen = OWN_PROFILER.stop()
        if seen is None:
            return duration_s, None
        try:
            with tempfile.TemporaryDirectory(prefix="lagom-step-") as folder:
                path = Path(folder) / "step.json"
                seen.export_chrome_trace(str(path))
                events = read_events(path)
        except (RuntimeError, OSError, msgspec.MsgspecError) as error:
            _log.warning("a step could not be timed: %s", error)
            return duration_s, None
        return duration_s, timed_calls(events, self._reaches)


def read_events(path: Path) -> list[Any]:
    """The events of a Chrome trace."""
    return msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents
