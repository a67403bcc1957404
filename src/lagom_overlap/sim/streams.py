"""Event simulation of one stream of kernels beside one stream of collectives, with waits both ways.

Collective j starts when its predecessor has ended and `starts_after` kernels are done; kernel i waits for every
collective with `needed_by` <= i. Between two events the same pair runs, at the rates of the contention model (Eq. 4,
time-weighted). A `Fixed` piece on the kernel stream takes its time whatever runs beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final

from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Kernel

NEVER: Final = 1 << 60
"""As `needed_by`: no kernel waits for it."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A piece of the kernel stream that nothing stretches: a collective that the stream waits for, a host gap."""

    seconds: float


@dataclass(frozen=True, slots=True)
class QueuedComm:
    """A collective of the second stream."""

    cost: CollectiveCost
    starts_after: int
    needed_by: int = NEVER


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Ends of both streams, communication while no kernel ran, and what kernels took beyond their time alone."""

    comp_end_s: float
    comm_end_s: float
    exposed_s: float
    stretched_s: float
    comm_s: float

    @property
    def makespan_s(self) -> float:
        """The later end."""
        return max(self.comp_end_s, self.comm_end_s)


class _Rates:
    """Whole times of kernels and collectives, alone and in pairs, computed once."""

    def __init__(self, model: ContentionModel) -> None:
        self._model = model
        self._alone: dict[Kernel, float] = {}
        self._pairs: dict[tuple[Kernel, CollectiveCost], tuple[float, float]] = {}

    def alone(self, piece: Kernel | Fixed) -> float:
        if isinstance(piece, Fixed):
            return piece.seconds
        known = self._alone.get(piece)
        if known is None:
            known = self._alone[piece] = self._model.running_times([piece], []).kernel_s[0]
        return known

    def pair(self, piece: Kernel | Fixed, cost: CollectiveCost) -> tuple[float, float]:
        if isinstance(piece, Fixed):
            return piece.seconds, cost.seconds()
        known = self._pairs.get((piece, cost))
        if known is None:
            times = self._model.running_times([piece], [cost])
            known = self._pairs[piece, cost] = times.kernel_s[0], times.comm_s[0]
        return known


def run_streams(pieces: Sequence[Kernel | Fixed], comms: Sequence[QueuedComm], model: ContentionModel) -> StreamTimes:
    """When both streams end.

    Raises:
        JobError: if a kernel or a collective never ends, because a rate of the cluster is next to nothing.
        ValueError: if a collective must end before a kernel that it waits for itself.
    """
    rates = _Rates(model)
    now = comp_end = comm_end = exposed = stretched = comm_busy = 0.0
    comp = comm = 0
    comp_left = comm_left = 1.0
    while comp < len(pieces) or comm < len(comms):
        queued = comms[comm] if comm < len(comms) and comms[comm].starts_after <= comp else None
        waits = comm < len(comms) and comms[comm].needed_by <= comp
        piece = pieces[comp] if comp < len(pieces) and not waits else None
        if piece is None and queued is None:
            raise ValueError(f"collective {comm} waits for kernel {comms[comm].starts_after}, which waits for it")
        if piece is not None and queued is not None:
            comp_s, comm_s = rates.pair(piece, queued.cost)
        else:
            comp_s = rates.alone(piece) if piece is not None else inf
            comm_s = queued.cost.seconds() if queued is not None else inf
        step_s = min(comp_left * comp_s, comm_left * comm_s)
        if not isfinite(step_s):
            raise JobError(f"cluster {model.cluster.name!r}: kernel {comp} or collective {comm} takes {step_s} s")
        now += step_s
        if queued is not None:
            comm_busy += step_s
            exposed += step_s if piece is None else 0.0
            comm_left -= step_s / comm_s if comm_s else comm_left
            if comm_left <= 1e-12:
                comm, comm_left, comm_end = comm + 1, 1.0, now
        if piece is not None:
            done = step_s / comp_s if comp_s else comp_left
            stretched += step_s - done * rates.alone(piece)
            comp_left -= done
            if comp_left <= 1e-12:
                comp, comp_left, comp_end = comp + 1, 1.0, now
    return StreamTimes(comp_end, comm_end, exposed, stretched, comm_busy)
