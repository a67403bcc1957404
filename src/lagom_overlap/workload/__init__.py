"""What one training iteration does: operators on streams, overlap groups, named models."""

from lagom_overlap.workload.iteration import Buffer, Iteration
from lagom_overlap.workload.ops import (
    Access,
    Attention,
    CommOp,
    CompOp,
    Gemm,
    Issuer,
    Kernel,
    MemoryBound,
    Op,
    Origin,
    Phase,
    Work,
)
from lagom_overlap.workload.overlap import OverlapGroup, find_overlap_groups
from lagom_overlap.workload.sharding import Combine, Gather, Reduce, ShardSpec, TensorUse

__all__ = [
    "Access",
    "Attention",
    "Buffer",
    "Combine",
    "CommOp",
    "CompOp",
    "Gather",
    "Gemm",
    "Issuer",
    "Iteration",
    "Kernel",
    "MemoryBound",
    "Op",
    "Origin",
    "OverlapGroup",
    "Phase",
    "Reduce",
    "ShardSpec",
    "TensorUse",
    "Work",
    "find_overlap_groups",
]
