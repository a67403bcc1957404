"""Collectives that copy engines carry: no SM, no channel, bytes straight from buffer to buffer.

Source of what exists: NCCL 2.30.7, src/ce_coll.cc: all-gather and all-to-all (gather and scatter too), since CUDA 12.5,
among ranks that all reach each other over NVLink, with buffers registered as symmetric windows. Each rank waits for its
peers, copies its part to each of them, and waits again. NCCL never chooses it by size: the caller's registration does.

Assumed, not measured: a wait costs what NCCL's table gives one Simple hop over NVLink twice (a flag
there, a flag back), and the copies carry what a Simple ring carries past each rank. No FIFO is touched, so a copy
engine's memory traffic is one read and one write of the bytes that travel.
"""

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.constants import load_constants
from lagom_overlap.cost.nccl.topology import PathType, Topology
from lagom_overlap.cost.nccl.wire import WireTerms
from lagom_overlap.hardware import LinkKind

_COPYABLE = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
_WAITS = 2
"""One before the copies and one after."""
_HOPS_PER_WAIT = 2
"""A flag there and a flag back."""


def copy_engine_available(kind: CollectiveKind, topology: Topology) -> bool:
    """Whether copy engines can carry a kind: a copy without arithmetic, all ranks on one node's NVLink."""
    return kind in _COPYABLE and topology.num_nodes == 1 and topology.ring.intra_type is PathType.NVL


def copy_engine_limits(collective: Collective, topology: Topology) -> WireTerms:
    """The terms of a collective on copy engines.

    Raises:
        ValueError: if copy engines cannot carry it, or its ranks are not the topology's.
    """
    if collective.num_ranks != topology.num_ranks or not copy_engine_available(collective.kind, topology):
        raise ValueError(
            f"copy engines do not carry {collective.kind} of {collective.num_ranks} ranks on {topology.name!r}; "
            f"they carry {' and '.join(_COPYABLE)} of all ranks of one node over NVLink"
        )
    hop = load_constants().hop_s(LinkKind.NVLINK, Algorithm.RING, Protocol.SIMPLE)
    return WireTerms(fixed_s=0.0, scaled_s=_WAITS * _HOPS_PER_WAIT * hop, wire_bytes=collective.wire_bytes)
