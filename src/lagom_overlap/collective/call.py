"""One collective call: what is moved between how many ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """What a kind does with the whole tensor of S bytes, whoever runs it on n ranks.

    `takes_part`: each rank brings one n-th of it (else all of it); `leaves_part`: each rank ends with one n-th.
    `adds`: elements are summed, so the order changes the result. `is_rooted`: it goes from one rank to all, or from all
    to one, along a chain. `is_point_to_point`: NCCL runs it as sends and receives, which have no algorithm. `passes`:
    how often a ring carries (n-1)/n S past each rank; 0: S passes each rank once.
    """

    takes_part: bool = False
    leaves_part: bool = False
    adds: bool = False
    is_rooted: bool = False
    is_point_to_point: bool = False
    passes: int = 0

    @property
    def is_in_parts(self) -> bool:
        """Whether a rank has one n-th of the tensor before or after, and all of it on the other side."""
        return self.takes_part or self.leaves_part


class CollectiveKind(StrEnum):
    """The collectives we know by name."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SEND_RECV = "send_recv"

    @property
    def traits(self) -> KindTraits:
        """What it does with the whole tensor."""
        return _TRAITS[self]


_TRAITS: Final[Mapping[CollectiveKind, KindTraits]] = {
    CollectiveKind.ALL_GATHER: KindTraits(takes_part=True, passes=1),
    CollectiveKind.REDUCE_SCATTER: KindTraits(leaves_part=True, adds=True, passes=1),
    CollectiveKind.ALL_REDUCE: KindTraits(adds=True, passes=2),
    CollectiveKind.ALL_TO_ALL: KindTraits(is_point_to_point=True, passes=1),
    CollectiveKind.BROADCAST: KindTraits(is_rooted=True),
    CollectiveKind.REDUCE: KindTraits(adds=True, is_rooted=True),
    CollectiveKind.SEND_RECV: KindTraits(is_point_to_point=True),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over `num_ranks` ranks.

    `num_bytes` is the size of the *whole* tensor as NCCL's tuner sees it: the gathered tensor of an all-gather, the
    tensor before scattering of a reduce-scatter, the buffer of an all-reduce, one rank's send buffer of an all-to-all.
    `num_nodes` is how many nodes the group spans, evenly; None where its ranks are consecutive and fill nodes in order
    (a data-parallel group of one GPU per node has as many nodes as ranks). `copies` is set for an all-to-all that
    merges rows (DeepEP, HybridEP) and is not NCCL's: each row is meant for `copies` experts, spread evenly over the
    ranks, and is sent once to each rank that has one of them; `num_bytes` counts it that way. 0: an ordinary
    collective. `rank_bytes` keeps that count where `num_bytes` is what crosses the wire between nodes (`merged_over`);
    0: not placed.
    """

    kind: CollectiveKind
    num_bytes: int
    num_ranks: int
    num_nodes: int | None = None
    copies: int = 0
    rank_bytes: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise JobError(f"{self.kind}: bytes is {self.num_bytes}, must be at least 1")
        if self.num_ranks < 2:
            raise JobError(f"{self.kind}: ranks is {self.num_ranks}, must be at least 2")
        if self.num_nodes is not None and (self.num_nodes < 1 or self.num_ranks % self.num_nodes):
            raise JobError(f"{self.kind}: nodes is {self.num_nodes}, must divide the {self.num_ranks} ranks")

    def merged_over(self, num_nodes: int) -> "Collective":
        """The call as it crosses the wire with its ranks on `num_nodes` nodes: a row goes once to each node.

        The traffic inside the nodes afterwards is not counted: NVLink is faster by more than it has to carry. An
        earlier placement of the call is ignored.
        """
        if not self.copies:
            return self
        rank_bytes = self.rank_bytes or self.num_bytes
        share = distinct(num_nodes, self.copies) / distinct(self.num_ranks, self.copies) if num_nodes > 1 else 1.0
        return replace(self, num_bytes=max(1, round(rank_bytes * share)), rank_bytes=rank_bytes)

    @property
    def unplaced(self) -> "Collective":
        """The same call without a placement on nodes."""
        return replace(self, num_bytes=self.rank_bytes or self.num_bytes, num_nodes=None, rank_bytes=0)

    @property
    def is_nccl(self) -> bool:
        """Whether NCCL runs it, whose settings therefore reach it."""
        return not self.copies

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends in a ring: 2(n-1)/n S for an all-reduce, (n-1)/n S where parts move, else S."""
        n, passes = self.num_ranks, self.kind.traits.passes
        return passes * (n - 1) / n * self.num_bytes if passes else float(self.num_bytes)


def distinct(num_places: int, num_draws: int) -> float:
    """The mean number of `num_places` that `num_draws` uniform draws hit: 8 experts lie on 5.25 of 8 ranks."""
    return float(num_places * (1.0 - (1.0 - 1.0 / num_places) ** num_draws))
