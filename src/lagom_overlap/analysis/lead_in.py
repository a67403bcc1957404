"""Work of earlier steps at the head of a trace.

A program that never waits for its GPU runs ahead of it, often by steps. What a profiler first sees is then the rest of
steps that began before it looked: their kernels without a launch, their collectives without metadata. Divided by the
steps that were marked, it would make each of them longer than it is.
"""

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from lagom_overlap.analysis.measures import step_windows
from lagom_overlap.trace.gpu_trace import NS_PER_S, GpuEvents, GpuTrace
from lagom_overlap.units import format_seconds

_LEAST_STEPS: Final = 0.5
"""Less than that many steps of it is kept: a trace's figures are then those of all that it holds."""


def without_lead_in(trace: GpuTrace) -> GpuTrace:
    """The trace from its first marked step on the GPU on, where half a step or more comes before; a warning says so."""
    windows = step_windows(trace) if trace.steps else ()
    if not windows:
        return trace
    first_ns = windows[0][1]
    lead_ns = first_ns - int(trace.events.start_ns[0])
    if lead_ns < _LEAST_STEPS * (windows[-1][2] - first_ns) / len(windows):
        return trace
    num_left_out = int(np.searchsorted(trace.events.start_ns, first_ns))
    calls = tuple(
        replace(call, event=call.event - num_left_out) if call.event >= 0 else call
        for call in trace.calls
        if not 0 <= call.event < num_left_out
    )
    said = (
        f"the GPU was {format_seconds(lead_ns / NS_PER_S)} behind the program when the profiler began: what it did by "
        "then, of earlier steps, is left out"
    )
    return replace(trace, events=_from(trace.events, num_left_out), calls=calls, warnings=(*trace.warnings, said))


def _from(events: GpuEvents, row: int) -> GpuEvents:
    """The rows from this one on; names and streams stay as they are numbered."""
    columns: dict[str, Any] = {
        field.name: value[row:]
        for field in fields(events)
        if isinstance(value := getattr(events, field.name), np.ndarray)
    }
    return replace(events, **columns)
