"""Whether the job that `lagom init` writes would run, and what a step of it is predicted to take."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.fsdp2 import USABLE_MEMORY
from lagom_overlap.units import format_memory, format_seconds


class JobCheck(NamedTuple):
    """What a job leads to, and why it cannot run."""

    notes: tuple[str, ...]
    refused: str = ""


def checked(step: JobStep, parallel: Mapping[str, Any]) -> JobCheck:
    """Whether it fits, and what a step is predicted to take."""
    try:
        check_memory(step)
    except LagomError as error:
        return JobCheck((), f"it does not fit: {error}")
    try:
        seconds = step.times.iteration_s
    except LagomError as error:
        return JobCheck((), f"it cannot run: {error}")
    need, has = format_memory(step.most_bytes), format_memory(step.cluster.gpu.memory_bytes)
    again = " with every layer recomputed" if parallel.get("recompute") == "full" else ""
    rate = step.layout.global_batch * step.seq_len / seconds
    is_tight = step.most_bytes > USABLE_MEMORY * step.cluster.gpu.memory_bytes
    how = "It barely fits" if is_tight else "It fits"
    lost = ", of which the allocator loses some to fragments" if is_tight else ""
    return JobCheck(
        (
            f"{how}{again}: {need} of {has} per GPU{lost}.",
            f"A step is predicted to take {format_seconds(seconds)}, {rate:,.0f} tokens/s.",
        )
    )
