"""One collective call: what is moved between how many ranks."""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.errors import JobError


class CollectiveKind(StrEnum):
    """The collectives we know by name."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SEND_RECV = "send_recv"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over `num_ranks` ranks.

    `num_bytes` is the size of the *whole* tensor as NCCL's tuner sees it: the gathered tensor of an all-gather, the
    tensor before scattering of a reduce-scatter, the buffer of an all-reduce, one rank's send buffer of an all-to-all.
    `num_nodes` is how many nodes the group spans, evenly; None where its ranks are consecutive and fill nodes in order
    (a data-parallel group of one GPU per node has as many nodes as ranks).
    """

    kind: CollectiveKind
    num_bytes: int
    num_ranks: int
    num_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise JobError(f"{self.kind}: bytes is {self.num_bytes}, must be at least 1")
        if self.num_ranks < 2:
            raise JobError(f"{self.kind}: ranks is {self.num_ranks}, must be at least 2")
        if self.num_nodes is not None and (self.num_nodes < 1 or self.num_ranks % self.num_nodes):
            raise JobError(f"{self.kind}: nodes is {self.num_nodes}, must divide the {self.num_ranks} ranks")

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends in a ring: 2(n-1)/n S for an all-reduce, (n-1)/n S where parts move, else S."""
        n = self.num_ranks
        match self.kind:
            case CollectiveKind.ALL_REDUCE:
                return 2 * (n - 1) / n * self.num_bytes
            case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
                return (n - 1) / n * self.num_bytes
            case _:
                return float(self.num_bytes)
