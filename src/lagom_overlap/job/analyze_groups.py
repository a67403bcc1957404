"""The overlap groups of a measured timeline as `lagom analyze --json` prints them. Format: docs/formats_analyze.md."""

from collections.abc import Sequence

import msgspec

from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.trace.gpu_trace import NS_PER_S


class GroupCommJson(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a group; it starts when that many of the group's kernels have ended."""

    kind: str
    communicator: str
    bytes: int
    channels: int
    starts_after: int
    median_s: float


class GroupJson(msgspec.Struct, frozen=True, kw_only=True):
    """One overlap group, medians over its occurrences in all steps and ranks."""

    name: str
    bound: str
    agreement: float
    num_occurrences: int
    per_step: float
    num_kernels: int
    makespan_s: float
    comp_s: float
    comm_s: float
    exposed_s: float
    collectives: list[GroupCommJson]


def groups_json(groups: Sequence[TraceGroup]) -> list[GroupJson]:
    """The groups in order of first occurrence."""
    return [
        GroupJson(
            name=group.name,
            bound=group.bound.value,
            agreement=group.agreement,
            num_occurrences=group.num_occurrences,
            per_step=group.per_step,
            num_kernels=len(group.kernel_keys),
            makespan_s=group.makespan_ns / NS_PER_S,
            comp_s=group.comp_ns / NS_PER_S,
            comm_s=group.comm_ns / NS_PER_S,
            exposed_s=group.exposed_ns / NS_PER_S,
            collectives=[
                GroupCommJson(
                    kind=comm.key.op,
                    communicator=comm.key.communicator,
                    bytes=comm.key.num_bytes,
                    channels=comm.key.num_channels,
                    starts_after=comm.starts_after,
                    median_s=comm.median_ns / NS_PER_S,
                )
                for comm in group.comms
            ],
        )
        for group in groups
    ]
