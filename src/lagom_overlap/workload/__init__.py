"""What one training iteration does: operators on streams, overlap groups, named models."""

from lagom_overlap.workload.fsdp import fsdp_iteration
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel, load_model, model_names
from lagom_overlap.workload.ops import Attention, CommOp, CompOp, Gemm, Kernel, MemoryBound, Work
from lagom_overlap.workload.overlap import OverlapGroup, find_overlap_groups

__all__ = [
    "Attention",
    "CommOp",
    "CompOp",
    "Gemm",
    "Iteration",
    "Kernel",
    "MemoryBound",
    "OverlapGroup",
    "TransformerModel",
    "Work",
    "find_overlap_groups",
    "fsdp_iteration",
    "load_model",
    "model_names",
]
