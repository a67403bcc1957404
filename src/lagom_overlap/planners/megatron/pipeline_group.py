"""How many micro-batches of a model chunk are launched together, all stages of a pipeline planned at once.

Centauri, section 3.2.3 and Fig. 7: launching L >= p micro-batches of one chunk together leaves its gradients time to be
reduced during the other chunk's backward, and holds more activations. Megatron-LM carries L as
`--microbatch-group-size-per-virtual-pipeline-stage`. Here every stage's slots are simulated with each L, and the
least L is taken that is as short as the shortest.

Departures: Eq. 2 knows one stage and no bubble; here L is one number for forward and backward, as Megatron's is, and
what a stage holds is counted in its schedule (Fig. 7 counts L).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.planners.effects import MIN_GAIN
from lagom_overlap.planners.megatron.pipeline import SlotSeconds
from lagom_overlap.sim.pipeline import SlotRun, SlotTimes, run_pipeline
from lagom_overlap.workload.parallel import ParallelLayout, stage_slots
from lagom_overlap.workload.parallel.schedule import most_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComms:
    """Seconds in which a stage gathers one chunk's parameters before its first forward, and reduces its gradients."""

    gather_s: float
    reduce_s: float


NO_COMMS: Final = ChunkComms(gather_s=0.0, reduce_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedTogether:
    """L, the iteration (s) of all stages, and the most chunk forwards whose activations the first stage holds."""

    group: int
    iteration_s: float
    held: int


def launched_together(layout: ParallelLayout, seconds: SlotSeconds, comms: ChunkComms) -> tuple[LaunchedTogether, ...]:
    """Every L from the pipeline's depth up that divides the micro-batches; `seconds` are of one chunk.

    Transfers run during the next slot. Collectives of a stage run one after the other, next to its computations.
    """
    found = []
    for group in range(layout.pipeline, layout.num_micro_batches + 1):
        if layout.num_micro_batches % group:
            continue
        orders = [stage_slots(layout, rank, group) for rank in range(layout.pipeline)]
        times = SlotTimes(
            (seconds.forward_s,) * layout.chunks, (seconds.backward_s,) * layout.chunks, seconds.transfer_s
        )
        runs = run_pipeline(orders, [times] * layout.pipeline)
        iteration_s = max(_reduced_s(run, comms) for run in runs) + max(_late_s(run, comms) for run in runs)
        found.append(LaunchedTogether(group=group, iteration_s=iteration_s, held=most_in_flight(orders[0])))
    return tuple(found)


def least_launched(tried: Sequence[LaunchedTogether]) -> LaunchedTogether:
    """The least L that is within `MIN_GAIN` of the shortest."""
    limit_s = (1.0 + MIN_GAIN) * min(one.iteration_s for one in tried)
    return next(one for one in sorted(tried, key=lambda one: one.group) if one.iteration_s <= limit_s)


def _reduced_s(run: Sequence[SlotRun], comms: ChunkComms) -> float:
    """When a stage has computed everything and reduced each chunk's gradients, behind the chunk's last backward."""
    last = {one.slot.chunk: one.end_s for one in run if not one.slot.forward}
    free_s = 0.0
    for ready_s in sorted(last.values()):
        free_s = max(free_s, ready_s) + comms.reduce_s
    return max(free_s, run[-1].end_s)


def _late_s(run: Sequence[SlotRun], comms: ChunkComms) -> float:
    """How long the stage's first forwards wait for parameters that are gathered chunk by chunk from the start."""
    first: dict[int, float] = {}
    for one in run:
        if one.slot.forward:
            first.setdefault(one.slot.chunk, one.start_s)
    return max(0.0, *((number + 1) * comms.gather_s - first[chunk] for number, chunk in enumerate(sorted(first))))
