"""What one GPU computes and sends in an iteration under data, tensor, sequence, expert and pipeline parallelism."""

from lagom_overlap.workload.parallel.layer import LayerPasses, layer_passes
from lagom_overlap.workload.parallel.layout import ParallelLayout, Recompute, Schedule
from lagom_overlap.workload.parallel.memory import StageMemory, stage_memory
from lagom_overlap.workload.parallel.schedule import Slot, stage_slots
from lagom_overlap.workload.parallel.stage import StagePlan, plan_stages
from lagom_overlap.workload.parallel.steps import Access, BatchedGemm, CommStep, ComputeStep, GroupKind, Pass, Touch

__all__ = [
    "Access",
    "BatchedGemm",
    "CommStep",
    "ComputeStep",
    "GroupKind",
    "LayerPasses",
    "ParallelLayout",
    "Pass",
    "Recompute",
    "Schedule",
    "Slot",
    "StageMemory",
    "StagePlan",
    "Touch",
    "layer_passes",
    "plan_stages",
    "stage_memory",
    "stage_slots",
]
