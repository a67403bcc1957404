"""A sampled step with PyTorch's profiler: its collectives and how long each took."""

from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

from lagom_overlap.runtime.job_profiler import OWN_PROFILER
from lagom_overlap.runtime.observe import SeenCall
from lagom_overlap.trace.gpu_trace import Reach
from lagom_overlap.trace.names import function_name, is_communication, kind_of, reach_of
from lagom_overlap.units import US

_ISSUE_PREFIX: Final = "c10d::"
_RUN_PREFIX: Final = "gloo:"


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
        """The step's collectives; None if the profiler was taken away meanwhile."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seen = OWN_PROFILER.stop()
        if seen is None:
            return None
        events = seen.events()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return calls_of(events if events is not None else [])


def calls_of(events: Any) -> list[SeenCall]:
    """The collectives among profiler events: NCCL's kernels, else gloo's runs.

    gloo runs a reduce-scatter as an all-reduce, so a run has the kind of the call that was issued last before it.
    """
    kernels = [event for event in events if str(event.device_type).endswith("CUDA") and is_communication(event.name)]
    if kernels:
        return [_kernel_call(event.name, event.time_range.elapsed_us() * US) for event in kernels]
    seen, issued = [], ""
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith(_ISSUE_PREFIX):
            issued = event.name
        elif event.name.startswith(_RUN_PREFIX):
            kind = kind_of(issued or event.name.removeprefix(_RUN_PREFIX))
            seen.append(SeenCall(kind, event.time_range.elapsed_us() * US))
    return seen


def _kernel_call(name: str, duration_s: float) -> SeenCall:
    kind = kind_of(function_name(name))
    return SeenCall(kind, duration_s, is_reachable=reach_of(name, kind) is not Reach.NONE)
