"""Times of single operators on this machine's CPU, one thread, as a rank of the gloo backend computes.

Time is that thread's CPU time: what an operator needs of the core, whatever else the machine does meanwhile.
"""

from collections.abc import Sequence
from statistics import median, quantiles
from time import thread_time_ns
from typing import Final

import torch

from lagom_overlap.engines.compute import Computation, ComputeBuilder
from lagom_overlap.workload import Work

_LEAST_NS: Final = 2_000_000
"""A timed run lasts at least this long; short operators are called several times. Chosen, not measured."""
_MAX_CALLS: Final = 1000
"""Bounds the calls of an operator whose time rounds to nothing."""


def probe_operators(works: Sequence[Work], *, repeats: int, seed: int = 0) -> dict[Work, tuple[float, float]]:
    """Median and interquartile range (s) of each work alone, the works taking turns in every one of `repeats` rounds.

    Raises:
        BackendError: for a work that says how long it takes and not what it computes.
    """
    builder = ComputeBuilder(seed)
    calls = {work: builder.build(work) for work in works}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            counts = {work: _calls_for(call) for work, call in calls.items()}
            rounds = [{work: _seconds(call, counts[work]) for work, call in calls.items()} for _ in range(repeats)]
    finally:
        torch.set_num_threads(before)
    return {work: _summary([times[work] for times in rounds]) for work in calls}


def _seconds(call: Computation, count: int) -> float:
    begin = thread_time_ns()
    for _ in range(count):
        call()
    return (thread_time_ns() - begin) / count / 1e9


def _calls_for(call: Computation) -> int:
    """How many calls fill the least time of a run; the first call, which warms up, does not count."""
    call()
    once_ns = max(1.0, _seconds(call, 1) * 1e9)
    return max(1, min(_MAX_CALLS, round(_LEAST_NS / once_ns)))


def _summary(times_s: Sequence[float]) -> tuple[float, float]:
    if len(times_s) == 1:
        return times_s[0], 0.0
    low, _, high = quantiles(times_s, n=4, method="inclusive")
    return median(times_s), high - low
