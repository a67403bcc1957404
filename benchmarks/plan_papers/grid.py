"""A cell of the papers' grids on a step built from a model's shapes."""

from dataclasses import dataclass

from lagom_overlap.hardware import Cluster
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import HALF
from lagom_overlap.workload.step import Unit, program_step
from plan_papers.judged import times_of

SEQ_LEN = 2048
LAYERS_AHEAD = 3
MATRICES = 5
"""Matrices of a gated layer: gathers of that many matrices are one layer's."""


@dataclass(frozen=True, slots=True)
class Grid:
    """One cell of Centauri's figures."""

    model: TransformerModel
    cluster: Cluster
    layout: ParallelLayout
    work: SearchBudget

    def problem(self, unit: Unit = Unit.LAYER) -> PlanProblem:
        """The step; gathers reach three layers ahead."""
        step = program_step(
            self.model,
            self.layout,
            seq_len=SEQ_LEN,
            gpus_per_node=self.cluster.gpus_per_node,
            unit=unit,
            precision=HALF,
        )
        depth = LAYERS_AHEAD * (MATRICES if unit is Unit.MATRIX else 1)
        times = times_of(self.cluster)
        return PlanProblem(iteration=step, cluster=self.cluster, times=times, prefetch=depth, work=self.work)


def sharded(data: int, micro_batch: int, *, stage: int = 3, batches: int = 1, replicate: int = 1) -> ParallelLayout:
    """Data-parallel ranks with a ZeRO stage; gradients travel in 2 bytes."""
    return ParallelLayout(
        data=data,
        zero_stage=stage,
        replicate=replicate,
        micro_batch=micro_batch,
        global_batch=data * micro_batch * batches,
    )
