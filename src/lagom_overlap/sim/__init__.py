"""Event simulation: a workload and a cost model become a timeline."""

from lagom_overlap.sim.dispatch import DispatchSimulator
from lagom_overlap.sim.group import GroupSimulator, GroupTimes
from lagom_overlap.sim.iteration import IterationSimulator, simulate_iteration

__all__ = ["DispatchSimulator", "GroupSimulator", "GroupTimes", "IterationSimulator", "simulate_iteration"]
