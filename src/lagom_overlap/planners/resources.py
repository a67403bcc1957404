"""Which part of the machine an operator occupies: the streaming multiprocessors, a link, a copy path.

Spec, planners section 0.2: one task at a time on each resource. That is one compute stream and one NCCL stream per
network; two collectives that share a link never run together, two on different links do. Copies that a framework issues
on a stream of their own (FSDP2's copy-in of a gather) do not queue behind computations: for the search they run next to
them at no cost, and what they take from the machine is in the simulation with contention that judges every plan.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload import CommOp, Iteration, MemoryBound, Op
from lagom_overlap.workload.streams import COMPUTE, COPY_ENGINE


class Resource(StrEnum):
    """What one task at a time can occupy."""

    COMPUTE = "compute"
    INTRA_LINK = "intra_link"
    INTER_LINK = "inter_link"
    COPY_ENGINE = "copy_engine"
    SIDE_STREAM = "side_stream"


def compute_stream(iteration: Iteration) -> str:
    """The stream of an iteration's computations: that of most of them, for copies may be on others."""
    streams = Counter(op.stream for op in iteration.computations)
    return streams.most_common(1)[0][0] if streams else COMPUTE


def resource_of(op: Op, cluster: Cluster, groups: Mapping[str, tuple[int, ...]], compute: str = COMPUTE) -> Resource:
    """What an operator occupies; a collective the network if its group spans nodes, else the links inside the node.

    `compute` is the stream of computations; copies on another stream do not queue with them.

    `groups` are the global ranks of each communicator, by description; nodes hold consecutive ranks. A group that is
    not listed spans the nodes that its collective says, or else those that consecutive ranks fill.

    Raises:
        JobError: if a rank lies outside the cluster, or a listed group is not of its collective's size.
    """
    if not isinstance(op, CommOp):
        if op.stream == COPY_ENGINE:
            return Resource.COPY_ENGINE
        on_side_stream = op.stream != compute and isinstance(op.work, MemoryBound)
        return Resource.SIDE_STREAM if on_side_stream else Resource.COMPUTE
    return Resource.INTER_LINK if _num_nodes(op, cluster, groups) > 1 else Resource.INTRA_LINK


def _num_nodes(op: CommOp, cluster: Cluster, groups: Mapping[str, tuple[int, ...]]) -> int:
    call = op.collective
    ranks = groups.get(op.communicator)
    if ranks is None or call.num_nodes is not None:
        return call.num_nodes if call.num_nodes is not None else cluster.num_nodes_of(call.num_ranks)
    if len(ranks) != call.num_ranks:
        raise JobError(
            f"{op.name}: {call.num_ranks} ranks, but group {op.communicator!r} lists {len(ranks)}: they must be equal"
        )
    outside = [rank for rank in ranks if not 0 <= rank < cluster.num_gpus]
    if outside:
        raise JobError(
            f"group {op.communicator!r}: rank {outside[0]} lies outside cluster {cluster.name!r}"
            f" of {cluster.num_gpus} GPUs"
        )
    return len({rank // cluster.gpus_per_node for rank in ranks})
