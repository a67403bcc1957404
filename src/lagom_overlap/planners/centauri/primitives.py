"""What a collective can be replaced by, priced (Centauri, Table 2 and section 3.1.1; spec, planners 2.1).

    all-reduce      reduce-scatter + all-gather
    reduce-scatter  a reduce to each root
    all-gather      a broadcast from each root

The rows that the paper crosses out (a reduce and a broadcast, a scatter or a gather of the whole at one root) are left
out. Of the others it has ticks in place of prices. Reduces and broadcasts run one after the other, for each holds its
root's links.
"""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.workload import CommOp
from lagom_overlap.workload.rewrite.steps import Substitution

SCALABLE: Final = 0.05
"""What halves may cost beyond the collective that they replace: each can overlap with something else."""


@dataclass(frozen=True, slots=True)
class PricedSubstitution:
    """What replaces a collective: how long it takes and how long what it replaces does (s)."""

    into: Substitution
    seconds: float
    whole_s: float

    @property
    def is_rooted(self) -> bool:
        """Whether every rank is a root once: whoever reads the result waits for all."""
        return self.into is not Substitution.REDUCE_SCATTER_ALL_GATHER

    @property
    def pays(self) -> bool:
        """Whether it is kept in the partition space: halves if they scale, rooted ways only if they take less."""
        return self.seconds < self.whole_s if self.is_rooted else self.seconds <= (1 + SCALABLE) * self.whole_s


def substitution(comm: CommOp, times: OpTimes) -> PricedSubstitution | None:
    """What Table 2 ticks for a collective, priced; None for other kinds."""
    call = comm.collective

    def seconds(kind: CollectiveKind, num_bytes: int) -> float:
        collective = Collective(kind, num_bytes, call.num_ranks, call.num_nodes)
        return times.seconds(CommOp(name=comm.name, collective=collective, communicator=comm.communicator))

    def rooted_s(kind: CollectiveKind) -> float:
        share, rest = divmod(call.num_bytes, call.num_ranks)
        if not share:
            return float("inf")  # cannot be spread over the roots
        larger_s = rest * seconds(kind, share + 1) if rest else 0.0
        return larger_s + (call.num_ranks - rest) * seconds(kind, share)

    match call.kind:
        case CollectiveKind.ALL_REDUCE:
            into, size = Substitution.REDUCE_SCATTER_ALL_GATHER, call.num_bytes
            taken_s = seconds(CollectiveKind.REDUCE_SCATTER, size) + seconds(CollectiveKind.ALL_GATHER, size)
        case CollectiveKind.REDUCE_SCATTER:
            into, taken_s = Substitution.REDUCES, rooted_s(CollectiveKind.REDUCE)
        case CollectiveKind.ALL_GATHER:
            into, taken_s = Substitution.BROADCASTS, rooted_s(CollectiveKind.BROADCAST)
        case _:
            return None
    return PricedSubstitution(into, taken_s, times.seconds(comm))
