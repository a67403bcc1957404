"""Event simulation with contention (`core.py`): a workload and a cost model become a timeline."""

from lagom_overlap.sim.group import GroupSimulator, GroupTimes
from lagom_overlap.sim.iteration import IterationSimulator, simulate_iteration

__all__ = ["GroupSimulator", "GroupTimes", "IterationSimulator", "simulate_iteration"]
