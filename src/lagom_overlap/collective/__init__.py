"""One collective call, its knobs, those of the concurrent computation, and the names that a saved setting goes by."""

from lagom_overlap.collective.call import Collective, CollectiveKind, KindTraits, distinct
from lagom_overlap.collective.config import (
    Algorithm,
    CommConfig,
    Protocol,
    Transport,
    chunk_bytes_of_slice,
    slices_per_chunk,
)
from lagom_overlap.collective.launch import (
    NO_LAUNCHES,
    UNTOUCHED_LAUNCH,
    LaunchConfig,
    LaunchedAssignment,
    LaunchOrder,
    LaunchScope,
    LaunchSpace,
    StreamPriority,
    launch_of,
    launched,
    one_launch,
)
from lagom_overlap.collective.sites import CallCycle
from lagom_overlap.collective.size_class import class_bytes, class_range
from lagom_overlap.collective.space import (
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    SpaceLimits,
    Subspace,
    common_space,
)

__all__ = [
    "NO_LAUNCHES",
    "UNTOUCHED_LAUNCH",
    "Algorithm",
    "CallCycle",
    "Collective",
    "CollectiveKind",
    "CommConfig",
    "CommunicatorId",
    "ConfigKey",
    "ConfigSpace",
    "ConfigTable",
    "KindTraits",
    "LaunchConfig",
    "LaunchOrder",
    "LaunchScope",
    "LaunchSpace",
    "LaunchedAssignment",
    "Protocol",
    "SpaceLimits",
    "StreamPriority",
    "Subspace",
    "Transport",
    "chunk_bytes_of_slice",
    "class_bytes",
    "class_range",
    "common_space",
    "distinct",
    "launch_of",
    "launched",
    "one_launch",
    "slices_per_chunk",
]
