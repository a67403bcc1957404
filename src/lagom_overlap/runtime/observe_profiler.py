"""A sampled step with PyTorch's profiler: its collectives and how long each took."""

import logging
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lagom_overlap.runtime.observe import SeenCall
from lagom_overlap.trace.gpu_trace import Reach
from lagom_overlap.trace.names import function_name, is_communication, kind_of, reach_of
from lagom_overlap.units import US

_log = logging.getLogger(__name__)
_ISSUE_PREFIX = "c10d::"
_RUN_PREFIX = "gloo:"


def profiler_runs() -> str:
    """Why a step cannot be sampled now: the job's own profiler, or a CUDA graph being captured; empty otherwise."""
    if torch._C._autograd._profiler_enabled():
        return "another profiler runs"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


class ProfiledStep:
    """One step under the profiler at a time."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def begin(self) -> None:
        """Starts the profiler."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def end(self) -> list[SeenCall] | None:
        """The step's collectives; None if the profiler was taken away meanwhile."""
        running, self._profile = self._profile, None
        if running is None:
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        try:
            running.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except RuntimeError as error:  # somebody else stopped it
            _log.debug("the sample is void: %s", error)
            return None
        events = running.events()  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
