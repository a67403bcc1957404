"""Our planner: bounds, portfolio, steady state, cuts and windows, until the bound or the end of the budget."""

from lagom_overlap.planners.ours.planner import Ours

__all__ = ["Ours"]
