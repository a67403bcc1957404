"""Streaming multiprocessors that communication takes in Megatron's ways of running it.

Source: Megatron-LM at d98e8a6 (Megatron-FSDP's documentation of `nccl_ub`), as the specification reads it (planners,
section 3, point 7). The notes print 4 -> 1 and 16 -> 6 as without and with userbuffers; they are without and with
SHARP, both with registered buffers.
"""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError


class Fabric(StrEnum):
    """The links of a group."""

    NVLINK = "nvlink"
    NVLINK_AND_NETWORK = "nvlink_and_network"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class _Counts:
    all_gather: int
    reduce_scatter: int


_USERBUFFERS = {
    (Fabric.NVLINK, False): _Counts(4, 5),
    (Fabric.NVLINK_AND_NETWORK, False): _Counts(16, 16),
    (Fabric.NVLINK_AND_NETWORK, True): _Counts(6, 6),
    (Fabric.NETWORK, False): _Counts(1, 4),
    (Fabric.NETWORK, True): _Counts(1, 1),
}
POINT_TO_POINT_SMS = (1, 4)
"""Fewest and most of NCCL's point-to-point."""
UCC_SMS = 0
"""UCC's point-to-point leaves the SMs alone."""
COPY_ENGINE_SMS = 0
"""A transfer by copy engine, as userbuffers inside a node use for gathers, takes none."""


def userbuffer_sms(kind: CollectiveKind, fabric: Fabric, *, sharp: bool) -> int:
    """SMs of a gather or scatter from registered buffers.

    Raises:
        JobError: if the collective is neither, or SHARP is asked of NVLink alone.
    """
    if kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        raise JobError(f"userbuffers: {kind} has no table, only all_gather and reduce_scatter have")
    counts = _USERBUFFERS.get((fabric, sharp))
    if counts is None:
        raise JobError(f"userbuffers: SHARP reduces in the network's switches, {fabric} has none")
    return counts.all_gather if kind is CollectiveKind.ALL_GATHER else counts.reduce_scatter
