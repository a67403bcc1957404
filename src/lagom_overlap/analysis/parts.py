"""Overlap and exposure of parts of a job: per phase of the step, per process group, within a node and between nodes.

A part's communication is the union of its collectives; exposed is what of it runs while no kernel computes, whichever
part that kernel belongs to. Parts run at once, so that their times add up to more than the job's.

A GPU event belongs to the phase in which the CPU launched it: the backward pass is what autograd's engine evaluates and
what FSDP does after it, the optimizer what runs inside `Optimizer.step`, the forward pass all else; of a trace without
autograd, or of an event without a launch, the phase is not known. A group spans nodes if its ranks do; the GPUs of a
node are those that the trace lists, eight where it lists one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.analysis.measures import Occupation
from lagom_overlap.trace.gpu_trace import NO_TIME, ROLE_CODES, UNKNOWN, Bools, EventRole, GpuTrace, Int64
from lagom_overlap.workload import Phase

PHASE, GROUP, WIRE = "phase", "group", "wire"
"""What a part is one of."""
WITHIN, BETWEEN = "within a node", "between nodes"
_USUAL_GPUS: Final = 8
"""GPUs of a node where the trace does not say: as on DGX and HGX machines."""
_PHASES: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPart:
    """One part: times over all steps and ranks in ns, `num_ranks` of a group (0: unknown or no group)."""

    by: str
    name: str
    compute_ns: int
    comm_ns: int
    exposed_ns: int
    num_calls: int
    num_ranks: int = 0

    @property
    def overlap_pct(self) -> float | None:
        """Overlapped communication per cent of communication."""
        return 100 * (1 - self.exposed_ns / self.comm_ns) if self.comm_ns else None


def parts_of(
    traces: Sequence[GpuTrace], occupations: Sequence[Occupation], gpus_per_node: int | None = None
) -> tuple[OverlapPart, ...]:
    """The parts in order of phase, group, wire; the longest communication of groups first."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for trace, occupation in zip(traces, occupations, strict=True):
        if not len(trace.events):
            continue
        comm = trace.events.role == ROLE_CODES[EventRole.COMM]
        for phase in _PHASES if trace.phases else ():
            rows = phase_mask(trace, phase)
            _add(totals[PHASE, phase.value], trace, occupation, rows & comm, _compute_ns(trace, rows))
        by_group: dict[str, list[int]] = defaultdict(list)
        by_wire: dict[str, list[int]] = defaultdict(list)
        sizes: dict[str, int] = {}
        for call in trace.calls:
            if call.event == UNKNOWN:
                continue
            by_group[call.communicator].append(call.event)
            sizes[call.communicator] = max(sizes.get(call.communicator, 0), call.num_ranks)
            wire = _wire(call.ranks, call.num_ranks, gpus_per_node or _gpus_per_node(trace))
            if wire:
                by_wire[wire].append(call.event)
        for by, intervals in ((GROUP, by_group), (WIRE, by_wire)):
            for name, events in intervals.items():
                mask = np.zeros(len(trace.events), dtype=np.bool_)
                mask[events] = True
                total = totals[by, name]
                _add(total, trace, occupation, mask, 0)
                total[4] = max(total[4], sizes.get(name, 0) if by == GROUP else 0)
    order = {PHASE: 0, GROUP: 1, WIRE: 2}
    parts = [
        OverlapPart(by=by, name=name, compute_ns=a, comm_ns=b, exposed_ns=c, num_calls=d, num_ranks=e)
        for (by, name), (a, b, c, d, e) in totals.items()
    ]
    phases = [phase.value for phase in _PHASES]
    parts.sort(
        key=lambda part: (
            order[part.by],
            phases.index(part.name) if part.by == PHASE else 0,
            -part.comm_ns if part.by == GROUP else 0,
            part.name != WITHIN,
            part.name,
        )
    )
    return tuple(parts)


def phase_mask(trace: GpuTrace, phase: Phase) -> Bools:
    """The events that the CPU launched in a phase."""
    launch = trace.events.launch_ns
    at = np.where(launch == NO_TIME, trace.events.start_ns, launch) if trace.is_cpu else launch
    known: Bools = at != NO_TIME
    inside = {of_phase: _within(trace, of_phase, at) for of_phase in (Phase.BACKWARD, Phase.OPTIMIZER)}
    if phase is Phase.FORWARD:
        mask: Bools = known & ~inside[Phase.BACKWARD] & ~inside[Phase.OPTIMIZER]
    elif phase is Phase.BACKWARD:
        mask = known & inside[phase] & ~inside[Phase.OPTIMIZER]
    else:
        mask = known & inside[phase]
    return mask


def _within(trace: GpuTrace, phase: Phase, at: Int64) -> Bools:
    spans = [(start, end) for marked, start, end in trace.phases if marked is phase]
    if not spans:
        return np.zeros(len(at), dtype=np.bool_)
    starts, ends = np.array(sorted(spans), dtype=np.int64).T
    index = np.searchsorted(starts, at, side="right") - 1
    inside: Bools = (index >= 0) & (at < np.maximum.accumulate(ends)[np.maximum(index, 0)])
    return inside


def _compute_ns(trace: GpuTrace, rows: Bools) -> int:
    mine = rows & (trace.events.role == ROLE_CODES[EventRole.COMPUTE])
    return Intervals.union(trace.events.start_ns[mine], trace.events.end_ns[mine]).length_ns


def _add(total: list[int], trace: GpuTrace, occupation: Occupation, comm: Bools, compute_ns: int) -> None:
    communication = Intervals.union(trace.events.start_ns[comm], trace.events.end_ns[comm])
    total[0] += compute_ns
    total[1] += communication.length_ns
    total[2] += communication.length_ns - communication.intersect(occupation.compute).length_ns
    total[3] += int(np.count_nonzero(comm))


def _gpus_per_node(trace: GpuTrace) -> int:
    return trace.num_gpus if trace.num_gpus > 1 else _USUAL_GPUS


def _wire(ranks: tuple[int, ...], num_ranks: int, gpus_per_node: int) -> str:
    """Whether a group stays within a node; empty where its ranks are not known."""
    if ranks:
        return WITHIN if len({rank // gpus_per_node for rank in ranks}) == 1 else BETWEEN
    return BETWEEN if num_ranks > gpus_per_node else ""
