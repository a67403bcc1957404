"""How a model is cut over GPUs: degrees, pipeline stages and their schedule, what one GPU must hold."""

from lagom_overlap.workload.parallel.layout import (
    AttentionKernel,
    Dispatcher,
    GraphModule,
    ParallelLayout,
    ParallelTable,
    PipelineSchedule,
    Recompute,
    RecomputeModule,
)
from lagom_overlap.workload.parallel.memory import StageMemory, stage_memory
from lagom_overlap.workload.parallel.schedule import Slot, stage_slots
from lagom_overlap.workload.parallel.stage import StagePlan, plan_stages

__all__ = [
    "AttentionKernel",
    "Dispatcher",
    "GraphModule",
    "ParallelLayout",
    "ParallelTable",
    "PipelineSchedule",
    "Recompute",
    "RecomputeModule",
    "Slot",
    "StageMemory",
    "StagePlan",
    "plan_stages",
    "stage_memory",
    "stage_slots",
]
