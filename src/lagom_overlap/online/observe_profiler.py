"""A sampled step with PyTorch's profiler: its collectives and how long each took."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from lagom_overlap.errors import TraceError
from lagom_overlap.online.device import job_device
from lagom_overlap.online.job_profiler import OWN_PROFILER, exported
from lagom_overlap.online.observe import SeenCall
from lagom_overlap.trace.gpu_trace import NS_PER_S, KnobReach
from lagom_overlap.trace.operators import read_operators
from lagom_overlap.trace.reader import ReadOptions, read_file

_log = logging.getLogger(__name__)


class ProfiledStep:
    """One step under the profiler at a time."""

    @staticmethod
    def begin() -> None:
        """Starts the profiler."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        OWN_PROFILER.start(activities=activities)

    @staticmethod
    def end() -> list[SeenCall] | None:
        """The step's collectives; None if the profiler was taken away meanwhile, or its file cannot be read."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(job_device())
        seen = OWN_PROFILER.stop()
        if seen is None:
            return None
        try:
            with exported(seen) as path:
                return kernels_of(path) if torch.cuda.is_available() else gloo_runs_of(path)
        except (RuntimeError, OSError, TraceError) as error:
            _log.debug("the sample is void: %s", error)
            return None


def kernels_of(path: Path) -> list[SeenCall]:
    """The collectives among the kernels of a step's trace."""
    return [
        SeenCall(call.kind, call.duration_ns / NS_PER_S, is_reachable=call.reach is not KnobReach.NONE)
        for trace in read_file(path, ReadOptions())
        for call in trace.calls
    ]


def gloo_runs_of(path: Path) -> list[SeenCall]:
    """The collectives that gloo's threads ran in a step."""
    return [SeenCall(call.kind, call.seconds) for call in read_operators(path, ()).collectives]
