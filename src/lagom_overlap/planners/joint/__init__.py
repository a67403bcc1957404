"""Plan and parameters as one problem: order, cuts and the collectives' settings chosen under contention."""

from lagom_overlap.planners.joint.planner import Joint, JointPlan

__all__ = ["Joint", "JointPlan"]
