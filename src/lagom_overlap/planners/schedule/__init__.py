"""Scheduling of task graphs: bounds, simulation of in-order streams, checks, schedule generation."""

from lagom_overlap.planners.schedule.bounds import Bounds, bounds_of, lower_bound
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.of_problem import reorder_of, task_graph
from lagom_overlap.planners.schedule.simulate import ScheduleOverlap, check, decode, overlap_of, simulate

__all__ = [
    "Bounds",
    "Schedule",
    "ScheduleOverlap",
    "TaskGraph",
    "bounds_of",
    "check",
    "decode",
    "lower_bound",
    "overlap_of",
    "reorder_of",
    "simulate",
    "task_graph",
]
