"""Operation tier: in which parts a collective runs during the computations that depend on it (Centauri, Algorithm 1).

    printed          here          unit
    comm_cost        comm_s        s      the whole collective
    comp_cost        chain_s       s      the computations that depend on it and can be cut
    in_cost          free_s        s      computations that do not depend on it
    cost_inter       inter_s       s      the gather between nodes of one index alone
    inter_size, N1   num_nodes     -
    intra_size, N2   in_node       -
    MAX_CHUNKS       MAX_CHUNKS    -

Mended as the specification says (planners, section 2.4): the last `else` belongs to the first `if` (nothing is cut
where everything is hidden); the even number of chunks is rounded up and at least two; one node or one rank a node is
not grouped; shares sum to one. `printed=True` keeps the printed rounding (down, so that 1 is possible).

Where the links inside and between nodes are close, or latency counts, its closed form chooses badly (measured in the
specification: best option 94 % of the time on Centauri's cluster A, 18 % on four H100 nodes). So by default all options
are run through `end_s` and the shortest is taken; the loop over chunks, each gathered between and then inside nodes, is
what the paper's section 5.1 reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil, floor

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.rewrite.partition import granularity
from lagom_overlap.workload.rewrite.steps import TWICE

MAX_CHUNKS = 8
"""Parts of a collective at most; bounds the search. Chosen: the paper gives none."""


class Parts(StrEnum):
    """How a collective is taken apart."""

    WHOLE = "whole"
    EVEN = "even"
    INTER_FIRST = "inter_first"
    INTRA_FIRST = "intra_first"
    INTRA_FIRST_FINER = "intra_first_finer"
    LOOPED = "looped"


ORDERS = {Parts.INTER_FIRST: (0, 1), Parts.INTRA_FIRST: (1, 0), Parts.INTRA_FIRST_FINER: TWICE}
"""Axes of the mesh [nodes, in node] in the order in which an all-gather runs over them."""


@dataclass(frozen=True, slots=True)
class OperationChoice:
    """A way to take a collective apart and the share of the result that each part brings; `mesh`: not the usual one."""

    parts: Parts
    shares: tuple[Fraction, ...] = (Fraction(1),)
    mesh: tuple[int, ...] = ()


def even(num_chunks: int) -> OperationChoice:
    """Equal chunks."""
    return (
        OperationChoice(Parts.EVEN, (Fraction(1, num_chunks),) * num_chunks)
        if num_chunks > 1
        else OperationChoice(Parts.WHOLE)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCosts:
    """What Algorithm 1 knows of a collective; `num_nodes` and `in_node` are 1 where it is not grouped."""

    comm_s: float
    chain_s: float
    free_s: float
    inter_s: float = 0.0
    num_nodes: int = 1
    in_node: int = 1

    @property
    def is_grouped(self) -> bool:
        """Whether there are two levels of links."""
        return self.num_nodes > 1 and self.in_node > 1


def algorithm_1(costs: OperationCosts, *, printed: bool = False) -> OperationChoice:
    """The paper's closed form."""
    if costs.free_s >= costs.comm_s:
        return OperationChoice(Parts.WHOLE)
    if costs.is_grouped:
        mesh = (costs.num_nodes, costs.in_node)
        if costs.free_s > costs.inter_s:
            parts = Parts.INTER_FIRST
        elif costs.chain_s / costs.num_nodes > costs.in_node * costs.inter_s:
            parts = Parts.INTRA_FIRST
        else:
            parts = Parts.INTRA_FIRST_FINER
        return OperationChoice(parts, granularity(CollectiveKind.ALL_GATHER, mesh, ORDERS[parts]))
    if costs.free_s <= 0:
        return even(MAX_CHUNKS)
    ratio = costs.comm_s / costs.free_s
    return even(min(floor(ratio) if printed else max(2, ceil(ratio)), MAX_CHUNKS))


@dataclass(frozen=True, slots=True)
class CommPart:
    """A part of a collective on link `link`, which brings a share of the result; `after` is a part that it needs."""

    link: int
    seconds: float
    share: float
    after: int | None = None


def end_s(parts: Sequence[CommPart], chain_s: float, free_s: float, piece_overhead_s: float = 0.0) -> float:
    """When the chain has ended: parts in order on their links, then free computations, then each share of the chain."""
    link_free: dict[int, float] = {}
    ends: list[float] = []
    computed = free_s
    arrivals = []
    for part in parts:
        start = max(link_free.get(part.link, 0.0), 0.0 if part.after is None else ends[part.after])
        ends.append(start + part.seconds)
        link_free[part.link] = ends[-1]
        if part.share:
            arrivals.append((ends[-1], part.share))
    for arrival, share in sorted(arrivals):
        computed = max(computed, arrival) + share * chain_s + piece_overhead_s
    return max([computed, *ends])
