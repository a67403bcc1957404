"""Times that no hardware reaches: a cell that claims one is wrong, however well it reads.

A product runs at most at twice the preset's `gemm_flops` (what large products reach of it; data sheets lie below twice
that), eight-bit ones at four times, four-bit ones at eight. A collective is no faster than what each rank must receive
over the fastest link of any GPU. A step is no shorter than its products and no longer than a day. Next to something
else nothing takes less than half of its time alone.
"""

from typing import Final

from lagom_overlap.hardware import Gpu
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import Precision
from measured_rows import BadRowError, NotModelledError

HEADROOM: Final = 2.0
LINK_BYTES_PER_S: Final = 2e12
"""Twice what NVLink 5 moves each way (0.9 TB/s)."""
LONGEST_STEP_S: Final = 86_400.0
LEAST_SLOWDOWN: Final = 0.5
MOST_FORWARDS: Final = 100_000
"""Three times those of the largest published pipeline (512 micro-batches through 64 stages, arXiv 2104.04473)."""


def check_possible(column: str, seconds: float, least_s: float, what: str) -> None:
    """Refuses a time that the hardware cannot reach; `what` it would have done.

    Raises:
        BadRowError: if `seconds` are fewer than `least_s`.
    """
    if seconds < least_s:
        raise BadRowError(f"{column} says {seconds:.3g} s, impossible: {what} takes at least {least_s:.3g} s")


def product_floor_s(shape: tuple[int, int, int], gpu: Gpu, dtype: str = "") -> float:
    """The least that a product can take; of `dtype` only the bits count."""
    m, n, k = shape
    faster = 4.0 if "4" in dtype else 2.0 if "8" in dtype else 1.0
    return 2.0 * m * n * k / (gpu.gemm_flops * HEADROOM * faster)


def collective_floor_s(num_bytes: int, num_ranks: int) -> float:
    """The least that a collective of that whole tensor can take."""
    return num_bytes * (num_ranks - 1) / num_ranks / LINK_BYTES_PER_S


def check_slowdown(column: str, beside_s: float, alone_s: float) -> None:
    """Refuses a time next to something else that is far below the time alone.

    Raises:
        BadRowError: if it is.
    """
    if beside_s < LEAST_SLOWDOWN * alone_s:
        raise BadRowError(f"{column} is {beside_s / alone_s:.2g} of the time alone, must be at least {LEAST_SLOWDOWN}")


def check_forwards(layout: ParallelLayout) -> None:
    """Refuses a layout that would take minutes to simulate.

    Raises:
        NotModelledError: with its number of forwards.
    """
    forwards = layout.num_micro_batches * layout.num_chunks
    if forwards > MOST_FORWARDS:
        raise NotModelledError(f"{forwards} forwards of all model chunks, at most {MOST_FORWARDS} are simulated here")


def step_flops(model: TransformerModel, num_tokens: int) -> float:
    """The products of forward and backward over parameters that tokens visit; attention and recomputation are more."""
    looked_up = 0 if model.tied_embeddings else model.vocab * model.hidden
    return 6.0 * num_tokens * (model.num_active_params - looked_up)


def check_step(
    measured_s: float, model: TransformerModel, *, num_tokens: int, num_gpus: int, gpu: Gpu, precision: Precision
) -> None:
    """Refuses a measured iteration that no such machine can have.

    Raises:
        BadRowError: naming the time and what it must be.
    """
    rate = (
        num_gpus
        * gpu.gemm_flops
        * HEADROOM
        * (2.0 * precision.products.packed if precision.products.is_narrow else 1.0)
    )
    check_possible("the measured value", measured_s, step_flops(model, num_tokens) / rate, f"a step of {model.name}")
    if measured_s > LONGEST_STEP_S:
        raise BadRowError(f"the measured value says {measured_s:.3g} s a step, must be at most {LONGEST_STEP_S:g} s")
