"""A group's computations alone, read from a timeline in which collectives ran beside only some of them.

Computations of equal work are twins. Where each sort of work has a run that no collective touches, the sum of these
runs' medians over all computations is the time alone: the same rule as `contention.py`'s for kernels of a GPU.
"""

from statistics import median

from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.workload import OverlapGroup, Work


def comp_alone_from_twins(group: OverlapGroup, timeline: Timeline) -> float | None:
    """Seconds of the group's computations alone; None where a sort of work never ran by itself."""
    works = {op.name: op.work for op in group.computations}
    comms = timeline.of(SpanKind.COMM)
    free: dict[Work, list[float]] = {}
    for span in timeline.of(SpanKind.COMP):
        work = works.get(span.name)
        if work is not None and not any(c.start_s < span.end_s and span.start_s < c.end_s for c in comms):
            free.setdefault(work, []).append(span.duration_s)
    if any(work not in free for work in works.values()):
        return None
    alone = {work: median(held) for work, held in free.items()}
    return sum(alone[work] for work in works.values())
