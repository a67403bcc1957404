"""Training steps of named models with every data dependence, shard axes and buffers: what planners reorder."""

from lagom_overlap.workload.dataflow.step import dataflow_iteration
from lagom_overlap.workload.dataflow.units import Unit

__all__ = ["Unit", "dataflow_iteration"]
