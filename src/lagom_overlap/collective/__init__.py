"""One collective call, the knobs it can be run with, and the names by which a saved configuration finds it again."""

from lagom_overlap.collective.call import Collective, CollectiveKind
from lagom_overlap.collective.config import Algorithm, CommConfig, Protocol, Transport
from lagom_overlap.collective.identity import CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.collective.slices import chunk_bytes_of_slice, slices_per_chunk
from lagom_overlap.collective.space import ConfigSpace, Subspace

__all__ = [
    "Algorithm",
    "Collective",
    "CollectiveKind",
    "CommConfig",
    "CommunicatorId",
    "ConfigKey",
    "ConfigSpace",
    "ConfigTable",
    "Protocol",
    "Subspace",
    "Transport",
    "chunk_bytes_of_slice",
    "slices_per_chunk",
]
