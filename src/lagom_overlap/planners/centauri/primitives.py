"""What a collective can be replaced by, priced (Centauri, Table 2 and section 3.1.1; spec, planners 2.1).

    all-reduce      reduce + broadcast                     reduce-scatter + all-gather
    reduce-scatter  reduce + scatter                       a reduce to each root
    all-gather      gather + broadcast                     a broadcast from each root

A substitution scales if it takes at most `SCALABLE` more than what it replaces; the paper's table has ticks and crosses
in place of prices. Rooted primitives run one after the other, for each holds its root's links. A scatter and a gather
are as many transfers over the root's link as there are other ranks, priced without their latencies.
"""

from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.workload import CommOp

SCALABLE: Final = 0.05
"""What a substitution may cost beyond the collective that it replaces."""


@dataclass(frozen=True, slots=True)
class PricedSubstitution:
    """One way to replace a collective: how long it takes and how long what it replaces does (s)."""

    what: str
    seconds: float
    whole_s: float
    is_rooted: bool

    @property
    def scales(self) -> bool:
        """Whether it is kept in the partition space."""
        return self.seconds <= (1 + SCALABLE) * self.whole_s


def substitutions(comm: CommOp, times: OpTimes) -> tuple[PricedSubstitution, ...]:
    """Every row of Table 2 for a collective, rooted ones first; none for other kinds."""
    call = comm.collective
    whole_s = times.seconds(comm)

    def seconds(kind: CollectiveKind, num_bytes: int) -> float:
        collective = Collective(kind, max(1, num_bytes), call.num_ranks, call.num_nodes)
        return times.seconds(CommOp(name=comm.name, collective=collective, communicator=comm.communicator))

    def priced(what: str, taken_s: float, *, is_rooted: bool = True) -> PricedSubstitution:
        return PricedSubstitution(what, taken_s, whole_s, is_rooted)

    size, share = call.num_bytes, call.num_bytes // call.num_ranks
    match call.kind:
        case CollectiveKind.ALL_REDUCE:
            rooted_s = seconds(CollectiveKind.REDUCE, size) + seconds(CollectiveKind.BROADCAST, size)
            halves_s = seconds(CollectiveKind.REDUCE_SCATTER, size) + seconds(CollectiveKind.ALL_GATHER, size)
            return (
                priced("reduce + broadcast", rooted_s),
                priced("reduce-scatter + all-gather", halves_s, is_rooted=False),
            )
        case CollectiveKind.REDUCE_SCATTER:
            one, each = CollectiveKind.REDUCE, "reduces of distinct roots"
            both = "reduce + scatter"
        case CollectiveKind.ALL_GATHER:
            one, each = CollectiveKind.BROADCAST, "broadcasts of distinct roots"
            both = "gather + broadcast"
        case _:
            return ()
    moved = replace(call, kind=one, num_bytes=max(1, size - share))
    spread_s = times.seconds(replace(comm, collective=moved))
    return (
        priced(both, seconds(one, size) + spread_s),
        priced(each, call.num_ranks * seconds(one, share)),
    )
