"""Training steps of named models, as their frameworks issue them: one builder for every verb."""

from lagom_overlap.workload.step.build import StepBuilder, build_step, program_step
from lagom_overlap.workload.step.releases import changes_of, rules_in_release
from lagom_overlap.workload.step.rules import (
    DDP,
    DEEPSPEED,
    FSDP1,
    FSDP2,
    MEGATRON,
    MEGATRON_DEEPSPEED,
    PROGRAM_ORDER,
    RULES,
    IssueRules,
    load_rules,
)
from lagom_overlap.workload.step.traffic import Accumulation
from lagom_overlap.workload.step.units import Unit

__all__ = [
    "DDP",
    "DEEPSPEED",
    "FSDP1",
    "FSDP2",
    "MEGATRON",
    "MEGATRON_DEEPSPEED",
    "PROGRAM_ORDER",
    "RULES",
    "Accumulation",
    "IssueRules",
    "StepBuilder",
    "Unit",
    "build_step",
    "changes_of",
    "load_rules",
    "program_step",
    "rules_in_release",
]
