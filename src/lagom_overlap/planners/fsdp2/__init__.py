"""FSDP2's own settings as a plan: what FSDP2 would issue with them, and which of them gain."""

from lagom_overlap.planners.fsdp2.planner import Fsdp2

__all__ = ["Fsdp2"]
