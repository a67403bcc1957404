"""Computations of a workload as real torch operations on this rank, in fp32 on the CPU.

Shapes are honoured, element sizes are not: a bf16 product of a job file runs in fp32. Tensors are made once, when the
operation is built, and equal works share them; the timed call allocates nothing, except for attention, whose torch
call has no `out=` and returns a new tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from time import thread_time_ns
from typing import Final

import torch
from torch.nn import functional

from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.errors import BackendError
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound, Work

Computation = Callable[[], object]
"""Runs the operation once, to its end."""


@dataclass(slots=True)
class ComputeBuilder:
    """Makes computations of works; equal works are one computation with one set of tensors."""

    seed: int = 0
    _built: dict[Work, Computation] = field(default_factory=dict)

    def build(self, work: Work) -> Computation:
        """The computation of that work.

        Raises:
            BackendError: for a `Kernel`, which says how long something takes and not what it computes.
        """
        if work not in self._built:
            self._built[work] = _build(work, torch.Generator().manual_seed(self.seed))
        return self._built[work]


def _build(work: Work, generator: torch.Generator) -> Computation:
    match work:
        case Gemm():
            left = torch.randn(work.m, work.k, generator=generator)
            right = torch.randn(work.k, work.n, generator=generator)
            return partial(torch.mm, left, right, out=torch.empty(work.m, work.n))
        case Attention():
            return _attention(work, generator)
        case MemoryBound():
            num_elements = max(1, work.num_bytes // (2 * ELEMENT_BYTES))  # one read and one write of each
            values = torch.randn(num_elements, generator=generator)
            return partial(torch.mul, values, 0.5, out=torch.empty(num_elements))
        case Kernel():
            raise BackendError(
                "a kernel given by blocks and wave time cannot be run on gloo: it does not say what to compute; "
                "give the computation as gemm, attention or memory_bound"
            )


def _attention(work: Attention, generator: torch.Generator) -> Computation:
    """Whole passes over all heads, and a fraction of a pass as that fraction of the heads, at least one."""
    heads = work.batch * work.num_heads
    shape = (1, heads, work.seq_len, work.head_dim)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    whole, fraction = divmod(work.passes, 1.0)
    shares = [heads] * int(whole)
    if fraction or not shares:
        shares.append(max(1, round(fraction * heads)))
    calls = [
        partial(
            functional.scaled_dot_product_attention,
            query[:, :share],
            key[:, :share],
            value[:, :share],
            is_causal=work.causal,
        )
        for share in shares
    ]

    def run() -> None:
        for call in calls:
            call()

    return run


_LEAST_NS: Final = 2_000_000
"""A timed run lasts at least this long; short operators are called several times. Chosen, not measured."""
_MAX_CALLS: Final = 1000
"""Bounds the calls of an operator whose time rounds to nothing."""


def probe_operators(works: Sequence[Work], *, repeats: int) -> dict[Work, tuple[float, float]]:
    """Median and interquartile range (s) of each work alone, the works taking turns in every one of `repeats` rounds.

    One thread, as a rank of the gloo backend computes; time is that thread's CPU time: what an operator needs of the
    core, whatever else the machine does meanwhile.

    Raises:
        BackendError: for a work that says how long it takes and not what it computes.
    """
    builder = ComputeBuilder(0)
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
