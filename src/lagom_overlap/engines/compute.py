"""Computations of a workload as real torch operations on this rank, in fp32 on the CPU.

Shapes are honoured, element sizes are not: a bf16 product of a job file runs in fp32. Tensors are made once, when the
operation is built, and equal works share them; the timed call allocates nothing, except for attention, whose torch
call has no `out=` and returns a new tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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
