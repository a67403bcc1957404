"""Training steps of named models, as their frameworks issue them: one builder for every verb."""

from lagom_overlap.workload.step.build import StepBuilder, build_step, program_step
from lagom_overlap.workload.step.framework_file import framework_names
from lagom_overlap.workload.step.parameter_units import Unit
from lagom_overlap.workload.step.rules import (
    PROGRAM_ORDER,
    IssueRules,
    changes_of,
    load_rules,
    rules_in_release,
)
from lagom_overlap.workload.step.traffic import Accumulation

__all__ = [
    "PROGRAM_ORDER",
    "Accumulation",
    "IssueRules",
    "StepBuilder",
    "Unit",
    "build_step",
    "changes_of",
    "framework_names",
    "load_rules",
    "program_step",
    "rules_in_release",
]
