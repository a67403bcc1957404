"""The workloads that the papers measure: the Lagom paper's Table 2, and what the Megatron notes say is hidden."""

from lagom_overlap.papers.workloads.halves import domino_iteration, dual_batch_iteration
from lagom_overlap.papers.workloads.table2 import (
    PaperStep,
    PaperStrategy,
    PaperWorkload,
    fsdp_iteration,
    load_table2,
    paper_step,
)

__all__ = [
    "PaperStep",
    "PaperStrategy",
    "PaperWorkload",
    "domino_iteration",
    "dual_batch_iteration",
    "fsdp_iteration",
    "load_table2",
    "paper_step",
]
