"""A published training step: one job that somebody ran, with its measured throughput."""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import Precision

COLUMNS: Final = ("framework", "model", "gpu_type", "gpus", "global_batch", "seq")
"""What a table of such jobs must have; a row needs more (degrees, precision, something measured), or is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One job and its measured iteration time; `group` and `family` are how errors are gathered and left out."""

    line: int
    group: str
    family: str
    what: str
    model: TransformerModel
    layout: ParallelLayout
    seq_len: int
    cluster: Cluster
    framework: str
    precision: Precision
    measured_s: float
    graphed: bool = False
    note: str = ""

    @property
    def job(self) -> tuple[object, ...]:
        """What ran, whoever published it and under which release: rows that agree in it measure the same job."""
        return self.framework, self.model, self.layout, self.seq_len, self.cluster, self.precision, self.graphed
