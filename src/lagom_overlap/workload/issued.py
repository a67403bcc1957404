"""One rank's training step as operators: as a planner may reorder it, and as the framework issues it.

Two graphs over the same operators: `iteration` holds every data dependence and no other (`is_dataflow`), so that a
planner may change the order; `issued` holds, besides, what the framework waits for (stream and event waits, one
communicator at a time): simulated as it stands, it is the step before any plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lagom_overlap.collective import Collective
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStep:
    """One step of one rank.

    `waits` are the framework's waits beyond the data flow: operator -> names of operators issued before it. `groups`
    are the global ranks of each communicator that `CommOp.communicator` names. `notes` say what was left out.
    """

    iteration: Iteration
    num_ranks: int
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    waits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", MappingProxyType(dict(self.groups)))
        object.__setattr__(self, "waits", MappingProxyType(dict(self.waits)))
        if self.num_ranks < 1:
            raise JobError(f"step {self.iteration.name!r}: ranks is {self.num_ranks}, must be at least 1")
        for comm in self.iteration.comms:
            ranks = self.groups.get(comm.communicator)
            if ranks is None:
                raise JobError(f"step {self.iteration.name!r}: no ranks are given for {comm.communicator!r}")
            if len(ranks) != comm.collective.num_ranks:
                raise JobError(
                    f"step {self.iteration.name!r}: {comm.name!r} runs over {comm.collective.num_ranks} ranks, "
                    f"communicator {comm.communicator!r} has {len(ranks)}"
                )
        for name, ranks in self.groups.items():
            if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.num_ranks for rank in ranks):
                raise JobError(
                    f"step {self.iteration.name!r}: ranks of {name!r} are {list(ranks)},"
                    f" must be different ones of 0 to {self.num_ranks - 1}"
                )

    @property
    def issued(self) -> Iteration:
        """The step as the framework runs it: the data flow and its waits; not to be reordered."""

        def with_waits(op: Op) -> Op:
            waits = [name for name in self.waits.get(op.name, ()) if name not in op.deps]
            return replace(op, deps=(*op.deps, *waits)) if waits else op

        return replace(self.iteration, ops=tuple(with_waits(op) for op in self.iteration.ops), is_dataflow=False)

    def placed_on(self, cluster: Cluster) -> "IssuedStep":
        """The same step with each collective's number of nodes as its ranks lie on `cluster`, nodes filled in order.

        Raises:
            JobError: if the cluster has fewer GPUs than the capture has ranks.
        """
        cluster.num_nodes_of(max(self.num_ranks, 1))
        return self.on_nodes_of(cluster.gpus_per_node)

    def on_nodes_of(self, gpus_per_node: int) -> "IssuedStep":
        """The same with nodes of `gpus_per_node` GPUs, as many as it takes."""
        ops = ops_on_nodes(self.iteration.ops, self.groups, gpus_per_node)
        if ops == self.iteration.ops:
            return self
        return replace(self, iteration=replace(self.iteration, ops=ops))


def ops_on_nodes(ops: Sequence[Op], groups: Mapping[str, tuple[int, ...]], gpus_per_node: int) -> tuple[Op, ...]:
    """The operators with each collective's number of nodes as the ranks of its group lie on nodes of that size."""
    nodes = {name: _num_nodes(ranks, gpus_per_node) for name, ranks in groups.items()}
    moved: dict[Collective, Collective] = {}
    placed: dict[int, CommOp] = {}

    def on_nodes(op: CommOp) -> CommOp:
        call = op.collective
        if call.copies:
            call = call.merged_over(len({rank // gpus_per_node for rank in groups[op.communicator]}))
        if call.num_nodes != nodes[op.communicator]:
            call = replace(call, num_nodes=nodes[op.communicator])
        return op if call is op.collective else replace(op, collective=moved.setdefault(call, call))

    for op in ops:
        if isinstance(op, CommOp) and id(op) not in placed:
            placed[id(op)] = on_nodes(op)
    return tuple([placed.get(id(op), op) for op in ops])


def _num_nodes(ranks: tuple[int, ...], gpus_per_node: int) -> int | None:
    """Nodes that `ranks` span, at least as many as hold them evenly; None where they are consecutive."""
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return None
    nodes = len({rank // gpus_per_node for rank in ranks})
    while len(ranks) % nodes:
        nodes += 1
    return nodes
